"""The same requests through V0, V1, and V0 without a cache: two generations that share no line say the same text.

Greedy sampling and float64, so that equal means equal. A workload is counted by what it made V0 do, so that the
hard cases are known to have been compared.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz import recompute
from tests.fuzz.play import MakeEngine, Played, Player
from tests.fuzz.scenarios import Add, Scenario, Step
from tests.fuzz.scenarios_v0 import scenarios_v0
from tests.fuzz.shadowed_v0 import ShadowedV0
from tests.fuzz.shadowed_v1 import ShadowedV1

NUM_WORKLOADS = 200

# Workloads in which V0, with its cache, did each of these.
AT_LEAST = {"hit": 100, "evicted": 60, "preempted": 40, "resumed": 25, "swapped out": 10, "swapped in": 10}
COMMON = (
    "block_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_chunked_prefill",
    "policy",
)


def workloads() -> st.SearchStrategy[Scenario]:
    """Requests that arrive between steps; nobody aborts, resets or fails, so that all engines see the same."""
    return scenarios_v0().map(
        lambda scenario: Scenario(
            scenario.options, tuple(op for op in scenario.operations if isinstance(op, Add | Step))
        )
    )


def for_v1(scenario: Scenario) -> Scenario:
    """The same workload with the options that V1 knows; its null block comes on top."""
    options = {name: scenario.options[name] for name in COMMON}
    return Scenario(
        {**options, "engine": "v1", "num_blocks": scenario.options["num_blocks"] + 1}, scenario.operations
    )


def play(scenario: Scenario, make_engine: MakeEngine, **options: Any) -> Played:
    return Player(scenario, recompute.prompts(scenario.requests), make_engine, **options).play()


@pytest.fixture(scope="module")
def happened() -> Counter[str]:
    """Compares all workloads. Returns: in how many of them V0 did what."""
    counted: Counter[str] = Counter()

    @settings(
        max_examples=NUM_WORKLOADS,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(workloads())
    def compare_all(scenario: Scenario) -> None:
        v0, v1 = play(scenario, ShadowedV0), play(for_v1(scenario), ShadowedV1)
        uncached = play(scenario, ShadowedV0, enable_prefix_caching=False)
        assert v0.token_ids == v1.token_ids == uncached.token_ids
        assert v0.finish_reason == v1.finish_reason == uncached.finish_reason
        assert not uncached.events["hit"]
        counted["workload"] += 1
        counted.update(event for event, count in v0.events.items() if count)

    compare_all()
    return counted


def test_all_engines_say_the_same(happened: Counter[str]) -> None:
    assert happened["workload"] >= NUM_WORKLOADS


def test_the_hard_cases_were_compared(happened: Counter[str]) -> None:
    print("\n".join(f"{count:5d} workloads: {event}" for event, count in sorted(happened.items())))
    missing = {
        event: (happened[event], least) for event, least in AT_LEAST.items() if happened[event] < least
    }
    assert not missing, f"too rare, (happened, at least): {missing}"
