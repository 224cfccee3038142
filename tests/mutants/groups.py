"""Misconceptions about windows, states, several groups that must agree, and what is told of them."""

from __future__ import annotations

from tests.mutants.world import Mutant

WINDOWS = (
    Mutant(
        "a hit needs the whole window",
        "v1.groups.sliding_window",
        "return num_blocks_for(self.window - 1, self.block_size)",
        "return num_blocks_for(self.window, self.block_size)",
        ("test_v1_groups::test_a_hit_needs_one_token_less_than_the_window",),
    ),
    Mutant(
        "a search from the right ends at the first hole",
        "v1.groups.sliding_window",
        "run = []\n            elif",
        "return []\n            elif",
        ("test_v1_groups::test_s27_a_window_is_looked_up_from_the_right",),
    ),
    Mutant(
        "a hole does not interrupt a run",
        "v1.groups.sliding_window",
        "run = []\n            elif",
        "pass\n            elif",
        ("test_v1_groups::test_a_hit_needs_one_token_less_than_the_window",),
    ),
    Mutant(
        "fewer blocks than the window needs are never a hit",
        "v1.groups.sliding_window",
        "run = self._cut_to_alignment(run)",
        "run = []",
        ("test_v1_groups::test_s27_a_leading_run_may_be_shorter_than_the_window",),
    ),
    Mutant(
        "a block returns when its first token has left the window",
        "v1.groups.base",
        "self.num_skipped_tokens(num_computed_tokens) // self.block_size",
        "num_blocks_for(self.num_skipped_tokens(num_computed_tokens), self.block_size)",
        ("test_v1_groups::test_a_block_returns_only_when_its_last_token_has_left_the_window",),
    ),
    Mutant(
        "position n looks back to n - window",
        "v1.groups.sliding_window",
        "return num_computed_tokens - (self.window - 1)",
        "return num_computed_tokens - self.window",
        ("test_v1_groups::test_s28_blocks_behind_the_window_return_early",),
    ),
    Mutant(
        "blocks behind a window return when the request ends",
        "v1.kv_cache_manager",
        "self.coordinator.remove_skipped_blocks(request.request_id, num_computed_tokens)",
        "pass",
        ("test_v1_groups::test_s28_blocks_behind_the_window_return_early",),
    ),
    Mutant(
        "a refused request has returned nothing",
        "v1.kv_cache_manager",
        "if required + reserved <= self.block_pool.num_free_blocks:",
        "required = self.coordinator.get_num_blocks_to_allocate("
        "request.request_id, num_tokens_need_slot, hits.blocks, num_tokens)\n"
        "        if required + reserved <= self.block_pool.num_free_blocks:",
        ("test_v1_groups::test_a_refused_request_has_returned_what_it_passed",),
    ),
    Mutant(
        "the null block has users",
        "v1.block_pool",
        "if block.is_null:\n                continue\n            if block.ref_count == 0:\n"
        "                self.free_queue",
        "if block.ref_count == 0 and not block.is_null:\n                self.free_queue",
        ("test_v1_groups::test_the_null_block_is_no_block",),
    ),
    Mutant(
        "a null block in a hit has to be paid for",
        "v1.groups.base",
        "block.ref_count == 0 and not block.is_null",
        "block.ref_count == 0",
        ("test_v1_groups::test_the_null_block_costs_no_capacity",),
    ),
    Mutant(
        "a window group needs blocks for the whole prompt at once",
        "v1.groups.sliding_window",
        "return min(num_blocks_for(num_tokens, self.block_size), at_once)",
        "return num_blocks_for(num_tokens, self.block_size)",
        ("test_v1_groups::test_a_long_prompt_is_admitted_by_what_it_holds_at_once",),
    ),
    Mutant(
        "an empty cache has no hits, whatever the layers see",
        "v1.groups.chunked_local",
        "begin = self.num_skipped_tokens(max_length) // self.block_size",
        "begin = 0",
        ("test_v1_groups::test_a_finished_chunk_is_a_hit_in_an_empty_cache",),
    ),
)

