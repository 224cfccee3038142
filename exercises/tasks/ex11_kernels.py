"""Checks of exercise 11, kernels: a split of a decode, the merge, a tile of queries."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from exercises.grader import Report
from exercises.grader.values import difference
from exercises.tasks.ex08_scene import Pages, exactly, make_pages
from exercises.tasks.ex08_wrong import HEADS, NO_SCALE, PAST_END, TOO_FEW, left_aligned, seen, variant
from exercises.tasks.ex08_wrong import NO_MASK as ALL_KEYS
from exercises.tasks.ex11_checks import BY_LOG, INF_INF, MEAN, OVERFLOWS, READS_EMPTY, merged, wrongly_merged
from exercises.tasks.kernel_checks import (
    SAME_ELEMENT,
    ByZero,
    Contents,
    Launch,
    Suspect,
    WriteRace,
    check_budgets,
    check_launch,
    elements,
    sectors,
    unwritten,
)
from kernels.interpreter import BoundsError, KernelError, RaceError

# -- 11.4 ------------------------------------------------------------------------------------------------------

FLOORED: Suspect = ("the rest of a division is lost", "Round the size up, or the last keys belong to nobody.")
EVERYTHING: Suspect = ("every split reads all keys", "A split goes from split * size to its own end.")
UNDIVIDED: Suspect = (
    "not divided by the sum",
    "A part's result has weights that sum to 1, as if it were all.",
)
NO_LOG: Suspect = ("a sum, not its logarithm", "The sum stands under its largest score: largest + log(sum).")
LARGEST: Suspect = (
    "the largest is taken for the log sum",
    "log(a + b) is more than the larger of the two logs.",
)
NO_SHRINK: Suspect = (
    "old sums are not rescaled",
    "When a larger score comes, what was summed shrinks by exp(old - new).",
)
NOT_E: Suspect = ("a logarithm to another base", "Weights are powers of e: take math.log of their sum.")
TWICE: Suspect = ("keys are read more than once", "A key is read once, and carried on in a register.")
FAR: Suspect = (
    "more of the values is fetched than used",
    "Read each value once, and give lane l the numbers l and l + 32: then neighbours read neighbours.",
)
OUTSIDE: Suspect = (
    "an index outside of its array",
    "The grid is (sequence, head, split). Positions end at seq_len, and a table is asked for position // block_size.",
)
EMPTY: Suspect = (
    "an empty split is divided by nothing",
    "Its sum is 0. Ask whether there was a key before dividing or taking a logarithm.",
)


def check_split(decode_split: Any, report: Report) -> None:
    cases = (
        ("19 and 2 tokens in 3 splits", make_pages([(1, 19), (1, 2)], head_dim=64, seed=1), 3),
        ("9 tokens in one split", make_pages([(1, 9)], head_dim=64, seed=2), 1),
        ("7 tokens in 5 splits, the last empty", make_pages([(1, 7)], 4, 2, 1, 64, seed=3), 5),
        ("scores in the thousands", make_pages([(1, 10)], 4, 2, 1, 64, scale=200.0, seed=4), 2),
    )
    for title, pages, num_splits in cases:
        num_seqs, num_heads, head_dim = pages.query.shape
        right, wrong = parts(pages, num_splits), wrong_parts(pages, num_splits)
        launch = Launch(
            title,
            grid=(num_seqs, num_heads, num_splits),
            block=32,
            arguments={
                "partial": unwritten(num_seqs, num_heads, num_splits, head_dim),
                "log_sums": unwritten(num_seqs, num_heads, num_splits),
                **_tensors(pages),
                "seq_lens": pages.seq_lens,
                "scale": pages.scale,
            },
            expected=right,
        )
        errors: dict[type[KernelError], Suspect] = {ByZero: EMPTY, BoundsError: OUTSIDE}
        cost = check_launch(report, decode_split, launch, known=wrong, errors=errors)
        least = int(pages.seq_lens.sum()) * num_heads * head_dim
        check_budgets(
            report,
            cost,
            elements("key_cache", "read", most=least, least=least, suspect=TWICE),
            sectors("value_cache", "read", most=least // 8, least=least // 8, suspect=FAR),
        )


def _tensors(pages: Pages) -> dict[str, Tensor]:
    return {
        "query": pages.query,
        "key_cache": pages.key_cache,
        "value_cache": pages.value_cache,
        "block_tables": pages.block_tables,
    }


Share = Callable[
    [int, int, int], tuple[int, int]
]  # (split, num_splits, seq_len) -> its first and its last + 1


def evenly(split: int, num_splits: int, seq_len: int) -> tuple[int, int]:
    size = -(-seq_len // num_splits)
    return min(split * size, seq_len), min((split + 1) * size, seq_len)


def floored(split: int, num_splits: int, seq_len: int) -> tuple[int, int]:
    size = seq_len // num_splits
    return split * size, (split + 1) * size


def everything(split: int, num_splits: int, seq_len: int) -> tuple[int, int]:
    return 0, seq_len


def parts(
    pages: Pages,
    num_splits: int,
    share: Share = evenly,
    scale: float | None = None,
    by_remainder: bool = False,
) -> dict[str, Tensor]:
    """What the splits should write, float64; with other arguments, what wrong ones write. Also their sums."""
    num_seqs, num_heads, head_dim = pages.query.shape
    partial = torch.zeros(num_seqs, num_heads, num_splits, head_dim, dtype=torch.float64)
    log_sums = torch.full((num_seqs, num_heads, num_splits), -torch.inf, dtype=torch.float64)
    kv_heads = pages.key_cache.shape[2]
    every = torch.arange(num_heads)
    of = every % kv_heads if by_remainder else every // (num_heads // kv_heads)
    for seq, (keys, values) in enumerate(zip(pages.keys, pages.values, strict=True)):
        keys, values = keys.double()[:, of], values.double()[:, of]
        scores = torch.einsum("hd,khd->hk", pages.query[seq].double(), keys)
        scores *= pages.scale if scale is None else scale
        for split in range(num_splits):
            first, stop = share(split, num_splits, len(keys))
            if first < stop:
                weights = scores[:, first:stop].softmax(-1)
                partial[seq, :, split] = torch.einsum("hk,khd->hd", weights, values[first:stop])
                log_sums[seq, :, split] = scores[:, first:stop].logsumexp(-1)
    return {"partial": partial, "log_sums": log_sums}


def wrong_parts(pages: Pages, num_splits: int) -> dict[Suspect, Contents]:
    """What wrong ideas leave, where that is something else than the right ones do."""
    right = parts(pages, num_splits)
    tops, sums, unshrunk = (torch.full_like(right["log_sums"], -torch.inf) for _ in range(3))
    past = {name: tensor.clone() for name, tensor in right.items()}
    group = pages.query.shape[1] // pages.key_cache.shape[2]
    for seq, keys in enumerate(pages.keys):
        every = keys.double().repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,khd->hk", pages.query[seq].double(), every) * pages.scale
        for split in range(num_splits):
            first, stop = evenly(split, num_splits, len(keys))
            if first < stop:
                some = scores[:, first:stop]
                tops[seq, :, split] = some.amax(-1)
                sums[seq, :, split] = (some - some.amax(-1, keepdim=True)).exp().sum(-1)
                running = some.cummax(-1).values
                unshrunk[seq, :, split] = some.amax(-1) + (some - running).exp().sum(-1).log()
            if (split + 1) * -(-len(keys) // num_splits) > len(keys):
                past["partial"][seq, :, split] = torch.nan
    full = right["log_sums"] > -torch.inf
    undivided = torch.where(full[..., None], right["partial"] * sums[..., None], 0.0)
    bare = torch.where(
        full[..., None], right["partial"] * (right["log_sums"].exp() / right["log_sums"].exp())[..., None], 0
    )
    wrong = {
        FLOORED: parts(pages, num_splits, floored),
        EVERYTHING: parts(pages, num_splits, everything),
        HEADS: parts(pages, num_splits, by_remainder=True),
        NO_SCALE: parts(pages, num_splits, scale=1.0),
        UNDIVIDED: {"partial": undivided},
        NO_LOG: {"log_sums": sums},
        LARGEST: {"log_sums": tops},
        NOT_E: {"log_sums": torch.where(full, tops + sums.log2(), tops)},
        NO_SHRINK: {"log_sums": unshrunk},
        PAST_END: {"partial": past["partial"]},
        OVERFLOWS: {"partial": bare},
    }
    return {
        suspect: contents
        for suspect, contents in wrong.items()
        if any(difference(right[name].float(), tensor.float()) for name, tensor in contents.items())
    }


# -- 11.5 ------------------------------------------------------------------------------------------------------

NOTHING: Suspect = (
    "nothing divided by nothing",
    "A sequence without keys has the sum 0. Its result is zero, and not 0 / 0.",
)
NO_KEYS: Suspect = (
    "no result for a sequence without keys",
    "It is zero, and has to be written. Neither 0 / 0 nor -inf - -inf is a number.",
)
OUTSIDE_PARTS: Suspect = (
    OUTSIDE[0],
    "The grid is (sequence, head), and thread d has number d of the result.",
)
FROM_ZERO: Suspect = (
    "the largest starts at 0",
    "If all log sums are far below 0, every weight is 0. Start below every log sum.",
)


def check_merge_parts(merge_parts: Any, report: Report) -> None:
    shift = torch.tensor([0.0, 2.0, -3.0])
    cases = (
        ("three parts", shift, ()),
        ("the last part is empty, its row is NaN", shift, ((0, 2), (1, 2))),
        ("the first part is empty", shift, ((0, 0),)),
        ("one sequence has no keys", shift, ((1, 0), (1, 1), (1, 2))),
        ("log sums near 1000", shift + 1000, ()),
        ("log sums near -1000", shift - 1000, ((0, 1),)),
        ("one part", torch.zeros(1), ()),
    )
    for seed, (title, moved, gone) in enumerate(cases):
        random = torch.Generator().manual_seed(seed)
        partial = torch.randn(2, 3, len(moved), 64, generator=random)
        log_sums = torch.randn(2, 3, len(moved), generator=random) + moved
        for seq, part in gone:
            partial[seq, :, part], log_sums[seq, :, part] = torch.nan, -torch.inf
        by_part = partial.movedim(2, 0), log_sums.movedim(2, 0)
        right = merged(*by_part)[0]
        wrong: dict[Suspect, Contents] = {
            suspect: {"out": wrongly_merged(*by_part)[suspect]}
            for suspect in (READS_EMPTY, MEAN, BY_LOG, OVERFLOWS, INF_INF)
        }
        if log_sums.isinf().all(2).any():
            wrong = {NO_KEYS: wrong[READS_EMPTY]}
        elif (0, 0) in gone:  # who reads the row of an empty part was found in the case before
            wrong = {INF_INF: wrong[READS_EMPTY]}
        if float(moved.max()) < -900:
            wrong[FROM_ZERO] = {"out": torch.zeros_like(right)}
        launch = Launch(
            title,
            grid=(2, 3),
            block=64,
            arguments={"out": unwritten(2, 3, 64), "partial": partial, "log_sums": log_sums},
            expected={"out": right},
        )
        cost = check_launch(
            report, merge_parts, launch, known=wrong, errors={ByZero: NOTHING, BoundsError: OUTSIDE_PARTS}
        )
        full = 64 * int((log_sums > -torch.inf).sum())
        suspect = (READS_EMPTY[0], "Whoever knows that a part is empty need not read its row.")
        check_budgets(report, cost, elements("partial", "read", most=full, least=full, suspect=suspect))


# -- 11.8 ------------------------------------------------------------------------------------------------------

NO_BARRIER: Suspect = (
    "a barrier is missing",
    "One before the tile is used, for others filled it; one after, or a fast warp overwrites what a slow one reads.",
)
EACH_ITS_OWN: Suspect = (
    "every query fetches its own keys",
    "The four warps of a block share the tile: each brings a quarter of it, and all use all of it.",
)
TOO_FAR: Suspect = (
    "keys are fetched that no query of the block sees",
    "A block stops behind the last key of its last query, within a tile of keys, too.",
)
NO_CONTEXT: Suspect = (
    "the context is forgotten",
    "Query i is no token i: it stands at position seq_len - num_queries + i.",
)
OTHERS_QUERY: Suspect = (
    "a tile's rows all see as much",
    "Row i of the tile sees one key more than row i - 1.",
)


def check_tile(attend_tile: Any, report: Report) -> None:
    cases = (
        ("a chunk: the last 6 of 19 tokens", make_pages([(6, 19)], 4, 1, 1, 64, seed=1)),
        ("a prompt of 5", make_pages([(5, 5)], 4, 4, 2, 64, seed=2)),
        ("one query, 9 tokens", make_pages([(1, 9)], 8, 1, 1, 64, seed=3)),
        ("scores in the thousands", make_pages([(2, 4)], 4, 1, 1, 64, scale=200.0, seed=4)),
    )
    for title, pages in cases:
        num_queries, num_heads, _ = pages.query.shape
        total, keys, values = int(pages.seq_lens[0]), pages.keys[0], pages.values[0]
        some = (pages.query, keys, values, pages.scale)
        last = [min(start + 4, num_queries) - 1 for start in range(0, num_queries, 4) for _ in range(4)]
        wrong: dict[Suspect, Contents] = {
            ALL_KEYS: {
                "out": variant(*some, lambda start, count: torch.ones(count, start + count, dtype=torch.bool))
            },
            OTHERS_QUERY: {"out": variant(*some, lambda start, count: seen(start, count)[last[:count]])},  # noqa: B023
            NO_CONTEXT: {"out": variant(*some, left_aligned)},
            TOO_FEW: {"out": variant(*some, lambda start, count: seen(start, count, -1))},
            HEADS: {"out": variant(*some, by_remainder=True)},
            NO_SCALE: {"out": variant(*some[:3], 1.0)},
        }
        launch = Launch(
            title,
            grid=(math.ceil(num_queries / 4), num_heads),
            block=(32, 4),
            arguments={
                "out": unwritten(*pages.query.shape),
                **{name: tensor for name, tensor in _tensors(pages).items() if name != "block_tables"},
                "table": pages.block_tables[0].contiguous(),
                "seq_len": total,
                "scale": pages.scale,
            },
            expected={"out": exactly(*some)},
        )
        cost = check_launch(
            report, attend_tile, launch, known=wrong, errors={WriteRace: SAME_ELEMENT, RaceError: NO_BARRIER}
        )
        stops = [total - num_queries + min(start + 4, num_queries) for start in range(0, num_queries, 4)]
        least = sum(stops) * num_heads * 64
        alone = sum(range(total - num_queries + 1, total + 1)) * num_heads * 64  # each query for itself
        used = cost.total("global", "read", "key_cache").lanes if cost else 0
        suspect = EACH_ITS_OWN if used > (least + alone) / 2 else TOO_FAR
        check_budgets(report, cost, elements("key_cache", "read", most=least, least=least, suspect=suspect))
