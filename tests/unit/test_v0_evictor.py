"""The evictor: who goes first when the free list is empty. Case S09 is in test_v0_prefix_caching."""

from __future__ import annotations

import pytest

from refengine.v0.evictor import NEVER_ACCESSED, LRUEvictor


def make(*entries: tuple[int, int, float]) -> LRUEvictor:
    """From (block id, tokens up to its end, time of its last use). The hash is the id and a thousand."""
    evictor = LRUEvictor()
    for block_id, num_tokens, time in entries:
        evictor.add(block_id, 1000 + block_id, num_tokens, time)
    return evictor


def drain(evictor: LRUEvictor) -> list[int]:
    return [evictor.evict()[0] for _ in range(len(evictor))]


def test_the_least_recently_used_goes_first() -> None:
    evictor = make((0, 4, 3.0), (1, 4, 1.0), (2, 4, 2.0))
    assert evictor.order() == [(1, 1.0, 4), (2, 2.0, 4), (0, 3.0, 4)]
    assert evictor.evict() == (1, 1001)
    assert drain(evictor) == [2, 0]


def test_of_equal_times_the_longest_prefix_goes_first_then_the_smallest_id() -> None:
    evictor = make((2, 4, 1.0), (0, 8, 1.0), (1, 12, 1.0), (5, 8, 1.0))
    assert [block_id for block_id, _, _ in evictor.order()] == [1, 0, 5, 2]
    assert drain(evictor) == [1, 0, 5, 2]


def test_a_block_that_was_never_used_goes_before_all_others() -> None:
    assert drain(make((0, 4, 0.0), (1, 4, NEVER_ACCESSED))) == [1, 0]


def test_a_later_use_counts() -> None:
    """Misconception: "the place in the order is fixed on entry". The old entry in the heap is stale."""
    evictor = make((0, 4, 1.0), (1, 4, 2.0))
    evictor.update(0, 3.0)
    assert drain(evictor) == [1, 0]


def test_a_block_that_left_and_came_back_has_its_new_place() -> None:
    evictor = make((0, 4, 1.0), (1, 4, 2.0))
    evictor.remove(0)
    assert 0 not in evictor and len(evictor) == 1
    evictor.add(0, 7, 4, 5.0)
    assert evictor.evict() == (1, 1001)
    assert evictor.evict() == (0, 7)


def test_what_is_not_there_cannot_leave() -> None:
    evictor = make()
    with pytest.raises(ValueError, match="block 3 is not in the evictor"):
        evictor.remove(3)
    with pytest.raises(ValueError, match="no block to evict"):
        evictor.evict()
