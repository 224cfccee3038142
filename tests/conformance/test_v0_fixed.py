"""V0's repaired mode differs from vLLM 0.7.3 exactly where a defect shows, and every such place has a name.

A defect does not only show in the trace that was recorded for it: random traffic meets the stale count often,
which says how real it is. Whatever is not listed here must be equal in both modes.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.conformance.replay import Difference, Trace, load, replay
from tests.conformance.v0_block_manager import BlockManagerDriver
from tests.conformance.v0_scheduler import SchedulerDriver

TRACES = Path(__file__).parent / "traces" / "v0"

STALE = "the cached count of a waiting sequence is kept although its prefix was evicted since"
BISECT = "a bisection over the cache reports a missing first block as found"
EARLY = "all blocks of a prompt count as computed after its first chunk"
WRONG_DEVICE = "freeing a swapped-out sequence asks the GPU about CPU blocks"
UNQUERIED = "freeing a sequence that was never looked up fails"
EMPTY_BLOCK = "can_swap_out overlooks an empty lookahead block"
LOST_SWAP = "a group swapped out for a priority waits as if it had no blocks, and its copies are dropped"
NO_CPU = "no room on the CPU ends the engine"

# trace -> (operation, key, defect)
NAMED = {
    "bm_free_swapped_raises": (10, "raises", WRONG_DEVICE),
    "bm_free_unqueried_raises": (3, "raises", UNQUERIED),
    "bm_random_00_bs2_g12_cache": (257, "num_cached_tokens", STALE),
    "bm_random_01_bs2_g12_naive": (265, "result", EMPTY_BLOCK),
    "bm_random_02_bs4_g16_cache": (239, "computed_block_ids", EARLY),
    "bm_stale_cached_count": (22, "num_cached_tokens", STALE),
    "bm_swap_breaks_prefix_order": (30, "num_cached_tokens", BISECT),
    "sc_abort_swapped_cache": (4, "raises", WRONG_DEVICE),
    "sc_chunked_marked_early": (3, "scheduled", EARLY),
    "sc_priority_swap": (3, "preempted", LOST_SWAP),
    "sc_random_00_default_cache": (7, "scheduled", STALE),
    "sc_random_02_pressure_cache": (24, "scheduled", STALE),
    "sc_random_04_chunked_cache": (11, "scheduled", STALE),
    "sc_random_06_chunked_pressure": (22, "scheduled", STALE),
    "sc_random_08_priority": (23, "scheduled", STALE),
    "sc_random_09_bs16": (26, "scheduled", STALE),
    "sc_random_10_abort": (20, "scheduled", STALE),
    "sc_recompute_cache": (15, "scheduled", STALE),
    "sc_stale_cached_count": (17, "scheduled", STALE),
    "sc_swap_no_cpu": (3, "raises", NO_CPU),
}


def difference(trace: Trace, mode: str) -> Difference | None:
    driver = BlockManagerDriver if trace.kind == "v0.block_manager" else SchedulerDriver
    return replay(trace, partial(driver, mode=mode))


def traces() -> list[Trace]:
    found = [load(path) for path in sorted(TRACES.glob("*.json"))]
    return [trace for trace in found if trace.kind != "v0.model_input"]


@pytest.mark.parametrize("trace", traces(), ids=lambda trace: trace.name)
def test_repaired_mode_differs_only_at_named_defects(trace: Trace) -> None:
    found = difference(trace, "fixed")
    place = None if found is None else (found.op_index, found.key)
    expected = NAMED.get(trace.name)
    assert place == (expected and expected[:2]), found


def test_every_named_trace_exists() -> None:
    """A renamed trace must not turn its line into a test of nothing."""
    assert set(NAMED) <= {trace.name for trace in traces()}
