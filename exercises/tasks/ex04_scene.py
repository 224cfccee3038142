"""The stage for chapter and exercise 04: requests look up a prefix, get slots and publish, and no model runs.

`Stage` is the scene of chapter 03 with the manager and the lookup of the reader's choice, with a snapshot after every
mark, and with the moments between start and end: a chunk, a draft, a sampled token, a preemption. `ManagerBase` is what
a reader's manager is derived from. `stale_tale` is the story of a hit that went stale while its request waited.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

from exercises.tasks.ex03_scene import MAX_MODEL_LEN, Scene
from refengine.errors import IntegrityError, PartError
from refengine.hashing import BlockHasher
from refengine.llm import LLM, Prompt
from refengine.model.corpus import world
from refengine.outputs import RequestOutput
from refengine.sampling import SamplingParams
from refengine.trace.codemap import Generation, call_path
from refengine.trace.record import Record, Recorder
from refengine.v1.block import KVCacheBlock
from refengine.v1.block_pool import BlockPool
from refengine.v1.groups.base import num_blocks_for
from refengine.v1.groups.full_attention import FullAttentionManager
from refengine.v1.groups.spec import FULL_ATTENTION, GroupSpec
from refengine.v1.kv_cache_manager import KVCacheBlocks, KVCacheManager
from refengine.v1.request import Request, RequestStatus


class ManagerBase(KVCacheManager):
    """The engine's manager for one full-attention group, made to be derived from.

    `tables` and `num_published` belong to the group and are meant to be written: request id -> blocks in token order,
    and request id -> how many blocks at the head of the table are published already.

    While a part runs under guard, an error names the part in whose call it was raised. So the helpers below stay
    unguarded; and the lookup is watched from here, so that whatever `check_integrity` finds is the manager's doing.
    """

    INNER = ("blocks_for", "gates", "publish", "tell_admit", "tell_allocate")

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in cls.INNER:
            if unguarded := getattr(cls.__dict__.get(name), "__wrapped__", None):
                setattr(cls, name, unguarded)

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int, int]:
        """As in the engine. Raises: PartError that names the lookup, if it changed something or found too much."""
        users = [block.ref_count for block in self.block_pool.blocks]
        hits, num_tokens, boundary = super().get_computed_blocks(request)
        problem = ""
        if users != [block.ref_count for block in self.block_pool.blocks]:
            problem = "it changed how many users a block has. Expected: a lookup changes nothing"
        elif num_tokens >= request.num_tokens:
            problem = (
                f"it found {num_tokens} of {request.num_tokens} tokens; at least one must be left to compute"
            )
        if problem:
            part = type(self.coordinator.groups[0]).__name__
            raise PartError(f"part full_attention ({part}): after find_longest_cache_hit, {problem}.")
        return hits, num_tokens, boundary

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.coordinator.groups[0].block_size

    @property
    def tables(self) -> dict[str, list[KVCacheBlock]]:
        """Request id -> its blocks, in token order."""
        return self.coordinator.groups[0].tables

    @property
    def num_published(self) -> dict[str, int]:
        """Request id -> blocks at the head of its table that can be found already."""
        return self.coordinator.groups[0].num_published

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return num_blocks_for(num_tokens, self.block_size)

    def gates(
        self,
        request: Request,
        num_slots: int,
        *,
        full_sequence_must_fit: bool = False,
        keep_watermark: bool = True,
        shared_prefix_boundary: int = 0,
    ) -> tuple[int, int]:
        """Tokens for which there must be room, and blocks that must stay free besides. Chapter 06 explains both."""
        self._num_slots = num_slots  # for the check in `tell_allocate`
        keeps = keep_watermark and self._is_waiting(request)
        must_fit = max(num_slots, request.num_tokens) if full_sequence_must_fit else num_slots
        return must_fit, self.watermark_blocks if keeps else 0

    def publish(self, request: Request, first: int, last: int) -> None:
        """Makes blocks `first` to `last` (excluded) of the request's table findable, and remembers it."""
        if self.enable_caching and last > first:
            (group,) = self.coordinator.groups
            self.block_pool.cache_full_blocks(
                request, group.table(request.request_id), first, last, group.spec
            )
            group.num_published[request.request_id] = last

    def tell_admit(self, request: Request, fits: bool) -> None:
        """The mark "admit", of a request that is not running yet."""
        if self._is_waiting(request):
            yes = "new" if request.status is RequestStatus.WAITING else "resumed"
            self._mark("admit", request, admitted=fits, reason=yes if fits else "not enough free blocks")

    def tell_allocate(self, request: Request, num_new_tokens: int, blocks: Iterable[KVCacheBlock]) -> None:
        """The mark "allocate". Raises: IntegrityError if the table has no room for the tokens."""
        table, needed = self.tables.get(request.request_id, []), self.blocks_for(self._num_slots)
        if len(table) < needed:
            has = f"request {request.request_id!r} holds {len(table)} blocks"
            raise IntegrityError(f"{has}, and its {self._num_slots} tokens need {needed}")
        ids = [[block.block_id for block in blocks]]
        self._mark("allocate", request, num_tokens=num_new_tokens, block_ids=ids)

    def _is_waiting(self, request: Request) -> bool:
        return request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class Stage(Scene):
    """`manager` and `lookup` are classes, and run without guard. `num_blocks` counts the null block."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 4,
        *,
        manager: type[KVCacheManager] = KVCacheManager,
        lookup: type[FullAttentionManager] = FullAttentionManager,
        pool: Callable[..., BlockPool] = BlockPool,
        max_model_len: int = MAX_MODEL_LEN,
        watermark: float = 0.0,
    ) -> None:
        self.recorder = Recorder(snapshots=True)
        self.manager = manager(
            [GroupSpec(0, FULL_ATTENTION, block_size)],
            num_blocks,
            max_model_len,
            watermark=watermark,
            observer=self.recorder,
            make_block_pool=pool,
            managers={FULL_ATTENTION: lookup},
        )
        self.hasher = BlockHasher("sha256_cbor", block_size, seed="0")
        self.requests: dict[str, Request] = {}
        self.recorder.attach("v1", num_blocks, block_size, self.manager.snapshot)

    def wait(self, name: str, token_ids: Iterable[int]) -> Request:
        """A request enters the waiting queue: it has tokens and hashes, and no blocks."""
        self.requests[name] = self._request(name, token_ids)
        return self.requests[name]

    def schedule(self, name: str, num_new_tokens: int | None = None, drafts: int = 0) -> list[int] | None:
        """One step of a request that waits or runs: lookup if it waits, admit, allocate, publish, run.

        `num_new_tokens` None: all that are left; `drafts`: slots more for tokens that may be rejected.
        Returns: the block table; None: not now.
        """
        request, manager = self.requests[name], self.manager
        is_running = request.status is RequestStatus.RUNNING
        self.recorder.begin_step()
        hits, num_hit_tokens, _ = (
            (manager.empty, 0, 0) if is_running else manager.get_computed_blocks(request)
        )
        if not is_running:
            found = list(hits.ids())
            self.recorder.mark(
                "lookup", name, num_tokens=request.num_tokens, hit_tokens=num_hit_tokens, block_ids=found
            )
        left = request.num_tokens - request.num_computed_tokens - num_hit_tokens
        count = left if num_new_tokens is None else num_new_tokens
        granted = manager.allocate_slots(request, count, hits, num_hit_tokens, num_lookahead_tokens=drafts)
        if granted is not None:
            start = request.num_computed_tokens + num_hit_tokens
            request.status, request.num_computed_tokens = RequestStatus.RUNNING, start + count
            self.recorder.mark("run", name, start=start, num_tokens=count)
        self.recorder.end_step()
        return None if granted is None else self.table(name)

    def append(self, name: str, *token_ids: int) -> None:
        """Sampled tokens join the request. Their K/V is computed in a later step."""
        self.requests[name].append(token_ids)

    def preempt(self, name: str) -> None:
        """Takes the request's blocks, keeps its tokens and hashes."""
        request = self.requests[name]
        self.recorder.begin_step()
        self.manager.free(request)
        request.status, request.num_computed_tokens = RequestStatus.PREEMPTED, 0
        self.recorder.end_step()

    def reserve(self, name: str, token_ids: Iterable[int], num_new_tokens: int) -> KVCacheBlocks | None:
        """`allocate_slots` alone, for a new request with what its lookup finds. Returns what the manager does."""
        request = self.wait(name, token_ids)
        self.recorder.begin_step()
        hits, num_hit_tokens, _ = self.manager.get_computed_blocks(request)
        granted = self.manager.allocate_slots(request, num_new_tokens, hits, num_hit_tokens)
        self.recorder.end_step()
        return granted

    @property
    def users(self) -> dict[int, int]:
        """Block id -> how many requests use it, of every block in use."""
        return {b.block_id: b.ref_count for b in self.pool.blocks if b.ref_count and not b.is_null}


