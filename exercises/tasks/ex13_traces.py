"""Replays vLLM's recorded decisions about several groups, with a coordinator of the reader's choice."""

from __future__ import annotations

from typing import Any

from exercises.tasks.ex03_traces import COMPARED, Replay, _Driver, _same, golden
from refengine.hashing import Adapter, BlockHasher
from refengine.parts import Parts, load_parts
from refengine.sampling import SamplingParams
from refengine.v1.coordinator import MANAGERS
from refengine.v1.groups.spec import CHUNKED_LOCAL, FULL_ATTENTION, MAMBA, SLIDING_WINDOW, GroupSpec
from refengine.v1.kv_cache_manager import KVCacheBlocks, KVCacheManager
from refengine.v1.request import Request, RequestStatus

KINDS = {
    "full": FULL_ATTENTION,
    "sliding_window": SLIDING_WINDOW,
    "chunked_local": CHUNKED_LOCAL,
    "mamba": MAMBA,
}
CHECKED = (*COMPARED, "shared_prefix_boundary")
GROUP_TRACES = (
    "script_hybrid_basic",
    "script_hybrid_junction",
    "script_mamba_junction",
    "script_mamba_same_step",
    "rand_hybrid",
    "rand_hybrid_2windows",
    "rand_hybrid_retention0",
    "rand_hybrid_sizes",
    "rand_mamba",
    "kv_equal_groups_00",
    "kv_equal_groups_01",
    "kv_mixed_00",
)


def replay(name: str, parts: Any = None) -> Replay:
    """Replays a V1 trace of the cache manager, with any groups. `parts` as in `LLM(parts=...)`.

    Raises: PartError if the part fails under guard.
    """
    return replay_bare(name, load_parts(parts))


def replay_bare(name: str, parts: Parts) -> Replay:
    """The same with parts as they are: without guard, an error of the part reaches the caller."""
    trace = golden(name)
    driver = GroupDriver(trace["config"], parts)
    for number, op in enumerate(trace["ops"]):
        answer = driver.apply(op)
        for key in CHECKED:
            if key in op["expect"] and not _same(op["expect"][key], answer[key]):
                where = f"operation {number}, {op['op']}{'(' + op['id'] + ')' if 'id' in op else ''}"
                said = f"{where}: {key} is {answer[key]}, vLLM says {op['expect'][key]}"
                return Replay(name, number + 1, said)
    return Replay(name, len(trace["ops"]))


class GroupDriver(_Driver):
    """The driver of exercise 03 on several groups, with the boundary handed on from lookup to allocation."""

    def __init__(self, config: dict[str, Any], parts: Parts, enable_events: bool = False) -> None:
        self.manager = KVCacheManager(
            [
                GroupSpec(i, KINDS[g["kind"]], g["block_size"], g.get("window"), g.get("chunk"))
                for i, g in enumerate(config["groups"])
            ],
            config["num_blocks"],
            config["max_model_len"],
            enable_caching=config["enable_caching"],
            enable_events=enable_events,
            watermark=config["watermark"],
            drop_last=config["use_eagle"],
            retention_interval=config["retention_interval"],
            managers={
                **MANAGERS,
                FULL_ATTENTION: parts.full_attention,
                SLIDING_WINDOW: parts.sliding_window,
            },
            make_hybrid=parts.coordinator,
        )
        self.hasher = BlockHasher("sha256_cbor", config["hash_block_size"], seed="0")
        self.requests = {}
        self.lookups = {}
        self.boundaries: dict[str, int] = {}  # by request: the shared-prefix boundary of its last lookup

    def new_request(self, op: dict[str, Any]) -> None:
        lora = op.get("lora")
        self.requests[op["id"]] = Request(
            op["id"],
            op["prompt"],
            SamplingParams(),
            hasher=self.hasher,
            adapter=Adapter(lora["name"], lora["path"], lora["id"]) if lora else None,
            cache_salt=op.get("cache_salt"),
            skip_reading_prefix_cache=op.get("skip_reading", False),
            report_full=op.get("report_mode") == "full",
        )

    def lookup(self, op: dict[str, Any]) -> dict[str, Any]:
        hits, length, boundary = self.manager.get_computed_blocks(self.requests[op["id"]])
        self.lookups[op["id"]], self.boundaries[op["id"]] = (hits, length), boundary
        return {"block_ids": hits.ids(), "num_computed_tokens": length, "shared_prefix_boundary": boundary}

    def allocate(self, op: dict[str, Any]) -> dict[str, Any]:
        request, hits, length, boundary = self.requests[op["id"]], None, 0, 0
        if op["use_lookup"]:
            (hits, length), boundary = self.lookups[op["id"]], self.boundaries[op["id"]]
        new: KVCacheBlocks | None = self.manager.allocate_slots(
            request,
            op["num_new_tokens"],
            hits,
            length,
            shared_prefix_boundary=boundary,
            num_lookahead_tokens=op.get("num_lookahead_tokens", 0),
            full_sequence_must_fit=op.get("full_sequence_must_fit", False),
        )
        if new is not None:
            request.status = RequestStatus.RUNNING
        return {
            "new_block_ids": None if new is None else new.ids(),
            "block_table": self.manager.block_ids(op["id"]),
        }

    def new_step(self, op: dict[str, Any]) -> None:
        self.manager.begin_step()

    def take_copies(self, op: dict[str, Any]) -> None:
        """Only hits inside a block copy blocks."""
