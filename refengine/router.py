"""Several engines, one queue of requests: where should each one run?

A request is cheap where its prefix lies. The router knows where that is from the engines' events alone: it keeps
one mirror per engine (`refengine.v1.mirror`), hashes each prompt as the engines do, and compares what the prompt
would cost on each of them. Knows token ids only, like an engine.
vLLM: none inside; routers like this one stand in front of several vLLM servers and listen to their KV events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from refengine.config import one_of
from refengine.errors import ConfigError, RequestError
from refengine.hashing import BlockHash, BlockHasher
from refengine.outputs import StepOutput
from refengine.sampling import SamplingParams
from refengine.v1.engine import EngineCore
from refengine.v1.mirror import PrefixMirror

POLICIES = ("cache_aware", "round_robin")


@dataclass
class Placed:
    """A request that was sent somewhere and has not finished."""

    engine: int
    num_uncached: int  # prompt tokens that its engine is expected to compute
    block_hashes: Sequence[BlockHash]


@dataclass
class Member:
    """One engine as the router knows it: a mirror of its index, and what was sent there and is not done."""

    core: EngineCore
    mirror: PrefixMirror
    num_queued_tokens: int = 0  # prompt tokens of unfinished requests, without what was found cached
    # Prefixes of unfinished requests: they will be in the mirror once the engine has run them. Without this,
    # requests that arrive together would be spread before the first of them has left a trace.
    promised: Counter[BlockHash] = field(default_factory=Counter)

    def expected_hit(self, block_hashes: Sequence[BlockHash], max_length: int, block_size: int) -> int:
        """Tokens that a prompt with these hashes will find there, unless they are evicted first."""
        known = self.mirror.find_longest_cache_hit(block_hashes, max_length)
        coming = 0
        for block_hash in block_hashes[: max_length // block_size]:
            if block_hash not in self.promised:
                break
            coming += block_size
        return max(known, coming)


class Policy(Protocol):
    """Decides on which engine a request runs."""

    def __call__(self, members: Sequence[Member], costs: Sequence[int]) -> int:
        """`costs`: prompt tokens that each engine would have to compute. Returns: the place in the list."""


class RoundRobin:
    """One after the other, whatever they hold."""

    def __init__(self) -> None:
        self.num_placed = 0

    def __call__(self, members: Sequence[Member], costs: Sequence[int]) -> int:
        choice = self.num_placed % len(members)
        self.num_placed += 1
        return choice


class CacheAware:
    """Where the least is lost: by this request, and by those that come after it.

    It waits for the tokens that are queued there already and for its own; and its own are waited for once more,
    by whoever comes next. So a request follows its prefix, but a prefix that everybody asks for does not drown its
    engine: once the queue there is worth two computations of it, another engine computes it too. Where all is
    equal, the engine that holds least takes it, so that prefixes spread over all pools.
    """

    def __call__(self, members: Sequence[Member], costs: Sequence[int]) -> int:
        losses = [
            (member.num_queued_tokens + 2 * cost, len(member.mirror.prefixes()))
            for member, cost in zip(members, costs, strict=True)
        ]
        return losses.index(min(losses))


class Router:
    """Requests in, tokens out, over several V1 engines of one process that all hold the same model."""

    def __init__(self, engines: Sequence[EngineCore], policy: str = "cache_aware") -> None:
        """Raises: ConfigError for engines without events, or whose hashes differ."""
        one_of("policy", policy, POLICIES)
        self.hasher = _common_hasher(engines)
        self.members = [_member(engine) for engine in engines]
        self.policy: Policy = CacheAware() if policy == "cache_aware" else RoundRobin()
        self.placed: dict[str, Placed] = {}

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        cache_salt: str | None = None,
    ) -> int:
        """Sends a request to one engine. Returns: its place in the list. Mutates: that engine's waiting queue.

        Raises: RequestError, with nothing changed, if the engine refuses it or another one still runs that id.
        """
        if request_id in self.placed:
            raise RequestError(request_id, "the id is in use by an unfinished request")
        hashes: list[BlockHash] = []
        self.hasher.extend(hashes, prompt_token_ids, cache_salt=cache_salt)
        max_length = len(prompt_token_ids) - 1  # one token is always computed
        costs = [
            len(prompt_token_ids) - member.expected_hit(hashes, max_length, self.hasher.block_size)
            for member in self.members
        ]
        choice = self.policy(self.members, costs)
        member = self.members[choice]
        member.core.add_request(request_id, prompt_token_ids, params, cache_salt=cache_salt)
        self.placed[request_id] = Placed(choice, costs[choice], hashes)
        member.num_queued_tokens += costs[choice]
        member.promised.update(hashes)
        return choice

    def step(self) -> list[StepOutput]:
        """One step of every engine that has work, one after the other. Returns: what they added.

        Mutates: the engines; their events reach the mirrors at the end of each step.
        """
        outputs: list[StepOutput] = []
        for member in self.members:
            if member.core.has_unfinished_requests:
                outputs += member.core.step()
        for output in outputs:
            # An engine may have requests of its own, which came in past the router.
            if output.finish_reason is not None and output.request_id in self.placed:
                self._forget(output.request_id)
        return outputs

    def abort(self, request_id: str) -> None:
        """Ends a request at once. Mutates: its engine. A request that is not there (any more) is fine."""
        if request_id in self.placed:
            self.members[self.placed[request_id].engine].core.finish(request_id)
            self._forget(request_id)

    def run(self) -> dict[str, list[int]]:
        """Steps until nothing is left to do. Returns: the new tokens of each request."""
        tokens: dict[str, list[int]] = {}
        while any(member.core.has_unfinished_requests for member in self.members):
            for output in self.step():
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
        return tokens

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens that were found in some engine's cache, 0 to 1."""
        stats = [member.core.kv_cache_manager.stats for member in self.members]
        queries = sum(each.queries for each in stats)
        return sum(each.hits for each in stats) / queries if queries else 0.0

    def _forget(self, request_id: str) -> None:
        placed = self.placed.pop(request_id)
        member = self.members[placed.engine]
        member.num_queued_tokens -= placed.num_uncached
        member.promised -= Counter(placed.block_hashes)


def _member(engine: EngineCore) -> Member:
    groups = [group.spec for group in engine.kv_cache_manager.coordinator.groups]
    mirror = PrefixMirror(groups)
    for batch in engine.publisher.replay():
        mirror.receive(batch)
    engine.publisher.subscribe(mirror.receive)
    return Member(engine, mirror)


def _common_hasher(engines: Sequence[EngineCore]) -> BlockHasher:
    """The hasher of all these engines. Raises: ConfigError unless they hash alike and publish events."""
    if not engines:
        raise ConfigError("a router needs at least one engine")
    if not all(isinstance(engine, EngineCore) for engine in engines):
        raise ConfigError("a router stands before V1 engines, `LLM(...).engine`; V0 publishes no events")
    if len(set(map(id, engines))) < len(engines):
        raise ConfigError("the same engine is in the list twice")
    hashers = [engine.hasher for engine in engines]
    first = hashers[0]
    for hasher, engine in zip(hashers, engines, strict=True):
        if hasher is None or first is None or not engine.config.enable_kv_events:
            raise ConfigError("every engine behind a router needs enable_prefix_caching and enable_kv_events")
        if (
            hasher.hash_block(None, (1,)) != first.hash_block(None, (1,))
            or hasher.block_size != first.block_size
        ):
            raise ConfigError(
                "the engines hash the same tokens differently: give all the same block_size, hash_algorithm "
                "and hash_seed"
            )
    assert first is not None  # checked with the first engine
    return first
