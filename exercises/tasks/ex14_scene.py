"""The scene for chapter and exercise 14: a cache that tells what happened to it, and those who listen.

`NewsStage` is the stage of exercise 04 for any groups, with events. `Workload` is a random engine without a model, so
that thousands of steps cost little. `MirrorBase` is a mirror that can be asked, and `routed` sends a workload to
several engines by a rule of the reader's choice.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from exercises.tasks.ex03_scene import MAX_MODEL_LEN
from exercises.tasks.ex04_scene import Stage
from refengine.commands.bench_router import (
    BLOCK_SIZE,
    LAST_TOKEN_ID,
    NEW_TOKENS,
    RouterResult,
    RouterWorkload,
)
from refengine.config import EngineConfig
from refengine.errors import IntegrityError
from refengine.hashing import BlockHash, BlockHasher
from refengine.llm import LLM
from refengine.model.config import ModelConfig
from refengine.model.decoder import Decoder
from refengine.router import Policy, Router
from refengine.sampling import SamplingParams
from refengine.trace.record import Recorder
from refengine.v1.block import KVCacheBlock
from refengine.v1.block_pool import BlockPool
from refengine.v1.coordinator import make_coordinator
from refengine.v1.engine import EngineCore
from refengine.v1.events import BlockRemoved, BlockStored, KVCacheEvent
from refengine.v1.groups.spec import CHUNKED_LOCAL, FULL_ATTENTION, MAMBA, SLIDING_WINDOW, GroupSpec
from refengine.v1.kv_cache_manager import KVCacheManager
from refengine.v1.publisher import EventBatch, EventPublisher
from refengine.v1.request import Request, RequestStatus
from refengine.v1.scheduler import Scheduler
from refengine.viz import Table

Prefix = tuple[int, BlockHash]  # group id, hash of the prefix's last block
FULL = [GroupSpec(0, FULL_ATTENTION, 4)]
FULL_AND_WINDOW = [GroupSpec(0, FULL_ATTENTION, 4), GroupSpec(1, SLIDING_WINDOW, 4, window=6)]
FULL_AND_STATES = [GroupSpec(0, FULL_ATTENTION, 4), GroupSpec(1, MAMBA, 4)]
CHUNKS = [GroupSpec(0, CHUNKED_LOCAL, 4, chunk=12), GroupSpec(1, FULL_ATTENTION, 4)]
MODELS = (
    FULL,
    FULL_AND_WINDOW,
    FULL_AND_STATES,
    [GroupSpec(0, FULL_ATTENTION, 8), GroupSpec(1, SLIDING_WINDOW, 4, window=7)],
    CHUNKS,
    [GroupSpec(0, FULL_ATTENTION, 4), GroupSpec(1, SLIDING_WINDOW, 4, window=10), GroupSpec(2, MAMBA, 4)],
)


class MirrorLike(Protocol):
    """What every mirror of this exercise offers."""

    def apply(self, event: KVCacheEvent) -> None:
        """Applies one event."""

    def prefixes(self) -> set[Prefix]:
        """What the engine can find, as far as is known here."""


class NewsStage(Stage):
    """A cache manager with events on. `num_blocks` counts the null block; `retention` is the interval in tokens.

    Hashes get letters as names, in the order in which they are first asked for.
    """

    def __init__(
        self, num_blocks: int, groups: Sequence[GroupSpec] = tuple(FULL), retention: int | None = None
    ) -> None:
        self.groups = list(groups)
        block_size = min(group.block_size for group in groups)
        self.recorder = Recorder(snapshots=True)
        self.manager = KVCacheManager(
            groups,
            num_blocks,
            MAX_MODEL_LEN,
            enable_events=True,
            retention_interval=retention,
            observer=self.recorder,
        )
        self.hasher = BlockHasher("sha256_cbor", block_size, seed="0")
        self.requests: dict[str, Request] = {}
        self.publisher = EventPublisher()
        self.names: dict[BlockHash, str] = {}
        self.recorder.attach("v1", num_blocks, block_size, self.manager.snapshot)

    @property
    def index(self) -> set[Prefix]:
        """The engine's own index: what can be found now."""
        return self.pool.prefixes()

    def start_full(self, name: str, token_ids: Iterable[int]) -> list[int] | None:
        """`start` for a request that asks to have what it reuses announced. Returns: the table of the first group."""
        self.wait(name, token_ids).report_full = True
        return self.schedule(name)

    def salted(self, name: str, token_ids: Iterable[int], salt: str) -> None:
        """`start` for a request with a salt."""
        request = Request(name, list(token_ids), SamplingParams(), hasher=self.hasher, cache_salt=salt)
        self.requests[name] = request
        self.schedule(name)

    def hashes(self, token_ids: Iterable[int]) -> list[BlockHash]:
        """The chained hashes of the full blocks of these tokens."""
        hashes: list[BlockHash] = []
        self.hasher.extend(hashes, list(token_ids))
        return hashes

    def take(self) -> list[KVCacheEvent]:
        """What happened since the last call. It is published as one batch too."""
        events = self.manager.take_events()
        self.publisher.publish(events)
        return events

    def news(self) -> Table:
        """`take`, as a table."""
        return news_table(self.take(), self.names)

    def name(self, block_hash: BlockHash) -> str:
        """The letter of a hash."""
        return self.names.setdefault(block_hash, chr(ord("a") + len(self.names)))


