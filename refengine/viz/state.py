"""How the block pool stood at one moment, as plain data: what the pictures of the pool are drawn from.

A `PoolState` is made from a record (`states`), from a recorded trace of vLLM, or by hand from three lists. It
keeps the three facts about a block apart: used, free, cached.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from refengine.trace.record import Mark, Record

NULL_BLOCK = 0  # stands for "no storage here" in V1; V0 has no such block


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


def ranges(ids: Sequence[int]) -> str:
    """Block ids in their order, with runs folded: `1-9, 12`; `none` if there are none."""
    runs: list[list[int]] = []
    for block_id in ids:
        if runs and runs[-1][-1] == block_id - 1:
            runs[-1] = [runs[-1][0], block_id]
        else:
            runs.append([block_id])
    return ", ".join("-".join(map(str, run)) for run in runs) or "none"


def states(record: Record) -> list[PoolState]:
    """How the pool stood after each step. Block tables are put together from the marks, in their order."""
    tables = _Tables()
    raw: list[dict[str, tuple[int, ...]]] = []
    for step in record.steps:
        for mark in step.marks:
            tables.add(mark)
        raw.append(tables.held(set(step.free_block_ids)))
    block_ids = _block_ids(record, raw)
    return [
        PoolState(
            block_ids,
            tuple(step.free_block_ids),
            frozenset(step.cached_block_ids),
            held,
            f"after step {index}",
        )
        for index, (step, held) in enumerate(zip(record.steps, raw, strict=True))
    ]


def _block_ids(record: Record, tables: Sequence[Mapping[str, Sequence[int]]]) -> tuple[int, ...]:
    """The blocks of the pool. At the end of a step each is free or in a table; 0 in tables alone is the null block."""
    listed: set[int] = set()
    for step in record.steps:
        listed.update(step.free_block_ids, step.cached_block_ids)
    held = {block_id for step_tables in tables for table in step_tables.values() for block_id in table}
    return tuple(sorted(listed | (held - {NULL_BLOCK})))


class _Tables:
    """Follows block tables through the marks: found blocks first, then allocated ones, until the request ends."""

    def __init__(self) -> None:
        self._found: dict[str, list[list[int]]] = {}
        self._held: dict[str, list[list[int]]] = {}

    def add(self, mark: Mark) -> None:
        facts: dict[str, Any] = mark.facts
        if mark.kind == "lookup":
            self._found[mark.request_id] = [list(ids) for ids in facts["block_ids"]]
        elif mark.kind == "admit" and facts["admitted"]:
            self._held[mark.request_id] = self._found.pop(mark.request_id, [])
        elif mark.kind == "admit" and facts["reason"].startswith("preempted"):
            self._held.pop(mark.request_id, None)
        elif mark.kind == "allocate":
            held = self._held.setdefault(mark.request_id, [])
            held.extend([] for _ in range(len(facts["block_ids"]) - len(held)))
            for table, new in zip(held, facts["block_ids"], strict=True):
                table.extend(new)
        elif mark.kind == "append" and facts["finish_reason"] is not None:
            self._held.pop(mark.request_id, None)

    def held(self, free: set[int]) -> dict[str, tuple[int, ...]]:
        """Tables by request, or by request and group if there are several groups.

        An aborted request leaves no mark, but its blocks stand in the free queue: it is dropped here.
        """
        result: dict[str, tuple[int, ...]] = {}
        for request_id, groups in list(self._held.items()):
            if all(block_id in free for table in groups for block_id in table):
                del self._held[request_id]
                continue
            for group, table in enumerate(groups):
                name = request_id if len(groups) == 1 else f"{request_id}, group {group}"
                result[name] = tuple(table)
        return result
