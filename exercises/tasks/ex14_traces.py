"""Feeds the events that were recorded from vLLM to a mirror, and compares it with the index they came from.

A trace holds the events but not the index. So its operations are replayed on our cache manager, which answers every
one of them as vLLM did, and whose index is vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from exercises.tasks.ex03_traces import _same, golden
from exercises.tasks.ex13_traces import GroupDriver
from exercises.tasks.ex14_scene import MirrorLike
from refengine.errors import IntegrityError
from refengine.hashing import BlockHash
from refengine.parts import Parts
from refengine.v1.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from refengine.v1.request import Request

# No request of these announces what it reuses. vLLM's event does not say which kind it is.
EVENT_TRACES = (
    "script_duplicates",
    "script_reset_cache",
    "script_hybrid_basic",
    "rand_full_events",
    "rand_swa_bs2",
    "rand_mamba_retention8",
)


@dataclass(frozen=True)
class Listened:
    """What came of a trace: how often events were taken, and how the mirror differed from the index then."""

    name: str
    num_events: int
    num_compared: int
    missing: int  # prefixes that the index has and the mirror has not, summed over all comparisons
    extra: int  # and the other way round

    def __repr__(self) -> str:
        same = "always the index"
        differs = f"{self.missing} prefixes missing, {self.extra} too many"
        said = differs if self.missing or self.extra else same
        return f"{self.name}: {self.num_events} events, compared {self.num_compared} times, {said}"


def listen(name: str, make_mirror: Callable[[], MirrorLike]) -> Listened:
    """Feeds the recorded events of a V1 trace to a mirror, and compares at each place where they were taken.

    Raises: IntegrityError if our cache manager decides otherwise than vLLM, since its index is not vLLM's then.
    """
    trace = golden(name)
    driver, mirror = _EventDriver(trace["config"]), make_mirror()
    num_events = num_compared = missing = extra = 0
    for op in trace["ops"]:
        answer = driver.apply(op)
        if not all(_same(op["expect"][key], answer[key]) for key in answer.keys() & op["expect"].keys()):
            raise IntegrityError(f"{name}: our cache manager and vLLM differ at {op['op']}")
        if op["op"] != "take_events":
            continue
        for event in op["expect"]["events"]:
            mirror.apply(driver.event(event))
        known, index = set(mirror.prefixes()), driver.manager.block_pool.prefixes()
        num_events, num_compared = num_events + len(op["expect"]["events"]), num_compared + 1
        missing, extra = missing + len(index - known), extra + len(known - index)
    return Listened(name, num_events, num_compared, missing, extra)


class _EventDriver(GroupDriver):
    """The driver of exercise 13, with events. Knows which digest a number in the trace stands for."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config, Parts(), enable_events=True)
        self.digests: dict[int, BlockHash] = {}

    def new_request(self, op: dict[str, Any]) -> None:
        super().new_request(op)
        self._learn(self.requests[op["id"]], op)

    def append_tokens(self, op: dict[str, Any]) -> None:
        super().append_tokens(op)
        self._learn(self.requests[op["id"]], op)

    def take_events(self, op: dict[str, Any]) -> None:
        """Ours are the same ones, and thrown away: the mirror gets vLLM's."""
        self.manager.take_events()

    def event(self, recorded: dict[str, Any]) -> KVCacheEvent:
        """A recorded event as one of ours."""
        if recorded["type"] == "cleared":
            return AllBlocksCleared()
        hashes = tuple(self.digests[number] for number in recorded["hashes"])
        if recorded["type"] == "removed":
            return BlockRemoved(hashes, recorded["group"])
        parent = recorded["parent"]
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=None if parent is None else self.digests[parent],
            token_ids=tuple(recorded["token_ids"]),
            block_size=recorded["block_size"],
            group_id=recorded["group"],
            kind=recorded["spec_kind"],
            window=recorded["window"],
            extra_keys=tuple(keys and tuple(keys) for keys in recorded["extra_keys"] or ()),
        )

    def _learn(self, request: Request, op: dict[str, Any]) -> None:
        self.digests.update(zip(op["expect"]["hashes"], request.block_hashes, strict=True))
