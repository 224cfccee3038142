"""The group whose layers see every earlier token.

vLLM: V0 the only kind there is for prefix caching; V1 v1/core/single_type_kv_cache_manager.py FullAttentionManager.
"""

from __future__ import annotations

from collections.abc import Sequence

from refengine.hashing import BlockHash
from refengine.v1.block import KVCacheBlock
from refengine.v1.groups.base import GroupManager


class FullAttentionManager(GroupManager):
    """A prefix is a hit only if *all* its blocks are there, so the lookup walks left to right to the first miss."""

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_length: int, drop_last: bool
    ) -> list[KVCacheBlock]:
        """See the base class. V0 searched by bisection, which is wrong as soon as a middle block is gone."""
        hits: list[KVCacheBlock] = []
        for block_hash in block_hashes[: max_length // self.block_size]:
            cached = self.pool.get_cached_block(block_hash, [self.spec.group_id])
            if cached is None:
                break
            hits += cached
        return hits[:-1] if drop_last else hits

    def remove_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Nothing: the last token sees the first."""
