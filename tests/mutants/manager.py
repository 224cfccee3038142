"""Misconceptions about what is computed, who gets blocks, and what is published."""

from __future__ import annotations

from tests.mutants.world import Mutant

MANAGER = (
    Mutant(
        "a full hit is allowed",
        "v1.kv_cache_manager",
        "max_cache_hit_length = request.num_tokens - 1",
        "max_cache_hit_length = request.num_tokens",
        ("test_v1_kv_cache_manager::test_s01_a_full_hit_leaves_work_to_do",),
    ),
    Mutant(
        "a hit may have holes",
        "v1.groups.full_attention",
        "break",
        "continue",
        ("test_v1_kv_cache_manager::test_a_hit_ends_at_the_first_missing_block",),
    ),
    Mutant(
        "scores of prompt tokens can be had without computing them",
        "v1.kv_cache_manager",
        "if not self.enable_caching or request.skip_reading_prefix_cache:",
        "if not self.enable_caching:",
        ("test_v1_kv_cache_manager::test_prompt_scores_need_a_cold_lookup_but_publish",),
    ),
    Mutant(
        "a block is needed when the length is a multiple of the block size",
        "v1.groups.base",
        "return -(-num_tokens // block_size)",
        "return num_tokens // block_size + 1",
        ("test_v1_kv_cache_manager::test_s02_decoding_needs_a_block_only_after_a_full_one",),
    ),
    Mutant(
        "each step needs blocks for the whole length",
        "v1.groups.base",
        "held = len(self.table(request_id)) + len(hits)",
        "held = len(hits)",
        ("test_v1_kv_cache_manager::test_s02_decoding_needs_a_block_only_after_a_full_one",),
    ),
    Mutant(
        "admission ignores that hits stand in the free queue",
        "v1.groups.base",
        "new + sum(block.ref_count == 0 and not block.is_null for block in hits)",
        "new",
        ("test_v1_kv_cache_manager::test_s08_admission_counts_hits_that_stand_in_the_free_queue",),
    ),
    Mutant(
        "every hit block has to be paid for",
        "v1.groups.base",
        "new + sum(block.ref_count == 0 and not block.is_null for block in hits)",
        "new + len(hits)",
        ("test_v1_kv_cache_manager::test_s08_a_hit_in_use_costs_nothing",),
    ),
    Mutant(
        "a refused request keeps its hit",
        "v1.kv_cache_manager",
        "if required + reserved > self.block_pool.num_free_blocks or not is_ready:",
        "if required + reserved > self.block_pool.num_free_blocks or not is_ready:\n"
        "            self.coordinator.add_computed_blocks(request.request_id, hits.blocks)",
        ("test_v1_kv_cache_manager::test_s08_a_refused_request_holds_nothing",),
    ),
    Mutant(
        "lookahead slots come on top of the model's length",
        "v1.kv_cache_manager",
        "min(num_tokens + num_lookahead_tokens, self.max_model_len)",
        "num_tokens + num_lookahead_tokens",
        ("test_v1_kv_cache_manager::test_s18_never_a_slot_beyond_the_model_length",),
    ),
    Mutant(
        "slots of drafts are published",
        "v1.kv_cache_manager",
        "min(num_tokens, request.num_tokens)",
        "min(num_tokens_need_slot, request.num_tokens)",
        ("test_v1_publishing::test_s19_lookahead_slots_of_a_chunk_are_not_published",),
    ),
    Mutant(
        "a partial block is published",
        "v1.groups.base",
        "num_full = num_tokens // self.block_size",
        "num_full = num_blocks_for(num_tokens, self.block_size)",
        ("test_v1_publishing::test_a_partial_block_is_not_published",),
    ),
    Mutant(
        "a block is published when the request ends",
        "v1.kv_cache_manager",
        "self.coordinator.cache_blocks(request, min(num_tokens, request.num_tokens))",
        "pass",
        ("test_v1_publishing::test_published_at_allocation",),
    ),
    Mutant(
        "what a request has published once it never publishes again",
        "v1.groups.base",
        "self.num_published.pop(request_id, None)",
        "pass",
        ("test_v1_publishing::test_a_request_that_starts_over_publishes_anew",),
    ),
    Mutant(
        "the head of a request is evicted before its tail",
        "v1.groups.base",
        "self.tables.pop(request_id, [])[::-1]",
        "self.tables.pop(request_id, [])",
        ("test_v1_block_pool::test_s09_the_tail_is_evicted_before_the_head",),
    ),
    Mutant(
        "the watermark holds for running requests too",
        "v1.kv_cache_manager",
        "reserved = self.watermark_blocks if is_admission and keep_watermark else 0",
        "reserved = self.watermark_blocks if keep_watermark else 0",
        ("test_v1_kv_cache_manager::test_the_watermark_is_for_newcomers",),
    ),
    Mutant(
        "a preempted request is no newcomer, so the watermark does not hold",
        "v1.kv_cache_manager",
        "request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)",
        "request.status is RequestStatus.WAITING",
        ("test_v1_kv_cache_manager::test_the_watermark_holds_for_a_preempted_request_too",),
    ),
    Mutant(
        "a request may start if its first chunk fits",
        "v1.kv_cache_manager",
        "if full_sequence_must_fit else 0",
        "if False else 0",
        ("test_v1_kv_cache_manager::test_s20_the_whole_sequence_must_fit",),
    ),
)