def news_table(events: Iterable[KVCacheEvent], names: dict[BlockHash, str]) -> Table:
    """One line per event. Mutates: `names`, in which every hash has a letter afterwards."""

    def name(block_hash: BlockHash | None) -> str:
        return "-" if block_hash is None else names.setdefault(block_hash, chr(ord("a") + len(names)))

    rows = []
    for event in events:
        if isinstance(event, BlockStored):
            hashes = " ".join(map(name, event.block_hashes)) or "none"
            keys = " ".join("-" if each is None else ",".join(each) for each in event.extra_keys) or "-"
            what = "stored, reused" if event.reused else "stored"
            tokens = f"{event.token_ids[0]} to {event.token_ids[-1]}"
            rows.append((what, str(event.group_id), hashes, name(event.parent_block_hash), tokens, keys))
        elif isinstance(event, BlockRemoved):
            rows.append(("removed", str(event.group_id), " ".join(map(name, event.block_hashes)), "", "", ""))
        else:
            rows.append(("cleared", "", "", "", "", ""))
    return Table(("event", "group", "hashes", "parent", "tokens", "extra keys"), rows)


# -- a random engine without a model -------------------------------------------------------------------------


class Workload:
    """A scheduler and a cache manager; any sampled token will do. Its events are published after each step."""

    def __init__(self, seed: int, groups: Sequence[GroupSpec], report_full: float = 0.4) -> None:
        """`report_full`: share of the requests that have announced what they reuse."""
        self.random = rng = random.Random(seed)
        self.report_full = report_full
        config = EngineConfig(max_num_batched_tokens=rng.choice([16, 40]), max_num_seqs=rng.choice([2, 5]))
        sparse = any(group.kind in (SLIDING_WINDOW, MAMBA) for group in groups)
        self.manager = KVCacheManager(
            groups,
            1 + len(groups) * rng.choice([14, 30]),
            96,
            enable_events=True,
            retention_interval=rng.choice([None, 0, 8]) if sparse else None,
            max_tokens_per_step=config.max_num_batched_tokens,
        )
        self.scheduler = Scheduler(config, self.manager, 96)
        self.hasher = BlockHasher("xxhash_cbor", 4, "0")
        self.publisher = EventPublisher()
        self.stems = [[rng.randrange(5) for _ in range(40)] for _ in range(3)]
        self.num_arrived = 0

    @property
    def index(self) -> set[Prefix]:
        """The engine's own index."""
        return self.manager.block_pool.prefixes()

    def step(self) -> list[KVCacheEvent]:
        """Some arrive, one may leave, the cache may be cleared, and the engine takes a step. Returns: its events."""
        rng, scheduler = self.random, self.scheduler
        for _ in range(rng.choice([0, 1, 1, 2])):
            self._arrive()
        if scheduler.requests and rng.random() < 0.1:
            scheduler.finish(rng.choice(list(scheduler.requests)), RequestStatus.FINISHED_ABORTED)
        if rng.random() < 0.03:
            self.manager.reset_prefix_cache()
        output = scheduler.schedule()
        ready = [
            share.request_id
            for share in output.scheduled
            if (request := scheduler.requests[share.request_id]).num_computed_tokens == request.num_tokens
        ]
        scheduler.update(output, {request_id: [rng.randrange(5)] for request_id in ready})
        events = self.manager.take_events()
        self.publisher.publish(events)
        return events

    def _arrive(self) -> None:
        rng, name = self.random, f"r{self.num_arrived}"
        stem = rng.choice(self.stems)[: rng.randint(1, 40)]
        self.scheduler.add_request(
            Request(
                name,
                stem + [rng.randrange(5) for _ in range(rng.randint(1, 9))],
                SamplingParams(max_tokens=rng.randint(1, 12), ignore_eos=True),
                hasher=self.hasher,
                arrival=self.num_arrived,
                cache_salt=rng.choice([None, None, None, "salt"]),
                report_full=rng.random() < self.report_full,
            )
        )
        self.num_arrived += 1


