"""`refengine bench router`: what it is worth to send a request where its prefix lies.

Several engines, each with a pool that holds only some of the prefixes in use. The same requests, in the same
order, once in turn and once by mirrors of the engines' events. Counted in tokens, so the result is the same on
every machine.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from refengine.llm import LLM
from refengine.router import POLICIES, Router
from refengine.sampling import SamplingParams
from refengine.v1.engine import EngineCore

BLOCK_SIZE = 8
SUFFIX_TOKENS, NEW_TOKENS = 8, 2
FIRST_TOKEN_ID, LAST_TOKEN_ID = 100, 600


@dataclass(frozen=True)
class RouterWorkload:
    """`num_prefixes` texts of `prefix_tokens` tokens; each request takes one of them and adds a few of its own."""

    num_engines: int = 3
    num_prefixes: int = 12
    prefix_tokens: int = 96
    num_requests: int = 120
    prefixes_per_engine: int = 5  # so many prefixes fit into one engine's pool beside a running request
    arrivals_per_step: int = 1
    seed: int = 0

    def prompts(self) -> list[list[int]]:
        """The prompts in order of arrival; some prefixes are asked for more often than others."""
        rng = random.Random(self.seed)

        def draw(length: int) -> list[int]:
            return [rng.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(length)]

        prefixes = [draw(self.prefix_tokens) for _ in range(self.num_prefixes)]
        weights = [1 / (rank + 1) ** 0.5 for rank in range(self.num_prefixes)]
        return [
            prefix + draw(SUFFIX_TOKENS) for prefix in rng.choices(prefixes, weights, k=self.num_requests)
        ]

    @property
    def num_blocks(self) -> int:
        """Blocks of each engine's pool, null block included."""
        per_prefix = self.prefix_tokens // BLOCK_SIZE
        return 1 + (self.prefixes_per_engine + 1) * per_prefix + 4 * self.arrivals_per_step


@dataclass(frozen=True)
class RouterResult:
    """One policy on one workload."""

    policy: str
    hit_rate: float
    computed_tokens: int  # prompt tokens that some engine had to run
    placed: list[int]  # requests per engine


def run_router_bench(workload: RouterWorkload, json_file: Path | None, console: Console) -> None:
    """Measures both policies and prints one row for each."""
    results = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("routing", total=len(POLICIES) * workload.num_requests)
        for policy in POLICIES:
            results.append(route(workload, policy, lambda: progress.advance(task)))
    table = Table(
        title=f"{workload.num_requests} requests over {workload.num_prefixes} prefixes of "
        f"{workload.prefix_tokens} tokens, {workload.num_engines} engines with room for "
        f"{workload.prefixes_per_engine} prefixes each",
        title_justify="left",
    )
    for name in ("policy", "hit rate", "prompt tokens computed", "requests per engine"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for result in results:
        placed = " ".join(map(str, result.placed))
        table.add_row(result.policy, f"{result.hit_rate:.0%}", str(result.computed_tokens), placed)
    console.print(table)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


def route(workload: RouterWorkload, policy: str, advance: Callable[[], None] = lambda: None) -> RouterResult:
    """Runs the workload under one policy, `arrivals_per_step` requests entering before each step."""
    router = Router([_engine(workload) for _ in range(workload.num_engines)], policy)
    placed = [0] * workload.num_engines
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    prompts = workload.prompts()
    for i, prompt in enumerate(prompts):
        placed[router.add_request(f"request {i}", prompt, params)] += 1
        if (i + 1) % workload.arrivals_per_step == 0:
            router.step()
        advance()
    router.run()
    total = sum(map(len, prompts))
    hits = sum(member.core.kv_cache_manager.stats.hits for member in router.members)
    return RouterResult(policy, router.hit_rate, total - hits, placed)


def _engine(workload: RouterWorkload) -> EngineCore:
    llm = LLM("tiny", block_size=BLOCK_SIZE, num_blocks=workload.num_blocks, enable_kv_events=True)
    assert isinstance(llm.engine, EngineCore)
    return llm.engine
