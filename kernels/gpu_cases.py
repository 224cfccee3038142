"""Every kernel at small shapes, to be compared with float64 where it runs.

The sequences are as awkward as their number allows: lengths on and beside the edges of blocks and tiles, blocks
scattered over the cache, NaN in every slot that nobody may read and in the result before it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from functools import partial
from itertools import product
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from kernels import cuda, reference

NUM_KV_HEADS = 2
# (query_len, seq_len) of each sequence
DECODES = ((1, 1), (1, 15), (1, 16), (1, 17), (1, 130), (1, 700))
MIXED = ((7, 7), (1, 9), (33, 70), (16, 64), (3, 200), (1, 129))
WINDOWS = (None, 20)
# What a result may be away from float64, times 1 + its size: the rounding of the result, a little more for fp32.
ALLOWED = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One kernel at one shape. worst: how far the worst number is away, 0 being exact; allowed: how far it may be."""

    name: str
    worst: Callable[[torch.device], float]
    allowed: float

    def row(self, device: torch.device) -> Row:
        """Runs it. Whatever is raised becomes the row's "error"."""
        try:
            worst = self.worst(device)
        except (
            Exception
        ) as error:  # of the compiler, the driver or the kernel: the other cases are still to run
            return {"case": self.name, "passed": False, "error": f"{type(error).__name__}: {error}"}
        if not isfinite(worst):
            return {"case": self.name, "passed": False, "error": "a number is NaN, or was not written"}
        return {"case": self.name, "passed": worst <= self.allowed, "worst": worst, "allowed": self.allowed}


@dataclass(frozen=True)
class Shape:
    """What an attention kernel is compiled for."""

    dtype: torch.dtype
    head_dim: int
    group: int
    block_size: int

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}, head_dim {self.head_dim}, group {self.group}, block {self.block_size}"


