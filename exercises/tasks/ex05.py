"""Tasks of exercise 05: the skip in V0's worker, the same in V1's scheduler, and a memory that is too long."""

from __future__ import annotations

from collections.abc import Callable

from exercises.grader import Task, WrongAnswer
from exercises.tasks.ex05_checks import (
    check_fields,
    check_map,
    check_measured,
    check_numbers,
    check_share,
    check_skip,
    check_tracker,
)

# -- other right answers, and wrong ones that need more than a line -----------------------------------------

OTHER_SKIP = """
def skip(seq, block_size, sliding_window=None):
    blocks = seq.computed_block_nums or []
    seq.prefix_cache_hit = len(blocks) > 0 and seq.is_prompt and not sliding_window
    if seq.prefix_cache_hit:
        seq.num_cached_tokens = block_size * len(blocks)
        last = seq.context_len + seq.query_len - 1
        kept = [
            (token, position)
            for token, position in zip(seq.input_tokens, seq.input_positions)
            if position >= seq.num_cached_tokens or position == last
        ]
        seq.input_tokens = [token for token, _ in kept]
        seq.input_positions = [position for _, position in kept]
        seq.context_len, seq.query_len = kept[0][1], len(kept)
"""

MOVES_POSITIONS = "seq.input_positions = list(range(seq.seq_len - start))"

OTHER_SHARE = """
def first_share(num_tokens, num_cached_tokens, block_size, budget):
    start = num_cached_tokens
    while start >= num_tokens:
        start -= block_size
    left = num_tokens - start
    return (start, left if left < budget else budget)
"""

FROM_LOOKUPS = """
one_token = SamplingParams(max_tokens=1, ignore_eos=True)

def computed_per_step(engine, batches, block_size=4):
    recorder = Recorder()
    llm = LLM("tiny", engine=engine, block_size=block_size, num_blocks=64, observer=recorder)
    for prompts in batches:
        llm.generate(prompts, one_token)
    looked = [[mark.facts["num_tokens"] for mark in step.marks if mark.kind == "lookup"] for step in recorder.steps]
    return [sum(tokens) for tokens in looked]

fewer = {"repeated": "v0", "together": "v1"}
more_in_v1_at_16 = 15
"""

FROM_POSITIONS = """
one_token = SamplingParams(max_tokens=1, ignore_eos=True)

def computed_per_step(engine, batches, block_size=4):
    recorder, tokens = Recorder(), {}
    llm = LLM("tiny", observer=recorder, engine=engine, block_size=block_size, num_blocks=40)
    for prompts in batches:
        llm.generate(list(prompts), one_token)
    for step, mark in recorder.record.marks():
        if mark.kind == "run":
            tokens[step] = tokens.get(step, 0) + mark.facts["num_tokens"]
    return list(tokens.values())

fewer = dict(together="v1", repeated="v0")
more_in_v1_at_16 = 16 - 1
"""

OTHER_TRACKER = """
class Tracker(TrackerBase):
    def get_num_cached_tokens(self, seq):
        admitted = seq.status is SequenceStatus.RUNNING or seq.status is SequenceStatus.SWAPPED
        if admitted and seq.is_prefill and seq.seq_id in self.answers:
            return self.answers[seq.seq_id]
        self.answers[seq.seq_id] = self.look_up(seq)
        return self.answers[seq.seq_id]
"""

ASKS = "        if answer is None or not seq.is_prefill or seq.status is SequenceStatus.WAITING:\n"
LOOKS = "            answer = self.answers[seq.seq_id] = self.look_up(seq)\n"

