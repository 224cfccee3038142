"""How the answers to exercise 05 are judged: by their behaviour, through public calls, on fresh objects."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from exercises.grader import Report
from exercises.grader.report import Known
from exercises.tasks.ex03_traces import golden
from exercises.tasks.ex05_scene import (
    PLACE,
    Bench,
    FirstShare,
    Skip,
    after_skip,
    crowded,
    late_question,
    tell,
    with_share,
    with_skip,
)
from exercises.tasks.ex05_traces import (
    BLOCK_TRACES,
    INPUT_TRACES,
    STALE_AT,
    STEP_TRACES,
    BlockDriver,
    replay_blocks,
    replay_inputs,
    replay_steps,
)
from refengine.llm import LLM
from refengine.sampling import SamplingParams
from refengine.trace.codemap import WHO_DECIDES, WHO_SKIPS, call_path
from refengine.trace.follow import Followed, follow
from refengine.trace.record import Recorder
from refengine.v0.model_input import ModelInputBuilder, SequenceInput, compute_slot_mapping
from refengine.v0.sequence import Sequence as V0Sequence
from refengine.v0.sequence import SequenceGroupMetadata
from refengine.v1.scheduler_output import ScheduledRequest

Pair = tuple[int, int]
ONE = SamplingParams(max_tokens=1, ignore_eos=True)

NOTHING_LEFT = (
    "nothing is left to sample from",
    "The next token is sampled from what the model makes of the last one. So the last token is computed even if all "
    "are cached.",
)
V1_CAP = (
    "V1's cap in V0",
    "V0 gives back one token, not a block: it may write into the block that it shares.",
)
GOES_BACK = (
    "a later chunk goes back",
    "Earlier chunks have computed more than the hit has. The chunk begins behind it, and nothing is to be cut.",
)
REWRITTEN = (
    "the cached slots are written again",
    "context_len is where writing begins. Left at its old value, the slots of the hit are overwritten.",
)
PROMPTS_END = (
    "the chunk ends before the hit does",
    "This chunk ends inside of the hit. What is left is counted from the end of the chunk, seq_len.",
)


# -- 05.1 ---------------------------------------------------------------------------------------------------


def told() -> dict[str, SequenceGroupMetadata]:
    """The seven sequences of the table."""
    decode = tell(17, [0, 1, 2, 3], computed=16, is_prompt=False)
    return {
        "a": _with_table(tell(13, []), [9, 4, 6, 2]),
        "b": _with_table(tell(13, [3, 1]), [3, 1, 6, 2]),
        "c": tell(16, [7, 8, 2, 5]),
        "d": tell(20, [0], computed=8, chunk=8),
        "e": tell(20, [0, 1], computed=4, chunk=8),
        "f": tell(20, [0, 1, 2], computed=4, chunk=8),
        "g": decode,
    }


def _with_table(metadata: SequenceGroupMetadata, table: list[int]) -> SequenceGroupMetadata:
    metadata.block_tables[0] = table
    return metadata


NUMBERS_KNOWN: dict[str, tuple[Known, ...]] = {
    "c": (((16, 0), *NOTHING_LEFT), ((12, 4), *V1_CAP)),
    "d": (((4, 12), *GOES_BACK), ((4, 8), *GOES_BACK)),
    "e": (
        ((8, 8), *PROMPTS_END),
        ((8, 12), *PROMPTS_END),
        ((12, 4), "the hit is added", "It counts from token 0."),
    ),
    "f": (((12, 0), *NOTHING_LEFT), ((12, 8), *PROMPTS_END), ((8, 4), *V1_CAP)),
    "g": (
        (
            (15, 1),
            "a decode counts as a full hit",
            "Only prompts are cut. A decode computes its newest token.",
        ),
    ),
}


def check_numbers(numbers: dict[str, Pair], slots: dict[str, list[int]], report: Report) -> None:
    with report.case("every sequence has an answer"):
        report.equal(sorted(told()), sorted(numbers), "sequences")
        report.equal(["b", "c"], sorted(slots), "slots of")
    for name, metadata in told().items():
        with report.case(f"sequence {name}"):
            seq = after_skip(metadata)
            expected, known = (seq.context_len, seq.query_len), NUMBERS_KNOWN.get(name, ())
            report.equal(expected, numbers.get(name), "(context_len, query_len)", known=known)
    for name in ("b", "c"):
        with report.case(f"the slots of {name}"):
            seq = after_skip(told()[name])
            table = seq.block_table
            expected_slots = compute_slot_mapping(table, 4, seq.context_len, seq.seq_len, 0)
            every = compute_slot_mapping(table, 4, 0, seq.seq_len, 0)
            position = list(range(seq.context_len, seq.seq_len))
            known = (
                (every, *REWRITTEN),
                (position, "a position is a slot", "The block table says where a position's slot is."),
            )
            report.equal(expected_slots, slots.get(name), "slots", known=known)


# -- 05.2 ---------------------------------------------------------------------------------------------------


def cut(
    skip: Skip, metadata: SequenceGroupMetadata, block_size: int = 4, window: int | None = None
) -> SequenceInput:
    """A sequence after `compute_lens` and the reader's skip; nothing else looks at it."""
    builder = ModelInputBuilder(block_size, sliding_window=window)
    seq = SequenceInput(
        0,
        metadata.is_prompt,
        metadata.token_ids[0],
        metadata.num_computed_tokens,
        metadata.token_chunk_size,
        metadata.block_tables[0],
        metadata.computed_block_nums,
    )
    builder.compute_lens(seq)
    skip(seq, block_size=block_size, sliding_window=window)
    return seq


