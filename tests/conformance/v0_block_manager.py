"""Drives V0's block manager through the operations of FORMAT_V0.md, family `block_manager`."""

from __future__ import annotations

from typing import Any

from refengine.v0.allocator import NaiveBlockAllocator
from refengine.v0.block_manager import BlockManager
from refengine.v0.device_allocator import Device
from refengine.v0.prefix_caching import PrefixCachingBlockAllocator
from refengine.v0.sequence import Sequence, SequenceGroup, SequenceStatus

STATUS = {
    "WAITING": SequenceStatus.WAITING,
    "FINISHED_STOPPED": SequenceStatus.FINISHED_STOPPED,
    "FINISHED_ABORTED": SequenceStatus.FINISHED_ABORTED,
    "FINISHED_LENGTH_CAPPED": SequenceStatus.FINISHED_LENGTH,
}


class BlockManagerDriver:
    """One BlockManager and the sequences of the trace."""

    def __init__(self, config: dict[str, Any], mode: str = "faithful") -> None:
        self.manager = BlockManager(
            config["block_size"],
            config["num_gpu_blocks"],
            config["num_cpu_blocks"],
            watermark=config["watermark"],
            sliding_window=config["sliding_window"],
            enable_caching=config["enable_caching"],
            faithful=mode == "faithful",
        )
        self.seqs: dict[int, Sequence] = {}
        self.groups: dict[str, SequenceGroup] = {}

    def apply(self, op: dict[str, Any]) -> dict[str, Any]:
        answer = getattr(self, op["op"])(op) or {}
        self.manager.check_integrity()
        return answer | {"state": self._state()}

    def add_group(self, op: dict[str, Any]) -> None:
        seqs = [Sequence(seq_id, op["tokens"]) for seq_id in op["seq_ids"]]
        self.seqs |= {seq.seq_id: seq for seq in seqs}
        self.groups[op["group"]] = SequenceGroup(op["group"], seqs)

    def append_tokens(self, op: dict[str, Any]) -> dict[str, Any]:
        seq = self.seqs[op["seq_id"]]
        seq.token_ids.extend(op["tokens"])
        return {"len": len(seq)}

    def update_num_computed_tokens(self, op: dict[str, Any]) -> dict[str, Any]:
        seq = self.seqs[op["seq_id"]]
        seq.update_num_computed_tokens(op["n"])
        return {"num_computed_tokens": seq.num_computed_tokens, "stage": seq.stage.value}

    def get_num_cached_tokens(self, op: dict[str, Any]) -> dict[str, Any]:
        return {"num_cached_tokens": self.manager.get_num_cached_tokens(self.seqs[op["seq_id"]])}

    def can_allocate(self, op: dict[str, Any]) -> dict[str, Any]:
        group = self.groups[op["group"]]
        return {"status": self.manager.can_allocate(group, op["num_lookahead_slots"]).value}

    def allocate(self, op: dict[str, Any]) -> dict[str, Any]:
        group = self.groups[op["group"]]
        self.manager.allocate(group)
        for seq in group.get_seqs(SequenceStatus.WAITING):
            seq.status = SequenceStatus.RUNNING
        return {"block_tables": self._tables(group)}

    def can_append_slots(self, op: dict[str, Any]) -> dict[str, Any]:
        return {"result": self.manager.can_append_slots(self.groups[op["group"]], op["num_lookahead_slots"])}

    def append_slots(self, op: dict[str, Any]) -> dict[str, Any]:
        seq = self.seqs[op["seq_id"]]
        copies = self.manager.append_slots(seq, op["num_lookahead_slots"])
        return {"copy_on_write": copies, "block_table": self.manager.block_ids(seq)}

    def fork(self, op: dict[str, Any]) -> dict[str, Any]:
        parent = self.seqs[op["parent"]]
        child = self.seqs[op["child"]] = parent.fork(op["child"])
        next(group for group in self.groups.values() if parent in group.seqs).seqs.append(child)
        self.manager.fork(parent, child)
        return {"block_table": self.manager.block_ids(child)}

    def access_all_blocks_in_seq(self, op: dict[str, Any]) -> None:
        self.manager.access_all_blocks_in_seq(self.seqs[op["seq_id"]], op["now"])

    def mark_blocks_as_computed(self, op: dict[str, Any]) -> None:
        for seq in self.groups[op["group"]].get_seqs(SequenceStatus.RUNNING):
            self.manager.mark_blocks_as_computed(seq, op["token_chunk_size"])

    def get_common_computed_block_ids(self, op: dict[str, Any]) -> dict[str, Any]:
        seqs = [self.seqs[seq_id] for seq_id in op["seq_ids"]]
        return {"block_ids": self.manager.get_common_computed_block_ids(seqs)}

    def can_swap_out(self, op: dict[str, Any]) -> dict[str, Any]:
        return {"result": self.manager.can_swap_out(self.groups[op["group"]])}

    def swap_out(self, op: dict[str, Any]) -> dict[str, Any]:
        group = self.groups[op["group"]]
        mapping = self.manager.swap_out(group)
        return self._swapped(group, mapping, SequenceStatus.RUNNING, SequenceStatus.SWAPPED)

    def can_swap_in(self, op: dict[str, Any]) -> dict[str, Any]:
        return {"status": self.manager.can_swap_in(self.groups[op["group"]], op["num_lookahead_slots"]).value}

    def swap_in(self, op: dict[str, Any]) -> dict[str, Any]:
        group = self.groups[op["group"]]
        mapping = self.manager.swap_in(group)
        return self._swapped(group, mapping, SequenceStatus.SWAPPED, SequenceStatus.RUNNING)

    def free(self, op: dict[str, Any]) -> None:
        seq = self.seqs[op["seq_id"]]
        self.manager.free(seq)
        if op["new_status"] == "WAITING":
            seq.reset_for_recompute()
        else:
            seq.status = STATUS[op["new_status"]]

    def reset_prefix_cache(self, op: dict[str, Any]) -> dict[str, Any]:
        return {"result": self.manager.reset_prefix_cache()}

    def get_prefix_cache_hit_rate(self, op: dict[str, Any]) -> dict[str, Any]:
        return {"hit_rate": self.manager.get_prefix_cache_hit_rate(Device(op["device"]))}

    def snapshot(self, op: dict[str, Any]) -> dict[str, Any]:
        gpu = self.manager.allocator.gpu
        seen: dict[str, Any] = {
            "free_queue": list(gpu.free_ids),
            "refcounts": {str(block_id): count for block_id, count in gpu.ref_counts.items() if count},
        }
        if isinstance(gpu, PrefixCachingBlockAllocator):
            cached = sorted(gpu.cached.values())
            seen["eviction_order"] = gpu.evictor.order()
            seen["cached_block_ids"] = cached
            seen["computed_block_ids"] = [block_id for block_id in cached if gpu.is_computed(block_id)]
        return seen

    def _swapped(
        self, group: SequenceGroup, mapping: list[tuple[int, int]], old: SequenceStatus, new: SequenceStatus
    ) -> dict[str, Any]:
        for seq in group.get_seqs(old):
            seq.status = new
        return {"mapping": mapping, "block_tables": self._tables(group)}

    def _tables(self, group: SequenceGroup) -> dict[str, list[int]]:
        return {str(seq.seq_id): self.manager.block_ids(seq) for seq in group.seqs if not seq.is_finished}

    def _state(self) -> dict[str, Any]:
        gpu: NaiveBlockAllocator = self.manager.allocator.gpu
        state = {"free_gpu": gpu.num_free_blocks, "free_cpu": self.manager.allocator.cpu.num_free_blocks}
        if isinstance(gpu, PrefixCachingBlockAllocator):
            state |= {"hits": gpu.hits, "queries": gpu.queries}
        return state
