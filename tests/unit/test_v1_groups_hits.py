"""What several groups agree on: the common hit, the shared-prefix boundary, what is worth keeping. Cases S29, S31."""

from __future__ import annotations

from typing import Any

import pytest

from refengine.config import EngineConfig
from refengine.errors import ConfigError
from refengine.sampling import SamplingParams
from refengine.v1.explain_hit import HitReport, explain_hit
from refengine.v1.kv_cache_manager import KVCacheManager
from refengine.v1.request import Request
from tests.unit.group_cache import GroupCache, chunked, full, mamba, specs, window
from tests.unit.helpers import numbers

A = numbers(1, 12)

# One common hit


def test_s29_every_group_is_cut_to_the_common_hit() -> None:
    """S29. Misconceptions: "the hit is what full attention finds" and "only the first group has to be cut"."""
    cache = GroupCache(full(2), window(2, 4), usable=30)
    cache.start("A", A)
    assert cache.tables("A") == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]]
    cache.finish("A")
    longer = [*A, 100]
    assert cache.look(longer) == ([[1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 11, 12]], 12, 0)
    cache.evict(12)
    assert cache.look(longer) == ([[1, 2, 3, 4, 5], [0, 0, 0, 10, 11]], 10, 12)
    cache.evict(3)
    assert cache.look(longer)[:2] == ([[1, 2], [7, 8]], 4)


def test_all_full_groups_are_cut() -> None:
    """Misconception: "cutting the first full-attention group is enough"."""
    cache = GroupCache(full(2), full(4), window(4, 5), usable=30)
    cache.start("A", A)
    assert cache.tables("A") == [[1, 2, 3, 4, 5, 6], [7, 8, 9], [10, 11, 12]]
    cache.finish("A")
    cache.evict(12)
    assert cache.look([*A, 100]) == ([[1, 2, 3, 4], [7, 8], [0, 11]], 8, 12)


def test_two_windows_go_around_until_both_agree() -> None:
    """Misconception: "asking each group once is enough". The second makes it shorter, and now the first cannot."""
    cache = GroupCache(window(2, 6), window(2, 3), usable=30)
    cache.start("A", A)
    assert cache.tables("A") == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]]
    # The first can serve 12 tokens and then only 4, as three blocks are needed or all; the second all but 12.
    cache.evict(3, 12)
    assert cache.look([*A, 100]) == ([[1, 2], [0, 8]], 4, 12)


def test_the_order_of_the_groups_does_not_matter() -> None:
    """Misconception: "full attention is group 0"."""
    cache = GroupCache(window(2, 4), full(2), usable=30)
    cache.start("A", A)
    cache.finish("A")
    cache.evict(6)
    assert cache.look([*A, 100]) == ([[0, 0, 0, 4, 5], [7, 8, 9, 10, 11]], 10, 12)


def test_groups_of_one_shape_answer_together() -> None:
    """Misconception: "the boundary is the best that any group has". Two equal windows are asked as one."""
    cache = GroupCache(window(2, 4), window(2, 4), usable=30)
    cache.start("A", A)
    cache.finish("A")
    cache.evict(12)
    assert cache.look([*A, 100]) == ([[0, 0, 0, 4, 5], [0, 0, 0, 10, 11]], 10, 0)


def test_hits_are_multiples_of_the_largest_block() -> None:
    """Misconception: "a hit is a multiple of the smallest block". It would end inside a block of the other group."""
    cache = GroupCache(full(2), window(6, 4), usable=30)
    cache.start("A", numbers(1, 18))
    cache.finish("A")
    assert [cache.look(numbers(1, n))[1] for n in (6, 7, 12, 13, 17, 19)] == [0, 6, 6, 12, 12, 18]
    windows = GroupCache(window(2, 7), window(6, 7), usable=30)
    windows.start("A", numbers(1, 18))
    assert windows.look(numbers(1, 17))[1:] == (12, 0), (
        "and nobody offers the 16 tokens that the first one has"
    )


def test_a_draft_head_costs_one_block_once() -> None:
    """Misconception: "each group gives a block back, so a hit loses one per group". Trace rand_eagle_hybrid."""
    cache = GroupCache(full(2), window(2, 4), usable=30, drop_last=True)
    cache.start("A", A)
    cache.finish("A")
    assert cache.look([*A, 100]) == ([[1, 2, 3, 4, 5], [0, 0, 0, 10, 11]], 10, 0)


def test_one_groups_blocks_do_not_come_from_anothers_hit() -> None:
    """Misconception: "adopt and allocate group by group". The second group's hit still stands in the free queue."""
    cache = GroupCache(full(2), window(2, 64), usable=8)
    cache.start("A", numbers(1, 6))
    cache.finish("A")
    cache.start("C", [100, 101])
    cache.finish("C")
    assert cache.free == [3, 2, 1, 6, 5, 4, 7, 8]
    assert cache.start("B", [*numbers(1, 6), 110]) == 6
    assert cache.tables("B") == [[1, 2, 3, 7], [4, 5, 6, 8]]


