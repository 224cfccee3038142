"""V0 with a shadow.

The tap sits in the model-input builder, behind everything that decides: what the oracle gets is what the worker
would make tensors of, after the skip. Swaps and copies move the shadow as they move the memory.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from refengine.config import EngineConfig
from refengine.kv_cache import KVCache
from refengine.model.decoder import Decoder
from refengine.outputs import StepOutput
from refengine.sampling import SamplingParams
from refengine.trace.observer import MarkKind
from refengine.v0.engine import LLMEngine
from refengine.v0.model_input import ModelInput, ModelInputBuilder
from refengine.v0.prefix_caching import PrefixCachingBlockAllocator
from refengine.v0.scheduler_output import BlockPairs, SchedulerOutputs
from refengine.v0.sequence import SequenceGroup, SequenceStatus
from tests.fuzz.oracle import Prefix, SequenceInput, ShadowKV, StepInput, Violation
from tests.fuzz.shadowed import ShadowedEngine
from tests.fuzz.tally import Tally


class SharingShadow(ShadowKV):
    """A shadow that lets a shared block be written by several, if each of them would write the same there.

    V0 needs that leave twice. When a whole prompt is cached, its last token is computed and stored once more. And
    a block is shared from the moment it is allocated, but skipped only when it is computed: until then everybody
    who shares it computes it for himself.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size, may_rewrite=True)
        self.in_cpu: dict[int, Prefix] = {}  # by slot of CPU memory

    def move(self, out: SchedulerOutputs) -> None:
        """Performs the orders of a step, in the order of the worker. Mutates: both memories."""
        self._copy(self.in_cpu, self.written, out.blocks_to_swap_in)
        self._copy(self.written, self.in_cpu, out.blocks_to_swap_out)
        self._copy(self.written, self.written, out.blocks_to_copy)

    def _copy(self, source: dict[int, Prefix], destination: dict[int, Prefix], pairs: BlockPairs) -> None:
        size = self.block_size
        found = [
            (to_id * size + offset, source.get(from_id * size + offset))
            for from_id, to_id in pairs
            for offset in range(size)
        ]
        for slot, prefix in found:
            destination.pop(slot, None)
            if prefix is not None:
                destination[slot] = prefix

    def run(self, step: StepInput) -> list[Violation]:
        self._before = dict(self.written)
        return super().run(step)

    def spoil(self, slots: Collection[int]) -> None:
        """Only slots that hold something else than before: in the others, the same was stored again or nothing."""
        self.spoiled = [slot for slot in slots if self._before.get(slot) != self.written.get(slot)]
        super().spoil(self.spoiled)

    def _write(
        self, sequence: SequenceInput, step: StepInput, writers: dict[int, str]
    ) -> Iterator[Violation]:
        for i, slot in enumerate(sequence.slots):
            one = replace(
                sequence,
                token_ids=[sequence.token_ids[i]],
                positions=[sequence.positions[i]],
                slots=[slot],
            )
            forgiven = {"race", "overwrite"} if self._all_agree(one, step) else set[str]()
            yield from (found for found in super()._write(one, step, writers) if found.kind not in forgiven)

    def _all_agree(self, one: SequenceInput, step: StepInput) -> bool:
        """Whether everybody who holds the block that this token goes into has the same token there."""
        (position,), (slot,) = one.positions, one.slots
        block_id, offset = divmod(slot, self.block_size)
        wanted = self._path[one.request_id][position : position + 1]
        for holder, blocks in step.held.items():
            if block_id in blocks:
                at = list(blocks).index(block_id) * self.block_size + offset
                if self._path[holder][at : at + 1] != wanted:
                    return False
        return bool(wanted)


class TallyV0(Tally):
    """Counts what only V0 does, and remembers who was preempted."""

    def __init__(self) -> None:
        super().__init__()
        self.preempted: set[str] = set()

    def mark(self, kind: MarkKind, request_id: str, **facts: Any) -> None:
        super().mark(kind, request_id, **facts)
        if kind != "admit":
            return
        if facts["admitted"]:
            self.events["resumed"] += facts["reason"] == "new" and request_id in self.preempted
            self.events["swapped in"] += facts["reason"] == "swapped in"
            self.preempted.discard(request_id)
        elif facts["reason"].startswith("preempted"):
            self.events["swapped out"] += facts["reason"] == "preempted: swap"
            self.preempted.add(request_id)