def check_skip(skip: Any, report: Report) -> None:
    def lens(metadata: SequenceGroupMetadata, expected: Pair, what: str, *known: Known) -> SequenceInput:
        seq = cut(skip, metadata)
        report.equal(
            expected, (seq.context_len, seq.query_len), f"{what}: (context_len, query_len)", known=known
        )
        return seq

    with report.case("no hit: nothing is cut"):
        for name, hit in (("caching is off", None), ("nothing found", [])):
            seq = lens(tell(13, hit), (0, 13), name)
            report.equal(list(range(13)), seq.input_positions, "positions")
            report.equal((False, 0), (seq.prefix_cache_hit, seq.num_cached_tokens), "hit, cached tokens")
    with report.case("a partial hit: the rest is computed"):
        seq = lens(
            tell(13, [0, 1]), (8, 5), "13 tokens, two blocks", ((0, 5), *REWRITTEN), ((0, 13), *REWRITTEN)
        )
        report.equal([8, 9, 10, 11, 12], seq.input_tokens, "tokens")
        again: Known = (
            [0, 1, 2, 3, 4],
            "positions start at 0 again",
            "A token keeps its place in the sequence. With other positions its keys are other keys.",
        )
        report.equal([8, 9, 10, 11, 12], seq.input_positions, "positions", known=(again,))
        report.equal((True, 8), (seq.prefix_cache_hit, seq.num_cached_tokens), "hit, cached tokens")
    with report.case("a full hit: the last token is computed again"):
        seq = lens(
            tell(12, [0, 1, 2]),
            (11, 1),
            "12 tokens, three blocks",
            ((12, 0), *NOTHING_LEFT),
            ((8, 4), *V1_CAP),
        )
        report.equal([11], seq.input_tokens, "tokens")
        report.equal([11], seq.input_positions, "positions")
        report.equal((True, 12), (seq.prefix_cache_hit, seq.num_cached_tokens), "hit, cached tokens")
    with report.case("already past: nothing is cut, and it is a hit all the same"):
        seq = lens(tell(13, [0], computed=8), (8, 5), "8 computed, one block", ((4, 9), *GOES_BACK))
        report.equal([8, 9, 10, 11, 12], seq.input_positions, "positions")
        report.equal((True, 4), (seq.prefix_cache_hit, seq.num_cached_tokens), "hit, cached tokens")
        lens(tell(13, [0, 1], computed=8), (8, 5), "8 computed, two blocks")
    _check_chunks(lens, report)
    _check_no_hit(skip, report)
    _check_elsewhere(skip, report)


