"""The group whose layers see only their own chunk: tokens 0 to c-1 each other, c to 2c-1 each other, and so on.

vLLM: V0 none; V1 v1/core/single_type_kv_cache_manager.py ChunkedLocalAttentionManager.
"""

from __future__ import annotations

from collections.abc import Sequence

from refengine.errors import ConfigError
from refengine.hashing import BlockHash
from refengine.v1.block import KVCacheBlock
from refengine.v1.groups.base import GroupManager, num_blocks_for


class ChunkedLocalManager(GroupManager):
    """Finished chunks are never read again, so they are "computed" in any cache, even an empty one."""

    drops_last = False

    @property
    def chunk(self) -> int:
        """Tokens."""
        if self.spec.chunk is None:
            raise ConfigError(f"group {self.spec.group_id} has no chunk")
        return self.spec.chunk

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_length: int, drop_last: bool
    ) -> list[KVCacheBlock]:
        """See the base class. Only the chunk that is under way has to be looked up, left to right."""
        begin = self.num_skipped_tokens(max_length) // self.block_size
        hits = [self.pool.null_block] * begin
        for block_hash in block_hashes[begin : max_length // self.block_size]:
            cached = self.cached_block(block_hash)
            if cached is None:
                break
            hits.append(cached)
        return hits

    def needed_positions(self, num_tokens: int) -> range:
        return range(self.num_skipped_tokens(num_tokens) // self.block_size, num_tokens // self.block_size)

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """All chunks that end at or before the next token."""
        return num_computed_tokens // self.chunk * self.chunk

    def num_blocks_at_peak(self, num_tokens: int, num_tokens_per_step: int) -> int:
        """One chunk and what one step adds."""
        at_once = num_blocks_for(self.chunk + num_tokens_per_step, self.block_size)
        return min(num_blocks_for(num_tokens, self.block_size), at_once)
