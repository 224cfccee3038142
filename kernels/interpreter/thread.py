"""One CUDA thread, and what it waits for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from greenlet import greenlet  # type: ignore[import-untyped]

from kernels.interpreter.clock import NOTHING, Clock
from kernels.interpreter.errors import Position

WARP_SIZE = 32


@dataclass(slots=True)
class Meeting:
    """What a thread waits for: the others at the same barrier, or the lanes of its mask.

    Args:
        name: of the function that was called.
        site: instruction that waits.
        mask: lanes that must come, as bits; None for a barrier of the whole block, 0 for "whoever is here".
        value: what the thread brings.
        result: what each thread gets, from its lane (or index) and the values of all by lane (or index);
            None if there is nothing to get.
        orders: whether what the threads did to memory before comes before what they do after.
    """

    name: str
    site: int
    mask: int | None
    value: Any
    result: Callable[[int, dict[int, Any]], Any] | None
    orders: bool


class Thread:
    """One CUDA thread. index: within its block; number: within the grid."""

    __slots__ = (
        "clock",
        "done",
        "fenced",
        "greenlet",
        "index",
        "lane",
        "meeting",
        "number",
        "position",
        "result",
        "segment",
        "step",
        "warp",
    )

    def __init__(self, body: Callable[..., Any], index: int, number: int, position: Position) -> None:
        self.greenlet = greenlet(body)
        self.index, self.number, self.position = index, number, position
        self.warp, self.lane = divmod(index, WARP_SIZE)
        self.meeting: Meeting | None = None
        self.result: Any = None
        self.done = False
        self.segment = 0  # synchronisation points passed
        self.step = 0  # times it told others how far it is
        self.clock = NOTHING
        self.fenced: Clock | None = None  # what its last memory fence made visible
