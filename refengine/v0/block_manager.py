"""Who holds which blocks, on both devices: what V0's scheduler asks before it decides and tells when it has.

Everything about the cache is known here, and nothing of it is decided here: whether to admit, whom to preempt
and what to skip are the scheduler's and the worker's business.
vLLM: V0 core/block_manager.py SelfAttnBlockSpaceManager; V1 v1/core/kv_cache_manager.py KVCacheManager.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as SequenceOf

from refengine.trace.observer import PoolSnapshot
from refengine.v0.block import Block
from refengine.v0.block_table import BlockTable
from refengine.v0.device_allocator import CpuGpuBlockAllocator, Device
from refengine.v0.prefix_caching import PrefixCachingBlockAllocator
from refengine.v0.sequence import Sequence, SequenceGroup, SequenceStatus
from refengine.v0.tracker import ComputedBlocksTracker, LastAccessTracker


class AllocStatus(enum.Enum):
    """OK: now. LATER: when blocks have become free. NEVER: the device is too small."""

    OK = "OK"
    LATER = "LATER"
    NEVER = "NEVER"


class BlockManager:
    """`watermark`: share of the GPU blocks that must stay free when a prompt is admitted.

    `faithful`: with the named defects of vLLM 0.7.3; they are told where they are.
    """

    def __init__(
        self,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        *,
        watermark: float = 0.01,
        sliding_window: int | None = None,
        enable_caching: bool = False,
        faithful: bool = False,
    ) -> None:
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.faithful = faithful
        # The window may begin in the middle of a block, and the newest token may start a new one.
        self.window_blocks = None if sliding_window is None else sliding_window // block_size + 2
        self.watermark_blocks = int(watermark * num_gpu_blocks)
        self.allocator = CpuGpuBlockAllocator(
            num_gpu_blocks, num_cpu_blocks, block_size, enable_caching, faithful
        )
        self.tables: dict[int, BlockTable] = {}
        self.computed = ComputedBlocksTracker(self.allocator.gpu, block_size, enable_caching, faithful)
        self.accessed = LastAccessTracker()

    # -- a prompt -------------------------------------------------------------------------------------------

    def can_allocate(self, group: SequenceGroup, num_lookahead_slots: int = 0) -> AllocStatus:
        """May the group's prompt get its blocks now? Cached blocks are not subtracted: it asks for all of them."""
        (seq, *_) = group.get_seqs(SequenceStatus.WAITING)
        needed = -(-(len(seq) + num_lookahead_slots) // self.block_size)
        if self.window_blocks is not None and self.faithful:
            needed = min(
                needed, self.window_blocks
            )  # vLLM 0.7.3; but a prompt takes blocks for all its tokens first
        if self.allocator.gpu.num_blocks - needed < self.watermark_blocks:
            return AllocStatus.NEVER
        free = self.allocator.gpu.num_free_blocks
        return AllocStatus.OK if free - needed >= self.watermark_blocks else AllocStatus.LATER

    def allocate(self, group: SequenceGroup) -> None:
        """Takes blocks for the whole prompt; further waiting sequences of the group share them.

        Mutates: tables, allocator. Raises: NoFreeBlocksError.
        """
        first, *others = group.get_seqs(SequenceStatus.WAITING)
        table = self._new_table(first)
        table.allocate(first.token_ids)
        self._enter(first, table)
        for seq in others:
            self._enter(seq, table.fork())

    def get_num_cached_tokens(self, seq: Sequence) -> int:
        """Leading tokens of the sequence that are cached and computed. See ComputedBlocksTracker."""
        return self.computed.get_num_cached_tokens(seq)

    def get_common_computed_block_ids(self, seqs: SequenceOf[Sequence]) -> list[int]:
        """The blocks the worker may skip, as ids: the computed head that all these sequences share.

        A sequence with no hit at all is left out of the comparison, as in vLLM 0.7.3.
        """
        if not self.enable_caching:
            return []
        heads = [
            self.tables[seq.seq_id].block_ids[: self.get_num_cached_tokens(seq) // self.block_size]
            for seq in seqs
        ]
        found = [head for head in heads if head]
        return _common_head(found) if found else []

    def mark_blocks_as_computed(self, seq: Sequence, token_chunk_size: int) -> list[int]:
        """The step that was just scheduled computes `token_chunk_size` more tokens of the sequence.

        vLLM 0.7.3 ignores both arguments and marks every block cached since the last call; with chunked prefill
        a prompt's blocks are all cached at its admission, and so count as computed after its first chunk.
        Returns: the blocks that count as computed from now on. Mutates: allocator.
        """
        if self.faithful:
            return self.allocator.gpu.mark_blocks_as_computed()
        num_full = (seq.num_computed_tokens + token_chunk_size) // self.block_size
        return self.allocator.gpu.mark_blocks_as_computed(self.block_ids(seq)[:num_full])

    def access_all_blocks_in_seq(self, seq: Sequence, now: float) -> None:
        """Notes that the sequence runs. Mutates: its time."""
        if self.enable_caching:
            self.accessed.update(seq, now)

    # -- more tokens ----------------------------------------------------------------------------------------

    def can_append_slots(self, group: SequenceGroup, num_lookahead_slots: int = 0) -> bool:
        """Is there room for the tokens that the running sequences have and their tables do not?"""
        touched = 0
        for seq in group.get_seqs(SequenceStatus.RUNNING):
            table = self.tables[seq.seq_id]
            num_new = len(table.unseen(seq.token_ids)) + num_lookahead_slots
            # In the middle of a prompt there is nothing to store: its blocks are there. vLLM 0.7.3 counts the last
            # one all the same, and a prompt that fills the pool preempts itself for ever.
            if num_new or self.faithful:
                touched += table.num_blocks_touched_by_append(num_new)
        return touched <= self.allocator.gpu.num_free_blocks

    def append_slots(self, seq: Sequence, num_lookahead_slots: int = 0) -> list[tuple[int, int]]:
        """Stores the tokens the table does not hold yet. Returns: (source, destination) blocks to copy first.

        Mutates: table, allocator. Raises: NoFreeBlocksError; ask `can_append_slots` before.
        """
        table = self.tables[seq.seq_id]
        table.append(table.unseen(seq.token_ids), num_lookahead_slots, seq.num_computed_tokens)
        return self.allocator.gpu.take_copies()

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child shares all blocks of the parent until one of them writes. Mutates: tables, counts."""
        self._enter(child, self.tables[parent.seq_id].fork())

    # -- swapping -------------------------------------------------------------------------------------------

    def can_swap_out(self, group: SequenceGroup) -> bool:
        """Is there room in CPU memory for the group's blocks?"""
        return self._can_swap(group, Device.CPU, SequenceStatus.RUNNING, 0) is AllocStatus.OK

    def swap_out(self, group: SequenceGroup) -> list[tuple[int, int]]:
        """Moves the group's running sequences to the CPU. Returns: pairs, each zero-based on its device."""
        return self._swap(group, SequenceStatus.RUNNING, Device.GPU, Device.CPU)

    def can_swap_in(self, group: SequenceGroup, num_lookahead_slots: int = 0) -> AllocStatus:
        """May the group come back to the GPU now?"""
        return self._can_swap(group, Device.GPU, SequenceStatus.SWAPPED, num_lookahead_slots)

    def swap_in(self, group: SequenceGroup) -> list[tuple[int, int]]:
        """Moves the group's swapped sequences to the GPU. Returns: pairs, each zero-based on its device."""
        return self._swap(group, SequenceStatus.SWAPPED, Device.CPU, Device.GPU)

    def _swap(
        self, group: SequenceGroup, status: SequenceStatus, source: Device, destination: Device
    ) -> list[tuple[int, int]]:
        pairs: list[tuple[int, int]] = []
        for seq in group.get_seqs(status):
            pairs += self.allocator.swap(self.tables[seq.seq_id].blocks, source, destination)
        return pairs

    def _can_swap(
        self, group: SequenceGroup, to: Device, status: SequenceStatus, num_lookahead_slots: int
    ) -> AllocStatus:
        destination = self.allocator.on(to)
        touched, blocks = 0, list[Block]()
        for seq in group.get_seqs(status):
            table = self.tables[seq.seq_id]
            touched += table.num_blocks_touched_by_append(
                len(table.unseen(seq.token_ids)) + num_lookahead_slots
            )
            blocks += table.blocks
        touched += destination.get_num_full_blocks_touched(blocks)
        if not self.faithful:
            # An empty block, kept for draft tokens, is neither full nor written to, and vLLM 0.7.3 forgets it.
            touched = max(touched, len(blocks) - self._num_shared(blocks, to))
        reserved = self.watermark_blocks if to is Device.GPU else 0
        if destination.num_blocks < touched:
            return AllocStatus.NEVER
        return AllocStatus.OK if destination.num_free_blocks - touched >= reserved else AllocStatus.LATER

    def _num_shared(self, blocks: SequenceOf[Block], to: Device) -> int:
        """Of these blocks, those that would be found on the other device and take none."""
        full = [block for block in blocks if block.is_full]
        return len(full) - self.allocator.on(to).get_num_full_blocks_touched(full)

    # -- the end --------------------------------------------------------------------------------------------

    def free(self, seq: Sequence) -> None:
        """Gives the sequence's blocks back. A sequence without blocks is fine. Mutates: tables, allocator.

        vLLM 0.7.3 asks the GPU's tracker about blocks that are in CPU memory, and fails with KeyError.
        """
        if seq.seq_id not in self.tables:
            if not self.faithful:
                self.computed.remove(seq)
            return
        table = self.tables[seq.seq_id]
        if self.enable_caching:
            on = (
                self.allocator.gpu
                if self.faithful or not table.blocks
                else self.allocator.of(table.blocks[0])
            )
            self.accessed.stamp_blocks(seq, table.block_ids, on)
        self.accessed.remove(seq)
        self.computed.remove(seq)
        table.free()
        del self.tables[seq.seq_id]

    def forget_uncomputed(self, seq: Sequence) -> None:
        """Makes the sequence's GPU blocks past its computed tokens unfindable: nobody will fill them now.

        For a sequence that leaves in the middle of its prompt. vLLM 0.7.3 keeps them, and what nobody uses any
        more counts as computed. Mutates: the cache.
        """
        if self.enable_caching and seq.seq_id in self.tables:
            blocks = self.tables[seq.seq_id].blocks[seq.num_computed_tokens // self.block_size :]
            self.allocator.gpu.forget(block.content_hash for block in blocks)

    def get_cached_block_ids(self, seq: Sequence, num_cached_tokens: int) -> list[int]:
        """The blocks behind an answer of `get_num_cached_tokens`, for an observer."""
        hashes = self.computed.hashes(seq)[: num_cached_tokens // self.block_size]
        gpu = self.allocator.gpu
        return [
            gpu.cached[each]
            for each in hashes
            if isinstance(gpu, PrefixCachingBlockAllocator) and each in gpu.cached
        ]

    def reset_prefix_cache(self) -> bool:
        """Forgets all contents if no GPU block is in use. Returns: whether it was done."""
        return self.allocator.gpu.reset_prefix_cache()

    def get_prefix_cache_hit_rate(self, device: Device) -> float:
        """Hits per block looked up, -1 without caching."""
        return self.allocator.on(device).hit_rate

    def block_ids(self, seq: Sequence) -> list[int]:
        """The sequence's block table, empty if it has none."""
        return self.tables[seq.seq_id].block_ids if seq.seq_id in self.tables else []

    def snapshot(self) -> PoolSnapshot:
        """How the GPU blocks stand now, for an observer. Free: the list in order, then what would be evicted."""
        gpu = self.allocator.gpu
        free, cached = list(gpu.free_ids), list[int]()
        if isinstance(gpu, PrefixCachingBlockAllocator):
            free += [block_id for block_id, _, _ in gpu.evictor.order()]
            cached = sorted(gpu.cached.values())
        return PoolSnapshot(
            free, cached, {str(seq_id): [table.block_ids] for seq_id, table in self.tables.items()}
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError unless both devices' blocks are each in exactly one place."""
        self.allocator.gpu.check_integrity()
        self.allocator.cpu.check_integrity()

    def _new_table(self, seq: Sequence) -> BlockTable:
        return BlockTable(self.block_size, self.allocator, seq.adapter, self.window_blocks)

    def _enter(self, seq: Sequence, table: BlockTable) -> None:
        self.tables[seq.seq_id] = table
        self.accessed.add(seq)


def _common_head(lists: SequenceOf[list[int]]) -> list[int]:
    """The longest list that all of `lists` begin with."""
    length = 0
    while all(length < len(each) and each[length] == lists[0][length] for each in lists):
        length += 1
    return lists[0][:length]