def _check_chunks(lens: Callable[..., SequenceInput], report: Report) -> None:
    with report.case("a chunk that ends inside of the hit"):
        lens(tell(13, [0, 1], chunk=4), (3, 1), "4 of 13 tokens, two blocks", ((8, -4), *PROMPTS_END))
        lens(tell(13, [0, 1, 2], chunk=1), (0, 1), "1 of 13 tokens, three blocks")
    with report.case("a chunk that begins inside of the hit"):
        seq = lens(tell(13, [0], computed=3, chunk=2), (4, 1), "tokens 3 and 4, one block")
        from_start: Known = (
            [],
            "the cut is counted from the start of the prompt",
            "input_tokens begins with the chunk, at context_len. Cut off start - context_len of them.",
        )
        report.equal([4], seq.input_tokens, "tokens", known=(from_start,))
        report.equal([4], seq.input_positions, "positions")


def _check_no_hit(skip: Skip, report: Report) -> None:
    with report.case("a decode is never cut"):
        seq = cut(skip, tell(17, [0, 1, 2, 3], computed=16, is_prompt=False))
        report.equal((16, 1), (seq.context_len, seq.query_len), "(context_len, query_len)")
        counted: Known = (
            True,
            "a decode counts as a hit",
            "The scheduler sends computed_block_nums in every step. In a decode nothing is skipped for them.",
        )
        report.equal(False, seq.prefix_cache_hit, "prefix_cache_hit", known=(counted,))
    with report.case("nothing is cut with a sliding window"):
        seq = cut(skip, tell(13, [0, 1]), window=8)
        if seq.query_len == 5:
            report.misconception(
                "a window does not matter",
                "With a window, blocks at the head of a table may stand for nothing. 0.7.3 refuses the combination.",
            )
        report.equal((0, 13), (seq.context_len, seq.query_len), "(context_len, query_len)")
        report.equal(False, seq.prefix_cache_hit, "prefix_cache_hit")


def _check_elsewhere(skip: Skip, report: Report) -> None:
    with report.case("other block sizes"):
        for size, num_tokens, hit, expected in ((1, 5, 5, (4, 1)), (2, 7, 3, (6, 1)), (16, 40, 2, (32, 8))):
            seq = cut(skip, tell(num_tokens, range(hit), block_size=size), block_size=size)
            report.equal(expected, (seq.context_len, seq.query_len), f"blocks of {size}, {num_tokens} tokens")
    with report.case("vLLM's recorded model inputs and steps"):
        results = [replay_inputs(name, skip) for name in INPUT_TRACES]
        results += [replay_steps(name, skip=skip) for name in STEP_TRACES]
        for result in results:
            report.true(result.difference is None, f"{result.name}: {result.difference}")
    with report.case("V0 runs on it"):
        report.equal(_answers(lambda llm: llm), _answers(lambda llm: with_skip(llm, skip)), "tokens")


PROMPTS = ([*range(40, 54)], [*range(40, 48), *range(60, 65)], [*range(40, 52)], [*range(40, 52)])


def _answers(change: Callable[[LLM], LLM]) -> list[list[int]]:
    """What V0 generates for prompts that share a beginning, alone and together."""
    llm = change(LLM("tiny", engine="v0", block_size=4, num_blocks=24))
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    outputs = [*llm.generate(list(PROMPTS[:1]), params), *llm.generate(list(PROMPTS[1:]), params)]
    return [output.token_ids for output in outputs]


# -- 05.3 ---------------------------------------------------------------------------------------------------


