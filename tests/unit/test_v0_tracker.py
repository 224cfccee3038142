"""What the block manager remembers: the cached count of a sequence, and when it ran. The first is a known trap."""

from __future__ import annotations

import pytest

from refengine.hashing import Adapter
from refengine.v0.block import content_hash
from refengine.v0.sequence import Sequence
from tests.unit.helpers import numbers
from tests.unit.v0_helpers import Manager


def evicted_while_waiting(mode: str) -> Manager:
    """W is looked up while [1..8] is cached; then X takes all blocks, and goes."""
    manager = Manager(4, mode=mode)
    manager.start("A", numbers(1, 8))
    manager.finish("A")
    manager.add("W", numbers(1, 9))
    assert manager.look("W") == 8
    manager.start("X", numbers(201, 216))
    manager.finish("X")
    return manager


def test_a_waiting_sequence_is_looked_up_again() -> None:
    """Misconception: "a sequence is looked up once". What it found may be evicted while it waits."""
    manager = evicted_while_waiting("fixed")
    assert manager.look("W") == 0
    manager.admit("W")
    assert manager.common("W") == []


def test_vllm_keeps_the_first_answer() -> None:
    """The known defect that mode "faithful" keeps: blocks taken this very moment are reported as computed."""
    manager = evicted_while_waiting("faithful")
    assert manager.hit(numbers(1, 9)) == 0
    assert manager.look("W") == 8
    manager.admit("W")
    assert manager.common("W") == manager.table("W")[:2]


def test_a_prompt_may_also_find_more_while_it_waits() -> None:
    """Misconception: "waiting can only lose a hit". Whoever computes the same prefix meanwhile gives it one."""
    manager = Manager(8)
    manager.add("W", numbers(1, 9))
    assert manager.look("W") == 0
    manager.start("A", numbers(1, 8))
    assert manager.look("W") == 8


@pytest.mark.parametrize("mode", ["fixed", "faithful"])
def test_a_prompt_does_not_find_its_own_blocks(mode: str) -> None:
    manager = Manager(8, mode=mode)
    manager.start("A", numbers(1, 4))
    assert manager.begin("B", numbers(1, 12)) == 4
    manager.run("B", 8)
    assert (manager.look("B"), manager.common("B")) == (4, [0])


def test_own_blocks_are_no_hit_while_a_prompt_is_computed() -> None:
    """Misconception: "ask again at every chunk". After the first one a prompt finds what it has just computed."""
    manager = Manager(8)
    assert manager.begin("A", numbers(1, 12)) == 0
    manager.run("A", 8)
    assert manager.hit(numbers(1, 12)) == 8
    assert manager.look("A") == 0


def test_a_decoding_sequence_is_asked_again_and_finds_itself() -> None:
    """Behaviour 17: `computed_block_nums` is sent in decode as well, and ignored there."""
    manager = Manager(8)
    manager.start("A", numbers(1, 9))
    assert manager.look("A") == 8
    assert manager.common("A") == [0, 1]


def test_preempted_means_looked_up_anew() -> None:
    manager = Manager(8)
    manager.start("A", numbers(1, 9))
    manager.manager.free(manager.seqs["A"])
    manager.seqs["A"].reset_for_recompute()
    assert manager.look("A") == 8


def test_hashes_are_those_of_the_blocks() -> None:
    """The tracker hashes tokens, the allocator hashes blocks; a lookup works because both say the same."""
    manager, adapter = Manager(8), Adapter("poet", "/poet")
    manager.start("A", numbers(1, 11), adapter)
    seq = manager.seqs["A"]
    tables = [block.content_hash for block in manager.manager.tables[seq.seq_id].blocks[:2]]
    first = content_hash(None, numbers(1, 4), adapter)
    assert (
        manager.manager.computed.hashes(seq) == tables == [first, content_hash(first, numbers(5, 8), adapter)]
    )
    manager.append("A", 12)
    assert len(manager.manager.computed.hashes(seq)) == 3


def test_without_a_cache_nothing_is_ever_computed() -> None:
    manager = Manager(8, enable_caching=False)
    manager.start("A", numbers(1, 8))
    manager.finish("A")
    assert manager.start("B", numbers(1, 8)) == 0
    assert manager.common("B") == []
    assert manager.manager.get_cached_block_ids(manager.seqs["B"], 8) == []


def free_unqueried(mode: str) -> Manager:
    """A sequence that got blocks without a question before is freed."""
    manager = Manager(8, mode=mode)
    manager.manager.allocate(manager.add("A", numbers(1, 8)))
    manager.finish("A")
    return manager


def test_a_sequence_that_was_never_looked_up_can_be_freed() -> None:
    assert free_unqueried("fixed").num_free == 8


def test_vllm_cannot_free_a_sequence_that_was_never_looked_up() -> None:
    with pytest.raises(AssertionError, match="was never looked up"):
        free_unqueried("faithful")


def test_a_sequence_that_is_gone_is_forgotten() -> None:
    """Whatever is kept by sequence id grows for ever otherwise."""
    for caching in (True, False):
        manager = Manager(8, enable_caching=caching)
        manager.start("A", numbers(1, 8))
        manager.finish("A")
        left = manager.manager
        assert (left.tables, left.computed._hashes, left.computed._num_cached_tokens) == ({}, {}, {})
        assert left.accessed._times == {}, f"caching {caching}"


def test_a_sequence_that_never_got_a_block_is_forgotten_too() -> None:
    manager = Manager(8)
    manager.add("A", numbers(1, 8))
    manager.look("A")
    manager.finish("A")
    assert (manager.manager.computed._hashes, manager.manager.computed._num_cached_tokens) == ({}, {})


def test_a_fresh_id_is_a_fresh_question() -> None:
    manager = Manager(8)
    manager.start("A", numbers(1, 8))
    assert manager.manager.get_num_cached_tokens(Sequence(77, numbers(1, 8))) == 8
    assert manager.manager.get_num_cached_tokens(Sequence(78, numbers(2, 9))) == 0
