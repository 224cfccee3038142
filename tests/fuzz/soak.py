"""Scenarios for as long as one likes, other ones each time:

    OMP_NUM_THREADS=1 python -m tests.fuzz.soak --minutes 15 --seed 1

Prints how often each event happened. At the first scenario that goes wrong it prints a shrunk one, which can be
given to `tests.fuzz.play.verify` as it stands, and ends with status 1.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.play import verify
from tests.fuzz.scenarios import Scenario, scenarios

BATCH = 200  # scenarios between two looks at the clock


def soak(seed_value: int, mode: str, counted: Counter[str]) -> None:
    """Verifies one batch of scenarios. Mutates: `counted`. Raises whatever the first wrong one raises."""

    @seed(seed_value)
    @settings(
        max_examples=BATCH,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(scenarios())
    def verify_batch(scenario: Scenario) -> None:
        events = verify(scenario, mode=mode)
        counted.update(event for event, count in events.items() if count)
        counted["scenarios"] += 1

    verify_batch()


def main() -> int:
    """Returns: the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--seed", type=int, default=1, help="of the first batch; each later one is one more")
    parser.add_argument("--mode", default="fixed", choices=["fixed", "faithful"])
    arguments = parser.parse_args()
    counted: Counter[str] = Counter()
    until, seed_value = time.monotonic() + 60 * arguments.minutes, arguments.seed
    while time.monotonic() < until:
        try:
            soak(seed_value, arguments.mode, counted)
        except Exception:
            traceback.print_exc()
            print(f"seed {seed_value} is wrong; {counted['scenarios']} scenarios were right before")
            return 1
        print(f"seed {seed_value} is right, {counted['scenarios']} scenarios so far", flush=True)
        seed_value += 1
    print("\n".join(f"{count:6d} {event}" for event, count in sorted(counted.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
