"""`cuda.shared.array`, `cuda.local.array` and `cuda.const.array_like`: memory that a line of the kernel asks for.

Shared and local memory starts out as on a GPU, with anything in it: here with bytes 0xFF, a NaN in every
float and -1 in every signed integer, so that a kernel that reads before it writes gives a wrong result.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from kernels.interpreter.array import Array, Fail
from kernels.interpreter.elements import elements
from kernels.interpreter.errors import LaunchError
from kernels.interpreter.local import LocalView
from kernels.interpreter.log import Log
from kernels.interpreter.memory import View

SHARED_BASE = 1 << 40  # where shared memory starts in the launch's address space, in bytes
CONST_BASE = 1 << 41
MAX_STATIC_SHARED_BYTES = 48 * 1024
DYNAMIC_REGION = 0


class Allocator:
    """The allocations of a launch; those of shared memory are emptied for each block.

    Args: dynamic_bytes: shared memory that the launch asked for, which `shared.array(0, dtype)` returns.
    """

    def __init__(self, log: Log, fail: Fail, dynamic_bytes: int, poison: bool) -> None:
        self._log, self._fail = log, fail
        self._filler = b"\xff" if poison else b"\0"
        self._dynamic = bytearray(dynamic_bytes)
        self._shared: dict[tuple[int, int], tuple[bytearray, View]] = {}
        self._arrays: dict[tuple[int, int], Array] = {}  # of local memory
        self._constants: dict[int, tuple[Any, View]] = {}  # id of an array -> (the array, view)
        self._used = 0  # static shared memory with the gaps of alignment, bytes
        self._regions = DYNAMIC_REGION

    def region(self) -> int:
        """A number that no other memory of the launch has."""
        self._regions += 1
        return self._regions

    def empty_shared(self) -> None:
        """Fills all shared memory with the poison, for the next block."""
        for memory in (self._dynamic, *(memory for memory, _ in self._shared.values())):
            memory[:] = self._filler * len(memory)

    def shared(self, shape: Any, dtype: Any, alignment: int | None = None) -> View:
        """One array for all threads of the block and for each line that asks."""
        frame = sys._getframe(1)
        # Two functions made by one factory share their code; their globals here are their own.
        key = (self._log.sites.at(frame), id(frame.f_globals))
        kept = self._shared.get(key)
        if kept is None:
            kept = self._shared[key] = self._new_shared(key[0], _shape(shape), as_dtype(dtype), alignment)
        return kept[1]

    def _new_shared(
        self, site: int, shape: tuple[int, ...], dtype: np.dtype[Any], alignment: int | None
    ) -> tuple[bytearray, View]:
        if shape == (0,):
            shape, memory, region = (len(self._dynamic) // dtype.itemsize,), self._dynamic, DYNAMIC_REGION
            base, alignment = SHARED_BASE + MAX_STATIC_SHARED_BYTES, alignment or 16
        else:
            num_bytes, alignment = prod(shape) * dtype.itemsize, alignment or dtype.itemsize
            start = -(-self._used // alignment) * alignment
            self._used = start + num_bytes
            if self._used > MAX_STATIC_SHARED_BYTES:
                self._fail(
                    LaunchError,
                    f"{self._used} bytes of static shared memory, more than the {MAX_STATIC_SHARED_BYTES} of a GPU",
                )
            memory, region, base = bytearray(self._filler * num_bytes), self.region(), SHARED_BASE + start
        name = self._log.sites.stored_in(site) or "shared array"
        array = Array(self._log, self._fail, name, "shared", dtype, shape, None, base, region, alignment)
        num_bytes = len(memory) // dtype.itemsize * dtype.itemsize
        return memory, View(array, elements(memoryview(memory)[:num_bytes], dtype))

    def local(self, shape: Any, dtype: Any, alignment: int | None = None) -> View:
        """A new array, of this thread alone."""
        frame = sys._getframe(1)
        key = (self._log.sites.at(frame), id(frame.f_globals))
        array = self._arrays.get(key)
        if array is None:
            kind, sizes = as_dtype(dtype), _shape(shape)
            array = self._arrays[key] = Array(
                self._log,
                self._fail,
                self._log.sites.stored_in(key[0]) or "local array",
                "local",
                kind,
                sizes,
                alignment=alignment or kind.itemsize,
            )
        num_bytes = prod(array.shape) * array.itemsize
        return LocalView(array, elements(bytearray(self._filler * num_bytes), array.dtype))

    def local_arrays(self) -> Iterator[tuple[int, Array]]:
        """(site, array) of every line that asked for local memory."""
        for (site, _), array in self._arrays.items():
            yield site, array

    def const(self, values: Any) -> View:
        """A numpy array as constant memory."""
        if isinstance(values, View):
            return values
        if id(values) not in self._constants:
            copy = np.ascontiguousarray(values)
            array = Array(
                self._log,
                self._fail,
                "constant array",
                "const",
                copy.dtype,
                copy.shape,
                base=CONST_BASE,
                writeable=False,
            )
            memory = elements(copy.reshape(-1).view(np.uint8), copy.dtype)
            self._constants[id(values)] = (values, View(array, memory))
        return self._constants[id(values)][1]


def _shape(shape: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in shape) if isinstance(shape, tuple) else (int(shape),)


def as_dtype(dtype: Any) -> np.dtype[Any]:
    """A dtype from what a kernel may name one by: a cast, a numpy type or dtype, a type of Numba."""
    if isinstance(dtype, np.dtype):
        return dtype
    if isinstance(dtype, type) and issubclass(dtype, np.generic | bool | int | float):
        return np.dtype(dtype)
    inner = getattr(dtype, "dtype", None)
    return inner if isinstance(inner, np.dtype) else np.dtype(str(dtype).replace("boolean", "bool"))
