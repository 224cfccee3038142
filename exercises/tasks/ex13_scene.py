"""The scene for chapter and exercise 13: models whose layers fall into several groups, on the engine's cache manager.

`GroupStage` is the stage of exercise 04 with a block table per group: the same calls, every chunk a step of its own,
and the shared-prefix boundary carried from the lookup to the allocation, as V1's scheduler does it. `CoordinatorBase`
is what a reader's coordinator is derived from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from exercises.tasks.ex03_scene import MAX_MODEL_LEN
from exercises.tasks.ex04_scene import Stage
from refengine.config import EngineConfig
from refengine.hashing import BlockHash, BlockHasher
from refengine.trace.codemap import topic
from refengine.trace.record import Recorder
from refengine.v1.block import KVCacheBlock
from refengine.v1.coordinator import HybridKVCacheCoordinator, KVCacheCoordinator
from refengine.v1.explain_hit import HitReport, explain_hit
from refengine.v1.groups.base import GroupManager
from refengine.v1.groups.spec import (
    CHUNKED_LOCAL,
    FULL_ATTENTION,
    MAMBA,
    SLIDING_WINDOW,
    GroupSpec,
    hash_block_size,
)
from refengine.v1.kv_cache_manager import KVCacheManager
from refengine.v1.request import Request, RequestStatus
from refengine.v1.state_chunks import state_chunks_for
from refengine.viz import Picture, Table
from refengine.viz.groups import Answer, GroupRow, fixed_point_picture

NAMES = {FULL_ATTENTION: "full", SLIDING_WINDOW: "window", CHUNKED_LOCAL: "chunk", MAMBA: "state"}


def full(block_size: int) -> GroupSpec:
    """Layers that see every earlier token."""
    return GroupSpec(0, FULL_ATTENTION, block_size)


def window(block_size: int, width: int) -> GroupSpec:
    """Layers that see the last `width` tokens."""
    return GroupSpec(0, SLIDING_WINDOW, block_size, width)


def states(block_size: int) -> GroupSpec:
    """Layers that carry a state along."""
    return GroupSpec(0, MAMBA, block_size)


def name_of(group: GroupManager) -> str:
    """`full`, `window 4`, `state`."""
    return " ".join(filter(None, (NAMES[group.spec.kind], str(group.spec.window or ""))))


class CoordinatorBase(HybridKVCacheCoordinator):
    """The engine's coordinator of several groups, made to be derived from. Models with draft heads are left out."""

    @property
    def order(self) -> list[GroupManager]:
        """The groups in the order in which they are asked: full attention first."""
        return [group for family in self.families for group in family]

    def serve(
        self, group: GroupManager, block_hashes: Sequence[BlockHash], max_length: int
    ) -> list[KVCacheBlock]:
        """The blocks of the longest prefix of at most `max_length` tokens that this group, alone, can serve.

        The prefix is a whole number of alignment units long. Where the group needs no block, the null block stands.
        """
        hashes = group.spec.hashes(block_hashes)
        hits = group.find_longest_cache_hit(hashes, max_length, False)
        return hits[: len(hits) * group.block_size // self.alignment * self.alignment // group.block_size]


class _Listener(HybridKVCacheCoordinator):
    """The engine's coordinator, which also remembers who was asked for what."""

    answers: list[Answer]

    def _ask(
        self,
        family: Sequence[GroupManager],
        block_hashes: Sequence[BlockHash],
        max_length: int,
        drop: bool,
        hits: dict[int, list[KVCacheBlock]],
    ) -> int:
        served = super()._ask(family, block_hashes, max_length, drop, hits)
        self.answers += [Answer(self.groups.index(group), max_length, served) for group in family]
        return served


class GroupStage(Stage):
    """`groups`: specs made by `full`, `window` and `states`. `num_blocks` counts the null block.

    `manager` and `coordinator` are classes, and run without guard.
    """

    def __init__(
        self,
        num_blocks: int,
        *groups: GroupSpec,
        retention: int | None = None,
        coordinator: Callable[..., KVCacheCoordinator] = HybridKVCacheCoordinator,
        manager: type[KVCacheManager] = KVCacheManager,
        snapshots: bool = True,
    ) -> None:
        """`retention`: the retention interval in tokens, None: everything that fills up is published."""
        specs = [replace(spec, group_id=i) for i, spec in enumerate(groups)]
        self.recorder = Recorder(snapshots=snapshots)
        self.manager = manager(
            specs,
            num_blocks,
            MAX_MODEL_LEN,
            retention_interval=retention,
            observer=self.recorder,
            make_hybrid=coordinator,
        )
        self.hasher = BlockHasher("sha256_cbor", hash_block_size(specs), seed="0")
        self.requests: dict[str, Request] = {}
        self.chunks = state_chunks_for(EngineConfig(), self.manager)
        self.recorder.attach("v1", num_blocks, specs[0].block_size, self.manager.snapshot)

    @property
    def groups(self) -> tuple[GroupManager, ...]:
        return self.manager.coordinator.groups

    # -- steps ----------------------------------------------------------------------------------------------

    def start(self, name: str, token_ids: Iterable[int], *chunks: int) -> Any:
        """A new request computes all its tokens: first `chunks`, then what is left, each chunk in a step of its own.

        What is left is cut where V1's scheduler cuts it. Returns: its block tables; None: not now.
        """
        request = self.wait(name, token_ids)
        for count in chunks:
            if self.schedule(name, count) is None:
                return None
        while request.num_computed_tokens < request.num_tokens:
            if self.schedule(name) is None:
                return None
        return self.tables(name)

    def schedule(
        self, name: str, num_new_tokens: int | None = None, drafts: int = 0, same_step: bool = False
    ) -> Any:
        """One chunk of a request that waits or runs. `same_step`: no new step begins before it.

        `num_new_tokens` None: all that are left, cut where V1's scheduler cuts. Returns: its tables; None: not now.
        """
        request, manager = self.requests[name], self.manager
        if not same_step:
            manager.begin_step()
        self.recorder.begin_step()
        hits, num_hit_tokens, boundary = manager.empty, 0, request.shared_prefix_boundary
        if request.status is not RequestStatus.RUNNING:
            hits, num_hit_tokens, boundary = manager.get_computed_blocks(request)
            request.shared_prefix_boundary = boundary
            self.recorder.mark(
                "lookup",
                name,
                num_tokens=request.num_tokens,
                hit_tokens=num_hit_tokens,
                block_ids=list(hits.ids()),
            )
        start = request.num_computed_tokens + num_hit_tokens
        count = num_new_tokens or self.chunks.cut(request, start, request.num_tokens - start)
        granted = manager.allocate_slots(
            request,
            count,
            hits or None,
            num_hit_tokens,
            shared_prefix_boundary=boundary,
            num_lookahead_tokens=drafts,
        )
        if granted is not None:
            request.status, request.num_computed_tokens = RequestStatus.RUNNING, start + count
            self.recorder.mark("run", name, start=start, num_tokens=count)
        self.recorder.end_step()
        return None if granted is None else self.tables(name)

    def tables(self, name: str) -> list[list[int]]:
        """The block tables of a request, one per group."""
        return list(self.manager.block_ids(name))

    # -- looking --------------------------------------------------------------------------------------------

    def found(self, token_ids: Iterable[int]) -> tuple[int, int]:
        """What a request with these tokens would find now: the common hit in tokens, and the boundary."""
        _, length, boundary = self.manager.get_computed_blocks(self._request("?", token_ids))
        return length, boundary

    def hits(self, token_ids: Iterable[int]) -> list[list[int]]:
        """The blocks of that hit, per group. 0 stands where a group needs none."""
        return list(self.manager.get_computed_blocks(self._request("?", token_ids))[0].ids())

    def explain(self, token_ids: Iterable[int]) -> HitReport:
        """Why the hit is what it is."""
        return explain_hit(self.manager, self._request("?", token_ids))

    def ends_cached(self, token_ids: Iterable[int], group: int = -1) -> list[int]:
        """After how many of these tokens a block of the group, the last one by default, ends that can be found."""
        manager = self.groups[group]
        hashes = manager.spec.hashes(self._request("?", token_ids).block_hashes)
        return [(i + 1) * manager.block_size for i, h in enumerate(hashes) if manager.cached_block(h)]

    def forget(self, token_ids: Iterable[int], group: int, positions: Iterable[int]) -> None:
        """Takes a group's cached blocks at these positions of a prefix out of the index."""
        manager = self.groups[group]
        hashes = manager.spec.hashes(self._request("?", token_ids).block_hashes)
        found = [manager.cached_block(hashes[position]) for position in positions]
        self.evict(*(block.block_id for block in found if block is not None))

    def answers(self, token_ids: Iterable[int]) -> Table:
        """Who was asked in a lookup, for how many tokens, and how many they can serve, in that order."""
        rows = [(name_of(self.groups[a.row]), a.asked, a.served) for a in self._asked(token_ids)]
        return Table(("group", "asked for at most", "can serve"), rows)

    def fixed_point(self, token_ids: Iterable[int]) -> Picture:
        """The same drawn: what each group has, and how the candidate shrinks."""
        token_ids = list(token_ids)
        request = self._request("?", token_ids)
        hit, boundary = self.found(token_ids)
        rows = [
            GroupRow(
                name_of(group),
                group.block_size,
                frozenset(
                    i for i, h in enumerate(group.spec.hashes(request.block_hashes)) if group.cached_block(h)
                ),
                frozenset(group.needed_positions(hit)),
            )
            for group in self.groups
        ]
        return fixed_point_picture(rows, self._asked(token_ids), len(token_ids), hit, boundary)

    def _asked(self, token_ids: Iterable[int]) -> list[Answer]:
        coordinator = self.manager.coordinator
        listener = _Listener(coordinator.groups, coordinator.drop_last)
        listener.answers = []
        request = self._request("?", token_ids)
        listener.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
        return listener.answers


def three_requests(stage: GroupStage, num_shared: int = 16, num_own: int = 13) -> list[tuple[int, int]]:
    """Three prompts that share a beginning, one after another. Returns: hit and boundary of each lookup."""
    found = []
    for number in range(1, 4):
        prompt = [*range(num_shared), *range(1000 * number, 1000 * number + num_own)]
        found.append(stage.found(prompt))
        stage.start(f"r{number}", prompt)
        stage.finish(f"r{number}")
    return found


# -- the table of the mapping task ----------------------------------------------------------------------------

TOPICS = (
    "cache_groups",
    "coordinator",
    "shared_prefix_boundary",
    "mamba",
    "state_chunks",
    "group_admission",
    "retention",
)


def places() -> list[tuple[str, str]]:
    """Symbol and file of vLLM 0.33.0: where several groups are dealt with."""
    rows = [(place.symbol, place.where) for name in TOPICS for place in topic(name).v1.vllm]
    return list(dict.fromkeys(rows))
