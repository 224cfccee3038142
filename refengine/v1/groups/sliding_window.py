"""The group whose layers see only the last `window` tokens, themselves included.

vLLM: V0 refuses windows together with prefix caching; V1 v1/core/single_type_kv_cache_manager.py
SlidingWindowManager.
"""

from __future__ import annotations

from collections.abc import Sequence

from refengine.errors import ConfigError
from refengine.hashing import BlockHash
from refengine.v1.block import KVCacheBlock
from refengine.v1.groups.base import GroupManager, num_blocks_for
from refengine.v1.request import Request


class SlidingWindowManager(GroupManager):
    """A prefix is a hit if the blocks that its next token looks at are there; whatever lies before may be gone."""

    @property
    def window(self) -> int:
        """Tokens."""
        if self.spec.window is None:
            raise ConfigError(f"group {self.spec.group_id} has no window")
        return self.spec.window

    @property
    def num_blocks_for_hit(self) -> int:
        """Adjacent blocks that end where a hit ends. The next token itself takes one place in the window."""
        return num_blocks_for(self.window - 1, self.block_size)

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_length: int, drop_last: bool
    ) -> list[KVCacheBlock]:
        """See the base class. Walks right to left, since the longest hit may lie behind any number of holes.

        At the very beginning fewer blocks do: there is nothing before them that the window could reach.
        """
        need = self.num_blocks_for_hit + drop_last
        run: list[KVCacheBlock] = []  # adjacent blocks that are there, from the position of the walk on
        for i in reversed(range(max_length // self.block_size)):
            cached = self.cached_block(block_hashes[i])
            if cached is None:
                run = []
            elif run or self._is_aligned(i + 1 - drop_last):
                run.insert(0, cached)
                if len(run) >= need:
                    hits = [self.pool.null_block] * i + run
                    return hits[:-1] if drop_last else hits
        run = self._cut_to_alignment(run)
        return self._cut_to_alignment(run[:-1]) if drop_last else run

    def needed_positions(self, num_tokens: int) -> range:
        end = num_tokens // self.block_size
        return range(max(end - self.num_blocks_for_hit, 0), end)

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """All but the `window - 1` before the next token."""
        return num_computed_tokens - (self.window - 1)

    def num_blocks_at_peak(self, num_tokens: int, num_tokens_per_step: int) -> int:
        """What the window holds and one step adds; the window may begin in the middle of a block."""
        at_once = num_blocks_for(self.window - 1 + num_tokens_per_step, self.block_size) + 1
        return min(num_blocks_for(num_tokens, self.block_size), at_once)

    def reachable(self, request: Request, first: int, last: int) -> list[int]:
        peek = int(self.retention.drop_last)
        need = self.num_blocks_for_hit + peek
        return self.retention.reachable(request, first, last, self.block_size, need, peek)

    def _is_aligned(self, num_blocks: int) -> bool:
        return num_blocks * self.block_size % self.retention.alignment == 0

    def _cut_to_alignment(self, blocks: list[KVCacheBlock]) -> list[KVCacheBlock]:
        unit = self.retention.alignment // self.block_size
        return blocks[: len(blocks) // unit * unit]