def check_share(first_share: FirstShare, report: Report) -> None:
    def share(*arguments: int) -> Any:
        answer = first_share(*arguments)
        return tuple(answer) if isinstance(answer, list | tuple) else answer

    with report.case("what is not cached is computed"):
        block_less: Known = (
            (4, 9),
            "always a block less",
            "The cap takes a block only from a request that is cached to its end. Here five tokens are left anyway.",
        )
        for num_tokens, cached, expected in (
            (13, 0, (0, 13)),
            (13, 8, (8, 5)),
            (13, 12, (12, 1)),
            (3, 0, (0, 3)),
        ):
            report.equal(
                expected, share(num_tokens, cached, 4, 100), f"{num_tokens}, {cached}", known=(block_less,)
            )
    with report.case("cached to its end: a whole block is computed again"):
        known: tuple[Known, ...] = (
            ((12, 0), *NOTHING_LEFT),
            (
                (11, 1),
                "V0's cap",
                "Position 11 lies inside of a shared block, and V1 writes into no block that it shares.",
            ),
        )
        report.equal((8, 4), share(12, 12, 4, 100), "12 tokens, all cached", known=known)
        report.equal((0, 4), share(4, 4, 4, 100), "4 tokens, all cached")
        report.equal((4, 1), share(5, 5, 1, 100), "5 tokens in blocks of one, all cached")
        report.equal((32, 16), share(48, 48, 16, 100), "48 tokens in blocks of 16, all cached")
    with report.case("the budget is for what is computed"):
        charged = (
            "cached tokens are charged",
            "What is skipped costs nothing. Subtract the hit first, then look at the budget.",
        )
        free = (
            "the budget is forgotten",
            "A step has room for so many tokens; the rest comes in the next one.",
        )
        known = (((8, 2), *charged), ((8, 12), *free))
        report.equal((8, 10), share(20, 8, 4, 10), "20 tokens, 8 cached, budget 10", known=known)
        report.equal((8, 3), share(12, 12, 4, 3), "12 tokens, all cached, budget 3")
    with report.case("as our V1 decides"):
        for num_tokens in (7, 8, 9, 16, 17):
            cached = num_tokens // 4 * 4
            report.equal(
                _v1_repeat(num_tokens), share(num_tokens, cached, 4, 2048), f"{num_tokens} tokens again"
            )
    with report.case("V0 runs on it"):
        report.equal(_answers(lambda llm: llm), _answers(lambda llm: with_share(llm, first_share)), "tokens")


@functools.cache
def _v1_repeat(num_tokens: int) -> Pair:
    """Where V1 starts, and how many tokens it computes, when a prompt comes a second time."""
    recorder = Recorder()
    llm = LLM("tiny", block_size=4, num_blocks=24, observer=recorder)
    for _ in range(2):
        llm.generate(list(range(40, 40 + num_tokens)), ONE)
    facts = next(mark.facts for mark in recorder.steps[-1].marks if mark.kind == "run")
    return facts["start"], facts["num_tokens"]


# -- 05.4 ---------------------------------------------------------------------------------------------------

SUCCESSORS = {
    "request_id": "request_id",
    "token_chunk_size": "num_tokens",
    "token_ids": "token_ids",
    "num_prompt_tokens": "num_prompt_tokens",
    "num_computed_tokens": "num_computed_tokens",
    "block_tables": "block_ids",
    "params": "sampling_params",
    "adapter": "adapter",
}  # field of V0's metadata -> field of V1's ScheduledRequest


