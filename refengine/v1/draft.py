"""The step that is being put together: who gets how many tokens, and what is left of the budget.

Nothing here is final. Under the priority policy a request may lose its share again to one that comes later in
the same step.
vLLM: V1 the local variables of v1/core/sched/scheduler.py Scheduler.schedule.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from refengine.v1.kv_cache_manager import KVCacheBlocks, KVCacheManager
from refengine.v1.request import Request
from refengine.v1.scheduler_output import ScheduledRequest


@dataclass
class Share:
    """What one request gets in the step that is being put together."""

    request: Request
    kind: Literal["new", "resumed", "running"]
    num_tokens: int
    new_blocks: KVCacheBlocks

    def to_runner(self, manager: KVCacheManager) -> ScheduledRequest:
        """What the model runner gets: just what is new of a request it knows, everything of any other."""
        request = self.request
        if self.kind == "running":
            added = self.new_blocks.ids() if self.new_blocks else None
            return ScheduledRequest(
                request.request_id, self.kind, self.num_tokens, request.num_computed_tokens, added
            )
        return ScheduledRequest(
            request.request_id,
            self.kind,
            self.num_tokens,
            request.num_computed_tokens,
            manager.block_ids(request.request_id),
            token_ids=tuple(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            sampling_params=request.sampling_params,
            adapter=request.adapter,
        )


@dataclass
class Draft:
    """The step so far: tokens left, and shares in order."""

    budget: int
    shares: dict[str, Share] = field(default_factory=dict)
    has_preempted: bool = False  # somebody lost blocks for this step

    def add(self, share: Share) -> None:
        """Gives a request its share. Mutates: shares, budget."""
        self.shares[share.request.request_id] = share
        self.budget -= share.num_tokens

    def withdraw(self, request: Request) -> bool:
        """Takes the request's share back and returns its tokens to the budget. Returns: whether it had one."""
        share = self.shares.pop(request.request_id, None)
        self.budget += share.num_tokens if share else 0
        return share is not None
