"""The six marks of a step: what an engine tells whoever watches it.

Most wrong mental models of an inference engine are about *when* something happens. Both generations report the
same six moments, in the order in which they happen, each with the facts that were decided:

    lookup    which prefix is computed            num_tokens, hit_tokens, block_ids
    admit     yes, or not now                     admitted, reason
    allocate  which blocks                        block_ids, num_tokens
    publish   hash registered, others can find it block_ids, hashes
    run       K/V written, attention read         start, num_tokens
    append    sampled token joins the request     token_id, finish_reason

Losing one's blocks again is `admit` with a no: preempted. Pictures, tables and widgets are drawn from these
marks alone and never reach into an engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

MarkKind = Literal["lookup", "admit", "allocate", "publish", "run", "append"]


@dataclass(frozen=True)
class PoolSnapshot:
    """How the blocks stand at one moment. Whatever is neither free nor the null block is in use."""

    free: list[int]  # the free queue, front first
    cached: list[int]  # blocks that can be found by hash
    tables: dict[str, list[list[int]]]  # by request id: block ids per group


class Observer(Protocol):
    """Whoever wants to know. An engine without an observer pays one comparison with None per mark."""

    def attach(
        self, engine: str, num_blocks: int, block_size: int, snapshot: Callable[[], PoolSnapshot]
    ) -> None:
        """An engine begins to report. `snapshot` looks at its blocks and may be called at any time."""

    def begin_step(self) -> None:
        """A scheduling step begins; all marks until the next call belong to it."""

    def mark(self, kind: MarkKind, request_id: str, **facts: Any) -> None:
        """Something happened to a request. `facts` are plain JSON values, as in the table above."""

    def end_step(self) -> None:
        """A step has ended."""
