"""Misconceptions about the queue of free blocks and the queues of waiting requests."""

from __future__ import annotations

from tests.mutants.world import Mutant

QUEUES = (
    Mutant(
        "a negative number of blocks is accepted",
        "v1.block",
        "if not 0 <= n <= self.num_free_blocks:",
        "if n > self.num_free_blocks:",
        ("test_v1_block::test_s17_a_negative_number_of_blocks_is_refused",),
    ),
    Mutant(
        "a block may enter the free queue twice",
        "v1.block",
        "if block.prev is not None or block.next is not None:",
        "if False:",
        ("test_v1_block::test_s17_a_block_enters_the_queue_only_once",),
    ),
    Mutant(
        "the block used last is evicted first",
        "v1.block",
        "self._insert(self._back.prev, block, self._back)",
        "self._insert(self._front, block, self._front.next)",
        ("test_v1_block_pool::test_s10_cached_blocks_join_the_end",),
    ),
    Mutant(
        "a preempted request queues up at the end",
        "v1.request_queue",
        "self._requests.appendleft(request)",
        "self._requests.append(request)",
        (
            "test_v1_request::test_first_come_first_served_and_the_preempted_ahead",
            "test_v1_scheduler_preemption::test_a_preempted_request_waits_at_the_head",
        ),
    ),
    Mutant(
        "a larger priority value is more important",
        "v1.request_queue",
        "heapq.heappush(self._heap, (request.priority,",
        "heapq.heappush(self._heap, (-request.priority,",
        ("test_v1_request::test_priority_is_a_total_order_that_preemption_does_not_change",),
    ),
)
