"""Between the KV cache manager and the groups: one question to all of them, one common answer.

With a single group the coordinator only passes on. It is a layer of its own because with several groups "how
long is the hit" has no answer in any one of them.
vLLM: V0 none; V1 v1/core/kv_cache_coordinator.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from refengine.errors import ConfigError
from refengine.hashing import BlockHash
from refengine.v1.block import KVCacheBlock
from refengine.v1.block_pool import BlockPool
from refengine.v1.groups.base import GroupManager
from refengine.v1.groups.chunked_local import ChunkedLocalManager
from refengine.v1.groups.full_attention import FullAttentionManager
from refengine.v1.groups.mamba import MambaManager
from refengine.v1.groups.retention import Retention
from refengine.v1.groups.sliding_window import SlidingWindowManager
from refengine.v1.groups.spec import (
    CHUNKED_LOCAL,
    FULL_ATTENTION,
    MAMBA,
    SLIDING_WINDOW,
    GroupSpec,
    check_specs,
    scheduler_block_size,
)
from refengine.v1.request import Request

GroupBlocks = tuple[list[KVCacheBlock], ...]  # one list per group, in the order of the groups

MANAGERS: dict[str, type[GroupManager]] = {
    FULL_ATTENTION: FullAttentionManager,
    SLIDING_WINDOW: SlidingWindowManager,
    CHUNKED_LOCAL: ChunkedLocalManager,
    MAMBA: MambaManager,
}


def make_coordinator(
    specs: Sequence[GroupSpec],
    pool: BlockPool,
    drop_last: bool = False,
    managers: Mapping[str, type[GroupManager]] = MANAGERS,
    *,
    enable_caching: bool = True,
    retention_interval: int | None = None,
    make_hybrid: Callable[[Sequence[GroupManager], bool], KVCacheCoordinator] | None = None,
) -> KVCacheCoordinator:
    """The coordinator for these groups. `make_hybrid`: the class for several; None: HybridKVCacheCoordinator.

    Raises: ConfigError for a kind or a combination that does not exist (yet).
    """
    if not specs:
        raise ConfigError("a model needs at least one cache group")
    for spec in specs:
        if spec.kind not in managers:
            raise ConfigError(f"cache groups of kind {spec.kind!r} are not supported yet")
    specs = check_specs(specs, enable_caching, drop_last, retention_interval)
    retention = Retention(scheduler_block_size(specs), retention_interval, drop_last)
    groups = [managers[spec.kind](spec, pool, retention) for spec in specs]
    if len(groups) == 1:
        return UnitaryKVCacheCoordinator(groups, drop_last)
    return (make_hybrid or HybridKVCacheCoordinator)(groups, drop_last)


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

    @abstractmethod
    def cacheable(self, group: GroupManager, num_tokens: int) -> int:
        """How many of the first `num_tokens` tokens a later hit could use in this group."""

    @property
    def alignment(self) -> int:
        """Tokens. Every hit is a multiple of it."""
        return self.groups[0].retention.alignment

    def blocks(self, request_id: str) -> GroupBlocks:
        """The request's block table in each group."""
        return tuple(list(group.table(request_id)) for group in self.groups)

    def begin_step(self) -> None:
        """The scheduler begins a step. Mutates: what groups remember of the last one."""
        for group in self.groups:
            group.begin_step()

    def is_ready(self, hits: GroupBlocks) -> bool:
        """Whether the hit can be used in this very step, in every group."""
        return all(group.is_ready(blocks) for group, blocks in zip(self.groups, hits, strict=True))

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_slots: int,
        hits: GroupBlocks,
        num_tokens: int | None = None,
        num_tokens_per_step: int | None = None,
    ) -> int:
        """Free blocks that all groups together need, `hits` adopted first: one look, before anything is taken.

        `num_slots` tokens need a place, of which the last ones behind `num_tokens` are for drafts (None: none).
        `num_tokens_per_step`: see GroupManager.
        """
        needs = zip(self.groups, self._tokens_by_group(num_slots, num_tokens), hits, strict=True)
        return sum(
            group.get_num_blocks_to_allocate(request_id, tokens, blocks, num_tokens_per_step)
            for group, tokens, blocks in needs
        )

    def add_computed_blocks(self, request_id: str, hits: GroupBlocks) -> None:
        """Adopts a hit in every group. Mutates: tables, pool.

        All of them come before anybody's new blocks: those are taken from the free queue, where the hits of
        another group may still stand.
        """
        for group, blocks in zip(self.groups, hits, strict=True):
            group.add_computed_blocks(request_id, blocks)

    def allocate_new_blocks(
        self, request_id: str, num_slots: int, num_tokens: int | None = None
    ) -> GroupBlocks:
        """Grows every table to `num_slots` tokens. Returns: the new blocks. Mutates: tables, pool.

        `num_tokens`: see `get_num_blocks_to_allocate`.
        """
        tokens_by_group = self._tokens_by_group(num_slots, num_tokens)
        return tuple(
            group.allocate_new_blocks(request_id, tokens)
            for group, tokens in zip(self.groups, tokens_by_group, strict=True)
        )

    def _tokens_by_group(self, num_slots: int, num_tokens: int | None) -> list[int]:
        sure = num_slots if num_tokens is None else num_tokens
        return [num_slots if group.reserves_for_drafts else sure for group in self.groups]

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Publishes what `num_tokens` tokens fill, in every group, as far as a hit could use it. Mutates: pool."""
        for group in self.groups:
            group.cache_blocks(request, self.cacheable(group, num_tokens))

    def remove_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Returns what no later token can see, in every group. Mutates: tables, pool."""
        for group in self.groups:
            group.remove_skipped_blocks(request_id, num_computed_tokens)

    def free(self, request_id: str) -> None:
        """Returns all blocks of the request, group after group, each last block first. Mutates: tables, pool."""
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

    def cacheable(self, group: GroupManager, num_tokens: int) -> int:
        return num_tokens


