"""The group whose layers see every earlier token.

vLLM: V0 the only kind there is for prefix caching; V1 v1/core/single_type_kv_cache_manager.py FullAttentionManager.
"""

from __future__ import annotations

from collections.abc import Sequence

from refengine.hashing import BlockHash
from refengine.v1.block import KVCacheBlock
from refengine.v1.groups.base import GroupManager
from refengine.v1.request import Request


class FullAttentionManager(GroupManager):
    """A prefix is a hit only if *all* its blocks are there, so the lookup walks left to right to the first miss."""

    is_downward_closed = True

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_length: int, drop_last: bool
    ) -> list[KVCacheBlock]:
        """See the base class. V0 searched by bisection, which is wrong as soon as a middle block is gone."""
        hits: list[KVCacheBlock] = []
        for block_hash in block_hashes[: max_length // self.block_size]:
            cached = self.cached_block(block_hash)
            if cached is None:
                break
            hits.append(cached)
        return hits[:-1] if drop_last else hits

    def needed_positions(self, num_tokens: int) -> range:
        return range(num_tokens // self.block_size)

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """None: the last token sees the first."""
        return 0

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """See the base class. Where a block spans several hashes, the last one of a prompt is published, too."""
        super().cache_blocks(request, num_tokens)
        unit = self.spec.hash_block_size or self.block_size
        tail = (request.num_prompt_tokens - (not self.retention.drop_last)) // unit * unit
        if tail % self.block_size and tail <= num_tokens:
            block = self.tables[request.request_id][tail // self.block_size]
            self.pool.cache_partial_block(request, block, tail, self.spec)
