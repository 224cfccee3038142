"""The cache of V0: used, free, cached, computed. Cases S03, S09, S12, S13, S22, S23 of the shared set."""

from __future__ import annotations

import pytest

from refengine.errors import IntegrityError
from refengine.hashing import Adapter
from refengine.v0.allocator import NoFreeBlocksError
from refengine.v0.evictor import NEVER_ACCESSED
from tests.unit.helpers import numbers
from tests.unit.v0_helpers import Manager


def cached(gpu: int, *prompts: list[int]) -> Manager:
    """A manager in which these prompts have come and gone, one after another."""
    manager = Manager(gpu)
    for i, tokens in enumerate(prompts):
        manager.start(f"old {i}", tokens)
        manager.finish(f"old {i}")
    return manager


# Found again


def test_blocks_are_found_after_their_last_user_left() -> None:
    manager = cached(6, numbers(1, 9))
    assert (manager.evictable, manager.free) == ([1, 0], [2, 3, 4, 5])
    assert manager.start("B", [*numbers(1, 8), 99]) == 8
    assert manager.table("B") == [0, 1, 2]


def test_a_hit_in_the_evictor_is_no_longer_free() -> None:
    """Misconception: "a hit stays where it is". It could be handed out while somebody reads it."""
    manager = cached(2, numbers(1, 8))
    manager.start("B", numbers(1, 8))
    assert (manager.evictable, manager.num_free) == ([], 0)
    with pytest.raises(NoFreeBlocksError):
        manager.begin("C", [99])


def test_each_user_of_a_cached_block_counts() -> None:
    """Misconception: "a hit is only read, so it needs no count". Whoever ends first would give it away."""
    manager = Manager(6)
    manager.start("A", numbers(1, 8))
    manager.start("B", [*numbers(1, 8), 99])
    assert manager.counts(0, 1, 2) == [2, 2, 1]
    manager.finish("A")
    assert manager.counts(0, 1) == [1, 1]
    assert manager.evictable == []


def test_s23_an_adapter_separates_the_hits() -> None:
    """S23. Misconception: "equal tokens, equal K/V". Not with another adapter."""
    manager = Manager(12)
    poet = Adapter("poet", "/poet")
    manager.start("A", numbers(1, 8), poet)
    tokens = numbers(1, 9)
    assert (manager.hit(tokens), manager.hit(tokens, Adapter("poet", "/elsewhere"))) == (0, 0)
    assert manager.hit(tokens, poet) == 8
    manager.start("B", tokens)
    assert manager.table("B") == [2, 3, 4]


def test_lookups_are_counted_by_allocations_not_by_questions() -> None:
    manager = cached(6, numbers(1, 8))
    assert manager.hit(numbers(1, 8)) == 8
    assert (manager.gpu.queries, manager.gpu.hits, manager.gpu.hit_rate) == (2, 0, 0.0)
    manager.start("B", [*numbers(1, 4), *numbers(95, 98)])
    assert (manager.gpu.queries, manager.gpu.hits, manager.gpu.hit_rate) == (4, 1, 0.25)


# Computed


def test_s13_computed_is_a_property_of_time() -> None:
    """S13 and S06. Misconception: "cached is computed". Two sequences of one batch share blocks nobody has filled."""
    manager = Manager(6)
    assert manager.begin("S1", numbers(1, 9)) == 0
    assert manager.begin("S2", [*numbers(1, 8), 99]) == 0
    assert (manager.table("S1"), manager.table("S2")) == ([0, 1, 2], [0, 1, 3])
    assert manager.common("S1", "S2") == []
    assert manager.hit(numbers(1, 9)) == 0
    manager.run("S1")
    manager.run("S2")
    assert manager.hit(numbers(1, 9)) == 8


def test_s13_a_block_won_by_eviction_has_not_computed_its_new_content() -> None:
    """S13. Misconception: "a computed block is computed". It was, with other tokens."""
    manager = Manager(6)
    manager.start("S1", numbers(1, 9))
    manager.start("S2", [*numbers(1, 8), 99])
    manager.finish("S1")
    manager.finish("S2")
    manager.begin("new", numbers(201, 224))
    assert sorted(manager.table("new")) == numbers(0, 5)
    assert manager.hit(numbers(201, 224)) == 0
    assert manager.hit(numbers(1, 9)) == 0


def test_a_block_that_is_marked_stays_computed() -> None:
    """Misconception: "a mark is for one step". The block keeps its content until it is taken for another."""
    manager = cached(4, numbers(1, 8))
    assert manager.hit(numbers(1, 9)) == 8
    manager.start("B", numbers(1, 8))
    assert manager.hit(numbers(1, 9)) == 8
    manager.finish("B")
    assert manager.hit(numbers(1, 9)) == 8