class HybridKVCacheCoordinator(KVCacheCoordinator):
    """Several groups, which must agree: whoever cannot serve a prefix makes it shorter for all.

    Groups of one shape keep the same positions, so they answer as one *family*. Full attention is asked first: it
    walks from the left and stops at the first hole, which leaves the others less to look through.
    """

    def __init__(self, groups: Sequence[GroupManager], drop_last: bool) -> None:
        super().__init__(groups, drop_last)
        families: dict[object, list[GroupManager]] = {}
        for group in self.groups:
            families.setdefault(group.spec.shape, []).append(group)
        self.families = sorted(families.values(), key=lambda family: not family[0].is_downward_closed)
        for family in self.families:
            for group in family:
                group.kin = tuple(member.spec.group_id for member in family)

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_length: int
    ) -> tuple[GroupBlocks, int, int]:
        """See the base class. A fixed point: around and around until nobody wants it shorter.

        One round is not enough, since a shorter prefix needs other blocks of a window and another state. It comes
        to an end because the length only ever falls, and nothing at all suits everybody.

        The boundary is the longest answer on the way. What a window still has beyond the end of full attention is
        never asked for, and would be of no use to anybody.
        """
        hits: dict[int, list[KVCacheBlock]] = {}
        found: dict[int, int] = {}  # by family that is downward closed: what it can serve, asked once
        length, longest = max_length, 0
        dropped: set[int] = set()  # families that gave their last block back at this length: once is enough
        while True:
            agreed = length
            for i, family in enumerate(self.families):
                if i in found:
                    agreed = min(agreed, found[i])
                    continue
                drop = self.drop_last and i not in dropped
                served = self._ask(family, block_hashes, agreed, drop, hits)
                if drop:
                    dropped.add(i)
                elif served < agreed:
                    dropped.clear()
                if family[0].is_downward_closed:
                    found[i] = served
                agreed = served
                longest = max(longest, served)
            if agreed >= length:
                break
            length = agreed
        blocks = tuple(hits[group.spec.group_id][: length // group.block_size] for group in self.groups)
        return blocks, length, longest if longest > length else 0

    def _ask(
        self,
        family: Sequence[GroupManager],
        block_hashes: Sequence[BlockHash],
        max_length: int,
        drop: bool,
        hits: dict[int, list[KVCacheBlock]],
    ) -> int:
        """The longest prefix that one family can serve, in tokens. Mutates: `hits`, its blocks by group.

        To give a block back and still come out at `max_length`, it looks one block beyond.
        """
        first, unit = family[0], self.alignment
        hashes = first.spec.hashes(block_hashes)
        drop = drop and first.drops_last
        if drop:
            max_length = min(max_length + first.block_size, len(hashes) * first.block_size)
        for group in family:
            hits[group.spec.group_id] = group.find_longest_cache_hit(hashes, max_length, drop)
        length = min(len(hits[group.spec.group_id]) for group in family) * first.block_size
        return length // unit * unit if first.is_downward_closed else length

    def cacheable(self, group: GroupManager, num_tokens: int) -> int:
        """See the base class. Whole alignment units, and one block more if a lookup is to give one back."""
        aligned = num_tokens // self.alignment * self.alignment
        if self.drop_last and aligned:
            return min(num_tokens, aligned + group.block_size)
        return aligned