def compare(make_mirror: Callable[[], MirrorLike], num_workloads: int = 12, num_steps: int = 40) -> str:
    """Feeds a mirror the events of random workloads. Returns: the first step at which it is not the index, or "".

    Workload i has the groups `MODELS[i % 6]`.
    """
    for seed in range(num_workloads):
        workload, mirror = Workload(seed, MODELS[seed % len(MODELS)]), make_mirror()
        for step in range(num_steps):
            for event in workload.step():
                mirror.apply(event)
            if set(mirror.prefixes()) != workload.index:
                return f"workload {seed}, step {step}"
    return ""


# -- mirrors of the chapter ----------------------------------------------------------------------------------


class SetMirror:
    """Keeps what was stored, forgets what was removed."""

    def __init__(self) -> None:
        self.known: set[Prefix] = set()

    def apply(self, event: KVCacheEvent) -> None:
        if isinstance(event, BlockStored):
            self.known |= {(event.group_id, block_hash) for block_hash in event.block_hashes}
        elif isinstance(event, BlockRemoved):
            self.known -= {(event.group_id, block_hash) for block_hash in event.block_hashes}
        else:
            self.known.clear()

    def prefixes(self) -> set[Prefix]:
        return set(self.known)


class CountingMirror:
    """Counts the copies. Knows nothing of `reused`, which vLLM's events do not have."""

    def __init__(self) -> None:
        self.copies: Counter[Prefix] = Counter()

    def apply(self, event: KVCacheEvent) -> None:
        if isinstance(event, BlockStored):
            self.copies.update((event.group_id, block_hash) for block_hash in event.block_hashes)
        elif isinstance(event, BlockRemoved):
            self.copies.subtract((event.group_id, block_hash) for block_hash in event.block_hashes)
        else:
            self.copies.clear()

    def prefixes(self) -> set[Prefix]:
        return {prefix for prefix, count in self.copies.items() if count > 0}


# -- a mirror that can be asked ------------------------------------------------------------------------------


class MirrorBase:
    """A mirror with the engine's own coordinator on top. What the coordinator asks its pool for is yours.

    `groups` and `hasher` are the configuration of the engine; `mirror` is what was heard of it.
    """

    def __init__(self, groups: Sequence[GroupSpec], hasher: BlockHasher, mirror: MirrorLike) -> None:
        self.hasher, self.mirror = hasher, mirror
        self.null_block = KVCacheBlock(0, is_null=True)
        self.some_block = KVCacheBlock(1)  # which block of that engine it is, nobody outside needs to know
        self.coordinator = make_coordinator(groups, cast(BlockPool, self))

    def get_cached_block(self, block_hash: BlockHash, group_ids: Sequence[int]) -> list[KVCacheBlock] | None:
        """Is this prefix held in all of these groups?"""
        raise NotImplementedError


# -- several engines -----------------------------------------------------------------------------------------


@dataclass
class Held:
    """A mirror of which only the number of its prefixes matters."""

    num_prefixes: int

    def prefixes(self) -> set[int]:
        return set(range(self.num_prefixes))


