"""How exercise 08.4 is judged: attention over pages, by its values, and with the engine running on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from exercises.grader import Report
from exercises.grader.values import difference
from exercises.tasks.ex08_scene import Pages, make_pages
from exercises.tasks.ex08_wrong import (
    HEADS,
    LEFT,
    MASKS,
    PAST_END,
    Suspect,
    compare,
    left_aligned,
    same_bits,
    seen,
    variant,
)
from refengine.errors import RefengineError
from refengine.llm import LLM
from refengine.sampling import SamplingParams

# what, [(new tokens, all tokens)], block size, rows of padding
BATCHES: dict[str, tuple[list[tuple[int, int]], int, int]] = {
    "one prompt": ([(7, 7)], 4, 0),
    "decodes of different lengths": ([(1, 1), (1, 4), (1, 5), (1, 17)], 4, 0),
    "a chunk behind a cache": ([(5, 13)], 4, 0),
    "a prompt, a chunk and a decode": ([(6, 6), (4, 11), (1, 9)], 3, 0),
    "a decode between prompts, and a sequence without new tokens": ([(4, 4), (1, 9), (0, 6), (3, 14)], 4, 0),
    "rows of nobody": ([(3, 9), (1, 7)], 4, 3),
    "blocks of sixteen": ([(1, 33), (20, 50), (16, 16)], 16, 0),
}
FROM_ZERO = (
    "a chunk starts at position 0",
    "Its first query stands behind all that is cached: at seq_len minus the number of new tokens.",
)
ROW = (
    "a row is a position",
    "query_start_loc says where a sequence begins in the list of queries, not where it stands.",
)
FIRST_TABLE = ("everybody reads the first table", "Row i of block_tables belongs to sequence i.")
NOBODY = (
    "rows of nobody are not zero",
    "A padded row goes on through the model with the others. What stands in it must be a number.",
)
OWN_SCALE = (
    "the scale is taken for granted",
    "Not every model scales by head_dim ** -0.5; the caller says by what.",
)
NO_OUT = (
    "out is not written",
    "A captured step has its results at fixed places; the caller reads them there.",
)
PADDED = (
    "padding takes part in the softmax",
    "A row of zeros has the score 0, and exp(0) is 1. Shorter sequences get smaller results.",
)


def check_paged(paged_attention: Any, report: Report) -> None:
    for number, (what, (lengths, size, padding)) in enumerate(BATCHES.items()):
        with report.case(what):
            pages = make_pages(lengths, size, padding=padding, seed=number, head_dim=7)
            got = paged_attention(*pages.arguments)
            _name_batch(report, pages, got, lengths)
            compare(report, pages.exactly(), got, "the result", batch_suspects(pages))
    with report.case("many query heads to a KV head"):
        pages = make_pages([(3, 10), (1, 6)], 4, num_heads=6, num_kv_heads=2, head_dim=5)
        compare(
            report, pages.exactly(), paged_attention(*pages.arguments), "the result", batch_suspects(pages)
        )
    with report.case("into out"):
        pages = make_pages([(2, 9), (1, 5)], 4, padding=1)
        out = torch.full_like(pages.query, torch.nan)
        got = paged_attention(*pages.arguments, out=out)
        if out.isnan().all():
            report.misconception(*NO_OUT)
        compare(report, pages.exactly(), out, "out")
        compare(report, pages.exactly(), got, "what is returned")
    with report.case("the caches stay as they are"):
        pages = make_pages([(2, 9), (1, 5)], 4)
        arguments = pages.arguments
        paged_attention(*arguments)
        same = same_bits(arguments[1], pages.key_cache) and same_bits(arguments[2], pages.value_cache)
        report.true(same, "It writes into the caches.")
    _check_engine(paged_attention, report)


def batch_suspects(pages: Pages) -> dict[Suspect, Tensor]:
    """What wrong ideas make of a whole batch."""
    wrong: dict[Suspect, Callable[[int, int, Tensor, Tensor, Tensor], Tensor]] = {
        known: lambda first, row, q, k, v, mask=mask: variant(q, k, v, pages.scale, mask)  # type: ignore[misc]
        for known, mask in MASKS.items()
        if known != LEFT
    }
    longest = int(pages.seq_lens.max())
    wrong |= {
        FROM_ZERO: lambda first, row, q, k, v: variant(q, k, v, pages.scale, left_aligned),
        ROW: lambda first, row, q, k, v: variant(
            q, k, v, pages.scale, lambda start, count: _from(first, start + count, count)
        ),
        HEADS: lambda first, row, q, k, v: variant(q, k, v, pages.scale, by_remainder=True),
        OWN_SCALE: lambda first, row, q, k, v: variant(q, k, v, q.shape[-1] ** -0.5),
        PADDED: lambda first, row, q, k, v: _with_zeros(q, k, v, pages.scale, longest),
    }
    return {known: _batch(pages, sequence) for known, sequence in wrong.items()}


def _batch(pages: Pages, sequence: Callable[[int, int, Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    out = torch.zeros(pages.query.shape, dtype=torch.float64)
    rows = pairwise(pages.query_start_loc.tolist())
    for row, ((first, stop), keys, values) in enumerate(zip(rows, pages.keys, pages.values, strict=True)):
        if stop > first:
            out[first:stop] = sequence(first, row, pages.query[first:stop], keys, values)
    return out


def _from(start: int, num_keys: int, count: int) -> Tensor:
    return torch.arange(num_keys) <= start + torch.arange(count)[:, None]


def _with_zeros(query: Tensor, keys: Tensor, values: Tensor, scale: float, longest: int) -> Tensor:
    """Filled up with zeros, and none of them hidden."""
    start, missing = len(keys) - len(query), longest - len(keys)
    keys, values = (torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) for x in (keys, values))
    mask = torch.cat((seen(start, len(query)), torch.ones(len(query), missing, dtype=torch.bool)), dim=1)
    return variant(query, keys, values, scale, lambda *_: mask)


def _name_batch(report: Report, pages: Pages, got: Any, lengths: Sequence[tuple[int, int]]) -> None:
    """NaN says more than a wrong number: it stands in slots that hold no token."""
    if not isinstance(got, Tensor) or got.shape != pages.query.shape:
        return
    owned = int(pages.query_start_loc[-1])
    if not difference(pages.exactly()[:owned].to(got.dtype), got[:owned]) and bool(got[owned:].isnan().any()):
        report.misconception(*NOBODY)
    elif len(lengths) > 1 and bool(got[:owned].isnan().any()):
        first = int(pages.query_start_loc[1])
        if lengths[0][1] > 1 and not bool(got[:first].isnan().any()):
            report.misconception(*FIRST_TABLE)
    elif bool(got[:owned].isnan().any()):
        report.misconception(*PAST_END)


PROMPTS = [[*range(40, 46)], [*range(40, 44), 60, 61, 62], [*range(70, 92)]]


def _check_engine(paged_attention: Any, report: Report) -> None:
    with report.case("the engine says the same on it, with hits and chunks"):
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        options: dict[str, Any] = {"block_size": 4, "num_blocks": 40, "max_num_batched_tokens": 10}

        def said(**parts: Any) -> list[list[int]]:
            llm = LLM("tiny", **options, **parts)
            return [list(out.token_ids) for out in llm.generate(PROMPTS, params)]

        expected = said()
        try:
            got = said(parts={"attention": paged_attention})
        except RefengineError as error:
            report.true(False, str(error))
        report.equal(expected, got, "tokens of three requests")
