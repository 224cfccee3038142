"""Replays decisions that were recorded from the real vLLM, with a pool and a queue of the reader's choice.

The traces are the files that the conformance tests replay on the whole engine. Here only what a pool and its queue
decide is compared: which blocks are found, handed out and held, and the order of the free queue. Hashes and events
are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from exercises.course import CourseError, current
from refengine.hashing import BlockHasher
from refengine.parts import load_parts
from refengine.sampling import SamplingParams
from refengine.v1.block import FreeKVCacheBlockQueue
from refengine.v1.block_pool import BlockPool
from refengine.v1.groups.spec import FULL_ATTENTION, GroupSpec
from refengine.v1.kv_cache_manager import KVCacheBlocks, KVCacheManager
from refengine.v1.request import Request, RequestStatus

# What a pool and its queue are responsible for.
COMPARED = (
    "free_queue",
    "num_free_blocks",
    "block_ids",
    "num_computed_tokens",
    "new_block_ids",
    "block_table",
    "ok",
)
POOL_TRACES = (
    "script_eviction_order",
    "script_free_order",
    "script_duplicates",
    "script_reset_cache",
    "script_out_of_blocks",
    "rand_full_bs4_tight",
)


def golden(name: str) -> dict[str, Any]:
    """A recorded trace by its name, of either generation. Raises: CourseError if there is none of that name."""
    folder = current().root / "tests" / "conformance" / "traces"
    found = sorted(folder.glob(f"v[01]*/{name}.json"))
    if not found:
        raise CourseError(f"there is no recorded trace {name!r} below tests/conformance/traces")
    trace: dict[str, Any] = json.loads(found[0].read_text(encoding="utf-8"))
    return trace


@dataclass(frozen=True)
class Replay:
    """What came of a replay. `difference` None: every answer was the recorded one."""

    name: str
    num_ops: int
    difference: str | None = None

    def __repr__(self) -> str:
        said = "all equal" if self.difference is None else self.difference
        return f"{self.name}: {self.num_ops} operations, {said}"


def replay(name: str, parts: Any = None) -> Replay:
    """Replays a V1 trace with one full-attention group. `parts` as in `LLM(parts=...)`.

    Raises: PartError if one of the parts fails under guard.
    """
    chosen = load_parts(parts)
    return replay_bare(name, chosen.block_pool, chosen.free_queue)


def replay_bare(name: str, pool_class: Any = BlockPool, queue_class: Any = FreeKVCacheBlockQueue) -> Replay:
    """The same without guard: an error of the part reaches the caller."""
    trace = golden(name)
    driver = _Driver(trace["config"], pool_class, queue_class)
    for number, op in enumerate(trace["ops"]):
        answer = driver.apply(op)
        for key in COMPARED:
            if key in op["expect"] and not _same(op["expect"][key], answer[key]):
                where = f"operation {number}, {op['op']}{'(' + op['id'] + ')' if 'id' in op else ''}"
                said = f"{where}: {key} is {answer[key]}, vLLM says {op['expect'][key]}"
                return Replay(name, number + 1, said)
    return Replay(name, len(trace["ops"]))


class _Driver:
    """One KV cache manager and the requests of a trace; one method per operation of the trace."""

    def __init__(self, config: Mapping[str, Any], pool_class: Any, queue_class: Any) -> None:
        group = config["groups"][0]
        if len(config["groups"]) != 1 or group["kind"] != "full":
            raise CourseError("only traces with one full-attention group are replayed here")
        self.manager = KVCacheManager(
            [GroupSpec(0, FULL_ATTENTION, group["block_size"])],
            config["num_blocks"],
            config["max_model_len"],
            enable_caching=config["enable_caching"],
            watermark=config["watermark"],
            make_block_pool=partial(pool_class, make_free_queue=queue_class),
        )
        self.hasher = BlockHasher("sha256_cbor", group["block_size"], seed="0")
        self.requests: dict[str, Request] = {}
        self.lookups: dict[str, tuple[KVCacheBlocks, int]] = {}

    def apply(self, op: dict[str, Any]) -> dict[str, Any]:
        answer = getattr(self, op["op"])(op) or {}
        pool = self.manager.block_pool
        return answer | {
            "num_free_blocks": pool.num_free_blocks,
            "free_queue": [block.block_id for block in pool.free_queue],
        }

    def new_request(self, op: dict[str, Any]) -> None:
        self.requests[op["id"]] = Request(
            op["id"],
            op["prompt"],
            SamplingParams(),
            hasher=self.hasher,
            cache_salt=op.get("cache_salt"),
            skip_reading_prefix_cache=op.get("skip_reading", False),
        )

    def lookup(self, op: dict[str, Any]) -> dict[str, Any]:
        hits, length, _ = self.manager.get_computed_blocks(self.requests[op["id"]])
        self.lookups[op["id"]] = hits, length
        return {"block_ids": hits.ids(), "num_computed_tokens": length}

    def allocate(self, op: dict[str, Any]) -> dict[str, Any]:
        request = self.requests[op["id"]]
        hits, length = self.lookups[op["id"]] if op["use_lookup"] else (None, 0)
        new = self.manager.allocate_slots(
            request,
            op["num_new_tokens"],
            hits,
            length,
            num_lookahead_tokens=op.get("num_lookahead_tokens", 0),
            full_sequence_must_fit=op.get("full_sequence_must_fit", False),
        )
        if new is not None:
            request.status = RequestStatus.RUNNING
        return {
            "new_block_ids": None if new is None else new.ids(),
            "block_table": self.manager.block_ids(op["id"]),
        }

    def set_computed(self, op: dict[str, Any]) -> None:
        self.requests[op["id"]].num_computed_tokens = op["num_computed_tokens"]

    def append_tokens(self, op: dict[str, Any]) -> None:
        self.requests[op["id"]].append(op["token_ids"])

    def free(self, op: dict[str, Any]) -> None:
        self.manager.free(self.requests.pop(op["id"]))

    def preempt(self, op: dict[str, Any]) -> None:
        request = self.requests[op["id"]]
        self.manager.free(request)
        request.num_computed_tokens, request.status = 0, RequestStatus.PREEMPTED

    def evict(self, op: dict[str, Any]) -> None:
        self.manager.block_pool.evict_blocks([op["block_id"]])

    def reset_prefix_cache(self, op: dict[str, Any]) -> dict[str, Any]:
        return {"ok": self.manager.reset_prefix_cache()}

    def new_step(self, op: dict[str, Any]) -> None:
        """Only Mamba groups care."""

    def take_events(self, op: dict[str, Any]) -> None:
        """Events are not compared here."""


def _same(expected: Any, got: Any) -> bool:
    """Equality of JSON values; a tuple counts as a list."""
    return bool(json.loads(json.dumps(got)) == expected)
