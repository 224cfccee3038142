"""`python -m tests.conformance [DIR_OR_FILE ...]`: does this engine decide what vLLM decided?

Replays every trace found below the given folders and files (default: the ones recorded from vLLM in
`tests/conformance/traces`), whatever they are called. The exit status is 0 only if at least one trace was
compared and every compared one is equal; traces of a kind or configuration that the engine does not carry
yet are counted apart.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.conformance.replay import Check, Difference, NotSupported, Trace, replay, run

TRACES = Path(__file__).parent / "traces"


def _attribute(module: str, name: str) -> Any:
    """Import late: a part of the engine that is not written yet must not stop the others' traces."""
    if find_spec(module) is None:
        raise NotSupported(f"{module} does not exist yet")
    return getattr(import_module(module), name)


def driven(module: str, driver: str) -> Check:
    """A check that replays the operations on the driver class of that name."""

    def check(trace: Trace) -> Difference | None:
        return replay(trace, _attribute(module, driver))

    return check


def checked(module: str, function: str) -> Check:
    """A check that is a function of its own, for traces without operations."""

    def check(trace: Trace) -> Difference | None:
        difference: Difference | None = _attribute(module, function)(trace)
        return difference

    return check


CHECKS: dict[str, Check] = {
    "kv_manager": driven("tests.conformance.kv_manager", "KVManagerDriver"),
    "scheduler": driven("tests.conformance.scheduler", "SchedulerDriver"),
    "hashes": checked("tests.conformance.hashes", "check"),
    "v0.block_manager": driven("tests.conformance.v0_block_manager", "BlockManagerDriver"),
    "v0.model_input": driven("tests.conformance.v0_model_input", "ModelInputDriver"),
    "v0.scheduler": driven("tests.conformance.v0_scheduler", "SchedulerDriver"),
}


def main(arguments: Sequence[str]) -> int:
    """Replay and report. Returns the exit status."""
    return run(arguments or [TRACES], CHECKS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
