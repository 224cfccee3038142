"""Drives the KV cache manager through the operations of FORMAT_V1.md."""

from __future__ import annotations

from typing import Any

from refengine.errors import ConfigError
from refengine.hashing import Adapter, BlockHash, BlockHasher
from refengine.sampling import SamplingParams
from refengine.v1.events import BlockRemoved, BlockStored, KVCacheEvent
from refengine.v1.groups.spec import GroupSpec
from refengine.v1.kv_cache_manager import KVCacheBlocks, KVCacheManager
from refengine.v1.request import Request, RequestStatus
from tests.conformance.replay import NotSupported

KINDS = {
    "full": "full_attention",
    "sliding_window": "sliding_window",
    "chunked_local": "chunked_local_attention",
    "mamba": "mamba",
}


def group_specs(config: dict[str, Any], block_size: int | None = None) -> list[GroupSpec]:
    """The trace's groups; a scheduler trace states one block size for all of them."""
    return [
        GroupSpec(
            i,
            KINDS[group["kind"]],
            block_size or group["block_size"],
            group.get("window"),
            group.get("chunk"),
        )
        for i, group in enumerate(config["groups"])
    ]


class KVManagerDriver:
    """One KVCacheManager and the requests of the trace. Hashes get the names 0, 1, 2, ... as they first appear."""

    def __init__(self, config: dict[str, Any]) -> None:
        try:
            self.manager = KVCacheManager(
                group_specs(config),
                config["num_blocks"],
                config["max_model_len"],
                enable_caching=config["enable_caching"],
                enable_events=config["enable_events"],
                watermark=config["watermark"],
                drop_last=config["use_eagle"],
                retention_interval=config["retention_interval"],
            )
        except ConfigError as error:
            raise NotSupported(str(error)) from None
        self.hasher = BlockHasher("sha256_cbor", config["hash_block_size"], seed="0")
        self.requests: dict[str, Request] = {}
        self.lookups: dict[str, tuple[KVCacheBlocks, int, int]] = {}
        self.names: dict[BlockHash, int] = {}

    def apply(self, op: dict[str, Any]) -> dict[str, Any]:
        answer = getattr(self, op["op"])(op) or {}
        self.manager.check_integrity()
        pool = self.manager.block_pool
        return answer | {
            "num_free_blocks": pool.num_free_blocks,
            "usage": round(self.manager.usage, 9),
            "free_queue": [block.block_id for block in pool.free_queue],
        }

    def new_request(self, op: dict[str, Any]) -> dict[str, Any]:
        request = self.requests[op["id"]] = Request(
            op["id"],
            op["prompt"],
            SamplingParams(),
            hasher=self.hasher,
            adapter=Adapter(op["lora"]["name"], op["lora"]["path"], op["lora"]["id"])
            if op.get("lora")
            else None,
            cache_salt=op.get("cache_salt"),
            skip_reading_prefix_cache=op.get("skip_reading", False),
            report_full=op.get("report_mode") == "full",
        )
        return {"hashes": self._names(request.block_hashes)}

    def lookup(self, op: dict[str, Any]) -> dict[str, Any]:
        hits, length, boundary = self.lookups[op["id"]] = self.manager.get_computed_blocks(
            self.requests[op["id"]]
        )
        return {"block_ids": hits.ids(), "num_computed_tokens": length, "shared_prefix_boundary": boundary}

    def allocate(self, op: dict[str, Any]) -> dict[str, Any]:
        request = self.requests[op["id"]]
        hits, length, boundary = self.lookups[op["id"]] if op["use_lookup"] else (None, 0, 0)
        new_blocks = self.manager.allocate_slots(
            request,
            op["num_new_tokens"],
            hits,
            length,
            shared_prefix_boundary=boundary,
            num_lookahead_tokens=op.get("num_lookahead_tokens", 0),
            full_sequence_must_fit=op.get("full_sequence_must_fit", False),
        )
        if new_blocks is not None:
            request.status = RequestStatus.RUNNING
        return {
            "new_block_ids": None if new_blocks is None else new_blocks.ids(),
            "block_table": self.manager.block_ids(op["id"]),
        }

    def set_computed(self, op: dict[str, Any]) -> None:
        self.requests[op["id"]].num_computed_tokens = op["num_computed_tokens"]

    def append_tokens(self, op: dict[str, Any]) -> dict[str, Any]:
        request = self.requests[op["id"]]
        request.append(op["token_ids"])
        return {"hashes": self._names(request.block_hashes)}

    def free(self, op: dict[str, Any]) -> None:
        self.manager.free(self.requests.pop(op["id"]))

    def preempt(self, op: dict[str, Any]) -> None:
        request = self.requests[op["id"]]
        self.manager.free(request)
        request.num_computed_tokens, request.status = 0, RequestStatus.PREEMPTED

    def new_step(self, op: dict[str, Any]) -> None:
        self.manager.begin_step()

    def evict(self, op: dict[str, Any]) -> None:
        self.manager.block_pool.evict_blocks([op["block_id"]])

    def reset_prefix_cache(self, op: dict[str, Any]) -> dict[str, Any]:
        return {"ok": self.manager.reset_prefix_cache()}

    def take_events(self, op: dict[str, Any]) -> dict[str, Any]:
        return {"events": [self._event(event) for event in self.manager.take_events()]}

    def take_copies(self, op: dict[str, Any]) -> dict[str, Any]:
        return {"copies": []}  # only partial hits copy blocks

    def _names(self, hashes: list[BlockHash] | tuple[BlockHash, ...]) -> list[int]:
        return [self.names.setdefault(digest, len(self.names)) for digest in hashes]

    def _event(self, event: KVCacheEvent) -> dict[str, Any]:
        if isinstance(event, BlockRemoved):
            return {"type": "removed", "hashes": self._names(event.block_hashes), "group": event.group_id}
        if not isinstance(event, BlockStored):
            return {"type": "cleared"}
        stored = {
            "type": "stored",
            "hashes": self._names(event.block_hashes),
            "parent": None if event.parent_block_hash is None else self._names((event.parent_block_hash,))[0],
            "token_ids": event.token_ids,
            "block_size": event.block_size,
            "group": event.group_id,
            "spec_kind": event.kind,
            "window": event.window,
            "extra_keys": event.extra_keys or None,
        }
        adapter = {} if event.lora_name is None else {"lora_name": event.lora_name, "lora_id": event.lora_id}
        return stored | adapter
