"""Misconceptions on the way from a schedule to tensors, to tokens, to text."""

from __future__ import annotations

from tests.mutants.world import Mutant

RUNNER = (
    Mutant(
        "a row that moves leaves its tokens behind",
        "v1.input_batch",
        "self.token_ids,",
        "",
        ("test_v1_input_batch::test_a_removed_row_is_filled_with_the_last_one_whole",),
    ),
    Mutant(
        "a row that moves takes over the parameters that were there",
        "v1.input_batch",
        "self.request_ids[row], self.params[row] = self.request_ids[last], self.params[last]",
        "self.request_ids[row] = self.request_ids[last]",
        ("test_v1_input_batch::test_a_removed_row_is_filled_with_the_last_one_whole",),
    ),
    Mutant(
        "a reused row goes on in the old block table",
        "v1.input_batch",
        "self.block_counts[row] = 0",
        "pass",
        ("test_v1_input_batch::test_a_reused_row_starts_with_an_empty_table",),
    ),
    Mutant(
        "new blocks replace the table",
        "v1.input_batch",
        "start = self.block_counts[row, group]",
        "start = 0",
        ("test_v1_input_batch::test_blocks_are_appended_to_the_table",),
    ),
    Mutant(
        "slots follow the row, not the block table",
        "v1.model_runner",
        "table[row_of_token, positions // block_size] * block_size + positions % block_size",
        "row_of_token * batch.token_ids.shape[1] + positions",
        ("test_v1_model_runner::test_slots_come_from_the_block_table",),
    ),
    Mutant(
        "row i is request i of the step",
        "v1.model_runner",
        "np.array([batch.row_of[share.request_id] for share in scheduled])",
        "np.arange(len(scheduled))",
        ("test_v1_model_runner::test_the_order_of_the_step_is_not_the_order_of_the_rows",),
    ),
    Mutant(
        "positions start at 0, hit or not",
        "v1.model_runner",
        "np.repeat(first - query_start_loc[:-1], counts)",
        "np.repeat(-query_start_loc[:-1], counts)",
        ("test_v1_model_runner::test_a_prefix_hit_is_only_a_later_start",),
    ),
    Mutant(
        "a sequence is as long as its new tokens",
        "v1.model_runner",
        "torch.from_numpy(first + counts)",
        "torch.from_numpy(counts)",
        ("test_v1_model_runner::test_a_prefix_hit_is_only_a_later_start",),
    ),
    Mutant(
        "every chunk samples a token",
        "v1.model_runner",
        "if self.batch.num_computed_tokens[row] == self.batch.num_tokens[row]:",
        "if True:",
        ("test_v1_model_runner::test_no_token_before_the_whole_prompt_is_computed",),
    ),
    Mutant(
        "the random generator belongs to the row",
        "v1.model_runner",
        "int(self.batch.num_tokens[row]), self.device",
        "row, self.device",
        ("test_v1_engine::test_a_seed_does_not_depend_on_the_row",),
    ),
    Mutant(
        "the beginning of a stop text may be shown",
        "outputs",
        "cut = len(self._pending) - held_back(self._pending, self._stops)",
        "cut = len(self._pending)",
        ("test_outputs::test_a_stop_text_across_three_tokens_is_never_shown",),
    ),
    Mutant(
        "a row that moves leaves its adapter behind",
        "v1.input_batch",
        "self.adapters[row] = self.adapters[last]",
        "pass",
        ("test_lora::test_the_adapter_moves_with_its_row",),
    ),
    Mutant(
        "an adapter is a setting of the model, not of the request",
        "model.lora",
        "np.flatnonzero(owner == i)",
        "np.flatnonzero(owner == owner)",
        (
            "test_lora::test_each_token_gets_the_change_of_its_own_adapter",
            "test_lora::test_a_batch_of_several_adapters_says_what_each_says_alone",
        ),
    ),
    Mutant(
        "the matrices of an adapter are added as they are, without their scale",
        "model.lora",
        "scale * torch.block_diag(*diagonal)",
        "torch.block_diag(*diagonal)",
        ("test_lora::test_the_scale_is_alpha_over_rank",),
    ),
    Mutant(
        "an adapter that was dropped can be read again",
        "model.lora",
        "if path not in needed",
        "if path != adapter.path",
        ("test_lora::test_an_adapter_in_use_is_not_dropped",),
    ),
)
