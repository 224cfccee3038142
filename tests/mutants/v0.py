"""Misconceptions about V0: its blocks and cache, who decides what is computed, and who skips it."""

from __future__ import annotations

from tests.mutants.world import Mutant

V0_CACHE = (
    Mutant(
        "V0: freed blocks queue up at the back",
        "v0.allocator",
        "self.free_ids.appendleft(block.block_id)",
        "self.free_ids.append(block.block_id)",
        ("test_v0_block::test_the_block_that_was_freed_last_is_taken_first",),
    ),
    Mutant(
        "V0: a forked block may be written by both",
        "v0.allocator",
        "self._copy_on_write(block)",
        "pass",
        (
            "test_v0_block::test_s11_whoever_writes_first_gets_a_copy",
            "test_v0_block::test_s11_with_a_cache_as_well",
        ),
    ),
    Mutant(
        "V0: a block is called by its own tokens",
        "v0.block",
        "content_hash(parent, self.token_ids, self.extra)",
        "content_hash(None, self.token_ids, self.extra)",
        ("test_v0_block::test_a_block_is_called_by_all_tokens_up_to_its_end",),
    ),
    Mutant(
        "V0: the adapter is not part of a block's name",
        "v0.block",
        "content_hash(parent, self.token_ids, self.extra)",
        "content_hash(parent, self.token_ids)",
        (
            "test_v0_block::test_a_block_of_another_adapter_has_another_name",
            "test_v0_prefix_caching::test_s23_an_adapter_separates_the_hits",
        ),
    ),
    Mutant(
        "V0: blocks of one request are equally good victims",
        "v0.prefix_caching",
        "self.evictor.add(block_id, content_hash, block.num_tokens_total, last_accessed)",
        "self.evictor.add(block_id, content_hash, 0, last_accessed)",
        ("test_v0_prefix_caching::test_s09_the_tail_of_a_prefix_is_evicted_first",),
    ),
    Mutant(
        "V0: a block that was used since goes at its old turn",
        "v0.evictor",
        "if block == BlockMetaData(content_hash, -minus_tokens, last_accessed):",
        "if block is not None:",
        ("test_v0_evictor::test_a_later_use_counts",),
    ),
    Mutant(
        "V0: cached blocks are evicted while worthless ones are free",
        "v0.prefix_caching",
        "if self.free_ids:",
        "if self.free_ids and not len(self.evictor):",
        ("test_v0_prefix_caching::test_a_worthless_block_is_taken_before_any_cached_one",),
    ),
    Mutant(
        "V0: an evicted block keeps its name",
        "v0.prefix_caching",
        "block_id, content_hash = self.evictor.evict()\n            del self.cached[content_hash]",
        "block_id, content_hash = self.evictor.evict()",
        ("test_v0_prefix_caching::test_s03_an_evicted_block_forgets_its_name",),
    ),
    Mutant(
        "V0: a hit stays evictable",
        "v0.prefix_caching",
        "self.evictor.remove(block_id)",
        "pass",
        ("test_v0_prefix_caching::test_a_hit_in_the_evictor_is_no_longer_free",),
    ),
    Mutant(
        "V0: a hit is only read, so it needs no count",
        "v0.prefix_caching",
        "self.ref_counts[block_id] += 1\n        if self.ref_counts[block_id] == 1:",
        "self.ref_counts[block_id] = 1\n        if block_id in self.evictor:",
        ("test_v0_prefix_caching::test_each_user_of_a_cached_block_counts",),
    ),
    Mutant(
        "V0: a sequence that fills a known block keeps its own",
        "v0.prefix_caching",
        "self._release_unhashed(block.block_id)\n            self._join(block)",
        "pass",
        ("test_v0_prefix_caching::test_s12_the_id_changes_under_a_sequence_that_fills_a_known_block",),
    ),
    Mutant(
        "V0: cached is computed",
        "v0.prefix_caching",
        "self.trackers[block_id] = BlockTracker()\n        return block_id",
        "self.trackers[block_id] = BlockTracker(computed=True)\n        return block_id",
        (
            "test_v0_prefix_caching::test_s13_computed_is_a_property_of_time",
            "test_v0_prefix_caching::test_s13_a_block_won_by_eviction_has_not_computed_its_new_content",
            "test_v0_scheduler::test_s06_equal_prompts_of_one_step_share_memory_but_not_work",
        ),
    ),
    Mutant(
        "V0: nothing is ever marked as computed",
        "v0.prefix_caching",
        "self.trackers[block_id].computed = True",
        "pass",
        ("test_v0_prefix_caching::test_s13_computed_is_a_property_of_time",),
    ),
    Mutant(
        "V0: a block that is hit again has to be computed again",
        "v0.prefix_caching",
        "self.trackers[block_id] = BlockTracker(computed=True)",
        "self.trackers[block_id] = BlockTracker()",
        ("test_v0_prefix_caching::test_a_block_that_is_marked_stays_computed",),
    ),
    Mutant(
        "V0: a block without its head is a hit",
        "v0.prefix_caching",
        "if self.faithful:\n            return bisect_left",
        "if True:\n            return bisect_left",
        ("test_v0_block_manager::test_a_prefix_without_its_head_is_no_hit",),
    ),
    Mutant(
        "V0: nobody remembers when a block was used",
        "v0.block_manager",
        "self.accessed.stamp_blocks(seq, table.block_ids, on)",
        "pass",
        (
            "test_v0_prefix_caching::test_the_request_that_ran_last_is_evicted_last",
            "test_v0_prefix_caching::test_blocks_learn_of_their_last_use_only_when_they_are_freed",
        ),
    ),
    Mutant(
        "V0: each step stamps its blocks",
        "v0.block_manager",
        "self.accessed.update(seq, now)",
        "self.accessed.update(seq, now)\n"
        "            self.accessed.stamp_blocks(seq, self.block_ids(seq), self.allocator.gpu)",
        (
            "test_v0_prefix_caching::test_blocks_learn_of_their_last_use_only_when_they_are_freed",
            "test_v0_block_manager::test_swapping_leaves_no_time_behind",
        ),
    ),
)

