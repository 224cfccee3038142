"""Block tables of one group: who holds which blocks, how many more are needed, what is published.

Everything that is the same for every kind of layer is here. What a kind decides for itself is which blocks a
hit needs (`find_longest_cache_hit`, `needed_positions`), which tokens a request no longer looks at
(`num_skipped_tokens`), and which blocks are worth publishing (`reachable`).
vLLM: V0 core/block_manager.py SelfAttnBlockSpaceManager; V1 v1/core/single_type_kv_cache_manager.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from refengine.errors import IntegrityError
from refengine.hashing import BlockHash
from refengine.v1.block import BlockKey, KVCacheBlock
from refengine.v1.block_pool import BlockPool, group_of
from refengine.v1.groups.retention import Retention
from refengine.v1.groups.spec import GroupSpec
from refengine.v1.request import Request


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


class GroupManager(ABC):
    """The block table of every request in one group. A table is append-only while its request runs.

    Only one thing ever changes inside it: a block that the request has no more use for becomes the null block.
    """

    is_downward_closed: ClassVar[bool] = False  # whoever can serve a prefix can serve each shorter one
    drops_last: ClassVar[bool] = True  # lookups for draft heads give their last block back
    reserves_for_drafts: ClassVar[bool] = True  # tokens that may be rejected need a place, too

    def __init__(self, spec: GroupSpec, pool: BlockPool, retention: Retention | None = None) -> None:
        """`retention` None: this is the only group, and it publishes all that a hit could need."""
        self.spec = spec
        self.block_size = spec.block_size
        self.pool = pool
        self.retention = retention or Retention(spec.block_size)
        self.kin: tuple[int, ...] = (spec.group_id,)  # ids of the groups of this shape, itself included
        self.tables: dict[str, list[KVCacheBlock]] = {}
        self.num_published: dict[
            str, int
        ] = {}  # leading blocks of the table that were published or were hits
        self.num_passed: dict[str, int] = {}  # leading blocks that the request was seen to have passed
        # K/V may be read in the step that writes them: each layer writes those of all requests before any of them
        # reads. Only a kind for which that is not so enters its blocks here.
        self.written_this_step: set[BlockKey] = set()

    # -- what a kind decides --------------------------------------------------------------------------------

    @abstractmethod
    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_length: int, drop_last: bool
    ) -> list[KVCacheBlock]:
        """The blocks of the longest prefix, of at most `max_length` tokens, that this group can serve.

        `block_hashes`: one per block of this group. Where the group needs no block, the null block stands in its
        place. `drop_last`: give the last block back, since a draft head needs the hidden states of the tokens in it.
        Mutates nothing: a lookup may be repeated, or never be followed by an allocation.
        """

    @abstractmethod
    def needed_positions(self, num_tokens: int) -> range:
        """Positions of the blocks that must be there to go on after `num_tokens` tokens, a whole number of blocks."""

    @abstractmethod
    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Leading tokens that no token from position `num_computed_tokens` on looks at. Can be negative."""

    def num_blocks_at_peak(self, num_tokens: int, num_tokens_per_step: int) -> int:
        """Blocks that a request holds at most on its way to `num_tokens` tokens, so many a step."""
        return num_blocks_for(num_tokens, self.block_size)

    def reachable(self, request: Request, first: int, last: int) -> list[int] | None:
        """Which of the positions `first` to `last` a later hit could need. None: all."""
        return None

    # -- the same for all -----------------------------------------------------------------------------------

    def cached_block(self, block_hash: BlockHash) -> KVCacheBlock | None:
        """This group's block of that prefix; None unless every group of this shape has one."""
        found = self.pool.get_cached_block(block_hash, self.kin)
        return found[self.kin.index(self.spec.group_id)] if found else None

    def table(self, request_id: str) -> list[KVCacheBlock]:
        """The request's blocks in token order; empty for a request that holds none."""
        return self.tables.get(request_id, [])

    def begin_step(self) -> None:
        """The scheduler begins a step. Mutates: what must not be read in the step that writes it."""
        self.written_this_step.clear()

    def is_ready(self, hits: Sequence[KVCacheBlock]) -> bool:
        """Whether the hit may be used in this very step."""
        return not hits or hits[-1].block_hash not in self.written_this_step

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        hits: Sequence[KVCacheBlock],
        num_tokens_per_step: int | None = None,
    ) -> int:
        """Free blocks it takes for the request to have slots for `num_tokens` tokens, `hits` adopted first.

        A hit that nobody uses counts too: it stands in the free queue, and adopting it takes it from there.
        With `num_tokens_per_step` the tokens come in several steps, and what the request gives back on the way
        counts only once.
        """
        held = len(self.table(request_id)) + len(hits)
        if num_tokens_per_step is None:
            required = num_blocks_for(num_tokens, self.block_size)
        else:
            required = self.num_blocks_at_peak(num_tokens, num_tokens_per_step)
        new = max(required - held, 0)
        return new + sum(block.ref_count == 0 and not block.is_null for block in hits)

    def add_computed_blocks(self, request_id: str, hits: Sequence[KVCacheBlock]) -> None:
        """Makes the blocks of a hit the head of the request's table. Mutates: table, pool."""
        if self.table(request_id):
            raise IntegrityError(f"request {request_id!r} adopts a hit, but holds blocks already")
        self.pool.touch(hits)
        self.tables[request_id] = list(hits)
        self.num_published[request_id] = len(hits)

    def allocate_new_blocks(self, request_id: str, num_tokens: int) -> list[KVCacheBlock]:
        """Grows the table until it has slots for `num_tokens` tokens. Returns: what was appended.

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
            reachable = self.reachable(request, num_published, num_full)
            masked = {} if reachable is None else {"reachable": reachable}
            self.pool.cache_full_blocks(request, table, num_published, num_full, self.spec, **masked)
            self.num_published[request.request_id] = num_full

    def remove_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Returns the blocks of which the request has no more use, last one first, and leaves null blocks there.

        Mutates: table, pool.
        """
        table = self.table(request_id)
        first = self.num_passed.get(request_id, 0)
        last = min(self.num_skipped_tokens(num_computed_tokens) // self.block_size, len(table))
        if last > first:
            released = [block for block in table[first:last] if not block.is_null]
            table[first:last] = [self.pool.null_block] * (last - first)
            self.pool.free_blocks(released[::-1])
            self.num_passed[request_id] = last

    def free(self, request_id: str) -> None:
        """Returns all blocks of the request, last one first: a tail without its head is of no use, so it goes first.

        Mutates: table, pool. A request without blocks is fine.
        """
        self.num_published.pop(request_id, None)
        self.num_passed.pop(request_id, None)
        self.pool.free_blocks(self.tables.pop(request_id, [])[::-1])

    def check_integrity(self) -> None:
        """Raises IntegrityError if counts and tables disagree, or a block is known as another group's."""
        for counted in (self.num_published, self.num_passed):
            for request_id, count in counted.items():
                if count > len(self.table(request_id)):
                    raise IntegrityError(
                        f"group {self.spec.group_id} counts {count} blocks of {request_id!r}, which holds "
                        f"{len(self.table(request_id))}"
                    )
        for request_id, table in self.tables.items():
            passed = self.num_passed.get(request_id, 0)
            if not all(block.is_null for block in table[:passed]):
                raise IntegrityError(f"request {request_id!r} holds a block that it has passed")
            for block in table:
                if block.block_hash is not None and group_of(block.block_hash) != self.spec.group_id:
                    raise IntegrityError(
                        f"block {block.block_id} of group {self.spec.group_id} is known as a block of group "
                        f"{group_of(block.block_hash)}"
                    )
