"""Small tries of each CUDA kernel that look at everything that can be wrong with it.

Every one takes the package `kernels.cuda`, or a known-wrong copy of it, runs a kernel in the interpreter under
three schedules and compares with float64. What is found is an error of the interpreter, or one of the three
kinds of AssertionError here.

The sizes are chosen so that mistakes show: three tiles and more, sequences that end at, before and after the edge
of a tile and of a block, tiles smaller than a block, one token, table entries that name no block, NaN in every
slot that holds no key of the sequence, NaN in fresh outputs, guard cells on both sides of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kernels.interpreter import interpret
from kernels.interpreter.launch import Schedule
from tests.kernels.oracle import Pages, make_pages

SCHEDULES: tuple[Schedule, ...] = ("in_order", "reverse", "random")
GUARD = 77.0
GUARD_CELLS = 64
NO_BLOCK = 2**31 - 1
# Half a unit in the last place, relative: what rounding the result costs at most.
ROUNDING = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


class WrongValue(AssertionError):
    """A number is not the one of float64."""


class NotANumber(AssertionError):
    """NaN where a number should be: something was not written, or read where nothing was."""


class GuardTouched(AssertionError):
    """A cell before or after the output was written."""


def guarded(shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(the whole, the middle of it as NaN in that shape); the rest is guard cells."""
    whole = torch.full((shape.numel() + 2 * GUARD_CELLS,), GUARD, dtype=dtype)
    middle = whole[GUARD_CELLS:-GUARD_CELLS].view(shape)
    middle.fill_(torch.nan)
    return whole, middle


