"""The model-input builder: where V0 skips the work. Case S01 and behaviours 5, 8, 14, 17, 19."""

from __future__ import annotations

from typing import Any

import pytest

from refengine.errors import RequestError
from refengine.v0.model_input import (
    ModelInput,
    ModelInputBuilder,
    SequenceInput,
    compute_slot_mapping,
    slot_mapping_start,
)
from refengine.v0.sequence import SequenceGroupMetadata
from tests.unit.helpers import numbers


def group(
    name: str,
    tokens: list[int],
    table: list[int],
    *,
    computed: int = 0,
    chunk: int | None = None,
    skip: list[int] | None = None,
    is_prompt: bool = True,
) -> SequenceGroupMetadata:
    """What the scheduler would say. `chunk` None: all tokens that are left."""
    size = len(tokens) - computed if chunk is None else chunk
    return SequenceGroupMetadata(
        name, is_prompt, True, size, {ord(name): tokens}, len(tokens), computed, {ord(name): table}, skip
    )


def build(*groups: SequenceGroupMetadata, **options: Any) -> tuple[ModelInput, list[SequenceInput]]:
    builder = ModelInputBuilder(4, **options)
    for each in groups:
        builder.add_seq_group(each)
    return builder.build(), builder.seqs


# The four cases of a hit


def test_without_a_hit_all_tokens_are_computed() -> None:
    made, (seq,) = build(group("A", numbers(1, 6), [5, 2], skip=[]))
    assert (made.input_tokens, made.input_positions) == (numbers(1, 6), numbers(0, 5))
    assert made.slot_mapping == [20, 21, 22, 23, 8, 9]
    assert (made.seq_lens, made.query_lens, made.context_lens) == ([6], [6], [0])
    assert not seq.prefix_cache_hit


def test_a_partial_hit_cuts_tokens_and_positions_alike() -> None:
    """Misconception: "positions count the new tokens". They go on behind the hit, and so do the slots."""
    made, (seq,) = build(group("A", numbers(1, 11), [5, 2, 7], skip=[5, 2]))
    assert (made.input_tokens, made.input_positions) == ([9, 10, 11], [8, 9, 10])
    assert (made.query_lens, made.context_lens, made.seq_lens) == ([3], [8], [11])
    assert seq.num_cached_tokens == 8


def test_slots_go_on_behind_the_hit() -> None:
    """Misconception: "slots are those of the whole table". The skipped tokens' would be written again."""
    made, _ = build(group("A", numbers(1, 11), [5, 2, 7], skip=[5, 2]))
    assert made.slot_mapping == [28, 29, 30]


def test_s01_a_full_hit_has_one_token_to_run() -> None:
    """S01. Misconceptions: "a full hit has nothing to run" and "a full hit gives a block back". One token is run."""
    builder = ModelInputBuilder(4)
    seq = SequenceInput(0, True, numbers(1, 8), 0, 8, [5, 2], [5, 2])
    builder.compute_lens(seq)
    builder.compute_for_prefix_cache_hit(seq)
    assert (seq.query_len, seq.context_len, seq.seq_len) == (1, 7, 8)
    assert (seq.input_tokens, seq.input_positions) == ([8], [7])


def test_s01_the_last_token_of_a_full_hit_is_stored_once_more() -> None:
    """Behaviour 5: into its place in the shared block, where the same is already."""
    made, _ = build(group("A", numbers(1, 8), [5, 2], skip=[5, 2]))
    assert (made.query_lens, made.context_lens, made.slot_mapping) == ([1], [7], [11])


def test_a_later_chunk_that_is_past_the_hit_skips_nothing() -> None:
    """Misconception: "the hit is cut off each time". Its tokens are behind this chunk already."""
    made, (seq,) = build(group("A", numbers(1, 16), [5, 2, 7, 9], computed=8, chunk=4, skip=[5]))
    assert (made.input_tokens, made.context_lens, made.seq_lens) == (numbers(9, 12), [8], [12])
    assert seq.prefix_cache_hit


def test_a_chunk_that_begins_inside_the_hit_is_cut_by_the_rest() -> None:
    made, _ = build(group("A", numbers(1, 16), [5, 2, 7, 9], computed=4, chunk=8, skip=[5, 2]))
    assert (made.input_tokens, made.input_positions) == (numbers(9, 12), numbers(8, 11))


def test_a_hit_that_covers_the_whole_chunk_leaves_its_last_token() -> None:
    made, _ = build(group("A", numbers(1, 16), [5, 2, 7, 9], chunk=8, skip=[5, 2, 7]))
    assert (made.input_tokens, made.context_lens, made.seq_lens) == ([8], [7], [8])


