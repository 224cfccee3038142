"""V0's scheduler when blocks run out: recompute or swap, who is the victim, who comes back, and failed steps."""

from __future__ import annotations

import pytest

from refengine.v0.sequence import SequenceStage, SequenceStatus
from tests.unit.helpers import Marks, numbers
from tests.unit.v0_helpers import Steps


def crowded(gpu: int = 4, cpu: int = 0, **options: object) -> Steps:
    """Two requests with 8 tokens each fill 4 blocks; a third step needs one more for each."""
    steps = Steps(gpu, cpu, **options)
    steps.add("first", numbers(1, 8))
    steps.add("last", numbers(11, 18))
    assert steps.step() == {"first": 8, "last": 8}
    return steps


# Recompute


def test_the_last_one_is_preempted_and_waits_at_the_head() -> None:
    """Misconception: "the oldest has had its turn". It would lose the most work."""
    steps = crowded()
    steps.add("newcomer", [99])
    assert steps.step() == {"first": 1}
    assert steps.preempted == [("last", "RECOMPUTE")]
    assert steps.queue("waiting") == ["last", "newcomer"]
    assert steps.out.num_preempted == 1


def test_preempted_by_recompute_starts_over_with_all_its_tokens() -> None:
    steps = crowded()
    steps.step()
    last = steps.groups["last"].first_seq
    assert (last.status, last.stage) == (SequenceStatus.WAITING, SequenceStage.PREFILL)
    assert (last.num_computed_tokens, len(last), steps.table("last")) == (0, 9, [])
    steps.finish("first")
    assert steps.step() == {"last": 9}
    metadata = steps.metadata["last"]
    assert (metadata.is_prompt, metadata.num_prompt_tokens) == (True, 8)
    # Its tail was evicted for "first", its head was not.
    assert metadata.computed_block_nums == steps.table("last")[:1]


def test_one_without_companions_is_its_own_victim() -> None:
    """Behaviour 7: with no block free V0 preempts, though the half-full last block needs none."""
    steps = Steps(2)
    steps.add("A", numbers(1, 5))
    assert steps.step() == {"A": 5}
    assert steps.step() == {}
    assert steps.preempted == [("A", "RECOMPUTE")]
    assert steps.step() == {"A": 6}
    assert steps.step() == {}


# Swap


def test_swap_moves_the_victim_and_brings_it_back() -> None:
    steps = crowded(cpu=4, preemption_mode="swap")
    assert steps.step() == {"first": 1}
    assert steps.preempted == [("last", "SWAP")]
    assert steps.out.blocks_to_swap_out == [(2, 0), (3, 1)]
    last = steps.groups["last"].first_seq
    assert (last.status, last.stage, last.num_computed_tokens) == (
        SequenceStatus.SWAPPED,
        SequenceStage.DECODE,
        8,
    )
    assert (steps.queue("swapped"), steps.queue("waiting")) == (["last"], [])
    steps.finish("first")
    assert steps.step() == {"last": 1}
    assert [pair[0] for pair in steps.out.blocks_to_swap_in] == [0, 1]
    assert not steps.metadata["last"].is_prompt


def test_no_prompt_starts_while_somebody_is_swapped_out() -> None:
    """Misconception: "swapped is out of the way". In the default mode it stands before all prompts."""
    steps = crowded(cpu=4, preemption_mode="swap")
    steps.step()
    steps.add("small", [99])
    for _ in range(2):
        assert steps.step() == {"first": 1}
    assert (steps.queue("swapped"), steps.queue("waiting")) == (["last"], ["small"])
    steps.finish("first")
    assert steps.step() == {"last": 1}
    assert steps.step() == {"small": 1}


def test_nobody_comes_back_in_a_step_that_preempts() -> None:
    """Misconception: "free blocks serve the next in line". Whoever lost them would lose them to one coming back."""
    steps = Steps(6, 12, preemption_mode="swap")
    for i, name in enumerate("ABC"):
        steps.add(name, numbers(100 * i, 100 * i + 7))
    steps.step()
    assert steps.step() == {"A": 1, "B": 1}
    assert steps.preempted == [("C", "SWAP")]
    assert steps.num_free == 0
    assert steps.step() == {"A": 1}
    assert (steps.preempted, steps.num_free) == ([("B", "SWAP")], 3)
    assert (steps.out.blocks_to_swap_in, steps.queue("swapped")) == ([], ["C", "B"])


def test_a_single_sequence_recomputes_unless_told_to_swap() -> None:
    steps = crowded(cpu=4)
    steps.step()
    assert steps.preempted == [("last", "RECOMPUTE")]


def test_an_aborted_swapped_request_gives_its_cpu_blocks_back() -> None:
    steps = crowded(cpu=4, preemption_mode="swap")
    steps.step()
    steps.finish("last")
    assert (steps.manager.allocator.cpu.num_free_blocks, steps.queue("swapped")) == (4, [])


def test_vllm_breaks_when_a_swapped_request_is_aborted() -> None:
    """The known defect that mode "faithful" keeps."""
    steps = crowded(cpu=4, preemption_mode="swap", mode="faithful")
    steps.step()
    with pytest.raises(KeyError):
        steps.finish("last")


