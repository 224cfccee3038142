"""What a kernel is launched with: tensors and arrays become views of their own memory, scalars become numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from kernels.interpreter.array import NUMBERS, Array, Fail
from kernels.interpreter.elements import elements
from kernels.interpreter.log import Log
from kernels.interpreter.memory import View

REGION_ALIGNMENT = 256  # bytes; as allocations on a GPU are
Refuse = Callable[[str], NoReturn]


@dataclass
class Buffer:
    """A host array and the memory it lies in, as addresses of the host."""

    name: str
    array: np.ndarray[Any, Any]
    start: int
    end: int
    base: int = 0  # of `start` in the launch's address space
    region: int = 0


class Arguments:
    """Turns the arguments of one launch into what the kernel gets.

    Arrays that share memory on the host share it in the launch's address space too, so that a race between two
    views of one tensor is seen.
    """

    def __init__(self, log: Log, fail: Fail, refuse: Refuse, region: Callable[[], int]) -> None:
        self._log, self._fail, self._refuse, self._region = log, fail, refuse, region

    def bind(self, names: Sequence[str], values: Sequence[Any]) -> tuple[Any, ...]:
        """The kernel's arguments, in order. Raises: LaunchError for what no kernel takes."""
        prepared = [self._prepare(name, value) for name, value in zip(names, values, strict=True)]
        self._place(list(_buffers(prepared)))
        return tuple(self._finish(value) for value in prepared)

    def _prepare(self, name: str, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self._prepare(name, item) for item in value)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return self._tensor(name, value)
        if isinstance(value, np.ndarray):
            owner = value
            while isinstance(owner.base, np.ndarray):
                owner = owner.base
            return self._buffer(name, value, *_extent(owner))
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, bool | int | float):
            return value
        if hasattr(value, "__cuda_array_interface__"):
            self._refuse(f"argument {name} lies on a GPU; the interpreter reads CPU tensors and numpy arrays")
        self._refuse(f"argument {name} is a {type(value).__name__}; a kernel takes arrays and numbers")

    def _tensor(self, name: str, tensor: Any) -> Buffer:
        if tensor.device.type != "cpu":
            self._refuse(f"argument {name} is on {tensor.device}; the interpreter reads CPU tensors")
        if str(tensor.dtype) == "torch.bfloat16":
            self._refuse(
                f"argument {name} is bfloat16, which Numba does not know; pass tensor.view(torch.int16)"
            )
        try:
            array = tensor.detach().numpy()
        except (TypeError, RuntimeError) as error:
            self._refuse(f"argument {name} is a {tensor.dtype} tensor that numpy cannot read: {error}")
        storage = tensor.untyped_storage()
        return self._buffer(name, array, storage.data_ptr(), storage.data_ptr() + storage.nbytes())

    def _buffer(self, name: str, array: np.ndarray[Any, Any], start: int, end: int) -> Buffer:
        dtype = array.dtype
        if dtype.kind not in NUMBERS or dtype.itemsize > 8 or not dtype.isnative:
            self._refuse(
                f"argument {name} has dtype {dtype}; the interpreter knows integers, floats and bools"
            )
        if any(stride % dtype.itemsize for stride in array.strides):
            self._refuse(
                f"argument {name} has strides {array.strides}, no multiples of its {dtype.itemsize} bytes"
            )
        return Buffer(name, array, start, end)

    def _place(self, buffers: list[Buffer]) -> None:
        """Gives each piece of host memory its place. Mutates: base and region of every buffer."""
        next_base, end, origin, region = 0, -1, 0, 0
        for buffer in sorted(buffers, key=lambda b: b.start):
            if buffer.start >= end:
                base = -(-next_base // REGION_ALIGNMENT) * REGION_ALIGNMENT
                origin, region, end = buffer.start - base, self._region(), buffer.start
            end = max(end, buffer.end)
            next_base = end - origin
            buffer.base, buffer.region = buffer.start - origin, region

    def _finish(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self._finish(item) for item in value)
        if not isinstance(value, Buffer):
            return value
        array, itemsize = value.array, value.array.itemsize
        strides = tuple(stride // itemsize for stride in array.strides)
        low, high = _extent(array)
        count, below = (high - low) // itemsize, (array.__array_interface__["data"][0] - low) // itemsize
        lowest = array[tuple(slice(-1, None) if s < 0 else slice(None) for s in strides)] if below else array
        flat = np.lib.stride_tricks.as_strided(lowest, (count,), (itemsize,), writeable=array.flags.writeable)
        root = Array(
            self._log,
            self._fail,
            value.name,
            "global",
            array.dtype,
            array.shape,
            strides,
            value.base + low - value.start,
            value.region,
            writeable=array.flags.writeable,
        )
        return View(root, elements(flat.view(np.uint8), array.dtype), below)


def _extent(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    """Addresses of the first byte that an array can reach, and of the one past the last."""
    start = array.__array_interface__["data"][0]
    if not array.size:
        return start, start
    steps = [stride * (size - 1) for size, stride in zip(array.shape, array.strides, strict=True)]
    low = start + sum(step for step in steps if step < 0)
    return low, start + sum(step for step in steps if step > 0) + array.itemsize


def _buffers(values: Sequence[Any]) -> list[Buffer]:
    found = []
    for value in values:
        found += _buffers(value) if isinstance(value, tuple) else [value] if isinstance(value, Buffer) else []
    return found
