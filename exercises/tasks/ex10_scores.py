"""How scores are judged in exercise 10: of each query head for itself, and of a whole group at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from exercises.grader import Report
from exercises.tasks.ex08_scene import Pages, make_pages
from exercises.tasks.ex08_wrong import HEADS, NO_SCALE, PAST_END
from exercises.tasks.ex10_checks import FAR_APART
from exercises.tasks.kernel_checks import (
    ERRORS,
    Contents,
    Launch,
    Suspect,
    check_budgets,
    check_launch,
    elements,
    sectors,
)
from kernels.interpreter import BoundsError

NOBODY = 7e7  # what outputs hold before a kernel runs: a number that no right one computes, and no NaN
NO_TABLE: Suspect = ("a position is a slot", "The block table says in which block a position lies.")
ONE_LANE: Suspect = ("one lane's share", "The lanes have a part of the sum each; lanes_sum adds them up.")
ONE_ROUND: Suspect = (
    "head_dim ends at 32",
    "A row may be longer than a warp, which has 32 lanes: a lane goes on with d + 32 until the row ends.",
)
NOT_ALL_LANES: Suspect = (
    "not all lanes call lanes_sum",
    "A lane without a number of the key has the sum 0, and brings that. The result of the others waits for it.",
)
BEHIND: Suspect = (
    "positions behind the end are written",
    "`out` may be longer than the sequence; what stands behind seq_len stays as it is.",
)
CARRIED: Suspect = ("a sum goes on from key to key", "A score belongs to one key: its sum begins at 0.")
NOT_SET: Suspect = (
    "sums begin with anything",
    "cuda.local.array gives memory, not zeros. Set each sum to 0 before a key.",
)
OUTSIDE: Suspect = (
    "an index is outside its array",
    "The sentence above has the index. A key is [block, offset, KV head, number], at a position below seq_len.",
)
INDICES = {**ERRORS, BoundsError: OUTSIDE}  # a grid of heads and sequences needs no guard
ONCE_EACH: Suspect = (
    "a key is read for each query head",
    "The heads of a group share it: load the number once and multiply it with the query of each.",
)
ONE_HEAD: Suspect = ("one query head per KV head", "Every head of the group has scores of its own.")

# title -> (tokens, block size, query heads, KV heads, head_dim)
SCORES: dict[str, tuple[int, int, int, int, int]] = {
    "13 tokens, rows of 40 numbers": (13, 4, 4, 2, 40),
    "the last block is full": (12, 4, 2, 1, 64),
    "one token": (1, 8, 3, 3, 7),
    "groups of three, blocks of 5": (9, 5, 6, 2, 33),
}
GROUPS: dict[str, tuple[int, int, int, int, int]] = {
    "a group of 1": (9, 4, 2, 2, 40),
    "a group of 2": (9, 4, 4, 2, 40),
    "a group of 4": (9, 4, 8, 2, 40),
    "a group of 4, rows of 33 numbers": (6, 5, 4, 1, 33),
}


def check_scores(scores: Any, report: Report) -> None:
    cost = None
    for number, (title, shape) in enumerate(SCORES.items()):
        pages = make_pages([(1, shape[0])], *shape[1:], seed=number)
        launch, known = _score_launch(title, pages, shape[2])
        if shape[4] < 32 and all(case.passed for case in report.cases):  # right where every lane has a number
            known[NOT_ALL_LANES] = _nothing(launch)
        found = check_launch(report, scores, launch, known=known, errors=INDICES)
        cost = cost or found
    least = 4 * 13 * 40 * 4 // 32
    budget = sectors("key_cache", "read", most=least, least=least, suspect=FAR_APART)
    check_budgets(report, cost, budget)


def check_group(group_scores: Any, report: Report) -> None:
    for number, (title, shape) in enumerate(GROUPS.items()):
        tokens, _, _, kv_heads, head_dim = shape
        pages = make_pages([(1, tokens)], *shape[1:], seed=20 + number)
        launch, known = _score_launch(title, pages, kv_heads)
        known[NOT_SET] = _nothing(launch)
        found = check_launch(report, group_scores, launch, known=known, errors=INDICES)
        numbers = kv_heads * tokens * head_dim
        if head_dim % 8 == 0:  # rows that begin at a sector
            least = numbers // 8
            check_budgets(
                report,
                found,
                elements("key_cache", "read", most=numbers, least=numbers, suspect=ONCE_EACH),
                sectors("key_cache", "read", most=least, least=least, suspect=FAR_APART),
            )


def _nothing(launch: Launch) -> dict[str, Tensor]:
    """What is written if every score is NaN."""
    right = launch.expected["out"]
    return {"out": right.where(right == NOBODY, torch.nan)}


def _score_launch(title: str, pages: Pages, grid: int) -> tuple[Launch, dict[Suspect, Contents]]:
    """A launch on one sequence, and what wrong ideas would write."""
    query, keys, total = pages.query[0], pages.keys[0], int(pages.seq_lens[0])
    heads, kv_heads = len(query), keys.shape[1]
    out = torch.full((heads, total + 3), NOBODY)
    every = torch.arange(heads)
    neighbours = every // (heads // kv_heads)
    arguments = {
        "out": out,
        "query": query,
        "key_cache": pages.key_cache,
        "block_table": pages.block_tables[0],
    }

    def scored(rows: Tensor, of: Tensor, scale: float, dims: slice = slice(None)) -> dict[str, Tensor]:
        filled = out.double()
        products = torch.einsum("hd,thd->ht", query[:, dims].double(), rows[:, of, dims].double())
        filled[:, : len(rows)] = products * scale
        return {"out": filled}

    right = scored(keys, neighbours, pages.scale)
    past, first = right["out"].clone(), torch.full_like(right["out"], NOBODY)
    zeros, sums = right["out"].clone(), right["out"].clone()
    past[:, total] = torch.nan
    zeros[:, total:] = 0
    for warp in range(2):
        sums[:, warp:total:2] = sums[:, warp:total:2].cumsum(1)
    first[:: heads // kv_heads] = right["out"][:: heads // kv_heads]
    known: dict[Suspect, Contents] = {
        HEADS: scored(keys, every % kv_heads, pages.scale),
        NO_SCALE: scored(keys, neighbours, 1.0),
        PAST_END: {"out": past},
        BEHIND: {"out": zeros},
        CARRIED: {"out": sums},
        ONE_LANE: scored(keys, neighbours, pages.scale, slice(0, None, 32)),
        ONE_ROUND: scored(keys, neighbours, pages.scale, slice(0, 32)),
        ONE_HEAD: {"out": first},
    }
    slots = pages.key_cache.flatten(0, 1)[:total]
    if not slots.isnan().all():  # else any NaN would look like it
        known[NO_TABLE] = scored(slots, neighbours, pages.scale)
    launch = Launch(title, grid, 64, {**arguments, "seq_len": total, "scale": pages.scale}, right)
    return launch, known
