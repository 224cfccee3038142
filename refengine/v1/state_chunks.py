"""Where a chunk of a prompt ends, if the model has Mamba layers.

K and V exist for every token that was computed, wherever the chunks ended. A recurrent state exists only at the end of
a chunk, and only between two blocks can it be found again. So whoever wants hits has to let chunks end there.
vLLM: V0 none; V1 `_mamba_block_aligned_split` in v1/core/sched/scheduler.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from refengine.config import EngineConfig
from refengine.v1.groups.spec import MAMBA
from refengine.v1.kv_cache_manager import KVCacheManager
from refengine.v1.request import Request


def state_chunks_for(config: EngineConfig, manager: KVCacheManager) -> StateChunks:
    """The rule for the groups of this manager."""
    sizes = [group.block_size for group in manager.coordinator.groups if group.spec.kind == MAMBA]
    block_size = math.lcm(*sizes) if sizes else None
    most = config.long_prefill_token_threshold or config.max_num_batched_tokens
    can_fill_a_block = (block_size or 1) <= min(most, config.max_num_batched_tokens)
    return StateChunks(block_size, can_fill_a_block, manager.coordinator.drop_last)


@dataclass(frozen=True)
class StateChunks:
    """`block_size` in tokens, of the Mamba groups; None for a model without such layers, whose chunks end anywhere.

    `can_fill_a_block`: some step has the budget for a whole block. If none ever has, a block takes several chunks.
    """

    block_size: int | None
    can_fill_a_block: bool
    drop_last: bool = False

    def cut(self, request: Request, start: int, num_new_tokens: int) -> int:
        """How many of `num_new_tokens` tokens from position `start` on to compute in one step. 0: wait for more budget.

        Tokens after the prompt come one by one and reach every boundary by themselves.
        """
        size, end = self.block_size, start + num_new_tokens
        prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)  # resumed: outputs run again
        if size is None or start >= prefill_end:
            return num_new_tokens
        if end < prefill_end:
            aligned = end // size * size
            if aligned > start or self.can_fill_a_block:
                end = aligned
        stops = [self._last_useful_end(request, size)]
        if start % size:  # begun in the middle of a block: a state is due at the end of that block
            stops.append(start // size * size + size)
        boundary = request.shared_prefix_boundary
        if start < boundary < end:  # the next request that shares this prefix starts there
            stops.append(start + (boundary - start) // size * size)
        return max(min([stop for stop in stops if start < stop < end], default=end) - start, 0)

    def _last_useful_end(self, request: Request, size: int) -> int:
        """The last boundary at which the same tokens, sent again, could start: one is left to compute."""
        if self.drop_last:
            return request.num_tokens // size * size - size
        return (request.num_tokens - 1) // size * size
