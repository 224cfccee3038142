"""vLLM 0.33.0 publishes what it then does not compute, and here is what comes of it.

A block is published when its request gets its share of a step. Under the priority policy a more important
request that finds no block takes them from the least important one, *after* that one got its share: the share is
withdrawn, but what was published for it stays in the index. Mostly nobody notices, since the false block is the
next to be handed out and is forgotten then. It survives if the share also began another block: that one carries
no hash, goes to the front of the free queue, and is handed out instead. The victim, once resumed, looks up its
own tokens, finds the false block, and reads keys and values that were never written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from refengine.config import EngineConfig
from refengine.sampling import SamplingParams
from tests.fuzz import recompute
from tests.fuzz.scenarios import Add
from tests.fuzz.shadowed_v1 import ShadowedV1

# Blocks of 2 tokens, 7 of them. Step 1: the victim is alone and computes 5 tokens. Step 2: 3 more, so that 4
# blocks are full, and the urgent request is admitted to the fifth. Step 3: the victim's next 3 tokens fill the
# sixth block and begin the seventh. The urgent request needs one, and takes the seventh from the victim.
SURVIVES = {"num_blocks": 8, "max_num_batched_tokens": 5, "long_prefill_token_threshold": 3}
# The same in steps of 4, 2 and 2 tokens: the share that is withdrawn begins no block, so the false one is taken.
IS_TAKEN = {"num_blocks": 6, "max_num_batched_tokens": 4, "long_prefill_token_threshold": 2}

VICTIM = Add((3, 3, 0, 2, 1, 1, 0, 3, 2, 2, 0), max_tokens=3)
SHORT_VICTIM = Add(VICTIM.prompt[:8], max_tokens=3)
URGENT = Add((0, 1), max_tokens=2)
EARLIER = Add((2, 0, 3, 1) * 3, max_tokens=3, cache_salt="yesterday")


@dataclass
class Run:
    """What came of it: tokens by request id, and the kinds of violations in each step."""

    token_ids: dict[str, list[int]] = field(default_factory=dict)
    kinds: list[set[str]] = field(default_factory=list)

    @property
    def all_kinds(self) -> set[str]:
        return set().union(*self.kinds)


def run(mode: str, options: dict[str, Any], victim: Add, after_another: bool = False) -> Run:
    """A victim, one step later an urgent request, and steps until both are done, whatever the oracle says.

    `after_another`: an earlier request has left something in every block.
    """
    config = EngineConfig(mode=mode, policy="priority", block_size=2, check_integrity=True, **options)
    engine, result = ShadowedV1(config, recompute.model()), Run()

    def add(request_id: str, request: Add, priority: int) -> None:
        params = SamplingParams(max_tokens=request.max_tokens)
        engine.add(request_id, request.prompt, params, priority=priority, cache_salt=request.cache_salt)
        result.token_ids[request_id] = []

    def step() -> None:
        for output in engine.step():
            result.token_ids[output.request_id] += output.token_ids
        result.kinds.append({violation.kind for violation in engine.violations})
        engine.violations.clear()

    if after_another:
        add("earlier", EARLIER, 0)
        while engine.has_unfinished_requests:
            step()
        result.kinds.clear()
    add("victim", victim, 1)
    step()
    add("urgent", URGENT, 0)
    while engine.has_unfinished_requests:
        step()
    assert engine.tally.events["published share withdrawn"] == 1
    return result


def truth(request: Add) -> list[int]:
    return list(recompute.answer(request.prompt, request)[0])


@pytest.mark.parametrize("after_another", [False, True])
def test_faithful_reads_what_was_never_written(after_another: bool) -> None:
    result = run("faithful", SURVIVES, VICTIM, after_another)
    assert result.kinds[:2] == [set(), set()]
    # The share is withdrawn, and a block can be found that holds nothing true. Then the victim resumes on it.
    assert result.kinds[2] == {"promise"}
    assert result.kinds[3] == {"promise", "read" if after_another else "unwritten"}
    assert result.token_ids["urgent"] == truth(URGENT)
    assert result.token_ids["victim"] != truth(VICTIM)


@pytest.mark.parametrize("after_another", [False, True])
def test_fixed_forgets_what_was_promised(after_another: bool) -> None:
    result = run("fixed", SURVIVES, VICTIM, after_another)
    assert result.all_kinds == set()
    assert result.token_ids["urgent"] == truth(URGENT)
    assert result.token_ids["victim"] == truth(VICTIM)


@pytest.mark.parametrize("mode", ["faithful", "fixed"])
def test_mostly_the_false_block_is_taken_at_once(mode: str) -> None:
    result = run(mode, IS_TAKEN, SHORT_VICTIM)
    assert result.all_kinds == set()
    assert result.token_ids["victim"] == truth(SHORT_VICTIM)
