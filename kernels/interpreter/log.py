"""The log of a launch: every access of every thread, three integers each, read in bulk later.

Threads run one at a time from one synchronisation point to the next. Such a stretch is a run; everything that
is the same for all accesses of a run (block, thread, epoch, clock) is noted once, when it begins. An access
then costs three appends, and counting and the search for races are array operations on the whole log.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.interpreter.clock import Clock
from kernels.interpreter.sites import Sites

Column = NDArray[np.int64]

READ, CAS, ATOMIC, WRITE = range(4)
KIND_NAMES = {READ: "read", CAS: "atomic", ATOMIC: "atomic", WRITE: "write"}
SPACES = ("global", "shared", "local", "const")
WIDTH = 3  # integers per access: tag, element offset, site
WAIT = 4 * WIDTH  # what a wait takes of the limit: switching threads costs the time of several accesses
TOO_MANY = (
    "the launch made more accesses and waits than max_accesses allows; is there a loop that never ends?"
)


@dataclass(frozen=True)
class Tag:
    """One way to touch one array: which array, read or write, how many elements at once."""

    array: Any  # kernels.interpreter.memory.Array
    kind: int
    count: int = 1

    @property
    def size(self) -> int:
        return int(self.count * self.array.itemsize)


@dataclass(frozen=True)
class Runs:
    """What the accesses of each run have in common, one entry per run."""

    start: Column  # first access
    block: Column
    thread: Column  # of the grid
    epoch: Column
    step: Column
    warp: Column  # of the block
    lane: Column
    segment: Column  # synchronisation points that the thread has passed


@dataclass(frozen=True)
class Accesses:
    """The log as columns, one entry per access, in the order of execution."""

    tag: Column
    offset: Column
    site: Column
    run: Column
    runs: Runs
    clocks: list[Clock]


class Log:
    """Accesses and runs since the last `take`."""

    def __init__(self, limit: int) -> None:
        self.entries = array("q")
        self.tags: list[Tag] = []
        self.sites = Sites()
        self.limit = limit * WIDTH  # length of `entries` at which the launch has made too many accesses
        self._runs = array("q")
        self._clocks: list[Clock] = []

    def tag(self, tag: Tag) -> int:
        """The number of a new tag."""
        self.tags.append(tag)
        return len(self.tags) - 1

    def begin(self, run: tuple[int, ...], clock: Clock) -> None:
        """What follows belongs to this run: the fields of `Runs` without the first."""
        self._runs.extend((len(self.entries) // WIDTH, *run))
        self._clocks.append(clock)

    def wait(self) -> bool:
        """Counts that a thread waits, as much as four accesses; whether the limit allows it."""
        self.limit -= WAIT
        return len(self.entries) <= self.limit

    def __len__(self) -> int:
        """Accesses since the last `take`."""
        return len(self.entries) // WIDTH

    def take(self) -> Accesses:
        """The log so far, as columns. Mutates: empties it, and lowers what is left of the limit."""
        columns = np.array(self.entries, dtype=np.int64).reshape(-1, WIDTH)
        runs = Runs(*np.array(self._runs, dtype=np.int64).reshape(-1, len(fields(Runs))).T)
        lengths = np.diff(np.append(runs.start, len(columns)))
        accesses = Accesses(
            tag=columns[:, 0],
            offset=columns[:, 1],
            site=self._canonical(columns[:, 2]),
            run=np.repeat(np.arange(len(lengths)), lengths),
            runs=runs,
            clocks=self._clocks,
        )
        self.limit -= len(self.entries)
        del self.entries[:], self._runs[:]
        self._clocks = []
        return accesses

    def _canonical(self, sites: Column) -> Column:
        distinct, number = np.unique(sites, return_inverse=True)
        return np.array([self.sites.canonical(site) for site in distinct.tolist()], dtype=np.int64)[number]


def column(tags: list[Tag], values: Iterator[int]) -> Column:
    """One integer per tag."""
    return np.fromiter(values, dtype=np.int64, count=len(tags))
