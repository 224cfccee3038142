"""Small V0 engines for directed tests, in the words of the shared cases. Blocks are numbered from 0.

"Start R" looks R up, takes blocks for its whole prompt and counts one step; "finish R" gives R's blocks back.
`begin` is the first half of a start: blocks are taken, but the model has not run yet.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from refengine.config import EngineConfig
from refengine.hashing import Adapter
from refengine.sampling import SamplingParams
from refengine.v0.block_manager import AllocStatus, BlockManager
from refengine.v0.prefix_caching import PrefixCachingBlockAllocator
from refengine.v0.scheduler import Scheduler
from refengine.v0.sequence import Sequence as V0Sequence
from refengine.v0.sequence import SequenceGroup, SequenceGroupMetadata, SequenceStatus
from tests.unit import helpers

Pairs = list[tuple[int, int]]


class Manager:
    """A block manager, and sequences that are groups of their own unless they were forked."""

    def __init__(
        self, gpu: int, cpu: int = 0, block_size: int = 4, *, mode: str = "fixed", **options: Any
    ) -> None:
        self.manager = BlockManager(
            block_size,
            gpu,
            cpu,
            **{"watermark": 0.0, "enable_caching": True, "faithful": mode == "faithful"} | options,
        )
        self.seqs: dict[str, V0Sequence] = {}
        self.groups: dict[str, SequenceGroup] = {}
        self._seq_ids, self._clock = itertools.count(), itertools.count(1)

    @property
    def gpu(self) -> PrefixCachingBlockAllocator:
        gpu = self.manager.allocator.gpu
        assert isinstance(gpu, PrefixCachingBlockAllocator)  # for tests with caching
        return gpu

    def add(self, name: str, tokens: Sequence[int], adapter: Adapter | None = None) -> SequenceGroup:
        """A waiting sequence; holds nothing yet."""
        self.seqs[name] = V0Sequence(next(self._seq_ids), tokens, adapter)
        self.groups[name] = SequenceGroup(name, [self.seqs[name]])
        return self.groups[name]

    def can_start(self, name: str, num_lookahead_slots: int = 0) -> AllocStatus:
        return self.manager.can_allocate(self.groups[name], num_lookahead_slots)

    def admit(self, name: str) -> int:
        """Looks a waiting sequence up and takes blocks for all its tokens. Returns: the hit, in tokens."""
        seq = self.seqs[name]
        found = self.manager.get_num_cached_tokens(seq)
        self.manager.allocate(self.groups[name])
        seq.status = SequenceStatus.RUNNING
        self.verify()
        return found

    def begin(self, name: str, tokens: Sequence[int], adapter: Adapter | None = None) -> int:
        """`add` and `admit`."""
        self.add(name, tokens, adapter)
        return self.admit(name)

    def run(self, name: str, num_tokens: int | None = None) -> None:
        """The model computes the tokens that are left, or the next `num_tokens` of them."""
        seq = self.seqs[name]
        count = seq.num_uncomputed_tokens if num_tokens is None else num_tokens
        self.manager.access_all_blocks_in_seq(seq, float(next(self._clock)))
        self.manager.mark_blocks_as_computed(seq, count)
        seq.update_num_computed_tokens(count)
        self.verify()

    def start(self, name: str, tokens: Sequence[int], adapter: Adapter | None = None) -> int:
        """`begin` and `run`. Returns: the hit, in tokens."""
        found = self.begin(name, tokens, adapter)
        self.run(name)
        return found

    def append(self, name: str, *tokens: int, num_lookahead_slots: int = 0) -> Pairs:
        """Sampled tokens join, and get their slots. Returns: blocks to copy first."""
        self.seqs[name].token_ids.extend(tokens)
        copies = self.manager.append_slots(self.seqs[name], num_lookahead_slots)
        self.verify()
        return copies

    def decode(self, name: str, *tokens: int) -> None:
        """Each token joins and is computed in a step of its own."""
        for token in tokens:
            self.append(name, token)
            self.run(name, 1)

    def can_append(self, name: str, num_lookahead_slots: int = 0) -> bool:
        return self.manager.can_append_slots(self.groups[name], num_lookahead_slots)

    def fork(self, parent: str, child: str) -> None:
        self.seqs[child] = self.seqs[parent].fork(next(self._seq_ids))
        self.groups[parent].seqs.append(self.seqs[child])
        self.manager.fork(self.seqs[parent], self.seqs[child])
        self.verify()

    def swap_out(self, name: str) -> Pairs:
        pairs = self.manager.swap_out(self.groups[name])
        self.seqs[name].status = SequenceStatus.SWAPPED
        self.verify()
        return pairs

    def swap_in(self, name: str) -> Pairs:
        pairs = self.manager.swap_in(self.groups[name])
        self.seqs[name].status = SequenceStatus.RUNNING
        self.verify()
        return pairs

    def finish(self, name: str) -> None:
        seq = self.seqs.pop(name)
        seq.status = SequenceStatus.FINISHED_STOPPED
        self.manager.free(seq)
        self.verify()

    def look(self, name: str) -> int:
        """The computed prefix of a sequence that exists, in tokens."""
        return self.manager.get_num_cached_tokens(self.seqs[name])

    def hit(self, tokens: Sequence[int], adapter: Adapter | None = None) -> int:
        """The computed prefix that a newcomer would find, in tokens."""
        return self.manager.get_num_cached_tokens(V0Sequence(next(self._seq_ids), tokens, adapter))

    def common(self, *names: str) -> list[int]:
        """What the worker is told to skip, as block ids."""
        return self.manager.get_common_computed_block_ids([self.seqs[name] for name in names])

    def table(self, name: str) -> list[int]:
        return self.manager.block_ids(self.seqs[name])

    def counts(self, *block_ids: int) -> list[int]:
        return [self.manager.allocator.gpu.ref_counts[block_id] for block_id in block_ids]

    @property
    def free(self) -> list[int]:
        """The free list, front first."""
        return list(self.manager.allocator.gpu.free_ids)

    @property
    def evictable(self) -> list[int]:
        """Cached blocks without a user, the next to be evicted first."""
        return [block_id for block_id, _, _ in self.gpu.evictor.order()]

    @property
    def num_free(self) -> int:
        return self.manager.allocator.gpu.num_free_blocks

    def verify(self) -> None:
        if helpers.CHECK_INTEGRITY:
            self.manager.check_integrity()


class Steps:
    """V0's scheduler without a model: every group that may sample gets a fresh token."""

    def __init__(
        self,
        gpu: int,
        cpu: int = 0,
        block_size: int = 4,
        *,
        max_model_len: int = helpers.ENDLESS,
        observer: Any = None,
        **options: Any,
    ) -> None:
        """Without chunked prefill, unless `options` say otherwise."""
        options = {"enable_chunked_prefill": False} | options
        self.config = EngineConfig(
            engine="v0", block_size=block_size, num_blocks=gpu, num_cpu_blocks=cpu, **options
        )
        self.manager = BlockManager(
            block_size,
            gpu,
            cpu,
            watermark=self.config.watermark,
            enable_caching=self.config.enable_prefix_caching,
            faithful=self.config.mode == "faithful",
        )
        self.scheduler = Scheduler(self.config, self.manager, max_model_len, observer)
        self.groups: dict[str, SequenceGroup] = {}
        self.fresh = 10_000
        self.num_steps = 0

    def add(
        self, name: str, tokens: Sequence[int], max_tokens: int = helpers.ENDLESS, priority: int = 0
    ) -> V0Sequence:
        seq = V0Sequence(len(self.groups), tokens)
        params = SamplingParams(max_tokens=max_tokens)
        group = SequenceGroup(name, [seq], params, arrival=seq.seq_id, priority=priority)
        self.groups[name] = group
        self.scheduler.add(group)
        return seq

    def schedule(self) -> None:
        """The first half of a step. Mutates: `metadata`, by name, and `out`."""
        self.num_steps += 1
        metadata, self.out = self.scheduler.schedule(float(self.num_steps))
        self.metadata: dict[str, SequenceGroupMetadata] = {each.request_id: each for each in metadata}
        self.verify()

    def step(self, sampled: Mapping[str, int] | None = None) -> dict[str, int]:
        """One step; `sampled` overrides fresh tokens. Returns: the chunk of each scheduled group, in order."""
        self.schedule()
        for name, each in self.metadata.items():
            group = self.groups[name]
            seq = group.first_seq
            seq.update_num_computed_tokens(each.token_chunk_size)
            if not each.do_sample:
                continue
            self.fresh += 1
            seq.token_ids.append((sampled or {}).get(name, self.fresh))
            if len(seq.output_token_ids) == group.params.max_tokens:
                seq.status = SequenceStatus.FINISHED_LENGTH
                self.manager.free(seq)
        self.scheduler.free_finished()
        self.verify()
        return {name: each.token_chunk_size for name, each in self.metadata.items()}

    def finish(self, name: str) -> None:
        self.scheduler.abort(name)
        self.verify()

    def table(self, name: str) -> list[int]:
        return self.manager.block_ids(self.groups[name].first_seq)

    def skipped(self, name: str) -> list[int] | None:
        """Of the last step: the blocks that the worker may skip."""
        return self.metadata[name].computed_block_nums

    @property
    def preempted(self) -> list[tuple[str, str]]:
        """Of the last step: names, with RECOMPUTE or SWAP."""
        return [(group.request_id, mode) for group, mode in self.out.preempted]

    def queue(self, name: str) -> list[str]:
        """The groups in `waiting`, `running` or `swapped`."""
        return [group.request_id for group in getattr(self.scheduler, name)]

    @property
    def num_free(self) -> int:
        return self.manager.allocator.gpu.num_free_blocks

    def verify(self) -> None:
        if helpers.CHECK_INTEGRITY:
            self.manager.check_integrity()
