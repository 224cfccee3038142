"""V0 under random scenarios, repaired: nothing wrong is ever read, and no answer depends on caching or scheduling."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz.play import verify
from tests.fuzz.scenarios import Scenario
from tests.fuzz.scenarios_v0 import scenarios_v0
from tests.fuzz.shadowed_v0 import ShadowedV0

NUM_SCENARIOS = 200

# In how many scenarios each of these must have happened. A fuzz that stops evicting finds nothing, and passes.
AT_LEAST = {
    "hit": 100,
    "shared in the step": 20,
    "evicted": 80,
    "preempted": 40,
    "resumed": 40,
    "swapped out": 10,
    "swapped in": 10,
    "aborted: waiting": 15,
    "aborted: prefill": 2,
    "aborted: decode": 15,
    "aborted: preempted": 8,
    "aborted: finished": 15,
    "step failed": 30,
    "share taken back": 30,
    "finished: length": 100,
    "finished: stop": 80,
    "reset": 15,
    "reset refused": 20,
    "refused: not enough free blocks": 60,
    "refused: not enough token budget or seats": 30,
}


@pytest.fixture(scope="module")
def happened() -> Counter[str]:
    """Verifies all scenarios. Returns: in how many of them each event happened."""
    counted: Counter[str] = Counter()

    @settings(
        max_examples=NUM_SCENARIOS,
        deadline=None,  # the time of a scenario says nothing on a busy machine
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(scenarios_v0())
    def verify_all(scenario: Scenario) -> None:
        events = verify(scenario, ShadowedV0)
        counted.update(event for event, count in events.items() if count)

    verify_all()
    return counted


def test_every_scenario_holds(happened: Counter[str]) -> None:
    assert happened["step"] >= NUM_SCENARIOS


def test_every_event_was_exercised(happened: Counter[str]) -> None:
    print("\n".join(f"{count:5d} scenarios: {event}" for event, count in sorted(happened.items())))
    missing = {
        event: (happened[event], least) for event, least in AT_LEAST.items() if happened[event] < least
    }
    assert not missing, f"too rare, (happened, at least): {missing}"
