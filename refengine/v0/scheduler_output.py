"""What V0's scheduler decided for one step.

vLLM: V0 core/scheduler.py SchedulerOutputs, ScheduledSequenceGroup; V1 v1/core/sched/output.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from refengine.v0.sequence import SequenceGroup

BlockPairs = list[tuple[int, int]]  # (source, destination)


@dataclass(frozen=True)
class ScheduledGroup:
    """A group's share of the step. `token_chunk_size` counts cached tokens too, which the worker will skip."""

    group: SequenceGroup
    token_chunk_size: int


@dataclass
class SchedulerOutputs:
    """Prefills stand first in `scheduled`. Swap and copy orders are for the worker, before the model runs."""

    scheduled: list[ScheduledGroup] = field(default_factory=list)
    num_prefill_groups: int = 0
    num_batched_tokens: int = 0  # cached ones included
    blocks_to_swap_in: BlockPairs = field(default_factory=list)  # zero-based on each device
    blocks_to_swap_out: BlockPairs = field(default_factory=list)
    blocks_to_copy: BlockPairs = field(default_factory=list)
    ignored: list[SequenceGroup] = field(default_factory=list)  # can never be served
    preempted: list[tuple[SequenceGroup, Literal["RECOMPUTE", "SWAP"]]] = field(default_factory=list)
    num_preempted: int = 0  # vLLM's own count: without those that a priority forced out


@dataclass
class PhaseOutput:
    """What one phase (prefills, running, swapped) contributes."""

    prefills: list[ScheduledGroup] = field(default_factory=list)
    decodes: list[ScheduledGroup] = field(default_factory=list)
    recomputed: list[SequenceGroup] = field(default_factory=list)  # preempted, wait again
    swapped_out: list[SequenceGroup] = field(default_factory=list)

    @property
    def num_preempted(self) -> int:
        return len(self.recomputed) + len(self.swapped_out)
