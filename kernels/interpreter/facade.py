"""`numba.cuda` as an interpreted kernel sees it."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np

from kernels.interpreter import arithmetic
from kernels.interpreter.allocation import Allocator
from kernels.interpreter.array import Fail
from kernels.interpreter.atomics import Atomics
from kernels.interpreter.block import Block
from kernels.interpreter.errors import BarrierError, KernelError, Position
from kernels.interpreter.sites import Sites
from kernels.interpreter.thread import WARP_SIZE, Meeting, Thread

FULL_MASK = 0xFFFFFFFF
Result = Callable[[int, dict[int, Any]], Any] | None  # see Meeting


class Dim3:
    """x, y, z; of the running thread, or of a size."""

    __slots__ = ("x", "y", "z")

    def __init__(self, x: int = 0, y: int = 0, z: int = 0) -> None:
        self.x, self.y, self.z = x, y, z


class Cuda:
    """The names of `numba.cuda`; what is missing raises one sentence with its name."""

    def __init__(
        self,
        grid: Position,
        block: Position,
        sites: Sites,
        allocator: Allocator,
        fail: Fail,
        poison: bool,
    ) -> None:
        self.threadIdx, self.blockIdx = Dim3(), Dim3()
        self.gridDim, self.blockDim = Dim3(*grid), Dim3(*block)
        self.laneid, self.warpsize = 0, WARP_SIZE
        self.shared = SimpleNamespace(array=allocator.shared)
        self.local = SimpleNamespace(array=allocator.local)
        self.const = SimpleNamespace(array_like=allocator.const)
        self.fp16 = arithmetic.FP16
        self.popc, self.clz, self.ffs, self.brev = (
            arithmetic.popc,
            arithmetic.clz,
            arithmetic.ffs,
            arithmetic.brev,
        )
        self._sites, self._fail, self._poison = sites, fail, poison
        self.atomic = Atomics(self._current_block, fail)
        self.libdevice = Libdevice(fail)
        self.cg = Missing("the interpreter has no cuda.cg: blocks run one after another here", fail)
        self._block: Block | None = None

    def enter_block(self, block: Block, position: Position) -> None:
        """What follows is in this block. Mutates: blockIdx."""
        self._block = block
        self.blockIdx.x, self.blockIdx.y, self.blockIdx.z = position

    def enter_thread(self, thread: Thread) -> None:
        """What follows is done by this thread. Mutates: threadIdx, laneid."""
        index = self.threadIdx
        index.x, index.y, index.z = thread.position
        self.laneid = thread.lane

    def __getattr__(self, name: str) -> NoReturn:
        near = difflib.get_close_matches(name, [n for n in (*dir(type(self)), *vars(self)) if n[0] != "_"], 1)
        hint = f"; is it {near[0]}?" if near else ""
        self._fail(KernelError, f"the interpreter has no cuda.{name}{hint}")

    def _current_block(self) -> Block:
        assert self._block is not None
        return self._block

    # Where a thread is

    def grid(self, ndim: int) -> Any:
        """Position of the thread in the whole grid: an int for ndim 1, else a tuple."""
        at = (
            self.threadIdx.x + self.blockIdx.x * self.blockDim.x,
            self.threadIdx.y + self.blockIdx.y * self.blockDim.y,
            self.threadIdx.z + self.blockIdx.z * self.blockDim.z,
        )
        return at[0] if ndim == 1 else at[:ndim]

    def gridsize(self, ndim: int) -> Any:
        """Threads of the whole grid in each dimension."""
        sizes = (
            self.blockDim.x * self.gridDim.x,
            self.blockDim.y * self.gridDim.y,
            self.blockDim.z * self.gridDim.z,
        )
        return sizes[0] if ndim == 1 else sizes[:ndim]

    # Barriers of the block

    def _barrier(self, name: str, value: Any, result: Result) -> Any:
        site = self._sites.at(sys._getframe(2))
        return self._current_block().wait(Meeting(name, site, None, value, result, True))

    def syncthreads(self) -> None:
        """Waits for all threads of the block."""
        self._barrier("syncthreads", None, None)

    def syncthreads_count(self, predicate: Any) -> int:
        """Barrier; the number of threads whose predicate is true."""
        return int(self._barrier("syncthreads_count", predicate, lambda _, v: sum(map(bool, v.values()))))

    def syncthreads_and(self, predicate: Any) -> int:
        """Barrier; 1 if all predicates are true."""
        return int(self._barrier("syncthreads_and", predicate, lambda _, v: all(v.values())))

    def syncthreads_or(self, predicate: Any) -> int:
        """Barrier; 1 if any predicate is true."""
        return int(self._barrier("syncthreads_or", predicate, lambda _, v: any(v.values())))

    # Lanes of a warp

    def _lanes(self, name: str, mask: int, value: Any, result: Result) -> Any:
        block, mask = self._current_block(), int(mask) & FULL_MASK
        if not mask >> block.current.lane & 1:
            self._fail(
                BarrierError,
                f"lane {block.current.lane} calls {name}, but its mask {mask:#010x} leaves it out",
            )
        site = self._sites.at(sys._getframe(2))
        return block.wait(Meeting(name, site, mask, value, result, name == "syncwarp"))

    def syncwarp(self, mask: int = FULL_MASK) -> None:
        """Waits for the lanes of the mask, and orders what they do before and after."""
        self._lanes("syncwarp", mask, None, None)

    def shfl_sync(self, mask: int, value: Any, src_lane: int) -> Any:
        """The value of lane `src_lane`."""
        return self._lanes("shfl_sync", mask, (value, src_lane), self._from_named_lane)

    def shfl_up_sync(self, mask: int, value: Any, delta: int) -> Any:
        """The value of the lane `delta` below; the own value where there is none."""
        return self._shuffle("shfl_up_sync", mask, value, lambda lane: lane - delta)

    def shfl_down_sync(self, mask: int, value: Any, delta: int) -> Any:
        """The value of the lane `delta` above; the own value where there is none."""
        return self._shuffle("shfl_down_sync", mask, value, lambda lane: lane + delta)

    def shfl_xor_sync(self, mask: int, value: Any, lane_mask: int) -> Any:
        """The value of the lane whose number is the own one xor `lane_mask`."""
        return self._shuffle("shfl_xor_sync", mask, value, lambda lane: lane ^ lane_mask)

    def _shuffle(self, name: str, mask: int, value: Any, source: Callable[[int], int]) -> Any:
        def result(lane: int, values: dict[int, Any]) -> Any:
            wanted = source(lane)
            return self._received(values, wanted, values[lane]) if 0 <= wanted < WARP_SIZE else values[lane]

        return self._lanes(name, mask, value, result)

    def _from_named_lane(self, lane: int, values: dict[int, Any]) -> Any:
        own, wanted = values[lane]
        value = values.get(wanted % WARP_SIZE)
        return value[0] if value is not None else self._received({}, wanted, own)

    def _received(self, values: dict[int, Any], wanted: int, own: Any) -> Any:
        """What comes from a lane; nobody knows what, if that lane does not take part."""
        if wanted in values:
            return values[wanted]
        if not self._poison:
            return own
        return math.nan if isinstance(own, float | np.floating) else -1

    def ballot_sync(self, mask: int, predicate: Any) -> int:
        """Bit k is set if lane k's predicate is true."""
        return int(
            self._lanes("ballot_sync", mask, predicate, lambda _, v: sum(1 << k for k, p in v.items() if p))
        )

    def all_sync(self, mask: int, predicate: Any) -> bool:
        """Whether all predicates are true."""
        return bool(self._lanes("all_sync", mask, predicate, lambda _, v: all(v.values())))

    def any_sync(self, mask: int, predicate: Any) -> bool:
        """Whether any predicate is true."""
        return bool(self._lanes("any_sync", mask, predicate, lambda _, v: any(v.values())))

    def eq_sync(self, mask: int, predicate: Any) -> bool:
        """Whether all predicates are the same."""
        return bool(self._lanes("eq_sync", mask, bool(predicate), lambda _, v: len(set(v.values())) == 1))

    def match_any_sync(self, mask: int, value: Any) -> int:
        """The lanes that hold the same value, as bits."""
        return int(self._lanes("match_any_sync", mask, value, _lanes_alike))

    def match_all_sync(self, mask: int, value: Any) -> tuple[int, bool]:
        """(the mask, True) if all lanes hold the same value, else (0, False)."""
        alike, all_lanes = self._lanes(
            "match_all_sync", mask, value, lambda lane, v: (_lanes_alike(lane, v), sum(1 << k for k in v))
        )
        return (alike, True) if alike == all_lanes else (0, False)

    def activemask(self) -> int:
        """The lanes of the warp that are at this instruction together, as bits."""
        site = self._sites.at(sys._getframe(1))
        meeting = Meeting(f"activemask at {site}", site, 0, True, lambda _, v: sum(1 << k for k in v), False)
        return int(self._current_block().wait(meeting))

    def lanemask_lt(self) -> int:
        """The lanes below the own one, as bits."""
        return (1 << self.laneid) - 1

    # Memory order

    def threadfence(self) -> None:
        """What the thread did before is visible to all, before what it does after."""
        block = self._current_block()
        block.fence(block.current)

    threadfence_block = threadfence_system = threadfence

    def nanosleep(self, nanoseconds: int) -> None:
        """Does nothing; there is no time here."""

    # Numbers

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c."""
        return a * b + c

    def selp(self, condition: Any, a: Any, b: Any) -> Any:
        """a if the condition is true, else b."""
        return a if condition else b

    def cbrt(self, x: float) -> float:
        """Cube root."""
        return math.copysign(abs(x) ** (1 / 3), x)


class Missing:
    """Something that the interpreter does not have; says so when it is used."""

    def __init__(self, message: str, fail: Fail) -> None:
        self._message, self._fail = message, fail

    def __call__(self, *arguments: Any, **options: Any) -> NoReturn:
        self._fail(KernelError, self._message)

    def __getattr__(self, name: str) -> NoReturn:
        self._fail(KernelError, self._message)


class Libdevice:
    """`numba.cuda.libdevice`: the functions that have a counterpart in `math`."""

    def __init__(self, fail: Fail) -> None:
        self._fail = fail

    def __getattr__(self, name: str) -> Callable[..., Any]:
        short = name.removeprefix("fast_")
        function = arithmetic.LIBDEVICE.get(short) or arithmetic.LIBDEVICE.get(short.removesuffix("f"))
        if function is None:
            self._fail(KernelError, f"the interpreter has no libdevice.{name}")
        return function


def _lanes_alike(lane: int, values: dict[int, Any]) -> int:
    return sum(1 << k for k, value in values.items() if value == values[lane])
