"""`refengine bench engine`: this engine beside `transformers`, interleaved in one process.

Beside its `generate`, or beside its continuous batching, which is nearer to what an engine does and much slower.

Ratios within one run are the only numbers that mean anything on a shared machine. So both engines run the same
random 4M-parameter model, in fp32, on one thread, turn by turn; CPU seconds are counted, not wall time; the
fastest round counts; and before anything is timed both must have produced the same tokens.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from refengine.config import one_of
from refengine.errors import ConfigError
from refengine.llm import LLM
from refengine.sampling import SamplingParams

VOCAB_SIZE = 512
PROMPT_TOKENS, LONG_PROMPT_TOKENS = 32, 512
SHARED_TOKENS, OWN_TOKENS, SHARING_REQUESTS, SHARING_NEW_TOKENS = 384, 16, 16, 8
CONTINUOUS_PAGE, CONTINUOUS_BLOCKS = 16, 1024  # of transformers' continuous batching

Batch = list[list[int]]
Generate = Callable[[Batch, int], Batch]  # prompts, new tokens -> new tokens of each


@dataclass(frozen=True)
class Workload:
    """Prompts of equal length, and how many tokens to add to each."""

    name: str
    prompts: Batch
    new_tokens: int


@dataclass(frozen=True)
class Result:
    """CPU seconds of the fastest round. `ratio` above 1: this engine is faster."""

    workload: str
    ours_seconds: float
    theirs_seconds: float

    @property
    def ratio(self) -> float:
        return self.theirs_seconds / self.ours_seconds


def run_bench(against: str, rounds: int, new_tokens: int, json_file: Path | None, console: Console) -> None:
    """Measures and prints one row per workload. Raises: ConfigError if the other engine is not to be had."""
    one_of("against", against, tuple(AGAINST))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        theirs = AGAINST[against](_transformers(Path(directory)))
        ours = _ours(directory)
    workloads = _workloads(new_tokens)
    results = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(workloads) * (rounds + 1))
        for workload in workloads:
            results.append(_measure(workload, ours, theirs, rounds, lambda: progress.advance(task)))
    table = Table(
        title=f"CPU time against {against}, one thread, fastest of {rounds} rounds", title_justify="left"
    )
    for name in ("workload", "ours", against, "speed of ours"):
        table.add_column(name, justify="left" if name == "workload" else "right")
    for r in results:
        table.add_row(r.workload, f"{r.ours_seconds:.3f} s", f"{r.theirs_seconds:.3f} s", f"{r.ratio:.2f}x")
    console.print(table)
    console.print("Both engines gave the same tokens for every workload.")
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(r) | {"ratio": r.ratio} for r in results], indent=1) + "\n")


def _measure(
    workload: Workload, ours: Generate, theirs: Generate, rounds: int, advance: Callable[[], None]
) -> Result:
    """One round to check and warm up, then `rounds` timed ones, turn by turn."""
    if ours(workload.prompts, workload.new_tokens) != theirs(workload.prompts, workload.new_tokens):
        raise ConfigError(f"the engines disagree on {workload.name}; there is nothing to compare")
    advance()
    best = {"ours": float("inf"), "theirs": float("inf")}
    for _ in range(rounds):
        for name, generate in (("ours", ours), ("theirs", theirs)):
            began = time.process_time()
            generate(workload.prompts, workload.new_tokens)
            best[name] = min(best[name], time.process_time() - began)
        advance()
    return Result(workload.name, best["ours"], best["theirs"])


def _workloads(new_tokens: int) -> list[Workload]:
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, length: int) -> Batch:
        return torch.randint(3, VOCAB_SIZE, (rows, length), generator=generator).tolist()

    prefill = Workload(f"prefill, {LONG_PROMPT_TOKENS} tokens", draw(1, LONG_PROMPT_TOKENS), 1)
    decode = [Workload(f"decode, batch {n}", draw(n, PROMPT_TOKENS), new_tokens) for n in (1, 8, 32)]
    shared = draw(1, SHARED_TOKENS)[0]
    prompts = [shared + own for own in draw(SHARING_REQUESTS, OWN_TOKENS)]
    name = f"{SHARING_REQUESTS} requests, {SHARED_TOKENS} tokens shared"
    return [prefill, *decode, Workload(name, prompts, SHARING_NEW_TOKENS)]


def _transformers(directory: Path) -> Any:
    """Makes the random model and saves it for our engine. Mutates: the directory."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        from transformers import Qwen3Config, Qwen3ForCausalLM
        from transformers.utils.logging import disable_progress_bar
    except ImportError:
        raise ConfigError("transformers is not installed; pip install -e '.[dev]'") from None
    disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        initializer_range=0.2,  # far-apart logits: rounding must not decide which token is best
    )
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(directory)
    return model


def _generate(model: Any) -> Generate:
    """`model.generate`: one batch of equal lengths, from the first token to the last."""

    def generate(prompts: Batch, new_tokens: int) -> Batch:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **_greedy(new_tokens))
        return out[:, ids.shape[1] :].tolist()  # type: ignore[no-any-return]

    return generate


def _generate_batch(model: Any) -> Generate:
    """`model.generate_batch`: continuous batching over pages, with shared prefixes."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    pages = ContinuousBatchingConfig(
        page_size=CONTINUOUS_PAGE, num_blocks=CONTINUOUS_BLOCKS, max_batch_tokens=512
    )

    def generate(prompts: Batch, new_tokens: int) -> Batch:
        config = GenerationConfig(**_greedy(new_tokens), eos_token_id=-1)
        outputs = model.generate_batch(prompts, generation_config=config, continuous_batching_config=pages)
        by_prompt = {tuple(output.prompt_ids): output.generated_tokens for output in outputs.values()}
        return [list(by_prompt[tuple(prompt)]) for prompt in prompts]

    return generate


def _greedy(new_tokens: int) -> dict[str, Any]:
    return {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}


AGAINST = {"transformers": _generate, "transformers-continuous": _generate_batch}


def _ours(directory: str) -> Generate:
    llm = LLM(directory, max_num_seqs=64, max_num_batched_tokens=8192)

    def generate(prompts: Batch, new_tokens: int) -> Batch:
        # Every round starts cold: what is shared is shared within the workload, not with the round before.
        llm.reset_prefix_cache()
        outputs = llm.generate(prompts, SamplingParams(max_tokens=new_tokens, ignore_eos=True))
        return [output.token_ids for output in outputs]

    return generate
