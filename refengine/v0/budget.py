"""What a step may still spend: tokens, seats, and turns of prompts that are computed in parts.

vLLM: V0 core/scheduler.py SchedulingBudget, PartialPrefillMetadata; V1 an integer, see refengine/v1/scheduler.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from refengine.config import EngineConfig
from refengine.v0.sequence import SequenceGroup


@dataclass
class SchedulingBudget:
    """Each request is counted once. Tokens that are found in the cache cost nothing, but are reported."""

    token_budget: int
    max_num_seqs: int
    num_cached_tokens: int = 0
    _tokens: dict[str, int] = field(default_factory=dict)
    _seqs: dict[str, int] = field(default_factory=dict)

    @property
    def num_batched_tokens(self) -> int:
        return sum(self._tokens.values())

    @property
    def remaining_tokens(self) -> int:
        return self.token_budget - self.num_batched_tokens

    def can_schedule(self, num_new_tokens: int, num_new_seqs: int) -> bool:
        """Whether so many tokens and seats are left."""
        fits = sum(self._seqs.values()) + num_new_seqs <= self.max_num_seqs
        return fits and num_new_tokens <= self.remaining_tokens

    def add_tokens(self, request_id: str, num_tokens: int, num_cached_tokens: int = 0) -> None:
        """Spends tokens for a request that has not spent any yet. Mutates: the counts."""
        if request_id not in self._tokens:
            self._tokens[request_id] = num_tokens
            self.num_cached_tokens += num_cached_tokens

    def add_seqs(self, request_id: str, num_seqs: int) -> None:
        """Takes seats for a request that has none yet. Mutates: the counts."""
        self._seqs.setdefault(request_id, num_seqs)

    def give_back(self, request_id: str) -> None:
        """Returns what a request has spent. Mutates: the counts."""
        self._tokens.pop(request_id, None)
        self._seqs.pop(request_id, None)


@dataclass
class PartialPrefills:
    """How many prompts share the step's tokens, and how many of these are long ones."""

    config: EngineConfig
    schedulable: int
    num_long: int

    @classmethod
    def count(
        cls, running: Iterable[SequenceGroup], waiting: Iterable[SequenceGroup], config: EngineConfig
    ) -> PartialPrefills:
        """Counts prompts that are under way, and of the waiting ones as many as could join them."""
        plan = cls(config, 0, 0)
        for group in running:
            if group.is_prefill:
                plan.schedulable += 1
                plan.num_long += plan._is_long(group)
        num_long_waiting = 0
        for group in waiting:
            if plan.schedulable >= config.max_num_partial_prefills:
                break
            if plan._is_long(group):
                if plan.num_long + num_long_waiting >= config.max_long_partial_prefills:
                    continue
                num_long_waiting += 1
            plan.schedulable += 1
        plan.schedulable = min(plan.schedulable, config.max_num_partial_prefills)
        return plan

    def can_schedule(self, group: SequenceGroup) -> bool:
        """Whether another prompt of this length may start: long ones have fewer turns."""
        return not (
            self._is_long(group)
            and self.num_long >= self.config.max_long_partial_prefills
            and self.config.max_num_partial_prefills > 1
        )

    def add(self, group: SequenceGroup) -> None:
        """A prompt has started. Mutates: the count of long ones."""
        self.num_long += self._is_long(group)

    @property
    def token_share(self) -> int:
        """Tokens of the step that each prompt may take."""
        return self.config.max_num_batched_tokens // max(self.schedulable, 1)

    def _is_long(self, group: SequenceGroup) -> bool:
        return group.first_seq.num_new_tokens > self.config.long_prefill_token_threshold
