"""What a group of layers needs from the cache: one block table for all of them, and one rule for what to keep.

Layers that see the same tokens share a group. A pure full-attention model has one group; a model that mixes
full and sliding-window layers has one per kind. Every group has a block table of its own for each request, and
all of them draw blocks from one pool.

In all tables position i stands for tokens `i * block_size` to `(i + 1) * block_size - 1`, and block 0 (null) at a
position means that no storage is needed there. What a block holds depends on the kind:

- attention (`full_attention`, `sliding_window`, `chunked_local`): keys and values of these tokens, one slot each.
  The null block is never written and never read: it stands only where the window or chunk no longer reaches.
- `mamba`: one recurrent state, the one *after* all tokens up to some point. After `n` computed tokens (n > 0)
  the state of a request is in position `state_position(n)` of its table; before the first token it is all zeros. A
  step that computes tokens n0 to n1 - 1 starts from `state_position(n0)` and writes `state_position(n1)`; the two
  are the same, to be updated in place, or the first is to be left as it is, since it may be published and others
  may start from it. Positions between them are null: no chunk ended there, so that state never existed.

vLLM: V0 none (one table for the whole model); V1 v1/kv_cache_interface.py KVCacheSpec, KVCacheGroupSpec.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from refengine.errors import ConfigError
from refengine.hashing import BlockHash

FULL_ATTENTION = "full_attention"
SLIDING_WINDOW = "sliding_window"
CHUNKED_LOCAL = "chunked_local_attention"
MAMBA = "mamba"


@dataclass(frozen=True)
class GroupSpec:
    """One group: its place in the list of groups, its kind, and tokens per block."""

    group_id: int
    kind: str
    block_size: int
    window: int | None = None  # tokens that a sliding-window layer looks back, itself included
    chunk: int | None = None  # tokens per chunk of a chunked-local layer: it sees its own chunk up to itself
    hash_block_size: int | None = None  # tokens per block hash; None: as many as per block

    @property
    def shape(self) -> tuple[str, int, int | None, int | None]:
        """Groups of one shape keep the same positions, so they are looked up together."""
        return self.kind, self.block_size, self.window, self.chunk

    def hashes(self, block_hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """The hashes of this group's blocks out of a request's.

        All groups share one chain of hashes, which goes by the smallest blocks. A hash covers everything before
        it, so a larger block is called by the last hash in it.
        """
        stride = self.block_size // (self.hash_block_size or self.block_size)
        return block_hashes if stride == 1 else block_hashes[stride - 1 :: stride]


def state_position(num_computed_tokens: int, block_size: int) -> int:
    """Where in a Mamba table the state after `num_computed_tokens` (at least 1) tokens is."""
    return (num_computed_tokens - 1) // block_size


def hash_block_size(specs: Sequence[GroupSpec]) -> int:
    """Tokens per block hash: what divides the blocks of every group. Requests are hashed by it."""
    return math.gcd(*(spec.block_size for spec in specs))


def scheduler_block_size(specs: Sequence[GroupSpec]) -> int:
    """The alignment unit in tokens: every hit is a multiple of it, so that it ends between blocks in all groups."""
    return math.lcm(*(spec.block_size for spec in specs))


def check_specs(
    specs: Sequence[GroupSpec], enable_caching: bool, drop_last: bool, retention_interval: int | None
) -> list[GroupSpec]:
    """The groups of one model, each told how its hashes are counted.

    Raises: ConfigError for sizes that no layer can have, and for combinations in which a hit would have to be found
    otherwise than by whole blocks.
    """
    unit, alignment = hash_block_size(specs), scheduler_block_size(specs)
    kinds = {spec.kind for spec in specs}
    for spec in specs:
        for kind, name in ((SLIDING_WINDOW, "window"), (CHUNKED_LOCAL, "chunk")):
            size = getattr(spec, name)
            if spec.kind == kind and (size is None or size < 1):
                raise ConfigError(
                    f"group {spec.group_id} ({kind}) needs a {name} of at least 1 token, not {size}"
                )
    if enable_caching:
        _check_lookups(specs, unit, alignment, drop_last)
    interval = retention_interval or 0
    if interval % alignment or (interval and not kinds & {SLIDING_WINDOW, MAMBA}):
        raise ConfigError(
            f"a retention interval of {interval} tokens needs a sliding-window or Mamba group and blocks that "
            f"divide it, not an alignment of {alignment}"
        )
    return [replace(spec, hash_block_size=unit) for spec in specs]


def _check_lookups(specs: Sequence[GroupSpec], unit: int, alignment: int, drop_last: bool) -> None:
    for spec in specs:
        if spec.kind == CHUNKED_LOCAL and (spec.block_size != alignment or drop_last):
            raise ConfigError(
                "chunked local attention needs blocks of one size in all groups, and no draft head"
            )
    # vLLM then shares blocks that are filled in part, and copies a state before somebody goes on from it.
    can_be_finer = {FULL_ATTENTION, MAMBA}
    if any(spec.kind == MAMBA and spec.block_size > unit for spec in specs) and all(
        spec.kind in can_be_finer or spec.block_size == unit for spec in specs
    ):
        raise ConfigError(
            "a Mamba group with larger blocks than the others, hit inside a block, is not supported yet"
        )
