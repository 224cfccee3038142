"""The scheduler when blocks run out: who is preempted, how it resumes, and what must not be found meanwhile.

Cases S04, S20 and S21 of the shared set.
"""

from __future__ import annotations

from refengine.v1.request import RequestStatus
from tests.unit.helpers import Marks, Steps, numbers

# Preemption


def crowded(**options: object) -> Steps:
    """Two requests that fill 5 blocks until "first" needs one more: "last" has lost its blocks by then."""
    steps = Steps(usable=5, **options)
    steps.add("first", numbers(11, 17))
    steps.add("last", numbers(1, 8), max_tokens=20)
    steps.step({"last": 9})
    steps.step({"last": 10})
    assert steps.num_free == 0
    assert steps.step() == {"first": (8, 1)}
    return steps


def test_the_last_admitted_is_preempted() -> None:
    """Misconception: "the oldest has had its turn". It would lose the most work."""
    steps = crowded()
    assert steps.output.preempted_ids == {"last"}
    assert (steps.running, steps.waiting) == (["first"], ["last"])


def test_a_preempted_request_waits_at_the_head() -> None:
    """Misconception: "it queues up again". It was served before those who wait."""
    steps = Steps(usable=5, max_num_seqs=2)
    steps.add("first", numbers(11, 17))
    steps.add("last", numbers(1, 8))
    steps.add("newcomer", [99])
    for _ in range(3):
        steps.step()
    assert steps.waiting == ["last", "newcomer"]


def test_nobody_is_admitted_in_the_step_of_a_preemption() -> None:
    """Misconception: "free blocks serve the next in line". These belong to the one that needed them."""
    steps = Steps(usable=5, policy="priority")
    steps.add("first", numbers(11, 17), priority=1)
    steps.add("last", numbers(1, 8), priority=9)
    steps.step()
    steps.step()
    steps.add("small", [99], priority=5)
    assert steps.step() == {"first": (8, 1)}
    assert steps.num_free == 2
    assert steps.waiting == ["small", "last"]
    assert steps.step() == {"first": (9, 1), "small": (0, 1)}


def test_s04_a_preempted_request_forgets_its_computed_count() -> None:
    """S04. Misconception: "it had computed 9 tokens, so 9 are computed". Its blocks are gone; the lookup decides."""
    steps = crowded()
    last = steps.scheduler.requests["last"]
    assert (last.num_tokens, last.num_computed_tokens, steps.table("last")) == (10, 0, [])
    steps.scheduler.finish("first", RequestStatus.FINISHED_ABORTED)
    assert steps.step() == {"last": (8, 2)}
    assert len(steps.table("last")) == 3
    assert last.num_computed_tokens == 10 == last.num_tokens - 1


def test_s21_a_resumed_request_is_told_whole() -> None:
    """S21. Misconception: "a request with output is decoding". The runner has forgotten it and needs every token."""
    steps = crowded()
    assert steps.scheduler.requests["last"].num_output_tokens == 2
    steps.scheduler.finish("first", RequestStatus.FINISHED_ABORTED)
    steps.step()
    (share,) = steps.output.scheduled
    assert share.kind == "resumed"
    assert share.token_ids == tuple(numbers(1, 10))
    assert share.block_ids == (steps.table("last"),)
    assert (share.num_prompt_tokens, share.num_computed_tokens, share.num_tokens) == (8, 8, 2)


def test_a_resumed_request_keeps_its_first_hit_as_cached_tokens() -> None:
    """Misconception: "it found 8 cached tokens". It found its own; its prompt was cold."""
    steps = crowded()
    steps.scheduler.finish("first", RequestStatus.FINISHED_ABORTED)
    steps.step()
    assert steps.scheduler.requests["last"].num_cached_tokens == 0
    stats = steps.manager.stats
    assert (stats.requests, stats.resumed_requests, stats.resumed_hits) == (2, 1, 8)


def thrash(**options: bool) -> int:
    """S20's crowd, 20 steps long: R1 grows from 7 to 10 blocks and ends. Returns: how often R2 was preempted."""
    steps = Steps(usable=10, enable_prefix_caching=False, long_prefill_token_threshold=8, **options)
    steps.add("R1", numbers(1, 28), max_tokens=13)
    steps.step()
    assert len(steps.table("R1")) == 7
    r2 = steps.add("R2", numbers(101, 124))
    r2.status, r2.num_preemptions = RequestStatus.PREEMPTED, 1
    for _ in range(20):
        steps.step()
    assert (steps.running, r2.num_output_tokens > 0) == (["R2"], True)
    return r2.num_preemptions


def test_s20_a_preempted_request_is_not_readmitted_by_its_first_chunk() -> None:
    """S20. Misconception: "its next chunk fits, so let it in". It is thrown out again before it is done."""
    assert thrash() == 1


def test_s20_the_naive_rule_thrashes() -> None:
    """S20, what the gate prevents: R2 is let in and thrown out until R1 has grown too big for even one chunk."""
    assert thrash(reserve_full_sequence=False) == 3


