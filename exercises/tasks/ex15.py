"""Tasks of exercise 15."""

from __future__ import annotations

from collections.abc import Callable

from exercises.grader import Task, WrongAnswer
from exercises.tasks.ex15_checks import (
    check_account,
    check_cutting,
    check_measured,
    check_places,
    check_queue,
    check_story,
)

OTHER_ACCOUNT = """
def account(record):
    marks = [mark for _, mark in record.marks()]
    costs = {}
    for name in dict.fromkeys(mark.request_id for mark in marks if mark.kind == "run"):
        last, found, positions = 0, 0, []
        for mark in marks:
            if mark.request_id != name:
                continue
            if mark.kind == "lookup":
                last = mark.facts["hit_tokens"]
            if mark.kind == "admit":
                found += last * mark.facts["admitted"]
            if mark.kind == "run":
                positions += range(mark.facts["start"], mark.facts["start"] + mark.facts["num_tokens"])
        costs[name] = [found, len(positions), len(positions) - len(set(positions))]
    return costs
"""
OTHER_QUEUE = """
class TwoOrders:
    def __init__(self, blocks):
        self.blocks = list(blocks)
        self.was_found = {}

    @property
    def num_free_blocks(self):
        return len(self.blocks)

    def popleft_n(self, n):
        if n < 0 or n > len(self.blocks):
            raise ValueError("so many blocks are not free")
        taken, self.blocks = self.blocks[:n], self.blocks[n:]
        for block in taken:
            self.was_found[block.block_id] = False
        return taken

    def remove(self, block):
        self.blocks.remove(block)
        self.was_found[block.block_id] = True

    def append_n(self, blocks):
        self.blocks += blocks
        self.blocks.sort(key=lambda block: self.was_found.get(block.block_id, False))

    def prepend_n(self, blocks):
        self.blocks = [*blocks, *self.blocks]
        for block in blocks:
            self.was_found[block.block_id] = False

    def __iter__(self):
        return iter(list(self.blocks))
"""
OTHER_MEASURE = """
def measure(num_blocks, engine="v1"):
    record = serve(documents(), engine, num_blocks=num_blocks, max_tokens=1)[1]
    found = sum(each.hit_tokens for each in record.requests())
    return [found, sum(mark.facts["num_tokens"] for _, mark in record.marks() if mark.kind == "run")]
enough = dict(v1=5 * 8 + 1 + 1, v0=5 * 8 + 1)
one_text_less = 0
"""
ADDS = "            rows.setdefault(name, [0, 0, 0])[0] += hit[name]\n"
AGAIN = """\
            rows[name][2] += len(positions & done.setdefault(name, set()))
            done[name] |= positions
"""
UP_TO_THE_FARTHEST = """\
            end = max(positions) + 1
            rows[name][2] += max(min(end, done.get(name, 0)) - min(positions), 0)
            done[name] = max(end, done.get(name, 0))
"""
FOUND_ORDER = "order = self.favourites if block.block_id in self.found else self.others"
USABLE = "usable = request.num_tokens - 1"

