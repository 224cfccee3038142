"""The slot `sliding_window`: a reader's manager runs the engine, and its faults are named as its own."""

from __future__ import annotations

from typing import Any

import pytest

from refengine.config import EngineConfig
from refengine.errors import ConfigError, PartError
from refengine.model.config import SLIDING_ATTENTION
from refengine.parts import load_parts
from refengine.sampling import SamplingParams
from refengine.v1.engine import EngineCore
from refengine.v1.groups.full_attention import FullAttentionManager
from refengine.v1.groups.sliding_window import SlidingWindowManager
from tests.unit.helpers import numbers
from tests.unit.hybrid_models import make_hybrid

PROMPT = numbers(1, 30)


class Mine(SlidingWindowManager):
    """A right one that counts how often it was asked."""

    num_asked = 0

    def find_longest_cache_hit(self, *asked: Any) -> Any:
        """Looks as ours does."""
        Mine.num_asked += 1
        return super().find_longest_cache_hit(*asked)


class TooLong(SlidingWindowManager):
    """Forgets that a token has to be left to compute."""

    def find_longest_cache_hit(self, block_hashes: Any, max_length: int, drop_last: bool) -> Any:
        """All there is."""
        return [self.pool.null_block] * len(block_hashes)


class Takes(SlidingWindowManager):
    """Takes what it finds."""

    def find_longest_cache_hit(self, *asked: Any) -> Any:
        """Touches the blocks."""
        hits = super().find_longest_cache_hit(*asked)
        self.pool.touch(hits)
        return hits


def run(part: Any = None, prompt: list[int] = PROMPT) -> list[list[int]]:
    """The same prompt twice, on a model with a window of 6."""
    decoder = make_hybrid(layer_types=(SLIDING_ATTENTION,) * 2)
    parts = load_parts({"sliding_window": part} if part else None)
    engine = EngineCore(EngineConfig(block_size=4, num_blocks=30), decoder, parts=parts)
    answers: list[list[int]] = []
    for i in range(2):
        engine.add_request(str(i), prompt, SamplingParams(max_tokens=5, ignore_eos=True))
        answers.append([])
        while engine.has_unfinished_requests:
            for output in engine.step():
                answers[-1] += output.token_ids
    return answers


def test_the_engine_runs_on_it() -> None:
    Mine.num_asked = 0
    assert run(Mine) == run()
    assert Mine.num_asked == 2


def test_a_hit_of_the_whole_prompt_is_named() -> None:
    with pytest.raises(PartError, match=r"part sliding_window \(TooLong\).*more than the 27"):
        run(TooLong, PROMPT[:28])


def test_a_lookup_that_takes_blocks_is_named() -> None:
    with pytest.raises(PartError, match=r"part sliding_window \(Takes\).*a lookup must change nothing"):
        run(Takes)


def test_another_kind_of_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be a subclass of SlidingWindowManager"):
        load_parts({"sliding_window": FullAttentionManager})