def test_a_decode_that_fills_a_block_publishes_it() -> None:
    """Misconception: "only prompts are cached"."""
    manager = Manager(4)
    manager.start("A", numbers(1, 7))
    manager.append("A", 8)
    assert manager.hit(numbers(1, 9)) == 4
    manager.run("A", 1)
    assert manager.hit(numbers(1, 9)) == 8


def test_s12_the_id_changes_under_a_sequence_that_fills_a_known_block() -> None:
    """S12. Misconception: "a table only grows". V0 moves over to the block that is known; V1 keeps both."""
    manager = Manager(4)
    manager.start("P", numbers(1, 4))
    manager.start("Q", [1])
    manager.decode("Q", 2, 3)
    assert manager.table("Q") == [1]
    manager.decode("Q", 4)
    assert manager.table("Q") == [0]
    assert manager.counts(0, 1) == [2, 0]
    assert manager.free == [1, 2, 3]


# Taken again


def test_s09_the_tail_of_a_prefix_is_evicted_first() -> None:
    """S09. Misconception: "blocks of one request are equally good victims". Without its head a tail is worthless."""
    manager = cached(3, numbers(1, 12))
    manager.begin("X", [101, 102, 103])
    assert manager.table("X") == [2]
    assert manager.hit(numbers(1, 13)) == 8


def test_a_worthless_block_is_taken_before_any_cached_one() -> None:
    """Misconception: "the oldest free block goes first". What nobody can find goes before what somebody may want."""
    manager = Manager(4)
    manager.start("A", numbers(1, 8))
    manager.start("B", [51])
    manager.finish("A")
    manager.finish("B")
    assert (manager.free, manager.evictable) == ([2, 3], [1, 0])
    manager.begin("C", numbers(201, 208))
    assert manager.table("C") == [2, 3]
    assert manager.hit(numbers(1, 9)) == 8


def test_s03_an_evicted_block_forgets_its_name() -> None:
    """S03. Misconception: "the index corrects itself". It would lead to a block with other content."""
    manager = cached(2, numbers(1, 8))
    manager.start("X", numbers(201, 205))
    assert manager.hit(numbers(1, 9)) == 0
    assert sorted(manager.gpu.cached.values()) == [1]


def test_the_request_that_ran_last_is_evicted_last() -> None:
    """Misconception: "whoever left first goes first". It is the last use that counts."""
    manager = Manager(3)
    manager.start("A", numbers(1, 4))
    manager.start("B", numbers(11, 14))
    manager.decode("A", 5)
    manager.finish("A")
    manager.finish("B")
    assert manager.evictable == [1, 0]


def test_blocks_learn_of_their_last_use_only_when_they_are_freed() -> None:
    """Misconception: "each step stamps its blocks". V0 notes the time by sequence, and stamps at the end."""
    manager = Manager(4)
    manager.start("A", numbers(1, 8))
    assert [manager.gpu.trackers[i].last_accessed for i in (0, 1)] == [NEVER_ACCESSED] * 2
    manager.finish("A")
    assert manager.gpu.evictor.order() == [(1, 1.0, 8), (0, 1.0, 4)]


def test_s22_a_reset_waits_for_the_last_user() -> None:
    """S22. Misconception: "a reset frees everything". Somebody reads these blocks."""
    manager = Manager(4)
    manager.start("A", numbers(1, 8))
    assert not manager.manager.reset_prefix_cache()
    assert manager.hit(numbers(1, 9)) == 8
    manager.finish("A")
    assert manager.manager.reset_prefix_cache()
    assert (manager.hit(numbers(1, 9)), manager.num_free, manager.gpu.queries) == (0, 4, 0)


# Books


def test_a_block_in_two_places_is_noticed() -> None:
    manager = Manager(4)
    manager.start("A", numbers(1, 4))
    manager.gpu.free_ids.append(0)
    with pytest.raises(IntegrityError, match="block 0: used, listed, evictable"):
        manager.gpu.check_integrity()


def test_a_tracker_without_a_user_is_noticed() -> None:
    manager = Manager(4)
    manager.start("A", numbers(1, 4))
    del manager.gpu.trackers[0]
    with pytest.raises(IntegrityError, match="block 0 has 1 users, tracked: False"):
        manager.gpu.check_integrity()


def test_two_names_for_one_block_are_noticed() -> None:
    manager = Manager(4)
    manager.start("A", numbers(1, 4))
    manager.gpu.cached[7] = 0
    with pytest.raises(IntegrityError, match="two hashes lead to one block"):
        manager.gpu.check_integrity()


def test_a_time_for_a_block_of_nobody_is_refused() -> None:
    manager = Manager(4)
    with pytest.raises(KeyError, match="block 3 is neither used nor cached here"):
        manager.gpu.mark_blocks_as_accessed([3], 1.0)