TASKS = [
    Task(
        id="15.1",
        kind="predict",
        title="two engines, before you run them",
        points=15,
        answers={"computed_v0": dict, "computed_v1": dict, "tables": dict},
        check=check_story,
        hints=(
            "What is at least left to compute of a prompt that is cached to its end: a token, or a block?",
            "In V1 cay's third block can be found as soon as cay has its slots. In V0 only after the whole step.",
            "The free queue is 4, 5, 6, ... when the three come. bob finds 1 and 2, cay too, and dan one block of "
            "cay's as well.",
        ),
        wrong=(
            WrongAnswer(
                "one token", "V1 gives one token back", edits=(('v1 = {"bob": 4', 'v1 = {"bob": 1'),)
            ),
            WrongAnswer(
                "one block", "V0 gives a whole block back", edits=(('v0 = {"bob": 1', 'v0 = {"bob": 4'),)
            ),
            WrongAnswer(
                "nothing in V0",
                "a full hit leaves nothing to compute",
                edits=(('v0 = {"bob": 1', 'v0 = {"bob": 0'),),
            ),
            WrongAnswer(
                "nothing in V1",
                "a full hit leaves nothing to compute",
                edits=(('v1 = {"bob": 4', 'v1 = {"bob": 0'),),
            ),
            WrongAnswer(
                "found in V0",
                "who comes in the same step shares alike in both",
                edits=(('"cay": 6, "dan": 6}', '"cay": 6, "dan": 2}'),),
            ),
            WrongAnswer(
                "cold in V0",
                "who comes in the same step finds nothing in V0",
                edits=(('"cay": 6, "dan": 6}', '"cay": 6, "dan": 14}'),),
            ),
            WrongAnswer(
                "not found in V1",
                "who comes in the same step shares alike in both",
                edits=(('"cay": 6, "dan": 2}', '"cay": 6, "dan": 6}'),),
            ),
            WrongAnswer(
                "block 3",
                "a block that is not part of the hit is used all the same",
                edits=(("[1, 2, 4]", "[1, 2, 3]"),),
            ),
            WrongAnswer(
                "block 6", "a block that is not full is shared", edits=(("[1, 2, 5, 7]", "[1, 2, 5, 6]"),)
            ),
        ),
        other="computed_v0 = dict(dan=6, cay=6, bob=1)\ncomputed_v1 = dict(dan=2, cay=6, bob=4)\n"
        'tables = {"dan": (1, 2, 5, 7), "cay": (1, 2, 5, 6), "bob": (1, 2, 4)}',
    ),
    Task(
        id="15.2",
        kind="map",
        title="who does it in vLLM",
        points=15,
        answers={"v1": dict, "v0": dict},
        check=check_places,
        hints=(
            "The box at the end of the chapter has both columns.",
            "Who skips is the scheduler in V1 and the worker in V0. Whoever carries the answer there decides nothing.",
            "In V1 one call asks for room and takes it. In V0 there are two, and the first of them says OK or LATER.",
        ),
        wrong=(
            WrongAnswer(
                "the runner",
                "the runner skips in V1",
                edits=(('"skips": "Scheduler.schedule"', '"skips": "GPUModelRunner._prepare_inputs"'),),
            ),
            WrongAnswer(
                "the carrier",
                "who carries the answer decides it",
                edits=(
                    (
                        '"ComputedBlocksTracker.get_num_cached_tokens"',
                        '"SelfAttnBlockSpaceManager.get_common_computed_block_ids"',
                    ),
                ),
            ),
            WrongAnswer(
                "the taker",
                "who takes the blocks says whether there is room",
                edits=(('"SelfAttnBlockSpaceManager.can_allocate"', '"SelfAttnBlockSpaceManager.allocate"'),),
            ),
            WrongAnswer(
                "one way",
                "one way to preempt is the decision",
                edits=(
                    ('"preempts": "Scheduler._preempt",', '"preempts": "Scheduler._preempt_by_recompute",'),
                ),
            ),
            WrongAnswer(
                "the index",
                "the index fills itself",
                edits=(('"BlockPool.cache_full_blocks"', '"BlockHashToBlockMap"'),),
            ),
            WrongAnswer(
                "the caller",
                "who asks for room preempts",
                edits=(('"preempts": "Scheduler._preempt_request"', '"preempts": "Scheduler.schedule"'),),
            ),
            WrongAnswer(
                "a hash",
                "a hash makes a block computed",
                edits=(
                    (
                        '"PrefixCachingBlockAllocator.mark_blocks_as_computed"',
                        '"PrefixCachingBlockAllocator.promote_to_immutable_block"',
                    ),
                ),
            ),
            WrongAnswer(
                "who evicts",
                "who takes a block keeps the order",
                edits=(
                    ('"order": "LRUEvictor"', '"order": "PrefixCachingBlockAllocator._allocate_block_id"'),
                ),
            ),
        ),
        other=(
            ('"BlockPool.cache_full_blocks"', '"SingleTypeKVCacheManager.cache_blocks"'),
            (
                '"PrefixCachingBlockAllocator.mark_blocks_as_computed"',
                '"SelfAttnBlockSpaceManager.mark_blocks_as_computed"',
            ),
        ),
    ),
    Task(
        id="15.3",
        kind="build",
        title="the account",
        points=15,
        answers={"account": Callable},
        check=check_account,
        hints=(
            "Go through the marks once, and keep per request what the last lookup said and what it has computed.",
            "A lookup counts if the attempt after it says yes. For `again`, keep the positions themselves, as a set.",
            "positions = set(range(start, start + num_tokens)); again grows by len(positions & done[name]), and then "
            "done[name] |= positions.",
        ),
        wrong=(
            WrongAnswer(
                "all lookups",
                "every lookup counts",
                edits=(
                    (
                        '            hit[name] = facts["hit_tokens"]\n',
                        '            hit[name] = hit.get(name, 0) + facts["hit_tokens"]\n',
                    ),
                    (ADDS, "            rows.setdefault(name, [0, 0, 0])[0] = hit[name]\n"),
                ),
            ),
            WrongAnswer(
                "the first lookup",
                "the first answer holds",
                edits=(
                    (
                        '            hit[name] = facts["hit_tokens"]\n',
                        '            hit.setdefault(name, facts["hit_tokens"])\n',
                    ),
                ),
            ),
            WrongAnswer(
                "first admission",
                "only the first admission finds something",
                edits=((ADDS, "            rows.setdefault(name, [hit[name], 0, 0])\n"),),
            ),
            WrongAnswer(
                "all of it again",
                "whoever loses its blocks computes everything again",
                edits=(
                    (
                        '        elif mark.kind == "run":\n',
                        '        elif mark.kind == "admit" and facts["reason"].startswith("preempted"):\n'
                        "            rows[name][2] += len(done[name])\n"
                        '        elif mark.kind == "run":\n',
                    ),
                    (AGAIN, "            done[name] = done.get(name, set()) | positions\n"),
                ),
            ),
            WrongAnswer(
                "farthest",
                "whatever lies before the farthest position was computed",
                edits=((AGAIN, UP_TO_THE_FARTHEST),),
            ),
            WrongAnswer(
                "prompts",
                "a decode is not computed",
                edits=(
                    (
                        "rows[name][1] += len(positions)",
                        "rows[name][1] += len(positions) * (len(positions) > 1)",
                    ),
                ),
            ),
        ),
        other=OTHER_ACCOUNT,
    ),
    Task(
        id="15.4",
        kind="build",
        title="two orders",
        points=25,
        answers={"TwoOrders": type},
        check=check_queue,
        hints=(
            "Two ordered tables, and a set of the ids that were found. Which call adds to the set, which takes out?",
            "remove adds. popleft_n takes out, since the block is overwritten. append_n asks the set for the table.",
            "popleft_n: popitem(last=False) from the first table, or from the second if the first is empty. prepend_n: "
            "the blocks in reverse, each to the front of the first table.",
        ),
        wrong=(
            WrongAnswer(
                "for ever",
                "what was found once is kept for ever",
                edits=(("            self.found.discard(block_id)\n", ""),),
            ),
            WrongAnswer(
                "never out",
                "a favourite is never handed out",
                edits=(
                    ("if not 0 <= n <= self.num_free_blocks:", "if not 0 <= n <= len(self.others):"),
                    ("(self.others or self.favourites).popitem", "self.others.popitem"),
                ),
            ),
            WrongAnswer(
                "all favourites",
                "a hit changes nothing",
                edits=(
                    ("        self.append_n(blocks)\n", "        self.prepend_n(blocks)\n"),
                    (FOUND_ORDER, "order = self.favourites"),
                ),
            ),
            WrongAnswer(
                "one order",
                "a hit changes nothing",
                edits=(("        self.found.add(block.block_id)\n", ""),),
            ),
            WrongAnswer(
                "newest first",
                "the newest favourite goes first",
                edits=(
                    (
                        "            order[block.block_id] = block\n",
                        "            order[block.block_id] = block\n"
                        "            if order is self.favourites:\n"
                        "                order.move_to_end(block.block_id, last=False)\n",
                    ),
                ),
            ),
            WrongAnswer(
                "backwards",
                "the last of the worthless blocks is foremost",
                edits=(("for block in reversed(list(blocks)):", "for block in blocks:"),),
            ),
            WrongAnswer(
                "keeps the worthless",
                "a favourite without contents is a favourite",
                edits=(
                    (
                        "            self.others[block.block_id] = block\n"
                        "            self.others.move_to_end(block.block_id, last=False)\n",
                        f"            {FOUND_ORDER}\n"
                        "            order[block.block_id] = block\n"
                        "            order.move_to_end(block.block_id, last=False)\n",
                    ),
                ),
            ),
        ),
        other=OTHER_QUEUE,
        part="free_queue",
    ),
    Task(
        id="15.5",
        kind="bug",
        title="right, and too much work",
        points=15,
        answers={"Cutting": type},
        check=check_cutting,
        hints=(
            "Which requests have more tokens than their prompt when they are looked up?",
            "Those that lost their blocks. What they have sampled so far was computed, and its blocks were published.",
            "All of its tokens but the last may be found: request.num_tokens - 1.",
        ),
        wrong=(
            WrongAnswer(
                "the whole prompt",
                "only prompts are cached",
                edits=((USABLE, "usable = request.num_prompt_tokens"),),
            ),
            WrongAnswer(
                "as at first",
                "nothing is found by anybody",
                edits=((USABLE, "usable = request.num_cached_tokens"),),
            ),
            WrongAnswer(
                "from nothing",
                "who lost its blocks starts from nothing",
                edits=((USABLE, "usable = 0 if request.num_preemptions else request.num_tokens - 1"),),
            ),
        ),
        other=((USABLE, "usable = num_tokens"),),
    ),
    Task(
        id="15.6",
        kind="measure",
        title="how much room is enough",
        points=15,
        answers={"measure": Callable, "enough": dict, "one_text_less": int},
        check=check_measured,
        hints=(
            "totals(record).found and totals(record).computed; max_tokens=1.",
            "Try numbers until one block fewer finds less. Then count: texts, the question that runs, block 0.",
            "42 - 8 blocks: measure it. Which text has been overwritten last when the next question comes?",
        ),
        wrong=(
            WrongAnswer(
                "long answers",
                "an answer of twelve tokens is one of one",
                edits=(("num_blocks=num_blocks, max_tokens=1)", "num_blocks=num_blocks)"),),
            ),
            WrongAnswer(
                "one engine",
                "both engines find alike",
                edits=(("serve(documents(), engine, num_blocks", "serve(documents(), num_blocks"),),
            ),
            WrongAnswer("too much", "more than enough", edits=(('"v1": 42', '"v1": 60'),)),
            WrongAnswer("no null block", "the null block can be used", edits=(('"v1": 42', '"v1": 41'),)),
            WrongAnswer("texts alone", "only the texts need room", edits=(('"v1": 42', '"v1": 40'),)),
            WrongAnswer("V0's null block", "V0 has a null block", edits=(('"v0": 41', '"v0": 42'),)),
            WrongAnswer(
                "four fifths",
                "four texts of five are found",
                edits=(("one_text_less = 0", "one_text_less = 256"),),
            ),
        ),
        other=OTHER_MEASURE,
    ),
]
