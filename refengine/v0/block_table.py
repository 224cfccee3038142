"""The blocks of one sequence, in the order of its tokens, and how many of its tokens they hold.

vLLM: V0 core/block/block_table.py BlockTable; V1 the tables in v1/core/single_type_kv_cache_manager.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from refengine.v0.block import Block
from refengine.v0.device_allocator import CpuGpuBlockAllocator


class BlockTable:
    """`window_blocks`: blocks to keep behind the newest token of a sliding window; None: all."""

    def __init__(
        self,
        block_size: int,
        allocator: CpuGpuBlockAllocator,
        extra: Any = None,
        window_blocks: int | None = None,
        blocks: Sequence[Block] = (),
    ) -> None:
        self.block_size = block_size
        self.allocator = allocator
        self.extra = extra
        self.window_blocks = window_blocks
        self.blocks = list(blocks)
        self.num_full_slots = sum(len(block.token_ids) for block in self.blocks)

    @property
    def block_ids(self) -> list[int]:
        return [block.block_id for block in self.blocks if block.block_id is not None]

    def allocate(self, token_ids: Sequence[int]) -> None:
        """Blocks for a whole prompt: full ones possibly from the cache, then a partly filled one.

        Mutates: table, allocator. Raises: NoFreeBlocksError.
        """
        gpu = self.allocator.gpu
        for start in range(0, len(token_ids), self.block_size):
            tokens = token_ids[start : start + self.block_size]
            if len(tokens) == self.block_size:
                self.blocks.append(gpu.allocate_immutable_block(self._last, tokens, self.extra))
            else:
                block = gpu.allocate_mutable_block(self._last, self.extra)
                gpu.append(block, tokens)
                self.blocks.append(block)
        self.num_full_slots = len(token_ids)

    def append(self, token_ids: Sequence[int], num_lookahead_slots: int, num_computed_tokens: int) -> None:
        """Stores new tokens, and makes sure that `num_lookahead_slots` slots more are there.

        Mutates: table, allocator. Raises: NoFreeBlocksError.
        """
        if self.window_blocks is not None:
            self._drop_behind_window(num_computed_tokens, self.window_blocks)
        gpu = self.allocator.gpu
        while len(self.blocks) * self.block_size < self.num_full_slots + len(token_ids) + num_lookahead_slots:
            self.blocks.append(gpu.allocate_mutable_block(self._last, self.extra))
        left = list(token_ids)
        while left:
            block = self.blocks[self.num_full_slots // self.block_size]
            tokens, left = left[: block.num_empty_slots], left[block.num_empty_slots :]
            gpu.append(block, tokens)
            self.num_full_slots += len(tokens)

    def num_blocks_touched_by_append(self, num_tokens: int, exact: bool = False) -> int:
        """Blocks that appending `num_tokens` tokens writes into.

        A partly filled last block counts, although nothing has to be allocated for it: that is how vLLM 0.7.3
        comes to preempt when no block is free and none is needed. `exact`: blocks that must be allocated.
        """
        if exact:
            needed = -(-(self.num_full_slots + num_tokens) // self.block_size)
            return max(needed - len(self.blocks), 0)
        room = self.block_size - self.num_full_slots % self.block_size
        return 1 + -((room - num_tokens) // self.block_size)

    def unseen(self, token_ids: Sequence[int]) -> list[int]:
        """Tokens of the sequence that the table does not hold yet."""
        return list(token_ids[self.num_full_slots :])

    def fork(self) -> BlockTable:
        """A table over the same memory. Mutates: reference counts."""
        last = self.blocks[-1]
        copies = self.allocator.of(last).fork(last)
        return BlockTable(self.block_size, self.allocator, self.extra, self.window_blocks, copies)

    def free(self) -> None:
        """Gives all blocks back, first one first. Mutates: table, allocator."""
        for block in self.blocks:
            self.allocator.free(block)
        self.blocks = []

    def _drop_behind_window(self, num_computed_tokens: int, window_blocks: int) -> None:
        null_block = self.allocator.null_block
        for i in range(num_computed_tokens // self.block_size - window_blocks):
            if self.blocks[i] is not null_block:
                self.allocator.free(self.blocks[i])
                self.blocks[i] = null_block

    @property
    def _last(self) -> Block | None:
        return self.blocks[-1] if self.blocks else None
