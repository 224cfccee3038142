"""A request and the queues it waits in."""

from __future__ import annotations

import pytest

from refengine.sampling import SamplingParams
from refengine.v1.request import Request, RequestStatus
from refengine.v1.request_queue import FCFSQueue, PriorityQueue, make_queue
from tests.unit.helpers import make_hasher, numbers


def make(request_id: str = "A", **options: object) -> Request:
    return Request(request_id, [1], SamplingParams(), **options)  # type: ignore[arg-type]


def test_s04_generated_tokens_extend_the_hashes() -> None:
    """S04. Misconception: "the hashes are the prompt's". Then nobody can continue a conversation from the cache."""
    hasher = make_hasher()
    request = Request("A", numbers(1, 6), SamplingParams(), hasher=hasher)
    assert len(request.block_hashes) == 1
    request.append([7])
    assert len(request.block_hashes) == 1
    request.append([8, 9])
    assert len(request.block_hashes) == 2
    assert request.block_hashes == Request("B", numbers(1, 8), SamplingParams(), hasher=hasher).block_hashes


def test_prompt_and_output_are_one_list() -> None:
    request = make()
    request.append([2, 3])
    assert (request.token_ids, request.output_token_ids) == ([1, 2, 3], [2, 3])
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (3, 1, 2)


def test_the_callers_list_is_not_shared() -> None:
    """A request grows; the prompt that a caller passed must not grow with it."""
    prompt = [1, 2]
    Request("A", prompt, SamplingParams()).append([3])
    assert prompt == [1, 2]


def test_scores_of_prompt_tokens_forbid_skipping() -> None:
    asks = SamplingParams(prompt_logprobs=0)
    assert Request("A", [1], asks).skip_reading_prefix_cache
    assert not make().skip_reading_prefix_cache
    assert not Request("A", [1], asks, skip_reading_prefix_cache=False).skip_reading_prefix_cache


def test_finished_is_said_by_three_states() -> None:
    finished = [status.value for status in RequestStatus if status.is_finished]
    assert finished == ["stop", "length", "abort"]


def test_first_come_first_served_and_the_preempted_ahead() -> None:
    """Misconception: "a preempted request queues up again at the end"."""
    queue = make_queue("fcfs")
    assert isinstance(queue, FCFSQueue)
    a, b, c = make("A"), make("B"), make("C")
    queue.add(a)
    queue.add(b)
    queue.put_back(c)
    assert list(queue) == [c, a, b]
    assert queue.peek() is c and len(queue) == 3
    queue.remove(a)
    assert [queue.pop(), queue.pop()] == [c, b]
    assert not queue


def test_priority_is_a_total_order_that_preemption_does_not_change() -> None:
    """Misconceptions: "a larger number is more important", "a preempted request goes to the head here too"."""
    queue = make_queue("priority")
    assert isinstance(queue, PriorityQueue)
    late, early = make("late", priority=1, arrival=2), make("early", priority=1, arrival=1)
    low, high = make("low", priority=9), make("high", priority=-1, arrival=3)
    for request in (late, low, early):
        queue.add(request)
    queue.put_back(high)
    queue.put_back(low_again := make("low again", priority=9, arrival=-1))
    assert [r.request_id for r in queue] == ["high", "early", "late", "low again", "low"]
    assert queue.peek() is high
    queue.remove(early)
    assert [queue.pop() for _ in range(4)] == [high, late, low_again, low]


@pytest.mark.parametrize("removed", range(8))
def test_removing_from_the_middle_keeps_the_order(removed: int) -> None:
    """A heap with a hole is no heap; the next `pop` would be wrong, though `iter` still looked right."""
    queue = PriorityQueue()
    requests = [make(str(priority), priority=priority) for priority in (0, 5, 1, 7, 6, 2, 3, 4)]
    for request in requests:
        queue.add(request)
    queue.remove(requests.pop(removed))
    assert [queue.pop() for _ in range(7)] == sorted(requests, key=lambda request: request.priority)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_an_empty_queue_says_so(policy: str) -> None:
    queue = make_queue(policy)
    for ask in (queue.peek, queue.pop):
        with pytest.raises(IndexError):
            ask()
    with pytest.raises(ValueError):
        queue.remove(make())
