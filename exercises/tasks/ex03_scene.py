"""A small stage for chapter and exercise 03: requests start and end on a cache, and no model runs.

`Scene` plays the scheduler of V1: starting a request is lookup, admit, allocate and publish in one step, ending it
gives its blocks back. `SceneV0` plays the same story on V0's block manager. Both keep a record of every step, so
pictures and steppers are drawn from what happened. `DequeQueue` is the obvious way to build a free queue, to be
measured against the linked one.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from refengine.hashing import BlockHasher
from refengine.sampling import SamplingParams
from refengine.trace.observer import PoolSnapshot
from refengine.trace.record import Record, Recorder
from refengine.v0.block import content_hash
from refengine.v0.block_manager import AllocStatus, BlockManager
from refengine.v0.prefix_caching import PrefixCachingBlockAllocator
from refengine.v0.sequence import Sequence as V0Sequence
from refengine.v0.sequence import SequenceGroup, SequenceStatus
from refengine.v1.block import BlockKey, FreeKVCacheBlockQueue, KVCacheBlock
from refengine.v1.block_pool import BlockPool
from refengine.v1.groups.spec import FULL_ATTENTION, GroupSpec
from refengine.v1.kv_cache_manager import KVCacheManager
from refengine.v1.request import Request, RequestStatus
from refengine.viz import PoolState, states

MAX_MODEL_LEN = 4096


class PoolBase(BlockPool):
    """The engine's pool, made to be derived from: the index and its removal have names that do not begin with `_`.

    While a part runs under guard, every public call ends with a check of the whole pool. A call that is made in the
    middle of another one would be checked too early, and the check itself calls `get_cached_block`; so these few
    stay unguarded.
    """

    INNER = ("get_cached_block", "evict_blocks", "forget")

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in cls.INNER:
            if unguarded := getattr(cls.__dict__.get(name), "__wrapped__", None):
                setattr(cls, name, unguarded)

    @property
    def index(self) -> dict[BlockKey, dict[int, KVCacheBlock]]:
        """Key -> all blocks with that content, by block id, in the order in which they were published."""
        return self._index

    def forget(self, block: KVCacheBlock) -> None:
        """Takes this one block out of the index and its hash off the block. One without a hash is fine."""
        self._evict(block)


class Scene:
    """`num_blocks` counts the null block. `pool` and `queue` are classes, and run without guard."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 4,
        *,
        pool: Callable[..., BlockPool] = BlockPool,
        queue: Any = FreeKVCacheBlockQueue,
    ) -> None:
        self.recorder = Recorder()
        self.manager = KVCacheManager(
            [GroupSpec(0, FULL_ATTENTION, block_size)],
            num_blocks,
            MAX_MODEL_LEN,
            observer=self.recorder,
            make_block_pool=partial(pool, make_free_queue=queue),
        )
        self.hasher = BlockHasher("sha256_cbor", block_size, seed="0")
        self.requests: dict[str, Request] = {}
        self.recorder.attach("v1", num_blocks, block_size, self.manager.snapshot)

    @property
    def pool(self) -> BlockPool:
        return self.manager.block_pool

    def lookup(self, token_ids: Iterable[int]) -> list[int]:
        """The blocks that a request with these tokens would find now. Changes nothing."""
        return self.manager.get_computed_blocks(self._request("?", token_ids))[0].ids()[0]

    def start(self, name: str, token_ids: Iterable[int]) -> list[int] | None:
        """One step: looks up, admits, allocates for all tokens. Returns: the block table; None: not now."""
        request = self._request(name, token_ids)
        self.recorder.begin_step()
        hits, num_hit_tokens, _ = self.manager.get_computed_blocks(request)
        self.recorder.mark(
            "lookup",
            name,
            num_tokens=request.num_tokens,
            hit_tokens=num_hit_tokens,
            block_ids=list(hits.ids()),
        )
        num_new_tokens = request.num_tokens - num_hit_tokens
        if self.manager.allocate_slots(request, num_new_tokens, hits, num_hit_tokens) is None:
            self.recorder.end_step()
            return None
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = request.num_tokens
        self.requests[name] = request
        self.recorder.mark("run", name, start=num_hit_tokens, num_tokens=num_new_tokens)
        self.recorder.end_step()
        return self.table(name)

    def finish(self, name: str) -> None:
        """The request ends and gives its blocks back."""
        self.recorder.begin_step()
        self.manager.free(self.requests.pop(name))
        self.recorder.end_step()

    def evict(self, *block_ids: int) -> None:
        """Takes the hashes of these blocks out of the index, wherever the blocks are."""
        self.recorder.begin_step()
        self.pool.evict_blocks(block_ids)
        self.recorder.end_step()

    def table(self, name: str) -> list[int]:
        """The block table of a request."""
        return self.manager.block_ids(name)[0]

    @property
    def queue(self) -> list[int]:
        """The free queue as block ids, front first."""
        return [block.block_id for block in self.pool.free_queue]

    @property
    def record(self) -> Record:
        return self.recorder.record

    @property
    def now(self) -> PoolState:
        return _moments(self.record)[-1]

    @property
    def before(self) -> PoolState:
        """How the pool stood before the last step."""
        return _moments(self.record)[-2]

    def _request(self, name: str, token_ids: Iterable[int]) -> Request:
        return Request(name, list(token_ids), SamplingParams(), hasher=self.hasher)