def check_fields(unnecessary: list[str], shares: dict[str, Pair], report: Report) -> None:
    v0 = {f.name for f in fields(SequenceGroupMetadata)}
    v1 = {f.name for f in fields(ScheduledRequest)}
    gone = sorted(name for name in v0 if SUCCESSORS.get(name) not in v1)
    with report.case("three fields have no successor"):
        for name in unnecessary:
            report.true(name in v0, f"{name} is no field of SequenceGroupMetadata.")
            if name in SUCCESSORS:
                why = f"It lives on in V1, as {SUCCESSORS[name]}."
                report.misconception(f"{name} is not needed", why)
        report.equal(gone, sorted(unnecessary), "without a successor")
    with report.case("every message is translated"):
        report.equal(["p", "q", "r", "s"], sorted(shares), "messages")
    v0s = {
        "p": tell(13, [0, 1]),
        "q": tell(20, [0], computed=8, chunk=8),
        "r": tell(17, [0, 1, 2, 3], computed=16, is_prompt=False),
    }
    whole: Known = (
        (0, 13),
        "the worker still skips",
        "V1's runner computes what it is told. The scheduler has subtracted the hit, and the start is behind it.",
    )
    chunk: Known = (
        (8, 13),
        "the chunk stays whole",
        "num_tokens counts what is computed; 8 of the 13 are not.",
    )
    for name, metadata in v0s.items():
        with report.case(f"message {name}"):
            seq = after_skip(metadata)
            known = (whole, chunk, ((4, 12), *GOES_BACK))
            report.equal(
                (seq.context_len, seq.query_len), shares.get(name), "(computed, tokens)", known=known
            )
    with report.case("message s"):
        v0_cap: Known = (
            (11, 1),
            "V0's cap",
            "V1 gives back a whole block: 11 tokens would end inside of a shared block.",
        )
        report.equal(
            _v1_repeat(12), shares.get("s"), "(computed, tokens)", known=(v0_cap, ((12, 0), *NOTHING_LEFT))
        )


# -- 05.5 ---------------------------------------------------------------------------------------------------


@functools.cache
def bobs_path() -> Followed:
    """Bob's request of the chapter, through both engines."""
    bob = [*range(40, 48), *range(60, 65)]
    return follow(bob, warm=list(range(40, 54)), block_size=4, num_blocks=9, max_tokens=1)


# Which of our functions does it: a name counts if it is a counterpart of one of these on the recorded path.
DONE_BY: dict[str, dict[str, tuple[str, ...]]] = {
    "v0": {
        "passes on": ("Scheduler._metadata", "Scheduler.schedule"),
        "writes": ("compute_slot_mapping",),
        "counts": ("LLMEngine._update",),
    },
    "v1": {"starts": ("ModelRunner._prepare_inputs",)},
}
EARLY_STARTS = ("GPUModelRunner._prepare_inputs",)
ONLY_V0_SCHEDULER = (
    "V0's scheduler skips",
    "It hands block ids on, and counts cached tokens into the chunk. The worker cuts them off its input.",
)


def check_map(
    in_v0: dict[str, str], in_early_v1: dict[str, str], in_v1: dict[str, str], report: Report
) -> None:
    answers = {"v0": in_v0, "v1_early": in_early_v1, "v1": in_v1}
    with report.case("the names are on the path of a request"):
        for path, answer in answers.items():
            names = {step.place.symbol for step in call_path(path)}
            for name in answer.values():
                report.true(name in names, f"{name} is not on the path of a request in {path}.")
    for path, answer in answers.items():
        steps = call_path(path)
        deciders = {step.place.symbol for step in steps if step.answers == WHO_DECIDES}
        skippers = {step.place.symbol for step in steps if step.answers == WHO_SKIPS}
        with report.case(f"who knows, {path}"):
            if answer["knows"] in skippers:
                report.misconception("deciding is skipping", "One says what is computed, the other uses it.")
            report.true(answer["knows"] in deciders, f"{answer['knows']} does not say what is computed.")
        with report.case(f"who skips, {path}"):
            if path == "v0" and answer["skips"].startswith(("Scheduler", "SelfAttn", "Computed", "Prefix")):
                report.misconception(*ONLY_V0_SCHEDULER)
            if path != "v0" and "ModelRunner" in answer["skips"]:
                report.misconception(
                    "V1's runner skips", "It starts where it is told to. The tokens were never scheduled."
                )
            report.equal(sorted(skippers), [answer["skips"]], "who skips")
    for engine, roles in DONE_BY.items():
        for role, functions in roles.items():
            with report.case(f"who {role}, {engine}"):
                _check_role(answers[engine][role], engine, functions, report)
    with report.case("who starts, v1_early"):
        report.true(
            in_early_v1["starts"] in EARLY_STARTS, f"{in_early_v1['starts']} does not work out positions."
        )


