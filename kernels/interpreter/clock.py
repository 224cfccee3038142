"""What a thread knows to have happened: the order between accesses that barriers and fences create.

An access is stamped with (block, epoch, thread, step). The epoch is the number of block barriers its block has
passed, the step the number of times its thread has told others how far it is (at a `syncwarp` or a fence). A
later access is ordered after it if its thread's clock covers the stamp.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Clock:
    """Knowledge about others; never changed once made, so that threads can share one.

    epochs: block -> every access of that block in an epoch below this one has happened.
    threads: thread of the grid -> every access of that thread with a step below this one has happened.
    """

    epochs: dict[int, int] = field(default_factory=dict)
    threads: dict[int, int] = field(default_factory=dict)

    def covers(self, block: int, epoch: int, thread: int, step: int) -> bool:
        """Whether an access with this stamp is known to have happened."""
        return self.threads.get(thread, 0) > step or self.epochs.get(block, 0) > epoch


NOTHING = Clock()


def join(clocks: Iterable[Clock]) -> Clock:
    """Everything that any of the clocks knows."""
    distinct = list({id(clock): clock for clock in clocks if clock is not NOTHING}.values())
    if not distinct:
        return NOTHING
    if len(distinct) == 1:
        return distinct[0]
    epochs: dict[int, int] = {}
    threads: dict[int, int] = {}
    for clock in distinct:
        _raise_to(epochs, clock.epochs)
        _raise_to(threads, clock.threads)
    return Clock(epochs, threads)


def _raise_to(known: dict[int, int], more: dict[int, int]) -> None:
    for key, value in more.items():
        if known.get(key, 0) < value:
            known[key] = value
