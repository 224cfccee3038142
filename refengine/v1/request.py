"""A request as V1's scheduler sees it: tokens, hashes of its full blocks, and how much is computed.

There is no "prefill" or "decode" here. A request has `num_tokens` tokens, of which `num_computed_tokens`
have their K/V in the cache; a step computes some of the rest. The hashes live on the request, because its
tokens alone decide them: a preempted request keeps them and finds its own blocks again.
vLLM: V0 sequence.py Sequence, SequenceGroup; V1 v1/request.py Request.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Sequence

from refengine.hashing import Adapter, BlockHash, BlockHasher
from refengine.sampling import SamplingParams


class RequestStatus(enum.Enum):
    """Where a request stands. Only WAITING and PREEMPTED requests are in the waiting queue."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"

    @property
    def is_finished(self) -> bool:
        return self in (self.FINISHED_STOPPED, self.FINISHED_LENGTH, self.FINISHED_ABORTED)


class Request:
    """One request. `token_ids` is prompt and output together, and grows."""

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        hasher: BlockHasher | None = None,
        arrival: float = 0.0,
        priority: int = 0,
        adapter: Adapter | None = None,
        cache_salt: str | None = None,
        skip_reading_prefix_cache: bool | None = None,
        report_full: bool = False,
    ) -> None:
        """`hasher` None: caching is off and no block of this request is ever hashed.

        `report_full`: each lookup also announces the reused prefix as KV events (report mode "full").
        """
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.sampling_params = sampling_params
        self.arrival = arrival
        self.priority = priority  # smaller is served first
        self.adapter = adapter
        self.cache_salt = cache_salt
        # Scores of prompt tokens come out of computing them; a token that is skipped has no score.
        self.skip_reading_prefix_cache = (
            sampling_params.prompt_logprobs is not None
            if skip_reading_prefix_cache is None
            else skip_reading_prefix_cache
        )
        self.report_full = report_full

        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0  # of the prompt, found when the request was first admitted
        self.num_preemptions = 0
        self.shared_prefix_boundary = 0  # tokens; set from the lookup that admitted the request
        self.block_hashes: list[BlockHash] = []
        self._hasher = hasher
        self._extend_hashes()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def append(self, token_ids: Sequence[int]) -> None:
        """Adds sampled tokens. Mutates: the tokens, and the hashes of blocks that became full."""
        self.token_ids.extend(token_ids)
        self._extend_hashes()

    def stop_status(self, eos_token_ids: Container[int], max_model_len: int) -> RequestStatus | None:
        """Whether the last token ends the request, and why. Mutates: the stop reason, for a stop token."""
        params, token_id = self.sampling_params, self.token_ids[-1]
        if token_id in eos_token_ids and not params.ignore_eos:
            return RequestStatus.FINISHED_STOPPED
        if token_id in params.stop_token_ids:
            self.stop_reason = token_id
            return RequestStatus.FINISHED_STOPPED
        if self.num_tokens >= max_model_len or self.num_output_tokens >= params.max_tokens:
            return RequestStatus.FINISHED_LENGTH
        return None

    def _extend_hashes(self) -> None:
        if self._hasher is not None:
            self._hasher.extend(self.block_hashes, self.token_ids, self.adapter, self.cache_salt)
