"""Small engines for directed tests, in the words of the shared cases: start, finish, preempt, resume, look up.

"Start R" looks up the cache, admits, allocates for all remaining tokens and counts one step; "finish R" gives
R's blocks back. After every operation the structures check themselves, so that a test may look at what it is
about and still notices when something else breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from refengine.config import EngineConfig
from refengine.hashing import BlockHasher
from refengine.sampling import SamplingParams
from refengine.trace.observer import MarkKind, PoolSnapshot
from refengine.v1.groups.spec import FULL_ATTENTION, GroupSpec
from refengine.v1.kv_cache_manager import KVCacheManager
from refengine.v1.request import Request, RequestStatus
from refengine.v1.scheduler import Scheduler
from refengine.v1.scheduler_output import SchedulerOutput

ENDLESS = 1000  # tokens: no directed test comes near it

# The tests of the known-wrong engines switch this off: there, the directed test itself has to see the mistake.
CHECK_INTEGRITY = True


def numbers(first: int, last: int) -> list[int]:
    """The tokens `[first..last]` of the cases, both ends included."""
    return list(range(first, last + 1))


def make_hasher(block_size: int = 4) -> BlockHasher:
    """A hasher that does not depend on the environment."""
    return BlockHasher("sha256", block_size, seed="0")


class Cache:
    """A KV cache manager with one full-attention group and the usable blocks 1..`usable`."""

    def __init__(
        self,
        usable: int,
        block_size: int = 4,
        *,
        max_model_len: int = ENDLESS,
        hasher: BlockHasher | None = None,
        enable_caching: bool = True,
        **options: Any,
    ) -> None:
        group = GroupSpec(0, FULL_ATTENTION, block_size)
        self.manager = KVCacheManager(
            [group], usable + 1, max_model_len, enable_caching=enable_caching, **options
        )
        self.pool = self.manager.block_pool
        self.hasher = (hasher or make_hasher(block_size)) if enable_caching else None
        self.requests: dict[str, Request] = {}

    def add(self, request_id: str, tokens: Sequence[int], **options: Any) -> Request:
        """A waiting request; holds nothing yet."""
        request = Request(request_id, tokens, SamplingParams(), hasher=self.hasher, **options)
        self.requests[request_id] = request
        return request

    def start(self, request_id: str, tokens: Sequence[int], **options: Any) -> int | None:
        """Looks up, admits, allocates for all remaining tokens, one step. Returns: the hit, None if refused."""
        self.add(request_id, tokens, **options)
        return self.resume(request_id)

    def resume(self, request_id: str, num_tokens: int | None = None, **options: Any) -> int | None:
        """`start` for a request that exists, or only its first `num_tokens` tokens after the hit."""
        request = self.requests[request_id]
        hits, num_hit_tokens, boundary = self.manager.get_computed_blocks(request)
        options = {"shared_prefix_boundary": boundary, **options}
        chunk = request.num_tokens - num_hit_tokens if num_tokens is None else num_tokens
        new = self.manager.allocate_slots(request, chunk, hits, num_hit_tokens, **options)
        self.verify()
        if new is None:
            return None
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_hit_tokens + chunk
        return num_hit_tokens

    def run(self, request_id: str, num_tokens: int | None = None, **options: Any) -> bool:
        """One more step of a running request. Returns: whether it got its slots."""
        request = self.requests[request_id]
        chunk = request.num_tokens - request.num_computed_tokens if num_tokens is None else num_tokens
        new = self.manager.allocate_slots(request, chunk, **options)
        self.verify()
        if new is not None:
            request.num_computed_tokens += chunk
        return new is not None

    def decode(self, request_id: str, *tokens: int) -> bool:
        """Appends sampled tokens one at a time, each with its step. Returns: whether the last one got a slot."""
        got = True
        for token in tokens:
            self.requests[request_id].append([token])
            got = self.run(request_id)
        return got

    def finish(self, request_id: str) -> None:
        self.manager.free(self.requests.pop(request_id))
        self.verify()

    def preempt(self, request_id: str) -> None:
        request = self.requests[request_id]
        self.manager.free(request)
        request.num_computed_tokens, request.status = 0, RequestStatus.PREEMPTED
        self.verify()

    def hit(self, tokens: Sequence[int], **options: Any) -> int:
        """Tokens that a request with these tokens would find, without starting it."""
        request = Request("looks", tokens, SamplingParams(), hasher=self.hasher, **options)
        return self.manager.get_computed_blocks(request)[1]

    def table(self, request_id: str) -> list[int]:
        return self.manager.block_ids(request_id)[0]

    def counts(self, *block_ids: int) -> list[int]:
        return [self.pool.blocks[block_id].ref_count for block_id in block_ids]

    @property
    def free(self) -> list[int]:
        """The free queue, front first."""
        return [block.block_id for block in self.pool.free_queue]

    @property
    def hashed(self) -> list[int]:
        """Blocks that carry a hash, in the order of their ids."""
        return [block.block_id for block in self.pool.blocks if block.block_hash is not None]

    def verify(self) -> None:
        if CHECK_INTEGRITY:
            self.manager.check_integrity()


class Steps:
    """A scheduler without a model: every request that has computed all it has samples a fresh token."""

    def __init__(
        self,
        usable: int,
        block_size: int = 4,
        *,
        max_model_len: int = ENDLESS,
        eos: Sequence[int] = (),
        observer: Any = None,
        **options: Any,
    ) -> None:
        config = EngineConfig(block_size=block_size, num_blocks=usable + 1, **options)
        self.manager = KVCacheManager(
            [GroupSpec(0, FULL_ATTENTION, block_size)],
            usable + 1,
            max_model_len,
            enable_caching=config.enable_prefix_caching,
            watermark=config.watermark,
            observer=observer,
        )
        self.scheduler = Scheduler(config, self.manager, max_model_len, eos, observer)
        self.hasher = make_hasher(block_size) if config.enable_prefix_caching else None
        self.fresh = 10_000
        self.num_added = 0

    def add(
        self, request_id: str, tokens: Sequence[int], max_tokens: int = ENDLESS, **options: Any
    ) -> Request:
        """Enters a request. Sampling options go by their names, the rest to the request."""
        params = {name: options.pop(name) for name in ("ignore_eos", "stop_token_ids") if name in options}
        self.num_added += 1
        request = Request(
            request_id,
            tokens,
            SamplingParams(max_tokens=max_tokens, **params),
            hasher=self.hasher,
            arrival=self.num_added,
            **options,
        )
        self.scheduler.add_request(request)
        return request

    def step(self, sampled: Mapping[str, int] | None = None) -> dict[str, tuple[int, int]]:
        """One step; `sampled` overrides fresh tokens. Returns: (first position, tokens) of each scheduled request."""
        self.output: SchedulerOutput = self.scheduler.schedule()
        self.verify()
        tokens = {}
        for share in self.output.scheduled:
            request = self.scheduler.requests[share.request_id]
            if request.num_computed_tokens == request.num_tokens:
                self.fresh += 1
                tokens[share.request_id] = [(sampled or {}).get(share.request_id, self.fresh)]
        self.scheduler.update(self.output, tokens)
        self.verify()
        return {s.request_id: (s.num_computed_tokens, s.num_tokens) for s in self.output.scheduled}

    def kinds(self) -> dict[str, str]:
        """Of the last step: new, resumed or running."""
        return {share.request_id: share.kind for share in self.output.scheduled}

    def table(self, request_id: str) -> list[int]:
        return self.manager.block_ids(request_id)[0]

    @property
    def running(self) -> list[str]:
        return [request.request_id for request in self.scheduler.running]

    @property
    def waiting(self) -> list[str]:
        return [request.request_id for request in self.scheduler.waiting]

    @property
    def num_free(self) -> int:
        return self.manager.block_pool.num_free_blocks

    def verify(self) -> None:
        if CHECK_INTEGRITY:
            self.scheduler.check_integrity()


class Marks:
    """An observer that keeps (kind, request id, facts) of every mark."""

    def __init__(self) -> None:
        self.all: list[tuple[str, str, dict[str, Any]]] = []
        self.num_steps = 0

    def begin_step(self) -> None:
        self.num_steps += 1

    def mark(self, kind: MarkKind, request_id: str, **facts: Any) -> None:
        self.all.append((kind, request_id, facts))

    def attach(
        self, engine: str, num_blocks: int, block_size: int, snapshot: Callable[[], PoolSnapshot]
    ) -> None:
        self.snapshot = snapshot

    def end_step(self) -> None:
        self.pool = self.snapshot()

    def of(self, kind: MarkKind, request_id: str | None = None) -> list[dict[str, Any]]:
        """The facts of all marks of a kind, of one request or of all."""
        return [facts for k, r, facts in self.all if k == kind and request_id in (None, r)]
