"""Tasks of exercise 06: both schedulers' core decisions, three defects of V0, and what waiting costs."""

from __future__ import annotations

from collections.abc import Callable

from exercises.grader import Task, WrongAnswer
from exercises.tasks.ex06_checks import (
    check_marking,
    check_measure,
    check_next,
    check_phases,
    check_places,
    check_prefix,
    check_remembering,
    check_scheduler,
)

OTHER_SCHEDULER = """
class MyScheduler(SchedulerBase):
    def num_new_tokens(self, request, num_computed_tokens, budget):
        limits = [request.num_tokens - num_computed_tokens]
        if len(self.requests) != 1 and self.config.long_prefill_token_threshold > 0:
            limits.append(self.config.long_prefill_token_threshold)
        may_cut = self.config.enable_chunked_prefill or request in self.running
        return 0 if min(limits) > budget and not may_cut else min(*limits, budget)

    def victim(self):
        order = sorted(self.running, key=lambda r: (r.priority, r.arrival))
        return (order if self.config.policy == "priority" else self.running)[-1]

    def plan(self, step):
        index = 0
        while index < len(self.running):
            request = self.running[index]
            index += 1
            wanted = self.num_new_tokens(request, request.num_computed_tokens, step.budget)
            if wanted == 0:
                continue
            while not step.grow(request, wanted):
                loser = self.victim()
                place = self.running.index(loser)
                step.take_from(loser)
                if place < index:
                    index -= 1
                if loser is request:
                    break
        if step.has_preempted:
            return
        while len(self.waiting) and not step.is_full and step.budget > 0:
            head = self.waiting.peek()
            wanted = self.num_new_tokens(head, step.find(head), step.budget)
            if wanted == 0 or step.admit(head, wanted) is False:
                return
"""
OTHER_PHASES = """
def phases(step, chunked):
    def decodes():
        lost = step.running()
        if lost == 0 and step.num_swapped > 0:
            step.swap_in()

    if chunked:
        decodes()
        step.prompts()
    elif step.num_swapped > 0 or step.prompts() == 0:
        decodes()
"""
OTHER_REMEMBERING = """
class Remembering(TrackerBase):
    def get_num_cached_tokens(self, seq):
        in_progress = seq.is_prefill and seq.status is not SequenceStatus.WAITING
        if not in_progress or seq.seq_id not in self.answers:
            self.answers[seq.seq_id] = self.find(seq)
        return self.answers[seq.seq_id]
"""
OTHER_PREFIX = """
from itertools import takewhile

def cached_prefix(block_hashes, is_found):
    return sum(1 for _ in takewhile(is_found, block_hashes))
"""
STEPS_BACK = """
def cached_prefix(block_hashes, is_found):
    low, high = 0, len(block_hashes)
    while low < high:
        middle = (low + high) // 2
        if is_found(block_hashes[middle]):
            low = middle + 1
        else:
            high = middle
    while low and not is_found(block_hashes[0]):
        low -= 1
    return low
"""
COUNTS = """
def cached_prefix(block_hashes, is_found):
    return sum(map(bool, map(is_found, block_hashes)))
"""
ONE_SHORT = """
def cached_prefix(block_hashes, is_found):
    for number, block_hash in enumerate(block_hashes):
        if not is_found(block_hash):
            return number
    return max(len(block_hashes) - 1, 0)
"""
OTHER_MARKING = """
class Marking(BlockManager):
    def mark_blocks_as_computed(self, seq, token_chunk_size):
        done, marked = seq.num_computed_tokens + token_chunk_size, []
        for number, block_id in enumerate(self.block_ids(seq), 1):
            if number * self.block_size <= done:
                marked += self.allocator.gpu.mark_blocks_as_computed([block_id])
        return marked
"""
OTHER_MEASURE = """
def _when(record, name):
    found = []
    for number, step in enumerate(record.steps):
        found += [number for mark in step.marks if mark.kind == "append" and mark.request_id == name]
    return found

def longest_gap(record, name):
    when, longest = _when(record, name), 0
    for i in range(1, len(when)):
        longest = max(longest, when[i] - when[i - 1])
    return longest

def first_token(desk, name):
    return 1 + min(_when(desk.record, name)) - desk.arrived[name]

with_gate = 1
without_gate = 8
"""
ADMITS = "        while self.waiting and step.budget and not step.is_full and not step.has_preempted:\n"
OVERTAKES = (
    ("            request = self.waiting.peek()\n", "            request = next(line, None)\n"),
    (ADMITS, "        line = iter(list(self.waiting))\n" + ADMITS),
    (
        "            count = self.num_new_tokens(request, step.find(request), step.budget)\n",
        "            if request is None:\n                break\n"
        "            count = self.num_new_tokens(request, step.find(request), step.budget)\n",
    ),
    (
        "not step.admit(request, count):\n                break",
        "not step.admit(request, count):\n                continue",
    ),
)
RUNNING_LOOP = """\
        for request in list(self.running):
            if not is_running(request):
                continue
            count = self.num_new_tokens(request, request.num_computed_tokens, step.budget)
            while count and is_running(request) and not step.grow(request, count):
                step.take_from(self.victim())
"""
WAITING_LOOP = """\
        while self.waiting and step.budget and not step.is_full and not step.has_preempted:
            request = self.waiting.peek()
            count = self.num_new_tokens(request, step.find(request), step.budget)
            if not count or not step.admit(request, count):
                break"""
