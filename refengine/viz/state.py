"""How the block pool stood at one moment, as plain data: what the pictures of the pool are drawn from.

A `PoolState` is made from a record (`states`, `moments`), from a recorded trace of vLLM, or by hand from three
lists. It keeps the three facts about a block apart: used, free, cached.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from refengine.trace.observer import MarkKind, PoolSnapshot
from refengine.trace.record import Mark, Record
from refengine.trace.words import ranges as ranges  # for the modules beside this one


@dataclass(frozen=True)
class BlockFacts:
    """The three facts about one block. They are independent, except that a used block is never free."""

    block_id: int
    used: int  # how many requests hold it
    place: int | None  # its place in the free queue, 1 = next out; None: not free
    cached: bool  # can it be found by its hash?

    @property
    def used_words(self) -> str:
        return f"used by {self.used}" if self.used else "not used"

    @property
    def free_words(self) -> str:
        return "not free" if self.place is None else f"free, {ordinal(self.place)}"

    @property
    def cached_words(self) -> str:
        return "cached" if self.cached else "not cached"

    def words(self) -> str:
        """`block 3: free, 1st in the queue; not cached`."""
        where = self.used_words if self.place is None else f"free, {ordinal(self.place)} in the queue"
        return f"block {self.block_id}: {where}; {self.cached_words}"


@dataclass(frozen=True)
class PoolState:
    """All blocks of a pool at one moment. Make one with `PoolState.of`, or with `states` from a record."""

    block_ids: tuple[int, ...]  # the blocks that can be handed out, in order
    free: tuple[int, ...]  # the free queue, front first
    cached: frozenset[int]
    tables: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # request -> its block table
    when: str = ""  # "after step 3"
    step: int | None = None  # of a moment of a record: its step,
    mark: Mark | None = None  # and the mark that it follows; None at the end of a step

    @classmethod
    def of(
        cls,
        num_blocks: int,
        free: Iterable[int],
        cached: Iterable[int] = (),
        tables: Mapping[str, Iterable[int]] | None = None,
        *,
        null_block: bool = True,
        when: str = "",
    ) -> PoolState:
        """A state from plain lists. `num_blocks` counts the null block, block 0, unless there is none.

        Raises: ValueError if the queue names a block twice, or one that is not in the pool.
        """
        block_ids = tuple(range(1 if null_block else 0, num_blocks))
        if not block_ids:
            raise ValueError("a pool needs at least one block; was this record made by an engine?")
        queue = tuple(free)
        strange = sorted({*queue, *cached} - set(block_ids))
        if strange or len(set(queue)) != len(queue):
            raise ValueError(
                f"a pool of blocks {block_ids[0]} to {block_ids[-1]} cannot have the free queue {queue}"
            )
        held = {name: tuple(ids) for name, ids in (tables or {}).items()}
        return cls(block_ids, queue, frozenset(cached), held, when)

    def facts(self, block_id: int) -> BlockFacts:
        """The three facts about a block. One that is not free counts as used even if no table shows its user."""
        place = self.free.index(block_id) + 1 if block_id in self.free else None
        users = sum(block_id in table for table in self.tables.values())
        return BlockFacts(block_id, 0 if place else max(1, users), place, block_id in self.cached)

    def __iter__(self) -> Iterator[BlockFacts]:
        for block_id in self.block_ids:
            yield self.facts(block_id)

    @property
    def usage(self) -> float:
        """Share of the blocks that some request uses, 0 to 1."""
        return 1 - len(self.free) / len(self.block_ids)


def ordinal(n: int) -> str:
    """`1st`, `2nd`, `11th`."""
    suffix = "th" if 10 <= n % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{suffix}"


def states(record: Record) -> list[PoolState]:
    """How the pool stood after each step: `states(record)[i]` is after step i.

    A step that broke off was taken back; the pool then stood as before it.
    """
    pools = accumulate((step.pool for step in record.steps), _known, initial=record.start)
    return [_state(record, pool, f"after step {i - 1}", i - 1) for i, pool in enumerate(pools) if i]


def moments(record: Record) -> list[PoolState]:
    """How the pool stood from moment to moment: before the first step, then after every mark.

    That needs a record with snapshots (`Recorder(snapshots=True)`); of another one the moments are the ends of
    the steps. A request that ends gives its blocks back after its last mark: where that moved anything, the end
    of the step is a moment too. `PoolState.mark` says which mark a moment follows.
    """
    found = [_state(record, record.start, "before the first step")]
    last = record.start
    for index, (step, end) in enumerate(zip(record.steps, states(record), strict=True)):
        for number, mark in enumerate(step.marks, 1):
            if mark.pool is not None:
                when = f"step {index}, mark {number}: {mark.request_id}, {mark.kind}"
                found.append(_state(record, mark.pool, when, index, mark))
                last = mark.pool
        if not (step.marks and step.marks[-1].pool) or last != _known(last, step.pool):
            found.append(end)
    return found


def _known(before: PoolSnapshot, after: PoolSnapshot) -> PoolSnapshot:
    """`after`, unless nobody took it: the empty snapshot of a step that did not come to its end."""
    return before if after == PoolSnapshot([], [], {}) else after


def around(record: Record, kind: MarkKind, request_id: str, nth: int = 0) -> tuple[PoolState, PoolState]:
    """The moments before and after the `nth` mark of a kind that a request left: `pool_pair(*around(...))`.

    Raises: ValueError if the record has no such mark, or was made without snapshots.
    """
    pairs = [
        (before, after)
        for before, after in pairwise(moments(record))
        if after.mark is not None and (after.mark.kind, after.mark.request_id) == (kind, request_id)
    ]
    if nth < len(pairs):
        return pairs[nth]
    seen = sum(mark.kind == kind and mark.request_id == request_id for _, mark in record.marks())
    if seen > nth:
        raise ValueError("the record has no snapshots; record with Recorder(snapshots=True)")
    raise ValueError(f"request {request_id!r} left {seen} marks {kind!r}, so there is no number {nth}")


def _state(
    record: Record, pool: PoolSnapshot, when: str, step: int | None = None, mark: Mark | None = None
) -> PoolState:
    """A snapshot as a state. Several groups give a request a table each."""
    tables: dict[str, list[int]] = {}
    for request_id, groups in pool.tables.items():
        for group, table in enumerate(groups):
            tables[request_id if len(groups) == 1 else f"{request_id}, group {group}"] = table
    state = PoolState.of(
        record.num_blocks, pool.free, pool.cached, tables, null_block=record.engine != "v0", when=when
    )
    return replace(state, step=step, mark=mark)
