"""Elements in memory: bytes as numbers that Python reads, and numbers as a dtype can hold them."""

from __future__ import annotations

import struct
from typing import Any, cast

import numpy as np


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of an array in C order."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def convert(value: Any, dtype: np.dtype[Any]) -> Any:
    """A number as an element of this dtype can hold it: floats are cut to integers, integers wrap."""
    if dtype.kind == "f":
        return float(value)
    if dtype.kind == "b":
        return bool(value)
    bits = 8 * dtype.itemsize
    whole = int(value) & ((1 << bits) - 1)
    return whole - (1 << bits) if dtype.kind == "i" and whole >> (bits - 1) else whole


class HalfMemory:
    """float16 elements, which a memoryview cannot read: their bits, and a table of what each pattern means."""

    _values: list[float] | None = None

    def __init__(self, bits: memoryview) -> None:
        self._bits = bits
        if HalfMemory._values is None:
            HalfMemory._values = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(float).tolist()
        self._table = HalfMemory._values

    def __getitem__(self, offset: int) -> float:
        return self._table[self._bits[offset]]

    def __setitem__(self, offset: int, value: Any) -> None:
        try:
            self._bits[offset] = struct.unpack("<H", struct.pack("<e", value))[0]
        except OverflowError:
            self._bits[offset] = 0x7C00 if value > 0 else 0xFC00


def elements(memory: Any, dtype: np.dtype[Any]) -> Any:
    """Memory that is indexed by element, from anything that holds bytes."""
    flat = memoryview(memory)
    if dtype == np.float16:
        return HalfMemory(flat.cast("H"))
    return flat.cast(cast(Any, "?" if dtype.kind == "b" else dtype.char))
