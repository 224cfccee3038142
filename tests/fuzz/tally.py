"""What happened in a scenario: counted from an engine's own marks, which are the same for both generations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from refengine.trace.observer import MarkKind, PoolSnapshot


class Tally:
    """An observer that counts what happened, to see afterwards that nothing of interest was left out."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()
        self._published: set[str] = set()  # requests that published in this step

    def begin_step(self) -> None:
        self.events["step"] += 1
        self._published.clear()

    def mark(self, kind: MarkKind, request_id: str, **facts: Any) -> None:
        if kind == "lookup" and facts["hit_tokens"]:
            self.events["hit"] += 1
        elif kind == "publish":
            self._published.add(request_id)
        elif kind == "admit":
            self._admit(request_id, facts["admitted"], facts["reason"])

    def _admit(self, request_id: str, admitted: bool, reason: str) -> None:
        if admitted:
            self.events["resumed"] += reason == "resumed"
        elif reason == "preempted: its step failed":
            self.events["share taken back"] += 1
        elif reason.startswith("preempted"):
            self.events["preempted"] += 1
            self.events["published share withdrawn"] += request_id in self._published
        else:
            self.events[f"refused: {reason}"] += 1

    def attach(
        self, engine: str, num_blocks: int, block_size: int, snapshot: Callable[[], PoolSnapshot]
    ) -> None:
        """The marks are enough to count by."""

    def end_step(self) -> None:
        """Nothing to count here."""
