"""Which cached block that nobody uses goes first when the free list is empty?

The one that was used longest ago. The blocks of one request have the same time, and of these the one with the
most tokens before it goes first: the tail of a prefix is worth nothing without its head.
vLLM: V0 core/evictor.py LRUEvictor; V1 keeps the order in the free queue itself, see refengine/v1/block.py.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from refengine.v0.block import ContentHash

NEVER_ACCESSED = -1.0


@dataclass
class BlockMetaData:
    """An evictable block: its hash, tokens up to and including it, and when it was used last."""

    content_hash: ContentHash
    num_hashed_tokens: int
    last_accessed: float


class LRUEvictor:
    """Blocks by id, and a heap of (time, -tokens, id). An entry whose block has left or was used since is stale."""

    def __init__(self) -> None:
        self.blocks: dict[int, BlockMetaData] = {}
        self._heap: list[tuple[float, int, int, ContentHash]] = []

    def __contains__(self, block_id: int) -> bool:
        return block_id in self.blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def add(
        self, block_id: int, content_hash: ContentHash, num_hashed_tokens: int, last_accessed: float
    ) -> None:
        """Enters a block that lost its last user. Mutates: the evictor."""
        self.blocks[block_id] = BlockMetaData(content_hash, num_hashed_tokens, last_accessed)
        self._push(block_id)

    def update(self, block_id: int, last_accessed: float) -> None:
        """Notes a later use. Mutates: the block's time."""
        self.blocks[block_id].last_accessed = last_accessed
        self._push(block_id)

    def remove(self, block_id: int) -> None:
        """Takes out a block that was hit. Mutates: the evictor. Raises: ValueError if it is not here."""
        if self.blocks.pop(block_id, None) is None:
            raise ValueError(f"block {block_id} is not in the evictor")

    def evict(self) -> tuple[int, ContentHash]:
        """Gives up one block. Returns: its id and hash. Mutates: the evictor. Raises: ValueError if it is empty."""
        while self._heap:
            last_accessed, minus_tokens, block_id, content_hash = heapq.heappop(self._heap)
            block = self.blocks.get(block_id)
            if block == BlockMetaData(content_hash, -minus_tokens, last_accessed):
                del self.blocks[block_id]
                return block_id, content_hash
        raise ValueError("there is no block to evict")

    def order(self) -> list[tuple[int, float, int]]:
        """(id, time, tokens) of all blocks, the next to be evicted first."""
        entries = ((b.last_accessed, -b.num_hashed_tokens, block_id) for block_id, b in self.blocks.items())
        return [(block_id, time, -minus_tokens) for time, minus_tokens, block_id in sorted(entries)]

    def _push(self, block_id: int) -> None:
        block = self.blocks[block_id]
        entry = (block.last_accessed, -block.num_hashed_tokens, block_id, block.content_hash)
        heapq.heappush(self._heap, entry)
