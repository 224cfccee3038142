"""The block manager: admission, growing, swapping, and the blocks the worker may skip. Cases S14 and S15."""

from __future__ import annotations

import pytest

from refengine.v0.allocator import NoFreeBlocksError
from refengine.v0.block_manager import AllocStatus
from refengine.v0.device_allocator import Device
from refengine.v0.sequence import SequenceStatus
from tests.unit.helpers import numbers
from tests.unit.v0_helpers import Manager

OK, LATER, NEVER = AllocStatus.OK, AllocStatus.LATER, AllocStatus.NEVER

# Admission


def test_admission_asks_for_all_blocks_cached_or_not() -> None:
    """Misconception: "a hit makes room". V0 wants the whole prompt free, although it would take nothing of it."""
    manager = Manager(5)
    manager.start("A", numbers(1, 12))
    manager.add("B", numbers(1, 12))
    assert manager.look("B") == 12
    assert manager.can_start("B") is LATER
    manager.finish("A")
    assert manager.can_start("B") is OK


def test_the_watermark_stays_free_when_a_prompt_is_admitted() -> None:
    """Misconception: "whatever is free can be had". The watermark is for those who run already."""
    manager = Manager(10, watermark=0.2)
    manager.add("A", numbers(1, 36))
    assert manager.can_start("A") is NEVER
    manager.start("B", numbers(1, 16))
    manager.add("C", numbers(101, 120))
    assert (manager.num_free, manager.can_start("C")) == (6, LATER)
    manager.add("D", numbers(101, 116))
    assert manager.can_start("D") is OK


def test_the_watermark_is_not_for_those_who_run() -> None:
    manager = Manager(3, watermark=0.5)
    manager.start("A", numbers(1, 8))
    manager.decode("A", 9)
    assert manager.num_free == 0


def test_lookahead_slots_are_part_of_the_need() -> None:
    manager = Manager(3)
    manager.add("A", numbers(1, 10))
    assert (manager.can_start("A", 2), manager.can_start("A", 3)) == (OK, NEVER)


def longer_than_its_window(mode: str) -> Manager:
    """S15: 5 free blocks, a window of at most 4, and a prompt of 6."""
    manager = Manager(6, enable_caching=False, sliding_window=8, mode=mode)
    manager.start("A", [99])
    manager.add("W", numbers(1, 24))
    assert (manager.num_free, manager.manager.window_blocks) == (5, 4)
    return manager


def test_s15_admission_and_allocation_agree_under_a_window() -> None:
    """S15. Misconception: "a window needs only its own blocks". A prompt takes blocks for all of its tokens first."""
    assert longer_than_its_window("fixed").can_start("W") is LATER


def test_s15_vllm_admits_by_the_window_and_runs_out_of_blocks() -> None:
    manager = longer_than_its_window("faithful")
    assert manager.can_start("W") is OK
    with pytest.raises(NoFreeBlocksError):
        manager.admit("W")


def test_sequences_of_a_group_share_the_prompt() -> None:
    manager = Manager(8)
    group = manager.add("A", numbers(1, 6))
    group.seqs.append(manager.seqs["A"].fork(99))
    manager.manager.allocate(group)
    assert [manager.manager.block_ids(seq) for seq in group.seqs] == [[0, 1], [0, 1]]
    assert manager.counts(0, 1) == [2, 2]


# Growing


def test_a_group_is_asked_about_as_a_whole() -> None:
    manager = Manager(3)
    manager.start("P", numbers(1, 8))
    manager.fork("P", "Q")
    for name in ("P", "Q"):
        manager.seqs[name].token_ids.append(9)
    assert not manager.can_append("P")
    manager.seqs["Q"].status = SequenceStatus.FINISHED_STOPPED
    assert manager.can_append("P")


# What the worker may skip


def test_the_computed_head_is_common_to_all_sequences_of_a_group() -> None:
    manager = Manager(12)
    manager.start("A", numbers(1, 12))
    manager.begin("B", [*numbers(1, 8), *numbers(91, 99)])
    manager.begin("C", [*numbers(1, 4), *numbers(81, 89)])
    assert (manager.common("B"), manager.common("C")) == ([0, 1], [0])
    assert manager.common("B", "C") == [0]


def test_a_sequence_without_a_hit_does_not_count() -> None:
    """Behaviour 15: an empty answer is left out, so it does not empty the group's."""
    manager = Manager(12)
    manager.start("A", numbers(1, 8))
    manager.begin("B", numbers(1, 9))
    manager.begin("cold", numbers(71, 79))
    assert manager.common("B", "cold") == [0, 1]
    assert manager.common("cold") == []


def first_chunk(mode: str) -> Manager:
    """A has run 4 of its 12 tokens; B has the same prompt."""
    manager = Manager(12, mode=mode)
    manager.begin("A", numbers(1, 12))
    manager.run("A", 4)
    manager.begin("B", numbers(1, 13))
    return manager


def test_a_chunk_computes_its_own_blocks_only() -> None:
    """Misconception: "a prompt that has started is computed". Only its first chunk is."""
    manager = first_chunk("fixed")
    assert (manager.look("B"), manager.common("B")) == (4, [0])
    manager.run("A", 7)
    assert manager.hit(numbers(1, 13)) == 8, "the third block lacks a token"


def test_vllm_marks_a_whole_prompt_after_its_first_chunk() -> None:
    """The known defect that mode "faithful" keeps: B would skip 8 tokens that nobody has computed."""
    assert first_chunk("faithful").common("B") == [0, 1, 2]