def judge(out: Tensor, whole: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Raises: GuardTouched, NotANumber or WrongValue.

    The tolerance is a share of the largest value; formats of 16 bits may be off by the rounding of the result
    besides.
    """
    if not bool((whole[:GUARD_CELLS] == GUARD).all() and (whole[-GUARD_CELLS:] == GUARD).all()):
        raise GuardTouched
    if bool(out.isnan().any()):
        raise NotANumber(f"{int(out.isnan().sum())} of {out.numel()}")
    if not len(out):
        return
    off = (out.double() - expected).abs() - ROUNDING[out.dtype] * expected.abs()
    if float(off.max()) > tolerance * float(expected.abs().max()):
        raise WrongValue(f"off by {float(off.max()):.2g} at {off.argmax().item()}")


def hide_what_is_not_visible(pages: Pages, window: int | None) -> None:
    """No block id behind a sequence's end, and none wholly behind the window. Mutates: the tables."""
    block_size = pages.key_cache.shape[1]
    starts = pages.query_start_loc.tolist()
    for i, seq_len in enumerate(pages.seq_lens.tolist()):
        first = seq_len - (starts[i + 1] - starts[i])  # position of the first query
        if window is not None and starts[i + 1] > starts[i]:
            pages.block_tables[i, : max(0, first - window + 1) // block_size] = NO_BLOCK
        pages.block_tables[i, -(-seq_len // block_size) :] = NO_BLOCK


@contextmanager
def small(cuda: ModuleType, warps: int = 2, rounds: int = 1) -> Iterator[None]:
    """Fewer warps, and splits of a single round, so that little work has many tiles and splits."""
    attention = cuda.attention
    tiling_for, prefill_tiling = attention.tiling_for, attention.PrefillTiling

    def smaller(*args: Any) -> Any:
        tiling = tiling_for(*args)
        return tiling and replace(tiling, warps=warps)

    with (
        patch.object(attention, "tiling_for", smaller),
        patch.object(attention, "PrefillTiling", lambda *args: prefill_tiling(*args, warps)),
        patch.object(attention, "ROUNDS", rounds),
        patch.object(attention, "scratch", lambda device, *shape: torch.full(shape, torch.nan)),
        patch.object(attention, "num_processors", lambda _: 6),
    ):
        yield


def attend(
    cuda: ModuleType,
    pages: Pages,
    window: int | None = None,
    kernel: str | None = None,
    schedule: Schedule = "in_order",
    tolerance: float = 1e-5,
) -> None:
    """One call of an attention function, judged. kernel: "varlen", or that of `paged_attention_decode`."""
    hide_what_is_not_visible(pages, window)
    whole, out = guarded(pages.query.shape, pages.query.dtype)
    with interpret(schedule):
        if kernel == "varlen":
            cuda.paged_attention(*pages.arguments, window, out)
        else:
            tensors = (pages.query, pages.key_cache, pages.value_cache, pages.block_tables, pages.seq_lens)
            cuda.paged_attention_decode(*tensors, pages.scale, window, out, kernel)
    judge(out, whole, pages.expected(window), tolerance)


# One check per kernel


def check_plain(cuda: ModuleType) -> None:
    """Tiles of 32 keys: three tiles and a bit, exactly one, one less, whole blocks, one key."""
    for schedule, block_size, window in zip(SCHEDULES, (48, 8, 3), (None, 33, None), strict=True):
        lengths = [(1, 70), (1, 32), (1, 31), (1, 24), (1, 1)]
        attend(cuda, make_pages(lengths, block_size), window, "plain", schedule)


def check_split(cuda: ModuleType) -> None:
    """Rounds of 16 keys and splits of one or two rounds; the shorter sequences leave splits empty."""
    for schedule, group, block_size, window in zip(
        SCHEDULES, (2, 4, 1), (8, 32, 16), (None, 21, None), strict=True
    ):
        pages = make_pages([(1, 53), (1, 16), (1, 15), (1, 1)], block_size, 2 * group, 2, 64)
        with small(cuda):
            attend(cuda, pages, window, "split", schedule)


def check_prefill(cuda: ModuleType) -> None:
    """Tiles of 32 keys and 8 rows: context, no context, one query, and rows that are no multiple of a tile."""
    for schedule, group, block_size, window in zip(
        SCHEDULES, (2, 1, 3), (16, 8, 32), (None, None, 9), strict=True
    ):
        pages = make_pages([(5, 70), (0, 4), (3, 3), (2, 33)], block_size, group, 1, 64)
        with small(cuda):
            attend(cuda, pages, window, "varlen", schedule)


def check_large_scores(cuda: ModuleType) -> None:
    """Scores of some hundreds, whose powers no fp32 holds. Their own rounding costs a few digits."""
    for kernel in ("plain", "split", "varlen"):
        pages = make_pages([(1, 40), (1, 3)], 8, 2, 1, 64)
        pages.scale *= 300
        with small(cuda):
            attend(cuda, pages, None, kernel, tolerance=1e-3)


def check_write(cuda: ModuleType) -> None:
    """Case S33 and its neighbours: every byte that no slot names stays as it was."""
    slots = torch.tensor([5, -1, 11, 0, -1])
    for schedule in SCHEDULES:
        key, value = torch.randn(2, 5, 2, 33, generator=torch.Generator().manual_seed(1))
        wholes, caches = zip(*(guarded(torch.Size((3, 4, 2, 33)), key.dtype) for _ in range(2)), strict=True)
        expected = [cache.clone() for cache in caches]
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[0].view(12, 2, 33)[slot], expected[1].view(12, 2, 33)[slot] = (
                    key[token],
                    value[token],
                )
        with interpret(schedule):
            cuda.reshape_and_cache(key, value, *caches, slots)
        for whole, cache, wanted in zip(wholes, caches, expected, strict=True):
            judge(cache.nan_to_num(GUARD), whole, wanted.nan_to_num(GUARD).double())


def check_copy(cuda: ModuleType) -> None:
    """Blocks that are copied away and overwritten afterwards: only the order of the pairs gives this result."""
    pairs, sources = [(1, 4), (1, 0), (3, 5), (2, 3), (3, 1)], [1, 2, 2, 2, 1, 3]
    for schedule in SCHEDULES:
        layers = [tuple(torch.randn(2, 6, 3, 4, 33)) for _ in range(2)]
        before = [(key.clone(), value.clone()) for key, value in layers]
        with interpret(schedule):
            cuda.copy_blocks(layers, pairs)
        for after, old in zip(layers, before, strict=True):
            for cache, was in zip(after, old, strict=True):
                if not torch.equal(cache, was[sources]):
                    raise WrongValue


def check_address(cuda: ModuleType) -> None:
    """Case S34, arithmetic alone: block 65537 of 32768 elements each begins behind element 2**31."""
    from numba import cuda as numba_cuda

    element_offset, block_size, row_size = cuda.addressing.element_offset, 16, 2 * 8 * 128

    @numba_cuda.jit
    def address(out: Any, blocks: Any) -> None:
        out[0] = element_offset(blocks[0], 1, block_size, row_size)

    out = torch.zeros(1, dtype=torch.int64)
    with interpret():
        address[1, 1](out, torch.tensor([65537], dtype=torch.int32))
    if out.item() != 65537 * 32768 + row_size:
        raise WrongValue(f"{out.item()}")


CHECKS = {
    "plain": check_plain,
    "split": check_split,
    "prefill": check_prefill,
    "large scores": check_large_scores,
    "write": check_write,
    "copy": check_copy,
    "address": check_address,
}
