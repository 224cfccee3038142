"""How the answers to exercise 07 are judged: by their behaviour, through public calls, on fresh objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from exercises.grader import Report
from exercises.grader.report import Known
from exercises.tasks.ex07_scene import (
    SMALL,
    Arrays,
    Prepare,
    arrays_of,
    filled,
    furthest,
    messages,
    mixed,
    replay_slots,
    rows_of,
    share,
)
from refengine.trace.codemap import call_path
from refengine.v1.input_batch import InputBatch
from refengine.v1.scheduler_output import ScheduledRequest

FROM_ZERO = (
    "positions start at 0 again",
    "Tokens that are computed already have the positions before. The first new one stands at num_computed_tokens.",
)
IS_SLOT = ("a position is a slot", "The block table says in which block a position lies.")
BY_ROW = (
    "slots by row",
    "A row of the batch is a place in the runner's tables. Blocks lie anywhere; the block table says where.",
)
STEP_ORDER = (
    "the order of the step is taken for the row",
    "The i-th request of a step may lie in any row of the batch: rows[i].",
)
ONLY_NEW = (
    "attention sees only the new tokens",
    "seq_lens counts what is read: the computed tokens and those of this step.",
)
NOT_THERE = (
    "an unfinished chunk sees what is not there",
    "Known tokens behind the chunk have no keys and values yet. What is read ends with this step's tokens.",
)
HEAD_OF_ROW = (
    "tokens from the head of the row",
    "The tokens of this step are those at its positions.",
)
NO_BOUNDS = (
    "query_start_loc holds lengths",
    "It says where each request begins in the list of tokens, and at its end how long the list is.",
)
CHUNK = (
    "an unfinished chunk is sampled",
    "What comes after a chunk is known: the prompt goes on. A token is sampled behind the last known one.",
)


def _arrays(shares: Sequence[ScheduledRequest]) -> tuple[InputBatch, np.ndarray, np.ndarray]:
    counts = np.array([each.num_tokens for each in shares])
    return filled(shares), np.arange(len(shares)), counts


# -- 07.1 ---------------------------------------------------------------------------------------------------


def check_small(
    positions: list[int],
    slots: list[int],
    query_start_loc: list[int],
    seq_lens: list[int],
    sampled: list[str],
    report: Report,
) -> None:
    batch, rows, counts = _arrays(list(SMALL.values()))
    right = {name: array.tolist() for name, array in arrays_of(batch, rows, counts).items()}
    with report.case("positions"):
        restart = [position for count in counts for position in range(count)]
        report.equal(right["positions"], list(positions), "positions", known=((restart, *FROM_ZERO),))
    with report.case("slots"):
        report.equal(right["slots"], list(slots), "slots", known=((right["positions"], *IS_SLOT),))
    with report.case("query_start_loc"):
        known = ((counts.tolist(), *NO_BOUNDS), (right["query_start_loc"][:-1], *NO_BOUNDS))
        report.equal(right["query_start_loc"], list(query_start_loc), "query_start_loc", known=known)
    with report.case("seq_lens"):
        known = ((counts.tolist(), *ONLY_NEW), (batch.num_tokens[rows].tolist(), *NOT_THERE))
        report.equal(right["seq_lens"], list(seq_lens), "seq_lens", known=known)
    with report.case("who is sampled"):
        done = [
            n
            for n, each in SMALL.items()
            if each.num_computed_tokens + each.num_tokens == len(each.token_ids)
        ]
        only_decode = (
            ["a"],
            "only decodes are sampled",
            "A prompt that is computed to its end gives a token, too.",
        )
        report.equal(done, sorted(sampled), "sampled", known=((list(SMALL), *CHUNK), only_decode))


# -- 07.2 ---------------------------------------------------------------------------------------------------

THREE = (
    share("a", range(9), [5, 2, 7], start=8, num_prompt_tokens=7),
    share("b", range(30, 33), [3], num_prompt_tokens=2),
    share("c", range(50, 56), [8, 1], start=4, num_prompt_tokens=5),
)
FORGETS = (
    "the moved row forgets a column",
    "All numbers of a request move with it. One that stays behind was another request's.",
)
WAS = rows_of(filled(THREE))  # what each row says, whoever has left meanwhile


def _rows_agree(batch: InputBatch, names: Sequence[str], report: Report) -> None:
    """The occupied rows are the first ones, and the index finds them."""
    if len(batch.request_ids) > len(names):
        report.misconception(
            "a hole is left", "Rows 0 to n - 1 are the occupied ones. The last one fills the hole."
        )
    report.equal(sorted(names), sorted(batch.request_ids), "request_ids")
    if {name: row for row, name in enumerate(batch.request_ids)} != batch.row_of:
        report.misconception("the index names the old row", "Whoever moves is found under its new row.")
    report.equal({name: row for row, name in enumerate(batch.request_ids)}, dict(batch.row_of), "row_of")
    report.equal(len(names), len(batch.params), "entries of params")
    report.equal(len(names), len(batch.adapters), "entries of adapters")


def _rows_say(
    batch: InputBatch, names: Sequence[str], report: Report, known: tuple[str, str] | None = None
) -> None:
    for name in names:
        got = rows_of(batch)[name]
        if got != WAS[name] and known:
            report.misconception(*known)
        for what, expected, value in zip(
            ("known tokens", "num_prompt_tokens", "num_computed_tokens", "block table"),
            WAS[name],
            got,
            strict=True,
        ):
            report.equal(expected, value, f"{name}'s {what}")


def check_batch(batch_class: Any, report: Report) -> None:
    with report.case("three requests come"):
        batch = filled(THREE, batch_class=batch_class)
        _rows_agree(batch, "abc", report)
        if batch.num_computed_tokens[batch.row_of["c"]] == 0:
            report.misconception(*FROM_ZERO)
        _rows_say(batch, "abc", report)
    for gone in "abc":
        with report.case(f"{gone} leaves"):
            batch = filled(THREE, batch_class=batch_class)
            batch.remove(gone)
            left = [name for name in "abc" if name != gone]
            _rows_agree(batch, left, report)
            _rows_say(batch, left, report, FORGETS)
    with report.case("somebody without a row leaves"):
        batch = filled(THREE, batch_class=batch_class)
        batch.remove("nobody")
        _rows_agree(batch, "abc", report)
    with report.case("all leave, and one comes back"):
        batch = filled(THREE, batch_class=batch_class)
        for name in "bac":
            batch.remove(name)
        _rows_agree(batch, "", report)
        batch.add(THREE[1])
        old = (
            "a reused row keeps the old table",
            "A new request begins with an empty table, whoever had the row.",
        )
        if batch.num_blocks[batch.row_of["b"]]:
            report.misconception(*old)
        report.equal(0, int(batch.num_blocks[batch.row_of["b"]]), "num_blocks of a new row")
        batch.add_blocks("b", [3])
        _rows_say(batch, "b", report, old)
    with report.case("a table grows"):
        batch = filled(THREE, batch_class=batch_class)
        batch.add_blocks("b", [6])
        batch.add_blocks("b", [])
        batch.add_blocks("b", [4, 9])
        got = rows_of(batch)["b"][3]
        if got[:1] != [3]:
            report.misconception(
                "blocks overwrite the table", "A running request is sent what was added, not all."
            )
        report.equal([3, 6, 4, 9], got, "b's table")
    with report.case("params follow their request"):
        batch = filled(THREE, batch_class=batch_class)
        params = dict(zip(batch.request_ids, batch.params, strict=True))
        batch.remove("a")
        report.true(
            all(batch.params[row] is params[name] for name, row in batch.row_of.items()),
            "The sampling parameters of a request are another one's.",
        )
    with report.case("the engine runs on it"):
        report.equal(_story({}), _story({"batch": batch_class}), "sampled tokens")


def _story(mine: Mapping[str, Any]) -> list[dict[str, int]]:
    """The tokens of the chapter's step and of some behind it."""
    desk = mixed(**mine)
    return [{name: int(row.argmax()) for name, row in desk.step().logits.items()} for _ in range(3)]