TASKS = [
    Task(
        id="05.1",
        kind="predict",
        title="the cases, before you run them",
        points=10,
        answers={"numbers": dict, "slots": dict},
        check=check_numbers,
        hints=(
            "A chunk begins behind the computed tokens. Does the hit end before it, in it, or behind it?",
            "Cut up to the end of the hit, but never the last token of the chunk. A decode is never cut.",
            "c and f are full hits: 16 cached of 16, and 12 cached of a chunk that ends at 12. The slot of position p "
            "is table[p // 4] * 4 + p % 4.",
        ),
        wrong=(
            WrongAnswer(
                "nothing left", "nothing is left to sample from", edits=(('"c": (15, 1)', '"c": (16, 0)'),)
            ),
            WrongAnswer("as in V1", "V1's cap in V0", edits=(('"c": (15, 1)', '"c": (12, 4)'),)),
            WrongAnswer(
                "back to the hit", "a later chunk goes back", edits=(('"d": (8, 8)', '"d": (4, 12)'),)
            ),
            WrongAnswer(
                "to the prompt's end",
                "the chunk ends before the hit does",
                edits=(('"e": (8, 4)', '"e": (8, 12)'),),
            ),
            WrongAnswer(
                "writes all",
                "the cached slots are written again",
                edits=(("[24, 25, 26, 27, 8]", "[12, 13, 14, 15, 4, 5, 6, 7, 24, 25, 26, 27, 8]"),),
            ),
            WrongAnswer("no table", "a position is a slot", edits=(('"c": [23]', '"c": [15]'),)),
        ),
        other=(
            "numbers = dict(a=[0, 13], b=[8, 5], c=[15, 1], d=[8, 8], e=[8, 4], f=[11, 1], g=[16, 1])\n"
            "slots = dict(c=(23,), b=[*range(24, 28), 8])"
        ),
    ),
    Task(
        id="05.2",
        kind="build",
        title="the skip",
        points=25,
        answers={"skip": Callable},
        check=check_skip,
        hints=(
            "Settle first whether there is a hit at all, and leave if there is none.",
            "Name the position at which computing starts. It is the end of the hit, unless that is behind the last "
            "token of the chunk, or before its first.",
            "start = min(number of cached tokens, seq.seq_len - 1); cut start - seq.context_len from both lists, then "
            "set context_len and query_len.",
        ),
        wrong=(
            WrongAnswer(
                "nothing left",
                "nothing is left to sample from",
                edits=(
                    (
                        "min(seq.num_cached_tokens, seq.seq_len - 1)",
                        "min(seq.num_cached_tokens, seq.seq_len)",
                    ),
                ),
            ),
            WrongAnswer(
                "as V1",
                "V1's cap in V0",
                edits=(
                    (
                        "min(seq.num_cached_tokens, seq.seq_len - 1)",
                        "max(min(seq.num_cached_tokens, (seq.seq_len - 1) // block_size * block_size), "
                        "seq.context_len)",
                    ),
                ),
            ),
            WrongAnswer(
                "no look back",
                "a later chunk goes back",
                edits=(("    if seq.num_cached_tokens <= seq.context_len:\n        return\n", ""),),
            ),
            WrongAnswer(
                "from zero",
                "positions start at 0 again",
                edits=(("seq.input_positions = seq.input_positions[cut:]", MOVES_POSITIONS),),
            ),
            WrongAnswer(
                "context kept",
                "the cached slots are written again",
                edits=(("    seq.context_len = start\n", ""),),
            ),
            WrongAnswer(
                "the prompt's end",
                "the chunk ends before the hit does",
                edits=(
                    (
                        "min(seq.num_cached_tokens, seq.seq_len - 1)",
                        "min(seq.num_cached_tokens, len(seq.token_ids) - 1)",
                    ),
                ),
            ),
            WrongAnswer(
                "from the prompt's start",
                "the cut is counted from the start of the prompt",
                edits=(("cut = start - seq.context_len", "cut = start"),),
            ),
            WrongAnswer(
                "decodes too",
                "a decode counts as a hit",
                edits=(("bool(hit) and seq.is_prompt and", "bool(hit) and"),),
            ),
            WrongAnswer(
                "any window", "a window does not matter", edits=((" and sliding_window is None", ""),)
            ),
        ),
        other=OTHER_SKIP,
    ),
    Task(
        id="05.3",
        kind="build",
        title="the skip, in the scheduler",
        points=15,
        answers={"first_share": Callable},
        check=check_share,
        hints=(
            "Begin with the cap: how many tokens may a hit have at most, if one must run?",
            "num_tokens - 1, rounded down to whole blocks. The start is the smaller of the two.",
            "cap = (num_tokens - 1) // block_size * block_size, start = min(num_cached_tokens, cap). The budget comes "
            "last.",
        ),
        wrong=(
            WrongAnswer(
                "no cap",
                "nothing is left to sample from",
                edits=(("min(num_cached_tokens, cap)", "num_cached_tokens"),),
            ),
            WrongAnswer(
                "as V0",
                "V0's cap",
                edits=(("(num_tokens - 1) // block_size * block_size", "num_tokens - 1"),),
            ),
            WrongAnswer(
                "gives back always",
                "always a block less",
                edits=(("min(num_cached_tokens, cap)", "max(num_cached_tokens - block_size, 0)"),),
            ),
            WrongAnswer(
                "charges the hit",
                "cached tokens are charged",
                edits=(("min(num_tokens - start, budget)", "min(num_tokens, budget) - start"),),
            ),
            WrongAnswer(
                "no budget",
                "the budget is forgotten",
                edits=(("min(num_tokens - start, budget)", "num_tokens - start"),),
            ),
        ),
        other=OTHER_SHARE,
    ),
    Task(
        id="05.4",
        kind="predict",
        title="what need not be said any more",
        points=10,
        answers={"unnecessary": list, "shares": dict},
        check=check_fields,
        hints=(
            "Ask of each field: what would V1's runner do differently if it were told?",
            "The runner has one kind of attention for everything. And it sees by itself whether a request's last known "
            "token is computed.",
            "is_prompt and do_sample go with computed_block_nums. For the messages: the start is behind the hit or the "
            "computed tokens, whichever is more; s is cached to its end.",
        ),
        wrong=(
            WrongAnswer(
                "the count too",
                "num_computed_tokens is not needed",
                edits=(('"is_prompt", "do_sample"', '"is_prompt", "num_computed_tokens"'),),
            ),
            WrongAnswer(
                "the chunk too",
                "token_chunk_size is not needed",
                edits=(('"is_prompt", "do_sample"', '"token_chunk_size", "do_sample"'),),
            ),
            WrongAnswer("all of p", "the worker still skips", edits=(('"p": (8, 5)', '"p": (0, 13)'),)),
            WrongAnswer("chunk of p", "the chunk stays whole", edits=(('"p": (8, 5)', '"p": (8, 13)'),)),
            WrongAnswer("V0's last token", "V0's cap", edits=(('"s": (8, 4)', '"s": (11, 1)'),)),
            WrongAnswer("q goes back", "a later chunk goes back", edits=(('"q": (8, 8)', '"q": (4, 12)'),)),
        ),
        other=(
            'unnecessary = ("do_sample", "is_prompt", "computed_block_nums")\n'
            "shares = dict(s=[8, 4], r=[16, 1], q=[8, 8], p=[8, 5])"
        ),
    ),
    Task(
        id="05.5",
        kind="map",
        title="where it is in vLLM",
        points=10,
        answers={"in_v0": dict, "in_early_v1": dict, "in_v1": dict},
        check=check_map,
        hints=(
            "The picture of Bob's path in the chapter has our names; its widget has vLLM's beside them.",
            "In V0 five different parts do it: tracker, scheduler, model-input builder, attention metadata, engine.",
            "V0's slots come from a plain function, its counting from the processing of the model's output. In V1, "
            "early or late, Scheduler.schedule skips and GPUModelRunner._prepare_inputs starts.",
        ),
        wrong=(
            WrongAnswer(
                "the scheduler does it",
                "V0's scheduler skips",
                edits=(
                    (
                        '"ModelInputForGPUBuilder._compute_for_prefix_cache_hit"',
                        '"Scheduler._get_num_new_uncached_and_cached_tokens"',
                    ),
                ),
            ),
            WrongAnswer(
                "the worker counts",
                "executor and worker act",
                edits=(('"LLMEngine._process_model_outputs"', '"Worker.execute_worker"'),),
            ),
            WrongAnswer(
                "the runner skips",
                "V1's runner skips",
                edits=(
                    (
                        'in_v1 = {\n    "knows": "KVCacheManager.get_computed_blocks",\n'
                        '    "skips": "Scheduler.schedule",',
                        'in_v1 = {\n    "knows": "KVCacheManager.get_computed_blocks",\n'
                        '    "skips": "GPUModelRunner._prepare_inputs",',
                    ),
                ),
            ),
            WrongAnswer(
                "who skips knows",
                "deciding is skipping",
                edits=(
                    (
                        'in_early_v1 = {\n    "knows": "KVCacheManager.get_computed_blocks",',
                        'in_early_v1 = {\n    "knows": "Scheduler.schedule",',
                    ),
                ),
            ),
        ),
        other=(
            (
                '"ComputedBlocksTracker.get_num_cached_tokens"',
                '"PrefixCachingBlockAllocator.find_cached_blocks_prefix"',
            ),
            (
                'in_early_v1 = {\n    "knows": "KVCacheManager.get_computed_blocks",',
                'in_early_v1 = {\n    "knows": "KVCacheManager._get_cached_block",',
            ),
        ),
    ),
    Task(
        id="05.6",
        kind="bug",
        title="an answer out of the past",
        points=20,
        answers={"Tracker": type},
        check=check_tracker,
        hints=(
            "When did Bob ask first, and what has happened to the blocks since?",
            "Tell two moments apart: it waits and owns nothing; it was admitted, and its own blocks are in the cache.",
            "The old answer will do only for a sequence that has been admitted: ask anew while its status is "
            "SequenceStatus.WAITING.",
        ),
        wrong=(
            WrongAnswer(
                "no memory",
                "its own blocks count as a hit",
                edits=((ASKS, "        if True:\n"),),
            ),
            WrongAnswer(
                "the smaller one",
                "an answer only shrinks",
                edits=(
                    (
                        ASKS + LOOKS,
                        "        if answer is None or not seq.is_prefill:\n            answer = self.look_up(seq)\n"
                        "        elif seq.status is SequenceStatus.WAITING:\n"
                        "            answer = min(answer, self.look_up(seq))\n"
                        "        self.answers[seq.seq_id] = answer\n",
                    ),
                ),
            ),
            WrongAnswer(
                "all forget",
                "one look makes all forget",
                edits=(
                    (
                        LOOKS,
                        "            self.answers.clear()\n"
                        "            answer = self.answers[seq.seq_id] = self.look_up(seq)\n",
                    ),
                ),
            ),
            WrongAnswer(
                "waiting only",
                "a decode keeps its prompt's answer",
                edits=((" or not seq.is_prefill or seq.status", " or seq.status"),),
            ),
        ),
        other=OTHER_TRACKER,
    ),
    Task(
        id="05.7",
        kind="measure",
        title="who computes fewer tokens",
        points=10,
        answers={"computed_per_step": Callable, "fewer": dict, "more_in_v1_at_16": int},
        check=check_measured,
        hints=(
            "recorder.steps is a list of steps, and each has marks; a mark has kind and facts.",
            "One engine for all batches, one generate per batch, and then one sum per step over the marks run.",
            'LLM("tiny", engine=engine, block_size=block_size, num_blocks=64, observer=recorder); generate(prompts, '
            'one_token) for each batch; sum mark.facts["num_tokens"] where mark.kind is "run".',
        ),
        wrong=(
            WrongAnswer("from the lookups", "found is counted as computed", source=FROM_LOOKUPS),
            WrongAnswer(
                "V1 wins",
                "V1 always computes less",
                edits=(('"repeated": "v0"', '"repeated": "v1"'),),
            ),
            WrongAnswer(
                "V0 wins", "V0 always computes less", edits=(('"together": "v1"', '"together": "v0"'),)
            ),
            WrongAnswer(
                "a whole block",
                "V0 computes nothing",
                edits=(("more_in_v1_at_16 = 15", "more_in_v1_at_16 = 16"),),
            ),
            WrongAnswer(
                "blocks of four",
                "as with blocks of four",
                edits=(("more_in_v1_at_16 = 15", "more_in_v1_at_16 = 3"),),
            ),
        ),
        other=FROM_POSITIONS,
    ),
]
