"""Block tables of one group: who holds which blocks, how many more are needed, what is published.

Everything that is the same for every kind of layer is here. What a kind decides for itself is which blocks a
lookup needs (`find_longest_cache_hit`) and which blocks a request no longer needs (`remove_skipped_blocks`).
vLLM: V0 core/block_manager.py SelfAttnBlockSpaceManager; V1 v1/core/single_type_kv_cache_manager.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from refengine.errors import IntegrityError
from refengine.hashing import BlockHash
from refengine.v1.block import KVCacheBlock
from refengine.v1.block_pool import BlockPool
from refengine.v1.groups.spec import GroupSpec
from refengine.v1.request import Request


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


class GroupManager(ABC):
    """The block table of every request in one group. A table is append-only while its request runs."""

    def __init__(self, spec: GroupSpec, pool: BlockPool) -> None:
        self.spec = spec
        self.block_size = spec.block_size
        self.pool = pool
        self.tables: dict[str, list[KVCacheBlock]] = {}
        self.num_published: dict[
            str, int
        ] = {}  # leading blocks of the table that were published or were hits

    @abstractmethod
    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_length: int, drop_last: bool
    ) -> list[KVCacheBlock]:
        """The blocks of the longest prefix, of at most `max_length` tokens, whose K/V this group can serve.

        `drop_last`: give the last block back, since a draft head needs the hidden states of the tokens in it.
        Mutates nothing: a lookup may be repeated, or never be followed by an allocation.
        """

    @abstractmethod
    def remove_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Returns blocks that no later token of the request can see. Mutates: table and pool."""

    def table(self, request_id: str) -> list[KVCacheBlock]:
        """The request's blocks in token order; empty for a request that holds none."""
        return self.tables.get(request_id, [])

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, hits: Sequence[KVCacheBlock]
    ) -> int:
        """Free blocks it takes for the request to have slots for `num_tokens` tokens, `hits` adopted first.

        A hit that nobody uses counts too: it stands in the free queue, and adopting it takes it from there.
        """
        held = len(self.table(request_id)) + len(hits)
        new = max(num_blocks_for(num_tokens, self.block_size) - held, 0)
        return new + sum(block.ref_count == 0 and not block.is_null for block in hits)

    def add_computed_blocks(self, request_id: str, hits: Sequence[KVCacheBlock]) -> None:
        """Makes the blocks of a hit the head of the request's table. Mutates: table, pool."""
        if self.table(request_id):
            raise IntegrityError(f"request {request_id!r} adopts a hit, but holds blocks already")
        self.pool.touch(hits)
        self.tables[request_id] = list(hits)
        self.num_published[request_id] = len(hits)

    def allocate_new_blocks(self, request_id: str, num_tokens: int) -> list[KVCacheBlock]:
        """Grows the table until it has slots for `num_tokens` tokens. Returns: the new blocks.

        Mutates: table, pool. Raises: ValueError if the pool has too few; ask `get_num_blocks_to_allocate` first.
        """
        table = self.tables.setdefault(request_id, [])
        new = self.pool.get_new_blocks(max(num_blocks_for(num_tokens, self.block_size) - len(table), 0))
        table.extend(new)
        return new

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Publishes the blocks that the first `num_tokens` tokens fill. Mutates: pool."""
        num_full = num_tokens // self.block_size
        num_published = self.num_published.get(request.request_id, 0)
        if num_full > num_published:
            table = self.tables[request.request_id]
            self.pool.cache_full_blocks(request, table, num_published, num_full, self.spec)
            self.num_published[request.request_id] = num_full

    def free(self, request_id: str) -> None:
        """Returns all blocks of the request, last one first: a tail without its head is of no use, so it goes first.

        Mutates: table, pool. A request without blocks is fine.
        """
        self.num_published.pop(request_id, None)
        self.pool.free_blocks(self.tables.pop(request_id, [])[::-1])
