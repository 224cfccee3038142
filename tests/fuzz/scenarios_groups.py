"""Scenarios for several cache groups: which groups, which pool, who arrives when, what goes wrong.

Prompts are cut from three stems, so that prefixes are shared; pools are drawn around the least that one request
needs in all groups together, so that blocks are evicted and requests preempted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from refengine.v1.block_pool import BlockPool
from refengine.v1.coordinator import make_coordinator
from refengine.v1.groups.spec import CHUNKED_LOCAL, FULL_ATTENTION, MAMBA, SLIDING_WINDOW, GroupSpec
from tests.fuzz.scenarios import STEMS

MAX_MODEL_LEN = 48  # tokens
WINDOWS = (2, 3, 4, 5, 7, 8, 13)


@dataclass(frozen=True)
class Arrival:
    """A request that arrives before step `at`, and is aborted before step `aborted_at`, if that is not None."""

    at: int
    prompt: tuple[int, ...]
    max_tokens: int
    priority: int
    salt: str | None
    aborted_at: int | None


@dataclass(frozen=True)
class GroupScenario:
    """`failing`: steps in which the model breaks down. `resets`: steps before which the cache is to be forgotten."""

    groups: tuple[GroupSpec, ...]
    options: dict[str, Any]
    arrivals: tuple[Arrival, ...]
    failing: frozenset[int]
    resets: frozenset[int]


@st.composite
def group_lists(draw: st.DrawFn) -> tuple[GroupSpec, ...]:
    """Two or three groups that go together."""
    size = draw(st.sampled_from([1, 2, 2, 3, 4]))
    window = st.builds(lambda w: (SLIDING_WINDOW, size, w, None), st.sampled_from(WINDOWS))
    full, state = st.just((FULL_ATTENTION, size, None, None)), st.just((MAMBA, size, None, None))
    chunk = st.just((CHUNKED_LOCAL, size, None, 2 * size))
    other_sizes = st.sampled_from(
        [
            [(FULL_ATTENTION, 4, None, None), (SLIDING_WINDOW, 2, 5, None)],
            [(FULL_ATTENTION, 2, None, None), (SLIDING_WINDOW, 4, 7, None)],
            [(FULL_ATTENTION, 2, None, None), (FULL_ATTENTION, 4, None, None), (SLIDING_WINDOW, 2, 4, None)],
            [(SLIDING_WINDOW, 2, 4, None), (SLIDING_WINDOW, 6, 7, None)],
        ]
    )
    same_size = st.one_of(
        st.tuples(full, window),
        st.tuples(full, state),
        st.tuples(full, window, state),
        st.tuples(state, full),
        st.tuples(window, window),
        st.tuples(full, window, window),
        st.tuples(full, chunk),
        st.tuples(chunk, window, state),
    )
    shapes = draw(st.one_of(same_size, same_size, same_size, other_sizes))
    return tuple(GroupSpec(i, *shape) for i, shape in enumerate(shapes))


@st.composite
def group_scenarios(draw: st.DrawFn) -> GroupScenario:
    """Any scenario whose requests can all be served."""
    groups = draw(group_lists())
    budget = draw(st.sampled_from([2, 3, 5, 8, 8, 16, 64]))
    arrivals = tuple(draw(st.lists(_arrival(), min_size=3, max_size=9)))
    longest = max(len(arrival.prompt) + arrival.max_tokens for arrival in arrivals)
    managers = make_coordinator(groups, BlockPool(2)).groups
    needed = sum(manager.num_blocks_at_peak(longest, budget) for manager in managers)
    options = {
        "num_blocks": 1 + needed + draw(st.sampled_from([0, 0, 1, 2, 4, 9, 60])),
        "max_num_seqs": draw(st.sampled_from([1, 3, 6, 6, 6])),
        "max_num_batched_tokens": budget,
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 0, 3, 5])),
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "reserve_full_sequence": draw(st.booleans()),
        "watermark": draw(st.sampled_from([0.0, 0.0, 0.1])),
        "prefix_cache_retention_interval": draw(st.sampled_from([None, None, 0, 0, 12])),
    }
    if options["prefix_cache_retention_interval"] == 12 and any(
        spec.kind == CHUNKED_LOCAL for spec in groups
    ):
        options["prefix_cache_retention_interval"] = None
    steps = st.frozensets(st.integers(1, 20), max_size=2)
    return GroupScenario(groups, options, arrivals, draw(steps), draw(steps))


@st.composite
def _arrival(draw: st.DrawFn) -> Arrival:
    stem = draw(st.sampled_from(STEMS))[: draw(st.integers(0, 20))]
    tail = tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=6)))
    return Arrival(
        at=draw(st.sampled_from([0, 0, 1, 1, 2, 3, 5, 8, 12])),
        prompt=stem + tail,
        max_tokens=draw(st.sampled_from([1, 3, 8, 16])),
        priority=draw(st.integers(0, 2)),
        salt=draw(st.sampled_from([None, None, None, "salt"])),
        aborted_at=draw(st.sampled_from([None, None, None, None, 3, 8, 14])),
    )
