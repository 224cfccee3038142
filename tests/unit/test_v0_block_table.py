"""The block table: growing, what growing may cost, and what falls behind a sliding window. Case S02."""

from __future__ import annotations

import pytest

from refengine.v0.block_table import BlockTable
from refengine.v0.device_allocator import CpuGpuBlockAllocator
from tests.unit.helpers import numbers
from tests.unit.v0_helpers import Manager


def make(tokens: list[int], gpu: int = 8, **options: int) -> BlockTable:
    allocator = CpuGpuBlockAllocator(gpu, 0, 4, enable_caching=False, faithful=False)
    table = BlockTable(4, allocator, **options)
    table.allocate(tokens)
    return table


def test_a_prompt_takes_whole_blocks_and_one_for_the_rest() -> None:
    table = make(numbers(1, 9))
    assert table.block_ids == [0, 1, 2]
    assert [block.token_ids for block in table.blocks] == [numbers(1, 4), numbers(5, 8), [9]]
    assert table.num_full_slots == 9


def test_tokens_fill_the_last_block_before_a_new_one() -> None:
    table = make(numbers(1, 6))
    table.append([7], 0, 6)
    assert table.block_ids == [0, 1]
    table.append(numbers(8, 13), 0, 7)
    assert table.block_ids == [0, 1, 2, 3]
    assert [block.token_ids for block in table.blocks[1:]] == [numbers(5, 8), numbers(9, 12), [13]]


def test_unseen_tokens_are_those_that_have_no_slot_yet() -> None:
    table = make(numbers(1, 6))
    assert table.unseen(numbers(1, 9)) == [7, 8, 9]
    assert table.unseen(numbers(1, 6)) == []


def test_lookahead_slots_are_there_but_empty() -> None:
    table = make(numbers(1, 4))
    table.append([], 6, 4)
    assert [len(block.token_ids) for block in table.blocks] == [4, 0, 0]
    table.append([5], 0, 5)
    assert [len(block.token_ids) for block in table.blocks] == [4, 1, 0]


@pytest.mark.parametrize(
    ("num_held", "num_new", "touched", "needed"),
    [
        (8, 1, 1, 1),
        (9, 1, 1, 0),
        (11, 1, 1, 0),
        (11, 2, 2, 1),
        (12, 1, 1, 1),
        (8, 5, 2, 2),
        (8, 0, 0, 0),
        (9, 0, 1, 0),
    ],
)
def test_s02_touched_is_not_needed(num_held: int, num_new: int, touched: int, needed: int) -> None:
    """S02: a block is needed iff the token before filled one. V0 asks for every block that is written into."""
    table = make(numbers(1, num_held))
    assert table.num_blocks_touched_by_append(num_new) == touched
    assert table.num_blocks_touched_by_append(num_new, exact=True) == needed


def test_a_half_full_block_counts_as_if_it_had_to_be_taken() -> None:
    """Misconception: "V0 asks for the blocks it needs". With none free it preempts, though none is needed."""
    manager = Manager(2)
    manager.start("A", numbers(1, 6))
    assert manager.num_free == 0
    manager.seqs["A"].token_ids.append(7)
    assert not manager.can_append("A")
    assert manager.append("A") == []
    assert manager.table("A") == [0, 1]


def test_a_fork_holds_the_same_tokens_in_blocks_of_its_own() -> None:
    table = make(numbers(1, 6))
    fork = table.fork()
    assert (fork.block_ids, fork.num_full_slots) == (table.block_ids, 6)
    assert not set(map(id, fork.blocks)) & set(map(id, table.blocks))
    fork.append([7], 0, 6)
    assert table.blocks[-1].token_ids == [5, 6]


def test_a_freed_table_is_empty() -> None:
    table = make(numbers(1, 6))
    table.free()
    assert (table.block_ids, table.allocator.gpu.num_free_blocks) == ([], 8)
    table.free()
    assert table.allocator.gpu.num_free_blocks == 8


def test_blocks_behind_the_window_become_the_null_block() -> None:
    """Misconception: "a window needs a shorter table". Places stay, so that positions stay; the memory goes."""
    table = make(numbers(1, 16), window_blocks=2)
    table.append([17], 0, 16)
    null = table.allocator.null_block.block_id
    assert null == 4
    assert table.block_ids[:2] == [null, null]
    assert table.block_ids[2:4] == [2, 3]
    table.append(numbers(18, 21), 0, 20)
    assert table.block_ids[:3] == [null] * 3
    gpu = table.allocator.gpu
    gpu.check_integrity()
    table.free()
    assert gpu.num_free_blocks == 7, "the null block is never freed"
