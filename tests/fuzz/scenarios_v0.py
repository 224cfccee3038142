"""Scenarios for V0: the same callers, and the options that only V0 has.

V0 knows no salts and announces nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.scenarios import MAX_MODEL_LEN, Add, Operation, Scenario, scenarios

BLOCK_SIZES = [1, 2, 2, 3, 3, 4, 4, 16]


@st.composite
def scenarios_v0(draw: st.DrawFn, max_operations: int = 18) -> Scenario:
    """Any scenario whose requests can all be served by V0."""
    scenario = draw(scenarios(max_operations))
    operations: tuple[Operation, ...] = tuple(
        replace(op, cache_salt=None, report_full=False) if isinstance(op, Add) else op
        for op in scenario.operations
    )
    longest: list[int] = []  # by request, the tokens that it can have in the end
    for add in scenario.requests.values():
        before = 0 if add.follows is None else longest[add.follows]
        longest.append(len(add.prompt) + add.max_tokens + before)
    options = draw(_options(max(longest)))
    return Scenario(options | {"policy": scenario.options["policy"]}, operations)


@st.composite
def _options(draw: st.DrawFn, longest: int) -> dict[str, Any]:
    """`longest`: tokens that one request can have in all."""
    block_size = draw(st.sampled_from(BLOCK_SIZES))
    needed = -(-(longest - 1) // block_size)  # the last token is sampled, never computed
    num_blocks = max(needed + draw(st.sampled_from([0, 0, 0, 1, 2, 4, 40])), 2)
    chunked = draw(st.booleans())
    swaps = draw(st.sampled_from([True, True, False]))
    parts = draw(st.sampled_from([1, 1, 2, 3])) if chunked else 1
    # A prompt's part of the budget is cut to whole blocks; without one it would never start.
    least = parts * block_size
    budget = draw(st.sampled_from([least, least + 1, least + 3, 2 * least, 64])) if chunked else MAX_MODEL_LEN
    return {
        "engine": "v0",
        "block_size": block_size,
        "num_blocks": num_blocks,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": draw(st.sampled_from([1, 3, 4, 5, 6])),
        "max_num_batched_tokens": max(budget, least),
        "enable_chunked_prefill": chunked,
        "preemption_mode": "swap" if swaps else draw(st.sampled_from([None, "recompute"])),
        "num_cpu_blocks": draw(st.sampled_from([0, needed, 4 * needed, 4 * needed])) if swaps else 0,
        "max_num_partial_prefills": parts,
        "max_long_partial_prefills": draw(st.integers(1, parts)),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 3, 8])),
        "watermark": min(draw(st.sampled_from([0.0, 0.0, 0.01, 0.1])), (num_blocks - needed) / num_blocks),
    }
