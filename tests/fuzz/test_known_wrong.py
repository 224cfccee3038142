"""Engines with one mistake each, which the scenarios must run into and the oracle must name.

They run without `check_integrity`: here the oracle has to see the mistake by itself, in what the model is given
and in what can be found, and not in the books that the engine keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

import refengine.hashing
from refengine.hashing import Adapter, BlockHasher
from refengine.v1.block import KVCacheBlock
from refengine.v1.block_pool import BlockPool
from refengine.v1.draft import Draft, Share
from refengine.v1.groups.base import GroupManager
from refengine.v1.input_batch import InputBatch
from refengine.v1.kv_cache_manager import KVCacheManager
from refengine.v1.request import Request
from refengine.v1.scheduler import Scheduler
from tests.fuzz import recompute
from tests.fuzz.play import Player, Wrong
from tests.fuzz.scenarios import Scenario, scenarios
from tests.fuzz.shadowed_v1 import ShadowedV1

MOST_SCENARIOS = 150  # each mistake must be found in so many

Break = Callable[[pytest.MonkeyPatch], None]


def stale_hash_on_reuse(patch: pytest.MonkeyPatch) -> None:
    """A block that is taken forgets its hash, but the index does not forget the block."""

    def evict(self: BlockPool, block: KVCacheBlock) -> None:
        block.block_hash = None

    patch.setattr(BlockPool, "_evict", evict)


def users_not_counted(patch: pytest.MonkeyPatch) -> None:
    """A hit on a block in use does not count as one more user; whoever ends first gives the block away."""
    touch = BlockPool.touch
    free_blocks = BlockPool.free_blocks

    def touch_only_free(self: BlockPool, blocks: Iterable[KVCacheBlock]) -> None:
        touch(self, [block for block in blocks if block.ref_count == 0])

    def free_if_used(self: BlockPool, blocks: Iterable[KVCacheBlock]) -> None:
        free_blocks(self, [block for block in blocks if block.ref_count > 0])

    patch.setattr(BlockPool, "touch", touch_only_free)
    patch.setattr(BlockPool, "free_blocks", free_if_used)


def hit_stays_in_the_free_queue(patch: pytest.MonkeyPatch) -> None:
    """A free block that is hit gets its user, but can still be handed out to somebody else."""

    def touch(self: BlockPool, blocks: Iterable[KVCacheBlock]) -> None:
        for block in blocks:
            block.ref_count += 1

    patch.setattr(BlockPool, "touch", touch)


def prefix_left_out_of_hash(patch: pytest.MonkeyPatch) -> None:
    """A block is called by its own tokens alone."""
    hash_block = BlockHasher.hash_block

    def without_parent(
        self: BlockHasher, parent: bytes | None, token_ids: Sequence[int], extra: Any = None
    ) -> bytes:
        return hash_block(self, None, token_ids, extra)

    patch.setattr(BlockHasher, "hash_block", without_parent)


def salt_left_out_of_hash(patch: pytest.MonkeyPatch) -> None:
    """Tenants share what they asked not to share."""
    extra_keys = refengine.hashing.extra_keys

    def without_salt(is_first_block: bool, adapter: Adapter | None, cache_salt: str | None) -> Any:
        return extra_keys(is_first_block, adapter, None)

    patch.setattr(refengine.hashing, "extra_keys", without_salt)


def partial_block_published(patch: pytest.MonkeyPatch) -> None:
    """A block can be found as soon as it is begun, if its tokens are known."""
    cache_blocks = GroupManager.cache_blocks

    def round_up(self: GroupManager, request: Request, num_tokens: int) -> None:
        num_begun = -(-num_tokens // self.block_size)
        cache_blocks(self, request, min(num_begun, len(request.block_hashes)) * self.block_size)

    patch.setattr(GroupManager, "cache_blocks", round_up)


def preempted_stays_computed(patch: pytest.MonkeyPatch) -> None:
    """A preempted request goes on where it stood, although its blocks are gone."""
    preempt, admit = Scheduler._preempt, Scheduler._admit

    def keep(self: Scheduler, victim: Request, *rest: Any, **named: Any) -> None:
        num_computed_tokens = victim.num_computed_tokens
        preempt(self, victim, *rest, **named)
        victim.kept = num_computed_tokens  # type: ignore[attr-defined]

    def go_on(self: Scheduler, request: Request, num_hit_tokens: int) -> None:
        admit(self, request, num_hit_tokens)
        kept = min(getattr(request, "kept", 0), request.num_tokens - 1)
        request.num_computed_tokens = max(num_hit_tokens, kept)

    patch.setattr(Scheduler, "_preempt", keep)
    patch.setattr(Scheduler, "_admit", go_on)


def unfinished_step_stays_published(patch: pytest.MonkeyPatch) -> None:
    """What was published for a step can be found although the step broke down."""
    patch.setattr(KVCacheManager, "unpublish_uncomputed", lambda self, request: None)


def budget_for_each_request(patch: pytest.MonkeyPatch) -> None:
    """Every request may use the whole token budget of the step."""

    def add(self: Draft, share: Share) -> None:
        self.shares[share.request.request_id] = share

    patch.setattr(Draft, "add", add)


def batch_mixes_up_blocks(patch: pytest.MonkeyPatch) -> None:
    """New blocks enter the persistent batch in the wrong order."""
    add_blocks = InputBatch.add_blocks

    def reverse(self: InputBatch, request_id: str, block_ids: Sequence[int]) -> None:
        add_blocks(self, request_id, block_ids[::-1])

    patch.setattr(InputBatch, "add_blocks", reverse)


MISTAKES: dict[Break, set[str]] = {
    stale_hash_on_reuse: {"promise", "read"},
    users_not_counted: {"overwrite", "race", "read"},
    hit_stays_in_the_free_queue: {"overwrite", "race", "read"},
    prefix_left_out_of_hash: {"collision"},
    salt_left_out_of_hash: {"collision"},
    partial_block_published: {"promise"},
    preempted_stays_computed: {"read", "unwritten"},
    unfinished_step_stays_published: {"promise"},
    budget_for_each_request: {"limit"},
    batch_mixes_up_blocks: {"table"},
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
    @given(scenarios())
    def play(scenario: Scenario) -> None:
        player = Player(scenario, recompute.prompts(scenario.requests), ShadowedV1, check_integrity=False)
        try:
            player.play()
        except (
            Exception
        ) as error:  # an engine this wrong may also just break, which proves nothing about the oracle
            if isinstance(error, Wrong) and error.kinds & wanted:
                raise Found from None

    play()


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_the_oracle_names_the_mistake(mistake: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    with pytest.raises(Found):
        hunt(MISTAKES[mistake])