PROMPTS_FIRST = (
    (
        RUNNING_LOOP + WAITING_LOOP,
        "        before = list(self.running)\n"
        + WAITING_LOOP
        + "\n"
        + RUNNING_LOOP.replace("list(self.running)", "before"),
    ),
)

TASKS = [
    Task(
        id="06.1",
        kind="predict",
        title="who is in the next step",
        points=10,
        answers={"loses": str, "as_block": int, "shares_b": dict, "shares_c": dict, "first_d": dict},
        check=check_next,
        hints=(
            "Go through the running requests in order. Who is the first that needs a block and finds none?",
            "First come, first served: the last admitted gives way. Priority: the largest (priority, arrival), even "
            "if it had its share. Then nobody is admitted.",
            "a: b gives 8, 6, 5, 4 back in this order. b: low. c: big is its own victim. d: the threshold is not seen "
            "by a request that is alone.",
        ),
        wrong=(
            WrongAnswer("the oldest", "the oldest gives way", edits=(('"b", 8', '"a", 8'),)),
            WrongAnswer("its head", "blocks come back first one first", edits=(('"b", 8', '"b", 4'),)),
            WrongAnswer(
                "last admitted",
                "the last admitted gives way",
                edits=(('{"mid": 1, "high": 1}', '{"mid": 1, "low": 1}'),),
            ),
            WrongAnswer(
                "all three",
                "a share cannot be withdrawn",
                edits=(('{"mid": 1, "high": 1}', '{"mid": 1, "low": 1, "high": 1}'),),
            ),
            WrongAnswer(
                "small comes in",
                "freed blocks go to newcomers",
                edits=(('{"a": 1}', '{"a": 1, "small": 3}'),),
            ),
            WrongAnswer("always cut", "the threshold always holds", edits=(('"c": 30', '"c": 8'),)),
        ),
        other='loses = "b"\nas_block = 4 + 4\nshares_b = dict(high=1, mid=1)\nshares_c = dict(a=1)\n'
        "first_d = dict(c=30, a=8, b=8)",
    ),
    Task(
        id="06.2",
        kind="build",
        title="V1's scheduler",
        points=25,
        answers={"MyScheduler": type},
        check=check_scheduler,
        hints=(
            "Write the running loop first: for each running request, how many tokens, and does it grow?",
            "A loser may stand anywhere in the list, before or after the one that needs blocks. Walk over a copy, "
            "and skip who is not running any more.",
            "While the request still runs and does not grow, take from self.victim(). Then, if nobody was preempted, "
            "peek, find, admit, and stop at the first that gets 0 tokens or is not admitted.",
        ),
        wrong=(
            WrongAnswer(
                "no budget", "the budget is forgotten", edits=(("return min(wish, budget)", "return wish"),)
            ),
            WrongAnswer(
                "all over again",
                "found tokens are computed again",
                edits=(
                    (
                        "        wish = request.num_tokens - num_computed_tokens\n",
                        "        wish = request.num_tokens - request.num_computed_tokens\n",
                    ),
                ),
            ),
            WrongAnswer(
                "always cut", "the threshold always holds", edits=((" and len(self.requests) > 1", ""),)
            ),
            WrongAnswer(
                "cuts anyway",
                "cut although chunking is off",
                edits=(
                    (
                        "        if wish > budget and not is_running(request) "
                        "and not self.config.enable_chunked_prefill:\n"
                        "            return 0\n",
                        "",
                    ),
                ),
            ),
            WrongAnswer(
                "the oldest",
                "the oldest gives way",
                edits=(("return self.running[-1]", "return self.running[0]"),),
            ),
            WrongAnswer(
                "one rule for both",
                "the last admitted gives way",
                edits=(('if self.config.policy == "priority":', "if False:"),),
            ),
            WrongAnswer(
                "upside down",
                "a small number is unimportant",
                edits=(("return max(self.running", "return min(self.running"),),
            ),
            WrongAnswer(
                "admits all the same",
                "freed blocks go to newcomers",
                edits=(
                    (ADMITS, ADMITS.replace(" and not step.has_preempted", "")),
                    (
                        "            request = self.waiting.peek()\n",
                        "            request = next((r for r in self.waiting if not r.num_preemptions), None)\n"
                        "            request = request or self.waiting.peek()\n",
                    ),
                ),
            ),
            WrongAnswer("overtaking", "small ones overtake", edits=OVERTAKES),
            WrongAnswer("V0's order", "prompts first", edits=PROMPTS_FIRST),
            WrongAnswer("no seats", "seats are not counted", edits=((" and not step.is_full", ""),)),
        ),
        other=OTHER_SCHEDULER,
        part="scheduler",
    ),
    Task(
        id="06.3",
        kind="build",
        title="V0's order of phases",
        points=10,
        answers={"phases": Callable},
        check=check_phases,
        hints=(
            "Write down the calls for four cases: with and without chunking, with and without somebody swapped out.",
            "Without chunking an admitted prompt ends the step. Coming back depends on what running() returned.",
            "if not chunked and not step.num_swapped and step.prompts(): return. Then running(), swap_in() if nobody "
            "lost blocks, and with chunking prompts() at the end.",
        ),
        wrong=(
            WrongAnswer(
                "mixed",
                "prompts and decodes in one step",
                edits=(
                    (
                        "    if not chunked and not step.num_swapped and step.prompts():\n        return\n",
                        "    if not chunked and not step.num_swapped:\n        step.prompts()\n",
                    ),
                ),
            ),
            WrongAnswer(
                "pushed aside",
                "newcomers before swapped ones",
                edits=((" and not step.num_swapped and", " and"),),
            ),
            WrongAnswer(
                "comes back",
                "swapped in after a preemption",
                edits=(
                    (
                        "    if not step.running():\n        step.swap_in()",
                        "    step.running()\n    step.swap_in()",
                    ),
                ),
            ),
            WrongAnswer(
                "always prompts first",
                "prompts first",
                source="def phases(step, chunked):\n    if not step.num_swapped and step.prompts():\n        return\n"
                "    if not step.running():\n        step.swap_in()\n",
            ),
            WrongAnswer(
                "always decodes first",
                "decodes first",
                source="def phases(step, chunked):\n    if not step.running():\n        step.swap_in()\n"
                "    step.prompts()\n",
            ),
        ),
        other=OTHER_PHASES,
    ),
    Task(
        id="06.4",
        kind="bug",
        title="the answer of yesterday",
        points=10,
        answers={"Remembering": type},
        check=check_remembering,
        hints=(
            "What can happen to a cached block between two looks at a waiting sequence?",
            "A waiting sequence has no blocks of its own, so looking anew cannot count them.",
            "Look anew also when seq.status is SequenceStatus.WAITING, and keep the answer from the admission on.",
        ),
        wrong=(
            WrongAnswer(
                "never remembers",
                "its own blocks are counted",
                edits=(
                    (
                        "known is None or not seq.is_prefill or seq.status is SequenceStatus.WAITING",
                        "True",
                    ),
                ),
            ),
            WrongAnswer(
                "only less",
                "an answer only shrinks",
                edits=(
                    (
                        "known = self.answers[seq.seq_id] = self.find(seq)",
                        "known = self.answers[seq.seq_id] = min(self.find(seq), 10**6 if known is None else known)",
                    ),
                ),
            ),
            WrongAnswer(
                "while it runs",
                "the first answer is kept while it waits",
                edits=(
                    (
                        "known is None or not seq.is_prefill or seq.status is SequenceStatus.WAITING",
                        "known is None or not known or seq.status is SequenceStatus.RUNNING",
                    ),
                ),
            ),
        ),
        other=OTHER_REMEMBERING,
    ),
    Task(
        id="06.5",
        kind="bug",
        title="after a miss there are only misses",
        points=10,
        answers={"cached_prefix": Callable},
        check=check_prefix,
        hints=(
            "Which blocks does it look at, if there are two?",
            "With a hole in the list no bisection can know what it has not asked.",
            "Walk from the left, and return the number of the first block that is not found.",
        ),
        wrong=(
            WrongAnswer("asks the first", "after a hit everything before it is there", source=STEPS_BACK),
            WrongAnswer("counts", "hits are counted", source=COUNTS),
            WrongAnswer("one short", source=ONE_SHORT, misconception="the last block is left out"),
        ),
        other=OTHER_PREFIX,
    ),
    Task(
        id="06.6",
        kind="bug",
        title="marked too early",
        points=10,
        answers={"Marking": type},
        check=check_marking,
        hints=(
            "Blocks are taken for the whole prompt. Which of them hold keys and values after the first chunk?",
            "Two numbers together say how many tokens are computed when this step is over.",
            "(seq.num_computed_tokens + token_chunk_size) // self.block_size blocks at the head of the table.",
        ),
        wrong=(
            WrongAnswer(
                "the whole table",
                "allocated is computed",
                edits=(("self.block_ids(seq)[:num_full]", "self.block_ids(seq)"),),
            ),
            WrongAnswer(
                "before this step",
                "marked one step late",
                edits=(("(seq.num_computed_tokens + token_chunk_size)", "seq.num_computed_tokens"),),
            ),
            WrongAnswer(
                "this chunk alone",
                "only this chunk counts",
                edits=(("(seq.num_computed_tokens + token_chunk_size)", "token_chunk_size"),),
            ),
            WrongAnswer(
                "rounds up",
                "a block counts when it is begun",
                edits=(
                    (
                        "(seq.num_computed_tokens + token_chunk_size) // self.block_size",
                        "-(-(seq.num_computed_tokens + token_chunk_size) // self.block_size)",
                    ),
                ),
            ),
        ),
        other=OTHER_MARKING,
    ),
    Task(
        id="06.7",
        kind="measure",
        title="what waiting costs",
        points=15,
        answers={"longest_gap": Callable, "first_token": Callable, "with_gate": int, "without_gate": int},
        check=check_measure,
        hints=(
            "Collect the numbers of the steps that have an append mark of this request.",
            "A gap is the difference of two neighbours. The first token counts from desk.arrived[name].",
            "max(after - before for neighbours); when[0] - desk.arrived[name] + 1. Both preemption counts are printed.",
        ),
        wrong=(
            WrongAnswer(
                "in between",
                "steps in between",
                edits=(("max(after - before for", "max(after - before - 1 for"),),
            ),
            WrongAnswer(
                "mean",
                "the mean gap",
                edits=(
                    (
                        "max(after - before for before, after in pairwise(when))",
                        "(when[-1] - when[0]) / (len(when) - 1)",
                    ),
                ),
            ),
            WrongAnswer(
                "from zero",
                "the first step is not counted",
                edits=(("desk.arrived[name] + 1", "desk.arrived[name]"),),
            ),
            WrongAnswer(
                "from the start",
                "counted from the start of the run",
                edits=(("when[0] - desk.arrived[name] + 1", "when[0] + 1"),),
            ),
            WrongAnswer(
                "the other way round", "the gate causes preemptions", edits=(("gate = 1, 8", "gate = 8, 1"),)
            ),
        ),
        other=OTHER_MEASURE,
    ),
    Task(
        id="06.8",
        kind="map",
        title="where it is in vLLM",
        points=10,
        answers={"prompts_first": dict, "chooses_how": dict, "keeps_watermark": dict, "forces_out": dict},
        check=check_places,
        hints=(
            "Each of the four is in V0. Where V1 has nothing to decide, the answer is None.",
            "V1 has no phases and no swap, and a waiting request takes nothing from anybody.",
            "V0: _schedule_default, _preempt, can_allocate, _schedule_priority_preemption. V1: allocate_slots.",
        ),
        wrong=(
            WrongAnswer(
                "phases in V1",
                "V1 has phases",
                edits=(
                    (
                        '"Scheduler._schedule_default", "V1": None',
                        '"Scheduler._schedule_default", "V1": "Scheduler.schedule"',
                    ),
                ),
            ),
            WrongAnswer(
                "swap in V1",
                "V1 swaps",
                edits=(
                    (
                        '"Scheduler._preempt", "V1": None',
                        '"Scheduler._preempt", "V1": "Scheduler._preempt_request"',
                    ),
                ),
            ),
            WrongAnswer(
                "the head takes",
                "waiting requests preempt",
                edits=(
                    (
                        '"Scheduler._schedule_priority_preemption", "V1": None',
                        '"Scheduler._schedule_priority_preemption", "V1": "PriorityRequestQueue"',
                    ),
                ),
            ),
            WrongAnswer(
                "the other policy",
                "chunked prefill is prompts first",
                edits=(('"Scheduler._schedule_default"', '"Scheduler._schedule_chunked_prefill"'),),
            ),
        ),
        other='prompts_first = dict(V1=None, V0="Scheduler._schedule_default")\n'
        'chooses_how = dict(V1=None, V0="Scheduler._preempt")\n'
        'keeps_watermark = dict(V1="KVCacheManager.allocate_slots", V0="SelfAttnBlockSpaceManager.can_allocate")\n'
        'forces_out = dict(V1=None, V0="Scheduler._schedule_priority_preemption")',
    ),
]
