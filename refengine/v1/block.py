"""A block, and the queue of blocks that nobody uses.

Three facts about a block are independent. *Used*: `ref_count` requests hold it. *Free*: it stands in the free
queue, which is so exactly when `ref_count` is 0. *Cached*: `block_hash` is set and the pool's index finds it.
A block can be free and cached at once; that is the whole point of prefix caching.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from refengine.errors import IntegrityError

BlockKey = bytes  # a block hash followed by the group id in 4 bytes: what the pool's index is keyed by


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """One block of the pool. `prev` and `next` belong to the free queue and are None outside it.

    vLLM: V0 core/block/prefix_caching_block.py BlockTracker and PrefixCachingBlock; V1 v1/core/kv_cache_utils.py
    KVCacheBlock.
    """

    block_id: int
    ref_count: int = 0
    block_hash: BlockKey | None = None  # None: the contents cannot be found
    is_null: bool = False  # block 0: stands for "no storage here", never handed out
    prev: KVCacheBlock | None = field(default=None, repr=False)
    next: KVCacheBlock | None = field(default=None, repr=False)


class FreeKVCacheBlockQueue:
    """Unused blocks in eviction order: the front is handed out next.

    Doubly linked through the blocks themselves, since a prefix hit takes a block out of the *middle*, and that
    must not cost a walk over the pool. Two sentinels save every operation the cases "empty" and "at the end".
    vLLM: V0 a free list in core/block/naive_block.py plus core/evictor.py LRUEvictor; V1
    v1/core/kv_cache_utils.py FreeKVCacheBlockQueue.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Starts with all of `blocks`, the first one at the front. Mutates: their links."""
        self.num_free_blocks = 0
        self._front = KVCacheBlock(block_id=-1)
        self._back = KVCacheBlock(block_id=-1)
        self._front.next, self._back.prev = self._back, self._front
        self.append_n(blocks)

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Takes `n` blocks from the front, in order.

        Mutates: the queue. Raises: ValueError, with nothing changed, if `n` is negative or more than there are.
        """
        if not 0 <= n <= self.num_free_blocks:
            raise ValueError(f"cannot take {n} blocks from a free queue of {self.num_free_blocks}")
        taken = []
        for _ in range(n):
            block = self._front.next
            assert block is not None  # the counter says so
            self.remove(block)
            taken.append(block)
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        """Takes `block` out from wherever it stands, in constant time.

        Mutates: the queue. Raises: ValueError if it does not stand in a queue.
        """
        if block.prev is None or block.next is None:
            raise ValueError(f"block {block.block_id} is not in the free queue")
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = None
        self.num_free_blocks -= 1

    def append_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Puts `blocks` at the back, the first of them nearest to the front. Mutates: the queue."""
        for block in blocks:
            assert self._back.prev is not None  # a sentinel is always linked
            self._insert(self._back.prev, block, self._back)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Puts `blocks` at the front, the first of them foremost. Mutates: the queue."""
        for block in reversed(blocks):
            assert self._front.next is not None  # a sentinel is always linked
            self._insert(self._front, block, self._front.next)

    def _insert(self, before: KVCacheBlock, block: KVCacheBlock, after: KVCacheBlock) -> None:
        if block.prev is not None or block.next is not None:
            raise ValueError(f"block {block.block_id} is in the free queue already")
        block.prev, block.next = before, after
        before.next = after.prev = block
        self.num_free_blocks += 1

    def __iter__(self) -> Iterator[KVCacheBlock]:
        """Front to back. For pictures and checks: the engine itself never walks the queue."""
        block = self._front.next
        while block is not None and block is not self._back:
            yield block
            block = block.next

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the counter, the walk and the links in both directions agree."""
        check_queue(self)
        for block in self:
            if block.prev is None or block.prev.next is not block:
                raise IntegrityError(f"the links around block {block.block_id} disagree")


def check_queue(queue: FreeKVCacheBlockQueue) -> None:
    """Raises IntegrityError unless the counter equals the walked length and each block stands in the queue once.

    Uses only what any free queue offers, so that one built in another way can be checked too.
    """
    ids: dict[int, None] = {}
    for block in queue:
        if block.block_id in ids:
            raise IntegrityError(f"the free queue lists block {block.block_id} twice")
        ids[block.block_id] = None
    if len(ids) != queue.num_free_blocks:
        raise IntegrityError(
            f"the free queue counts {queue.num_free_blocks} blocks, but {len(ids)} are in it"
        )