def test_without_room_on_the_cpu_the_victim_recomputes() -> None:
    """Misconception: "swap means swap". Without room on the CPU there is still the other way."""
    steps = crowded(cpu=1, preemption_mode="swap")
    assert steps.step() == {"first": 1}
    assert (steps.preempted, steps.out.blocks_to_swap_out) == ([("last", "RECOMPUTE")], [])
    assert (steps.queue("waiting"), steps.queue("swapped")) == (["last"], [])


def test_vllm_ends_without_room_on_the_cpu() -> None:
    """The known defect that mode "faithful" keeps: nobody gets an answer any more."""
    steps = crowded(cpu=1, preemption_mode="swap", mode="faithful")
    with pytest.raises(RuntimeError, match="no room in CPU memory"):
        steps.step()


# Priority


def urgent(mode: str, **options: object) -> Steps:
    """A request of no importance fills the cache, and a most important one arrives."""
    steps = Steps(4, 4, policy="priority", mode=mode, **options)
    steps.add("low", numbers(1, 13), priority=5)
    steps.step()
    steps.add("high", numbers(21, 28), priority=1)
    return steps


def test_a_priority_forces_out_who_is_less_important() -> None:
    steps = urgent("fixed")
    assert steps.step() == {}
    assert steps.preempted == [("low", "RECOMPUTE")]
    assert steps.out.num_preempted == 0, "vLLM's own count leaves these out"
    assert steps.queue("waiting") == ["high", "low"]
    assert steps.step() == {"high": 8}


def test_nobody_is_forced_out_for_an_equal() -> None:
    """Misconception: "whoever waits under a priority policy gets blocks". Only from less important ones."""
    steps = Steps(4, policy="priority")
    steps.add("low", numbers(1, 7), priority=5)
    steps.step()
    steps.add("equal", numbers(21, 32), priority=5)
    assert steps.step() == {"low": 1}
    assert steps.preempted == []


def test_a_victim_of_priority_recomputes() -> None:
    """Misconception: "it waits, wherever its blocks are". Swapped out, it would wait as if it had none."""
    steps = urgent("fixed", preemption_mode="swap")
    steps.step()
    assert (steps.preempted, steps.out.blocks_to_swap_out) == ([("low", "RECOMPUTE")], [])
    assert steps.groups["low"].first_seq.status is SequenceStatus.WAITING
    assert steps.step() == {"high": 8}


def test_vllm_loses_the_blocks_of_a_swapped_victim_of_priority() -> None:
    """The known defect that mode "faithful" keeps: swapped, but in the waiting queue, and without copy orders."""
    steps = urgent("faithful", preemption_mode="swap")
    steps.step()
    assert (steps.preempted, steps.out.blocks_to_swap_out) == ([("low", "SWAP")], [])
    assert steps.queue("waiting") == ["high", "low"]
    with pytest.raises(AssertionError, match="one waiting sequence"):
        for _ in range(3):
            steps.step()


# A step that did not run to its end


def test_a_step_that_failed_is_taken_back_whole() -> None:
    """Misconception: "scheduled is computed". Nobody's mark or block may survive a step that did not run."""
    marks = Marks()
    steps = Steps(10, observer=marks)
    a, b = steps.add("A", numbers(1, 9)), steps.add("B", [*numbers(1, 8), 99])
    steps.schedule()
    assert steps.num_free == 6
    steps.scheduler.take_back(steps.out)
    steps.verify()
    assert (steps.queue("running"), steps.queue("waiting")) == ([], ["A", "B"])
    assert (a.num_computed_tokens, b.num_computed_tokens, steps.num_free) == (0, 0, 10)
    assert marks.of("admit", "A")[-1] == {"admitted": False, "reason": "preempted: its step failed"}
    assert steps.step() == {"A": 9, "B": 9}
    assert (steps.skipped("A"), steps.skipped("B")) == ([], []), "nothing was computed, so nothing is found"


def test_what_earlier_steps_have_computed_is_still_found() -> None:
    steps = Steps(10)
    steps.add("A", numbers(1, 8))
    steps.step({"A": 9})
    steps.schedule()
    steps.scheduler.take_back(steps.out)
    assert steps.step() == {"A": 9}
    assert steps.skipped("A") == steps.table("A")[:2]


def test_a_failed_step_swaps_nobody_out() -> None:
    """Misconception: "swapped out is safe". Its copies may not have been made."""
    steps = crowded(cpu=4, preemption_mode="swap")
    steps.schedule()
    assert steps.preempted == [("last", "SWAP")]
    steps.scheduler.take_back(steps.out)
    steps.verify()
    assert (steps.queue("waiting"), steps.queue("swapped")) == (["first", "last"], [])
    assert (steps.num_free, steps.manager.allocator.cpu.num_free_blocks) == (4, 4)
    assert steps.groups["last"].first_seq.num_computed_tokens == 0


def test_a_failed_step_brings_nobody_in() -> None:
    steps = crowded(cpu=4, preemption_mode="swap")
    steps.step()
    steps.finish("first")
    steps.schedule()
    assert steps.out.blocks_to_swap_in
    steps.scheduler.take_back(steps.out)
    steps.verify()
    assert (steps.queue("waiting"), steps.queue("running"), steps.num_free) == (["last"], [], 4)
