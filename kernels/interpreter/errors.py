"""What can be wrong with a kernel, one class each; every message is one sentence that says where.

The place has five parts: kernel, line, source text of the line, block and thread. A mistake that is found
before a thread runs (a bad launch) has no block and no thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Position = tuple[int, int, int]  # (x, y, z)


@dataclass(frozen=True)
class Place:
    """Where in a launch something happened."""

    kernel: str
    line: int
    source: str = ""  # text of the line; empty where the source is not at hand
    block: Position | None = None
    thread: Position | None = None

    @property
    def where(self) -> str:
        """Line and source, for the middle of a sentence."""
        return f"line {self.line} `{self.source}`" if self.source else f"line {self.line}"

    def __str__(self) -> str:
        text = f"{self.kernel}, {self.where}"
        if self.block is not None:
            text += f", block {self.block}"
        if self.thread is not None:
            text += f", thread {self.thread}"
        return text


class KernelError(Exception):
    """A kernel did something wrong; also the wrapper of an exception that the kernel's own code raised.

    Attributes: kernel, line, source, block (x, y, z), thread (x, y, z). The exception of the kernel's own code
    is `__cause__`.
    """

    def __init__(self, message: str, place: Place) -> None:
        super().__init__(f"{place}: {message}")
        self.message, self.place = message, place
        self.kernel = place.kernel
        self.line = place.line
        self.source = place.source
        self.block = place.block
        self.thread = place.thread

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.place)  # so that it survives the way to another process


class RaceError(KernelError):
    """Two threads touch the same element, one of them writes, and nothing orders the two.

    Attributes: `other`, the Place of the access it races with; the error's own place is the later one.
    """

    def __init__(self, message: str, place: Place, other: Place) -> None:
        super().__init__(message, place)
        self.other = other

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.place, self.other)


class BarrierError(KernelError):
    """Not all threads of a block (or of a mask) meet at the same barrier."""


class DeadlockError(KernelError):
    """No thread of a block can go on."""


class BoundsError(KernelError):
    """An index below zero or past the end."""


class AlignmentError(KernelError):
    """A vector access whose address is not a multiple of its size."""


class LimitError(KernelError):
    """The launch made more accesses and waits than `max_accesses`: most likely a loop that never ends."""


class LaunchError(KernelError):
    """A grid, a block, an argument or an amount of shared memory that no GPU takes."""
