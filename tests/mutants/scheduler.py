"""Misconceptions about the token budget, admission, preemption and the end of a request."""

from __future__ import annotations

from tests.mutants.world import Mutant

SCHEDULER = (
    Mutant(
        "the token budget is for running requests",
        "v1.scheduler",
        "num_new_tokens = min(num_new_tokens, draft.budget)\n"
        "            num_new_tokens = self.state_chunks.cut(request, num_hit_tokens",
        "num_new_tokens = self.state_chunks.cut(request, num_hit_tokens",
        ("test_v1_scheduler::test_prefill_chunks_and_decodes_share_one_budget",),
    ),
    Mutant(
        "blocks are taken before it is known whether the step has room",
        "v1.scheduler",
        "return\n            num_new_tokens = min(num_new_tokens, draft.budget)",
        "self.kv_cache_manager.allocate_slots(request, num_new_tokens, hits, num_hit_tokens)\n"
        "                return\n            num_new_tokens = min(num_new_tokens, draft.budget)",
        ("test_v1_scheduler::test_s05_no_blocks_are_held_without_token_budget",),
    ),
    Mutant(
        "cached tokens are scheduled, but fast",
        "v1.scheduler",
        "num_new_tokens = self._chunk(request.num_tokens - num_hit_tokens)",
        "num_new_tokens = self._chunk(request.num_tokens)",
        ("test_v1_scheduler::test_hit_tokens_cost_no_budget",),
    ),
    Mutant(
        "the long-prefill threshold is a chunk size for everybody",
        "v1.scheduler",
        "if threshold and len(self.requests) > 1 else",
        "if threshold else",
        ("test_v1_scheduler::test_a_long_prompt_is_cut_only_if_somebody_else_is_there",),
    ),
    Mutant(
        "the last position of the model is computed",
        "v1.scheduler",
        "num_new_tokens = min(num_new_tokens, self.max_model_len - 1 - request.num_computed_tokens)",
        "pass",
        ("test_v1_scheduler::test_the_last_position_of_the_model_is_never_computed",),
    ),
    Mutant(
        "after a preemption the freed blocks go to the next in line",
        "v1.scheduler",
        "if not draft.has_preempted:",
        "if True:",
        ("test_v1_scheduler_preemption::test_nobody_is_admitted_in_the_step_of_a_preemption",),
    ),
    Mutant(
        "the oldest request is preempted",
        "v1.scheduler",
        "return self.running[-1]",
        "return self.running[0]",
        ("test_v1_scheduler_preemption::test_the_last_admitted_is_preempted",),
    ),
    Mutant(
        "the last admitted is preempted whatever its priority",
        "v1.scheduler",
        "key=lambda request: (request.priority, request.arrival)",
        "key=lambda request: request.arrival",
        ("test_v1_scheduler_preemption::test_priority_the_least_important_is_preempted",),
    ),
    Mutant(
        "the loop goes on at the next index, wherever the victim stood",
        "v1.scheduler",
        "index -= 1",
        "pass",
        ("test_v1_scheduler_preemption::test_priority_a_victim_further_up_lets_nobody_be_skipped",),
    ),
    Mutant(
        "a step that failed has computed its tokens",
        "v1.scheduler",
        "request.num_computed_tokens -= share.num_tokens",
        "pass",
        ("test_v1_scheduler_preemption::test_a_step_that_failed_is_taken_back_whole",),
    ),
    Mutant(
        "a preempted request keeps its computed count",
        "v1.scheduler",
        "victim.num_computed_tokens = 0",
        "pass",
        ("test_v1_scheduler_preemption::test_s04_a_preempted_request_forgets_its_computed_count",),
    ),
    Mutant(
        "a request with output is decoding",
        "v1.scheduler",
        '"resumed" if request.num_preemptions else "new"',
        '"running" if request.num_output_tokens else "new"',
        ("test_v1_scheduler_preemption::test_s21_a_resumed_request_is_told_whole",),
    ),
    Mutant(
        "a resumed request had its own blocks cached",
        "v1.scheduler",
        "if not resumed:",
        "if True:",
        ("test_v1_scheduler_preemption::test_a_resumed_request_keeps_its_first_hit_as_cached_tokens",),
    ),
    Mutant(
        "a preempted request is admitted by its first chunk",
        "v1.scheduler",
        "full_sequence_must_fit=self.config.reserve_full_sequence",
        "full_sequence_must_fit=False",
        ("test_v1_scheduler_preemption::test_s20_a_preempted_request_is_not_readmitted_by_its_first_chunk",),
    ),
    Mutant(
        "the watermark holds even when nothing runs",
        "v1.scheduler",
        "keep_watermark=bool(self.running)",
        "keep_watermark=True",
        ("test_v1_scheduler_preemption::test_the_watermark_does_not_stop_an_idle_engine",),
    ),
    Mutant(
        "a share that was taken back stays findable",
        "v1.scheduler",
        'self.config.mode == "fixed"',
        'self.config.mode == "never"',
        ("test_v1_scheduler_preemption::test_a_block_of_a_share_taken_back_cannot_be_found",),
    ),
    Mutant(
        "whether a request ends is decided before the token joins",
        "v1.request",
        "self.num_output_tokens >= params.max_tokens",
        "self.num_output_tokens - 1 >= params.max_tokens",
        ("test_v1_scheduler_stopping::test_max_tokens_counts_the_token_just_appended",),
    ),
    Mutant(
        "ignore_eos means its opposite",
        "v1.request",
        "and not params.ignore_eos",
        "and params.ignore_eos",
        ("test_v1_scheduler_stopping::test_the_end_token_ends_unless_ignored",),
    ),
    Mutant(
        "blocks return when the output is read",
        "v1.scheduler",
        "request.status = status\n        self.kv_cache_manager.free(request)",
        "request.status = status",
        ("test_v1_scheduler_stopping::test_finished_requests_give_their_blocks_back_and_are_named_once",),
    ),
)
