"""Tensors for checking kernels: outputs that nobody has written, inputs without repetitions, comparison bit by bit."""

from __future__ import annotations

import torch
from torch import Tensor

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes -> integers of that size
POISON = {  # the bits of a NaN
    torch.float16: 0x7E5A,
    torch.bfloat16: 0x7FDA,
    torch.float32: 0x7FC05A5A,
    torch.float64: 0x7FF8_0000_5A5A_5A5A,
}


def unwritten(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An output before the kernel ran: a NaN that no arithmetic gives, or the lowest integer."""
    if not dtype.is_floating_point:
        return torch.full(shape, torch.iinfo(dtype).min, dtype=dtype)
    return torch.full(shape, POISON[dtype], dtype=BITS[dtype.itemsize]).view(dtype)


def distinct(*shape: int, first: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Whole numbers from `first` on, none of them twice, so that an element cannot pass for another."""
    count = int(torch.tensor(shape).prod())
    return torch.arange(first, first + count).view(shape).to(dtype)


def same(a: Tensor, b: Tensor) -> Tensor:
    """Where they are equal, a NaN equal to a NaN."""
    return (a == b) | (a.isnan() & b.isnan())


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in every place, a NaN equal to a NaN."""
    return a.shape == b.shape and bool(same(a, b).all())
