"""Where V0 skips the work: from the scheduler's metadata to the tensors of one step, sequence by sequence.

The scheduler says how many tokens a sequence may compute, cached ones included, and which blocks are computed
already. A list of functions then works on each sequence in turn; the second one, `compute_for_prefix_cache_hit`,
cuts the computed tokens off. In V1 that function has no counterpart: there the scheduler hands over only the
tokens that are left.
vLLM: V0 worker/model_runner.py ModelInputForGPUBuilder, attention/backends/utils.py compute_slot_mapping; V1
v1/worker/gpu_model_runner.py _prepare_inputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from refengine.errors import RequestError
from refengine.hashing import Adapter
from refengine.v0.sequence import SequenceGroupMetadata

PAD_SLOT_ID = -1


@dataclass
class SequenceInput:
    """One sequence on its way through the functions. Lengths and positions in tokens.

    `context_len` tokens are in the cache, `query_len` are computed now, `seq_len` is what attention sees: their
    sum, except where a sliding window cuts it. `orig_seq_len` is that sum.
    """

    seq_id: int
    is_prompt: bool
    token_ids: list[int]
    num_computed_tokens: int
    token_chunk_size: int
    block_table: list[int]
    computed_block_nums: list[int] | None
    adapter: Adapter | None = None

    input_tokens: list[int] = field(default_factory=list)
    input_positions: list[int] = field(default_factory=list)
    seq_len: int = 0
    orig_seq_len: int = 0
    query_len: int = 0
    context_len: int = 0
    curr_sliding_window_block: int = 0  # blocks of the table a decode reads; 0: all
    prefix_cache_hit: bool = False
    num_cached_tokens: int = 0  # reported to the user
    lora_mapping: list[Adapter | None] = field(default_factory=list)  # one per input token


@dataclass(frozen=True)
class ModelInput:
    """The step as flat lists, prefills first. `block_tables` may have an empty row: that prompt reads no pages."""

    input_tokens: list[int]
    input_positions: list[int]
    seq_lens: list[int]
    query_lens: list[int]
    context_lens: list[int]
    slot_mapping: list[int]
    block_tables: list[list[int]]
    num_prefills: int
    num_prefill_tokens: int
    num_decode_tokens: int
    max_query_len: int
    max_prefill_seq_len: int
    max_decode_seq_len: int
    query_start_loc: list[int]
    seq_start_loc: list[int]
    lora_mapping: list[Adapter | None]


PerSequence = Callable[[SequenceInput], None]


class ModelInputBuilder:
    """Collects groups, then builds. `per_seq_compute_fns` run in order on every sequence.

    `prefix_cache_hit`: what skips computed tokens; a reader's version can stand in for ours.
    """

    def __init__(
        self,
        block_size: int,
        *,
        sliding_window: int | None = None,
        chunked_prefill: bool = False,
        prefix_cache_hit: PerSequence | None = None,
    ) -> None:
        self.block_size = block_size
        self.sliding_window = sliding_window
        self.chunked_prefill = chunked_prefill
        self.seqs: list[SequenceInput] = []
        self.per_seq_compute_fns: list[PerSequence] = [
            self.compute_lens,
            prefix_cache_hit or self.compute_for_prefix_cache_hit,
            self.compute_for_sliding_window,
            self.compute_lora_input,
        ]

    # -- per sequence ---------------------------------------------------------------------------------------

    def compute_lens(self, seq: SequenceInput) -> None:
        """A first guess that does not look at the cache: the chunk after the computed tokens. Mutates: `seq`."""
        seq.context_len = seq.num_computed_tokens if seq.is_prompt else len(seq.token_ids) - 1
        seq.seq_len = len(seq.token_ids)
        if seq.is_prompt:
            seq.seq_len = min(seq.seq_len, seq.context_len + seq.token_chunk_size)
        seq.orig_seq_len = seq.seq_len
        seq.query_len = seq.seq_len - seq.context_len
        seq.input_tokens = seq.token_ids[seq.context_len : seq.seq_len]
        seq.input_positions = list(range(seq.context_len, seq.seq_len))

    def compute_for_prefix_cache_hit(self, seq: SequenceInput) -> None:
        """Cuts the computed tokens off the input. Mutates: `seq`.

        Four cases: no hit; a later chunk, already past the hit; a partial hit, of which the rest is computed; a
        full hit, of which the last token is computed again, since sampling needs its hidden state.
        """
        blocks = seq.computed_block_nums
        seq.prefix_cache_hit = bool(blocks) and self.sliding_window is None and seq.is_prompt
        if not seq.prefix_cache_hit or blocks is None:
            return
        prefix_cache_len = seq.num_cached_tokens = len(blocks) * self.block_size
        if prefix_cache_len <= seq.context_len:
            return
        first = min(prefix_cache_len, seq.seq_len - 1)
        seq.input_tokens = seq.input_tokens[first - seq.context_len :]
        seq.input_positions = seq.input_positions[first - seq.context_len :]
        seq.context_len = first
        seq.query_len = seq.seq_len - first

    def compute_for_sliding_window(self, seq: SequenceInput) -> None:
        """A decode reads only the blocks of its window, counted from the end of the table. Mutates: `seq`."""
        if seq.is_prompt or self.sliding_window is None:
            return
        window_blocks = -(-self.sliding_window // self.block_size)
        in_last_block = seq.seq_len % self.block_size
        seq.seq_len = min(seq.seq_len, window_blocks * self.block_size + in_last_block)
        seq.curr_sliding_window_block = window_blocks + (in_last_block > 0)

    def compute_lora_input(self, seq: SequenceInput) -> None:
        """Which adapter each input token goes through. Mutates: `seq`."""
        seq.lora_mapping = [seq.adapter] * seq.query_len

    # -- the step -------------------------------------------------------------------------------------------

    def add_seq_group(self, metadata: SequenceGroupMetadata) -> None:
        """Runs the functions on each sequence of a group. Mutates: the builder.

        Raises: RequestError naming the request, if one of the functions fails on it.
        """
        for seq_id, token_ids in metadata.token_ids.items():
            seq = SequenceInput(
                seq_id,
                metadata.is_prompt,
                token_ids,
                metadata.num_computed_tokens,
                metadata.token_chunk_size,
                metadata.block_tables[seq_id],
                metadata.computed_block_nums,
                metadata.adapter,
            )
            try:
                for compute in self.per_seq_compute_fns:
                    compute(seq)
                self._check(seq)
            except Exception as error:
                reason = f"its model input cannot be built: {type(error).__name__}: {error}"
                raise RequestError(metadata.request_id, reason) from error
            self.seqs.append(seq)

    def build(self) -> ModelInput:
        """The step's lists, out of all sequences added so far."""
        # One hit in the batch makes every prompt read pages: there is one kernel for all prompts of a step.
        any_hit = any(seq.prefix_cache_hit for seq in self.seqs)
        prompts = [seq for seq in self.seqs if seq.is_prompt]
        decodes = [seq for seq in self.seqs if not seq.is_prompt]
        query_lens = [seq.query_len for seq in self.seqs]
        seq_lens = [seq.seq_len for seq in self.seqs]
        return ModelInput(
            input_tokens=[token for seq in self.seqs for token in seq.input_tokens],
            input_positions=[position for seq in self.seqs for position in seq.input_positions],
            seq_lens=seq_lens,
            query_lens=query_lens,
            context_lens=[seq.context_len for seq in self.seqs],
            slot_mapping=[slot for seq in self.seqs for slot in self._slots(seq)],
            block_tables=_padded([self._block_table(seq, any_hit) for seq in self.seqs]),
            num_prefills=len(prompts),
            num_prefill_tokens=sum(len(seq.input_tokens) for seq in prompts),
            num_decode_tokens=sum(seq.query_len for seq in decodes),
            max_query_len=max(query_lens, default=0),
            max_prefill_seq_len=max((seq.orig_seq_len for seq in prompts), default=0),
            max_decode_seq_len=max((seq.seq_len for seq in decodes), default=0),
            query_start_loc=[0, *itertools.accumulate(query_lens)],
            seq_start_loc=[0, *itertools.accumulate(seq_lens)],
            lora_mapping=[adapter for seq in self.seqs for adapter in seq.lora_mapping],
        )

    def _block_table(self, seq: SequenceInput, any_hit: bool) -> list[int]:
        """The blocks this sequence's attention reads; none for a prompt that attends to its own tokens only."""
        if any_hit:
            return seq.block_table
        if seq.is_prompt and not self.chunked_prefill:
            return []
        return (
            seq.block_table[-seq.curr_sliding_window_block :]
            if seq.curr_sliding_window_block
            else seq.block_table
        )

    def _slots(self, seq: SequenceInput) -> list[int]:
        start = slot_mapping_start(seq.is_prompt, seq.query_len, self.sliding_window)
        return compute_slot_mapping(
            seq.block_table, self.block_size, seq.context_len, seq.orig_seq_len, start
        )

    def _check(self, seq: SequenceInput) -> None:
        """Raises ValueError for a sequence that no tensor can be made of."""
        if seq.query_len < 1 or len(seq.input_tokens) != seq.query_len:
            raise ValueError(f"{len(seq.input_tokens)} tokens for a query of {seq.query_len}")
        if len(seq.block_table) * self.block_size < seq.orig_seq_len:
            raise ValueError(f"{len(seq.block_table)} blocks hold fewer than {seq.orig_seq_len} tokens")


def slot_mapping_start(is_prompt: bool, query_len: int, sliding_window: int | None) -> int:
    """First position that is written: of a prompt longer than the window only its end is worth keeping."""
    return max(0, query_len - sliding_window) if is_prompt and sliding_window is not None else 0


def compute_slot_mapping(
    block_table: Sequence[int], block_size: int, context_len: int, seq_len: int, start: int
) -> list[int]:
    """Slots of positions `context_len` to `seq_len`; -1, write nothing, for those before `start`.

    Slots begin at `context_len`, so tokens that were skipped are not written again.
    """
    return [
        block_table[position // block_size] * block_size + position % block_size
        if position >= start
        else PAD_SLOT_ID
        for position in range(context_len, seq_len)
    ]


def _padded(tables: list[list[int]]) -> list[list[int]]:
    width = max(map(len, tables), default=0)
    return [table + [0] * (width - len(table)) for table in tables]
