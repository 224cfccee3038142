"""Misconceptions about V0's steps: who is served when, what it costs, and what the worker makes of it."""

from __future__ import annotations

from tests.mutants.world import Mutant

V0_SCHEDULER = (
    Mutant(
        "V0: decodes go before prompts, also without chunked prefill",
        "v0.scheduler",
        "if not self.swapped:\n            prefills",
        "if not self.swapped and not self.running:\n            prefills",
        ("test_v0_scheduler::test_prompts_go_first_and_decodes_wait",),
    ),
    Mutant(
        "V0: whoever is swapped out is out of the way",
        "v0.scheduler",
        "if not self.swapped:\n            prefills",
        "if True:\n            prefills",
        ("test_v0_preemption::test_no_prompt_starts_while_somebody_is_swapped_out",),
    ),
    Mutant(
        "V0: swapped groups come back as soon as they fit",
        "v0.scheduler",
        "if not running.num_preempted:",
        "if True:",
        ("test_v0_preemption::test_nobody_comes_back_in_a_step_that_preempts",),
    ),
    Mutant(
        "V0: with chunked prefill new prompts go first too",
        "v0.scheduler",
        "running = self._schedule_running(budget, out, partial)",
        "new = self._schedule_prefills(budget, out, partial)\n"
        "        running = self._schedule_running(budget, out, partial)",
        ("test_v0_chunked_prefill::test_decodes_go_first_and_prompts_get_the_rest",),
    ),
    Mutant(
        "V0: seats are for the groups of a step",
        "v0.scheduler",
        "for group in self.running:\n            budget.add_seqs(group.request_id, group.max_num_running_seqs)",
        "pass",
        ("test_v0_scheduler::test_seats_are_counted_with_those_who_run",),
    ),
    Mutant(
        "V0: every chunk samples a token",
        "v0.scheduler",
        "do_sample=not group.is_prefill",
        "do_sample=True",
        ("test_v0_chunked_prefill::test_an_unfinished_prompt_samples_nothing",),
    ),
    Mutant(
        "V0: the scheduler skips what is computed",
        "v0.phases",
        "phase.prefills.append(ScheduledGroup(group, uncached + cached))\n            budget.add_tokens",
        "phase.prefills.append(ScheduledGroup(group, uncached))\n            budget.add_tokens",
        ("test_v0_scheduler::test_the_scheduler_passes_the_hit_on_and_skips_nothing",),
    ),
    Mutant(
        "V0: the token budget counts cached tokens",
        "v0.phases",
        "phase.prefills.append(ScheduledGroup(group, uncached + cached))\n"
        "            budget.add_tokens(group.request_id, uncached, cached)",
        "phase.prefills.append(ScheduledGroup(group, uncached + cached))\n"
        "            budget.add_tokens(group.request_id, uncached + cached)",
        ("test_v0_scheduler::test_cached_tokens_cost_no_budget",),
    ),
    Mutant(
        "V0: a prompt that is cached to its end is free",
        "v0.phases",
        "if uncached == 0 and cached > 0:\n            uncached, cached = 1, cached - 1",
        "uncached, cached = max(uncached, 0), cached",
        ("test_v0_scheduler::test_s01_a_prompt_that_is_cached_to_its_end_costs_one_token",),
    ),
    Mutant(
        "V0: the oldest running group is preempted",
        "v0.phases",
        "victim = self.running.pop() if self.running else group",
        "victim = group",
        ("test_v0_preemption::test_the_last_one_is_preempted_and_waits_at_the_head",),
    ),
    Mutant(
        "V0: a preempted group queues up again",
        "v0.scheduler",
        "self.waiting.extendleft(running.recomputed)",
        "self.waiting.extend(running.recomputed)",
        ("test_v0_preemption::test_the_last_one_is_preempted_and_waits_at_the_head",),
    ),
    Mutant(
        "V0: chunks are as long as the budget, with a cache too",
        "v0.phases",
        "limit = limit // self.config.block_size * self.config.block_size",
        "pass",
        ("test_v0_chunked_prefill::test_with_a_cache_chunks_end_at_block_ends",),
    ),
    Mutant(
        "V0: a step that failed has computed its blocks",
        "v0.scheduler",
        "self.block_manager.forget_uncomputed(seq)",
        "pass",
        ("test_v0_preemption::test_a_step_that_failed_is_taken_back_whole",),
    ),
    Mutant(
        "V0: the groups that a failed step swapped out are safe",
        "v0.scheduler",
        'swapped_out = [group for group, mode in out.preempted if mode == "SWAP"]',
        "swapped_out = list[SequenceGroup]()",
        ("test_v0_preemption::test_a_failed_step_swaps_nobody_out",),
    ),
    Mutant(
        "V0: a request is charged each time it is looked at",
        "v0.budget",
        "self._seqs.setdefault(request_id, num_seqs)",
        "self._seqs[request_id] = self._seqs.get(request_id, 0) + num_seqs",
        ("test_v0_budget::test_a_request_is_counted_once",),
    ),
)