def test_one_look_over_all_groups_decides() -> None:
    """Misconception: "each group sees for itself whether it fits". Each needs one block, and one is free."""
    cache = GroupCache(full(2), window(2, 64), usable=7)
    cache.start("A", numbers(1, 6))
    assert cache.free == [7]
    assert cache.manager.coordinator.get_num_blocks_to_allocate("B", 1, ([], [])) == 2
    assert cache.start("B", [100]) is None
    assert cache.tables("B") == [[], []] and cache.free == [7]


# The shared-prefix boundary


def junction(*groups: dict[str, Any], chunks: tuple[tuple[int, ...], ...]) -> list[tuple[int, int]]:
    """Three prompts that share 16 of 25 tokens, retention 0. Returns: hit and boundary of each."""
    cache = GroupCache(*groups, usable=60, retention_interval=0)
    found = []
    for name, base, pieces in zip("abc", (100, 200, 300), chunks, strict=True):
        tokens = [*numbers(1, 16), *numbers(base, base + 8)]
        found.append(cache.look(tokens)[1:])
        cache.begin(name, tokens, *pieces)
        cache.finish(name)
    return found


def test_a_shared_prefix_of_a_window_is_hit_from_the_third_request_on() -> None:
    """Surprise 13. Misconception: "what two prompts share is cached". Trace script_hybrid_junction."""
    assert junction(full(4), window(4, 8), chunks=((25,), (25,), (9,))) == [(0, 0), (0, 16), (16, 0)]


def test_a_shared_prefix_of_a_state_is_hit_from_the_third_request_on() -> None:
    """Surprise 13. Misconception: "a state can be computed back". Trace script_mamba_junction."""
    chunks = ((24, 1), (16, 8, 1), (8, 1))
    assert junction(full(4), mamba(4), chunks=chunks) == [(0, 0), (0, 16), (16, 0)]


def test_the_boundary_is_the_longest_prefix_that_somebody_has() -> None:
    """Misconception: "the boundary is where the lagging group stops"."""
    cache = GroupCache(full(2), mamba(2), usable=40)
    cache.begin("A", numbers(1, 13), 4, 8, 1)
    cache.finish("A")
    assert cache.look([*numbers(1, 10), 100])[1:] == (4, 10)


def test_a_boundary_is_remembered_without_a_hit() -> None:
    """Misconception: "no hit, nothing to remember". It is the second request that pins the state for the third."""
    cache = GroupCache(full(4), mamba(4), usable=40, retention_interval=0)
    cache.begin("A", numbers(1, 17), 16, 1)
    request = cache.add("B", [*numbers(1, 8), *numbers(100, 108)])
    hits, hit, boundary = cache.manager.get_computed_blocks(request)
    assert (hit, boundary) == (0, 8)
    cache.manager.allocate_slots(request, 8, hits, hit, shared_prefix_boundary=boundary)
    assert request.shared_prefix_boundary == 8


# What is worth keeping


@pytest.mark.parametrize(
    ("interval", "expected"),
    [(None, [24, 28, 28, 32, 32, 36, 36]), (0, [0, 0, 0, 0, 0, 36, 36])],
    ids=["dense", "replay tail only"],
)
def test_s31_sparse_retention_and_an_edit_near_the_end(interval: int | None, expected: list[int]) -> None:
    """S31. Misconception: "an edit at the end loses only the end"."""
    cache = GroupCache(full(4), window(2, 8), usable=200, retention_interval=interval)
    cache.start("A", numbers(1, 37))
    cache.finish("A")
    shared = (24, 28, 30, 32, 34, 36, 37)
    assert [cache.look([*numbers(1, d), *numbers(100, 111)])[1] for d in shared] == expected


def test_retention_zero_keeps_only_what_the_same_prompt_needs() -> None:
    """Surprise 14. Misconception: "a shorter prompt is a prefix, so it hits". Trace script_swa_retention_zero."""
    cache = GroupCache(window(2, 5), usable=23, retention_interval=0)
    cache.start("A", numbers(1, 15))
    assert cache.hashed == [6, 7], "the two blocks before the last token: 5 - 1 tokens of the window"
    cache.finish("A")
    found = [cache.look(numbers(1, n))[1] for n in (15, 9, 16)]
    assert found == [14, 0, 14]


def test_s31_sparse_retention_keeps_the_whole_tail() -> None:
    """S31. Misconception: "a hit needs the block before it". A window of 8 needs 7 tokens, which are 4 blocks of 2."""
    cache = GroupCache(full(4), window(2, 8), usable=200, retention_interval=0)
    cache.start("A", numbers(1, 37))
    assert [i for i, block in enumerate(cache.tables("A")[1]) if block in cache.hashed] == [14, 15, 16, 17]
    assert cache.look(numbers(1, 37))[1] == 36


