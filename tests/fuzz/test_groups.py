"""Two and three cache groups against the oracle: whatever the scheduler decides, nobody reads a wrong block or state.

And the other way round: engines with one mistake each, which the scenarios must run into and the oracle must name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from refengine.config import EngineConfig
from refengine.hashing import BlockHash
from refengine.v1.block import KVCacheBlock
from refengine.v1.coordinator import HybridKVCacheCoordinator
from refengine.v1.groups.base import GroupManager
from refengine.v1.groups.mamba import MambaManager
from refengine.v1.groups.sliding_window import SlidingWindowManager
from refengine.v1.state_chunks import StateChunks
from tests.fuzz.play import Wrong
from tests.fuzz.scenarios_groups import MAX_MODEL_LEN, GroupScenario, group_lists, group_scenarios
from tests.fuzz.shadowed_groups import ShadowedGroups
from tests.unit.group_cache import GroupCache

MOST_STEPS = 600
MOST_SCENARIOS = 150  # each mistake must be found in so many

NUM_SCENARIOS = 250

# In how many scenarios each of these must have happened.
AT_LEAST = {
    "hit": 120,
    "preempted": 50,
    "resumed": 50,
    "share taken back": 60,
    "null block": 80,
    "reset": 5,
    "refused: its first state is written in this very step": 5,
    "refused: not enough token budget for a whole block": 2,
}


def play(scenario: GroupScenario) -> Counter[str]:
    """Raises Wrong at the first thing that is. Returns: what happened."""
    config = EngineConfig(block_size=scenario.groups[0].block_size, **scenario.options)
    engine = ShadowedGroups(config, scenario.groups, MAX_MODEL_LEN)
    todo = list(enumerate(scenario.arrivals))
    for at in range(MOST_STEPS):
        for i, arrival in [(i, arrival) for i, arrival in todo if arrival.at <= at]:
            engine.add(f"r{i}", arrival.prompt, arrival.max_tokens, arrival.priority, arrival.salt)
            todo.remove((i, arrival))
        for i, arrival in enumerate(scenario.arrivals):
            if arrival.aborted_at == at:
                engine.abort(f"r{i}")
        if at in scenario.resets:
            engine.events["reset"] += engine.manager.reset_prefix_cache()
        engine.step(fails=at in scenario.failing)
        if engine.violations:
            kinds = [violation.kind for violation in engine.violations]
            raise Wrong(kinds, "\n".join(map(str, engine.violations)))
        if not todo and not engine.scheduler.has_unfinished_requests:
            break
    else:
        raise Wrong(["endless"], f"not done after {MOST_STEPS} steps")
    if left := engine.leftovers():
        raise Wrong(["leftovers"], f"nothing is left to do, but blocks {left} are held")
    return engine.events


def test_nobody_reads_what_is_not_its_own() -> None:
    """And often enough there was something to get wrong: a fuzz that stops evicting finds nothing, and passes."""
    happened: Counter[str] = Counter()

    @settings(
        max_examples=NUM_SCENARIOS,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(group_scenarios())
    def play_all(scenario: GroupScenario) -> None:
        happened.update(event for event, count in play(scenario).items() if count)

    play_all()
    missing = {event: happened[event] for event, least in AT_LEAST.items() if happened[event] < least}
    assert not missing, f"too rare: {missing} of {dict(happened)}"


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(group_lists(), st.data())
def test_every_lookup_is_the_longest_that_the_rule_allows(groups: Any, data: st.DataObject) -> None:
    """A walk from the left, one from the right and a fixed point, against trying every length."""
    shapes = [
        {"kind": s.kind, "block_size": s.block_size, "window": s.window, "chunk": s.chunk} for s in groups
    ]
    cache = GroupCache(*shapes, usable=120)
    tokens = list(range(30))
    chunks = data.draw(st.lists(st.sampled_from([6, 12]), min_size=1, max_size=2))
    cache.begin("A", tokens, *chunks)
    held = [block for table in cache.tables("A") for block in table if block]
    cache.evict(*data.draw(st.lists(st.sampled_from(held), max_size=4)))
    length = data.draw(st.integers(1, 29))
    blocks, hit, boundary = cache.look(tokens[:length])
    request = cache.requests["A"]

    def can_serve(group: GroupManager, num_tokens: int) -> bool:
        hashes = group.spec.hashes(request.block_hashes)
        return all(group.cached_block(hashes[i]) is not None for i in group.needed_positions(num_tokens))

    coordinator = cache.manager.coordinator
    lengths = range(0, length, coordinator.alignment)
    assert hit == max(n for n in lengths if all(can_serve(group, n) for group in coordinator.groups))
    assert boundary == 0 or hit < boundary < length
    for group, ids in zip(coordinator.groups, blocks, strict=True):
        assert len(ids) == hit // group.block_size
        assert all(ids[i] for i in group.needed_positions(hit))


# Known-wrong engines

Break = Callable[[pytest.MonkeyPatch], None]


def window_ends_too_early(patch: pytest.MonkeyPatch) -> None:
    """Blocks return when one token too many has left the window."""
    skipped = SlidingWindowManager.num_skipped_tokens
    patch.setattr(SlidingWindowManager, "num_skipped_tokens", lambda self, n: skipped(self, n) + 1)


def window_hit_too_short(patch: pytest.MonkeyPatch) -> None:
    """A hit in a window group is served with one block less than the window needs."""
    need = SlidingWindowManager.num_blocks_for_hit.fget
    assert need is not None
    patch.setattr(SlidingWindowManager, "num_blocks_for_hit", property(lambda self: max(need(self) - 1, 1)))


def full_attention_decides(patch: pytest.MonkeyPatch) -> None:
    """The hit is what the first group finds; the others take what they have of it."""

    def first_only(self: Any, hashes: Sequence[BlockHash], max_length: int) -> Any:
        hits: dict[int, list[KVCacheBlock]] = {}
        length = min(self._ask(self.families[0], hashes, max_length, False, hits), max_length)
        null = self.groups[0].pool.null_block
        for family in self.families[1:]:
            self._ask(family, hashes, length, False, hits)
        blocks = tuple(
            (hits[group.spec.group_id] + [null] * length)[: length // group.block_size]
            for group in self.groups
        )
        return blocks, length, 0

    patch.setattr(HybridKVCacheCoordinator, "find_longest_cache_hit", first_only)


def state_used_in_its_step(patch: pytest.MonkeyPatch) -> None:
    """A state is taken for done when it is published."""
    patch.setattr(GroupManager, "is_ready", lambda self, hits: True)


def state_given_back_too_early(patch: pytest.MonkeyPatch) -> None:
    """The state that the next step starts from is no longer needed, as it seems."""
    patch.setattr(MambaManager, "num_skipped_tokens", lambda self, n: n)


def chunks_end_anywhere(patch: pytest.MonkeyPatch) -> None:
    """Chunks are cut by the budget alone, and what is published then is the state of some other prefix."""
    patch.setattr(StateChunks, "cut", lambda self, request, start, count: count)


def states_everywhere(patch: pytest.MonkeyPatch) -> None:
    """A Mamba group gets a block for every position, and publishes them all."""
    patch.setattr(MambaManager, "allocate_new_blocks", GroupManager.allocate_new_blocks)
    patch.setattr(MambaManager, "get_num_blocks_to_allocate", GroupManager.get_num_blocks_to_allocate)


def groups_share_blocks(patch: pytest.MonkeyPatch) -> None:
    """A hash is looked up in group 0, whoever asks."""
    patch.setattr(
        GroupManager, "cached_block", lambda self, h: (self.pool.get_cached_block(h, [0]) or [None])[0]
    )


MISTAKES: dict[Break, set[str]] = {
    window_ends_too_early: {"read", "unwritten"},
    window_hit_too_short: {"read", "unwritten"},
    full_attention_decides: {"read", "unwritten"},
    state_used_in_its_step: {"read", "unwritten"},
    state_given_back_too_early: {"read", "unwritten", "overwrite", "race"},
    chunks_end_anywhere: {"promise"},
    states_everywhere: {"promise"},
    groups_share_blocks: {"overwrite", "read", "unwritten"},
}


class Found(Exception):
    """The mistake was named: no need to go on."""


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_the_oracle_names_the_mistake(mistake: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    monkeypatch.setattr("refengine.v1.scheduler.Scheduler.check_integrity", lambda self: None)

    @settings(
        max_examples=MOST_SCENARIOS,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(group_scenarios())
    def hunt(scenario: GroupScenario) -> None:
        try:
            play(scenario)
        except Exception as error:  # an engine this wrong may also just break, which proves nothing
            if isinstance(error, Wrong) and error.kinds & MISTAKES[mistake]:
                raise Found from None

    with pytest.raises(Found):
        hunt()
