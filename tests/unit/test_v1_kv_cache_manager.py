"""The KV cache manager: what is computed already, who gets blocks, what is published. Cases S01, S02, S04, S05,
S08, S18, S20, S23 of the shared set."""

from __future__ import annotations

import pytest

from refengine.errors import ConfigError, IntegrityError
from refengine.hashing import Adapter
from refengine.v1.coordinator import make_coordinator
from refengine.v1.events import BlockStored
from refengine.v1.groups.spec import FULL_ATTENTION, GroupSpec
from refengine.v1.kv_cache_manager import KVCacheManager, PrefixCacheStats
from tests.unit.helpers import Cache, numbers

# Lookup


def test_s01_a_full_hit_leaves_work_to_do() -> None:
    """S01. Misconceptions: "a prompt that is cached to its end needs no step" and "all but one token is cached"."""
    cache = Cache(usable=10)
    assert cache.start("A", numbers(1, 8)) == 0
    cache.finish("A")
    assert cache.hit(numbers(1, 8)) == 4
    assert cache.start("B", numbers(1, 8)) == 4
    assert cache.table("B") == [1, 3]
    cache.finish("B")
    assert cache.start("C", numbers(1, 9)) == 8


@pytest.mark.parametrize("num_tokens", range(1, 14))
def test_s01_a_hit_is_whole_blocks_below_the_last_token(num_tokens: int) -> None:
    """S01 as a rule: all tokens but the last, rounded down to blocks, whatever else is cached."""
    cache = Cache(usable=10)
    cache.start("A", numbers(1, 16))
    assert cache.hit(numbers(1, num_tokens)) == (num_tokens - 1) // 4 * 4


def test_a_hit_ends_at_the_first_missing_block() -> None:
    """Misconception: "every cached block counts". Block 2's K/V are useless without block 1's."""
    cache = Cache(usable=10)
    cache.start("A", numbers(1, 13))
    cache.pool.evict_blocks([2])
    assert cache.hit(numbers(1, 13)) == 4
    cache.pool.evict_blocks([1])
    assert cache.hit(numbers(1, 13)) == 0


def test_a_lookup_changes_nothing() -> None:
    """Misconception: "looking up reserves". A waiting request is looked up in every step until it fits."""
    cache = Cache(usable=10)
    cache.start("A", numbers(1, 8))
    cache.finish("A")
    before = (cache.free, cache.counts(1, 2), cache.hashed)
    for _ in range(3):
        assert cache.hit(numbers(1, 9)) == 8
    assert (cache.free, cache.counts(1, 2), cache.hashed) == before


def test_prompt_scores_need_a_cold_lookup_but_publish() -> None:
    """Misconception: "a hit has its scores too". It must not read the cache, but it writes it for others."""
    cache = Cache(usable=10)
    cache.start("A", numbers(1, 8))
    cache.finish("A")
    assert cache.start("B", numbers(1, 9), skip_reading_prefix_cache=True) == 0
    cache.finish("B")
    cache.pool.evict_blocks([1, 2])
    assert cache.hit(numbers(1, 9)) == 8


def test_with_caching_off_nothing_is_found_or_published() -> None:
    cache = Cache(usable=10, enable_caching=False)
    cache.start("A", numbers(1, 8))
    cache.finish("A")
    assert cache.hashed == []
    assert cache.hit(numbers(1, 9)) == 0


def test_s23_salt_and_adapter_separate_the_hits() -> None:
    """S23 seen from the cache. Misconception: "equal tokens, equal K/V". Not with another adapter or tenant."""
    cache = Cache(usable=20)
    cache.start("A", numbers(1, 8), cache_salt="X")
    cache.start("B", numbers(1, 8), adapter=Adapter("X", "/one"))
    tokens = numbers(1, 9)
    assert cache.hit(tokens) == cache.hit(tokens, cache_salt="Y") == 0
    assert cache.hit(tokens, adapter=Adapter("X", "/two")) == 0
    assert cache.hit(tokens, cache_salt="X") == 8
    assert cache.start("C", tokens, adapter=Adapter("X", "/one", adapter_id=5)) == 8
    assert cache.table("C")[:2] == cache.table("B")


# Growing


