"""All blocks of the KV cache, the queue of free ones, and the index from hash to block.

Every group of layers draws from this one pool. Blocks change hands here and nowhere else: `get_new_blocks`
takes them (and forgets what they held), `touch` takes them back for a prefix hit, `cache_full_blocks` makes
them findable, `free_blocks` returns them.
vLLM: V0 core/block/cpu_gpu_block_allocator.py over naive_block.py and prefix_caching_block.py; V1
v1/core/block_pool.py BlockPool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from refengine.errors import IntegrityError
from refengine.hashing import BlockHash
from refengine.trace.observer import Observer
from refengine.v1.block import BlockKey, FreeKVCacheBlockQueue, KVCacheBlock
from refengine.v1.events import AllBlocksCleared, BlockRemoved, KVCacheEvent, block_stored
from refengine.v1.groups.spec import GroupSpec
from refengine.v1.request import Request

GROUP_ID_BYTES = 4


def block_key(block_hash: BlockHash, group_id: int) -> BlockKey:
    """What the index is keyed by: groups hash the same tokens, but a block holds the layers of one group."""
    return block_hash + group_id.to_bytes(GROUP_ID_BYTES, "big")


def group_of(key: BlockKey) -> int:
    """The id of the group whose block this is."""
    return int.from_bytes(key[-GROUP_ID_BYTES:], "big")


class BlockPool:
    """`num_blocks` blocks with ids from 0. Block 0 is the null block and is never handed out."""

    def __init__(
        self,
        num_blocks: int,
        *,
        enable_caching: bool = True,
        enable_events: bool = False,
        observer: Observer | None = None,
        make_free_queue: Callable[[Sequence[KVCacheBlock]], FreeKVCacheBlockQueue] = FreeKVCacheBlockQueue,
    ) -> None:
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.free_queue = make_free_queue(self.blocks)
        self.null_block = self.free_queue.popleft_n(1)[0]
        self.null_block.is_null = True
        # Equal live blocks are not merged, since that would rewrite a block table, and tables only ever grow.
        # So a key leads to all copies, and the one inserted first is the one that is found.
        self._index: dict[BlockKey, dict[int, KVCacheBlock]] = {}
        self._tails: dict[int, list[BlockKey]] = {}  # by block id: keys of prompts that end inside the block
        self._events: list[KVCacheEvent] | None = [] if enable_events else None
        self.observer = observer

    # -- taking and returning blocks ------------------------------------------------------------------------

    def get_new_blocks(self, n: int) -> list[KVCacheBlock]:
        """Takes the `n` blocks at the front of the free queue for one user each. They hold nothing findable.

        Mutates: queue, index (a taken block that was cached is evicted), counts.
        Raises: ValueError, with nothing changed, if `n` is negative or more than there are.
        """
        taken = self.free_queue.popleft_n(n)
        for block in taken:
            self._evict(block)
            block.ref_count = 1
        return taken

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One more user for each of `blocks`. A free one leaves the queue, contents and hash untouched.

        The null block is nobody's: it is not counted. Mutates: queue, counts.
        """
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_count == 0:
                self.free_queue.remove(block)
            block.ref_count += 1

    def free_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One user less for each of `blocks`, given in the order in which they should be evicted.

        Whoever has no user left joins the free queue: at the back if its contents can still be found, so that
        the least recently used goes first, and at the front if not, since it is worth nothing to anybody.
        Mutates: queue, counts. Raises: IntegrityError for a block that has no user.
        """
        findable: list[KVCacheBlock] = []
        worthless: list[KVCacheBlock] = []
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_count == 0:
                raise IntegrityError(f"block {block.block_id} is released, but nobody uses it")
            block.ref_count -= 1
            if block.ref_count == 0:
                (worthless if block.block_hash is None else findable).append(block)
        self.free_queue.prepend_n(worthless)
        self.free_queue.append_n(findable)

    # -- finding blocks -------------------------------------------------------------------------------------

    def get_cached_block(self, block_hash: BlockHash, group_ids: Sequence[int]) -> list[KVCacheBlock] | None:
        """The block that holds this prefix in each of the groups, or None unless all of them have one."""
        found = []
        for group_id in group_ids:
            copies = self._index.get(block_key(block_hash, group_id))
            if not copies:
                return None
            found.append(next(iter(copies.values())))
        return found

    def cache_full_blocks(
        self,
        request: Request,
        blocks: Sequence[KVCacheBlock],
        num_cached: int,
        num_full: int,
        group: GroupSpec,
        reachable: Iterable[int] | None = None,
    ) -> None:
        """Publishes blocks `num_cached` to `num_full` of the request's table: from now on they can be found.

        This happens when a step is *scheduled*, before its K/V exist. A request later in the same step may
        hit them, because within each layer the whole step's K/V are written before attention reads any.
        `reachable`: only these of the positions, in order. Null blocks are passed over.
        Mutates: index, the blocks' hashes, events.
        """
        published = []
        hashes = group.hashes(request.block_hashes)
        for position in range(num_cached, num_full) if reachable is None else reachable:
            block = blocks[position]
            if block.is_null:
                continue
            if block.block_hash in self._tails.get(block.block_id, ()):
                self._evict(block)  # it was known by its beginning, and is full now
            if block.block_hash is not None:
                raise IntegrityError(
                    f"block {block.block_id} is published twice, by {request.request_id!r} now"
                )
            block.block_hash = block_key(hashes[position], group.group_id)
            self._index.setdefault(block.block_hash, {})[block.block_id] = block
            published.append(position)
        self.announce(request, num_cached, num_full, group, published)
        if self.observer is not None and published:
            self.observer.mark(
                "publish",
                request.request_id,
                group=group.group_id,
                block_ids=[blocks[i].block_id for i in published],
                hashes=[hashes[i].hex()[:8] for i in published],
            )

    def cache_partial_block(
        self, request: Request, block: KVCacheBlock, num_tokens: int, group: GroupSpec
    ) -> None:
        """Makes a block known by the first `num_tokens` tokens of the request as well, which end inside it.

        Nobody looks for such a key unless hits may end inside a block, which is not supported here. vLLM inserts and
        announces it in any case, so a mirror gets to hear of it. Mutates: index, the block's hash, events.
        """
        unit = group.hash_block_size or group.block_size
        last = num_tokens // unit
        key = block_key(request.block_hashes[last - 1], group.group_id)
        if block.block_id in self._index.get(key, {}):
            return
        block.block_hash = block.block_hash or key
        self._index.setdefault(key, {})[block.block_id] = block
        self._tails.setdefault(block.block_id, []).append(key)
        self.announce(request, last - 1, last, replace(group, block_size=unit))

    def announce(
        self,
        request: Request,
        first: int,
        last: int,
        group: GroupSpec,
        published: Sequence[int] | None = None,
        reused: bool = False,
    ) -> None:
        """Emits one stored event for blocks `first` to `last` of the request, if events are on.

        `published` None: all of them. `reused`: nothing is new, the request found them. Mutates: events.
        """
        if self._events is None:
            return
        positions = range(first, last) if published is None else published
        self._events.append(block_stored(request, first, last, group, positions, reused))

    # -- forgetting -----------------------------------------------------------------------------------------

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Makes these blocks unfindable, wherever they are. Their users and their place in the queue stay.

        Mutates: index, events. Raises: ValueError for an id that is not in the pool.
        """
        for block_id in block_ids:
            if not 0 < block_id < self.num_blocks:
                raise ValueError(f"block {block_id} is not in the pool (1 to {self.num_blocks - 1})")
            self._evict(self.blocks[block_id])

    def reset_prefix_cache(self) -> bool:
        """Forgets all hashes, if no block is in use: a running request's blocks would become unfindable to itself.

        Returns: whether it was done. Mutates: index, events.
        """
        if self.free_queue.num_free_blocks != self.num_blocks - 1:
            return False
        self._index.clear()
        self._tails.clear()
        for block in self.blocks:
            block.block_hash = None
        if self._events is not None:
            self._events.append(AllBlocksCleared())
        return True

    def _evict(self, block: KVCacheBlock) -> None:
        if block.block_hash is None:
            return
        for key in dict.fromkeys((block.block_hash, *self._tails.pop(block.block_id, ()))):
            copies = self._index[key]
            del copies[block.block_id]
            if not copies:
                del self._index[key]
            if self._events is not None:
                self._events.append(BlockRemoved((key[:-GROUP_ID_BYTES],), group_of(key)))
        block.block_hash = None

    # -- looking at it --------------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        return self.free_queue.num_free_blocks

    @property
    def usage(self) -> float:
        """Share of the blocks that some request uses, 0 to 1. A cached but free block does not count."""
        return 1.0 - self.num_free_blocks / (self.num_blocks - 1)

    def prefixes(self) -> set[tuple[int, BlockHash]]:
        """Everything that can be found: group id, and hash of the prefix's last block."""
        return {(group_of(key), key[:-GROUP_ID_BYTES]) for key in self._index}

    def take_events(self) -> list[KVCacheEvent]:
        """Drains the event queue. Mutates: events."""
        events, self._events = self._events or [], [] if self._events is not None else None
        return events

    def check_integrity(self) -> None:
        """Raises IntegrityError unless queue, counts and index agree with one another."""
        check_pool(self)
        for block in self.blocks:
            if (
                block.block_hash is not None
                and self._index[block.block_hash].get(block.block_id) is not block
            ):
                raise IntegrityError(f"block {block.block_id} carries a hash under which it cannot be found")
        for key, copies in self._index.items():
            for block_id, block in copies.items():
                known = (block.block_hash, *self._tails.get(block_id, ()))
                if block.block_id != block_id or key not in known:
                    raise IntegrityError(f"the index leads to block {block_id}, which carries another hash")


def check_pool(pool: BlockPool) -> None:
    """Raises IntegrityError unless free means unused, and whatever carries a hash leads to a block of that hash.

    Uses only what any block pool offers, so that one built in another way can be checked too.
    """
    pool.free_queue.check_integrity()
    listed = {block.block_id for block in pool.free_queue}
    for block in pool.blocks:
        if not block.is_null and (block.ref_count == 0) != (block.block_id in listed):
            where = "in" if block.block_id in listed else "not in"
            raise IntegrityError(
                f"block {block.block_id} has {block.ref_count} users and is {where} the free queue"
            )
        if block.block_hash is not None:
            found = pool.get_cached_block(block.block_hash[:-GROUP_ID_BYTES], [group_of(block.block_hash)])
            if not found or found[0].block_hash != block.block_hash:
                raise IntegrityError(f"block {block.block_id} carries a hash under which it cannot be found")
