"""The free queue: order, constant-time removal, and invariants that it defends itself."""

from __future__ import annotations

import pytest

from refengine.errors import IntegrityError
from refengine.v1.block import FreeKVCacheBlockQueue, KVCacheBlock


def make(count: int) -> tuple[FreeKVCacheBlockQueue, list[KVCacheBlock]]:
    blocks = [KVCacheBlock(block_id) for block_id in range(count)]
    return FreeKVCacheBlockQueue(blocks), blocks


def ids(queue: FreeKVCacheBlockQueue) -> list[int]:
    queue.check_integrity()
    return [block.block_id for block in queue]


def test_blocks_leave_at_the_front_in_order() -> None:
    queue, _ = make(5)
    assert [block.block_id for block in queue.popleft_n(2)] == [0, 1]
    assert [block.block_id for block in queue.popleft_n(0)] == []
    assert ids(queue) == [2, 3, 4]
    assert queue.num_free_blocks == 3


def test_a_block_leaves_the_middle_without_a_walk() -> None:
    """A prefix hit takes a free block out from wherever it stands; both neighbours must learn of it."""
    queue, blocks = make(4)
    queue.remove(blocks[2])
    assert ids(queue) == [0, 1, 3]
    queue.remove(blocks[3])
    queue.remove(blocks[0])
    assert ids(queue) == [1]
    queue.remove(blocks[1])
    assert ids(queue) == []
    assert (blocks[2].prev, blocks[2].next) == (None, None)


def test_append_and_prepend_keep_the_given_order() -> None:
    queue, blocks = make(6)
    queue.popleft_n(6)
    queue.append_n([blocks[0], blocks[1]])
    queue.prepend_n([blocks[2], blocks[3]])
    queue.append_n([blocks[4]])
    queue.prepend_n([blocks[5]])
    assert ids(queue) == [5, 2, 3, 0, 1, 4]


def test_s17_a_negative_number_of_blocks_is_refused() -> None:
    """S17 (b). Misconception: "nobody asks for -2 blocks". vLLM 0.33 accepts it and its counter grows by 2."""
    queue, _ = make(4)
    with pytest.raises(ValueError, match="cannot take -2 blocks from a free queue of 4"):
        queue.popleft_n(-2)
    assert ids(queue) == [0, 1, 2, 3]
    assert queue.num_free_blocks == 4


def test_s17_more_blocks_than_there_are_are_refused_with_nothing_taken() -> None:
    """S17. Misconception: "take what there is and complain afterwards"."""
    queue, _ = make(2)
    with pytest.raises(ValueError, match="cannot take 3 blocks from a free queue of 2"):
        queue.popleft_n(3)
    assert ids(queue) == [0, 1]


def test_s17_a_block_enters_the_queue_only_once() -> None:
    """S17. Misconception: "adding a block that stands there already does no harm". It would tear the links."""
    queue, blocks = make(3)
    for add in (queue.append_n, queue.prepend_n):
        with pytest.raises(ValueError, match="block 1 is in the free queue already"):
            add([blocks[1]])
    assert ids(queue) == [0, 1, 2]


def test_a_block_that_is_not_there_cannot_leave() -> None:
    queue, blocks = make(3)
    queue.remove(blocks[1])
    with pytest.raises(ValueError, match="block 1 is not in the free queue"):
        queue.remove(blocks[1])
    assert ids(queue) == [0, 2]


def test_a_wrong_counter_is_noticed() -> None:
    queue, _ = make(3)
    queue.num_free_blocks += 1
    with pytest.raises(IntegrityError, match="the free queue counts 4 blocks, but 3 "):
        queue.check_integrity()


def test_torn_links_are_noticed() -> None:
    queue, blocks = make(3)
    blocks[1].prev = blocks[1]
    with pytest.raises(IntegrityError, match="the links around block 1 disagree"):
        queue.check_integrity()
