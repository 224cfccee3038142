"""A recorder: all marks of all steps as plain data, for tables, pictures, files and tests.

A record is JSON from end to end, so a picture drawn from a file and one drawn from a running engine are the
same. `Record.requests()` boils the marks down to what one wants to know of each request.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from refengine.trace.observer import MarkKind, PoolSnapshot

SCHEMA = 1


@dataclass(frozen=True)
class Mark:
    """One of the six marks, in one step, of one request. `facts`: see `refengine.trace.observer`."""

    kind: MarkKind
    request_id: str
    facts: dict[str, Any]
    pool: PoolSnapshot | None = None  # how the blocks stood right after it, if the recorder was asked for it


@dataclass
class Step:
    """One scheduling step: its marks in order, how the pool stood at its end, and when it began and ended."""

    marks: list[Mark] = field(default_factory=list)
    pool: PoolSnapshot = field(default_factory=lambda: PoolSnapshot([], [], {}))
    began: float = 0.0  # seconds, of a clock with no meaning of its own
    ended: float = 0.0


@dataclass
class RequestSummary:
    """One request in one line. `hit_tokens` is what its admission found; later resumptions are not in it."""

    request_id: str
    num_prompt_tokens: int
    hit_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)  # as last seen, hits first, of the first group
    num_shared_blocks: int = 0  # of these, found in the cache
    scheduled: list[tuple[int, int]] = field(default_factory=list)  # (step, tokens)
    num_output_tokens: int = 0
    num_preemptions: int = 0
    first_token_step: int | None = None
    finish_reason: str | None = None


class Recorder:
    """An observer that keeps everything. Mutates: `steps` grows with every step of the engine it watches."""

    def __init__(self, snapshots: bool = False) -> None:
        """`snapshots`: also keep how the blocks stood after every single mark, not only after every step."""
        self.snapshots = snapshots
        self.engine, self.num_blocks, self.block_size = "", 0, 0
        self.start = PoolSnapshot([], [], {})
        self.steps: list[Step] = []

    def attach(
        self, engine: str, num_blocks: int, block_size: int, snapshot: Callable[[], PoolSnapshot]
    ) -> None:
        self.engine, self.num_blocks, self.block_size = engine, num_blocks, block_size
        self._snapshot = snapshot
        self.start = snapshot()

    def begin_step(self) -> None:
        self.steps.append(Step(began=time.perf_counter()))

    def mark(self, kind: MarkKind, request_id: str, **facts: Any) -> None:
        pool = self._snapshot() if self.snapshots else None
        self.steps[-1].marks.append(Mark(kind, request_id, facts, pool))

    def end_step(self) -> None:
        self.steps[-1].pool = self._snapshot()
        self.steps[-1].ended = time.perf_counter()

    @property
    def record(self) -> Record:
        return Record(self.steps, self.engine, self.num_blocks, self.block_size, self.start)


@dataclass(frozen=True)
class Record:
    """What was recorded, readable without the engine it came from."""

    steps: list[Step]
    engine: str = ""  # "v1", "v0"
    num_blocks: int = 0  # null block included
    block_size: int = 0  # tokens
    start: PoolSnapshot = field(default_factory=lambda: PoolSnapshot([], [], {}))  # before the first step

    def marks(self) -> Iterator[tuple[int, Mark]]:
        """Every mark with the index of its step, in order."""
        for index, step in enumerate(self.steps):
            for mark in step.marks:
                yield index, mark

    @property
    def num_preemptions(self) -> int:
        """How often a running request lost its blocks."""
        return sum(
            mark.kind == "admit" and mark.facts["reason"].startswith("preempted") for _, mark in self.marks()
        )

    def requests(self) -> list[RequestSummary]:
        """One summary per request, in the order in which they were first looked at."""
        summaries: dict[str, RequestSummary] = {}
        for index, mark in self.marks():
            if mark.request_id not in summaries:
                summaries[mark.request_id] = RequestSummary(mark.request_id, mark.facts.get("num_tokens", 0))
            self._add(summaries[mark.request_id], index, mark)
        return list(summaries.values())

    def _add(self, summary: RequestSummary, index: int, mark: Mark) -> None:
        facts = mark.facts
        if mark.kind == "lookup":
            summary.block_ids = list(facts["block_ids"][0])
            summary.num_shared_blocks = len(summary.block_ids)
            if not summary.scheduled:
                summary.hit_tokens = facts["hit_tokens"]
        elif mark.kind == "admit" and facts["reason"].startswith("preempted"):
            summary.num_preemptions += 1
        elif mark.kind == "allocate":
            summary.block_ids += facts["block_ids"][0]
        elif mark.kind == "run":
            summary.scheduled.append((index, facts["num_tokens"]))
        elif mark.kind == "append":
            summary.num_output_tokens += 1
            summary.finish_reason = facts["finish_reason"]
            if summary.first_token_step is None:
                summary.first_token_step = index

    def save(self, path: str | Path) -> None:
        """Writes the record as JSON. Mutates: the file."""
        Path(path).write_text(
            json.dumps({"schema": SCHEMA} | asdict(self), indent=1) + "\n", encoding="utf-8"
        )

    @classmethod
    def load(cls, path: str | Path) -> Record:
        """Reads what `save` wrote. Raises: ValueError if it is no record of this schema."""
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(document, dict) or document.pop("schema", None) != SCHEMA:
            raise ValueError(f"{path} is not a record of schema {SCHEMA}")
        document["start"] = PoolSnapshot(**document["start"])
        document["steps"] = [_step(step) for step in document["steps"]]
        return cls(**document)


def _step(raw: dict[str, Any]) -> Step:
    marks = [
        Mark(**(mark | {"pool": mark["pool"] and PoolSnapshot(**mark["pool"])})) for mark in raw["marks"]
    ]
    return Step(**(raw | {"marks": marks, "pool": PoolSnapshot(**raw["pool"])}))
