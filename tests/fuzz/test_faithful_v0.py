"""vLLM 0.7.3 skips what was never computed, in several ways, and here is what comes of it: wrong keys, wrong tokens.

Each story runs on a real engine. In mode "faithful" the oracle has to name the read, and the request that trusted
the cache says something else than a recompute; in mode "fixed" there is nothing to report, and all say the same.
The defects that end in an exception are in tests/unit/test_v0_*.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from refengine.config import EngineConfig
from refengine.sampling import SamplingParams
from tests.fuzz import recompute
from tests.fuzz.scenarios import Add
from tests.fuzz.shadowed_v0 import ShadowedV0

HEAD, TAIL = (3, 3, 0, 2), (1, 1, 0, 3)
PREFIX = HEAD + TAIL
READS = {"read", "unwritten"}


@dataclass
class Story:
    """An engine that is told a story, whatever the oracle says of it."""

    mode: str
    options: dict[str, Any]
    requests: dict[str, Add] = field(default_factory=dict)
    said: dict[str, list[int]] = field(default_factory=dict)
    kinds: dict[str, set[str]] = field(default_factory=dict)  # by request, what the oracle found

    def __post_init__(self) -> None:
        options = {"enable_chunked_prefill": False} | self.options
        config = EngineConfig(engine="v0", mode=self.mode, block_size=4, check_integrity=True, **options)
        self.engine = ShadowedV0(config, recompute.model())

    def add(self, name: str, prompt: tuple[int, ...], max_tokens: int) -> None:
        self.requests[name], self.said[name] = Add(prompt, max_tokens=max_tokens), []
        self.engine.add(name, prompt, SamplingParams(max_tokens=max_tokens))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for output in self.engine.step():
                self.said[output.request_id] += output.token_ids
            for violation in self.engine.violations:
                self.kinds.setdefault(violation.request_id or "the cache", set()).add(violation.kind)
            self.engine.violations.clear()

    def finish(self) -> None:
        while self.engine.has_unfinished_requests:
            self.step()

    def wrong(self) -> set[str]:
        """The requests that say something else than a recompute, as far as they got."""
        return {
            name
            for name, add in self.requests.items()
            if self.said[name] != list(recompute.answer(add.prompt, add)[0])[: len(self.said[name])]
        }


def stale(mode: str) -> Story:
    """`sc_stale_cached_count`: "waits" is told of 8 cached tokens, and while it waits "grows" takes these blocks."""
    story = Story(mode, {"num_blocks": 6})
    story.add("earlier", PREFIX, 1)
    story.step()
    story.add("grows", (2, 0, 3, 1) * 3, 10)
    story.step()
    story.add("waits", (*PREFIX, 2, 2, 0, 1, 3), 3)
    story.finish()
    assert story.engine.tally.events["refused: not enough free blocks"]
    return story


def missing_head(mode: str) -> Story:
    """A head that is older than its tail, as in `bm_swap_breaks_prefix_order`; here by an abort, not by a swap.

    "short" shares the head with "whole", which runs one step later and leaves. Then "short" is aborted, and its
    own, earlier time is the last that the head is stamped with.
    """
    story = Story(mode, {"num_blocks": 5})
    story.add("short", (*HEAD, 1), 9)
    story.step(2)
    story.add("whole", PREFIX, 1)
    story.step()
    story.engine.abort("short")
    story.add("other", (2, 0, 3, 1) * 4, 1)
    story.step()
    story.add("late", (*PREFIX, 2, 0, 1), 4)
    story.finish()
    return story


def early(mode: str) -> Story:
    """`sc_chunked_marked_early`: "second" has the prompt of "first", of which two chunks have not been computed."""
    options = {
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 16,
        "max_num_partial_prefills": 2,
        "max_long_partial_prefills": 2,
    }
    story = Story(mode, {"num_blocks": 40, **options})
    prompt = PREFIX + (2, 2, 0, 1, 3, 0, 0, 2) + (1, 3, 3, 1) * 4
    story.add("first", prompt, 3)
    story.step()
    story.add("second", (*prompt, 1), 4)
    story.finish()
    return story


def abandoned(mode: str) -> Story:
    """An aborted prompt leaves blocks that are full of tokens and empty of keys: its user did not run to the end."""
    story = Story(mode, {"num_blocks": 40, "enable_chunked_prefill": True, "max_num_batched_tokens": 8})
    prompt = PREFIX + (2, 2, 0, 1) * 3
    story.add("leaves", prompt, 3)
    story.step()
    story.engine.abort("leaves")
    story.add("second", (*prompt, 1), 4)
    story.finish()
    return story


def returns(mode: str) -> Story:
    """Swapped out in the middle of its prompt: what it has not computed comes back over what "other" has."""
    options = {"enable_chunked_prefill": True, "max_num_batched_tokens": 8}
    story = Story(mode, {"num_blocks": 7, "num_cpu_blocks": 8, "preemption_mode": "swap", **options})
    story.add("grows", (2, 0, 3, 1, 1, 1), 4)
    story.step()
    story.add("returns", PREFIX + (2, 2, 0, 1) * 3, 3)
    story.step()
    story.add("other", (*PREFIX, 2, 2, 0, 1, 3), 8)
    story.finish()
    return story


STORIES: dict[Callable[[str], Story], str] = {  # and who trusts the cache
    stale: "waits",
    missing_head: "late",
    early: "second",
    abandoned: "second",
    returns: "other",
}


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_faithful_reads_what_is_not_there(story: Callable[[str], Story]) -> None:
    victim, told = STORIES[story], story("faithful")
    assert told.kinds[victim] & READS
    assert victim in told.wrong()


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_fixed_reads_its_own_prefix(story: Callable[[str], Story]) -> None:
    told = story("fixed")
    assert told.kinds == {}
    assert told.wrong() == set()


def swapped(mode: str, policy: str, num_cpu_blocks: int) -> Story:
    """Two requests that do not fit together, one of which has to go to the CPU."""
    options = {"num_blocks": 6, "num_cpu_blocks": num_cpu_blocks, "preemption_mode": "swap", "policy": policy}
    story = Story(mode, options)
    story.add("first", PREFIX, 10)
    story.add("last", (2, 0, 3, 1, 1, 1, 2), 10)
    return story


def test_swapped_out_and_in_again() -> None:
    for mode in ("faithful", "fixed"):
        story = swapped(mode, "fcfs", 8)
        story.finish()
        assert story.engine.tally.events["swapped in"]
        assert (story.kinds, story.wrong()) == ({}, set())


def test_fixed_survives_an_abort_of_a_swapped_request() -> None:
    story = swapped("fixed", "fcfs", 8)
    while story.engine.state("last") != "preempted":
        story.step()
    story.engine.abort("last")
    story.finish()
    assert (story.kinds, story.wrong(), story.engine.leftovers()) == ({}, set(), [])


def test_fixed_survives_a_full_cpu() -> None:
    story = swapped("fixed", "fcfs", 1)
    story.finish()
    assert story.engine.tally.events["preempted"] and not story.engine.tally.events["swapped out"]
    assert (story.kinds, story.wrong()) == ({}, set())


def test_fixed_lets_a_priority_interrupt_a_swapping_engine() -> None:
    story = Story(
        "fixed", {"num_blocks": 5, "num_cpu_blocks": 8, "preemption_mode": "swap", "policy": "priority"}
    )
    story.add("low", PREFIX + HEAD, 6)
    story.step(2)
    story.requests["high"], story.said["high"] = Add(TAIL * 3, max_tokens=4), []
    story.engine.add("high", TAIL * 3, SamplingParams(max_tokens=4), priority=-1)
    story.finish()
    assert story.engine.tally.events["preempted"]
    assert (story.kinds, story.wrong()) == ({}, set())