def _check_role(name: str, engine: str, functions: Sequence[str], report: Report) -> None:
    if name.startswith(("ExecutorBase", "LocalOrDistributed", "Worker")):
        report.misconception(
            "executor and worker act", "They ship the message. Nothing in them looks at the hit."
        )
    path = bobs_path()[engine]
    calls = [path.find(function) for function in functions]
    symbols = {place.symbol for call in calls for place in call.vllm}
    report.true(name in symbols, f"{name} does something else; on Bob's path it is not what does this.")


# -- 05.6 ---------------------------------------------------------------------------------------------------

OWN_BLOCKS = (
    "its own blocks count as a hit",
    "Once it is admitted, the sequence's own blocks are in the cache, and V0 calls them computed after the first "
    "chunk. From its admission on the answer must stay.",
)


CHUNKED: dict[str, Any] = {"mode": "faithful", "enable_chunked_prefill": True, "max_num_batched_tokens": 8}


def check_tracker(tracker: Any, report: Report) -> None:
    with report.case("what was evicted while it waited is not reported"):
        bench, bob = crowded(mode="faithful", tracker=tracker)
        cached = bench.manager.get_num_cached_tokens(bob)
        if cached == 12:
            report.as_given()
        report.equal(0, cached, "cached tokens, all blocks gone")
        (metadata,) = bench.schedule()
        report.equal([], metadata.computed_block_nums, "blocks handed to the worker")
        report.equal([13], bench.build([metadata]).query_lens, "tokens to compute")
    with report.case("what was computed while it waited is found"):
        bench = Bench(12, mode="faithful", tracker=tracker)
        bob = V0Sequence(100, range(13))
        report.equal(0, bench.manager.get_num_cached_tokens(bob), "before Ada comes")
        bench.run("ada", range(12))
        shrinks: Known = (
            0,
            "an answer only shrinks",
            "Somebody with the same beginning may run while it waits. Then there is more to find than at first.",
        )
        report.equal(12, bench.manager.get_num_cached_tokens(bob), "after Ada has run", known=(shrinks,))
    _check_admitted(tracker, report)
    with report.case("a decode is answered anew"):
        bench = Bench(12, mode="faithful", tracker=tracker)
        ada = bench.wait("ada", range(7), outputs=range(7, 12))
        for _ in range(3):
            bench.step()
        kept: Known = (
            0,
            "a decode keeps its prompt's answer",
            "Its blocks are computed by now, and it counts them.",
        )
        report.equal(8, bench.manager.get_num_cached_tokens(ada), "7 prompt tokens and 3 more", known=(kept,))
    with report.case("vLLM's recorded decisions, where they are right"):
        for name in BLOCK_TRACES:
            result = replay_blocks(name, tracker)
            report.true(result.difference is None, f"{name}: {result.difference}")
        for name in STEP_TRACES:
            result = replay_steps(name, tracker=tracker)
            report.true(result.difference is None, f"{name}: {result.difference}")
        _check_stale_trace(tracker, report)
    with report.case("Bob's question is answered from Ada's text"):
        right = PLACE.questions[0].answer
        report.equal(right, late_question(0, tracker, mode="faithful")[0].strip(), "his answer")


