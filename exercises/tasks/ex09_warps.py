"""Checks of exercise 09, lanes of a warp: products, a softmax in one pass, scores over pages."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from exercises.grader import Report
from exercises.tasks.ex08_scene import draw, make_pages
from exercises.tasks.ex09_checks import FAR_APART, NO_TABLE, ONE_ROUND, OTHER_SIZE
from exercises.tasks.kernel_checks import (
    BlockRace,
    Budget,
    Contents,
    Launch,
    Suspect,
    WarpRace,
    check_budgets,
    check_launch,
    elements,
    sectors,
    unwritten,
)
from kernels.interpreter import BarrierError, DeadlockError, KernelError, RaceError

HALF_A_WARP: Suspect = (
    "half of the warp is left out",
    "A warp has 32 lanes: distances 16, 8, 4, 2 and 1 bring all of them together.",
)
ALL_WRITE: Suspect = (
    "every lane writes the result",
    "Two writes of one element race, even of the same value: let lane 0 write.",
)
SOME_LANES: Suspect = (
    "a shuffle that some lanes of its mask do not reach",
    "The mask 0xFFFFFFFF promises all 32 lanes. Those without an element go along, with 0.",
)
THROUGH_MEMORY: Suspect = (
    "the sum goes through shared memory",
    "A shuffle hands a register from lane to lane.",
)
SAME_ROW: Suspect = (
    "two warps have the same row",
    "Count the warps of the whole grid: warp w of it is cuda.grid(1) // 32.",
)
ERRORS: dict[type[KernelError], Suspect] = {
    BlockRace: SAME_ROW,
    WarpRace: SAME_ROW,
    RaceError: ALL_WRITE,
    BarrierError: SOME_LANES,
    DeadlockError: SOME_LANES,
}
NO_SHARED = Budget("accesses to shared memory", lambda c: c.total("shared").lanes, 0, 0, THROUGH_MEMORY)

# -- 09.9: products ------------------------------------------------------------------------------------------


def check_dots(dot_products: Any, report: Report) -> None:
    for num_keys, head_dim in ((10, 40), (29, 72)):
        query, keys = draw(head_dim, seed=1), draw(num_keys, head_dim, seed=2)
        products = keys.double() * query.double()
        in_half = torch.arange(head_dim) % 32 < 16
        wrong: dict[Suspect, Contents] = {
            HALF_A_WARP: {"scores": products[:, in_half].sum(1)},
            ONE_ROUND: {"scores": products[:, :32].sum(1)},
            SOME_LANES: {"scores": torch.full((num_keys,), torch.nan).double()},
        }
        launch = Launch(
            f"{num_keys} keys of {head_dim} numbers, {-(-num_keys // 4)} blocks of 4 warps",
            grid=-(-num_keys // 4),
            block=128,
            arguments={"scores": unwritten(num_keys), "query": query, "keys": keys},
            expected={"scores": products.sum(1)},
        )
        cost = check_launch(report, dot_products, launch, known=wrong, errors=ERRORS)
        least = num_keys * head_dim // 8
        check_budgets(
            report, cost, sectors("keys", "read", most=least, least=least, suspect=FAR_APART), NO_SHARED
        )


# -- 09.10: one pass -----------------------------------------------------------------------------------------

OVERFLOWS: Suspect = ("the exponential overflows", "Subtract the largest score before the exponential.")
NO_SHRINK: Suspect = (
    "the old sum does not shrink",
    "The sum was taken under an older, smaller maximum: times exp(old - new) when a larger score comes.",
)
NO_SHRINK_OF_LANES: Suspect = (
    "sums of lanes are added as they are",
    "Each lane's sum stands under its own maximum. Both shrink to the larger of the two before they are added.",
)
FROM_ZERO: Suspect = (
    "the largest starts at 0",
    "If all scores are far below 0, every exponential is 0. Start below every score.",
)
NOT_A_NUMBER: Suspect = (
    "minus infinity minus minus infinity",
    "A lane without a score starts at -inf, and -inf - -inf is no number. LOWEST - LOWEST is 0.",
)
TWO_PASSES: Suspect = (
    "a second pass over the scores",
    "First the largest and then the sum reads everything twice. Carry both, and shrink.",
)


def check_online(online_softmax: Any, report: Report) -> None:
    cases = (
        ("10 rows of 72 scores", draw(10, 72, seed=1) * 3),
        ("rows of 5 scores, fewer than lanes", draw(9, 5, seed=2)),
        ("scores near 10,000", draw(9, 45, seed=3) * 2 + 10_000),
        ("scores near -10,000", draw(9, 45, seed=4) * 2 - 10_000),
    )
    for title, scores in cases:
        num_rows = len(scores)
        largest = scores.double().amax(1)
        shifted = (scores.double() - largest[:, None]).exp()
        right = {"largest": largest, "total": shifted.sum(1)}
        wrong: dict[Suspect, Contents] = {
            FROM_ZERO: {
                "largest": largest.clamp(min=0),
                "total": (scores.double() - largest.clamp(min=0)[:, None]).exp().sum(1),
            },
            OVERFLOWS: {"total": scores.double().exp().sum(1)},
            NO_SHRINK: {"total": _folded(scores, shrinks=False)},
            NO_SHRINK_OF_LANES: {"total": _folded(scores, lanes_shrink=False)},
            NOT_A_NUMBER: {"total": torch.full_like(largest, torch.nan)},
        }
        launch = Launch(
            title,
            grid=-(-num_rows // 4),
            block=128,
            arguments={"largest": unwritten(num_rows), "total": unwritten(num_rows), "scores": scores},
            expected=right,
        )
        cost = check_launch(report, online_softmax, launch, known=wrong, errors=ERRORS)
        if num_rows == 10:
            reads = elements("scores", "read", most=scores.numel(), least=scores.numel(), suspect=TWO_PASSES)
            least = scores.numel() // 8
            by_sector = sectors("scores", "read", most=least, least=least, suspect=FAR_APART)
            check_budgets(report, cost, reads, by_sector, NO_SHARED)


def _folded(scores: Tensor, shrinks: bool = True, lanes_shrink: bool = True) -> Tensor:
    """The sums that a warp ends with in lane 0, if what was summed before does not shrink, or what lanes bring."""
    return torch.tensor([_fold_row(row, shrinks, lanes_shrink) for row in scores.double().tolist()])


def _fold_row(scores: list[float], shrinks: bool, lanes_shrink: bool) -> float:
    lanes = []
    for lane in range(32):
        top, total = -3.0e38, 0.0
        for score in scores[lane::32]:
            above = max(top, score)
            total = total * (math.exp(top - above) if shrinks else 1.0) + math.exp(score - above)
            top = above
        lanes.append((top, total))
    for distance in (16, 8, 4, 2, 1):
        lanes = [_pair(lanes[lane], lanes[lane ^ distance], lanes_shrink) for lane in range(32)]
    return lanes[0][1]


def _pair(mine: tuple[float, float], other: tuple[float, float], shrinks: bool) -> tuple[float, float]:
    above = max(mine[0], other[0])
    if not shrinks:
        return above, mine[1] + other[1]
    return above, mine[1] * math.exp(mine[0] - above) + other[1] * math.exp(other[0] - above)


# -- 09.11: scores over pages --------------------------------------------------------------------------------

BY_REMAINDER: Suspect = (
    "KV head by remainder",
    "Neighbouring query heads share a KV head: head // group, with group = num_heads // num_kv_heads.",
)
NO_SCALE: Suspect = ("the scale is left out", "Multiply by the scale that is given.")


def check_pages(paged_scores: Any, report: Report) -> None:
    for num_heads, seq_len, block_size, head_dim in ((6, 13, 5, 40), (4, 22, 8, 72)):
        pages = make_pages([(1, seq_len)], block_size, num_heads, head_dim=head_dim, seed=seq_len)
        query, keys, table = pages.query[0], pages.keys[0], pages.block_tables[0]
        cache = pages.key_cache.flatten(0, 1)
        positions, half = torch.arange(seq_len), torch.arange(head_dim) % 32 < 16
        by_four = pages.key_cache[table[positions // 4 % len(table)], positions % 4]
        launch = Launch(
            f"{num_heads} heads, {seq_len} keys in blocks of {block_size}, "
            f"{-(-seq_len // 4)} x {num_heads} blocks of threads",
            grid=(-(-seq_len // 4), num_heads),
            block=128,
            arguments={
                "scores": unwritten(num_heads, seq_len),
                "query": query,
                "key_cache": pages.key_cache,
                "block_table": table,
                "scale": pages.scale,
            },
            expected={"scores": _scores(query, keys) * pages.scale},
        )
        wrong: dict[Suspect, Contents] = {
            BY_REMAINDER: {"scores": _scores(query, keys, by_remainder=True) * pages.scale},
            NO_SCALE: {"scores": _scores(query, keys)},
            NO_TABLE: {"scores": _scores(query, cache[positions]) * pages.scale},
            OTHER_SIZE: {"scores": _scores(query, by_four) * pages.scale},
            ONE_ROUND: {"scores": _scores(query[:, :32], keys[..., :32]) * pages.scale},
            HALF_A_WARP: {"scores": _scores(query[:, half], keys[..., half]) * pages.scale},
        }
        cost = check_launch(report, paged_scores, launch, known=wrong, errors=ERRORS)
        least = 2 * seq_len * head_dim // 8  # 2 KV heads, each key read once
        group = num_heads // 2
        budget = sectors("key_cache", "read", most=group * least, least=least, suspect=FAR_APART)
        check_budgets(report, cost, budget, NO_SHARED)


def _scores(query: Tensor, keys: Tensor, by_remainder: bool = False) -> Tensor:
    """query `[heads, head_dim]`, keys `[tokens, KV heads, head_dim]`. Returns: `[heads, tokens]` float64."""
    heads, kv_heads = len(query), keys.shape[1]
    every = torch.arange(heads)
    of = every % kv_heads if by_remainder else every // (heads // kv_heads)
    return torch.einsum("hd,thd->ht", query.double(), keys[:, of].double())
