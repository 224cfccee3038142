"""How the decode of exercise 10 is judged: its values, what it reads, and the engine that runs on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from exercises.grader import Report
from exercises.tasks.ex08_scene import Pages, make_pages
from exercises.tasks.ex08_wrong import HEADS, NO_SCALE, PAST_END, UNSAFE, variant
from exercises.tasks.ex10_checks import FAR_APART
from exercises.tasks.ex10_scene import THREADS, on_kernels
from exercises.tasks.ex10_scores import INDICES, NOBODY
from exercises.tasks.kernel_checks import (
    Argument,
    Contents,
    Cost,
    Launch,
    Suspect,
    check_budgets,
    check_launch,
    elements,
    sectors,
)
from kernels.interpreter import KernelError
from refengine.errors import RefengineError
from refengine.llm import LLM
from refengine.sampling import SamplingParams

NO_RESCALE: Suspect = (
    "old sums are not rescaled",
    "They were taken under a smaller maximum. A larger one shrinks them: times exp(old - new).",
)
HALF_RESCALE: Suspect = (
    "only the sum is rescaled",
    "The values were mixed under the same old maximum, and what was mixed shrinks with the sum.",
)
NOT_DIVIDED: Suspect = (
    "the mixture is not divided",
    "The weights of a sequence add up to their total. Divided by it, they add up to 1.",
)
KEYS_MIXED: Suspect = ("keys are mixed", "Keys give the weights. What is mixed by them are the values.")
MASKED: Suspect = (
    "threads without a key have weight",
    "Behind the end of a sequence a thread's score must be lower than any, and its weight 0.",
)
OVERFLOWS: Suspect = (
    UNSAFE[0],
    "exp of 10,000 is infinite. Subtract the largest score so far, of all tiles: then no exponent is above 0.",
)
LAST_TILE: Suspect = ("only the last tile counts", "What the tiles before gave is carried along.")
FIRST_TABLE: Suspect = ("everybody reads the first table", "Row i of block_tables belongs to sequence i.")
TWICE: Suspect = (
    "keys are read twice",
    "A pass for the maximum and another for the weights reads them all again. The online softmax needs one.",
)

# title -> (tokens of each sequence, block size, query heads, KV heads, head_dim, scale or None)
DECODES: dict[str, tuple[list[int], int, int, int, int, float | None]] = {
    "three tiles, and a short sequence": ([130, 5], 4, 4, 2, 9, None),
    "a head_dim of 64": ([70], 8, 1, 1, 64, None),
    "ends on the edges of tiles and blocks": ([128, 64, 65, 1, 8], 8, 2, 1, 5, None),
    "groups of three, blocks of 5": ([67, 33], 5, 6, 2, 12, None),
    "scores of thousands": ([131], 16, 1, 1, 8, 900.0),
}
MEASURED = "a head_dim of 64"


def check_decode(decode: Any, report: Report) -> None:
    costs: dict[str, Cost | None] = {}
    for number, (title, (lengths, *shape, scale)) in enumerate(DECODES.items()):
        pages = make_pages([(1, total) for total in lengths], *shape, scale=scale, seed=40 + number)
        out = torch.full_like(pages.query, NOBODY)
        arguments: dict[str, Argument] = {
            "out": out,
            "query": pages.query,
            "key_cache": pages.key_cache,
            "value_cache": pages.value_cache,
            "block_tables": pages.block_tables,
            "seq_lens": pages.seq_lens,
            "scale": pages.scale,
        }
        grid, right = (len(lengths), out.shape[1]), {"out": pages.exactly()}
        launch = Launch(title, grid, THREADS, arguments, right)
        known, errors = _wrong(pages), dict(INDICES)
        if scale is not None:
            known[OVERFLOWS], errors[KernelError] = known.pop(PAST_END), OVERFLOWS
        costs[title] = check_launch(report, decode, launch, known=known, errors=errors)
    _check_reads(report, costs[MEASURED])
    _check_engine(report, decode)


def _check_reads(report: Report, cost: Cost | None) -> None:
    """Budgets for 70 tokens of one head: numbers of 4 bytes, 8 in a sector."""
    numbers = 70 * 64
    check_budgets(
        report,
        cost,
        elements("key_cache", "read", most=numbers, least=numbers, suspect=TWICE),
        sectors("key_cache", "read", most=numbers, least=numbers // 8, suspect=TWICE),
        sectors("value_cache", "read", most=numbers // 8, least=numbers // 8, suspect=FAR_APART),
    )


# -- what wrong ideas would write ----------------------------------------------------------------------------


def _wrong(pages: Pages) -> dict[Suspect, Contents]:
    def each(sequence: Callable[[int], Tensor]) -> dict[str, Tensor]:
        return {"out": torch.cat([sequence(i) for i in range(len(pages.seq_lens))])}

    def plain(i: int, scale: float, by_remainder: bool = False) -> Tensor:
        return variant(
            pages.query[i : i + 1], pages.keys[i], pages.values[i], scale, by_remainder=by_remainder
        )

    known: dict[Suspect, Contents] = {
        HEADS: each(lambda i: plain(i, pages.scale, by_remainder=True)),
        NO_SCALE: each(lambda i: plain(i, 1.0)),
        NO_RESCALE: each(lambda i: _folded(pages, i, total=False, mixed=False)),
        HALF_RESCALE: each(lambda i: _folded(pages, i, total=True, mixed=False)),
        NOT_DIVIDED: each(lambda i: _weighted(pages, i)[0]),
        MASKED: each(lambda i: _with_idle_threads(pages, i)),
        KEYS_MIXED: each(
            lambda i: variant(pages.query[i : i + 1], pages.keys[i], pages.keys[i], pages.scale)
        ),
        LAST_TILE: each(lambda i: _last_tile(pages, i)),
        PAST_END: {"out": torch.full(pages.query.shape, torch.nan, dtype=torch.float64)},
    }
    if pages.seq_lens.argmax() == 0:
        known[FIRST_TABLE] = each(lambda i: _with_first_table(pages, i))
    return known


def _folded(pages: Pages, i: int, total: bool, mixed: bool) -> Tensor:
    """The online softmax over tiles, with the shrinking of the sum and of the mixture on or off."""
    query, keys, values = pages.query[i].double(), pages.keys[i].double(), pages.values[i].double()
    of = torch.arange(len(query)) // (len(query) // keys.shape[1])
    largest = torch.full((len(query), 1), -torch.inf, dtype=torch.float64)
    sums, result = torch.zeros_like(largest), torch.zeros_like(query)
    for start in range(0, len(keys), THREADS):
        tile = slice(start, start + THREADS)
        scores = torch.einsum("hd,thd->ht", query, keys[tile][:, of]) * pages.scale
        above = torch.maximum(largest, scores.amax(1, keepdim=True))
        shrink, weights = (largest - above).exp(), (scores - above).exp()
        sums = sums * (shrink if total else 1.0) + weights.sum(1, keepdim=True)
        result = result * (shrink if mixed else 1.0) + torch.einsum(
            "ht,thd->hd", weights, values[tile][:, of]
        )
        largest = above
    return (result / sums)[None]


def _weighted(pages: Pages, i: int, least: float = -torch.inf) -> tuple[Tensor, Tensor, Tensor]:
    """The mixture before its division, the sum of the weights, and what was subtracted: at least `least`."""
    query, keys, values = pages.query[i].double(), pages.keys[i].double(), pages.values[i].double()
    of = torch.arange(len(query)) // (len(query) // keys.shape[1])
    scores = torch.einsum("hd,thd->ht", query, keys[:, of]) * pages.scale
    largest = scores.amax(1, keepdim=True).clamp(min=least)
    weights = (scores - largest).exp()
    return torch.einsum("ht,thd->hd", weights, values[:, of])[None], weights.sum(1, keepdim=True), largest


def _with_idle_threads(pages: Pages, i: int) -> Tensor:
    """Threads of the last tile that have no key count as a score of 0."""
    idle = -len(pages.keys[i]) % THREADS
    mixed, total, largest = _weighted(pages, i, least=0.0 if idle else -torch.inf)
    return mixed / (total + idle * (-largest).exp())


def _last_tile(pages: Pages, i: int) -> Tensor:
    rest = (len(pages.keys[i]) - 1) // THREADS * THREADS
    return variant(pages.query[i : i + 1], pages.keys[i][rest:], pages.values[i][rest:], pages.scale)


def _with_first_table(pages: Pages, i: int) -> Tensor:
    """Sequence 0 is the longest, so what stands at these positions is hers."""
    total = int(pages.seq_lens[i])
    return variant(pages.query[i : i + 1], pages.keys[0][:total], pages.values[0][:total], pages.scale)


# -- the engine ----------------------------------------------------------------------------------------------

PROMPTS = ["Q: What is a block table?\nA:", "Ada"]


def _check_engine(report: Report, decode: Any) -> None:
    """V1 on the kernel, in the interpreter. Not run for a decode that is wrong already, where it would be slow."""
    if not all(case.passed for case in report.cases):
        report.not_checked("the engine on it, since it is not right yet")
        return
    with report.case("the engine says the same on it"):
        params = SamplingParams(max_tokens=4, ignore_eos=True)

        def said(**options: Any) -> list[list[int]]:
            llm = LLM("tiny", num_blocks=16, **options)
            return [list(out.token_ids) for out in llm.generate(PROMPTS, params)]

        expected = said(backend="reference")
        try:
            got = said(parts={"attention": on_kernels(decode)})
        except RefengineError as error:
            report.true(False, str(error))
        report.equal(expected, got, "tokens of two requests")
