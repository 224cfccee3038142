"""What the cache tells others: a block can be found now, or no longer.

A router that keeps count of these events knows which engine holds which prefix. Hashes stand in the order of
the blocks; a stored event names the parent of its first block, so that a mirror can hang it into its tree.
vLLM: V0 none; V1 distributed/kv_events.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from refengine.hashing import BlockHash


@dataclass(frozen=True)
class BlockStored:
    """All blocks of one group that one allocation made findable.

    `block_hashes` skips blocks that are not published; `token_ids`, `[num_blocks * block_size]`, does not.
    `extra_keys` has one entry per block: the plain values (adapter name, salt) or None.
    With report mode "full" a request also announces the blocks that it reuses. Those were stored before, and such
    an event is marked `reused`; vLLM's is not, and cannot be told from a second copy.
    """

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    token_ids: tuple[int, ...]
    block_size: int
    group_id: int
    kind: str  # of the group: "full_attention", ...
    window: int | None  # tokens, for window groups
    extra_keys: tuple[tuple[str, ...] | None, ...]
    lora_name: str | None = None
    lora_id: int | None = None
    reused: bool = False


@dataclass(frozen=True)
class BlockRemoved:
    """These hashes cannot be found in this group any more, at least not under this block."""

    block_hashes: tuple[BlockHash, ...]
    group_id: int


@dataclass(frozen=True)
class AllBlocksCleared:
    """The whole index was emptied."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared
