"""Physical blocks of one device without any cache: a free list and reference counts.

The list is a stack at its front: blocks are taken there, and put back there. Sharing happens by fork only,
and whoever writes into a shared block gets a copy first.
vLLM: V0 core/block/naive_block.py NaiveBlockAllocator; V1 v1/core/block_pool.py BlockPool with caching off.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from refengine.errors import IntegrityError
from refengine.v0.block import Block, ContentHash


class NoFreeBlocksError(Exception):
    """A block was asked for and there is none. The scheduler asks first, so this is a bug of whoever did not."""


class NaiveBlockAllocator:
    """Blocks `first_id` to `first_id + num_blocks - 1` of `block_size` tokens each."""

    def __init__(self, num_blocks: int, block_size: int, first_id: int = 0) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.first_id = first_id
        self.free_ids: deque[int] = deque(range(first_id, first_id + num_blocks))
        self.ref_counts: dict[int, int] = dict.fromkeys(self.free_ids, 0)
        self._copies: list[tuple[int, int]] = []

    # -- blocks of a sequence -------------------------------------------------------------------------------

    def allocate_mutable_block(self, prev: Block | None, extra: Any = None) -> Block:
        """An empty block after `prev`. Mutates: free list. Raises: NoFreeBlocksError."""
        return Block(prev, self.block_size, self._take_id(), extra)

    def allocate_immutable_block(
        self, prev: Block | None, token_ids: Sequence[int], extra: Any = None
    ) -> Block:
        """A full block with these tokens. Mutates: free list. Raises: NoFreeBlocksError."""
        block = self.allocate_mutable_block(prev, extra)
        block.token_ids.extend(token_ids)
        return block

    def append(self, block: Block, token_ids: Sequence[int]) -> None:
        """Puts tokens into a block with room for them; if others use it too, it is copied first.

        Mutates: the block, and with a copy free list and counts. Raises: NoFreeBlocksError.
        """
        block.token_ids.extend(token_ids)
        self._copy_on_write(block)

    def free(self, block: Block) -> None:
        """One user less. Mutates: counts, and the free list if nobody is left; the block loses its id."""
        if block.block_id is None:
            raise IntegrityError("a block that has no memory is released")
        self._release(block)
        block.block_id = None

    def fork(self, last: Block) -> list[Block]:
        """Logical copies of a whole chain of blocks over the same memory. Mutates: counts."""
        chain: list[Block] = []
        node: Block | None = last
        while node is not None:
            chain.insert(0, node)
            node = node.prev
        copies: list[Block] = []
        for block in chain:
            assert block.block_id is not None  # a table holds blocks with memory only
            self.ref_counts[block.block_id] += 1
            copy = Block(copies[-1] if copies else None, self.block_size, block.block_id, block.extra)
            copy.token_ids = list(block.token_ids)
            copies.append(copy)
        return copies

    # -- swapping -------------------------------------------------------------------------------------------

    def swap_out(self, blocks: Iterable[Block]) -> None:
        """Gives up the memory of these blocks; each keeps its id until `swap_in` on another device sets one."""
        for block in blocks:
            self._release(block)

    def swap_in(self, blocks: Iterable[Block]) -> None:
        """Memory of this device for blocks that have tokens. Mutates: free list, ids. Raises: NoFreeBlocksError."""
        for block in blocks:
            if block.is_full:
                fresh = self.allocate_immutable_block(block.prev, block.token_ids, block.extra)
            else:
                fresh = self.allocate_mutable_block(block.prev, block.extra)
                self.append(fresh, block.token_ids)
            block.block_id = fresh.block_id

    def get_num_full_blocks_touched(self, blocks: Sequence[Block]) -> int:
        """Blocks that swapping these in here would take, of those that are full."""
        return sum(block.is_full for block in blocks)

    # -- what a cache would know ----------------------------------------------------------------------------

    def mark_blocks_as_computed(self, block_ids: Iterable[int] | None = None) -> list[int]:
        """Nothing is cached, so nothing needs to be known as computed. Returns: no block."""
        return []

    def mark_blocks_as_accessed(self, block_ids: Iterable[int], now: float) -> None:
        """Nothing is cached, so no time matters."""

    def find_cached_blocks_prefix(self, hashes: Sequence[ContentHash]) -> int:
        """How many leading blocks can be found: none."""
        return 0

    def forget(self, hashes: Iterable[ContentHash | None]) -> None:
        """Nothing is cached, so nothing needs to be forgotten."""

    def reset_prefix_cache(self) -> bool:
        """There is nothing to forget. Returns: True."""
        return True

    @property
    def hit_rate(self) -> float:
        return -1.0

    # -- looking at it --------------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_ids)

    def take_copies(self) -> list[tuple[int, int]]:
        """(source, destination) pairs to copy before the next model run. Mutates: drains the list."""
        copies, self._copies = self._copies, []
        return copies

    def check_integrity(self) -> None:
        """Raises IntegrityError unless free means unused and each free block is listed once."""
        listed = list(self.free_ids)
        if len(set(listed)) != len(listed):
            raise IntegrityError(f"the free list names a block twice: {listed}")
        for block_id, count in self.ref_counts.items():
            if (count == 0) != (block_id in listed):
                raise IntegrityError(
                    f"block {block_id} has {count} users, in the free list: {block_id in listed}"
                )

    # -- ids ------------------------------------------------------------------------------------------------

    def _take_id(self) -> int:
        if not self.free_ids:
            raise NoFreeBlocksError("no free block is left")
        block_id = self.free_ids.popleft()
        self.ref_counts[block_id] = 1
        return block_id

    def _release(self, block: Block) -> None:
        assert block.block_id is not None  # callers hold the block
        if self.ref_counts[block.block_id] == 0:
            raise IntegrityError(f"block {block.block_id} is released, but nobody uses it")
        self.ref_counts[block.block_id] -= 1
        if self.ref_counts[block.block_id] == 0:
            self.free_ids.appendleft(block.block_id)

    def _copy_on_write(self, block: Block) -> None:
        assert block.block_id is not None  # callers hold the block
        if self.ref_counts[block.block_id] > 1:
            source = block.block_id
            self._release(block)
            block.block_id = self._take_id()
            self._copies.append((source, block.block_id))