def test_s02_decoding_needs_a_block_only_after_a_full_one() -> None:
    """S02. Misconceptions: "a block is needed when the length is a multiple of B", "need the whole length again".

    The sampled token is part of the length already when its K/V are about to be written.
    """
    cache = Cache(usable=2)
    cache.start("A", numbers(1, 7))
    assert cache.table("A") == [1, 2]
    assert cache.decode("A", 8), "token 8 goes into the second block"
    assert not cache.decode("A", 9), "token 9 needs a third block, and there is none"
    assert cache.table("A") == [1, 2]


def test_s02_the_token_after_the_first_of_a_block_needs_none() -> None:
    """S02 at length 10: reached only if 9 got its block."""
    cache = Cache(usable=3)
    cache.start("A", numbers(1, 8))
    assert cache.decode("A", 9)
    assert cache.free == []
    assert cache.decode("A", 10)
    assert cache.table("A") == [1, 2, 3]


def test_s04_resume_counts_work_after_the_lookup() -> None:
    """S04. Misconception: "a preempted request starts over from its first token"; it finds its own blocks."""
    cache = Cache(usable=8)
    cache.start("A", numbers(1, 8))
    cache.requests["A"].append([9])
    cache.preempt("A")
    assert cache.resume("A") == 8
    assert cache.requests["A"].num_computed_tokens == 9
    assert len(cache.table("A")) == 3


def test_s04_generated_tokens_are_part_of_the_chain() -> None:
    """S04. Misconception: "only prompts are cached"."""
    cache = Cache(usable=8)
    cache.start("A", numbers(1, 7))
    cache.decode("A", *numbers(8, 13))
    cache.preempt("A")
    assert cache.resume("A") == 12


def test_s18_never_a_slot_beyond_the_model_length() -> None:
    """S18. Misconception: "lookahead slots come on top". The block table's row has a fixed width."""
    cache = Cache(usable=10, max_model_len=10)
    cache.add("A", numbers(1, 10))
    assert cache.resume("A", num_lookahead_tokens=6) == 0
    assert cache.table("A") == [1, 2, 3]


def test_nothing_to_allocate_for_is_a_bug_of_the_caller() -> None:
    cache = Cache(usable=4)
    request = cache.add("A", numbers(1, 4))
    with pytest.raises(ValueError, match="request 'A' asks for slots for 0 tokens"):
        cache.manager.allocate_slots(request, 0)
    assert cache.free == [1, 2, 3, 4]


# Admission


def running_beside_cached(usable: int = 5) -> Cache:
    """Blocks 1 and 2 are cached and free, block 3 is in use."""
    cache = Cache(usable)
    cache.start("A", numbers(1, 8))
    cache.finish("A")
    cache.start("R", [101, 102, 103])
    assert cache.free == [4, 5, 2, 1]
    return cache


def test_s08_admission_counts_hits_that_stand_in_the_free_queue() -> None:
    """S08. Misconception: "new blocks needed <= free blocks". Some of the free ones are the very hits."""
    cache = running_beside_cached()
    request = cache.add("C", [*numbers(1, 8), *numbers(201, 212)])
    hits, _, _ = cache.manager.get_computed_blocks(request)
    assert cache.manager.coordinator.get_num_blocks_to_allocate("C", 20, hits.blocks) == 3 + 2
    assert cache.resume("C") is None
    assert cache.start("C2", [*numbers(1, 8), *numbers(301, 308)]) == 8
    assert cache.table("C2") == [1, 2, 4, 5]
    assert cache.free == []


def test_s08_a_hit_in_use_costs_nothing() -> None:
    """S08, the other side. Misconception: "every hit block has to be paid for"."""
    cache = Cache(usable=3)
    cache.start("A", numbers(1, 8))
    assert cache.start("B", numbers(1, 9)) == 8
    assert cache.table("B") == [1, 2, 3]


def test_s08_a_refused_request_holds_nothing() -> None:
    """S05 and S08. Misconception: "keep the hit, so that nobody takes it meanwhile". Two such requests deadlock."""
    cache = running_beside_cached()
    assert cache.start("C", [*numbers(1, 8), *numbers(201, 212)]) is None
    assert cache.table("C") == []
    assert cache.counts(1, 2, 4, 5) == [0, 0, 0, 0]
    assert cache.free == [4, 5, 2, 1]


