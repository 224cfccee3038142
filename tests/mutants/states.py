"""Misconceptions about layers with windows and states: what they keep, where, and for whom."""

from __future__ import annotations

from tests.mutants.world import Mutant

STATES = (
    Mutant(
        "the state after n tokens is in the block of the next token",
        "recurrence",
        "(n - 1).clamp(min=0)",
        "n.clamp(min=0)",
        ("test_linear_attention::test_sequences_of_all_kinds_in_one_step",),
    ),
    Mutant(
        "a block that nobody used holds the empty state",
        "recurrence",
        "part[piece.fresh] = 0.0",
        "pass",
        ("test_linear_attention::test_the_first_token_starts_from_nothing_whatever_its_block_holds",),
    ),
    Mutant(
        "a state is brought up to date where it was read",
        "recurrence",
        "matrices[piece.write], tails[piece.write] = state",
        "matrices[piece.read], tails[piece.read] = state",
        ("test_linear_attention::test_sequences_of_all_kinds_in_one_step",),
    ),
    Mutant(
        "the state is the matrix",
        "recurrence",
        "matrices[piece.write], tails[piece.write] = state",
        "matrices[piece.write] = state.matrix",
        ("test_linear_attention::test_sequences_of_all_kinds_in_one_step",),
    ),
    Mutant(
        "a convolution remembers the first tokens it saw",
        "model.linear_attention",
        "State(matrix, seen[:, num_tokens:])",
        "State(matrix, seen[:, :width - 1])",
        ("test_linear_attention::test_sequences_of_all_kinds_in_one_step",),
    ),
    Mutant(
        "every token of a piece has faded as much as the state before it",
        "model.linear_attention",
        "(total[..., -1:] - total).exp()",
        "total[..., -1:].exp().expand_as(total)",
        ("test_linear_attention::test_a_long_fade_is_not_a_number_too_small",),
    ),
    Mutant(
        "a window is only a matter of what is kept",
        "v1.model_runner",
        "group.spec.window, group.layers[0]",
        "None, group.layers[0]",
        ("test_hybrid_engine::test_a_window_reads_nothing_that_lies_behind_it",),
    ),
    Mutant(
        "a request has one block table",
        "v1.input_batch",
        "self.block_tables[row, group, start : start + len(ids)] = ids",
        "self.block_tables[row, 0, start : start + len(ids)] = ids",
        ("test_v1_layer_groups::test_a_request_has_a_table_in_every_group",),
    ),
    Mutant(
        "every layer has a cache group of its own",
        "v1.layer_groups",
        "tuple(i for i, kind in enumerate(config.kinds) if kind == layer_kind)",
        "tuple(i for i, kind in enumerate(config.kinds) if kind == layer_kind)[:1]",
        ("test_v1_layer_groups::test_layers_of_one_kind_share_a_group",),
    ),
    Mutant(
        "a state grows with the tokens of its block",
        "kv_cache",
        "state_shapes(config) if kind == LINEAR_ATTENTION else (slots, slots)",
        "(slots, slots)",
        ("test_v1_layer_groups::test_a_block_counts_its_states_and_its_slots",),
    ),
    Mutant(
        "a request needs room for all its tokens in every group",
        "v1.engine",
        "sum(group.num_blocks_at_peak(num_tokens, per_step) for group in groups)",
        "len(groups) * -(-num_tokens // self.config.block_size)",
        ("test_hybrid_engine::test_a_long_request_needs_only_what_windows_and_states_hold_at_once",),
    ),
)
