"""Arrays of a launch: where their memory lies in the launch's address space, and what they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from kernels.interpreter.elements import contiguous
from kernels.interpreter.errors import KernelError
from kernels.interpreter.log import WIDTH, Log, Tag

NUMBERS = "fiub"  # kinds of numpy dtypes that a kernel can work with
Fail = Callable[[type[KernelError], str], NoReturn]


class Array:
    """One array of a launch: an argument, or an allocation of one line of the kernel.

    Args:
        name: of the argument or variable.
        space: "global", "shared", "local" or "const".
        base: address of element 0 in the launch's own address space, in bytes.
        region: number of the memory it lies in; arrays that share memory have the same region.
        alignment: bytes; the start of its memory is a multiple of it.
    """

    def __init__(
        self,
        log: Log,
        fail: Fail,
        name: str,
        space: str,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
        base: int = 0,
        region: int = -1,
        alignment: int = 256,
        writeable: bool = True,
    ) -> None:
        self.log, self.fail = log, fail
        self.name, self.space, self.dtype, self.shape = name, space, dtype, shape
        self.itemsize = dtype.itemsize
        self.strides = strides if strides is not None else contiguous(shape)  # in elements
        self.base, self.region, self.alignment, self.writeable = base, region, alignment, writeable
        self.reads = self.writes = 0  # counted here for local arrays only; the others are in the log
        self.limit = log.limit // WIDTH
        self._tags: dict[tuple[int, int], int] = {}

    def tag(self, kind: int, count: int = 1) -> int:
        """Number under which accesses of this kind and width are logged."""
        number = self._tags.get((kind, count))
        if number is None:
            number = self._tags[kind, count] = self.log.tag(Tag(self, kind, count))
        return number

    def element(self, offset: int) -> str:
        """`name[i, j]` of an element; offset in elements from the start of its memory."""
        index = []
        for size, stride in zip(self.shape, self.strides, strict=True):
            index.append(offset // stride % size if stride > 0 else 0)
        found = sum(i * stride for i, stride in zip(index, self.strides, strict=True))
        where = ", ".join(map(str, index)) if found == offset else f"element {offset}"
        return f"{self.name}[{where}]"
