"""Drives the V1 scheduler through the operations of FORMAT_V1.md; the trace says which tokens were sampled."""

from __future__ import annotations

from typing import Any

from refengine.config import EngineConfig
from refengine.errors import ConfigError
from refengine.hashing import BlockHasher
from refengine.sampling import SamplingParams
from refengine.v1.kv_cache_manager import KVCacheManager
from refengine.v1.request import Request, RequestStatus
from refengine.v1.scheduler import Scheduler
from tests.conformance.kv_manager import group_specs
from tests.conformance.replay import NotSupported


class SchedulerDriver:
    """One Scheduler over one KVCacheManager. After each operation the integrity of all of it is checked."""

    def __init__(self, config: dict[str, Any]) -> None:
        block_size = config["block_size"]
        try:
            manager = KVCacheManager(
                group_specs(config, block_size),
                config["num_blocks"],
                config["max_model_len"],
                enable_caching=config["enable_caching"],
                watermark=config["watermark"],
                retention_interval=config["retention_interval"],
                max_tokens_per_step=config["max_num_batched_tokens"],
            )
        except ConfigError as error:
            raise NotSupported(str(error)) from None
        engine_config = EngineConfig(
            mode="faithful",
            block_size=block_size,
            **{
                name: config[name]
                for name in (
                    "num_blocks",
                    "max_num_seqs",
                    "max_num_batched_tokens",
                    "long_prefill_token_threshold",
                    "policy",
                    "watermark",
                    "enable_chunked_prefill",
                    "reserve_full_sequence",
                )
            },
        )
        self.scheduler = Scheduler(engine_config, manager, config["max_model_len"], [config["eos_token_id"]])
        self.hasher = BlockHasher("sha256_cbor", block_size, seed="0") if config["enable_caching"] else None

    def apply(self, op: dict[str, Any]) -> dict[str, Any]:
        answer = getattr(self, op["op"])(op) or {}
        self.scheduler.check_integrity()
        pool = self.scheduler.kv_cache_manager.block_pool
        return answer | {
            "running": [request.request_id for request in self.scheduler.running],
            "waiting": [request.request_id for request in self.scheduler.waiting],
            "num_free_blocks": pool.num_free_blocks,
            "free_queue": [block.block_id for block in pool.free_queue],
        }

    def add_request(self, op: dict[str, Any]) -> None:
        params = SamplingParams(
            max_tokens=op["max_tokens"], stop_token_ids=tuple(op.get("stop_token_ids", ()))
        )
        self.scheduler.add_request(
            Request(
                op["id"],
                op["prompt"],
                params,
                hasher=self.hasher,
                arrival=op["arrival"],
                priority=op["priority"],
                cache_salt=op.get("cache_salt"),
            )
        )

    def step(self, op: dict[str, Any]) -> dict[str, Any]:
        output = self.scheduler.schedule()
        requests = dict(self.scheduler.requests)
        self.scheduler.update(output, op["sampled"])
        return {
            "scheduled": [
                {
                    "id": share.request_id,
                    "num_scheduled": share.num_tokens,
                    "kind": share.kind,
                    "num_computed": share.num_computed_tokens,
                    "block_ids": share.block_ids,
                }
                for share in output.scheduled
            ],
            "total_num_scheduled_tokens": output.total_num_scheduled_tokens,
            "finished_ids": sorted(output.finished_ids),
            "preempted_ids": sorted(output.preempted_ids),
            "ended": {
                request.request_id: {"reason": request.status.value, "stop_token": request.stop_reason}
                for request in requests.values()
                if request.status.is_finished
            },
        }

    def abort(self, op: dict[str, Any]) -> None:
        self.scheduler.finish(op["id"], RequestStatus.FINISHED_ABORTED)

    def reset_prefix_cache(self, op: dict[str, Any]) -> dict[str, Any]:
        return {"ok": self.scheduler.kv_cache_manager.reset_prefix_cache()}
