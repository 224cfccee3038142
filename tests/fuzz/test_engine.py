"""V1 under random scenarios: nothing wrong is ever read, and no answer depends on caching or scheduling."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz.play import verify
from tests.fuzz.scenarios import Scenario, scenarios

NUM_SCENARIOS = 320

# In how many scenarios each of these must have happened. A fuzz that stops evicting finds nothing, and passes.
AT_LEAST = {
    "hit": 120,
    "shared in the step": 25,
    "evicted": 120,
    "preempted": 50,
    "resumed": 40,
    "published share withdrawn": 5,
    "aborted: waiting": 20,
    "aborted: prefill": 20,
    "aborted: decode": 20,
    "aborted: preempted": 8,
    "aborted: finished": 20,
    "step failed": 20,
    "share taken back": 20,
    "finished: length": 150,
    "finished: stop": 100,
    "reset": 20,
    "reset refused": 40,
    "refused: not enough free blocks": 60,
    "refused: max_num_seqs requests are running": 30,
    "refused: not enough token budget for the whole prompt": 2,
}


@pytest.fixture(scope="module")
def happened() -> Counter[str]:
    """Verifies all scenarios. Returns: in how many of them each event happened."""
    counted: Counter[str] = Counter()

    @settings(
        max_examples=NUM_SCENARIOS,
        deadline=None,  # the time of a scenario says nothing on a busy machine
        derandomize=True,  # the same scenarios each time; `soak` is for other ones
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(scenarios())
    def verify_all(scenario: Scenario) -> None:
        events = verify(scenario)
        counted.update(event for event, count in events.items() if count)

    verify_all()
    return counted


def test_every_scenario_holds(happened: Counter[str]) -> None:
    assert happened["step"] >= NUM_SCENARIOS


def test_every_event_was_exercised(happened: Counter[str]) -> None:
    print(
        "\n".join(
            f"{count:5d} of {NUM_SCENARIOS} scenarios: {event}" for event, count in sorted(happened.items())
        )
    )
    missing = {
        event: (happened[event], least) for event, least in AT_LEAST.items() if happened[event] < least
    }
    assert not missing, f"too rare, (happened, at least): {missing}"
