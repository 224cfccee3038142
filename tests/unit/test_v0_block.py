"""Blocks without a cache: what a block is called, the free list, sharing by fork, copy-on-write. Cases S11, S16."""

from __future__ import annotations

import pytest

from refengine.errors import IntegrityError
from refengine.hashing import Adapter
from refengine.v0.allocator import NaiveBlockAllocator, NoFreeBlocksError
from refengine.v0.block import Block
from tests.unit.helpers import numbers
from tests.unit.v0_helpers import Manager


def chain(*contents: list[int], extra: object = None) -> list[Block]:
    blocks: list[Block] = []
    for tokens in contents:
        blocks.append(Block(blocks[-1] if blocks else None, 4, extra=extra))
        blocks[-1].token_ids.extend(tokens)
    return blocks


# The name of a block


def test_a_block_is_called_by_all_tokens_up_to_its_end() -> None:
    """Misconception: "equal blocks are equal". Keys and values depend on what came before."""
    here, there = chain(numbers(1, 4), numbers(5, 8)), chain(numbers(11, 14), numbers(5, 8))
    assert here[1].token_ids == there[1].token_ids
    assert here[1].content_hash != there[1].content_hash
    assert here[1].content_hash == chain(numbers(1, 4), numbers(5, 8))[1].content_hash


def test_a_block_of_another_adapter_has_another_name() -> None:
    """Misconception: "equal tokens, equal K/V". Not through other weights."""
    plain, adapted = chain(numbers(1, 4)), chain(numbers(1, 4), extra=Adapter("poet", "/poet"))
    assert plain[0].content_hash != adapted[0].content_hash


def test_a_block_has_no_name_until_it_is_full() -> None:
    (block,) = chain(numbers(1, 3))
    assert (block.content_hash, block.num_empty_slots) == (None, 1)
    block.token_ids.append(4)
    assert block.content_hash is not None


def test_tokens_are_counted_up_to_and_including_the_block() -> None:
    assert [block.num_tokens_total for block in chain(numbers(1, 4), numbers(5, 8), [9])] == [4, 8, 9]


# The free list


def test_the_block_that_was_freed_last_is_taken_first() -> None:
    """Misconception: "freed blocks queue up at the back". V0's list is a stack at its front."""
    allocator = NaiveBlockAllocator(4, 4)
    blocks = [allocator.allocate_mutable_block(None) for _ in range(3)]
    assert [block.block_id for block in blocks] == [0, 1, 2]
    for block in blocks[:2]:
        allocator.free(block)
    assert list(allocator.free_ids) == [1, 0, 3]
    assert allocator.allocate_mutable_block(None).block_id == 1


def test_a_table_is_given_back_first_block_first() -> None:
    """So without a cache the next sequence gets it from its end."""
    manager = Manager(4, enable_caching=False)
    manager.start("A", numbers(1, 12))
    manager.finish("A")
    assert manager.free == [2, 1, 0, 3]


def test_no_block_is_an_error_of_whoever_did_not_ask() -> None:
    allocator = NaiveBlockAllocator(1, 4)
    allocator.allocate_mutable_block(None)
    with pytest.raises(NoFreeBlocksError):
        allocator.allocate_mutable_block(None)


def test_releasing_twice_is_noticed() -> None:
    allocator = NaiveBlockAllocator(2, 4)
    block = allocator.allocate_mutable_block(None)
    twin = Block(None, 4, block.block_id)
    allocator.free(block)
    for released in (block, twin):
        with pytest.raises(IntegrityError):
            allocator.free(released)
    assert list(allocator.free_ids) == [0, 1]


def test_a_free_list_that_contradicts_the_counts_is_noticed() -> None:
    allocator = NaiveBlockAllocator(2, 4)
    allocator.free_ids.append(0)
    with pytest.raises(IntegrityError, match="names a block twice"):
        allocator.check_integrity()
    allocator.free_ids.pop()
    allocator.ref_counts[1] = 1
    with pytest.raises(IntegrityError, match="block 1 has 1 users, in the free list: True"):
        allocator.check_integrity()


# Copy-on-write


def copy_on_write(caching: bool) -> None:
    """P has 6 tokens and is forked; Q gets a token, then P."""
    manager = Manager(6, enable_caching=caching)
    manager.start("P", numbers(1, 6))
    manager.fork("P", "Q")
    assert manager.table("P") == manager.table("Q") == [0, 1]
    assert manager.counts(0, 1) == [2, 2]
    assert manager.append("Q", 7) == [(1, 2)]
    assert manager.table("Q") == [0, 2]
    assert manager.append("P", 8) == []
    assert manager.table("P") == [0, 1]
    assert manager.counts(0, 1, 2) == [2, 1, 1]


def test_s11_whoever_writes_first_gets_a_copy() -> None:
    """S11. Misconception: "the parent's block is the child's too". The child's token would be the parent's."""
    copy_on_write(caching=False)


def test_s11_with_a_cache_as_well() -> None:
    """S11. Misconception: "a cache shares without copies". Only full blocks are cached, and nobody writes those."""
    copy_on_write(caching=True)


def test_an_order_to_copy_is_given_once() -> None:
    manager = Manager(6)
    manager.start("P", numbers(1, 6))
    manager.fork("P", "Q")
    manager.append("Q", 7)
    assert manager.append("Q", 8) == []
    assert manager.manager.allocator.gpu.take_copies() == []


def test_a_fork_at_a_block_end_copies_nothing() -> None:
    manager = Manager(6)
    manager.start("P", numbers(1, 8))
    manager.fork("P", "Q")
    assert manager.append("Q", 9) == manager.append("P", 10) == []
    assert (manager.table("Q"), manager.table("P")) == ([0, 1, 2], [0, 1, 3])


def test_s16_a_table_that_lists_one_block_twice() -> None:
    """S16. Misconception: "a fork raises each block's count by one": here each place in a table is a user."""
    allocator = NaiveBlockAllocator(8, 4)
    allocator.free_ids.rotate(-5)
    table = [allocator.allocate_mutable_block(None)]
    table.append(allocator.allocate_mutable_block(table[0]))
    table.append(Block(table[1], 4, table[0].block_id))
    allocator.ref_counts[5] += 1
    before = {5: 2, 6: 1}
    fork = allocator.fork(table[-1])
    assert [block.block_id for block in fork] == [5, 6, 5]
    assert {block_id: allocator.ref_counts[block_id] for block_id in before} == {5: 4, 6: 2}
    for block in fork:
        allocator.free(block)
    assert {block_id: allocator.ref_counts[block_id] for block_id in before} == before
    for block in table:
        allocator.free(block)
    assert sorted(allocator.free_ids) == numbers(0, 7)
    allocator.check_integrity()