def test_s20_the_whole_sequence_must_fit() -> None:
    """S20. Misconception: "a chunk that fits may start". It fills the cache and is preempted before it is done."""
    cache = Cache(usable=4)
    cache.add("A", numbers(1, 20))
    assert cache.resume("A", 8, full_sequence_must_fit=True) is None
    assert cache.free == [1, 2, 3, 4]
    assert cache.resume("A", 8) == 0


def test_the_watermark_is_for_newcomers() -> None:
    """Misconception: "the watermark is a reserve nobody may touch". It is there for the running requests."""
    cache = Cache(usable=4, watermark=0.4)  # 0.4 of 5 blocks, rounded down: 2
    assert cache.start("A", numbers(1, 12)) is None
    assert cache.start("B", numbers(1, 8)) == 0
    assert cache.decode("B", *numbers(9, 16))
    assert cache.free == []


def test_the_watermark_holds_for_a_preempted_request_too() -> None:
    """Misconception: "it was admitted before". It would push out those for whose sake it was preempted."""
    cache = Cache(usable=4, watermark=0.4)
    cache.start("A", numbers(1, 8))
    cache.decode("A", 9)
    cache.preempt("A")
    assert cache.resume("A") is None
    assert cache.resume("A", keep_watermark=False) == 8


# The rest


def test_a_request_adopts_a_hit_only_once() -> None:
    cache = Cache(usable=4)
    cache.start("A", numbers(1, 8))
    with pytest.raises(IntegrityError, match="request 'A' adopts a hit, but holds blocks already"):
        cache.resume("A")


def test_report_mode_full_announces_the_reused_prefix_at_each_lookup() -> None:
    cache = Cache(usable=10, enable_events=True)
    cache.start("A", numbers(1, 8))
    cache.manager.take_events()
    for _ in range(2):
        assert cache.hit(numbers(1, 9), report_full=True) == 8
    events = cache.manager.take_events()
    assert len(events) == 2 and events[0] == events[1]
    assert isinstance(events[0], BlockStored)
    assert events[0].block_hashes == tuple(cache.requests["A"].block_hashes)
    cache.hit(numbers(1, 9))
    assert cache.manager.take_events() == []


def test_resumed_requests_do_not_raise_the_hit_rate() -> None:
    stats = PrefixCacheStats()
    assert stats.hit_rate == 0.0
    stats.record(8, 4, resumed=False)
    stats.record(100, 96, resumed=True)
    assert stats.hit_rate == 0.5
    assert (stats.requests, stats.queries, stats.hits) == (1, 8, 4)
    assert (stats.resumed_requests, stats.resumed_queries, stats.resumed_hits) == (1, 100, 96)


def test_a_reset_forgets_the_statistics_too() -> None:
    cache = Cache(usable=4)
    cache.manager.stats.record(8, 4, resumed=False)
    cache.start("A", numbers(1, 8))
    assert not cache.manager.reset_prefix_cache() and cache.manager.stats.queries == 8
    cache.finish("A")
    assert cache.manager.reset_prefix_cache() and cache.manager.stats.queries == 0


def test_draft_heads_give_the_last_block_back() -> None:
    cache = Cache(usable=10, drop_last=True)
    cache.start("A", numbers(1, 12))
    assert cache.hit(numbers(1, 13)) == 8
    assert cache.hit(numbers(1, 5)) == 0


def test_groups_that_do_not_exist_yet_are_refused() -> None:
    full = GroupSpec(0, FULL_ATTENTION, 4)
    with pytest.raises(ConfigError, match="cache groups of kind 'holographic' are not supported yet"):
        KVCacheManager([GroupSpec(0, "holographic", 4)], 4, 100)
    pool = Cache(usable=4).pool
    with pytest.raises(ConfigError):
        make_coordinator([], pool)
    assert make_coordinator([full], pool).groups[0].block_size == 4


def test_a_table_that_the_counts_do_not_know_is_noticed() -> None:
    cache = Cache(usable=4)
    cache.start("A", numbers(1, 8))
    group = cache.manager.coordinator.groups[0]
    group.tables["ghost"] = list(group.table("A"))
    with pytest.raises(IntegrityError, match="block 1 counts 1 users, but stands in 2 tables"):
        cache.manager.check_integrity()
    cache = Cache(usable=4)
    cache.pool.free_queue.num_free_blocks = 3
    with pytest.raises(IntegrityError, match="counts 3 blocks"):
        cache.manager.check_integrity()