@dataclass
class Seat:
    """One engine as a rule for placing sees it. The router's `Member` has the same attributes and more."""

    num_queued_tokens: int = 0
    num_held: int = 0
    mirror: Held = field(init=False)

    def __post_init__(self) -> None:
        self.mirror = Held(self.num_held)


SMALL = RouterWorkload(num_prefixes=8, prefix_tokens=48, num_requests=36, prefixes_per_engine=3)
POOLS = RouterWorkload(prefix_tokens=48)  # 120 requests over 12 prefixes; the size of the pools is varied


def routed(workload: RouterWorkload, policy: str | Policy) -> RouterResult:
    """Runs a workload over several engines. `policy`: a name, or a rule `(members, costs) -> place in the list`."""
    engines = [_engine(workload) for _ in range(workload.num_engines)]
    router = Router(engines, policy if isinstance(policy, str) else "round_robin")
    if not isinstance(policy, str):
        router.policy = policy
    placed = [0] * workload.num_engines
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    prompts = workload.prompts()
    for i, prompt in enumerate(prompts):
        placed[router.add_request(f"request {i}", prompt, params)] += 1
        router.step()
    router.run()
    hits = sum(engine.kv_cache_manager.stats.hits for engine in engines)
    name = policy if isinstance(policy, str) else type(policy).__name__
    return RouterResult(name, router.hit_rate, sum(map(len, prompts)) - hits, placed)


def _engine(workload: RouterWorkload) -> EngineCore:
    """An engine with a random network of one layer: what is found does not depend on the answers."""
    model = ModelConfig(
        vocab_size=LAST_TOKEN_ID + 1,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_model_len=512,
    )
    decoder = Decoder(model).eval().requires_grad_(False)
    config = EngineConfig(block_size=BLOCK_SIZE, num_blocks=workload.num_blocks, enable_kv_events=True)
    return EngineCore(config, decoder)


def hybrid_news(make_mirror: Callable[[], MirrorLike], make_late: Callable[[], MirrorLike]) -> Table:
    """The tiny hybrid model in a small pool, heard from the start and from late on. Returns: how the mirrors fared."""
    llm = LLM("tiny-hybrid", block_size=8, num_blocks=60, enable_kv_events=True)
    core = cast(EngineCore, llm.engine)
    mirror, late = make_mirror(), make_late()
    rng = random.Random(0)
    texts = [[rng.randrange(10, 60) for _ in range(64)] for _ in range(4)]
    pool = core.kv_cache_manager.block_pool
    num_steps = num_equal = 0
    core.publisher.subscribe(lambda batch: _apply(mirror, batch))
    for number in range(16):
        prompt = [*rng.choice(texts), *range(10, 10 + number)]
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        core.add_request(f"r{number}", prompt, params, report_full=True)
        if number == 14:
            core.publisher.subscribe(lambda batch: _apply(late, batch))
        while core.has_unfinished_requests:
            core.step()
            num_steps, num_equal = num_steps + 1, num_equal + (mirror.prefixes() == pool.prefixes())
            if late.prefixes() - pool.prefixes():
                raise IntegrityError("the late mirror holds what the engine has not")
    num_known, num_held = len(late.prefixes()), len(pool.prefixes())
    rows = [
        ("from the start", f"equal to the index after {num_equal} of {num_steps} steps"),
        ("from late on", f"knows {num_known} of {num_held} prefixes at the end, and never one too many"),
    ]
    return Table(("mirror", "beside the engine"), rows)


def _apply(mirror: MirrorLike, batch: EventBatch) -> None:
    for event in batch.events:
        mirror.apply(event)


# -- the table of the mapping task ---------------------------------------------------------------------------

CALLS = (
    ("KVCacheManager.get_computed_blocks", "finds the longest cached prefix of a request"),
    ("BlockPool.get_new_blocks", "takes blocks from the front of the free queue"),
    ("BlockPool.touch", "takes a found block back for one more user"),
    ("BlockPool.cache_full_blocks", "puts the hashes of full blocks into the index"),
    ("BlockPool.free_blocks", "gives the blocks of a request back"),
    ("BlockPool.reset_prefix_cache", "empties the index"),
)
