"""A running engine with a shadow: every step is shown to the oracle before the model computes it.

`ShadowedEngine` is what a scenario drives and holds all that is the same for both generations. A generation adds
how its steps are tapped and how its blocks are read off; `ShadowedV1` does so for V1.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from refengine.config import EngineConfig
from refengine.hashing import Adapter
from refengine.kv_cache import KVCache
from refengine.model.decoder import Decoder
from refengine.outputs import StepOutput
from refengine.sampling import SamplingParams
from refengine.trace.observer import MarkKind, PoolSnapshot
from refengine.v1.engine import EngineCore
from refengine.v1.model_runner import ModelInput, ModelRunner
from refengine.v1.request import RequestStatus
from refengine.v1.scheduler_output import ScheduledRequest
from tests.fuzz.oracle import SequenceInput, ShadowKV, StepInput, Violation


class Tally:
    """An observer that counts what happened, to see afterwards that nothing of interest was left out."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()
        self._published: set[str] = set()  # requests that published in this step

    def begin_step(self) -> None:
        self.events["step"] += 1
        self._published.clear()

    def mark(self, kind: MarkKind, request_id: str, **facts: Any) -> None:
        if kind == "lookup" and facts["hit_tokens"]:
            self.events["hit"] += 1
        elif kind == "publish":
            self._published.add(request_id)
        elif kind == "admit":
            self._admit(request_id, facts["admitted"], facts["reason"])

    def _admit(self, request_id: str, admitted: bool, reason: str) -> None:
        if admitted:
            self.events["resumed"] += reason == "resumed"
        elif reason == "preempted: its step failed":
            self.events["share taken back"] += 1
        elif reason.startswith("preempted"):
            self.events["preempted"] += 1
            self.events["published share withdrawn"] += request_id in self._published
        else:
            self.events[f"refused: {reason}"] += 1

    def attach(
        self, engine: str, num_blocks: int, block_size: int, snapshot: Callable[[], PoolSnapshot]
    ) -> None:
        """The marks are enough to count by."""

    def end_step(self) -> None:
        """Nothing to count here."""


class ModelFailed(Exception):
    """The model broke down in the middle of a step, as the scenario wanted."""


class ShadowedEngine(ABC):
    """One engine, its shadow, and everything the shadow has found wrong so far."""

    fails = False  # whether the model breaks down in a step

    def __init__(self, shadow: ShadowKV) -> None:
        self.shadow = shadow
        self.tally = Tally()
        self.violations: list[Violation] = []

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        adapter: Adapter | None = None,
        cache_salt: str | None = None,
        **options: Any,
    ) -> None:
        """Enters a request. Mutates: the engine, the shadow's truth."""
        identity = (adapter and (adapter.name, adapter.path), cache_salt or None)
        self.shadow.begin(request_id, identity, prompt)
        self._add(request_id, prompt, params, adapter=adapter, cache_salt=cache_salt, **options)

    def step(self) -> list[StepOutput]:
        """One step, and what can be found after it. Mutates: the engine, the shadow, the violations."""
        self._held_before = self._held()
        findable = self._findable()
        self.shadow.shared_in_step.clear()
        try:
            outputs = self._step()
        except ModelFailed:
            outputs = []
            self.tally.events["step failed"] += 1
        for output in outputs:
            self.shadow.append(output.request_id, output.token_ids)
        self._learn()
        now = self._findable()
        self.violations += self.shadow.check_findable(now)
        self.tally.events["evicted"] += sum(now.get(block_id) != key for block_id, key in findable.items())
        self.tally.events["shared in the step"] += len(self.shadow.shared_in_step)
        return outputs

    def _run(self, sequences: Sequence[SequenceInput], padding_slots: Sequence[int]) -> None:
        """What the tap calls with each step's input. Mutates: the shadow, the violations.

        Raises: ModelFailed, with garbage wherever the step was to write, if that is wanted.
        """
        self._learn()
        step = StepInput(sequences, self._held(), self._held_before, padding_slots)
        self.violations += self.shadow.run(step)
        if self.fails:
            slots = [slot for sequence in sequences for slot in sequence.slots]
            self.shadow.spoil(slots)
            self._spoil(slots)
            raise ModelFailed

    def _spoil(self, slots: Sequence[int] | slice) -> None:
        """Fills slots with NaN, which whoever reads it cannot miss. Mutates: the KV cache."""
        for tensor in itertools.chain(*self.kv_cache.layers):
            tensor.flatten(0, 1)[slots] = torch.nan

    def _learn(self) -> None:
        for request_id, hashes in self._hashes().items():
            self.violations += self.shadow.learn(request_id, hashes)

    @property
    @abstractmethod
    def kv_cache(self) -> KVCache:
        """The tensors."""

    @abstractmethod
    def _add(self, request_id: str, prompt: Sequence[int], params: SamplingParams, **options: Any) -> None:
        """Enters the request into the engine."""

    @abstractmethod
    def _step(self) -> list[StepOutput]:
        """One step of the engine, during which `_run` is called with its input, if there is any."""

    @abstractmethod
    def state(self, request_id: str) -> str:
        """Where a request stands: waiting, prefill, decode, preempted or finished."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Ends a request, wherever it stands."""

    @abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Forgets all hashes, if nothing runs. Returns: whether it was done."""

    @property
    @abstractmethod
    def has_unfinished_requests(self) -> bool: ...

    @abstractmethod
    def check_integrity(self) -> None:
        """Raises IntegrityError if a structure contradicts itself."""

    @abstractmethod
    def leftovers(self) -> list[str]:
        """What is still held although no request is left, one sentence each."""

    @abstractmethod
    def _held(self) -> dict[str, list[int]]:
        """By request, the blocks that the manager says it holds."""

    @abstractmethod
    def _findable(self) -> Mapping[int, Hashable]:
        """Every block that a lookup could return -> the hash under which it would."""

    @abstractmethod
    def _hashes(self) -> Mapping[str, Sequence[Hashable]]:
        """By unfinished request, the hashes of its full blocks, first block first."""


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
        return request.status.value

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
        left = {
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
        group_id = (0).to_bytes(4, "big")  # how the pool's index calls the only group
        requests = self.engine.scheduler.requests
        return {rid: [block_hash + group_id for block_hash in r.block_hashes] for rid, r in requests.items()}

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
