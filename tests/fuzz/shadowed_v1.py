"""V1 with a shadow.

The tap sits in the model runner, behind everything that decides: what the oracle gets is made of the tensors that
go into the model, and not of what the scheduler meant.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from refengine.config import EngineConfig
from refengine.kv_cache import KVCache
from refengine.model.decoder import Decoder
from refengine.outputs import StepOutput
from refengine.sampling import SamplingParams
from refengine.v1.block_pool import block_key
from refengine.v1.engine import EngineCore
from refengine.v1.model_runner import ModelInput, ModelRunner
from refengine.v1.request import RequestStatus
from refengine.v1.scheduler_output import ScheduledRequest
from tests.fuzz.oracle import SequenceInput, ShadowKV, Violation
from tests.fuzz.shadowed import ShadowedEngine


class TappedRunner(ModelRunner):
    """V1's model runner, which shows each step's input to `tap` before it computes anything."""

    tap: Callable[[list[ScheduledRequest], ModelInput], None]

    def _prepare_inputs(self, scheduled: list[ScheduledRequest]) -> ModelInput:
        model_input = super()._prepare_inputs(scheduled)
        self.tap(scheduled, model_input)
        return model_input


class ShadowedV1(ShadowedEngine):
    """V1, its model runner tapped. Groups of other kinds than full attention will need a shadow each."""

    def __init__(self, config: EngineConfig, model: Decoder, eos_token_ids: Sequence[int] = ()) -> None:
        assert config.num_blocks is not None  # a scenario is about a small pool, and names it
        super().__init__(ShadowKV(config.num_blocks, config.block_size))
        self.engine = engine = EngineCore(config, model, eos_token_ids, self.tally)
        runner = engine.model_runner
        engine.model_runner = tapped = TappedRunner(
            model,
            runner.kv_cache,
            runner.batch,
            backend=runner.backend,
            sampler=runner.sampler,
            observer=runner.observer,
        )
        tapped.tap = self._tap
        self._spoil(slice(None))  # zeros could be read by accident and do no harm

    @property
    def kv_cache(self) -> KVCache:
        return self.engine.kv_cache

    def _add(self, request_id: str, prompt: Sequence[int], params: SamplingParams, **options: Any) -> None:
        self.engine.add_request(request_id, prompt, params, **options)

    def _step(self) -> list[StepOutput]:
        return self.engine.step()

    def state(self, request_id: str) -> str:
        request = self.engine.scheduler.requests.get(request_id)
        if request is None:
            return "finished"
        if request.status is RequestStatus.RUNNING:
            return "prefill" if request.num_computed_tokens < request.num_prompt_tokens else "decode"
        return str(request.status.value)

    def abort(self, request_id: str) -> None:
        self.engine.finish(request_id)

    def reset_prefix_cache(self) -> bool:
        return self.engine.reset_prefix_cache()

    @property
    def has_unfinished_requests(self) -> bool:
        return self.engine.has_unfinished_requests

    def check_integrity(self) -> None:
        self.engine.scheduler.check_integrity()

    def leftovers(self) -> list[str]:
        scheduler, pool = self.engine.scheduler, self.engine.kv_cache_manager.block_pool
        left: dict[str, Sequence[object]] = {
            "requests": list(scheduler.requests),
            "running": [request.request_id for request in scheduler.running],
            "waiting": [request.request_id for request in scheduler.waiting],
            "rows of the batch": self.engine.model_runner.batch.request_ids,
            "blocks in use": [
                block.block_id for block in pool.blocks if block.ref_count and not block.is_null
            ],
            "blocks missing from the free queue": range(pool.num_blocks - 1 - pool.num_free_blocks),
        }
        return [f"{what}: {list(things)}" for what, things in left.items() if things]

    def _held(self) -> dict[str, list[int]]:
        manager = self.engine.kv_cache_manager
        return {request_id: manager.block_ids(request_id)[0] for request_id in self.engine.scheduler.requests}

    def _findable(self) -> dict[int, Hashable]:
        pool = self.engine.kv_cache_manager.block_pool
        return {block_id: key for key, copies in pool._index.items() for block_id in copies}

    def _hashes(self) -> dict[str, list[Hashable]]:
        requests = self.engine.scheduler.requests
        return {
            rid: [block_key(block_hash, 0) for block_hash in r.block_hashes] for rid, r in requests.items()
        }

    def _tap(self, scheduled: list[ScheduledRequest], model_input: ModelInput) -> None:
        """Mutates: the shadow, the violations."""
        metadata = model_input.metadata
        token_ids, positions = model_input.token_ids.tolist(), model_input.positions.tolist()
        slots, starts = metadata.slot_mapping.tolist(), metadata.query_start_loc.tolist()
        tables, seq_lens = metadata.block_tables.tolist(), metadata.seq_lens.tolist()
        sequences = [
            SequenceInput(
                share.request_id,
                token_ids[starts[i] : starts[i + 1]],
                positions[starts[i] : starts[i + 1]],
                slots[starts[i] : starts[i + 1]],
                tables[i],
                seq_lens[i],
            )
            for i, share in enumerate(scheduled)
        ]
        self._check_limits(sequences)
        self._check_tables()
        self._run(sequences, slots[starts[-1] :])

    def _check_limits(self, sequences: Sequence[SequenceInput]) -> None:
        config = self.engine.config
        num_tokens = sum(len(sequence.positions) for sequence in sequences)
        if (
            num_tokens > config.max_num_batched_tokens
            or len(self.engine.scheduler.running) > config.max_num_seqs
        ):
            text = f"schedules {num_tokens} tokens with {len(self.engine.scheduler.running)} requests running"
            self.violations.append(Violation("limit", None, text))

    def _check_tables(self) -> None:
        """The rows of the batch are the running requests, each with the very blocks that its manager gave it."""
        batch = self.engine.model_runner.batch
        rows = {
            rid: batch.block_table[row, : batch.num_blocks[row]].tolist() for rid, row in batch.row_of.items()
        }
        running = {request.request_id for request in self.engine.scheduler.running}
        held = {request_id: blocks for request_id, blocks in self._held().items() if request_id in running}
        if rows != held:
            self.violations.append(Violation("table", None, f"has rows {rows}, but the manager says {held}"))
