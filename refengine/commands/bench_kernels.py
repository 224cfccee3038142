"""`refengine bench kernels`: attention of a decode step, beside PyTorch's on the same numbers.

A decode step reads every key and value once, so what counts is how near it comes to the speed of reading memory.
Three yardsticks run turn by turn with it, in one process: gathering the pages and then attending, as an engine
without a kernel has to; PyTorch's attention over a cache that already lies in one piece; and the same with the
query heads that share a KV head folded into one matrix, the fastest that PyTorch has to offer. The last two have no
pages to follow, so being as fast as they are is much.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from kernels import backend_for
from refengine.config import one_of

NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE = 8, 2, 16
NUM_SEQS, HEAD_DIMS, CONTEXTS = (8, 32), (64, 128), (512, 1024, 2048, 4096)
TOLERANCE = 1e-5  # before anything is timed, the answers must agree

Work = Callable[[], object]


@dataclass(frozen=True)
class Point:
    """Sequences of equal length, one new token each."""

    num_seqs: int
    head_dim: int
    context: int  # tokens in each sequence

    @property
    def num_bytes(self) -> int:
        """Keys and values that have to be read, float32."""
        return 2 * 4 * self.num_seqs * self.context * NUM_KV_HEADS * self.head_dim

    def __str__(self) -> str:
        return f"{self.num_seqs} x {self.context} x {self.head_dim}"


@dataclass(frozen=True)
class Result:
    """CPU seconds of the fastest round of each contestant. A ratio above 1: ours is faster."""

    point: Point
    seconds: dict[str, float] = field(default_factory=dict)  # "ours", "gather", "whole", "folded", "read"

    def ratio(self, name: str) -> float:
        """How many times as fast as that contestant ours is."""
        return self.seconds[name] / self.seconds["ours"]

    @property
    def bytes_per_second(self) -> float:
        return self.point.num_bytes / self.seconds["ours"]


def run_bench(device: str, quick: bool, rounds: int, json_file: Path | None, console: Console) -> None:
    """Measures and prints one row per point. On a GPU `rounds` has no say: there the median of a fixed number counts.

    Raises: ConfigError for a device that is not known here.
    """
    one_of("device", device, ("cpu", "cuda"))
    if device == "cuda":
        from refengine.commands.bench_gpu import run_gpu_bench  # and with it the CUDA kernels

        run_gpu_bench(quick, json_file, console)
        return
    torch.set_num_threads(1)
    results = []
    with Progress(console=console, transient=True) as progress, torch.inference_mode():
        points = points_to_measure(quick)
        task = progress.add_task("measuring", total=len(points))
        for point in points:
            progress.update(task, description=f"measuring {point}")
            results.append(measure(point, rounds))
            progress.advance(task)
    console.print(table(results, rounds))
    console.print(summary(results))
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


def points_to_measure(quick: bool) -> list[Point]:
    """All combinations, or the corners that need little memory."""
    if quick:
        return [Point(*point) for point in product(NUM_SEQS[:1], HEAD_DIMS, (CONTEXTS[0], CONTEXTS[-1]))]
    return [Point(*point) for point in product(NUM_SEQS, HEAD_DIMS, CONTEXTS)]


def measure(point: Point, rounds: int) -> Result:
    """All contestants turn by turn, after one round that is not counted."""
    contestants = contestants_at(point)
    seconds = dict.fromkeys(contestants, float("inf"))
    for counted in [False] + [True] * rounds:
        for name, work in contestants.items():
            began = time.thread_time()
            work()
            if counted:
                seconds[name] = min(seconds[name], time.thread_time() - began)
    return Result(point, seconds)


def contestants_at(point: Point) -> dict[str, Work]:
    """What is measured at a point, by name, on the same random pages.

    Raises: AssertionError if they do not give the same answers.
    """
    num_seqs, head_dim, context = point.num_seqs, point.head_dim, point.context
    columns = context // BLOCK_SIZE
    generator = torch.Generator().manual_seed(0)
    shape = (2, num_seqs * columns, BLOCK_SIZE, NUM_KV_HEADS, head_dim)
    key_cache, value_cache = torch.randn(shape, generator=generator)
    tables = torch.randperm(num_seqs * columns, generator=generator).view(num_seqs, columns)
    query = torch.randn(num_seqs, NUM_HEADS, head_dim, generator=generator)
    backend, lengths = backend_for("cpu", "cpu"), torch.full((num_seqs,), context)

    def gathered(cache: Tensor) -> Tensor:
        return cache[tables].view(num_seqs, context, NUM_KV_HEADS, head_dim).transpose(1, 2)

    def attend(key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query[:, :, None], key, value, enable_gqa=True)[:, :, 0]

    key, value = (gathered(cache).contiguous() for cache in (key_cache, value_cache))
    folded = query.view(num_seqs, NUM_KV_HEADS, -1, head_dim)
    contestants: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: backend.paged_attention_decode(
            query, key_cache, value_cache, tables, lengths, head_dim**-0.5
        ),
        "gather": lambda: attend(gathered(key_cache), gathered(value_cache)),
        "whole": lambda: attend(key, value),
        "folded": lambda: F.scaled_dot_product_attention(folded, key, value).view_as(query),
    }
    expected = contestants["whole"]()
    for name, contestant in contestants.items():
        assert torch.allclose(contestant(), expected, rtol=TOLERANCE, atol=TOLERANCE), f"{name} at {point}"
    # Reading: the sum over everything is the least that can be done with it.
    return {**contestants, "read": lambda: (key_cache.sum(), value_cache.sum())}


def table(results: list[Result], rounds: int) -> Table:
    """One row per point."""
    title = (
        f"Decode attention on the CPU, one thread, CPU time, fastest of {rounds} rounds; "
        f"{NUM_HEADS} heads, {NUM_KV_HEADS} KV heads, float32, blocks of {BLOCK_SIZE}"
    )
    rows = Table(title=title, title_justify="left")
    headings = ("seqs x tokens x head_dim", "ours", "gather", "whole", "folded", "GB/s", "of reading")
    for heading in headings:
        rows.add_column(heading, justify="left" if heading == headings[0] else "right")
    for result in results:
        ratios = (f"{result.ratio(name):.2f}x" for name in ("gather", "whole", "folded"))
        speed = f"{result.bytes_per_second / 1e9:.1f}"
        ours = f"{result.seconds['ours'] * 1e3:.2f} ms"
        rows.add_row(str(result.point), ours, *ratios, speed, f"{result.ratio('read'):.0%}")
    return rows


def summary(results: list[Result]) -> str:
    """The two sentences that the table is made for."""
    slowest = min(result.ratio("gather") for result in results)
    as_fast = sum(result.ratio("folded") >= 1 for result in results)
    return (
        f"At least {slowest:.1f}x as fast as gathering first. As fast as SDPA over a cache in one piece, heads "
        f"folded, or faster at {as_fast} of {len(results)} points."
    )
