"""What the scheduler decided for one step: the only thing the model runner gets to see.

The runner keeps its own copy of every running request, so a request's tokens and block table travel whole only
when it is admitted; afterwards just the new blocks do.
vLLM: V0 core/scheduler.py SchedulerOutputs with sequence.py SequenceGroupMetadata; V1 v1/core/sched/output.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from refengine.hashing import Adapter
from refengine.sampling import SamplingParams

BlockIds = tuple[list[int], ...]  # one list per cache group


@dataclass(frozen=True)
class ScheduledRequest:
    """One request's share of a step: compute `num_tokens` tokens that start at `num_computed_tokens`."""

    request_id: str
    kind: Literal["new", "resumed", "running"]
    num_tokens: int
    num_computed_tokens: int  # before this step, hits included
    block_ids: BlockIds | None  # new, resumed: the whole table; running: what was added, None for nothing
    token_ids: tuple[int, ...] = ()  # new, resumed: all tokens known so far
    num_prompt_tokens: int = 0
    sampling_params: SamplingParams | None = None  # new, resumed
    adapter: Adapter | None = None  # new, resumed


@dataclass(frozen=True)
class SchedulerOutput:
    """One step. `scheduled` is in order; a request that is not in it does nothing."""

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    finished_ids: frozenset[str] = frozenset()  # ended since the last step: the runner forgets them
    preempted_ids: frozenset[str] = frozenset()  # lost their blocks in this step: the runner forgets them too

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(request.num_tokens for request in self.scheduled)
