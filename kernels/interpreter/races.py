"""Races: two threads touch the same element, one of them writes, and nothing orders the two.

The search goes over the log, not over one lucky schedule: what matters is whether a barrier or a fence orders
two accesses, not which came first. Two writes of the same value count too: nothing promises that they meet
whole. Atomics do not race with each other, and a plain read that only prepares the thread's own
compare-and-swap does not race with those of others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from kernels.interpreter.clock import Clock
from kernels.interpreter.log import ATOMIC, CAS, READ, WRITE, Accesses, Column, Tag, column


@dataclass(frozen=True)
class Rows:
    """Accesses that may race, one entry each; `order` is the place in the order of execution."""

    order: Column
    address: Column
    kind: Column
    block: Column
    thread: Column
    epoch: Column
    step: Column
    site: Column
    tag: Column
    offset: Column
    clock: np.ndarray[tuple[int], np.dtype[np.object_]]

    def take(self, chosen: Column) -> Rows:
        """Some of them, in that order."""
        return Rows(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))

    def __len__(self) -> int:
        return len(self.address)


class Access(NamedTuple):
    """One side of a race."""

    kind: int
    block: int
    thread: int
    epoch: int
    step: int
    site: int
    tag: int
    offset: int
    clock: Clock

    def after(self, earlier: Access) -> bool:
        """Whether a barrier, a fence or the program itself orders it after an earlier one."""
        if self.thread == earlier.thread or (self.block == earlier.block and self.epoch > earlier.epoch):
            return True
        return self.clock.covers(earlier.block, earlier.epoch, earlier.thread, earlier.step)


Race = tuple[Access, Access]  # the earlier one, the later one


class RaceSearch:
    """Collects the accesses of a launch and finds the first race in them."""

    def __init__(self) -> None:
        self._seen = 0  # accesses
        self._global: list[Rows] = []  # without the repetitions, for the comparison of blocks

    def within_blocks(self, accesses: Accesses, tags: list[Tag]) -> Race | None:
        """A race between threads of one block. Mutates: remembers what `between_blocks` needs."""
        rows = _candidates(accesses, tags, self._seen)
        self._seen += len(accesses.tag)
        if not len(rows):
            return None
        same = np.lexsort((rows.address, rows.epoch, rows.block))
        rows = rows.take(same)
        starts = _starts(rows.block, rows.epoch, rows.address)
        race = _first(rows, starts, rows.thread)
        self._remember(rows, tags)
        return race

    def between_blocks(self) -> Race | None:
        """A race between threads of different blocks, over the whole launch."""
        if not self._global:
            return None
        names = Rows.__dataclass_fields__
        rows = Rows(*(np.concatenate([getattr(part, name) for part in self._global]) for name in names))
        rows = rows.take(np.lexsort((rows.order, rows.address)))
        return _first(rows, _starts(rows.address), rows.block)

    def _remember(self, rows: Rows, tags: list[Tag]) -> None:
        in_global = column(tags, (t.array.space == "global" for t in tags))[rows.tag]
        rows = rows.take(np.flatnonzero(in_global))
        if len(rows):
            alike = (rows.step, rows.thread, rows.kind, rows.epoch, rows.block, rows.address)
            rows = rows.take(np.lexsort((rows.order, *alike)))
            alike = (rows.step, rows.thread, rows.kind, rows.epoch, rows.block, rows.address)
            self._global.append(rows.take(_starts(*alike)))


def _candidates(accesses: Accesses, tags: list[Tag], seen: int) -> Rows:
    """Accesses to memory that threads share and that somebody writes, one row per smallest element."""
    kinds = column(tags, (t.kind for t in tags))
    regions = column(tags, (t.array.region for t in tags))  # -1 where no thread can meet another
    written = {t.array.region for t in tags if t.kind != READ} - {-1}
    chosen = np.flatnonzero(np.isin(regions, list(written))[accesses.tag])
    tag, run, runs = accesses.tag[chosen], accesses.run[chosen], accesses.runs
    bases, itemsizes = (
        column(tags, (t.array.base for t in tags)),
        column(tags, (t.array.itemsize for t in tags)),
    )
    grains = _grains(tags)
    parts = column(tags, (t.size // grains.get(t.array.region, t.size) for t in tags))[tag]
    address = bases[tag] + accesses.offset[chosen] * itemsizes[tag]
    row = np.repeat(np.arange(len(chosen)), parts)
    within = np.arange(len(row)) - np.repeat(np.cumsum(parts) - parts, parts)
    sizes = column(tags, (grains.get(t.array.region, t.size) for t in tags))[tag]
    clocks = np.empty(len(accesses.clocks), dtype=np.object_)
    clocks[:] = accesses.clocks
    run = run[row]
    return Rows(
        order=seen + chosen[row],
        address=address[row] + within * sizes[row],
        kind=kinds[tag][row],
        block=runs.block[run],
        thread=runs.thread[run],
        epoch=runs.epoch[run],
        step=runs.step[run],
        site=accesses.site[chosen][row],
        tag=tag[row],
        offset=accesses.offset[chosen][row],
        clock=clocks[run],
    )


def _grains(tags: list[Tag]) -> dict[int, int]:
    """Region -> bytes of the smallest element that anybody touches in it."""
    grains: dict[int, int] = {}
    for tag in tags:
        size = tag.array.itemsize
        grains[tag.array.region] = min(size, grains.get(tag.array.region, size))
    return grains


def _starts(*keys: Column) -> Column:
    """Where a sorted sequence of keys changes."""
    change = np.zeros(len(keys[0]), dtype=bool)
    change[:1] = True
    for key in keys:
        change[1:] |= key[1:] != key[:-1]
    return np.flatnonzero(change)


def _first(rows: Rows, starts: Column, actor: Column) -> Race | None:
    """The first race among groups of accesses to one element; `actor` tells who must differ."""
    kind = rows.kind
    lowest, highest = np.minimum.reduceat(kind, starts), np.maximum.reduceat(kind, starts)
    several = np.minimum.reduceat(actor, starts) != np.maximum.reduceat(actor, starts)
    suspicious = several & ((highest == WRITE) | ((lowest == READ) & (highest > READ)))
    ends = np.append(starts[1:], len(rows))
    for group in np.flatnonzero(suspicious):
        accesses = _accesses(rows.take(np.arange(starts[group], ends[group])))
        race = _unordered(_excused(accesses))
        if race is not None:
            return race
    return None


def _accesses(rows: Rows) -> list[Access]:
    return list(
        map(Access._make, zip(*(getattr(rows, name).tolist() for name in Access._fields), strict=True))
    )


def _excused(accesses: list[Access]) -> Iterator[Access]:
    """A read that prepares a compare-and-swap counts as a part of it, also where a thread then needs no swap."""
    swappers = {access.thread for access in accesses if access.kind == CAS}
    lines = {access.site for access in accesses if access.kind == READ and access.thread in swappers}
    for access in accesses:
        prepares = access.kind == READ and access.site in lines
        yield access._replace(kind=ATOMIC) if prepares else access


def _unordered(accesses: Iterator[Access]) -> Race | None:
    """The first two that conflict and that nothing orders.

    A write that is ordered after all before it stands for them: what is ordered after it is ordered after them.
    So one write has to be kept, and the latest read and atomic of each thread since.
    """
    write: dict[int, Access] = {}
    reads: dict[int, Access] = {}
    atomics: dict[int, Access] = {}
    for access in accesses:
        rivals: tuple[dict[int, Access], ...]
        if access.kind == READ:
            rivals, own = (write, atomics), reads
        elif access.kind == WRITE:
            rivals, own = (write, reads, atomics), write
        else:
            rivals, own = (write, reads), atomics
        for earlier in chain.from_iterable(group.values() for group in rivals):
            if not access.after(earlier):
                return earlier, access
        if access.kind == WRITE:
            for group in rivals:
                group.clear()
        own[access.thread] = access
    return None
