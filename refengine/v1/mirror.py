"""A copy of an engine's prefix index, kept by somebody who has nothing but its events.

The engine may hold a prefix in several blocks: equal blocks are not merged. Each copy is announced when it is
stored and again when it is removed, so a mirror has to count copies; one that keeps a plain set forgets a prefix
when the first of its copies goes.

With report mode "full" a request also announces what it *reuses*. To a mirror that has seen everything that is no
news, and must not be counted as one more copy. To one that came late it is the only way to learn what was stored
before. The two want opposite things from the same event, so there are two ways to keep a mirror; see `Report`.
vLLM: none in 0.33.0; its events are read by routers outside of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, cast

from refengine.config import one_of
from refengine.errors import IntegrityError
from refengine.hashing import BlockHash
from refengine.v1.block import KVCacheBlock
from refengine.v1.block_pool import BlockPool
from refengine.v1.coordinator import make_coordinator
from refengine.v1.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from refengine.v1.groups.base import num_blocks_for
from refengine.v1.groups.spec import FULL_ATTENTION, GroupSpec
from refengine.v1.publisher import EventBatch

# "incremental": has seen every batch since the engine was empty, and is equal to its index.
# "full": may have come late, and learns from what is announced again. It holds no more than the engine does, and
# perhaps less; after a gap it starts over, since a removal may have been in it.
Report = Literal["incremental", "full"]

Prefix = tuple[int, BlockHash]  # group id, hash of the prefix's last block


class PrefixMirror:
    """Which prefixes one engine holds. Answers a lookup as the engine would, by the engine's own coordinator."""

    def __init__(
        self, groups: Sequence[GroupSpec], report: Report = "incremental", drop_last: bool = False
    ) -> None:
        """`groups` and `drop_last` as in the engine that is mirrored: they are its configuration, not its state."""
        one_of("report", report, ("incremental", "full"))
        self.report = report
        self.copies: Counter[Prefix] = Counter()
        self.next_sequence = 0
        # Stands for "some block of that engine": which one it is, nobody outside needs to know.
        self.null_block = KVCacheBlock(0, is_null=True)
        self._some_block = KVCacheBlock(1)
        # A lookup asks its pool for `get_cached_block` and `null_block`, and those are here.
        self.coordinator = make_coordinator(groups, cast(BlockPool, self), drop_last)

    def receive(self, batch: EventBatch) -> None:
        """Applies one batch. Mutates: the mirror.

        Raises: IntegrityError for a gap, if every batch was to be seen; nothing is applied then, and the batches
        from `next_sequence` on can be had from the publisher.
        """
        if batch.sequence != self.next_sequence:
            if self.report == "incremental":
                raise IntegrityError(
                    f"event batch {self.next_sequence} is missing, {batch.sequence} came: replay from "
                    f"{self.next_sequence}, or start a new mirror"
                )
            self.copies.clear()
        for event in batch.events:
            self.apply(event)
        self.next_sequence = batch.sequence + 1

    def apply(self, event: KVCacheEvent) -> None:
        """Applies one event. Mutates: the mirror."""
        if isinstance(event, BlockStored):
            self._store(event)
        elif isinstance(event, BlockRemoved):
            for block_hash in event.block_hashes:
                self._remove((event.group_id, block_hash))
        elif isinstance(event, AllBlocksCleared):
            self.copies.clear()

    def prefixes(self) -> set[Prefix]:
        """Everything that the mirrored engine can find, as far as is known here."""
        return set(self.copies)

    def find_longest_cache_hit(self, block_hashes: Sequence[BlockHash], max_length: int) -> int:
        """Tokens of the longest prefix, of at most `max_length`, that all groups of that engine can serve."""
        _, num_tokens, _ = self.coordinator.find_longest_cache_hit(block_hashes, max_length)
        return num_tokens

    def get_cached_block(self, block_hash: BlockHash, group_ids: Sequence[int]) -> list[KVCacheBlock] | None:
        """What the coordinator asks its block pool, answered from the events. See BlockPool."""
        if all((group_id, block_hash) in self.copies for group_id in group_ids):
            return [self._some_block] * len(group_ids)
        return None

    def _store(self, event: BlockStored) -> None:
        if not event.reused:
            self.copies.update((event.group_id, block_hash) for block_hash in event.block_hashes)
        elif self.report == "full":
            first = len(event.block_hashes) - num_certain(event)
            for block_hash in event.block_hashes[first:]:
                prefix = (event.group_id, block_hash)
                self.copies[prefix] = max(self.copies[prefix], 1)

    def _remove(self, prefix: Prefix) -> None:
        """One copy less. Of a prefix that was stored unseen there is nothing to remove."""
        if prefix not in self.copies:
            if self.report == "incremental":
                raise IntegrityError(f"a prefix of group {prefix[0]} is removed that was never stored")
            return
        self.copies[prefix] -= 1
        if not self.copies[prefix]:
            del self.copies[prefix]


def num_certain(event: BlockStored) -> int:
    """How many of the reused blocks that an event names, counted from the last, its group really holds.

    A hit names all blocks of its prefix in every group, although a sparse group needs, and may have, only the
    last ones: those in a window, or the one with the state. Of any other kind nothing is believed.
    """
    num_named = len(event.block_hashes)
    if event.kind == FULL_ATTENTION:
        return num_named
    if event.window is not None:
        return min(num_blocks_for(event.window - 1, event.block_size), num_named)
    return min(1, num_named) if event.kind == "mamba" else 0
