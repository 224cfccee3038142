"""Arrays as a kernel sees them: every index is checked, every access is logged.

Elements are read into Python numbers. A float32 is widened to a double, and rounded again when it is stored.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np

from kernels.interpreter.array import Array
from kernels.interpreter.elements import convert
from kernels.interpreter.errors import AlignmentError, BoundsError, KernelError, LimitError
from kernels.interpreter.log import ATOMIC, CAS, READ, TOO_MANY, WRITE

MAX_VECTOR_BYTES = 16  # the widest load and store of a GPU
_frame = sys._getframe


class View:
    """An array, or a slice of one, inside a kernel.

    Args:
        memory: indexed by element.
        start: place of the first element in it.
        shape, steps: of a slice; steps in elements.
    """

    __slots__ = (
        "_append",
        "_array",
        "_bases",
        "_entries",
        "_length",
        "_log",
        "_memory",
        "_read",
        "_start",
        "_steps",
        "_stride",
        "_write",
        "ndim",
        "shape",
    )

    def __init__(
        self,
        array: Array,
        memory: Any,
        start: int = 0,
        shape: tuple[int, ...] | None = None,
        steps: tuple[int, ...] | None = None,
    ) -> None:
        self._array, self._memory, self._start = array, memory, start
        self.shape = array.shape if shape is None else shape
        self._steps = array.strides if steps is None else steps
        self.ndim = len(self.shape)
        # Of a vector; a length of -1 sends an integer index elsewhere.
        self._length, self._stride = (self.shape[0], self._steps[0]) if self.ndim == 1 else (-1, 0)
        self._read, self._write = array.tag(READ), array.tag(WRITE)
        log = self._log = array.log
        self._entries, self._append, self._bases = log.entries, log.entries.append, log.sites.bases

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._array.dtype

    @property
    def itemsize(self) -> int:
        return self._array.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(step * self._array.itemsize for step in self._steps)

    @property
    def space(self) -> str:
        return self._array.space

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        for i in range(len(self)):
            yield self[i]

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # Python itself asks for these, and takes no for an answer
            raise AttributeError(name)
        self._fail(KernelError, f"the interpreter has no .{name} of an array, here {self._array.name}")

    def __getitem__(self, index: Any) -> Any:
        # Most accesses of a program pass here, hence one long path without calls.
        if index.__class__ is int and 0 <= index < self._length:
            offset = self._start + index * self._stride
        else:
            offset = self._offset(index)
            if offset.__class__ is not int:
                return offset
        frame = _frame(1)
        try:
            site = self._bases[id(frame.f_code)] + frame.f_lasti
        except KeyError:
            site = self._site()
        append = self._append
        append(self._read)
        append(offset)
        append(site)
        if len(self._entries) > self._log.limit:
            self._too_many()
        return self._memory[offset]

    def __setitem__(self, index: Any, value: Any) -> None:
        if index.__class__ is int and 0 <= index < self._length:
            offset = self._start + index * self._stride
        else:
            offset = self._offset(index)
            if offset.__class__ is not int:
                self._fail(KernelError, "a slice cannot be assigned to here; write a loop over its elements")
        frame = _frame(1)
        try:
            site = self._bases[id(frame.f_code)] + frame.f_lasti
        except KeyError:
            site = self._site()
        append = self._append
        append(self._write)
        append(offset)
        append(site)
        if len(self._entries) > self._log.limit:
            self._too_many()
        try:
            self._memory[offset] = value
        except (TypeError, ValueError, OverflowError):
            self._store_converted(offset, value)

    def load_vector(self, index: Any, count: int) -> tuple[Any, ...]:
        """`count` neighbours from `index` on, as one access; for Python versions of vector intrinsics.

        Raises: AlignmentError, BoundsError.
        """
        offset = self._vector(index, count, READ)
        memory = self._memory
        return tuple(memory[k] for k in range(offset, offset + count))

    def store_vector(self, index: Any, values: Sequence[Any]) -> None:
        """Stores the values at `index` and after it, as one access. Raises: AlignmentError, BoundsError."""
        offset = self._vector(index, len(values), WRITE)
        for k, value in enumerate(values):
            self._store_converted(offset + k, value)

    def atomic(self, index: Any, change: Callable[[Any], Any], compare: bool = False) -> tuple[Any, int]:
        """Replaces one element in one step: the old value, and the address of the element.

        Args: change: old value -> new value, or None to leave it; compare: whether this is compare-and-swap.
        """
        offset = (
            self._offset(index) if index.__class__ is not int or self.ndim != 1 else self._offset((index,))
        )
        if offset.__class__ is not int:
            self._fail(KernelError, f"an atomic needs {self.ndim} indices, not {index}")
        self._note(CAS if compare else ATOMIC, 1, offset)
        old = self._memory[offset]
        new = change(old)
        if new is not None:
            self._store_converted(offset, new)
        return old, self._array.base + offset * self._array.itemsize

    # Where an index points

    def _offset(self, index: Any) -> Any:
        """Element offset of a full index; a View if the index leaves dimensions over."""
        if index.__class__ is tuple and len(index) == self.ndim == 2:  # much the most frequent one
            (i, j), (rows, columns), (step, stride) = index, self.shape, self._steps
            if i.__class__ is j.__class__ is int and 0 <= i < rows and 0 <= j < columns:
                return self._start + i * step + j * stride
        indices = index if index.__class__ is tuple else (index,)
        if len(indices) > self.ndim:
            self._fail(
                BoundsError, f"{len(indices)} indices, but {self._array.name} has {self.ndim} dimensions"
            )
        if len(indices) < self.ndim:
            return self._slice(indices)
        offset = self._start
        for i, size, step in zip(indices, self.shape, self._steps, strict=True):
            if i.__class__ is not int:
                if isinstance(i, slice):
                    return self._slice(indices)
                i = self._integer(i)
            if not 0 <= i < size:
                self._out_of_bounds(index)
            offset += i * step
        return offset

    def _slice(self, indices: tuple[Any, ...]) -> View:
        shape, steps, start = [], [], self._start
        everything = slice(None)
        for k, (size, step) in enumerate(zip(self.shape, self._steps, strict=True)):
            i = indices[k] if k < len(indices) else everything
            if isinstance(i, slice):
                chosen = range(*i.indices(size))
                shape.append(len(chosen))
                steps.append(step * chosen.step)
                start += chosen.start * step if chosen else 0
            else:
                i = self._integer(i)
                if not 0 <= i < size:
                    self._out_of_bounds(indices)
                start += i * step
        return type(self)(self._array, self._memory, start, tuple(shape), tuple(steps))

    def _integer(self, index: Any) -> int:
        try:
            return operator.index(index)
        except TypeError:
            self._fail(KernelError, f"{index!r} is no index for {self._array.name}: an index is an integer")

    def _out_of_bounds(self, index: Any) -> NoReturn:
        indices = index if isinstance(index, tuple) else (index,)
        shown = ", ".join(str(i) for i in indices)
        message = f"index [{shown}] is outside {self._array.name}, whose shape is {self.shape}"
        if any(not isinstance(i, slice) and i < 0 for i in indices):
            message = (
                f"index [{shown}] of {self._array.name} is negative: it would wrap to the end in Numba "
                "and read outside the array in C"
            )
        elif self._array.space == "shared" and self.shape == (0,):
            message += ": the launch asked for no dynamic shared memory"
        self._fail(BoundsError, message)

    def _vector(self, index: Any, count: int, kind: int) -> int:
        """Logs a vector access and returns its element offset."""
        array, size = self._array, count * self._array.itemsize
        if size > MAX_VECTOR_BYTES or count & (count - 1) or not count:
            self._fail(AlignmentError, f"a vector access has 1, 2, 4, 8 or 16 bytes, not {size}")
        if not self.ndim or self._steps[-1] != 1:
            self._fail(AlignmentError, f"the elements of this slice of {array.name} are not neighbours")
        indices = index if isinstance(index, tuple) else (index,)
        last = self._integer(indices[-1])
        if last + count > self.shape[-1] and 0 <= last < self.shape[-1]:
            self._fail(
                BoundsError,
                f"{count} elements from index {last} of {array.name} on end outside its shape {self.shape}",
            )
        offset = self._offset(indices)
        if offset.__class__ is not int:
            self._fail(KernelError, f"a vector access needs {self.ndim} indices, not {index}")
        if (array.base + offset * array.itemsize) % size:
            self._fail(
                AlignmentError,
                f"{size} bytes at {array.element(offset)} do not start at a multiple of {size} bytes",
            )
        if size > array.alignment:
            self._fail(
                AlignmentError,
                f"{array.name} is only sure to start at a multiple of {array.alignment} bytes: "
                f"allocate it with alignment={size}",
            )
        self._note(kind, count, offset)
        return int(offset)

    # What is written down

    def _note(self, kind: int, count: int, offset: int) -> None:
        self._entries.extend((self._array.tag(kind, count), offset, self._site()))
        if len(self._entries) > self._log.limit:
            self._too_many()

    def _site(self) -> int:
        """The instruction of the kernel that is running, below the functions that are not interpreted."""
        return self._log.sites.raw(_frame(2))

    def _too_many(self) -> NoReturn:
        self._fail(LimitError, TOO_MANY)

    def _fail(self, kind: type[KernelError], message: str) -> NoReturn:
        self._array.fail(kind, message)

    def _store_converted(self, offset: int, value: Any) -> None:
        if not self._array.writeable:
            self._fail(KernelError, f"{self._array.name} is read-only")
        self._memory[offset] = convert(value, self._array.dtype)