# -- 07.3 ---------------------------------------------------------------------------------------------------

STEPS = {
    "decode, hit and chunk": (list(SMALL.values()), [0, 1, 2]),
    "one prompt": ([share("a", range(60, 69), [5, 2, 7])], [0]),
    "a decode": ([share("a", range(60, 69), [5, 2, 7], start=8)], [0]),
    "behind a hit": ([share("a", range(60, 71), [5, 2, 7], start=4)], [0]),
    "a chunk that ends inside": ([share("a", range(60, 71), [5, 2, 7], start=3, num_tokens=6)], [0]),
    "rows out of order": (list(SMALL.values()), [2, 0, 1]),
    "a row that rests": (list(SMALL.values()), [2, 0]),
}


def _known(batch: InputBatch, rows: np.ndarray, counts: np.ndarray) -> dict[str, tuple[Known, ...]]:
    """Wrong arrays that show something."""
    right = arrays_of(batch, rows, counts)
    size, owner = batch.block_size, np.repeat(rows, counts)
    restart = np.concatenate([np.arange(count) for count in counts])
    by_row = (owner * batch.block_table.shape[1] + right["positions"] // size) * size + right[
        "positions"
    ] % size
    order = np.repeat(np.arange(len(rows)), counts)
    in_order = batch.block_table[order, right["positions"] // size] * size + right["positions"] % size
    lists: dict[str, list[tuple[np.ndarray, tuple[str, str]]]] = {
        "positions": [(restart, FROM_ZERO)],
        "token_ids": [
            (batch.token_ids[owner, restart], HEAD_OF_ROW),
            (batch.token_ids[order, right["positions"]], STEP_ORDER),
        ],
        "slots": [(right["positions"], IS_SLOT), (by_row, BY_ROW), (in_order, STEP_ORDER)],
        "query_start_loc": [(counts, NO_BOUNDS), (right["query_start_loc"][:-1], NO_BOUNDS)],
        "seq_lens": [(counts, ONLY_NEW), (batch.num_tokens[rows], NOT_THERE)],
    }
    return {name: tuple((value.tolist(), *what) for value, what in found) for name, found in lists.items()}


def check_prepare(prepare: Prepare, report: Report) -> None:
    names = ("positions", "token_ids", "slots", "query_start_loc", "seq_lens")
    for size in (4, 1, 3):
        for what, (shares, order) in STEPS.items():
            with report.case(f"{what}, blocks of {size}"):
                wide = [_spread(each, size) for each in shares]
                batch = filled(wide, block_size=size)
                rows = np.array(order)
                counts = np.array([wide[row].num_tokens for row in order])
                right, known = arrays_of(batch, rows, counts), _known(batch, rows, counts)
                got = _call(prepare, batch, rows, counts)
                for name in names:
                    report.true(name in got, f"{name} is missing.")
                    value = np.asarray(got[name]).tolist()
                    report.equal(right[name].tolist(), value, name, known=known[name])
    with report.case("the batch stays as it is"):
        batch, rows, counts = _arrays(list(SMALL.values()))
        before = rows_of(batch)
        _call(prepare, batch, rows, counts)
        if rows_of(batch) != before:
            report.misconception(
                "preparing counts", "The runner counts the tokens. Counted twice, they are skipped."
            )
        report.equal(before, rows_of(batch), "what the rows say")
    with report.case("vLLM's recorded slots"):
        replayed = replay_slots(prepare)
        report.true(replayed.difference is None, f"{replayed}.")
    with report.case("the model says what a plain forward says"):
        desk = mixed(prepare=prepare)
        for _ in range(3):
            for name, difference in furthest(desk, desk.step()).items():
                report.true(difference < 1e-3, f"{name}'s logits are off by {difference:.3g}.")


def _spread(each: ScheduledRequest, size: int) -> ScheduledRequest:
    """The same request with a table for blocks of another size: odd ids, downwards."""
    if size == 4 or each.block_ids is None:
        return each
    count, first = -(-len(each.token_ids) // size), 90 + 7 * ord(each.request_id[0]) % 31
    return share(
        each.request_id,
        each.token_ids,
        range(first, first - 2 * count, -2),
        start=each.num_computed_tokens,
        num_tokens=each.num_tokens,
        num_prompt_tokens=each.num_prompt_tokens,
    )


def _call(prepare: Prepare, batch: InputBatch, rows: np.ndarray, counts: np.ndarray) -> Arrays:
    got = prepare(batch, rows.copy(), counts.copy())
    return dict(got)


# -- 07.4 ---------------------------------------------------------------------------------------------------

SAMPLING: dict[str, tuple[list[ScheduledRequest], list[int]]] = {
    "a chunk, and its last token": (
        [share("a", range(12), [1, 2, 3], num_tokens=8), share("b", range(9), [4, 5, 6], start=8)],
        [8],
    ),
    "a chunk of one token": ([share("a", range(12), [1, 2, 3], start=4, num_tokens=1)], []),
    "a whole prompt and a decode": (
        [share("a", range(5), [1, 2]), share("b", range(9), [4, 5, 6], start=8, num_prompt_tokens=6)],
        [4, 5],
    ),
    "the end of a chunked prompt": ([share("a", range(12), [1, 2, 3], start=8)], [3]),
    "back with its outputs, all at once": ([share("a", range(11), [1, 2, 3], num_prompt_tokens=6)], [10]),
}
RESUMED: dict[str, tuple[list[ScheduledRequest], list[int]]] = {
    "back, and in its prompt": ([share("a", range(11), [1, 2, 3], num_tokens=4, num_prompt_tokens=6)], []),
    "back with its outputs, up to one of them": (
        [share("a", range(11), [1, 2, 3], num_tokens=8, num_prompt_tokens=6)],
        [],
    ),
    "back with its outputs, up to the prompt's end": (
        [share("a", range(11), [1, 2, 3], num_tokens=6, num_prompt_tokens=6)],
        [],
    ),
}
PROMPT_IS_ALL = (
    "the prompt is taken for all there is",
    "A request that was preempted computes its outputs again as well. They are known; nothing is sampled before them.",
)


def check_sampled(who_samples: Any, report: Report) -> None:
    results = {what: _indices(who_samples, shares) for what, (shares, _) in (SAMPLING | RESUMED).items()}
    given = {what: _as_given(shares) for what, (shares, _) in (SAMPLING | RESUMED).items()}
    if results == given:
        report.as_given()
    for what, (shares, expected) in (SAMPLING | RESUMED).items():
        with report.case(what):
            ends = np.array([each.num_tokens for each in shares]).cumsum() - 1
            everyone = sorted(ends.tolist())
            if what == "back, and in its prompt" and results[what] == [3]:
                report.misconception("output means decode", "It has output, and computes its prompt again.")
            elif what in RESUMED and results[what] and results["a chunk of one token"] == []:
                report.misconception(*PROMPT_IS_ALL)
            elif (
                what == "a chunk of one token"
                and results[what]
                and results["a chunk, and its last token"] == [8]
            ):
                report.misconception(
                    "one token means decode", "A chunk may have one token, and a prompt go on."
                )
            elif what in SAMPLING and results[what] == everyone != expected:
                report.misconception(*CHUNK)
            elif results[what] != expected and not results[what]:
                report.misconception(
                    "the step's own tokens are left out", "It counts what is computed after the step."
                )
            report.equal(expected, results[what], "indices")


def _indices(who_samples: Any, shares: Sequence[ScheduledRequest]) -> Any:
    got = who_samples(*_arrays(shares))
    return sorted(int(index) for index in got)


def _as_given(shares: Sequence[ScheduledRequest]) -> list[int]:
    batch, rows, counts = _arrays(shares)
    done = batch.num_computed_tokens[rows] + counts >= batch.num_prompt_tokens[rows]
    return [int(end) - 1 for end in counts.cumsum()[done]]


# -- 07.5 ---------------------------------------------------------------------------------------------------

PROMPTS = [range(10 * i, 10 * i + 20 + i) for i in range(4)]


def check_carried(carried: Any, last_in_v0: int, last_in_v1: int, report: Report) -> None:
    cases = {
        "two steps": [[([1, 2, 3], [7]), ([4], [])], [([], [8]), ([], [])]],
        "a step without requests": [[], [([5, 6], [1])]],
    }
    for what, steps in cases.items():
        with report.case(what):
            _carried(carried, steps, report)
    last = {}
    for engine in ("v0", "v1"):
        with report.case(f"the messages of {engine.upper()}"):
            steps = messages(engine, PROMPTS, 6)
            last[engine] = sum(len(tokens) + len(blocks) for tokens, blocks in steps[-1])
            _carried(carried, steps, report)
    with report.case("the last step in V0"):
        report.equal(last["v0"], last_in_v0, "ids")
    with report.case("the last step in V1"):
        if last_in_v1 == last["v0"]:
            report.misconception(
                "V1 sends all, too", "V1's runner keeps what it was told. Only new blocks are sent."
            )
        elif last_in_v1 in (len(PROMPTS), len(PROMPTS) + last["v1"]):
            report.misconception(
                "the sampled token is sent", "The runner sampled it. It has the token already."
            )
        report.equal(last["v1"], last_in_v1, "ids")


def _carried(carried: Any, steps: Any, report: Report) -> None:
    right = [sum(len(tokens) + len(blocks) for tokens, blocks in step) for step in steps]
    tokens_only = [sum(len(tokens) for tokens, _ in step) for step in steps]
    known = ((tokens_only, "block ids are left out", "A table is part of the message."),)
    report.equal(right, list(carried(steps)), "ids of each step", known=known)


# -- 07.6 ---------------------------------------------------------------------------------------------------

POSITIONS = {
    "V0": ("ModelInputForGPUBuilder._compute_lens", "ModelInputForGPUBuilder._compute_for_prefix_cache_hit"),
    "runner V1": ("GPUModelRunner._prepare_inputs",),
    "runner V2": ("GPUModelRunner.prepare_inputs",),
}
SLOTS = {
    "V0": ("compute_slot_mapping", "FlashAttentionMetadataBuilder._add_seq_group"),
    "runner V1": ("BlockTable.compute_slot_mapping", "ComputeSlotMappingKernel.kernel"),
    "runner V2": ("BlockTables.compute_slot_mappings",),
}


def check_map(makes_positions: dict[str, str], makes_slots: dict[str, str], report: Report) -> None:
    names = {step.place.symbol for path in ("v0", "v1") for step in call_path(path)}
    for what, answer, right, other_job in (
        ("positions", makes_positions, POSITIONS, SLOTS),
        ("slots", makes_slots, SLOTS, POSITIONS),
    ):
        for runner, symbols in right.items():
            with report.case(f"{what}, {runner}"):
                got = answer.get(runner)
                report.true(got in names, f"{got} is not in the table.")
                others = [symbol for other, found in right.items() if other != runner for symbol in found]
                if got in others:
                    report.misconception(
                        "one runner is taken for another",
                        "The three lie in different files: look at the column file.",
                    )
                elif got in [symbol for found in other_job.values() for symbol in found]:
                    report.misconception(
                        "positions and slots come from one place",
                        "A slot needs the block table, a position does not.",
                    )
                elif got == "GPUModelRunner._update_states":
                    report.misconception(
                        "who keeps is who computes",
                        "It copies what the scheduler said into the batch, and no more.",
                    )
                report.true(got in symbols, f"{got} does not make the {what}.")
