"""The bench for chapter and exercise 09: what a warp touches, and an engine that writes with a kernel of one's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from numba import int32
from torch import Tensor

from kernels import backend_for
from kernels.cuda.jit import cuda, kernel
from kernels.interpreter import Record, Report, interpret
from refengine.viz import Table

WARP = 32
SECTOR = 32  # bytes
WRITE_BLOCK = (32, 4)  # threads of `write_slots`: numbers of a row, tokens


def touched(elements: Sequence[int], dtype: torch.dtype = torch.float32) -> Record:
    """Counts of one warp whose lane t reads `elements[t]` of an array in global memory that starts at a sector."""
    which = torch.tensor(elements)
    numbers, out = torch.zeros(int(which.max()) + 1, dtype=dtype), torch.zeros(WARP, dtype=dtype)
    with interpret() as report:
        _read_global[1, WARP](out, numbers, which)
    return report.total("global", "read", "numbers")


def touched_shared(elements: Sequence[int]) -> Record:
    """The same of an array of 4-byte numbers in shared memory."""
    which, out = torch.tensor(elements), torch.zeros(WARP, dtype=torch.int32)
    with interpret() as report:
        _read_shared[1, WARP, 0, 4 * (int(which.max()) + 1)](out, which)
    return report.total("shared", "read")


def measured(first: int, step: int, dtype: torch.dtype) -> int:
    """Sectors that a warp touches if lane t reads the number at `first + step * t`."""
    return touched([first + step * lane for lane in range(WARP)], dtype).sectors


def cost_table(report: Report) -> Table:
    """What the lines of a kernel did to memory: a row per line, array and kind."""
    columns = ("line", "array", "space", "", "requests", "bytes used", "sectors", "passes", "used / moved")
    rows = [
        (
            r.line,
            r.array,
            r.space,
            r.kind,
            r.requests,
            r.bytes,
            r.sectors,
            r.wavefronts,
            f"{r.efficiency:.3g}",
        )
        for r in report.lines
    ]
    return Table(columns, rows, right=("used / moved",))


@kernel
def _read_global(out: Any, numbers: Any, which: Any) -> None:
    lane = cuda.threadIdx.x
    out[lane] = numbers[which[lane]]


@kernel
def _read_shared(out: Any, which: Any) -> None:
    tile = cuda.shared.array(0, int32)
    lane = cuda.threadIdx.x
    out[lane] = tile[which[lane]]


def writing_with(write_slots: Any) -> SimpleNamespace:
    """The reference kernels with another writing: for `parts={"attention": ...}`, inside an `interpret`.

    write_slots: a kernel `(cache [num_slots, row], new [num_tokens, row], slot_mapping)`.
    """
    reference: Any = backend_for("cpu", "reference")

    def reshape_and_cache(
        key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        row = key[0].numel()
        grid = (math.ceil(row / WRITE_BLOCK[0]), math.ceil(len(key) / WRITE_BLOCK[1]))
        for new, cache in ((key, key_cache), (value, value_cache)):
            write_slots[grid, WRITE_BLOCK](cache.view(-1, row), new.reshape(-1, row), slot_mapping)

    return SimpleNamespace(
        __name__="written in the interpreter",
        reshape_and_cache=reshape_and_cache,
        paged_attention=reference.paged_attention,
        paged_attention_decode=reference.paged_attention_decode,
    )
