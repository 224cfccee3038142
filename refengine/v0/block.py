"""A logical block of V0: a place in a sequence's block table, with its tokens, and the physical block behind it.

Two sequences that share a physical block have a logical block each. The physical block may change under a
sequence: by copy-on-write, by a swap, or because a block that just filled up turns out to be known already.
vLLM: V0 core/block/naive_block.py NaiveBlock and prefix_caching_block.py PrefixCachingBlock; V1
v1/core/kv_cache_utils.py KVCacheBlock, where the id never changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

ContentHash = int

ROOT = "root"  # stands for the parent of a first block


def content_hash(parent: ContentHash | None, token_ids: Sequence[int], extra: Any = None) -> ContentHash:
    """Python's own hash over parent, tokens and extra keys; quick, but another one in every process."""
    return hash((ROOT if parent is None else parent, tuple(token_ids), extra))


class Block:
    """`block_id` is None while the block has no memory. `extra` is what else its K/V depend on: the adapter."""

    def __init__(
        self, prev: Block | None, block_size: int, block_id: int | None = None, extra: Any = None
    ) -> None:
        self.prev = prev
        self.block_size = block_size
        self.block_id = block_id
        self.extra = extra
        self.token_ids: list[int] = []
        self.index: int = prev.index + 1 if prev is not None else 0  # in its sequence's table
        self._content_hash: ContentHash | None = None

    @property
    def num_empty_slots(self) -> int:
        return self.block_size - len(self.token_ids)

    @property
    def is_full(self) -> bool:
        return self.num_empty_slots == 0

    @property
    def num_tokens_total(self) -> int:
        """Tokens of the sequence up to and including this block."""
        return self.index * self.block_size + len(self.token_ids)

    @property
    def content_hash(self) -> ContentHash | None:
        """The chained hash of a full block; None as long as it is not full."""
        if self._content_hash is None and self.is_full:
            parent = self.prev.content_hash if self.prev is not None else None
            if self.prev is None or parent is not None:
                self._content_hash = content_hash(parent, self.token_ids, self.extra)
        return self._content_hash
