"""Physical blocks of one device with prefix caching: content lives on after its last user.

Three places for a block that nobody uses: the free list, if nothing can be found in it; the evictor, if it is
cached. Blocks are taken from the list first, so nothing is evicted while there is any worthless block.

*Cached* and *computed* are two things. A full block is cached when its tokens are known, at allocation; it is
computed only after the step in which the model filled it (`mark_blocks_as_computed`). Sequences of the same step
share cached blocks' memory, but only computed ones may be skipped.
vLLM: V0 core/block/prefix_caching_block.py PrefixCachingBlockAllocator; V1 v1/core/block_pool.py BlockPool.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from refengine.errors import IntegrityError
from refengine.v0.allocator import NaiveBlockAllocator, NoFreeBlocksError
from refengine.v0.block import Block, ContentHash
from refengine.v0.evictor import NEVER_ACCESSED, LRUEvictor


@dataclass
class BlockTracker:
    """What is known of a block that somebody uses."""

    last_accessed: float = NEVER_ACCESSED
    computed: bool = False


class PrefixCachingBlockAllocator(NaiveBlockAllocator):
    """`faithful`: with the defects of vLLM 0.7.3; see `find_cached_blocks_prefix`."""

    def __init__(self, num_blocks: int, block_size: int, first_id: int = 0, faithful: bool = False) -> None:
        super().__init__(num_blocks, block_size, first_id)
        self.faithful = faithful
        self.cached: dict[ContentHash, int] = {}  # hash -> block id
        self.evictor = LRUEvictor()
        self.trackers: dict[int, BlockTracker] = {}  # blocks with a user
        self._touched: set[int] = set()  # cached since the last step, not computed yet
        self.queries = 0  # blocks looked up by allocations and swap-ins
        self.hits = 0

    # -- blocks of a sequence -------------------------------------------------------------------------------

    def allocate_immutable_block(
        self, prev: Block | None, token_ids: Sequence[int], extra: Any = None
    ) -> Block:
        """A full block with these tokens: the cached one if there is one, else a new one that is cached from now on.

        Mutates: as the case may be, counts, evictor, free list, cache. Raises: NoFreeBlocksError.
        """
        block = Block(prev, self.block_size, None, extra)
        block.token_ids.extend(token_ids)
        self.queries += 1
        if block.content_hash in self.cached:
            self.hits += 1
            self._join(block)
            return block
        block.block_id = self._take_id()
        self._promote(block)
        return block

    def append(self, block: Block, token_ids: Sequence[int]) -> None:
        """As without a cache; and a block that becomes full joins the cache.

        If its content is cached already, the sequence moves over to that block and gives its own back, so the
        id in the block table changes under a running sequence.
        """
        super().append(block, token_ids)
        if block.content_hash is not None:
            self._promote(block)

    # -- the cache ------------------------------------------------------------------------------------------

    def is_computed(self, block_id: int) -> bool:
        """Whether the model has filled the block. In the evictor everything is: its users ran."""
        return block_id in self.evictor or self.trackers[block_id].computed

    def find_cached_blocks_prefix(self, hashes: Sequence[ContentHash]) -> int:
        """How many leading blocks are cached and computed.

        vLLM 0.7.3 bisects, which supposes that a missing block is followed by missing blocks only. Swapping
        breaks that: a swapped-out head can be evicted before its tail, and the bisection then reports it as found.
        """

        def missing(content_hash: ContentHash) -> bool:
            return not (content_hash in self.cached and self.is_computed(self.cached[content_hash]))

        if self.faithful:
            return bisect_left(hashes, True, key=missing)
        return next((i for i, content_hash in enumerate(hashes) if missing(content_hash)), len(hashes))

    def mark_blocks_as_computed(self, block_ids: Iterable[int] | None = None) -> list[int]:
        """The step being scheduled fills these of the newly cached blocks; None: all of them.

        Returns: those that it was true of. Mutates: trackers.
        """
        filled = self._touched if block_ids is None else self._touched.intersection(block_ids)
        self._touched = self._touched - filled
        used = sorted(block_id for block_id in filled if block_id in self.trackers)
        for block_id in used:
            self.trackers[block_id].computed = True
        return used

    def mark_blocks_as_accessed(self, block_ids: Iterable[int], now: float) -> None:
        """Notes when these blocks were used. Mutates: trackers, evictor."""
        for block_id in block_ids:
            if block_id in self.trackers:
                self.trackers[block_id].last_accessed = now
            elif block_id in self.evictor:
                self.evictor.update(block_id, now)
            else:
                raise KeyError(f"block {block_id} is neither used nor cached here")

    def forget(self, hashes: Iterable[ContentHash | None]) -> None:
        """Makes used blocks with these hashes unfindable. Mutates: the cache."""
        for content_hash in hashes:
            block_id = self.cached.get(content_hash) if content_hash is not None else None
            if content_hash is not None and block_id is not None and block_id in self.trackers:
                del self.cached[content_hash]
                self._touched.discard(block_id)

    def reset_prefix_cache(self) -> bool:
        """Forgets all contents if no block is in use. Returns: whether it was done. Mutates: everything."""
        if self.num_free_blocks != self.num_blocks:
            return False
        while len(self.evictor):
            block_id, _ = self.evictor.evict()
            self.free_ids.appendleft(block_id)
        self.cached.clear()
        self.queries = self.hits = 0
        return True

    @property
    def hit_rate(self) -> float:
        return self.hits / self.queries if self.queries else 0.0

    def get_num_full_blocks_touched(self, blocks: Sequence[Block]) -> int:
        """Blocks that swapping these in would take: not cached here, or cached and free, and so to be taken out."""
        return sum(
            block.is_full
            and (block.content_hash not in self.cached or self.cached[block.content_hash] in self.evictor)
            for block in blocks
        )

    # -- looking at it --------------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        """Listed and evictable ones alike: a cached block without a user is free."""
        return len(self.free_ids) + len(self.evictor)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless each block is in exactly one of use, free list, evictor."""
        listed = list(self.free_ids)
        for block_id, count in self.ref_counts.items():
            places = (count > 0, block_id in listed, block_id in self.evictor)
            if sum(places) != 1:
                raise IntegrityError(
                    f"block {block_id}: used, listed, evictable is {places}; one of them must hold"
                )
            if (block_id in self.trackers) != (count > 0):
                raise IntegrityError(
                    f"block {block_id} has {count} users, tracked: {block_id in self.trackers}"
                )
        if len(set(self.cached.values())) != len(self.cached):
            raise IntegrityError("two hashes lead to one block")

    # -- ids ------------------------------------------------------------------------------------------------

    def _take_id(self) -> int:
        """From the free list; only if that is empty, by eviction."""
        if self.free_ids:
            block_id = super()._take_id()
        elif len(self.evictor):
            block_id, content_hash = self.evictor.evict()
            del self.cached[content_hash]
            self.ref_counts[block_id] = 1
        else:
            raise NoFreeBlocksError("no free block is left")
        self.trackers[block_id] = BlockTracker()
        return block_id

    def _join(self, block: Block) -> None:
        """Makes the block a user of the cached block with its content. Mutates: counts, evictor, the block's id."""
        assert block.content_hash is not None  # callers looked it up
        block.block_id = block_id = self.cached[block.content_hash]
        self.ref_counts[block_id] += 1
        if self.ref_counts[block_id] == 1:
            self.evictor.remove(block_id)
            self.trackers[block_id] = BlockTracker(computed=True)

    def _promote(self, block: Block) -> None:
        """Caches a block that has become full, or moves the sequence over to the block that is cached already."""
        assert block.content_hash is not None and block.block_id is not None  # it is full and in a table
        if block.content_hash not in self.cached:
            self.cached[block.content_hash] = block.block_id
            self._touched.add(block.block_id)
        elif self.cached[block.content_hash] != block.block_id and (
            self.faithful or self.is_computed(self.cached[block.content_hash])
        ):
            # vLLM 0.7.3 moves over even to a block that somebody's unfinished prompt has yet to fill.
            self._release_unhashed(block.block_id)
            self._join(block)

    def _release(self, block: Block) -> None:
        block_id, content_hash = block.block_id, block.content_hash
        assert block_id is not None  # callers hold the block
        if content_hash is None or self.cached.get(content_hash) != block_id:
            self._release_unhashed(block_id)
            return
        if self.ref_counts[block_id] == 0:
            raise IntegrityError(f"block {block_id} is released, but nobody uses it")
        self.ref_counts[block_id] -= 1
        if self.ref_counts[block_id] == 0:
            last_accessed = self.trackers.pop(block_id).last_accessed
            self.evictor.add(block_id, content_hash, block.num_tokens_total, last_accessed)

    def _release_unhashed(self, block_id: int) -> None:
        self.ref_counts[block_id] -= 1
        if self.ref_counts[block_id] == 0:
            del self.trackers[block_id]
            self.free_ids.appendleft(block_id)
