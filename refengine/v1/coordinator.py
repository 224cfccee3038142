"""Between the KV cache manager and the groups: one question to all of them, one common answer.

With a single group the coordinator only passes on. It is a layer of its own because with several groups "how
long is the hit" has no answer in any one of them.
vLLM: V0 none; V1 v1/core/kv_cache_coordinator.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from refengine.errors import ConfigError
from refengine.hashing import BlockHash
from refengine.v1.block import KVCacheBlock
from refengine.v1.block_pool import BlockPool
from refengine.v1.groups.base import GroupManager
from refengine.v1.groups.full_attention import FullAttentionManager
from refengine.v1.groups.spec import FULL_ATTENTION, GroupSpec
from refengine.v1.request import Request

GroupBlocks = tuple[list[KVCacheBlock], ...]  # one list per group, in the order of the groups

MANAGERS: dict[str, type[GroupManager]] = {FULL_ATTENTION: FullAttentionManager}


def make_coordinator(
    specs: Sequence[GroupSpec],
    pool: BlockPool,
    drop_last: bool = False,
    managers: Mapping[str, type[GroupManager]] = MANAGERS,
) -> KVCacheCoordinator:
    """The coordinator for these groups. Raises: ConfigError for a kind or a combination that does not exist yet."""
    for spec in specs:
        if spec.kind not in managers:
            raise ConfigError(f"cache groups of kind {spec.kind!r} are not supported yet")
    if len(specs) != 1:
        raise ConfigError(f"a model with {len(specs)} cache groups is not supported yet, only one group")
    return UnitaryKVCacheCoordinator([managers[spec.kind](spec, pool) for spec in specs], drop_last)


class KVCacheCoordinator(ABC):
    """Fans every operation out to the groups. What differs is how the groups agree on a hit."""

    def __init__(self, groups: Sequence[GroupManager], drop_last: bool) -> None:
        """`drop_last`: lookups give the last matched block back, for draft heads."""
        self.groups = tuple(groups)
        self.drop_last = drop_last

    @abstractmethod
    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_length: int
    ) -> tuple[GroupBlocks, int, int]:
        """The longest prefix of at most `max_length` tokens that every group can serve.

        Returns: its blocks per group, its length in tokens, and the length in tokens of a longer prefix that
        some group could have served and another could not (0: none). Sparse groups keep a state there for the
        next request; it is the *shared prefix boundary*. Mutates nothing.
        """

    def blocks(self, request_id: str) -> GroupBlocks:
        """The request's block table in each group."""
        return tuple(list(group.table(request_id)) for group in self.groups)

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, hits: GroupBlocks) -> int:
        """Free blocks that all groups together need, `hits` adopted first. See GroupManager."""
        return sum(
            group.get_num_blocks_to_allocate(request_id, num_tokens, blocks)
            for group, blocks in zip(self.groups, hits, strict=True)
        )

    def add_computed_blocks(self, request_id: str, hits: GroupBlocks) -> None:
        """Adopts a hit in every group. Mutates: tables, pool."""
        for group, blocks in zip(self.groups, hits, strict=True):
            group.add_computed_blocks(request_id, blocks)

    def allocate_new_blocks(self, request_id: str, num_tokens: int) -> GroupBlocks:
        """Grows every table to `num_tokens` tokens. Returns: the new blocks. Mutates: tables, pool."""
        return tuple(group.allocate_new_blocks(request_id, num_tokens) for group in self.groups)

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Publishes what `num_tokens` tokens fill, in every group. Mutates: pool."""
        for group in self.groups:
            group.cache_blocks(request, num_tokens)

    def remove_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Returns what no later token can see, in every group. Mutates: tables, pool."""
        for group in self.groups:
            group.remove_skipped_blocks(request_id, num_computed_tokens)

    def free(self, request_id: str) -> None:
        """Returns all blocks of the request, group after group. Mutates: tables, pool."""
        for group in self.groups:
            group.free(request_id)


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """One group: its answer is the answer, and no group can lag behind another."""

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_length: int
    ) -> tuple[GroupBlocks, int, int]:
        (group,) = self.groups
        hits = group.find_longest_cache_hit(block_hashes, max_length, self.drop_last)
        return (hits,), len(hits) * group.block_size, 0
