"""KV events on their way out: numbered batches, one per step, to whoever subscribed.

A subscriber that missed a batch cannot know what was in it, and a mirror with a hole tells lies for ever. So the
batches are numbered without gaps, and the last ones are kept: who sees a gap asks for them again.
vLLM: V0 none; V1 distributed/kv_events.py EventPublisher, with the batches on a socket instead of a call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from refengine.errors import ConfigError
from refengine.v1.events import KVCacheEvent


@dataclass(frozen=True)
class EventBatch:
    """What happened to the index since the batch before, in order. `sequence` counts from 0."""

    sequence: int
    events: tuple[KVCacheEvent, ...]


Subscriber = Callable[[EventBatch], None]


class EventPublisher:
    """Hands each batch to every subscriber and keeps the last `num_kept` of them for latecomers."""

    def __init__(self, num_kept: int = 10_000) -> None:
        self.next_sequence = 0
        self._kept: deque[EventBatch] = deque(maxlen=num_kept)
        self._subscribers: list[Subscriber] = []

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Calls `subscriber` with every batch from now on. Returns: a function that ends it.

        What was published before is not repeated; see `replay`. Mutates: the list of subscribers.
        """
        self._subscribers.append(subscriber)
        return lambda: self._subscribers.remove(subscriber)

    def publish(self, events: Sequence[KVCacheEvent]) -> None:
        """Sends one batch, unless there is nothing to tell. Mutates: the kept batches, the subscribers."""
        if not events:
            return
        batch = EventBatch(self.next_sequence, tuple(events))
        self.next_sequence += 1
        self._kept.append(batch)
        for subscriber in list(self._subscribers):
            subscriber(batch)

    def replay(self, first: int = 0) -> list[EventBatch]:
        """The batches from number `first` on. Raises: ConfigError if one of them is not kept any more."""
        oldest = self._kept[0].sequence if self._kept else self.next_sequence
        if first < oldest:
            raise ConfigError(f"event batches {first} to {oldest - 1} are not kept any more")
        return [batch for batch in self._kept if batch.sequence >= first]