class SceneV0:
    """The same story on V0's block manager. Its ids start at 0, and the clock ticks once per step."""

    def __init__(self, num_blocks: int, block_size: int = 4) -> None:
        self.manager = BlockManager(block_size, num_blocks, 0, watermark=0.0, enable_caching=True)
        self.seqs: dict[str, V0Sequence] = {}
        self._ids = itertools.count()
        self.clock = 0.0
        self.recorder = Recorder()
        self.recorder.attach("v0", num_blocks, block_size, self._snapshot)

    @property
    def gpu(self) -> PrefixCachingBlockAllocator:
        """The allocator of the GPU's blocks: a free list and an evictor."""
        allocator = self.manager.allocator.gpu
        assert isinstance(allocator, PrefixCachingBlockAllocator)  # caching is on
        return allocator

    def lookup(self, token_ids: Iterable[int]) -> list[int]:
        """The blocks that a request with these tokens would find now."""
        seq = V0Sequence(-1, list(token_ids))
        num_blocks = self.manager.get_num_cached_tokens(seq) // self.manager.block_size
        self.manager.computed.remove(seq)
        hashes = _content_hashes(seq.token_ids, self.manager.block_size)
        return [self.gpu.cached[content_hash] for content_hash in hashes[:num_blocks]]

    def start(self, name: str, token_ids: Iterable[int]) -> list[int] | None:
        """One step: allocates for all tokens and marks them computed. Returns: the block table; None: not now."""
        seq = V0Sequence(next(self._ids), list(token_ids))
        group = SequenceGroup(name, [seq])
        self.manager.get_num_cached_tokens(seq)
        if self.manager.can_allocate(group) is not AllocStatus.OK:
            self.manager.computed.remove(seq)
            return None
        self.recorder.begin_step()
        self.clock += 1
        self.manager.allocate(group)
        seq.status = SequenceStatus.RUNNING
        self.manager.access_all_blocks_in_seq(seq, self.clock)
        self.manager.mark_blocks_as_computed(seq, len(seq.token_ids))
        seq.update_num_computed_tokens(len(seq.token_ids))
        self.seqs[name] = seq
        self.recorder.end_step()
        return self.table(name)

    def append(self, name: str, *token_ids: int) -> list[int]:
        """The request gets more tokens. Returns: its block table afterwards."""
        seq = self.seqs[name]
        self.recorder.begin_step()
        self.clock += 1
        seq.token_ids.extend(token_ids)
        self.manager.append_slots(seq)
        self.manager.access_all_blocks_in_seq(seq, self.clock)
        self.recorder.end_step()
        return self.table(name)

    def finish(self, name: str) -> None:
        """The request ends and gives its blocks back."""
        self.recorder.begin_step()
        self.manager.free(self.seqs.pop(name))
        self.recorder.end_step()

    def table(self, name: str) -> list[int]:
        """The block table of a request."""
        return self.manager.block_ids(self.seqs[name])

    @property
    def free_list(self) -> list[int]:
        """Blocks in which nothing can be found, the next to be taken first."""
        return list(self.gpu.free_ids)

    @property
    def evictor(self) -> list[tuple[int, float, int]]:
        """Cached blocks that nobody uses: (block, last access, tokens up to its end), the next to go first."""
        return self.gpu.evictor.order()

    @property
    def queue(self) -> list[int]:
        """In which order blocks would be handed out: the free list, then the evictor."""
        return self.free_list + [block_id for block_id, _, _ in self.evictor]

    @property
    def record(self) -> Record:
        return self.recorder.record

    @property
    def now(self) -> PoolState:
        return _moments(self.record)[-1]

    @property
    def before(self) -> PoolState:
        """How the pool stood before the last step."""
        return _moments(self.record)[-2]

    def _snapshot(self) -> PoolSnapshot:
        tables = {name: [self.manager.block_ids(seq)] for name, seq in self.seqs.items()}
        return PoolSnapshot(self.queue, sorted(self.gpu.cached.values()), tables)


def _moments(record: Record) -> list[PoolState]:
    """How the pool stood before the first step and after each."""
    first = PoolState.of(
        record.num_blocks,
        record.start.free,
        record.start.cached,
        null_block=record.engine != "v0",
        when="before the first step",
    )
    return [first, *states(record)]


def _content_hashes(token_ids: Sequence[int], block_size: int) -> list[int]:
    hashes: list[int] = []
    for end in range(block_size, len(token_ids) + 1, block_size):
        hashes.append(content_hash(hashes[-1] if hashes else None, token_ids[end - block_size : end]))
    return hashes


class DequeQueue:
    """A free queue on `collections.deque`, with the contract of `FreeKVCacheBlockQueue`."""

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._blocks = deque(blocks)

    @property
    def num_free_blocks(self) -> int:
        return len(self._blocks)

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Takes `n` blocks from the front, in order. Raises: ValueError."""
        if not 0 <= n <= len(self._blocks):
            raise ValueError(f"cannot take {n} blocks from a free queue of {len(self._blocks)}")
        return [self._blocks.popleft() for _ in range(n)]

    def remove(self, block: KVCacheBlock) -> None:
        """Takes `block` out. The deque looks for it from the front. Raises: ValueError."""
        self._blocks.remove(block)

    def append_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Puts `blocks` at the back."""
        self._blocks.extend(blocks)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Puts `blocks` at the front, the first of them foremost."""
        self._blocks.extendleft(reversed(blocks))

    def __iter__(self) -> Iterator[KVCacheBlock]:
        return iter(self._blocks)