class ShadowedV0(ShadowedEngine):
    """V0, its worker tapped."""

    shadow: SharingShadow

    def __init__(self, config: EngineConfig, model: Decoder, eos_token_ids: Sequence[int] = ()) -> None:
        assert config.num_blocks is not None  # a scenario is about a small pool, and names it
        super().__init__(SharingShadow(config.num_blocks, config.block_size))
        self.tally: TallyV0 = TallyV0()
        self.engine = LLMEngine(config, model, eos_token_ids, self.tally)
        self._tap_worker()
        self._spoil(slice(None))  # zeros could be read by accident and do no harm

    def _tap_worker(self) -> None:
        """Mutates: the worker, which from now on tells of its moves and shows its input."""
        worker, tap = self.engine.worker, self._tap
        move_blocks = worker._move_blocks

        def move(out: SchedulerOutputs, virtual_engine: int) -> None:
            move_blocks(out, virtual_engine)
            self.shadow.move(out)

        class TappedBuilder(ModelInputBuilder):
            def build(self) -> ModelInput:
                model_input = super().build()
                tap(self, model_input)
                return model_input

        worker._move_blocks, worker.builder = move, TappedBuilder  # type: ignore[method-assign]

    @property
    def kv_cache(self) -> KVCache:
        return self.engine.kv_cache

    def _add(self, request_id: str, prompt: Sequence[int], params: SamplingParams, **options: Any) -> None:
        self.engine.add_request(request_id, prompt, params, **options)

    def _step(self) -> list[StepOutput]:
        return self.engine.step()

    def state(self, request_id: str) -> str:
        group = self.engine.groups.get(request_id)
        if group is None:
            return "finished"
        status = group.first_seq.status
        if status is SequenceStatus.RUNNING:
            return "prefill" if group.is_prefill else "decode"
        return "preempted" if request_id in self.tally.preempted else "waiting"

    def abort(self, request_id: str) -> None:
        self.engine.finish(request_id)

    def reset_prefix_cache(self) -> bool:
        return self.engine.reset_prefix_cache()

    @property
    def has_unfinished_requests(self) -> bool:
        return self.engine.has_unfinished_requests

    def check_integrity(self) -> None:
        self.engine.block_manager.check_integrity()

    def leftovers(self) -> list[str]:
        scheduler, manager = self.engine.scheduler, self.engine.block_manager
        left: dict[str, Sequence[object]] = {
            "waiting": _ids(scheduler.waiting),
            "running": _ids(scheduler.running),
            "swapped": _ids(scheduler.swapped),
            "block tables": list(manager.tables),
            "hashes": list(manager.computed._hashes),
            "cached counts": list(manager.computed._num_cached_tokens),
            "times": list(manager.accessed._times),
            "GPU blocks in use": _used(manager.allocator.gpu.ref_counts),
            "CPU blocks in use": _used(manager.allocator.cpu.ref_counts),
        }
        return [f"{what}: {list(things)}" for what, things in left.items() if things]

    def _held(self) -> dict[str, list[int]]:
        return {
            request_id: [block_id for block_id in self._table(group) if block_id < self.shadow.num_blocks]
            for request_id, group in self.engine.groups.items()
        }

    def _table(self, group: SequenceGroup) -> list[int]:
        return self.engine.block_manager.block_ids(group.first_seq)

    def _findable(self) -> dict[int, Hashable]:
        """Blocks that are cached only are shared, but nobody skips them: a lookup asks for computed ones."""
        gpu = self.engine.block_manager.allocator.gpu
        if not isinstance(gpu, PrefixCachingBlockAllocator):
            return {}
        return {block_id: key for key, block_id in gpu.cached.items() if gpu.is_computed(block_id)}

    def _hashes(self) -> dict[str, list[Hashable]]:
        if not self.engine.config.enable_prefix_caching:
            return {}
        computed, known = self.engine.block_manager.computed, {}
        for request_id, group in self.engine.groups.items():
            if group.first_seq.seq_id in computed._hashes:
                known[request_id] = list[Hashable](computed.hashes(group.first_seq))
        return known

    def _tap(self, builder: ModelInputBuilder, model_input: ModelInput) -> None:
        """Mutates: the shadow, the violations."""
        names = {group.first_seq.seq_id: group for group in self.engine.groups.values()}
        starts, reads_pages = model_input.query_start_loc, any(model_input.block_tables)
        sequences = []
        for i, seq in enumerate(builder.seqs):
            chunk = slice(starts[i], starts[i + 1])
            # Without any hit a prompt attends to its own keys; what it would read from pages is the same.
            alone = not reads_pages and not seq.context_len
            sequences.append(
                SequenceInput(
                    names[seq.seq_id].request_id,
                    model_input.input_tokens[chunk],
                    model_input.input_positions[chunk],
                    model_input.slot_mapping[chunk],
                    seq.block_table if alone else model_input.block_tables[i],
                    model_input.seq_lens[i],
                )
            )
            self._check_table(names[seq.seq_id], seq.block_table)
        self._check_limits(sequences)
        self._run(sequences, model_input.slot_mapping[starts[-1] :])

    def _spoil(self, slots: Sequence[int] | slice) -> None:
        super()._spoil(slots if isinstance(slots, slice) else self.shadow.spoiled)

    def _check_limits(self, sequences: Sequence[SequenceInput]) -> None:
        config, num_tokens = self.engine.config, sum(len(sequence.positions) for sequence in sequences)
        if num_tokens > config.max_num_batched_tokens or len(sequences) > config.max_num_seqs:
            text = f"computes {num_tokens} tokens of {len(sequences)} requests in a step"
            self.violations.append(Violation("limit", None, text))

    def _check_table(self, group: SequenceGroup, table: Sequence[int]) -> None:
        held = self._table(group)
        if list(table) != held:
            text = f"has the table {list(table)}, but the manager says {held}"
            self.violations.append(Violation("table", group.request_id, text))


def _ids(groups: Sequence[SequenceGroup]) -> list[str]:
    return [group.request_id for group in groups]


def _used(ref_counts: dict[int, int]) -> list[int]:
    return [block_id for block_id, count in ref_counts.items() if count]
