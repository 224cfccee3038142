"""The scheduler after the model ran: which token ends a request, and what happens to its blocks."""

from __future__ import annotations

import pytest

from refengine.v1.request import RequestStatus
from tests.unit.helpers import Steps, numbers
from tests.unit.test_v1_scheduler_preemption import crowded

# Stopping


def test_max_tokens_counts_the_token_just_appended() -> None:
    """Misconception: "check, then append". It gives one token too many."""
    steps = Steps(usable=4)
    request = steps.add("A", numbers(1, 4), max_tokens=2)
    steps.step()
    assert request.status is RequestStatus.RUNNING
    steps.step()
    assert request.status is RequestStatus.FINISHED_LENGTH
    assert request.num_output_tokens == 2
    assert steps.num_free == 4


def test_the_end_token_ends_unless_ignored() -> None:
    """Misconception: "ignore_eos" as its opposite."""
    steps = Steps(usable=10, eos=[7])
    ends = steps.add("A", numbers(11, 14))
    goes_on = steps.add("B", numbers(21, 24), ignore_eos=True)
    steps.step({"A": 7, "B": 7})
    assert ends.status is RequestStatus.FINISHED_STOPPED
    assert ends.output_token_ids == [7]
    assert ends.stop_reason is None
    assert goes_on.status is RequestStatus.RUNNING


def test_a_stop_token_ends_and_is_named() -> None:
    """Misconception: "ignore_eos ignores every stop token"."""
    steps = Steps(usable=10, eos=[7])
    request = steps.add("A", numbers(11, 14), stop_token_ids=(9,), ignore_eos=True)
    steps.step({"A": 9})
    assert (request.status, request.stop_reason) == (RequestStatus.FINISHED_STOPPED, 9)


def test_a_full_model_ends_by_length() -> None:
    steps = Steps(usable=10, max_model_len=6)
    request = steps.add("A", numbers(1, 5))
    steps.step()
    assert (request.status, request.num_tokens) == (RequestStatus.FINISHED_LENGTH, 6)


def test_tokens_after_a_stop_are_dropped() -> None:
    steps = Steps(usable=10, eos=[7])
    request = steps.add("A", numbers(11, 14))
    output = steps.scheduler.schedule()
    assert steps.scheduler.update(output, {"A": [5, 7, 6]}) == {"A": [5, 7]}
    assert request.output_token_ids == [5, 7]


def test_finished_requests_give_their_blocks_back_and_are_named_once() -> None:
    """Misconception: "blocks return when the caller reads the output"."""
    steps = Steps(usable=4)
    steps.add("A", numbers(1, 4), max_tokens=1)
    steps.step()
    assert steps.num_free == 4
    assert steps.scheduler.schedule().finished_ids == {"A"}
    assert steps.scheduler.schedule().finished_ids == frozenset()


@pytest.mark.parametrize("stands", ["waiting", "running", "preempted"])
def test_a_request_can_be_aborted_wherever_it_stands(stands: str) -> None:
    steps = crowded() if stands == "preempted" else Steps(usable=5)
    if stands != "preempted":
        steps.add("last", numbers(1, 8))
    if stands == "running":
        steps.step()
    request = steps.scheduler.finish("last", RequestStatus.FINISHED_ABORTED)
    assert request is not None and request.status is RequestStatus.FINISHED_ABORTED
    assert steps.table("last") == []
    assert "last" not in steps.running + steps.waiting
    assert steps.scheduler.finish("last", RequestStatus.FINISHED_ABORTED) is None
    steps.verify()


def test_a_request_aborted_while_the_model_ran_gets_no_token() -> None:
    steps = Steps(usable=5)
    request = steps.add("A", numbers(1, 8))
    output = steps.scheduler.schedule()
    steps.scheduler.finish("A", RequestStatus.FINISHED_ABORTED)
    assert steps.scheduler.update(output, {"A": [9]}) == {}
    assert request.output_token_ids == []