STATES = (
    Mutant(
        "a state may be used in the step that writes it",
        "v1.groups.mamba",
        "self.written_this_step.add(block.block_hash)",
        "pass",
        ("test_v1_groups::test_s07_a_state_is_not_used_in_the_step_that_writes_it",),
    ),
    Mutant(
        "K/V may not be used in the step that writes them",
        "v1.groups.base",
        "self.num_published[request.request_id] = num_full",
        "self.num_published[request.request_id] = num_full\n"
        "            self.written_this_step.update(b.block_hash for b in table if b.block_hash)",
        ("test_v1_groups::test_s07_keys_and_values_are_used_in_the_step_that_writes_them",),
    ),
    Mutant(
        "what was written once is never ready again",
        "v1.groups.base",
        "self.written_this_step.clear()",
        "pass",
        ("test_v1_groups::test_s07_a_state_is_not_used_in_the_step_that_writes_it",),
    ),
    Mutant(
        "the state a step starts from may go before the step",
        "v1.groups.mamba",
        "return num_computed_tokens - 1",
        "return num_computed_tokens",
        ("test_v1_groups::test_a_chunk_leaves_one_state_and_null_blocks_before_it",),
    ),
    Mutant(
        "a state is needed for every block",
        "v1.groups.mamba",
        "[self.pool.null_block] * gap + self.pool.get_new_blocks(1)",
        "self.pool.get_new_blocks(gap + 1)",
        ("test_v1_groups::test_a_chunk_leaves_one_state_and_null_blocks_before_it",),
    ),
    Mutant(
        "drafts need states",
        "v1.groups.mamba",
        "reserves_for_drafts = False",
        "reserves_for_drafts = True",
        ("test_v1_groups::test_a_state_takes_no_place_for_drafts",),
    ),
    Mutant(
        "a chunk may end anywhere, states or not",
        "v1.state_chunks",
        "end = aligned",
        "pass",
        ("test_v1_groups_scheduler::test_chunks_of_a_model_with_states_end_between_blocks",),
    ),
    Mutant(
        "a prompt that fits runs in one chunk, states or not",
        "v1.state_chunks",
        "stops = [self._last_useful_end(request, size)]",
        "stops = []",
        ("test_v1_groups_scheduler::test_the_last_chunk_leaves_the_state_that_the_same_prompt_needs",),
    ),
    Mutant(
        "the boundary is noted, and no chunk ends there",
        "v1.state_chunks",
        "if start < boundary < end:",
        "if False:",
        ("test_v1_groups_scheduler::test_a_chunk_ends_at_the_shared_prefix_boundary",),
    ),
)

COORDINATOR = (
    Mutant(
        "only the first group is cut to the common hit",
        "v1.coordinator",
        "hits[group.spec.group_id][: length // group.block_size] for group in self.groups",
        "hits[i][: length // group.block_size] if i == 0 else hits[i] for i, group in enumerate(self.groups)",
        ("test_v1_groups_hits::test_all_full_groups_are_cut",),
    ),
    Mutant(
        "each group is asked once",
        "v1.coordinator",
        "if agreed >= length:\n                break\n            length = agreed",
        "length = agreed\n            break",
        ("test_v1_groups_hits::test_two_windows_go_around_until_both_agree",),
    ),
    Mutant(
        "the boundary is the shortest prefix that some group has",
        "v1.coordinator",
        "longest = max(longest, served)",
        "longest = min(longest or served, served)",
        ("test_v1_groups_hits::test_the_boundary_is_the_longest_prefix_that_somebody_has",),
    ),
    Mutant(
        "there is always a boundary",
        "v1.coordinator",
        "longest if longest > length else 0",
        "longest",
        ("test_v1_groups_hits::test_s29_every_group_is_cut_to_the_common_hit",),
    ),
    Mutant(
        "a boundary without a hit is not worth remembering",
        "v1.kv_cache_manager",
        "if hits is not None:",
        "if hits:",
        ("test_v1_groups_hits::test_a_boundary_is_remembered_without_a_hit",),
    ),
    Mutant(
        "a group may offer a prefix that ends inside another one's block",
        "v1.groups.sliding_window",
        "elif run or self._is_aligned(i + 1 - drop_last):",
        "else:",
        ("test_v1_groups_hits::test_hits_are_multiples_of_the_largest_block",),
    ),
    Mutant(
        "what each group gives back for a draft head adds up",
        "v1.coordinator",
        "max_length = min(max_length + first.block_size, len(hashes) * first.block_size)",
        "pass",
        ("test_v1_groups_hits::test_a_draft_head_costs_one_block_once",),
    ),
    Mutant(
        "groups adopt and allocate one after the other",
        "v1.coordinator",
        "group.add_computed_blocks(request_id, blocks)",
        "group.add_computed_blocks(request_id, blocks)\n"
        "            group.allocate_new_blocks(request_id, (len(blocks) + 1) * group.block_size)",
        ("test_v1_groups_hits::test_one_groups_blocks_do_not_come_from_anothers_hit",),
    ),
    Mutant(
        "it is enough that each group by itself has room",
        "v1.coordinator",
        "return sum(\n            group",
        "return max(\n            group",
        ("test_v1_groups_hits::test_one_look_over_all_groups_decides",),
    ),
    Mutant(
        "equal groups are asked one by one",
        "v1.coordinator",
        "families.setdefault(group.spec.shape, []).append(group)",
        "families.setdefault(group.spec, []).append(group)",
        ("test_v1_groups_hits::test_groups_of_one_shape_answer_together",),
    ),
    Mutant(
        "all blocks of a request are released as one reversed list",
        "v1.coordinator",
        "for group in self.groups:\n            group.free(request_id)",
        "for group in self.groups[::-1]:\n            group.free(request_id)",
        ("test_v1_groups::test_s32_each_group_returns_its_own_tail_first",),
    ),
    Mutant(
        "larger blocks are called by their first hash",
        "v1.groups.spec",
        "block_hashes[stride - 1 :: stride]",
        "block_hashes[::stride]",
        ("test_v1_groups::test_larger_blocks_are_called_by_their_last_hash",),
    ),
)

