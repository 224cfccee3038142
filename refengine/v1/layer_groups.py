"""Which layers of a model share a block table: those of one kind, since they need the same tokens.

vLLM: V0 none (one table for the whole model); V1 `get_kv_cache_groups` in v1/core/kv_cache_planning.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from refengine.model.config import FULL_ATTENTION, LINEAR_ATTENTION, SLIDING_ATTENTION, ModelConfig
from refengine.v1.groups import spec
from refengine.v1.groups.spec import GroupSpec

GROUP_KINDS = {  # kind of layer -> kind of group, in the order of the groups
    FULL_ATTENTION: spec.FULL_ATTENTION,
    SLIDING_ATTENTION: spec.SLIDING_WINDOW,
    LINEAR_ATTENTION: spec.MAMBA,
}


@dataclass(frozen=True)
class LayerGroup:
    """A cache group and the layers whose keys and values, or states, lie in its blocks."""

    spec: GroupSpec
    layers: tuple[int, ...]


def layer_groups(config: ModelConfig, block_size: int) -> list[LayerGroup]:
    """The cache groups of a model, all with blocks of `block_size` tokens; most models have just one."""
    groups: list[LayerGroup] = []
    for layer_kind, group_kind in GROUP_KINDS.items():
        layers = tuple(i for i, kind in enumerate(config.kinds) if kind == layer_kind)
        if layers:
            window = config.sliding_window if layer_kind == SLIDING_ATTENTION else None
            groups.append(LayerGroup(GroupSpec(len(groups), group_kind, block_size, window), layers))
    return groups
