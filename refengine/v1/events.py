"""What the cache tells others: a block can be found now, or no longer.

A router that keeps count of these events knows which engine holds which prefix. Hashes stand in the order of
the blocks; a stored event names the parent of its first block, so that a mirror can hang it into its tree.
vLLM: V0 none; V1 distributed/kv_events.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from refengine.hashing import BlockHash, extra_keys
from refengine.v1.groups.spec import GroupSpec
from refengine.v1.request import Request


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


def block_stored(
    request: Request, first: int, last: int, group: GroupSpec, positions: Sequence[int], reused: bool = False
) -> BlockStored:
    """The event for positions `first` to `last` of the request's table in a group, of which `positions` are named."""
    hashes, adapter = group.hashes(request.block_hashes), request.adapter
    return BlockStored(
        block_hashes=tuple(hashes[i] for i in positions),
        parent_block_hash=hashes[first - 1] if first else None,
        token_ids=tuple(request.token_ids[first * group.block_size : last * group.block_size]),
        block_size=group.block_size,
        group_id=group.group_id,
        kind=group.kind,
        window=group.window,
        extra_keys=tuple(_event_keys(request, i == 0) for i in positions),
        lora_name=adapter.name if adapter else None,
        lora_id=adapter.adapter_id if adapter else None,
        reused=reused,
    )


def _event_keys(request: Request, is_first_block: bool) -> tuple[str, ...] | None:
    """Extra keys as events show them: the plain values, without tags and without the adapter's path."""
    keys = extra_keys(is_first_block, request.adapter, request.cache_salt)
    return tuple(key[1] for key in keys) if keys else None
