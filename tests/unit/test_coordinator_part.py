"""A reader's coordinator in the engine: it runs there, and the guard names what is wrong with its answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from refengine.config import EngineConfig
from refengine.errors import ConfigError, PartError
from refengine.hashing import BlockHash
from refengine.parts import load_parts
from refengine.v1.coordinator import GroupBlocks, HybridKVCacheCoordinator
from refengine.v1.engine import EngineCore
from tests.unit.hybrid_models import make_hybrid
from tests.unit.models import serve

Answer = tuple[GroupBlocks, int, int]
PROMPTS = [[*range(1, 15), *range(16 + 6 * i, 28 + 6 * i)] for i in range(3)]  # three whole blocks are shared


def run(coordinator: Any) -> tuple[dict[str, list[int]], int]:
    """The tokens of three prompts with a shared beginning, one after another, and the tokens found."""
    config = EngineConfig(block_size=4, num_blocks=65, check_integrity=True, hash_seed="0")
    parts = load_parts({"coordinator": coordinator} if coordinator else None)
    engine = EngineCore(config, make_hybrid(), parts=parts)
    tokens: dict[str, list[int]] = {}
    for i, prompt in enumerate(PROMPTS):
        tokens |= serve(engine, {f"r{i}": prompt}, max_tokens=2)
    return tokens, engine.kv_cache_manager.stats.hits


def changed(change: Callable[[Answer], Any]) -> type[HybridKVCacheCoordinator]:
    """A coordinator whose answers are changed."""

    class Mine(HybridKVCacheCoordinator):
        def find_longest_cache_hit(self, block_hashes: Sequence[BlockHash], max_length: int) -> Any:
            return change(super().find_longest_cache_hit(block_hashes, max_length))

    return Mine


def test_the_engine_runs_on_it() -> None:
    reference = run(None)
    assert reference[1] > 0, "the third prompt finds something"
    assert run(changed(lambda answer: answer)) == reference


def test_without_a_boundary_the_third_prompt_finds_less() -> None:
    assert run(changed(lambda answer: (answer[0], answer[1], 0)))[1] < run(None)[1]


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda answer: answer[:2], r"instead of \(blocks of each group, number of tokens, boundary\)"),
        (lambda answer: (list(answer[0]), *answer[1:]), "instead of a tuple with the blocks of each group"),
        (lambda answer: (answer[0][:1], *answer[1:]), "instead of a tuple with the blocks of each group"),
        (lambda answer: (answer[0], 400, 0), "it found 400 tokens"),
        (lambda answer: (answer[0], answer[1] + 4, 0), "group 0 has . blocks of 4 tokens in a hit of"),
    ],
)
def test_a_wrong_answer_is_named(change: Callable[[Answer], Any], said: str) -> None:
    with pytest.raises(PartError, match=rf"part coordinator \(Mine\): .*{said}"):
        run(changed(change))


def test_a_lookup_changes_nothing() -> None:
    class Takes(HybridKVCacheCoordinator):
        def find_longest_cache_hit(self, block_hashes: Sequence[BlockHash], max_length: int) -> Answer:
            answer = super().find_longest_cache_hit(block_hashes, max_length)
            for group, blocks in zip(self.groups, answer[0], strict=True):
                group.pool.touch(blocks)
            return answer

    with pytest.raises(PartError, match="a lookup must change nothing"):
        run(Takes)


def test_it_must_be_a_coordinator() -> None:
    with pytest.raises(ConfigError, match="must be a subclass of HybridKVCacheCoordinator"):
        load_parts({"coordinator": object})
