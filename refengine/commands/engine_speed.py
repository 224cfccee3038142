"""Tokens per second of both engine generations on one device: the last stage of `kernels.device_check`.

A module of its own because the kernels know nothing of the engine: the check starts it as a process, and reads
the rows that it writes. On a GPU each row also says whether the tokens are those of the CPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from refengine.llm import LLM
from refengine.sampling import SamplingParams

BATCHES = (1, 8, 32)
NEW_TOKENS = 64
Row = dict[str, Any]


def speed_rows(
    device: str, batches: tuple[int, ...] = BATCHES, new_tokens: int = NEW_TOKENS
) -> Iterator[Row]:
    """One row for each generation and batch size, with the tiny model; or one with "error" in place of them."""
    for engine in ("v0", "v1"):
        try:
            yield from _rows_of(engine, device, batches, new_tokens)
        except Exception as error:  # of one generation: the other is still worth having
            yield {"engine": engine, "error": f"{type(error).__name__}: {error}"}


def _rows_of(engine: str, device: str, batches: tuple[int, ...], new_tokens: int) -> Iterator[Row]:
    llm = LLM(engine=engine, device=device, max_num_seqs=max(batches))
    yardstick = LLM(engine=engine, device="cpu", max_num_seqs=max(batches))
    for batch in batches:
        prompts = [f"Q: What is in block {i}?\nA:" for i in range(batch)]
        expected, _ = _generate(yardstick, prompts, new_tokens)
        _generate(llm, prompts, new_tokens)  # compiles kernels, and captures graphs where there are any
        tokens, seconds = _generate(llm, prompts, new_tokens)
        graphs = llm.engine.graphs
        yield {
            "engine": engine,
            "batch": batch,
            "new_tokens": new_tokens,
            "seconds": seconds,
            "tokens_per_second": batch * new_tokens / seconds,
            "same_as_cpu": tokens == expected,
            "graphs": sorted(graphs.replays) if graphs else [],  # sizes that were recorded
        }
        if graphs and graphs.has_failed:
            raise RuntimeError("the engine ran, but a decode step could not be recorded as a CUDA graph")


def _generate(llm: LLM, prompts: list[str], new_tokens: int) -> tuple[list[list[int]], float]:
    """Every call starts with an empty prefix cache. Returns: the tokens of each prompt, and seconds."""
    llm.reset_prefix_cache()
    began = time.perf_counter()
    outputs = llm.generate(prompts, SamplingParams(max_tokens=new_tokens, ignore_eos=True))
    return [output.token_ids for output in outputs], time.perf_counter() - began


def main() -> None:
    """Writes each row, as a line of JSON, when it is there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", help="as the check calls it; there is one")
    parser.add_argument("--rows", type=Path, required=True, help="the file to write")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    with options.rows.open("w") as file:
        for row in speed_rows(options.device):
            print(json.dumps(row), file=file, flush=True)


if __name__ == "__main__":
    main()
