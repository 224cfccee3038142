"""Which KV blocks are already computed, and which blocks does a request get? The scheduler asks here.

Two calls matter. `get_computed_blocks` finds the longest cached prefix and changes nothing. `allocate_slots`
decides admission, adopts that prefix, takes new blocks and publishes the ones that fill up, or refuses and
leaves the request without blocks.
vLLM: V0 core/block_manager.py SelfAttnBlockSpaceManager (can_allocate, allocate, append_slots,
get_common_computed_block_ids); V1 v1/core/kv_cache_manager.py KVCacheManager.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from refengine.errors import IntegrityError
from refengine.trace.observer import MarkKind, Observer, PoolSnapshot
from refengine.v1.block_pool import BlockPool
from refengine.v1.coordinator import (
    MANAGERS,
    GroupBlocks,
    HybridKVCacheCoordinator,
    KVCacheCoordinator,
    make_coordinator,
)
from refengine.v1.events import KVCacheEvent
from refengine.v1.groups.base import GroupManager
from refengine.v1.groups.spec import GroupSpec
from refengine.v1.request import Request, RequestStatus


@dataclass(frozen=True)
class KVCacheBlocks:
    """Blocks per group, handed between manager and scheduler. Lists are copies; blocks are shared."""

    blocks: GroupBlocks

    def ids(self) -> tuple[list[int], ...]:
        """Block ids per group."""
        return tuple([block.block_id for block in group] for group in self.blocks)

    def __bool__(self) -> bool:
        return any(self.blocks)


@dataclass
class PrefixCacheStats:
    """Lookups since the last reset, weighted by tokens: the hit rate is `hits / queries`.

    A preempted request looks up once more when it resumes and mostly finds its own blocks. That says nothing
    about sharing, so it is counted apart.
    """

    requests: int = 0
    queries: int = 0  # tokens
    hits: int = 0  # tokens
    resumed_requests: int = 0
    resumed_queries: int = 0  # tokens
    resumed_hits: int = 0  # tokens

    def record(self, num_tokens: int, num_hits: int, resumed: bool) -> None:
        """Adds one lookup of `num_tokens` tokens. Mutates: the counters."""
        if resumed:
            self.resumed_requests += 1
            self.resumed_queries += num_tokens
            self.resumed_hits += num_hits
        else:
            self.requests += 1
            self.queries += num_tokens
            self.hits += num_hits

    @property
    def hit_rate(self) -> float:
        return self.hits / self.queries if self.queries else 0.0


class KVCacheManager:
    """The cache as the scheduler sees it. `watermark` is a share of all blocks; see `allocate_slots`."""

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        num_blocks: int,
        max_model_len: int,
        *,
        enable_caching: bool = True,
        enable_events: bool = False,
        watermark: float = 0.0,
        drop_last: bool = False,
        retention_interval: int | None = None,
        max_tokens_per_step: int | None = None,
        observer: Observer | None = None,
        make_block_pool: Callable[..., BlockPool] = BlockPool,
        managers: Mapping[str, type[GroupManager]] = MANAGERS,
        make_hybrid: Callable[..., KVCacheCoordinator] = HybridKVCacheCoordinator,
    ) -> None:
        """`num_blocks`: null block included. `drop_last`: see KVCacheCoordinator.

        `retention_interval`: see groups/retention.py. `max_tokens_per_step`: of one request, None: no limit.
        """
        self.max_model_len = max_model_len
        self.max_tokens_per_step = max_model_len if max_tokens_per_step is None else max_tokens_per_step
        self.observer = observer
        self.enable_caching = enable_caching
        self.block_pool = make_block_pool(
            num_blocks, enable_caching=enable_caching, enable_events=enable_events, observer=observer
        )
        self.coordinator = make_coordinator(
            groups,
            self.block_pool,
            drop_last,
            managers,
            enable_caching=enable_caching,
            retention_interval=retention_interval,
            make_hybrid=make_hybrid,
        )
        self.empty = KVCacheBlocks(tuple([] for _ in groups))
        self.watermark_blocks = int(watermark * num_blocks)
        self.stats = PrefixCacheStats()

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int, int]:
        """The longest prefix of the request whose K/V every group can serve.

        Returns: its blocks, its length in tokens, and the shared-prefix boundary in tokens (0: none).
        Mutates: nothing in the pool; the scheduler records the statistics, since it may ask again.
        With report mode "full" it emits a stored event for the reused prefix, on every call.
        """
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return self.empty, 0, 0
        # At least one token has to run, or there would be no hidden state to sample from. Hits are
        # whole blocks, so a prompt that is cached to its end gives its last block back, not a token.
        max_cache_hit_length = request.num_tokens - 1
        hits, num_computed_tokens, shared_prefix_boundary = self.coordinator.find_longest_cache_hit(
            request.block_hashes, max_cache_hit_length
        )
        if request.report_full and num_computed_tokens:
            self._announce_reused(request, hits)
        return KVCacheBlocks(hits), num_computed_tokens, shared_prefix_boundary

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        hits: KVCacheBlocks | None = None,
        num_hit_tokens: int = 0,
        *,
        shared_prefix_boundary: int = 0,
        num_lookahead_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        keep_watermark: bool = True,
    ) -> KVCacheBlocks | None:
        """Slots for `num_new_tokens` tokens after the computed ones, or None if there are not enough blocks.

        `hits`, `num_hit_tokens` and `shared_prefix_boundary` come from this request's last lookup.
        `num_lookahead_tokens` slots more are reserved for drafts; drafts may be rejected, so they are never
        published. With `full_sequence_must_fit` the request is refused unless all its tokens would fit, even
        if this step's chunk does. A request that is not running yet must also leave the watermark free, so
        that the running ones do not have to be preempted at their next block; `keep_watermark` False waives it.

        Returns: the new blocks, without the hits. None: refused, and the request holds what it held before, less
        what has left its windows.
        Mutates: pool, tables, the request's boundary. Raises: ValueError if there is nothing to allocate for.
        """
        if num_new_tokens < 1:
            raise ValueError(f"request {request.request_id!r} asks for slots for {num_new_tokens} tokens")
        if hits is not None:
            request.shared_prefix_boundary = shared_prefix_boundary
        hits = hits or self.empty
        num_computed_tokens = request.num_computed_tokens + num_hit_tokens
        num_tokens = num_computed_tokens + num_new_tokens
        num_tokens_need_slot = min(num_tokens + num_lookahead_tokens, self.max_model_len)
        is_admission = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        reserved = self.watermark_blocks if is_admission and keep_watermark else 0
        required = self._required_at_peak(request, hits) if full_sequence_must_fit else 0
        if required + reserved <= self.block_pool.num_free_blocks:
            # What the request has passed is returned, and stays returned if it is refused right after.
            self.coordinator.remove_skipped_blocks(request.request_id, num_computed_tokens)
            required = self.coordinator.get_num_blocks_to_allocate(
                request.request_id, num_tokens_need_slot, hits.blocks, num_tokens
            )
        is_ready = self.coordinator.is_ready(hits.blocks)
        if required + reserved > self.block_pool.num_free_blocks or not is_ready:
            if is_admission:
                reason = (
                    "not enough free blocks" if is_ready else "its first state is written in this very step"
                )
                self._mark("admit", request, admitted=False, reason=reason)
            return None

        if is_admission:
            reason = "new" if request.status is RequestStatus.WAITING else "resumed"
            self._mark("admit", request, admitted=True, reason=reason)
        if hits:
            self.coordinator.add_computed_blocks(request.request_id, hits.blocks)
        new_blocks = KVCacheBlocks(
            self.coordinator.allocate_new_blocks(request.request_id, num_tokens_need_slot, num_tokens)
        )
        self._mark("allocate", request, num_tokens=num_new_tokens, block_ids=list(new_blocks.ids()))
        if self.enable_caching:
            self.coordinator.cache_blocks(request, min(num_tokens, request.num_tokens))
        return new_blocks

    def _required_at_peak(self, request: Request, hits: KVCacheBlocks) -> int:
        """Free blocks that it takes to compute all tokens of the request, step by step."""
        whole = min(request.num_tokens, self.max_model_len)
        return self.coordinator.get_num_blocks_to_allocate(
            request.request_id, whole, hits.blocks, num_tokens_per_step=self.max_tokens_per_step
        )

    def begin_step(self) -> None:
        """The scheduler begins a step: what the last one wrote can be built on now. Mutates: groups."""
        self.coordinator.begin_step()

    def unpublish_uncomputed(self, request: Request) -> None:
        """Makes the request's blocks past its computed tokens unfindable: what was promised will not be computed.

        Mutates: index, events.
        """
        for group in self.coordinator.groups:
            computed = request.num_computed_tokens // group.block_size
            table = group.table(request.request_id)
            self.block_pool.evict_blocks([block.block_id for block in table[computed:] if not block.is_null])

    def free(self, request: Request) -> None:
        """Returns all blocks of the request, last one first. Their hashes stay. Mutates: pool, tables."""
        self.coordinator.free(request.request_id)

    def block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The request's whole block table, per group."""
        return KVCacheBlocks(self.coordinator.blocks(request_id)).ids()

    def reset_prefix_cache(self) -> bool:
        """Forgets every hash, for example after the weights changed. Refused while any block is in use.

        Returns: whether it was done. Mutates: index, statistics.
        """
        done = self.block_pool.reset_prefix_cache()
        if done:
            self.stats = PrefixCacheStats()
        return done

    def take_events(self) -> list[KVCacheEvent]:
        """Drains the KV events since the last call. Mutates: the event queue."""
        return self.block_pool.take_events()

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return self.block_pool.usage

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every count of users equals the number of tables a block stands in."""
        self.block_pool.check_integrity()
        for group in self.coordinator.groups:
            group.check_integrity()
        users = dict.fromkeys(range(self.block_pool.num_blocks), 0)
        for group in self.coordinator.groups:
            for table in group.tables.values():
                for block in table:
                    users[block.block_id] += 1
        for block in self.block_pool.blocks:
            if not block.is_null and block.ref_count != users[block.block_id]:
                found = users[block.block_id]
                raise IntegrityError(
                    f"block {block.block_id} counts {block.ref_count} users, but stands in {found} tables"
                )

    def snapshot(self) -> PoolSnapshot:
        """How all blocks stand now, for an observer."""
        pool = self.block_pool
        ids = {request_id for group in self.coordinator.groups for request_id in group.tables}
        return PoolSnapshot(
            free=[block.block_id for block in pool.free_queue],
            cached=[block.block_id for block in pool.blocks if block.block_hash is not None],
            tables={request_id: list(self.block_ids(request_id)) for request_id in sorted(ids)},
        )

    def _mark(self, kind: MarkKind, request: Request, **facts: Any) -> None:
        if self.observer is not None:
            self.observer.mark(kind, request.request_id, **facts)

    def _announce_reused(self, request: Request, hits: GroupBlocks) -> None:
        for group, blocks in zip(self.coordinator.groups, hits, strict=True):
            if blocks:
                self.block_pool.announce(request, 0, len(blocks), group.spec, reused=True)
