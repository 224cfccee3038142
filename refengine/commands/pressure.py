"""What the demo does not do to a part: a pool so small that blocks are evicted and requests preempted.

With room to spare, a free queue in the wrong order, or a block that keeps its old hash, changes nothing. Here the
same requests run on the reader's parts and on ours, and every token must be equal.
"""

from __future__ import annotations

import random

from rich.console import Console

from refengine.errors import PartError
from refengine.llm import LLM
from refengine.outputs import RequestOutput
from refengine.sampling import SamplingParams
from refengine.trace.record import Recorder

NUM_BLOCKS, BLOCK_SIZE, NUM_PROMPTS = 24, 4, 16


def run_under_pressure(model: str, parts: str, console: Console) -> None:
    """Runs both and prints one line. Raises: PartError if a token differs, or what the part itself causes."""
    prompts = _prompts()
    mine, preemptions = _run(model, parts, prompts)
    reference, _ = _run(model, None, prompts)
    for got, expected in zip(mine, reference, strict=True):
        if got.token_ids != expected.token_ids:
            raise PartError(
                f"with your parts, on a pool of {NUM_BLOCKS} blocks, {got.request_id} gets the tokens "
                f"{got.token_ids} instead of {expected.token_ids}: it has read keys and values that are not its own"
            )
    console.print(
        f"Under pressure ({NUM_BLOCKS} blocks of {BLOCK_SIZE} tokens, {preemptions} preemptions): "
        f"all tokens of {len(prompts)} requests are those of the reference."
    )


def _prompts() -> list[list[int]]:
    """Prompts over a few shared beginnings, so that there is something to find and something to lose."""
    rng = random.Random(0)
    beginnings = [[rng.randrange(100, 600) for _ in range(16)] for _ in range(4)]
    return [
        rng.choice(beginnings)[: rng.randint(4, 16)]
        + [rng.randrange(100, 600) for _ in range(rng.randint(1, 9))]
        for _ in range(NUM_PROMPTS)
    ]


def _run(model: str, parts: str | None, prompts: list[list[int]]) -> tuple[list[RequestOutput], int]:
    """The same prompts twice over, so that the second time finds what the first has left. Also: preemptions."""
    recorder = Recorder()
    llm = LLM(model, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, parts=parts, observer=recorder)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    outputs: list[RequestOutput] = []
    for wave in (prompts, prompts[::-1]):
        ids = [f"request {len(outputs) + i}" for i in range(len(wave))]
        outputs += llm.generate(wave, params, request_ids=ids)
    return outputs, recorder.record.num_preemptions