def test_a_decode_ignores_what_it_is_told_of_a_hit() -> None:
    """Behaviour 17."""
    made, (seq,) = build(group("A", numbers(1, 9), [5, 2, 7], computed=8, skip=[5, 2], is_prompt=False))
    assert (made.input_tokens, made.input_positions, made.slot_mapping) == ([9], [8], [28])
    assert (made.num_prefills, made.num_decode_tokens, seq.prefix_cache_hit) == (0, 1, False)


# The step


def test_without_any_hit_prompts_read_no_pages() -> None:
    made, _ = build(group("A", numbers(1, 6), [5, 2], skip=[]), group("B", [7], [3], skip=[]))
    assert made.block_tables == [[], []]


def test_one_hit_makes_every_prompt_read_pages() -> None:
    """Behaviour 8. Misconception: "each prompt by itself". There is one kernel for all prompts of a step."""
    made, _ = build(group("A", numbers(1, 6), [5, 2], skip=[5]), group("B", [7], [3], skip=[]))
    assert made.block_tables == [[5, 2], [3, 0]]


def test_with_chunked_prefill_every_prompt_reads_pages() -> None:
    made, _ = build(group("A", numbers(1, 6), [5, 2], skip=[]), chunked_prefill=True)
    assert made.block_tables == [[5, 2]]


def test_prompts_and_decodes_in_one_step() -> None:
    made, _ = build(
        group("A", numbers(1, 6), [5, 2], skip=[]),
        group("B", numbers(11, 15), [3, 8], computed=4, skip=[], is_prompt=False),
        chunked_prefill=True,
    )
    assert (made.num_prefills, made.num_prefill_tokens, made.num_decode_tokens) == (1, 6, 1)
    assert (made.query_start_loc, made.seq_start_loc) == ([0, 6, 7], [0, 6, 11])
    assert (made.max_query_len, made.max_prefill_seq_len, made.max_decode_seq_len) == (6, 6, 5)
    assert made.block_tables == [[5, 2], [3, 8]]


def test_a_sequence_that_cannot_be_built_is_named() -> None:
    builder = ModelInputBuilder(4)
    builder.add_seq_group(group("A", numbers(1, 6), [5, 2]))
    with pytest.raises(
        RequestError, match=r"request 'B': its model input cannot be built: .* 1 blocks"
    ) as error:
        builder.add_seq_group(group("B", numbers(1, 6), [5]))
    assert error.value.request_id == "B"
    assert [seq.seq_id for seq in builder.seqs] == [ord("A")]


def test_a_part_that_skips_too_much_is_named() -> None:
    """A reader's version may stand in for ours; what it gets wrong is said about the request it got wrong."""

    def skip_all(seq: SequenceInput) -> None:
        seq.input_tokens, seq.query_len = [], 0

    builder = ModelInputBuilder(4, prefix_cache_hit=skip_all)
    with pytest.raises(RequestError, match="0 tokens for a query of 0"):
        builder.add_seq_group(group("A", numbers(1, 6), [5, 2], skip=[5]))


# Slots and windows


@pytest.mark.parametrize(
    ("context_len", "seq_len", "start", "slots"),
    [(0, 3, 0, [20, 21, 22]), (3, 6, 0, [23, 8, 9]), (5, 6, 0, [9]), (0, 3, 2, [-1, -1, 22]), (4, 4, 0, [])],
)
def test_a_slot_is_a_block_and_an_offset(
    context_len: int, seq_len: int, start: int, slots: list[int]
) -> None:
    assert compute_slot_mapping([5, 2], 4, context_len, seq_len, start) == slots


def test_only_the_end_of_a_prompt_is_worth_keeping_under_a_window() -> None:
    assert slot_mapping_start(True, 10, 8) == 2
    assert (
        slot_mapping_start(True, 6, 8)
        == slot_mapping_start(False, 1, 8)
        == slot_mapping_start(True, 9, None)
        == 0
    )


def test_a_decode_reads_the_blocks_of_its_window() -> None:
    decode = group("A", numbers(1, 18), [0, 0, 4, 6, 9], computed=17, is_prompt=False)
    made, (seq,) = build(decode, sliding_window=8)
    assert (seq.curr_sliding_window_block, made.seq_lens) == (3, [10])
    assert made.block_tables == [[4, 6, 9]]
    assert made.slot_mapping == [9 * 4 + 1]


def test_a_hit_under_a_window_is_not_taken() -> None:
    """Behaviour 19: a second line of defence; the configuration refuses the two together."""
    made, (seq,) = build(group("A", numbers(1, 8), [5, 2], skip=[5]), sliding_window=8)
    assert (made.query_lens, seq.prefix_cache_hit) == ([8], False)