@dataclass(frozen=True)
class Pages:
    """Sequences in scattered blocks of a cache. All tensors on the CPU."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor


def make_pages(shape: Shape, lengths: tuple[tuple[int, int], ...]) -> Pages:
    """Random numbers in the slots of the sequences, NaN in all others; table entries past the end name those."""
    random = torch.Generator().manual_seed(0)
    blocks = [-(-seq_len // shape.block_size) for _, seq_len in lengths]
    num_blocks = sum(blocks) + 2
    order = torch.randperm(num_blocks, generator=random).int()
    tables = order[-1].repeat(len(lengths), max(blocks) + 1)
    size = (num_blocks * shape.block_size, NUM_KV_HEADS, shape.head_dim)
    caches = [torch.full(size, torch.nan, dtype=shape.dtype) for _ in range(2)]
    taken = 0
    for row, ((_, seq_len), count) in enumerate(zip(lengths, blocks, strict=True)):
        tables[row, :count] = order[taken : taken + count]
        taken += count
        positions = torch.arange(seq_len)
        slots = tables[row, positions // shape.block_size] * shape.block_size + positions % shape.block_size
        for cache in caches:
            cache[slots] = torch.randn(seq_len, *size[1:], generator=random).to(shape.dtype)
    key_cache, value_cache = (cache.view(num_blocks, shape.block_size, *size[1:]) for cache in caches)
    query_lens = torch.tensor([0, *(query_len for query_len, _ in lengths)], dtype=torch.int32)
    rows = int(query_lens.sum())
    query = torch.randn(rows, NUM_KV_HEADS * shape.group, shape.head_dim, generator=random).to(shape.dtype)
    seq_lens = torch.tensor([seq_len for _, seq_len in lengths], dtype=torch.int32)
    return Pages(query, key_cache, value_cache, tables, query_lens.cumsum(0).int(), seq_lens)


def worst_attention(
    kernel: str, shape: Shape, lengths: tuple[tuple[int, int], ...], device: torch.device
) -> float:
    """The largest error over the windows. kernel: plain, split, or varlen for the one that takes all lengths."""
    pages = make_pages(shape, lengths)
    there = Pages(*(x.to(device) for x in astuple(pages)))
    scale = 1.3 * shape.head_dim**-0.5  # not the usual one, which a kernel might assume
    errors = []
    for window in WINDOWS:
        out = torch.full_like(there.query, torch.nan)
        _attend(kernel, there, scale, window, out)
        exact = reference.paged_attention(
            pages.query.double(),
            pages.key_cache.double(),
            pages.value_cache.double(),
            pages.block_tables,
            pages.query_start_loc,
            pages.seq_lens,
            scale,
            window,
        )
        errors.append(_distance(out, exact))
    return max(errors)


def _attend(kernel: str, pages: Pages, scale: float, window: int | None, out: Tensor) -> None:
    query, key_cache, value_cache, tables = (
        pages.query,
        pages.key_cache,
        pages.value_cache,
        pages.block_tables,
    )
    if kernel == "varlen":
        starts = pages.query_start_loc
        cuda.paged_attention(
            query, key_cache, value_cache, tables, starts, pages.seq_lens, scale, window, out
        )
        return
    chosen: Any = kernel
    cuda.paged_attention_decode(
        query, key_cache, value_cache, tables, pages.seq_lens, scale, window, out, kernel=chosen
    )


def _distance(got: Tensor, exact: Tensor) -> float:
    """The largest |got - exact| / (1 + |exact|); infinite if a number was not written or is NaN."""
    error = (got.cpu().double() - exact).abs() / (1 + exact.abs())
    return float("inf") if bool(error.isnan().any()) else float(error.max())


def worst_write(dtype: torch.dtype, device: torch.device) -> float:
    """Scattered slots and padding; every other slot must stay as it is."""
    random = torch.Generator().manual_seed(0)
    key, value = (torch.randn(40, NUM_KV_HEADS, 64, generator=random).to(dtype) for _ in range(2))
    slots = torch.randperm(6 * 16, generator=random)[:40]
    slots[::7] = -1
    before = [torch.randn(6, 16, NUM_KV_HEADS, 64, generator=random).to(dtype) for _ in range(2)]
    got, expected = [x.to(device, copy=True) for x in before], [x.clone() for x in before]
    cuda.reshape_and_cache(key.to(device), value.to(device), got[0], got[1], slots.to(device))
    reference.reshape_and_cache(key, value, expected[0], expected[1], slots)
    return _changed(got, expected)


def worst_copy(dtype: torch.dtype, device: torch.device) -> float:
    """Pairs that depend on their order: a block is copied, and then written over."""
    random = torch.Generator().manual_seed(0)
    before = [torch.randn(6, 16, NUM_KV_HEADS, 64, generator=random).to(dtype) for _ in range(2)]
    got, expected = [x.to(device, copy=True) for x in before], [x.clone() for x in before]
    pairs = [(0, 3), (1, 0), (3, 5), (2, 3)]
    cuda.copy_blocks([(got[0], got[1])], pairs)
    reference.copy_blocks([(expected[0], expected[1])], pairs)
    return _changed(got, expected)


def _changed(got: list[Tensor], expected: list[Tensor]) -> float:
    """How many numbers are not what they should be, bit by bit."""
    return float(sum(int((a.cpu() != b).sum()) for a, b in zip(got, expected, strict=True)))


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = (
    *(Shape(BF16, head_dim, group, 16) for head_dim, group in product((64, 128, 256), (1, 2, 4, 8))),
    *(Shape(dtype, 128, 4, 16) for dtype in (F16, F32)),
    *(Shape(dtype, 64, 2, block_size) for dtype, block_size in product((F16, F32), (8, 32))),
)
ODD = (Shape(F32, 40, 3, 5), Shape(BF16, 96, 2, 16), Shape(F16, 64, 3, 16))  # what only some kernels serve


def all_cases() -> Iterator[Case]:
    """The plainest kernels first."""
    for dtype in (F32, F16, BF16):
        yield Case(f"cache write, {dtype}".replace("torch.", ""), partial(worst_write, dtype), 0)
        yield Case(f"copy blocks, {dtype}".replace("torch.", ""), partial(worst_copy, dtype), 0)
    for shape in (Shape(F32, 64, 2, 16), Shape(F16, 128, 1, 8), Shape(BF16, 128, 4, 16), *ODD):
        yield _attention("plain", shape, DECODES)
    for shape in SHAPES:
        yield _attention("split", shape, DECODES)
    for shape in dict.fromkeys((*SHAPES[::3], *SHAPES[-6:], *ODD)):
        yield _attention("varlen", shape, MIXED)


def _attention(kernel: str, shape: Shape, lengths: tuple[tuple[int, int], ...]) -> Case:
    worst = partial(worst_attention, kernel, shape, lengths)
    return Case(f"{kernel}, {shape}", worst, ALLOWED[shape.dtype])


CASES = tuple(all_cases())
