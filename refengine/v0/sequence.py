"""A request as V0 sees it: a group of sequences that share a prompt.

A group holds one sequence, unless it was forked. V0 thinks in stages: a sequence is in PREFILL until all its
tokens are computed, in DECODE from then on, and back in PREFILL after it was preempted by recompute.
vLLM: V0 sequence.py Sequence, SequenceGroup, SequenceGroupMetadata; V1 v1/request.py Request.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from refengine.hashing import Adapter
from refengine.sampling import SamplingParams


class SequenceStatus(enum.Enum):
    """Where a sequence's blocks are: nowhere, on the GPU, in CPU memory, or given back."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_IGNORED = "ignored"  # a prompt that could never be served

    @property
    def is_finished(self) -> bool:
        return self not in (self.WAITING, self.RUNNING, self.SWAPPED)


class SequenceStage(enum.Enum):
    """Whether a sequence has tokens left to compute besides the one sampled last."""

    PREFILL = "PREFILL"
    DECODE = "DECODE"


class Sequence:
    """One sequence of tokens. `token_ids` is prompt and output together, and grows."""

    def __init__(
        self, seq_id: int, prompt_token_ids: SequenceOf[int], adapter: Adapter | None = None
    ) -> None:
        self.seq_id = seq_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.adapter = adapter
        self.status = SequenceStatus.WAITING
        self.stage = SequenceStage.PREFILL
        self.num_computed_tokens = 0
        self.stop_reason: int | str | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status.is_finished

    @property
    def is_prefill(self) -> bool:
        return self.stage is SequenceStage.PREFILL

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_new_tokens(self) -> int:
        """Tokens a step may compute: in PREFILL all that are left, in DECODE the one that was sampled last."""
        return self.num_uncomputed_tokens if self.is_prefill else 1

    def update_num_computed_tokens(self, num_new_tokens: int) -> None:
        """Counts tokens that went through the model. Mutates: the count, and the stage when none is left."""
        self.num_computed_tokens += num_new_tokens
        if self.num_uncomputed_tokens == 0:
            self.stage = SequenceStage.DECODE

    def reset_for_recompute(self) -> None:
        """Back to the beginning, tokens kept. Mutates: status, stage, count."""
        self.status, self.stage, self.num_computed_tokens = SequenceStatus.WAITING, SequenceStage.PREFILL, 0

    def fork(self, seq_id: int) -> Sequence:
        """A copy with its own tokens and the same past."""
        child = Sequence(seq_id, self.token_ids, self.adapter)
        child.num_prompt_tokens = self.num_prompt_tokens
        child.status, child.stage = self.status, self.stage
        child.num_computed_tokens = self.num_computed_tokens
        return child


class SequenceGroup:
    """The sequences of one request, with what belongs to the request as a whole."""

    def __init__(
        self,
        request_id: str,
        seqs: SequenceOf[Sequence],
        params: SamplingParams | None = None,
        arrival: float = 0.0,
        priority: int = 0,
    ) -> None:
        self.request_id = request_id
        self.seqs = list(seqs)
        self.params = params or SamplingParams()
        self.arrival = arrival
        self.priority = priority  # smaller is served first
        self.num_cached_tokens = 0  # of the prompt, found when the group was first admitted

    def get_seqs(self, status: SequenceStatus | None = None) -> list[Sequence]:
        """The sequences with this status; None: all."""
        return [seq for seq in self.seqs if status is None or seq.status is status]

    @property
    def reads_cache(self) -> bool:
        """Whether its computed tokens may be skipped. A prompt whose tokens are scored has to compute all of them."""
        return self.params.prompt_logprobs is None

    @property
    def first_seq(self) -> Sequence:
        return self.seqs[0]

    @property
    def is_finished(self) -> bool:
        return all(seq.is_finished for seq in self.seqs)

    @property
    def is_prefill(self) -> bool:
        return self.first_seq.is_prefill

    @property
    def max_num_running_seqs(self) -> int:
        """Seats the group takes: V0 counts sequences that are not finished."""
        return sum(not seq.is_finished for seq in self.seqs)


@dataclass(frozen=True)
class SequenceGroupMetadata:
    """What the scheduler tells the worker about one group in one step.

    `computed_block_nums` is the hit, as block ids: the scheduler passes it on, and the model-input builder is
    who skips the tokens. In V1 there is no such field, since the scheduler has subtracted them already.
    """

    request_id: str
    is_prompt: bool
    do_sample: bool  # False: a chunk of a prompt that is not its last
    token_chunk_size: int  # tokens, cached ones included
    token_ids: dict[int, list[int]]  # by sequence id: all tokens known
    num_prompt_tokens: int
    num_computed_tokens: int
    block_tables: dict[int, list[int]]  # by sequence id
    computed_block_nums: list[int] | None  # None: caching is off
    params: SamplingParams = field(default_factory=SamplingParams)
    adapter: Adapter | None = None
