"""What a group of layers needs from the cache: one block table for all of them, and one rule for what to keep.

Layers that see the same tokens share a group. A pure full-attention model has one group; a model that mixes
full and sliding-window layers has one per kind.
vLLM: V0 none (one table for the whole model); V1 v1/kv_cache_interface.py KVCacheSpec, KVCacheGroupSpec.
"""

from __future__ import annotations

from dataclasses import dataclass

FULL_ATTENTION = "full_attention"


@dataclass(frozen=True)
class GroupSpec:
    """One group: its place in the list of groups, its kind, and tokens per block."""

    group_id: int
    kind: str
    block_size: int
    window: int | None = None  # tokens a layer looks back, itself included; None: all
