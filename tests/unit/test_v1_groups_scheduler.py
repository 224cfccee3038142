"""The scheduler with several groups: chunks that end between blocks, states that are not there yet."""

from __future__ import annotations

import pytest

from refengine.config import EngineConfig
from refengine.v1.kv_cache_manager import KVCacheManager
from refengine.v1.state_chunks import state_chunks_for
from tests.unit.group_cache import GroupSteps, full, mamba, specs, window
from tests.unit.helpers import numbers


def test_chunks_of_a_model_with_states_end_between_blocks() -> None:
    """Misconception: "a chunk takes all the budget there is". Trace sched_mamba_split."""
    steps = GroupSteps(full(4), mamba(4), usable=40, block_size=4, max_num_batched_tokens=11)
    steps.add("A", numbers(1, 23), max_tokens=2)
    assert [steps.step()["A"] for _ in range(4)] == [(0, 8), (8, 8), (16, 4), (20, 3)]


def test_chunks_of_a_model_with_windows_end_anywhere() -> None:
    """Misconception: "a hit ends between blocks, so a chunk does". Trace sched_hybrid_window."""
    steps = GroupSteps(full(4), window(4, 8), usable=40, block_size=4, max_num_batched_tokens=11)
    steps.add("A", numbers(1, 23), max_tokens=2)
    assert [steps.step()["A"] for _ in range(3)] == [(0, 11), (11, 11), (22, 1)]


def test_the_last_chunk_leaves_the_state_that_the_same_prompt_needs() -> None:
    """Misconception: "a prompt that fits runs in one chunk". Its last state would be found by nobody."""
    steps = GroupSteps(full(4), mamba(4), usable=40, block_size=4)
    steps.add("A", numbers(1, 11), max_tokens=1)
    assert steps.step() == {"A": (0, 8)}
    assert steps.step() == {"A": (8, 3)}
    steps.add("B", numbers(1, 11), max_tokens=1)
    assert steps.step() == {"B": (8, 3)}


def test_a_chunk_ends_at_the_shared_prefix_boundary() -> None:
    """Surprise 13. Misconception: "the boundary is remembered by itself". Trace sched_mamba_split."""
    steps = GroupSteps(full(4), mamba(4), usable=60, block_size=4)
    starts = {}
    for name, base in {"A": 100, "B": 200, "C": 300}.items():
        steps.add(name, [*numbers(1, 8), *numbers(base, base + 8)], max_tokens=1)
        starts[name] = [steps.step()[name] for _ in range(2)]
        while steps.running:
            steps.step()
    assert starts == {"A": [(0, 16), (16, 1)], "B": [(0, 8), (8, 8)], "C": [(8, 8), (16, 1)]}


def test_a_shared_state_waits_one_step() -> None:
    """S07 in the scheduler. Misconception: "a request that fits is admitted". Trace sched_mamba_split."""
    steps = GroupSteps(full(4), mamba(4), usable=60, block_size=4)
    steps.add("A", numbers(1, 9), max_tokens=3)
    steps.add("B", numbers(1, 9), max_tokens=3)
    assert steps.step() == {"A": (0, 8)}
    assert steps.waiting == ["B"]
    assert steps.step() == {"A": (8, 1), "B": (8, 1)}


def test_a_budget_below_a_block_waits_for_more() -> None:
    """Misconception: "any budget is used". A chunk of 3 would end where no state can be kept."""
    steps = GroupSteps(full(4), mamba(4), usable=60, block_size=4, max_num_batched_tokens=7)
    steps.add("A", numbers(1, 5), max_tokens=20)
    steps.step()
    steps.step()
    steps.add("B", numbers(100, 108), max_tokens=1)
    steps.add("C", numbers(200, 208), max_tokens=1)
    assert steps.step() == {"A": (5, 1), "B": (0, 4)}, "2 tokens are left, and C would need 4"
    assert steps.waiting == ["C"]


def test_a_block_that_no_step_has_budget_for_takes_several_chunks() -> None:
    """Misconception: "a chunk always ends between blocks". Then a prompt could never begin."""
    steps = GroupSteps(full(8), mamba(8), usable=60, block_size=8, max_num_batched_tokens=3)
    steps.add("A", numbers(1, 10), max_tokens=1)
    assert [steps.step()["A"] for _ in range(4)] == [(0, 3), (3, 3), (6, 2), (8, 2)]


@pytest.mark.parametrize(("threshold", "can"), [(0, True), (3, False), (16, True)])
def test_the_long_prefill_threshold_is_a_budget_too(threshold: int, can: bool) -> None:
    config = EngineConfig(num_blocks=20, max_num_batched_tokens=16, long_prefill_token_threshold=threshold)
    manager = KVCacheManager(specs([full(8), mamba(8)]), 20, 100)
    assert state_chunks_for(config, manager).can_fill_a_block is can


def test_a_resumed_request_is_cut_again_over_its_output() -> None:
    """Misconception: "only a prompt is computed in chunks". What it had said runs again, and leaves states again."""
    steps = GroupSteps(full(4), mamba(4), usable=60, block_size=4)
    steps.add("A", numbers(1, 6), max_tokens=20)
    for _ in range(9):
        steps.step()
    request = steps.scheduler.requests["A"]
    assert request.num_tokens == 14
    steps.scheduler._preempt(request, "the test wants it")
    steps.manager.reset_prefix_cache()
    assert [steps.step()["A"] for _ in range(2)] == [(0, 12), (12, 2)]


def test_retention_is_an_option_of_the_engine() -> None:
    """Surprise 14 in the scheduler. Misconception: "two requests suffice to share". Trace sched_hybrid_window."""
    hits = {}
    for interval in (None, 0):
        steps = GroupSteps(
            full(4), window(4, 8), usable=60, block_size=4, prefix_cache_retention_interval=interval
        )
        for name, base in {"A": 100, "B": 200}.items():
            steps.add(name, [*numbers(1, 12), *numbers(base, base + 12)], max_tokens=1)
            hits[interval, name] = steps.step()[name][0]
    assert hits == {(None, "A"): 0, (None, "B"): 12, (0, "A"): 0, (0, "B"): 0}