def missing_head(mode: str) -> Manager:
    """bm_swap_breaks_prefix_order: block 0 is swapped out without a time, and evicted before block 1."""
    manager = Manager(3, 4, mode=mode)
    manager.start("A", numbers(1, 8))
    manager.finish("A")
    assert manager.start("B", numbers(1, 4)) == 4
    assert manager.swap_out("B") == [(0, 0)]
    assert manager.gpu.evictor.order() == [(0, -1.0, 4), (1, 1.0, 8)]
    manager.start("X", numbers(201, 208))
    assert sorted(manager.table("X")) == [0, 2]
    return manager


def test_a_prefix_without_its_head_is_no_hit() -> None:
    """Misconception: "a missing block is followed by missing ones only". A swapped-out head goes before its tail."""
    assert missing_head("fixed").hit(numbers(1, 9)) == 0


def test_vllm_bisects_and_reports_a_missing_head() -> None:
    """The known defect that mode "faithful" keeps. With two blocks the bisection looks at the second one first."""
    assert missing_head("faithful").hit(numbers(1, 9)) == 8


# Swapping


def test_swap_pairs_are_zero_based_on_each_device() -> None:
    """Misconception: "block ids are block ids". CPU blocks are numbered on, but the caches are two tensors."""
    manager = Manager(4, 4)
    manager.start("Z", [99])
    manager.start("A", numbers(1, 6))
    assert manager.table("A") == [1, 2]
    assert manager.swap_out("A") == [(1, 0), (2, 1)]
    assert manager.table("A") == [4, 5]
    assert manager.manager.allocator.cpu.num_free_blocks == 2
    assert manager.num_free == 3
    manager.start("X", numbers(201, 204))
    assert manager.table("X") == [2]
    assert manager.swap_in("A") == [(0, 1), (1, 3)]
    assert manager.table("A") == [1, 3]


def test_swapping_leaves_no_time_behind() -> None:
    """Misconception: "a swapped-out block was used just now". V0 stamps on free only; it is the first to be evicted."""
    manager = Manager(4, 4)
    manager.start("A", numbers(1, 4))
    manager.swap_out("A")
    assert manager.gpu.evictor.order() == [(0, -1.0, 4)]


def test_s14_swapping_in_takes_blocks_out_of_the_evictor() -> None:
    """S14. Misconception: "a cached block costs nothing". If it is free, it is one free block less."""
    manager = Manager(10, 10)
    manager.start("A", numbers(1, 40))
    manager.swap_out("A")
    manager.start("X", numbers(201, 208))
    blocks = manager.manager.tables[manager.seqs["A"].seq_id].blocks
    assert manager.num_free == 8
    assert manager.gpu.get_num_full_blocks_touched(blocks) == 10
    assert manager.manager.can_swap_in(manager.groups["A"]) is LATER
    manager.finish("X")
    assert manager.manager.can_swap_in(manager.groups["A"]) is OK


def test_swapping_in_shares_what_somebody_uses() -> None:
    manager = Manager(4, 4)
    manager.start("A", numbers(1, 8))
    manager.start("B", numbers(1, 8))
    manager.swap_out("B")
    blocks = manager.manager.tables[manager.seqs["B"].seq_id].blocks
    assert manager.gpu.get_num_full_blocks_touched(blocks) == 0
    assert manager.swap_in("B") == [(0, 0), (1, 1)]
    assert manager.counts(0, 1) == [2, 2]


def test_a_group_that_cannot_come_back_is_told_so() -> None:
    manager = Manager(2, 8)
    manager.start("A", numbers(1, 8))
    manager.swap_out("A")
    manager.seqs["A"].token_ids.append(9)
    assert manager.manager.can_swap_in(manager.groups["A"]) is NEVER


def free_swapped(mode: str) -> Manager:
    manager = Manager(4, 4, mode=mode)
    manager.start("A", numbers(1, 6))
    manager.swap_out("A")
    manager.finish("A")
    return manager


def test_a_swapped_out_sequence_can_be_freed() -> None:
    """Misconception: "blocks are on the GPU". Those of a swapped-out sequence are asked about where they are."""
    manager = free_swapped("fixed")
    assert (manager.num_free, manager.manager.allocator.cpu.num_free_blocks) == (4, 4)
    assert manager.manager.get_prefix_cache_hit_rate(Device.CPU) == 0.0


def test_vllm_asks_the_gpu_about_cpu_blocks() -> None:
    """The known defect that mode "faithful" keeps: aborting a swapped-out request ends the engine."""
    with pytest.raises(KeyError):
        free_swapped("faithful")


def empty_lookahead_block(mode: str) -> Manager:
    """4 blocks, the last one empty and for draft tokens; 3 blocks on the CPU."""
    manager = Manager(8, 3, mode=mode, enable_caching=False)
    manager.start("A", numbers(1, 12))
    manager.append("A", num_lookahead_slots=4)
    assert len(manager.table("A")) == 4
    return manager


def test_an_empty_block_has_to_be_swapped_too() -> None:
    """Misconception: "full ones and the one written into, that is all". An empty one needs a place as well."""
    manager = empty_lookahead_block("fixed")
    assert not manager.manager.can_swap_out(manager.groups["A"])


def test_vllm_overlooks_an_empty_block() -> None:
    """The known defect that mode "faithful" keeps: it says yes, and then there is no block."""
    manager = empty_lookahead_block("faithful")
    assert manager.manager.can_swap_out(manager.groups["A"])
    with pytest.raises(NoFreeBlocksError):
        manager.swap_out("A")


def test_a_snapshot_lists_what_is_free_in_the_order_in_which_it_goes() -> None:
    manager = Manager(5)
    manager.start("A", numbers(1, 8))
    manager.start("B", numbers(11, 14))
    manager.finish("A")
    pool = manager.manager.snapshot()
    assert (pool.free, pool.cached) == ([3, 4, 1, 0], [0, 1, 2])
    assert pool.tables == {str(manager.seqs["B"].seq_id): [[2]]}
