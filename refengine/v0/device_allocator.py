"""Two devices' blocks behind one door: GPU blocks are numbered from 0, CPU blocks follow.

vLLM: V0 core/block/cpu_gpu_block_allocator.py CpuGpuBlockAllocator; V1 none, since it does not swap.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from refengine.v0.allocator import NaiveBlockAllocator
from refengine.v0.block import Block
from refengine.v0.prefix_caching import PrefixCachingBlockAllocator


class Device(enum.Enum):
    """Where a block's memory is."""

    GPU = "GPU"
    CPU = "CPU"


class CpuGpuBlockAllocator:
    """`gpu` and `cpu` are the allocators; both cache prefixes, or neither does."""

    def __init__(
        self, num_gpu_blocks: int, num_cpu_blocks: int, block_size: int, enable_caching: bool, faithful: bool
    ) -> None:
        def make(num_blocks: int, first_id: int) -> NaiveBlockAllocator:
            if enable_caching:
                return PrefixCachingBlockAllocator(num_blocks, block_size, first_id, faithful)
            return NaiveBlockAllocator(num_blocks, block_size, first_id)

        self.gpu = make(num_gpu_blocks, 0)
        self.cpu = make(num_cpu_blocks, num_gpu_blocks)
        self._null_block: Block | None = None

    def on(self, device: Device) -> NaiveBlockAllocator:
        """The allocator of a device."""
        return self.gpu if device is Device.GPU else self.cpu

    def of(self, block: Block) -> NaiveBlockAllocator:
        """The allocator of the device the block is on."""
        assert block.block_id is not None  # a table holds blocks with memory only
        return self.cpu if block.block_id >= self.cpu.first_id else self.gpu

    @property
    def null_block(self) -> Block:
        """One GPU block that stands for all blocks behind a sliding window; taken when it is first needed."""
        if self._null_block is None:
            self._null_block = self.gpu.allocate_mutable_block(None)
        return self._null_block

    def free(self, block: Block) -> None:
        """One user less, wherever the block is. The null block stays. Mutates: the device's allocator."""
        if block is not self._null_block:
            self.of(block).free(block)

    def swap(self, blocks: Sequence[Block], source: Device, destination: Device) -> list[tuple[int, int]]:
        """Moves blocks to the other device. The contents are the worker's to copy.

        Returns: (source, destination) block ids, zero-based within each device. Mutates: both allocators, ids.
        """
        from_ids = [block.block_id for block in blocks]
        self.on(source).swap_out(blocks)
        self.on(destination).swap_in(blocks)
        from_base, to_base = self.on(source).first_id, self.on(destination).first_id
        return [
            (from_id - from_base, block.block_id - to_base)
            for from_id, block in zip(from_ids, blocks, strict=True)
            if from_id is not None and block.block_id is not None
        ]
