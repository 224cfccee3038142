"""Local arrays: registers of one thread, if a GPU has enough of them.

No other thread can reach them, and they cost no sectors. So their accesses are only counted, not logged, which
makes kernels that keep their sums in them several times as fast to run.
"""

from __future__ import annotations

from typing import Any

from kernels.interpreter.errors import KernelError
from kernels.interpreter.log import READ
from kernels.interpreter.memory import View


class LocalView(View):
    """A local array, or a slice of one: checked like any other."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        if index.__class__ is int and 0 <= index < self._length:
            offset = self._start + index * self._stride
        else:
            offset = self._offset(index)
            if offset.__class__ is not int:
                return offset
        array = self._array
        array.reads += 1
        if array.reads > array.limit:
            self._too_many()
        return self._memory[offset]

    def __setitem__(self, index: Any, value: Any) -> None:
        if index.__class__ is int and 0 <= index < self._length:
            offset = self._start + index * self._stride
        else:
            offset = self._offset(index)
            if offset.__class__ is not int:
                self._fail(KernelError, "a slice cannot be assigned to here; write a loop over its elements")
        array = self._array
        array.writes += 1
        if array.writes > array.limit:
            self._too_many()
        try:
            self._memory[offset] = value
        except (TypeError, ValueError, OverflowError):
            self._store_converted(offset, value)

    def _note(self, kind: int, count: int, offset: int) -> None:
        if kind == READ:
            self._array.reads += 1
        else:
            self._array.writes += 1
