"""A running engine with a shadow: every step is shown to the oracle before the model computes it.

`ShadowedEngine` is what a scenario drives, and holds all that is the same for both generations. A generation adds
how its steps are tapped and how its blocks are read off, as `shadowed_v1` does for V1.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from refengine.hashing import Adapter
from refengine.kv_cache import KVCache
from refengine.outputs import StepOutput
from refengine.sampling import SamplingParams
from tests.fuzz.oracle import SequenceInput, ShadowKV, StepInput, Violation
from tests.fuzz.tally import Tally


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
