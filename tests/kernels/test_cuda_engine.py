"""The engine on the CUDA kernels, with no GPU: the tokens are those of the reference."""

from __future__ import annotations

from typing import Literal

import pytest

from refengine import LLM, SamplingParams


@pytest.mark.parametrize("engine", ["v0", "v1"])
def test_a_short_run_on_the_interpreter(engine: Literal["v0", "v1"]) -> None:
    """Two prompts of different lengths, prefill and decode, over more than one block."""
    prompts, params = ["a b", "the cat sat on"], SamplingParams(max_tokens=3)
    tokens = {}
    for backend in ("reference", "interpreter"):
        llm = LLM("tiny", engine=engine, backend=backend, block_size=8, num_blocks=16)
        tokens[backend] = [output.token_ids for output in llm.generate(prompts, params)]
    assert tokens["interpreter"] == tokens["reference"]