RETENTION = (
    Mutant(
        "a shared prefix needs no pin",
        "v1.groups.retention",
        "if request.shared_prefix_boundary:",
        "if False:",
        ("test_v1_groups_hits::test_a_shared_prefix_of_a_window_is_hit_from_the_third_request_on",),
    ),
    Mutant(
        "retention 0 keeps nothing",
        "v1.groups.retention",
        "ends = {prompt - 1}",
        "ends = set()",
        ("test_v1_groups_hits::test_retention_zero_keeps_only_what_the_same_prompt_needs",),
    ),
    Mutant(
        "a sparse group publishes every block",
        "v1.groups.retention",
        "return sorted(keep)",
        "return list(range(first, last))",
        ("test_v1_groups_hits::test_retention_zero_keeps_only_what_the_same_prompt_needs",),
    ),
    Mutant(
        "one block before the end of a hit is enough for any window",
        "v1.groups.retention",
        "range(max(first, end - need), min(last, end))",
        "range(max(first, end - 1), min(last, end))",
        ("test_v1_groups_hits::test_s31_sparse_retention_keeps_the_whole_tail",),
    ),
)

GROUP_EVENTS = (
    Mutant(
        "hashes and tokens of an event go in pairs",
        "v1.block_pool",
        "self.announce(request, num_cached, num_full, group, published)",
        "self.announce(request, num_cached, num_full, group)",
        ("test_v1_groups_events::test_hashes_skip_what_is_not_published_and_tokens_do_not",),
    ),
    Mutant(
        "an event without hashes is no event",
        "v1.block_pool",
        "if self._events is None:\n            return\n        positions",
        "if self._events is None or published == []:\n            return\n        positions",
        ("test_v1_groups_events::test_hashes_skip_what_is_not_published_and_tokens_do_not",),
    ),
    Mutant(
        "report mode full skips null blocks",
        "v1.kv_cache_manager",
        "len(blocks), group.spec, reused=True",
        "len(blocks), group.spec, [i for i, block in enumerate(blocks) if not block.is_null], reused=True",
        ("test_v1_groups_events::test_report_full_announces_what_is_not_cached",),
    ),
    Mutant(
        "a removed hash is removed for all groups",
        "v1.block_pool",
        "BlockRemoved((key[:-GROUP_ID_BYTES],), group_of(key))",
        "BlockRemoved((key[:-GROUP_ID_BYTES],), 0)",
        ("test_v1_groups_events::test_a_removed_event_names_the_group",),
    ),
    Mutant(
        "a block has one name",
        "v1.block_pool",
        "(block.block_hash, *self._tails.pop(block.block_id, ()))",
        "(block.block_hash,)",
        ("test_v1_groups_events::test_the_end_of_a_prompt_inside_a_larger_block_is_announced",),
    ),
)

GROUPS = (*WINDOWS, *STATES, *COORDINATOR, *RETENTION, *GROUP_EVENTS)
