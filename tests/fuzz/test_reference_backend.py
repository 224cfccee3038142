"""A share of the scenarios on the `reference` kernels: no answer depends on which kernels the engine runs on.

The other tests of this folder run on what a CPU gets, the `cpu` kernels.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings

from kernels import backend_for, dispatch
from tests.fuzz.play import verify
from tests.fuzz.scenarios import Scenario, scenarios
from tests.fuzz.scenarios_v0 import scenarios_v0
from tests.fuzz.shadowed_v0 import ShadowedV0

SHARE = settings(
    max_examples=24, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.fixture(scope="module", autouse=True)
def on_reference() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(dispatch.BY_DEVICE, "cpu", "reference")
        yield


def test_it_is_the_reference() -> None:
    assert backend_for("cpu") is backend_for("cpu", "reference")


@SHARE
@given(scenarios())
def test_v1(scenario: Scenario) -> None:
    verify(scenario)


@SHARE
@given(scenarios_v0())
def test_v0(scenario: Scenario) -> None:
    verify(scenario, ShadowedV0)
