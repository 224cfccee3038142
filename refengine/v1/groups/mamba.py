"""The group whose layers carry one recurrent state along: a state-space or linear-attention layer.

The state after n tokens says all that the layer will ever know of them. So a hit needs a single block, but one that was
written after exactly that many tokens: K/V exist for every position that was computed, a state exists only where
a chunk ended. That is why the scheduler lets chunks end between blocks (mode "align").
vLLM: V0 none; V1 v1/core/single_type_kv_cache_manager.py MambaManager, mode "align".
"""

from __future__ import annotations

from collections.abc import Sequence

from refengine.hashing import BlockHash
from refengine.v1.block import KVCacheBlock
from refengine.v1.groups.base import GroupManager, num_blocks_for
from refengine.v1.groups.spec import state_position
from refengine.v1.request import Request


class MambaManager(GroupManager):
    """Tables of states; see groups/spec.py for which position holds which state."""

    drops_last = False  # draft heads have no such layers
    reserves_for_drafts = False  # one state stands for all tokens of a step, drafts included

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_length: int, drop_last: bool
    ) -> list[KVCacheBlock]:
        """See the base class. Walks right to left to the first state that ends at a multiple of the alignment unit."""
        for i in reversed(range(max_length // self.block_size)):
            cached = self.cached_block(block_hashes[i])
            if cached is not None and (i + 1) * self.block_size % self.retention.alignment == 0:
                return [self.pool.null_block] * i + [cached]
        return []

    def needed_positions(self, num_tokens: int) -> range:
        end = num_tokens // self.block_size
        return range(max(end - 1, 0), end)

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """All but the last one, whose position holds the state to go on from."""
        return num_computed_tokens - 1

    def num_blocks_at_peak(self, num_tokens: int, num_tokens_per_step: int) -> int:
        """The state that a step starts from, and the one that it leaves."""
        return min(num_blocks_for(num_tokens, self.block_size), 2)

    def reachable(self, request: Request, first: int, last: int) -> list[int] | None:
        if self.retention.interval is None:
            return None
        return self.retention.reachable(request, first, last, self.block_size, need=1)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        hits: Sequence[KVCacheBlock],
        num_tokens_per_step: int | None = None,
    ) -> int:
        """See the base class. However many tokens a step has, it leaves one new state behind at most."""
        held = len(self.table(request_id)) + len(hits)
        new = min(max(num_blocks_for(num_tokens, self.block_size) - held, 0), 1)
        return new + sum(block.ref_count == 0 and not block.is_null for block in hits)

    def allocate_new_blocks(self, request_id: str, num_tokens: int) -> list[KVCacheBlock]:
        """See the base class. Between the state before the step and the one after it there is none: null blocks."""
        table = self.tables.setdefault(request_id, [])
        if num_tokens == 0 or state_position(num_tokens, self.block_size) < len(table):
            return []
        gap = state_position(num_tokens, self.block_size) - len(table)
        new = [self.pool.null_block] * gap + self.pool.get_new_blocks(1)
        table.extend(new)
        return new

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """See the base class. A state exists only when its whole step is done: it is no hit before the next one."""
        before = self.num_published.get(request.request_id, 0)
        super().cache_blocks(request, num_tokens)
        for block in self.tables[request.request_id][before : num_tokens // self.block_size]:
            if block.block_hash is not None:
                self.written_this_step.add(block.block_hash)