V0_MANAGER = (
    Mutant(
        "V0: a sequence is looked up once",
        "v0.tracker",
        "may_have_changed = not self.faithful and seq.status is SequenceStatus.WAITING",
        "may_have_changed = False",
        (
            "test_v0_tracker::test_a_waiting_sequence_is_looked_up_again",
            "test_v0_tracker::test_a_prompt_may_also_find_more_while_it_waits",
        ),
    ),
    Mutant(
        "V0: a prompt finds its own blocks",
        "v0.tracker",
        "if known is None or not seq.is_prefill or may_have_changed:",
        "if True:",
        ("test_v0_tracker::test_own_blocks_are_no_hit_while_a_prompt_is_computed",),
    ),
    Mutant(
        "V0: can_append asks for the blocks that are needed",
        "v0.block_table",
        "if exact:",
        "if True:",
        ("test_v0_block_table::test_a_half_full_block_counts_as_if_it_had_to_be_taken",),
    ),
    Mutant(
        "V0: a hit makes room for its prompt",
        "v0.block_manager",
        "needed = -(-(len(seq) + num_lookahead_slots) // self.block_size)",
        "needed = -(-(len(seq) - self.get_num_cached_tokens(seq)) // self.block_size)",
        ("test_v0_block_manager::test_admission_asks_for_all_blocks_cached_or_not",),
    ),
    Mutant(
        "V0: whatever is free can be had by a newcomer",
        "v0.block_manager",
        "return AllocStatus.OK if free - needed >= self.watermark_blocks else AllocStatus.LATER",
        "return AllocStatus.OK if free - needed >= 0 else AllocStatus.LATER",
        ("test_v0_block_manager::test_the_watermark_stays_free_when_a_prompt_is_admitted",),
    ),
    Mutant(
        "V0: a prompt is computed with its first chunk",
        "v0.block_manager",
        "if self.faithful:\n            return self.allocator.gpu.mark_blocks_as_computed()",
        "if True:\n            return self.allocator.gpu.mark_blocks_as_computed()",
        (
            "test_v0_block_manager::test_a_chunk_computes_its_own_blocks_only",
            "test_v0_chunked_prefill::test_only_what_a_chunk_has_run_may_be_skipped",
        ),
    ),
    Mutant(
        "V0: swap pairs are block ids",
        "v0.device_allocator",
        "(from_id - from_base, block.block_id - to_base)",
        "(from_id, block.block_id)",
        ("test_v0_block_manager::test_swap_pairs_are_zero_based_on_each_device",),
    ),
    Mutant(
        "V0: a cached block that is free costs nothing to swap in",
        "v0.prefix_caching",
        "or self.cached[block.content_hash] in self.evictor)",
        ")",
        ("test_v0_block_manager::test_s14_swapping_in_takes_blocks_out_of_the_evictor",),
    ),
    Mutant(
        "V0: an empty block needs no place on the CPU",
        "v0.block_manager",
        "touched = max(touched, len(blocks) - self._num_shared(blocks, to))",
        "pass",
        ("test_v0_block_manager::test_an_empty_block_has_to_be_swapped_too",),
    ),
    Mutant(
        "V0: blocks behind a window leave the table",
        "v0.block_table",
        "self.blocks[i] = null_block",
        "pass",
        ("test_v0_block_table::test_blocks_behind_the_window_become_the_null_block",),
    ),
)