# -- a hit that goes stale ----------------------------------------------------------------------------------

TALE = world(random.Random(3), 4)  # four facts and what one can ask about them
TALE_BLOCKS = 15  # usable ones: Cleo alone fills them


def stale_tale(**options: Any) -> tuple[RequestOutput, Record]:
    """Ada reads a text. Cleo runs for long and takes her blocks, one by one, while Bob waits with a question about it.

    `options` of the engine. Returns: Bob's output, and the record.
    """
    recorder = Recorder(snapshots=True)
    null = options.get("engine") != "v0"
    llm = LLM("tiny", block_size=4, num_blocks=TALE_BLOCKS + null, observer=recorder, **options)
    llm.generate([TALE.context], SamplingParams(max_tokens=1, ignore_eos=True), request_ids=["ada"])
    question = TALE.prompt(TALE.questions[0].question)
    prompts: list[Prompt] = [list(range(60, 92)), question]
    _, bob = llm.generate(
        prompts,
        [SamplingParams(max_tokens=28, ignore_eos=True), SamplingParams(max_tokens=12, stop="\n")],
        request_ids=["cleo", "bob"],
    )
    return bob, recorder.record


# -- the table of the mapping task ---------------------------------------------------------------------------

PLACES = (
    "KVCacheManager.get_computed_blocks",
    "FullAttentionManager.find_longest_cache_hit",
    "KVCacheManager.allocate_slots",
    "BlockPool.touch",
    "BlockPool.cache_full_blocks",
    "BlockPool.free_blocks",
    "GPUModelRunner._prepare_inputs",
    "Scheduler.schedule",
    "Scheduler._get_num_new_uncached_and_cached_tokens",
    "ComputedBlocksTracker.get_num_cached_tokens",
    "PrefixCachingBlockAllocator.find_cached_blocks_prefix",
    "SelfAttnBlockSpaceManager.can_allocate",
    "PrefixCachingBlockAllocator.allocate_immutable_block",
    "PrefixCachingBlockAllocator.mark_blocks_as_computed",
    "ModelInputForGPUBuilder._compute_lens",
    "ModelInputForGPUBuilder._compute_for_prefix_cache_hit",
)


def places() -> list[tuple[str, str, str]]:
    """Generation, symbol, what is decided there: for some places on the path of a request, in its order."""
    generations: tuple[Generation, Generation] = ("v1", "v0")
    return [
        (generation.upper(), step.place.symbol, step.decides)
        for generation in generations
        for step in call_path(generation)
        if step.place.symbol in PLACES
    ]


# -- the workload of the measuring task ---------------------------------------------------------------------


def workload(num_shared: int = 50, num_requests: int = 12) -> list[list[int]]:
    """Prompts that begin with the same tokens; each goes on with a question of its own, of 6 to 16 tokens."""
    shared = list(range(num_shared))
    return [
        shared + [1000 * (i + 1) + position for position in range(6 + 10 * i // (num_requests - 1))]
        for i in range(num_requests)
    ]