def test_the_watermark_does_not_stop_an_idle_engine() -> None:
    """Misconception: "the watermark always holds". With nobody to protect it would stop the engine for ever."""
    steps = Steps(usable=4, watermark=0.5)
    steps.add("A", numbers(1, 16))
    assert steps.step() == {"A": (0, 16)}
    steps.add("B", [99])
    assert steps.step({}) == {}
    assert steps.waiting == ["A", "B"]


def test_priority_the_least_important_is_preempted() -> None:
    """Misconception: "the last admitted goes", also with priorities."""
    steps = Steps(usable=5, policy="priority")
    steps.add("low", numbers(11, 17), priority=5)
    steps.step()
    steps.add("high", numbers(1, 8), priority=1)
    steps.step()
    assert steps.running == ["low", "high"]
    assert steps.step() == {"high": (8, 1)}
    assert steps.output.preempted_ids == {"low"}


def test_priority_a_victim_further_up_lets_nobody_be_skipped() -> None:
    """Misconception: "the loop goes on at the next index". The victim stood before it, so all have moved up."""
    steps = Steps(usable=6, policy="priority")
    steps.add("low", numbers(11, 17), priority=5)
    steps.step()
    steps.add("high", numbers(1, 8), priority=1)
    steps.add("middle", [99], priority=2)
    steps.step()
    assert (steps.running, steps.num_free) == (["low", "high", "middle"], 1)
    assert steps.step() == {"high": (8, 1), "middle": (1, 1)}
    assert steps.output.preempted_ids == {"low"}


def test_priority_a_share_is_taken_back_in_the_same_step() -> None:
    """Misconception: "what is scheduled stays scheduled". Its tokens go back to the budget, its blocks to the pool."""
    steps = Steps(usable=4, policy="priority", max_num_batched_tokens=9)
    low = steps.add("low", numbers(11, 15), priority=5)
    steps.step()
    steps.add("high", numbers(1, 8), priority=1)
    steps.step()
    assert (steps.running, steps.num_free) == (["low", "high"], 0)
    assert steps.step() == {"high": (8, 1)}
    assert steps.output.preempted_ids == {"low"}
    assert (low.status, low.num_computed_tokens) == (RequestStatus.PREEMPTED, 0)


def take_back_a_chunk(mode: str) -> Steps:
    """A chunk of 8 tokens was given to "low" and its two blocks published; then "high" needs one of its blocks."""
    options = {
        "max_num_batched_tokens": 12,
        "long_prefill_token_threshold": 8,
        "reserve_full_sequence": False,
    }
    steps = Steps(usable=8, policy="priority", mode=mode, **options)
    steps.add("low", numbers(1, 30), priority=5)
    assert steps.step() == {"low": (0, 12)}
    steps.add("high", numbers(101, 104), priority=1)
    assert steps.step() == {"low": (12, 8), "high": (0, 4)}
    assert steps.step() == {"high": (4, 1)}
    assert steps.output.preempted_ids == {"low"}
    return steps


def test_a_block_of_a_share_taken_back_cannot_be_found() -> None:
    """Misconception: "published is computed". Nobody will compute the chunk that was taken back."""
    assert found_of_low(take_back_a_chunk("fixed")) == 20


def test_vllm_leaves_a_block_of_a_share_taken_back_in_the_index() -> None:
    """The known defect of vLLM 0.33.0 that mode "faithful" keeps: tokens 21 to 24 were never computed."""
    assert found_of_low(take_back_a_chunk("faithful")) == 24


def found_of_low(steps: Steps) -> int:
    return steps.manager.get_computed_blocks(steps.scheduler.requests["low"])[1]


# A step that did not run to its end


def test_a_step_that_failed_is_taken_back_whole() -> None:
    """Misconception: "counted as computed is computed". Nobody's count or block may survive a step that did not run."""
    marks = Marks()
    steps = Steps(usable=10, max_num_batched_tokens=12, observer=marks)
    a, b = steps.add("A", numbers(1, 9)), steps.add("B", [*numbers(1, 8), 99])
    steps.step()
    steps.add("C", numbers(51, 60))
    output = steps.scheduler.schedule()
    steps.scheduler.take_back(output)
    steps.verify()
    assert (steps.running, steps.waiting) == ([], ["A", "B", "C"])
    assert marks.of("admit", "A")[-1] == {"admitted": False, "reason": "preempted: its step failed"}
    assert (a.num_computed_tokens, b.num_computed_tokens, steps.num_free) == (0, 0, 10)
    assert steps.step() == {"A": (8, 2), "B": (8, 2), "C": (0, 8)}


def test_a_step_that_failed_has_told_the_runner_nothing() -> None:
    """Misconception: "the runner knows who left". It was told in the step that failed, so it is told again."""
    steps = Steps(usable=5, max_num_seqs=3)
    steps.add("first", numbers(11, 17))
    steps.add("last", numbers(1, 8))
    steps.add("gone", [99], max_tokens=1)
    steps.step()
    steps.step()
    steps.scheduler.finish("first", RequestStatus.FINISHED_ABORTED)
    output = steps.scheduler.schedule()
    assert output.finished_ids == {"first"}
    steps.scheduler.take_back(output)
    again = steps.scheduler.schedule()
    assert (again.finished_ids, again.preempted_ids) == ({"first"}, {"last"})
    steps.scheduler.take_back(again)
    assert steps.scheduler.schedule().preempted_ids == {"last"}
