"""What a launch found out, in words: places, races, and the records of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from kernels.interpreter.array import Array
from kernels.interpreter.counts import Requests
from kernels.interpreter.errors import Place, Position, RaceError
from kernels.interpreter.log import KIND_NAMES, READ, WRITE, Log
from kernels.interpreter.races import Access, Race
from kernels.interpreter.report import Record


class Findings:
    """Turns the numbers in the log of one launch into what a reader is told.

    Attributes: grid and block, the sizes of the launch.
    """

    def __init__(self, kernel: Callable[..., Any], log: Log) -> None:
        self._name, self._first_line = kernel.__name__, kernel.__code__.co_firstlineno
        self._log = log
        self.grid: Position = (1, 1, 1)
        self.block: Position = (1, 1, 1)

    def place(self, site: int, block: Position | None, thread: Position | None) -> Place:
        """An instruction, block and thread in words; site -1 is the kernel as a whole."""
        if site < 0:
            return Place(self._name, self._first_line, "", block, thread)
        sites = self._log.sites
        return Place(self._name, sites.line(site), sites.source(site), block, thread)

    def race(self, race: Race) -> RaceError:
        """The error that names both sides."""
        earlier, later = race
        element = self._log.tags[later.tag].array.element(later.offset)
        does, did = KIND_NAMES[later.kind], KIND_NAMES[earlier.kind]
        place, other = self._place_of(later), self._place_of(earlier)
        same_block = place.block == other.block
        who = f"thread {other.thread}" if same_block else f"block {other.block} thread {other.thread}"
        also = "also does" if does == did else "does"
        article = "an" if did == "atomic" else "a"
        missing = "barrier" if same_block else "order of blocks"
        message = (
            f"{does} of {element} races with {who}, which {also} {article} {did} of it at {other.where}: "
            f"no {missing} between them"
        )
        if later.kind == earlier.kind == WRITE:
            message += " (two writes race even if they write the same value)"
        return RaceError(message, place, other)

    def _place_of(self, access: Access) -> Place:
        x, y, z = self.block
        thread = _position(access.thread % (x * y * z), self.block)
        return self.place(access.site, _position(access.block, self.grid), thread)

    def records(self, requests: Requests) -> Iterator[Record]:
        """The requests, summed for each instruction and array."""
        num_tags = len(self._log.tags)
        keys, group = np.unique(requests.site * num_tags + requests.tag, return_inverse=True)
        names = ("lanes", "bytes", "sectors", "wavefronts", "least")
        sums = {n: np.bincount(group, weights=getattr(requests, n), minlength=len(keys)) for n in names}
        sums["requests"] = np.bincount(group, minlength=len(keys))
        for k, key in enumerate(keys.tolist()):
            site, tag = divmod(key, num_tags)
            record = self._record(site, self._log.tags[tag].array, self._log.tags[tag].kind)
            for name, values in sums.items():
                setattr(record, name, int(values[k]))
            yield record

    def local_records(self, arrays: Iterable[tuple[int, Array]]) -> Iterator[Record]:
        """What was done to local arrays, for the lines that asked for them."""
        for site, array in arrays:
            for kind, times in ((READ, array.reads), (WRITE, array.writes)):
                if times:
                    record = self._record(site, array, kind)
                    record.lanes, record.bytes = times, times * array.itemsize
                    yield record

    def _record(self, site: int, array: Array, kind: int) -> Record:
        sites = self._log.sites
        return Record(
            kernel=self._name,
            function=sites.code(site).co_name,
            line=sites.line(site),
            source=sites.source(site),
            space=array.space,
            kind=KIND_NAMES[kind],
            array=array.name,
        )


def _position(number: int, sizes: Position) -> Position:
    """(x, y, z) of the n-th of a grid or block."""
    x, y, _ = sizes
    return number % x, number // x % y, number // (x * y)