def _check_admitted(tracker: Any, report: Report) -> None:
    with report.case("from the admission on the answer stays, also between chunks"):
        bench = Bench(12, tracker=tracker, **CHUNKED)
        ada = bench.wait("ada", range(20))
        bench.step()
        answer = bench.manager.get_num_cached_tokens(ada)
        if answer:
            report.misconception(*OWN_BLOCKS)
        report.equal(0, answer, "8 of 20 tokens computed")
        report.equal([8], bench.step().query_lens, "tokens of the second chunk")
    with report.case("every sequence has an answer of its own"):
        bench = Bench(12, tracker=tracker, **CHUNKED)
        ada = bench.wait("ada", range(20))
        bench.step()
        bench.manager.get_num_cached_tokens(V0Sequence(100, range(50, 59)))
        answer = bench.manager.get_num_cached_tokens(ada)
        if answer:
            report.misconception(
                "one look makes all forget", "Ada runs, and her answer must stay, whoever else is looked at."
            )
        report.equal(0, answer, "Ada's, after somebody else was looked at")
    with report.case("a request that was preempted asks again"):
        bench = Bench(12, mode="faithful", tracker=tracker)
        ada = bench.wait("ada", range(9), outputs=range(9, 20))
        bench.step()
        bench.manager.free(ada)
        ada.reset_for_recompute()
        report.equal(8, bench.manager.get_num_cached_tokens(ada), "her own blocks, free and cached")


def _check_stale_trace(tracker: Any, report: Report) -> None:
    """The trace of the defect: as recorded until vLLM gives the old answer, and right from there."""
    before = replay_blocks("bm_stale_cached_count", tracker, until=STALE_AT)
    report.true(before.difference is None, f"bm_stale_cached_count: {before.difference}")
    trace = golden("bm_stale_cached_count")
    driver, right = BlockDriver(trace["config"], tracker), dict[str, Any]()
    for op in trace["ops"]:
        if op["op"] in ("get_num_cached_tokens", "get_common_computed_block_ids"):
            right |= driver.apply(op)
        else:
            driver.apply(op)
    wanted = {"num_cached_tokens": 0, "block_ids": []}
    report.equal(wanted, right, "bm_stale_cached_count, the last answers about B")


# -- 05.7 ---------------------------------------------------------------------------------------------------


def check_measured(
    computed_per_step: Callable[..., list[int]], fewer: dict[str, str], more_in_v1_at_16: int, report: Report
) -> None:
    prompt, again = list(range(40, 52)), list(range(40, 53))
    stories: tuple[tuple[str, list[list[list[int]]], int, tuple[list[int], list[int]]], ...] = (
        ("one prompt", [[prompt]], 4, ([12], [12])),
        ("a prompt, then three times the same", [[prompt], [prompt] * 3], 4, ([12, 3], [12, 12])),
        ("three times at once", [[prompt] * 3], 4, ([36], [20])),
        ("13 tokens twice", [[again], [again]], 4, ([13, 1], [13, 1])),
        ("12 tokens twice, blocks of 16", [[prompt], [prompt]], 16, ([12, 12], [12, 12])),
    )
    counted = (
        "found is counted as computed",
        "Tokens that come from the cache are not run. The mark run says how many were.",
    )
    for name, batches, block_size, expected in stories:
        with report.case(name):
            every = [sum(map(len, prompts)) for prompts in batches]
            for engine, tokens in zip(("v0", "v1"), expected, strict=True):
                got = computed_per_step(engine, batches, block_size)
                known: tuple[Known, ...] = ((every, *counted),) if every != tokens else ()
                report.equal(tokens, got, f"tokens per step, {engine.upper()}", known=known)
    with report.case("who computes fewer tokens"):
        always = (
            "V1 always computes less",
            "A repeat that is cached to its end costs V0 one token and V1 a block.",
        )
        report.equal("v0", fewer.get("repeated"), "repeated", known=(("v1", *always),))
        other = (
            "V0 always computes less",
            "V0 skips nothing that another request of the same step computes.",
        )
        report.equal("v1", fewer.get("together"), "together", known=(("v0", *other),))
    with report.case("the price of a repeat in blocks of 16"):
        known = (
            (16, "V0 computes nothing", "V1 computes 16 tokens and V0 one: the difference is asked for."),
            (3, "as with blocks of four", "V1 gives back a whole block, and a block has 16 tokens here."),
        )
        report.equal(15, more_in_v1_at_16, "tokens", known=known)
