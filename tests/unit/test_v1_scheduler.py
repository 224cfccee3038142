"""The scheduler: one token budget, admission in order, prefix hits. Cases S05 and S06 of the shared set."""

from __future__ import annotations

import pytest

from refengine.errors import IntegrityError
from refengine.v1.request import RequestStatus
from tests.unit.helpers import Marks, Steps, numbers

# Budget


def test_prefill_chunks_and_decodes_share_one_budget() -> None:
    """Misconception: "the budget is for the running ones". Waiting requests get what is left, and no more."""
    steps = Steps(usable=20, max_num_batched_tokens=6)
    steps.add("A", numbers(1, 4))
    steps.add("B", numbers(11, 20))
    steps.add("C", numbers(21, 22))
    assert steps.step() == {"A": (0, 4), "B": (0, 2)}
    assert steps.step() == {"A": (4, 1), "B": (2, 5)}
    assert steps.step() == {"A": (5, 1), "B": (7, 3), "C": (0, 2)}
    assert steps.output.total_num_scheduled_tokens == 6


def test_running_requests_come_first_in_order_of_admission() -> None:
    steps = Steps(usable=20, max_num_batched_tokens=8, max_num_seqs=2)
    for name in "ABC":
        steps.add(name, [ord(name), 1])
    assert list(steps.step()) == ["A", "B"]
    assert (steps.running, steps.waiting) == (["A", "B"], ["C"])
    steps.scheduler.finish("A", RequestStatus.FINISHED_ABORTED)
    assert list(steps.step()) == ["B", "C"]


def test_s05_no_blocks_are_held_without_token_budget() -> None:
    """S05. Misconception: "take the blocks, then see whether it fits the step"."""
    steps = Steps(usable=8, max_num_batched_tokens=6, enable_chunked_prefill=False)
    steps.add("A", numbers(1, 5))
    steps.add("B", numbers(11, 15))
    assert steps.step() == {"A": (0, 5)}
    assert steps.waiting == ["B"]
    assert steps.table("B") == []
    assert steps.num_free == 6


def test_without_chunking_a_prompt_runs_whole() -> None:
    steps = Steps(usable=8, max_num_batched_tokens=6, enable_chunked_prefill=False)
    steps.add("A", numbers(1, 5))
    steps.add("B", numbers(11, 15))
    steps.step()
    assert steps.step() == {"A": (5, 1), "B": (0, 5)}


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    """Misconception: "a small request may pass". The big one would wait for ever."""
    steps = Steps(usable=6)
    steps.add("A", numbers(1, 8))
    steps.step()
    steps.add("big", numbers(11, 30))
    steps.add("small", [99])
    steps.step()
    assert (steps.running, steps.waiting) == (["A"], ["big", "small"])


def test_a_long_prompt_is_cut_only_if_somebody_else_is_there() -> None:
    """Misconception: "the long-prefill threshold is a chunk size"."""
    steps = Steps(usable=20, long_prefill_token_threshold=4)
    steps.add("A", numbers(1, 10))
    assert steps.step() == {"A": (0, 10)}
    steps.add("B", numbers(11, 20))
    assert steps.step() == {"A": (10, 1), "B": (0, 4)}


def test_the_last_position_of_the_model_is_never_computed() -> None:
    """Misconception: "every token is computed". Nothing can follow the last one, so nobody needs its K/V."""
    steps = Steps(usable=10, max_model_len=10, max_num_batched_tokens=4)
    request = steps.add("A", numbers(1, 10))
    for _ in range(5):
        steps.step()
    assert request.num_computed_tokens == 9
    steps.add("B", [1, 2])
    assert steps.step() == {"B": (0, 2)}
    assert steps.step() == {"B": (2, 1)}, "a request that has nothing to do stands in nobody's way"


# Prefix hits


def test_s06_two_requests_share_a_prefix_in_the_same_step() -> None:
    """S06, V1. Misconception: "B can only hit what an earlier step computed". The table says so already."""
    steps = Steps(usable=10)
    a = steps.add("A", numbers(1, 9))
    b = steps.add("B", [*numbers(1, 8), 10])
    assert steps.step() == {"A": (0, 9), "B": (8, 1)}
    assert (steps.table("A"), steps.table("B")) == ([1, 2, 3], [1, 2, 4])
    assert [steps.manager.block_pool.blocks[i].ref_count for i in (1, 2)] == [2, 2]
    assert (a.num_cached_tokens, b.num_cached_tokens) == (0, 8)


def test_hit_tokens_cost_no_budget() -> None:
    """Misconception: "cached tokens are scheduled, but fast"."""
    steps = Steps(usable=10, max_num_batched_tokens=10)
    steps.add("A", numbers(1, 8))
    steps.add("B", numbers(1, 9))
    assert steps.step() == {"A": (0, 8), "B": (8, 1)}


# What it tells


def test_an_id_in_use_is_refused() -> None:
    steps = Steps(usable=5)
    steps.add("A", [1])
    with pytest.raises(ValueError, match="request id 'A' is in use"):
        steps.add("A", [2])
    assert steps.waiting == ["A"]


def test_the_marks_of_a_step_come_in_order() -> None:
    """The six moments that the book is about, without the one that needs a model."""
    marks = Marks()
    steps = Steps(usable=5, observer=marks)
    steps.add("A", numbers(1, 8))
    steps.step({"A": 9})
    assert [kind for kind, _, _ in marks.all] == ["lookup", "admit", "allocate", "publish", "append"]
    assert marks.of("lookup") == [{"num_tokens": 8, "hit_tokens": 0, "block_ids": [[]]}]
    assert marks.of("admit") == [{"admitted": True, "reason": "new"}]
    assert marks.of("allocate") == [{"num_tokens": 8, "block_ids": [[1, 2]]}]
    assert marks.of("append") == [{"token_id": 9, "finish_reason": None}]


def test_every_refusal_says_why() -> None:
    marks = Marks()
    steps = Steps(usable=3, observer=marks, max_num_seqs=2)
    steps.add("A", numbers(1, 8))
    steps.add("B", numbers(11, 18))
    steps.step()
    assert marks.of("admit", "B") == [{"admitted": False, "reason": "not enough free blocks"}]
    steps = Steps(usable=30, observer=marks, max_num_seqs=1)
    steps.add("C", [1])
    steps.add("D", [2])
    steps.step()
    assert marks.of("admit", "D") == [{"admitted": False, "reason": "max_num_seqs requests are running"}]
    steps = Steps(usable=30, observer=marks, enable_chunked_prefill=False, max_num_batched_tokens=4)
    steps.add("E", [1, 2, 3])
    steps.add("F", [4, 5, 6])
    steps.step()
    reason = "not enough token budget for the whole prompt"
    assert marks.of("admit", "F") == [{"admitted": False, "reason": reason}]


def test_integrity_of_the_queues() -> None:
    steps = Steps(usable=5)
    request = steps.add("A", numbers(1, 8))
    request.status = RequestStatus.RUNNING
    with pytest.raises(IntegrityError, match="request 'A' is running but in the other queue"):
        steps.scheduler.check_integrity()
    request.status = RequestStatus.WAITING
    steps.scheduler.requests.clear()
    with pytest.raises(IntegrityError, match=r"queues hold \['A'\], but the unfinished requests are \[\]"):
        steps.scheduler.check_integrity()
    steps = Steps(usable=5)
    steps.manager.block_pool.free_queue.num_free_blocks = 3
    with pytest.raises(IntegrityError, match="counts 3 blocks"):
        steps.scheduler.check_integrity()