def test_an_interval_keeps_a_tail_once_per_segment() -> None:
    """Misconception: "every block of a window group is worth its hash". Trace rand_hybrid_retention8."""
    cache = GroupCache(window(2, 3), usable=30, retention_interval=8)
    cache.start("A", numbers(1, 20))
    assert cache.hashed == [4, 8, 9], "the ends at 8, at 16, and before the last token"
    states = GroupCache(mamba(2), usable=30, retention_interval=8)
    states.begin("A", numbers(1, 20), *([2] * 10))
    assert len(states.hashed) == 3


def test_what_nobody_can_hit_returns_to_the_front() -> None:
    """Misconception: "a full block is a cached block". Unpublished ones are handed out before any cached one."""
    cache = GroupCache(window(2, 5), usable=23, retention_interval=0)
    cache.start("A", numbers(1, 15))
    cache.finish("A")
    assert cache.free == [8, 5, 4, 3, 2, 1, *range(9, 24), 7, 6]


def test_the_default_is_vllms() -> None:
    """Surprise 13. Misconception: "the cache keeps what it can unless told otherwise"."""
    assert EngineConfig().prefix_cache_retention_interval == 0


@pytest.mark.parametrize(
    ("groups", "options", "message"),
    [
        ([full(2), window(2, 0)], {}, "needs a window of at least 1"),
        ([{"kind": "chunked_local_attention", "block_size": 2}], {}, "needs a chunk"),
        ([full(4), chunked(2, 8)], {}, "blocks of one size"),
        ([chunked(4, 8)], {"drop_last": True}, "no draft head"),
        ([full(2), mamba(4)], {}, "inside a block"),
        ([full(2)], {"retention_interval": 8}, "sliding-window or Mamba"),
        ([full(2), window(4, 8)], {"retention_interval": 6}, "alignment of 4"),
    ],
)
def test_what_cannot_be_is_refused(
    groups: list[dict[str, Any]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        KVCacheManager(specs(groups), 20, 100, **options)


# Why is my hit 0?


def explained(cache: GroupCache, tokens: list[int], **options: Any) -> HitReport:
    return explain_hit(
        cache.manager, Request("looks", tokens, SamplingParams(), hasher=cache.hasher, **options)
    )


def test_a_lookup_is_taken_apart() -> None:
    cache = GroupCache(full(2), mamba(2), usable=40)
    cache.begin("A", numbers(1, 13), 6, 6, 1)
    report = explained(cache, [*numbers(1, 10), 100, 101])
    assert (report.hit, report.boundary, report.alignment, report.wanted) == (6, 10, 2, 10)
    assert [group.alone for group in report.groups] == [10, 6]
    assert [group.missing for group in report.groups] == [(), (4,)]
    assert str(report).splitlines() == [
        "12 tokens, at most 11 from the cache; a hash per 2 tokens, hits in multiples of 2",
        "group 0 full_attention, blocks of 2: alone 10",
        "    all that 10 tokens need is there",
        "group 1 mamba, blocks of 2: alone 6",
        "    no state after 10 tokens",
        "common hit 6, shared-prefix boundary 10",
    ]


def test_each_kind_says_what_it_misses() -> None:
    cache = GroupCache(full(4), window(2, 8), usable=60)
    cache.start("A", numbers(1, 17))
    cache.evict(2, *cache.tables("A")[1][6:8])
    full_group, window_group = explained(cache, numbers(1, 17)).groups
    assert full_group.reason == "block 1 (tokens 4 to 7) is the first that is not there"
    assert window_group.alone == 12
    assert window_group.reason == "all that 12 tokens need is there"
    cache.evict(cache.tables("A")[1][5])
    cache.evict(1)
    nothing = explained(cache, numbers(1, 17))
    assert nothing.hit == 0
    assert nothing.wanted == 8, "the window alone"
    assert explained(cache, numbers(1, 3)).groups[0].reason == "fewer tokens than the 4 that a hit comes in"


def test_a_window_names_the_blocks_it_needs() -> None:
    cache = GroupCache(full(2), window(2, 6), usable=60)
    cache.start("A", A)
    cache.evict(11)
    report = explained(cache, [*A, 100])
    assert report.groups[1].reason == "12 tokens need blocks 3 to 5, and block 4 (tokens 8 to 9) is not there"


def test_a_lookup_that_does_not_take_place_says_why() -> None:
    cache = GroupCache(full(2), usable=10)
    cache.start("A", A)
    assert "does not read the cache" in str(explained(cache, A, skip_reading_prefix_cache=True))
    off = GroupCache(full(2), usable=10, enable_caching=False)
    assert explained(off, A).note == "prefix caching is off"
    assert explained(off, A).hit == 0
