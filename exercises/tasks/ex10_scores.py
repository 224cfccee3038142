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
    Contents,
    Launch,
    Suspect,
    check_budgets,
    check_launch,
    elements,
    sectors,
)

NOBODY = 7e7  # what outputs hold before a kernel runs: a number that no right one computes, and no NaN
NO_TABLE: Suspect = ("a position is a slot", "The block table says in which block a position lies.")
ONE_LANE: Suspect = ("one lane's share", "The lanes have a part of the sum each; lanes_sum adds them up.")
ONE_ROUND: Suspect = (
    "head_dim ends at 32",
    "A row may be longer than a warp: a lane goes on with d + 32 until the row ends.",
)
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
        found = check_launch(report, scores, launch, known=known)
        cost = cost or found
    least = 4 * 13 * 40 * 4 // 32
    budget = sectors("key_cache", "read", most=least, least=least, suspect=FAR_APART)
    check_budgets(report, cost, budget)


def check_group(group_scores: Any, report: Report) -> None:
    for number, (title, shape) in enumerate(GROUPS.items()):
        tokens, _, _, kv_heads, head_dim = shape
        pages = make_pages([(1, tokens)], *shape[1:], seed=20 + number)
        launch, known = _score_launch(title, pages, kv_heads)
        found = check_launch(report, group_scores, launch, known=known)
        numbers = kv_heads * tokens * head_dim
        if head_dim % 8 == 0:  # rows that begin at a sector
            least = numbers // 8
            check_budgets(
                report,
                found,
                elements("key_cache", "read", most=numbers, least=numbers, suspect=ONCE_EACH),
                sectors("key_cache", "read", most=least, least=least, suspect=FAR_APART),
            )


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
    past[:, total] = torch.nan
    first[:: heads // kv_heads] = right["out"][:: heads // kv_heads]
    known: dict[Suspect, Contents] = {
        HEADS: scored(keys, every % kv_heads, pages.scale),
        NO_SCALE: scored(keys, neighbours, 1.0),
        PAST_END: {"out": past},
        NO_TABLE: scored(pages.key_cache.flatten(0, 1)[:total], neighbours, pages.scale),
        ONE_LANE: scored(keys, neighbours, pages.scale, slice(0, None, 32)),
        ONE_ROUND: scored(keys, neighbours, pages.scale, slice(0, 32)),
        ONE_HEAD: {"out": first},
    }
    launch = Launch(title, grid, 64, {**arguments, "seq_len": total, "scale": pages.scale}, right)
    return launch, known
