"""`cuda.atomic`: reads and writes that cannot be torn apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernels.interpreter.array import Fail
from kernels.interpreter.block import Block
from kernels.interpreter.errors import KernelError
from kernels.interpreter.memory import View


class Atomics:
    """The functions of `cuda.atomic`; each returns the old value."""

    def __init__(self, block: Callable[[], Block], fail: Fail) -> None:
        self._block, self._fail = block, fail

    def __getattr__(self, name: str) -> Any:
        self._fail(KernelError, f"the interpreter has no cuda.atomic.{name}")

    def _change(self, array: Any, index: Any, change: Callable[[Any], Any], compare: bool = False) -> Any:
        if not isinstance(array, View):
            self._fail(KernelError, f"an atomic works on an array, not on {array!r}")
        old, address = array.atomic(index, change, compare)
        block = self._block()
        block.synchronise(block.current, address, array.space == "shared")
        return old

    def add(self, array: Any, index: Any, value: Any) -> Any:
        """array[index] += value."""
        return self._change(array, index, lambda old: old + value)

    def sub(self, array: Any, index: Any, value: Any) -> Any:
        """array[index] -= value."""
        return self._change(array, index, lambda old: old - value)

    def and_(self, array: Any, index: Any, value: Any) -> Any:
        """array[index] &= value."""
        return self._change(array, index, lambda old: old & value)

    def or_(self, array: Any, index: Any, value: Any) -> Any:
        """array[index] |= value."""
        return self._change(array, index, lambda old: old | value)

    def xor(self, array: Any, index: Any, value: Any) -> Any:
        """array[index] ^= value."""
        return self._change(array, index, lambda old: old ^ value)

    def inc(self, array: Any, index: Any, value: Any) -> Any:
        """Adds one; back to zero after `value`."""
        return self._change(array, index, lambda old: 0 if old >= value else old + 1)

    def dec(self, array: Any, index: Any, value: Any) -> Any:
        """Takes one off; on to `value` after zero."""
        return self._change(array, index, lambda old: value if old == 0 or old > value else old - 1)

    def exch(self, array: Any, index: Any, value: Any) -> Any:
        """array[index] = value."""
        return self._change(array, index, lambda old: value)

    def max(self, array: Any, index: Any, value: Any) -> Any:
        """The larger of the two; a NaN in either stays out of it only if it is `value`."""
        return self._change(array, index, lambda old: value if value > old else None)

    def min(self, array: Any, index: Any, value: Any) -> Any:
        """The smaller of the two."""
        return self._change(array, index, lambda old: value if value < old else None)

    def nanmax(self, array: Any, index: Any, value: Any) -> Any:
        """The larger of the two, where a NaN counts as nothing."""
        return self._change(array, index, lambda old: value if value > old or old != old else None)

    def nanmin(self, array: Any, index: Any, value: Any) -> Any:
        """The smaller of the two, where a NaN counts as nothing."""
        return self._change(array, index, lambda old: value if value < old or old != old else None)

    def cas(self, array: Any, index: Any, old: Any, value: Any) -> Any:
        """Stores `value` if the element equals `old`."""
        return self._change(array, index, lambda now: value if now == old else None, compare=True)

    def compare_and_swap(self, array: Any, old: Any, value: Any) -> Any:
        """`cas` on element 0."""
        return self.cas(array, 0, old, value)
