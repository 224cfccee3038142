"""Misconceptions about blocks that are used, free or cached: three facts that are never the same."""

from __future__ import annotations

from tests.mutants.world import Mutant

POOL = (
    Mutant(
        "a reused block keeps its hash",
        "v1.block_pool",
        "self._evict(block)\n            block.ref_count = 1",
        "block.ref_count = 1",
        ("test_v1_block_pool::test_s03_a_block_in_use_is_not_found_under_its_old_hash",),
    ),
    Mutant(
        "a hit block stays in the free queue",
        "v1.block_pool",
        "if block.ref_count == 0:\n                self.free_queue.remove(block)",
        "pass",
        ("test_v1_block_pool::test_s06_a_hit_leaves_the_free_queue_and_counts_its_users",),
    ),
    Mutant(
        "a hit does not raise the reference count",
        "v1.block_pool",
        "block.ref_count += 1",
        "block.ref_count = 1",
        (
            "test_v1_block_pool::test_s06_a_hit_leaves_the_free_queue_and_counts_its_users",
            "test_v1_block_pool::test_s17_a_block_with_two_users_enters_the_queue_once",
            "test_v1_scheduler::test_s06_two_requests_share_a_prefix_in_the_same_step",
        ),
    ),
    Mutant(
        "a double release is harmless",
        "v1.block_pool",
        "if block.ref_count == 0:\n                raise",
        "if False:\n                raise",
        ("test_v1_block_pool::test_s17_releasing_a_block_that_nobody_uses_is_noticed",),
    ),
    Mutant(
        "blocks without a hash join the end of the queue",
        "v1.block_pool",
        "self.free_queue.prepend_n(worthless)",
        "self.free_queue.append_n(worthless)",
        ("test_v1_block_pool::test_s10_blocks_without_a_hash_are_reused_before_cached_ones",),
    ),
    Mutant(
        "cached blocks join the front of the queue",
        "v1.block_pool",
        "self.free_queue.append_n(findable)",
        "self.free_queue.prepend_n(findable)",
        ("test_v1_block_pool::test_s10_cached_blocks_join_the_end",),
    ),
    Mutant(
        "of equal blocks the last one inserted is found",
        "v1.block_pool",
        "next(iter(copies.values()))",
        "next(reversed(copies.values()))",
        ("test_v1_block_pool::test_s12_of_equal_blocks_the_first_one_is_found",),
    ),
    Mutant(
        "evicting one copy of a block removes the hash of all",
        "v1.block_pool",
        "if not copies:\n                del",
        "if True:\n                del",
        ("test_v1_block_pool::test_s12_when_one_copy_goes_the_other_is_found",),
    ),
    Mutant(
        "the cache may be reset while a request runs",
        "v1.block_pool",
        "if self.free_queue.num_free_blocks != self.num_blocks - 1:",
        "if False:",
        ("test_v1_block_pool::test_s22_the_prefix_cache_is_reset_only_when_idle",),
    ),
    Mutant(
        "the null block counts as in use",
        "v1.block_pool",
        "if self.free_queue.num_free_blocks != self.num_blocks - 1:",
        "if self.free_queue.num_free_blocks != self.num_blocks:",
        ("test_v1_block_pool::test_s22_the_null_block_is_not_in_use",),
    ),
    Mutant(
        "a stored event needs no parent",
        "v1.events",
        "parent_block_hash=hashes[first - 1] if first else None",
        "parent_block_hash=None",
        ("test_v1_block_pool::test_a_later_stored_event_names_its_parent",),
    ),
)
