"""The budget of a step: tokens, seats, and the turns of prompts that are computed in parts."""

from __future__ import annotations

import pytest

from refengine.config import EngineConfig
from refengine.v0.budget import PartialPrefills, SchedulingBudget
from refengine.v0.sequence import Sequence, SequenceGroup
from tests.unit.helpers import numbers


def group(name: str, num_tokens: int, computed: int = 0) -> SequenceGroup:
    seq = Sequence(hash(name), numbers(1, num_tokens))
    seq.update_num_computed_tokens(computed)
    return SequenceGroup(name, [seq])


def test_tokens_and_seats_both_have_to_fit() -> None:
    budget = SchedulingBudget(token_budget=10, max_num_seqs=2)
    assert budget.can_schedule(10, 2)
    assert not budget.can_schedule(11, 1)
    assert not budget.can_schedule(1, 3)
    budget.add_tokens("A", 6)
    budget.add_seqs("A", 1)
    assert (budget.num_batched_tokens, budget.remaining_tokens) == (6, 4)
    assert budget.can_schedule(4, 1)
    assert not budget.can_schedule(5, 1)


def test_a_request_is_counted_once() -> None:
    """Misconception: "each call spends". A running group takes its seat before it is looked at again."""
    budget = SchedulingBudget(10, 2)
    for _ in range(2):
        budget.add_tokens("A", 3, 2)
        budget.add_seqs("A", 1)
    assert (budget.num_batched_tokens, budget.num_cached_tokens) == (3, 2)
    assert budget.can_schedule(7, 1)


def test_cached_tokens_are_reported_and_cost_nothing() -> None:
    """Misconception: "a step has room for so many tokens". For so many that it has to compute."""
    budget = SchedulingBudget(10, 2)
    budget.add_tokens("A", 1, 31)
    assert (budget.remaining_tokens, budget.num_cached_tokens) == (9, 31)


def test_what_a_victim_had_spent_comes_back() -> None:
    budget = SchedulingBudget(10, 1)
    budget.add_tokens("A", 10)
    budget.add_seqs("A", 1)
    budget.give_back("A")
    assert budget.can_schedule(10, 1)
    budget.give_back("never there")


def config(partial: int, long: int = 1, threshold: int = 0) -> EngineConfig:
    return EngineConfig(
        engine="v0",
        max_num_batched_tokens=24,
        max_num_partial_prefills=partial,
        max_long_partial_prefills=long,
        long_prefill_token_threshold=threshold,
    )


@pytest.mark.parametrize(
    ("partial", "num_waiting", "share"), [(1, 3, 24), (2, 3, 12), (3, 2, 12), (3, 0, 24)]
)
def test_prompts_share_the_tokens_of_a_step(partial: int, num_waiting: int, share: int) -> None:
    waiting = [group(f"w{i}", 50) for i in range(num_waiting)]
    plan = PartialPrefills.count([], waiting, config(partial, long=partial))
    assert plan.token_share == share


def test_running_prompts_come_first_and_decodes_take_no_turn() -> None:
    running = [group("prompt", 50, 8), group("decode", 50, 50)]
    plan = PartialPrefills.count(running, [group("w", 50)], config(2, long=2))
    assert (plan.schedulable, plan.num_long) == (2, 1)


def test_long_prompts_have_fewer_turns() -> None:
    plan = PartialPrefills.count(
        [], [group("long", 50), group("longer", 60), group("short", 5)], config(3, 1, 10)
    )
    assert plan.schedulable == 2, "the second long one has no turn"
    assert plan.can_schedule(group("long", 50))
    plan.add(group("long", 50))
    assert not plan.can_schedule(group("longer", 60))
    assert plan.can_schedule(group("short", 5))


def test_one_turn_is_for_anybody() -> None:
    """With a single turn there is nobody to keep it for, so its length does not matter."""
    plan = PartialPrefills.count([group("long", 50, 8)], [], config(1, 1, 10))
    assert plan.num_long == 1
    assert plan.can_schedule(group("longer", 60))