V0_WORKER = (
    Mutant(
        "V0: a full hit has nothing to run",
        "v0.model_input",
        "first = min(prefix_cache_len, seq.seq_len - 1)",
        "first = prefix_cache_len",
        ("test_v0_model_input::test_s01_a_full_hit_has_one_token_to_run",),
    ),
    Mutant(
        "V0: positions count the tokens that are left",
        "v0.model_input",
        "seq.input_positions = seq.input_positions[first - seq.context_len :]",
        "seq.input_positions = list(range(seq.seq_len - first))",
        ("test_v0_model_input::test_a_partial_hit_cuts_tokens_and_positions_alike",),
    ),
    Mutant(
        "V0: a later chunk is cut by the hit once more",
        "v0.model_input",
        "if prefix_cache_len <= seq.context_len:",
        "prefix_cache_len += seq.context_len\n        if prefix_cache_len <= 0:",
        ("test_v0_model_input::test_a_later_chunk_that_is_past_the_hit_skips_nothing",),
    ),
    Mutant(
        "V0: slots are those of the whole table",
        "v0.model_input",
        "for position in range(context_len, seq_len)",
        "for position in range(seq_len - context_len)",
        ("test_v0_model_input::test_slots_go_on_behind_the_hit",),
    ),
    Mutant(
        "V0: each prompt reads pages only if it has a hit itself",
        "v0.model_input",
        "if any_hit:\n            return seq.block_table",
        "if seq.prefix_cache_hit:\n            return seq.block_table",
        ("test_v0_model_input::test_one_hit_makes_every_prompt_read_pages",),
    ),
    Mutant(
        "V0: swap out first, then in",
        "v0.worker",
        "_copy_between(cpu, gpu, out.blocks_to_swap_in)\n"
        "            _copy_between(gpu, cpu, out.blocks_to_swap_out)",
        "_copy_between(gpu, cpu, out.blocks_to_swap_out)\n"
        "            _copy_between(cpu, gpu, out.blocks_to_swap_in)",
        ("test_v0_worker::test_orders_are_carried_out_in_before_out_before_copies",),
    ),
    Mutant(
        "V0: blocks are copied when there is time",
        "v0.worker",
        "if out.blocks_to_copy:",
        "if False:",
        ("test_v0_worker::test_s11_a_block_is_copied_before_the_token_is_written",),
    ),
    Mutant(
        "V0: whoever is computed gets a token",
        "v0.worker",
        "for group, end in zip(metadata, ends, strict=True) if group.do_sample",
        "for group, end in zip(metadata, ends, strict=True)",
        ("test_v0_worker::test_an_unfinished_chunk_samples_nothing",),
    ),
    Mutant(
        "V0: a step that broke down is over",
        "v0.engine",
        "self.scheduler.take_back(scheduled)",
        "pass",
        ("test_v0_interrupted::test_what_a_failed_step_was_to_compute_is_computed_again",),
    ),
)
