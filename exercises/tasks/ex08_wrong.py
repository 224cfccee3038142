"""What wrong ideas make of attention: each with its name, why it is wrong, and the numbers that it gives.

A check compares an answer with the float64 result. If it differs, it is compared with these, and a wrong idea that
gives the same numbers is named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from exercises.grader import Report
from exercises.grader.values import difference

Suspect = tuple[str, str]  # a misconception: its name, and why it is wrong

LEFT = (
    "a mask aligned to the left",
    "Row i of it shows keys 0 to i. With p tokens before the chunk, query i stands at position p + i.",
)
SQUARE = (
    "a square mask",
    "It is made from the number of new tokens and knows nothing of the cache. What is cached is seen by every query.",
)
NO_MASK = (
    "no mask with a cache",
    "With a single query that is right. A chunk has later tokens of its own, and they must stay hidden.",
)
TOO_MANY = ("one key too many", "Query i sees keys 0 to p + i, and not the token that comes next.")
TOO_FEW = ("one key too few", "A query sees its own key, too.")
HEADS = (
    "KV head by remainder",
    "Query heads of a group are neighbours: head h reads KV head h // group, not h % num_kv_heads.",
)
NO_SCALE = ("the scale is left out", "Without it the softmax is nearly all or nothing.")
UNSAFE = (
    "the exponential overflows",
    "exp of 10,000 is infinite. Subtract the largest score first; the ratio stays the same.",
)
PAST_END = (
    "reading past the sequence",
    "Slots behind seq_len hold what is left of somebody else. A mask does not help: 0 times NaN is NaN.",
)

Mask = Callable[[int, int], Tensor]  # (start, number of queries) -> [queries, start + queries], True: seen


def seen(start: int, count: int, shift: int = 0) -> Tensor:
    """Query i sees keys 0 to start + i + shift."""
    return torch.ones(count, start + count, dtype=torch.bool).tril(start + shift)


def left_aligned(start: int, count: int) -> Tensor:
    return torch.ones(count, start + count, dtype=torch.bool).tril()


def only_new(start: int, count: int) -> Tensor:
    return torch.cat((torch.zeros(count, start, dtype=torch.bool), seen(0, count)), dim=1)


def unmasked(start: int, count: int) -> Tensor:
    return torch.ones(count, start + count, dtype=torch.bool) if start else seen(0, count)


def variant(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    mask: Mask = seen,
    by_remainder: bool = False,
) -> Tensor:
    """Attention of one sequence in float64 with a mistake in it. Returns: query's shape."""
    query, keys, values = query.double(), keys.double(), values.double()
    heads, kv_heads = query.shape[1], keys.shape[1]
    every = torch.arange(heads)
    of = every % kv_heads if by_remainder else every // (heads // kv_heads)
    scores = torch.einsum("qhd,khd->hqk", query, keys[:, of]) * scale
    hidden = ~mask(len(keys) - len(query), len(query))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values[:, of])


def compare(
    report: Report, expected: Tensor, got: Any, what: str, suspects: Mapping[Suspect, Tensor] | None = None
) -> None:
    """Wants `got` near the float64 result; a wrong one that equals a suspect's is named."""
    report.true(isinstance(got, Tensor), f"{what} should be a tensor, not {type(got).__name__}.")
    wanted = expected.to(got.dtype)
    if difference(wanted, got) and got.shape == wanted.shape:
        for known, value in (suspects or {}).items():
            if difference(wanted, value.to(got.dtype)) and not difference(value.to(got.dtype), got):
                report.misconception(*known)
                break
    report.close(wanted, got, what)


MASKS: dict[Suspect, Mask] = {
    LEFT: left_aligned,
    SQUARE: only_new,
    NO_MASK: unmasked,
    TOO_MANY: lambda start, count: seen(start, count, 1),
    TOO_FEW: lambda start, count: seen(start, count, -1),
}


def one_sequence(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> dict[Suspect, Tensor]:
    """What wrong ideas make of one sequence."""
    found = {known: variant(query, keys, values, scale, mask) for known, mask in MASKS.items()}
    found[HEADS] = variant(query, keys, values, scale, by_remainder=True)
    found[NO_SCALE] = variant(query, keys, values, 1.0)
    return found


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in every place, NaN included."""
    return a.shape == b.shape and bool(torch.equal(a.nan_to_num(7e7), b.nan_to_num(7e7)))
