"""Drives V0's scheduler through the operations of FORMAT_V0.md; the trace says which tokens were sampled."""

from __future__ import annotations

from typing import Any

from refengine.config import EngineConfig
from refengine.v0.block_manager import BlockManager
from refengine.v0.model_input import ModelInputBuilder
from refengine.v0.prefix_caching import PrefixCachingBlockAllocator
from refengine.v0.scheduler import Scheduler
from refengine.v0.sequence import Sequence, SequenceGroup, SequenceGroupMetadata, SequenceStatus
from tests.conformance.v0_model_input import model_input_dict

SCHEDULER_OPTIONS = (
    "max_num_batched_tokens",
    "max_num_seqs",
    "enable_chunked_prefill",
    "preemption_mode",
    "policy",
    "max_num_partial_prefills",
    "max_long_partial_prefills",
    "long_prefill_token_threshold",
)


class SchedulerDriver:
    """One Scheduler over one BlockManager, and the tokens each request will sample."""

    def __init__(self, config: dict[str, Any], mode: str = "faithful") -> None:
        cache, scheduler = config["cache"], config["scheduler"]
        self.config = EngineConfig(
            engine="v0",
            mode=mode,
            block_size=cache["block_size"],
            num_blocks=cache["num_gpu_blocks"],
            num_cpu_blocks=cache["num_cpu_blocks"],
            enable_prefix_caching=cache["enable_prefix_caching"],
            sliding_window=cache["sliding_window"],
            **{name: scheduler[name] for name in SCHEDULER_OPTIONS},
        )
        self.manager = BlockManager(
            cache["block_size"],
            cache["num_gpu_blocks"],
            cache["num_cpu_blocks"],
            watermark=config["watermark"],
            sliding_window=cache["sliding_window"],
            enable_caching=cache["enable_prefix_caching"],
            faithful=mode == "faithful",
        )
        self.scheduler = Scheduler(self.config, self.manager, scheduler["max_model_len"])
        self.outputs: dict[str, list[int]] = {}

    def apply(self, op: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = getattr(self, op["op"])(op) or {}
        self.manager.check_integrity()
        return answer

    def add_request(self, op: dict[str, Any]) -> None:
        self.outputs[op["request_id"]] = list(op["output_tokens"])
        seq = Sequence(op["seq_id"], op["prompt"])
        group = SequenceGroup(op["request_id"], [seq], arrival=op["arrival_time"], priority=op["priority"])
        self.scheduler.add(group)

    def abort(self, op: dict[str, Any]) -> dict[str, Any]:
        self.scheduler.abort(op["request_id"])
        return {"free_gpu": self.manager.allocator.gpu.num_free_blocks}

    def step(self, op: dict[str, Any]) -> dict[str, Any]:
        metadata, out = self.scheduler.schedule(op["now"])
        answer: dict[str, Any] = {
            "scheduled": [self._scheduled(each) for each in metadata],
            "num_prefill_groups": out.num_prefill_groups,
            "num_batched_tokens": out.num_batched_tokens,
            "blocks_to_swap_in": out.blocks_to_swap_in,
            "blocks_to_swap_out": out.blocks_to_swap_out,
            "blocks_to_copy": out.blocks_to_copy,
            "ignored": [group.request_id for group in out.ignored],
            "preempted": [[group.request_id, mode] for group, mode in out.preempted],
            "num_preempted": out.num_preempted,
            "queues_after_schedule": self._queues(),
        }
        if metadata:
            answer["model_input"] = self._model_input(metadata)
        answer["finished"] = [
            group.request_id
            for each, group in zip(metadata, (scheduled.group for scheduled in out.scheduled), strict=True)
            if self._ran(group, each)
        ]
        self.scheduler.free_finished()
        return answer | {"queues_after_step": self._queues()} | self._state()

    def _ran(self, group: SequenceGroup, metadata: SequenceGroupMetadata) -> bool:
        """Counts the computed tokens and appends a sampled one. Returns: whether it was the request's last."""
        seq = group.first_seq
        seq.update_num_computed_tokens(metadata.token_chunk_size)
        if not metadata.do_sample:
            return False
        left = self.outputs[group.request_id]
        seq.token_ids.append(left.pop(0))
        if left:
            return False
        seq.status = SequenceStatus.FINISHED_STOPPED
        self.manager.free(seq)
        return True

    def _model_input(self, metadata: list[SequenceGroupMetadata]) -> dict[str, Any]:
        builder = ModelInputBuilder(
            self.config.block_size,
            sliding_window=self.config.sliding_window,
            chunked_prefill=self.config.enable_chunked_prefill,
        )
        for each in metadata:
            builder.add_seq_group(each)
        return model_input_dict(builder.build())

    def _scheduled(self, each: SequenceGroupMetadata) -> dict[str, Any]:
        (block_table,) = each.block_tables.values()
        return {
            "request_id": each.request_id,
            "is_prompt": each.is_prompt,
            "do_sample": each.do_sample,
            "token_chunk_size": each.token_chunk_size,
            "num_computed_tokens": each.num_computed_tokens,
            "block_table": block_table,
            "computed_block_nums": each.computed_block_nums,
        }

    def _queues(self) -> dict[str, list[str]]:
        queues = {name: getattr(self.scheduler, name) for name in ("waiting", "running", "swapped")}
        return {name: [group.request_id for group in queue] for name, queue in queues.items()}

    def _state(self) -> dict[str, Any]:
        gpu, cpu = self.manager.allocator.gpu, self.manager.allocator.cpu
        state = {"free_gpu": gpu.num_free_blocks, "free_cpu": cpu.num_free_blocks}
        if isinstance(gpu, PrefixCachingBlockAllocator):
            state |= {"hits": gpu.hits, "queries": gpu.queries}
        return state
