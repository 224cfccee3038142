"""V0 engines with one mistake each, which the scenarios must run into and the oracle must name.

They run without `check_integrity`: here the oracle has to see the mistake by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

import refengine.v0.block
import refengine.v0.model_input
import refengine.v0.tracker
from refengine.v0.allocator import NaiveBlockAllocator
from refengine.v0.block import Block, ContentHash, content_hash
from refengine.v0.block_manager import BlockManager
from refengine.v0.budget import SchedulingBudget
from refengine.v0.device_allocator import CpuGpuBlockAllocator
from refengine.v0.model_input import ModelInputBuilder, SequenceInput
from refengine.v0.prefix_caching import BlockTracker, PrefixCachingBlockAllocator
from refengine.v0.sequence import Sequence as V0Sequence
from tests.fuzz import recompute
from tests.fuzz.play import Player, Wrong
from tests.fuzz.scenarios import Scenario
from tests.fuzz.scenarios_v0 import scenarios_v0
from tests.fuzz.shadowed_v0 import ShadowedV0

MOST_SCENARIOS = 150  # each mistake must be found in so many

Break = Callable[[pytest.MonkeyPatch], None]


def stale_name_on_reuse(patch: pytest.MonkeyPatch) -> None:
    """A block that is evicted can still be found by what it held."""

    def take_id(self: PrefixCachingBlockAllocator) -> int:
        if self.free_ids:
            block_id = NaiveBlockAllocator._take_id(self)
        else:
            block_id, _ = self.evictor.evict()
            self.ref_counts[block_id] = 1
        self.trackers[block_id] = BlockTracker()
        return block_id

    patch.setattr(PrefixCachingBlockAllocator, "_take_id", take_id)


def users_not_counted(patch: pytest.MonkeyPatch) -> None:
    """A hit on a block in use does not count as one more user; whoever ends first gives the block away."""
    join, release = PrefixCachingBlockAllocator._join, PrefixCachingBlockAllocator._release

    def join_uncounted(self: PrefixCachingBlockAllocator, block: Block) -> None:
        join(self, block)
        assert block.block_id is not None
        self.ref_counts[block.block_id] = 1

    def release_if_used(self: PrefixCachingBlockAllocator, block: Block) -> None:
        assert block.block_id is not None
        if self.ref_counts[block.block_id]:
            release(self, block)

    patch.setattr(PrefixCachingBlockAllocator, "_join", join_uncounted)
    patch.setattr(PrefixCachingBlockAllocator, "_release", release_if_used)


def cached_is_computed(patch: pytest.MonkeyPatch) -> None:
    """Whoever finds a block skips it, also in the step that fills it."""
    patch.setattr(BlockTracker.__init__, "__defaults__", (-1.0, True))


def a_prompt_is_computed_with_its_first_chunk(patch: pytest.MonkeyPatch) -> None:
    """As in vLLM 0.7.3."""

    def mark(self: BlockManager, seq: V0Sequence, token_chunk_size: int) -> list[int]:
        return self.allocator.gpu.mark_blocks_as_computed()

    patch.setattr(BlockManager, "mark_blocks_as_computed", mark)


def prefix_left_out_of_hash(patch: pytest.MonkeyPatch) -> None:
    """A block is called by its own tokens alone."""

    def without_parent(
        parent: ContentHash | None, token_ids: Sequence[int], extra: Any = None
    ) -> ContentHash:
        return content_hash(None, token_ids, extra)

    patch.setattr(refengine.v0.block, "content_hash", without_parent)
    patch.setattr(refengine.v0.tracker, "content_hash", without_parent)


def swaps_are_not_told(patch: pytest.MonkeyPatch) -> None:
    """Blocks change the device, and nobody copies them."""
    swap = CpuGpuBlockAllocator.swap

    def silent(self: CpuGpuBlockAllocator, *arguments: Any) -> list[tuple[int, int]]:
        swap(self, *arguments)
        return []

    patch.setattr(CpuGpuBlockAllocator, "swap", silent)


def unfinished_step_stays_published(patch: pytest.MonkeyPatch) -> None:
    """What was published for a step can be found although the step broke down."""
    patch.setattr(BlockManager, "forget_uncomputed", lambda self, seq: None)


def positions_start_at_zero(patch: pytest.MonkeyPatch) -> None:
    """The tokens behind a hit are computed as if they were the first."""
    cut = ModelInputBuilder.compute_for_prefix_cache_hit

    def from_zero(self: ModelInputBuilder, seq: SequenceInput) -> None:
        cut(self, seq)
        if seq.prefix_cache_hit:
            seq.input_positions = list(range(seq.query_len))

    patch.setattr(ModelInputBuilder, "compute_for_prefix_cache_hit", from_zero)


def slots_start_at_zero(patch: pytest.MonkeyPatch) -> None:
    """The tokens behind a hit are stored in its blocks."""
    slots = refengine.v0.model_input.compute_slot_mapping

    def from_zero(table: Sequence[int], size: int, context_len: int, seq_len: int, start: int) -> list[int]:
        return slots(table, size, 0, seq_len - context_len, start)

    patch.setattr(refengine.v0.model_input, "compute_slot_mapping", from_zero)


def everybody_fits(patch: pytest.MonkeyPatch) -> None:
    """Neither tokens nor seats are counted."""
    patch.setattr(SchedulingBudget, "can_schedule", lambda self, num_new_tokens, num_new_seqs: True)


MISTAKES: dict[Break, set[str]] = {
    stale_name_on_reuse: {"promise", "read"},
    users_not_counted: {"overwrite", "race", "read"},
    cached_is_computed: {"promise", "unwritten", "read"},
    a_prompt_is_computed_with_its_first_chunk: {"promise", "unwritten", "read"},
    prefix_left_out_of_hash: {"collision"},
    swaps_are_not_told: {"unwritten", "read"},
    unfinished_step_stays_published: {"promise"},
    positions_start_at_zero: {"input"},
    slots_start_at_zero: {"overwrite", "read", "unwritten"},
    everybody_fits: {"limit"},
}


class Found(Exception):
    """The mistake was named: no need to go on."""


def hunt(wanted: set[str]) -> None:
    """Plays scenarios. Raises Found as soon as the oracle reports one of the wanted kinds of violation."""

    @settings(
        max_examples=MOST_SCENARIOS,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(scenarios_v0())
    def play(scenario: Scenario) -> None:
        player = Player(scenario, recompute.prompts(scenario.requests), ShadowedV0, check_integrity=False)
        try:
            player.play()
        except Exception as error:  # an engine this wrong may also just break, which proves nothing
            if isinstance(error, Wrong) and error.kinds & wanted:
                raise Found from None

    play()


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_the_oracle_names_the_mistake(mistake: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    with pytest.raises(Found):
        hunt(MISTAKES[mistake])
