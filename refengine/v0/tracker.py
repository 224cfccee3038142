"""Two memories of the block manager: how much of a sequence is cached, and when its blocks were used.

The first is where V0 decides which blocks are already computed. It hashes the sequence's tokens, asks the
allocator for the longest cached and computed prefix, and remembers the answer.
vLLM: V0 core/block/prefix_caching_block.py ComputedBlocksTracker, LastAccessBlocksTracker; V1 nothing is
remembered: v1/core/kv_cache_manager.py get_computed_blocks asks again at each attempt.
"""

from __future__ import annotations

from collections.abc import Iterable

from refengine.v0.allocator import NaiveBlockAllocator
from refengine.v0.block import ContentHash, content_hash
from refengine.v0.sequence import Sequence, SequenceStatus


class ComputedBlocksTracker:
    """Cached tokens by sequence id. `faithful`: with vLLM 0.7.3's defect, see `get_num_cached_tokens`."""

    def __init__(
        self, allocator: NaiveBlockAllocator, block_size: int, enable_caching: bool, faithful: bool
    ) -> None:
        self.allocator = allocator
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.faithful = faithful
        self._hashes: dict[int, list[ContentHash]] = {}
        self._num_cached_tokens: dict[int, int] = {}

    def get_num_cached_tokens(self, seq: Sequence) -> int:
        """Leading tokens of the sequence whose K/V are in the cache; 0 without caching.

        While a sequence is in PREFILL its first answer is kept, since its own blocks would soon be counted as
        hits. vLLM 0.7.3 keeps it from the first *look* on: a prefix evicted while the sequence waits is then
        reported, and skipped, all the same. Repaired, it is kept from the admission on.
        Mutates: the memory.
        """
        if not self.enable_caching:
            return 0
        hashes = self.hashes(seq)
        known = self._num_cached_tokens.get(seq.seq_id)
        may_have_changed = not self.faithful and seq.status is SequenceStatus.WAITING
        if known is None or not seq.is_prefill or may_have_changed:
            known = self.allocator.find_cached_blocks_prefix(hashes) * self.block_size
            self._num_cached_tokens[seq.seq_id] = known
        return known

    def remove(self, seq: Sequence) -> None:
        """Forgets a sequence. Mutates: the memory. vLLM 0.7.3 cannot bear one that was never asked about."""
        if self.enable_caching and self.faithful:
            assert seq.seq_id in self._hashes, f"sequence {seq.seq_id} was never looked up"
        self._hashes.pop(seq.seq_id, None)
        self._num_cached_tokens.pop(seq.seq_id, None)

    def hashes(self, seq: Sequence) -> list[ContentHash]:
        """The chained hashes of the sequence's full blocks. Mutates: the memory of them."""
        hashes = self._hashes.setdefault(seq.seq_id, [])
        while (start := len(hashes) * self.block_size) + self.block_size <= len(seq):
            tokens = seq.token_ids[start : start + self.block_size]
            hashes.append(content_hash(hashes[-1] if hashes else None, tokens, seq.adapter))
        return hashes


class LastAccessTracker:
    """When each sequence ran last. Its blocks learn of it only when the sequence is freed, all at once."""

    def __init__(self) -> None:
        self._times: dict[int, float | None] = {}

    def add(self, seq: Sequence) -> None:
        self._times[seq.seq_id] = None

    def remove(self, seq: Sequence) -> None:
        del self._times[seq.seq_id]

    def update(self, seq: Sequence, now: float) -> None:
        """Notes that the sequence ran. Mutates: its time."""
        self._times[seq.seq_id] = now

    def stamp_blocks(self, seq: Sequence, block_ids: Iterable[int], allocator: NaiveBlockAllocator) -> None:
        """Tells the allocator when these blocks were used last. Mutates: the allocator's trackers."""
        now = self._times[seq.seq_id]
        if now is not None:
            allocator.mark_blocks_as_accessed(block_ids, now)
