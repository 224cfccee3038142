"""Drives the real vLLM 0.33.0, in process and without a model, behind the operations of a trace.

It is the judge of the harness itself: a trace that vLLM does not replay was recorded or read wrongly.
Only `against_vllm.py` imports this module, in an environment of its own that has vLLM installed.
Block pool, KV-cache manager and scheduler are vLLM's; the sampled tokens come from the trace.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from tests.conformance.vllm_objects import kv_cache_config, new_request, scheduler_vllm_config

logging.disable(logging.WARNING)  # a refused reset, for example, is an answer here and no incident

Op = dict[str, Any]
Answer = dict[str, Any]


def free_queue(manager: KVCacheManager) -> list[int]:
    """Block ids in the order in which they will be handed out."""
    return [block.block_id for block in manager.block_pool.free_block_queue.get_all_free_blocks()]


class HashNames:
    """Names hashes by small integers in order of first appearance."""

    def __init__(self) -> None:
        self._names: dict[int, int] = {}

    def of(self, block_hash: bytes | int) -> int:
        """The name. Events carry only the low 64 bits of a digest, so those are the key."""
        number = block_hash if isinstance(block_hash, int) else int.from_bytes(block_hash, "big")
        return self._names.setdefault(number & (1 << 64) - 1, len(self._names))


class VllmKVManager:
    """Driver of the `kv_manager` traces."""

    def __init__(self, config: dict[str, Any]) -> None:
        init_none_hash(sha256_cbor)
        self._hash_block_size: int = config["hash_block_size"]
        self._manager = KVCacheManager(
            kv_cache_config(config),
            max_model_len=config["max_model_len"],
            scheduler_block_size=config["scheduler_block_size"],
            hash_block_size=config["hash_block_size"],
            enable_caching=config["enable_caching"],
            use_eagle=config["use_eagle"],
            enable_kv_cache_events=config["enable_events"],
            watermark=config["watermark"],
        )
        self._requests: dict[str, Request] = {}
        self._lookups: dict[str, tuple[Any, int, int]] = {}
        self._names = HashNames()

    def apply(self, op: Op) -> Answer:
        """Perform one operation; every answer carries the state of the pool."""
        perform: Callable[[Op], Answer] = getattr(self, f"_{op['op']}")
        answer = perform(op)
        pool = self._manager.block_pool
        state = {"num_free_blocks": pool.get_num_free_blocks(), "usage": round(self._manager.usage, 9)}
        return {**answer, **state, "free_queue": free_queue(self._manager)}

    def _new_request(self, op: Op) -> Answer:
        self._requests[op["id"]] = new_request(op, self._hash_block_size)
        return self._hashes(op)

    def _append_tokens(self, op: Op) -> Answer:
        self._requests[op["id"]].append_output_token_ids(list(op["token_ids"]))
        return self._hashes(op)

    def _hashes(self, op: Op) -> Answer:
        return {"hashes": [self._names.of(h) for h in self._requests[op["id"]].block_hashes]}

    def _lookup(self, op: Op) -> Answer:
        found = self._manager.get_computed_blocks(self._requests[op["id"]])
        self._lookups[op["id"]] = found
        blocks, num_tokens, boundary = found
        ids = list(blocks.get_block_ids())
        return {"block_ids": ids, "num_computed_tokens": num_tokens, "shared_prefix_boundary": boundary}

    def _allocate(self, op: Op) -> Answer:
        request = self._requests[op["id"]]
        blocks, num_hit = None, 0
        if op["use_lookup"]:
            blocks, num_hit, request.shared_prefix_boundary = self._lookups[op["id"]]
        added = self._manager.allocate_slots(
            request,
            op["num_new_tokens"],
            num_new_computed_tokens=num_hit,
            new_computed_blocks=blocks,
            num_lookahead_tokens=op.get("num_lookahead_tokens", 0),
            full_sequence_must_fit=op.get("full_sequence_must_fit", False),
        )
        if added is not None:
            request.status = RequestStatus.RUNNING
        new_ids = None if added is None else list(added.get_block_ids())
        return {"new_block_ids": new_ids, "block_table": list(self._manager.get_block_ids(op["id"]))}

    def _set_computed(self, op: Op) -> Answer:
        self._requests[op["id"]].num_computed_tokens = op["num_computed_tokens"]
        return {}

    def _free(self, op: Op) -> Answer:
        self._manager.free(self._requests.pop(op["id"]))
        return {}

    def _preempt(self, op: Op) -> Answer:
        request = self._requests[op["id"]]
        self._manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        return {}

    def _new_step(self, op: Op) -> Answer:
        self._manager.new_step_starts()
        return {}

    def _evict(self, op: Op) -> Answer:
        self._manager.evict_blocks({op["block_id"]})
        return {}

    def _reset_prefix_cache(self, op: Op) -> Answer:
        return {"ok": self._manager.reset_prefix_cache()}

    def _take_events(self, op: Op) -> Answer:
        return {"events": [self._event(event) for event in self._manager.take_events()]}

    def _event(self, event: Any) -> Answer:
        kind = {"BlockStored": "stored", "BlockRemoved": "removed"}.get(type(event).__name__, "cleared")
        if kind == "cleared":
            return {"type": kind}
        hashes = [self._names.of(h) for h in event.block_hashes]
        if kind == "removed":
            return {"type": kind, "hashes": hashes, "group": event.group_idx}
        parent = event.parent_block_hash
        lora = {"lora_name": event.lora_name, "lora_id": event.lora_id} if event.lora_name else {}
        return {
            "type": kind,
            "hashes": hashes,
            "parent": None if parent is None else self._names.of(parent),
            "token_ids": list(event.token_ids),
            "block_size": event.block_size,
            "group": event.group_idx,
            "spec_kind": event.kv_cache_spec_kind,
            "window": event.kv_cache_spec_sliding_window,
            "extra_keys": event.extra_keys,
            **lora,
        }

    def _take_copies(self, op: Op) -> Answer:
        copies, retained = self._manager.take_kv_cache_block_copies()
        self._manager.block_pool.free_blocks(retained)
        return {"copies": [[copy.src_block_id, copy.dst_block_id] for copy in copies]}


class VllmScheduler:
    """Driver of the `scheduler` traces."""

    def __init__(self, config: dict[str, Any]) -> None:
        init_none_hash(sha256_cbor)
        self._eos: int = config["eos_token_id"]
        cache = kv_cache_config(config)
        vllm_config = scheduler_vllm_config(config)
        block_size, self._hash_block_size = resolve_kv_cache_block_sizes(cache, vllm_config)
        grammar = SimpleNamespace(accept_tokens=lambda request, token_ids: True)
        self._scheduler = Scheduler(vllm_config, cache, grammar, block_size, self._hash_block_size)

    def apply(self, op: Op) -> Answer:
        """Perform one operation; every answer carries both queues and the state of the pool."""
        perform: Callable[[Op], Answer] = getattr(self, f"_{op['op']}")
        answer = perform(op)
        queue = free_queue(self._scheduler.kv_cache_manager)
        running = [request.request_id for request in self._scheduler.running]
        waiting = [request.request_id for request in self._scheduler.waiting]
        state = {"running": running, "waiting": waiting}
        return {**answer, **state, "num_free_blocks": len(queue), "free_queue": queue}

    def _add_request(self, op: Op) -> Answer:
        self._scheduler.add_request(new_request(op, self._hash_block_size, self._eos))
        return {}

    def _abort(self, op: Op) -> Answer:
        self._scheduler.finish_requests(op["id"], RequestStatus.FINISHED_ABORTED)
        return {}

    def _reset_prefix_cache(self, op: Op) -> Answer:
        return {"ok": self._scheduler.reset_prefix_cache()}

    def _step(self, op: Op) -> Answer:
        output = self._scheduler.schedule()
        answer = {
            "scheduled": self._scheduled(output),
            "total_num_scheduled_tokens": output.total_num_scheduled_tokens,
            "finished_ids": sorted(output.finished_req_ids),
            "preempted_ids": sorted(output.preempted_req_ids),
        }
        ids = list(output.num_scheduled_tokens)
        sampled = [list(op["sampled"].get(request_id, [])) for request_id in ids]
        result = ModelRunnerOutput(ids, {request_id: i for i, request_id in enumerate(ids)}, sampled)
        ended = {}
        for batch in self._scheduler.update_from_output(output, result).values():
            for one in batch.outputs:
                if one.finish_reason is not None:
                    ended[one.request_id] = {"reason": str(one.finish_reason), "stop_token": one.stop_reason}
        return {**answer, "ended": ended}

    def _scheduled(self, output: SchedulerOutput) -> list[Answer]:
        """What the step runs, in the order in which the scheduler decided it."""
        rows: dict[str, Answer] = {}
        for new in output.scheduled_new_reqs:
            again = self._scheduler.requests[new.req_id].num_preemptions > 0
            row = {"kind": "resumed" if again else "new", "num_computed": new.num_computed_tokens}
            rows[new.req_id] = {**row, "block_ids": list(new.block_ids)}
        old = output.scheduled_cached_reqs
        for request_id, computed, ids in zip(
            old.req_ids, old.num_computed_tokens, old.new_block_ids, strict=True
        ):
            kind = "resumed" if request_id in old.resumed_req_ids else "running"
            ids = None if ids is None else list(ids)
            rows[request_id] = {"kind": kind, "num_computed": computed, "block_ids": ids}
        counts = output.num_scheduled_tokens
        return [{"id": i, "num_scheduled": counts[i], **rows[i]} for i in counts]
