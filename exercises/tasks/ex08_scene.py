"""The bench for chapter and exercise 08: pages to try attention on, the exact answer, and an engine that is watched.

`make_pages` scatters sequences over a cache with NaN in every slot that holds no token. `exactly` is attention by
definition, one head and one query at a time in float64. `Watch` stands between an engine and its kernels and keeps
what passes through: chapters draw and recompute from that. `in_chunks` gives a sequence to a reader's attention piece
by piece.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from exercises.tasks.ex07_scene import Desk, mixed
from kernels import backend_for
from refengine.llm import LLM
from refengine.sampling import SamplingParams
from refengine.viz import Table

Attend = Callable[[Tensor, Tensor, Tensor, int, float], Tensor]  # (query, keys, values, start, scale)
OPERATIONS = ("reshape_and_cache", "paged_attention", "paged_attention_decode")


# -- by definition -------------------------------------------------------------------------------------------


def exactly(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attention of one sequence in float64. query `[n, num_heads, head_dim]` are the last n of its tokens.

    keys, values `[seq_len, num_kv_heads, head_dim]`. Returns: `[n, num_heads, head_dim]` float64.
    """
    query, keys, values = query.double(), keys.double(), values.double()
    group, start = query.shape[1] // keys.shape[1], len(keys) - len(query)
    out = torch.empty_like(query)
    for i in range(len(query)):
        for head in range(query.shape[1]):
            seen = slice(0, start + i + 1)
            scores = keys[seen, head // group] @ query[i, head] * scale
            out[i, head] = scores.softmax(0) @ values[seen, head // group]
    return out


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal random numbers of their own generator."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(
    num_tokens: int, num_heads: int = 4, num_kv_heads: int = 2, head_dim: int = 8, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, keys and values of one sequence, `[num_tokens, heads, head_dim]`."""
    heads = (num_heads, num_kv_heads, num_kv_heads)
    query, keys, values = (draw(num_tokens, h, head_dim, seed=10 * seed + i) for i, h in enumerate(heads))
    return query, keys, values


def in_chunks(
    attend: Attend, sizes: Iterable[int], query: Tensor, keys: Tensor, values: Tensor, scale: float
) -> Tensor:
    """A sequence in chunks of these sizes, each with the keys and values of all before it, as with a cache."""
    out, start = [], 0
    for size in sizes:
        stop = start + size
        out.append(attend(query[start:stop], keys[:stop], values[:stop], start, scale))
        start = stop
    return torch.cat(out)


def tiles_of(keys: Tensor, values: Tensor, sizes: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values of one head in tiles of these sizes, each given once and as a copy."""
    first = 0
    for size in sizes:
        yield keys[first : first + size].clone(), values[first : first + size].clone()
        first += size


# -- pages ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pages:
    """A batch whose keys and values lie in scattered blocks. Every slot that holds no token is NaN."""

    query: Tensor  # [num_tokens, num_heads, head_dim]
    key_cache: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: Tensor
    block_tables: Tensor  # [num_seqs, max_blocks]; past a sequence's end: ids of anybody's blocks
    query_start_loc: Tensor  # [num_seqs + 1]
    seq_lens: Tensor  # [num_seqs]
    scale: float
    keys: tuple[Tensor, ...]  # of each sequence, `[seq_len, num_kv_heads, head_dim]`
    values: tuple[Tensor, ...]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Those of `paged_attention`, in its order, as copies."""
        tensors = (self.query, self.key_cache, self.value_cache, self.block_tables)
        return (*(t.clone() for t in (*tensors, self.query_start_loc, self.seq_lens)), self.scale)

    def exactly(self) -> Tensor:
        """What `paged_attention` has to give, in float64; rows of nobody are zero."""
        out = torch.zeros(self.query.shape, dtype=torch.float64)
        rows = pairwise(self.query_start_loc.tolist())
        for (first, stop), keys, values in zip(rows, self.keys, self.values, strict=True):
            out[first:stop] = exactly(self.query[first:stop], keys, values, self.scale)
        return out


def make_pages(
    lengths: Sequence[tuple[int, int]],  # (new tokens, all tokens) of each sequence
    block_size: int = 4,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    *,
    dtype: torch.dtype = torch.float32,
    padding: int = 0,  # rows of the query that belong to nobody
    scale: float | None = None,  # None: not head_dim ** -0.5 but near it
    seed: int = 0,
) -> Pages:
    """Random sequences in blocks that are neither neighbours nor in order."""
    random = torch.Generator().manual_seed(seed)
    counts = [-(-total // block_size) for _, total in lengths]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=random).tolist()
    tables = torch.randint(num_blocks, (len(lengths), max(counts) + 1), generator=random)
    caches = torch.full((2, num_blocks, block_size, num_kv_heads, head_dim), torch.nan, dtype=dtype)
    held = []
    for row, ((_, total), count) in enumerate(zip(lengths, counts, strict=True)):
        tables[row, :count] = torch.tensor([order.pop() for _ in range(count)])
        held.append(torch.randn((2, total, num_kv_heads, head_dim), generator=random).to(dtype))
        for position in range(total):
            block, offset = tables[row, position // block_size], position % block_size
            caches[:, block, offset] = held[-1][:, position]
    new = torch.tensor([0, *(count for count, _ in lengths)])
    num_tokens = int(new.sum()) + padding
    return Pages(
        query=torch.randn((num_tokens, num_heads, head_dim), generator=random).to(dtype),
        key_cache=caches[0],
        value_cache=caches[1],
        block_tables=tables,
        query_start_loc=new.cumsum(0),
        seq_lens=torch.tensor([total for _, total in lengths]),
        scale=1.3 * head_dim**-0.5 if scale is None else scale,
        keys=tuple(pair[0] for pair in held),
        values=tuple(pair[1] for pair in held),
    )


# The batch of the predicting task: (new tokens, all tokens, block table) of each sequence; blocks of four.
SMALL = {"a": (4, 9, [3, 5, 6]), "b": (1, 6, [7, 2]), "c": (3, 3, [4])}


def small_batch() -> Table:
    """What attention is told about it. Tables are filled up with zeros, as in the engine."""
    new = torch.tensor([0, *(count for count, _, _ in SMALL.values())])
    wide = max(len(table) for _, _, table in SMALL.values())
    tables = [table + [0] * (wide - len(table)) for _, _, table in SMALL.values()]
    told = {
        "query_start_loc": new.cumsum(0).tolist(),
        "seq_lens": [total for _, total, _ in SMALL.values()],
        "block_tables": tables,
    }
    return Table(("", ", ".join(SMALL)), [(name, str(value)) for name, value in told.items()])


# -- an engine that is watched -------------------------------------------------------------------------------


@dataclass
class Watch:
    """Stands for the reference kernels, and keeps every call: its name, its arguments, its result.

    Caches are kept as they were right after the call.
    """

    calls: list[tuple[str, tuple[Any, ...], Any]] = field(default_factory=list)

    @property
    def backend(self) -> SimpleNamespace:
        """What goes into `parts={"attention": ...}`."""
        return SimpleNamespace(__name__="watch", **{name: self._watched(name) for name in OPERATIONS})

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.calls]

    def arguments(self, name: str) -> tuple[Any, ...]:
        """Of the first call of that name."""
        return next(arguments for called, arguments, _ in self.calls if called == name)

    def result(self, name: str) -> Tensor:
        """Of the first call of that name."""
        found: Tensor = next(result for called, _, result in self.calls if called == name)
        return found

    def _watched(self, name: str) -> Callable[..., Any]:
        operation = getattr(backend_for("cpu", "reference"), name)

        def watched(*arguments: Any) -> Any:
            result = operation(*arguments)
            kept = tuple(a.clone() if isinstance(a, Tensor) else a for a in arguments)
            self.calls.append((name, kept, result))
            return result

        return watched


def watched_step(desk: Callable[..., Desk] = mixed) -> tuple[Watch, Desk]:
    """The step of chapter 07 with a decode, a hit and a chunk: what passed through its kernels, layer by layer."""
    watch = Watch()
    running = desk(parts={"attention": watch.backend})
    watch.calls.clear()  # Ada's prompt
    running.step()
    return watch, running


def neighbours() -> tuple[Watch, Desk]:
    """Two prompts in one step; the second begins like the first, and finds the block that the first is to fill."""
    watch = Watch()
    desk = Desk(parts={"attention": watch.backend})
    desk.add("first", [*range(40, 45)], 1)
    desk.add("second", [*range(40, 44), 60, 61], 1)
    desk.step()
    return watch, desk


def phases(engine: str) -> list[tuple[str, list[str]]]:
    """What the engine calls in one layer, step by step: a prompt, its decode, a prompt with a hit, a decode again."""
    watch, steps = Watch(), list[tuple[str, list[str]]]()
    options: dict[str, Any] = {} if engine == "v1" else {"enable_chunked_prefill": False}
    llm = LLM(
        "tiny", engine=engine, block_size=4, num_blocks=16, parts={"attention": watch.backend}, **options
    )
    core: Any = llm.engine
    for name, prompt in (("a prompt", range(40, 49)), ("a prompt with a hit", [*range(40, 48), 60, 61])):
        core.add_request(name, list(prompt), SamplingParams(max_tokens=2, ignore_eos=True))
        for what in (name, "a decode"):
            watch.calls.clear()
            core.step()
            per_layer = len(watch.calls) // core_layers(llm)
            steps.append((what, watch.names[:per_layer]))
    return steps


def core_layers(llm: LLM) -> int:
    """Layers of its model."""
    engine: Any = llm.engine
    runner = engine.model_runner if hasattr(engine, "model_runner") else engine.worker
    return int(runner.model.config.num_layers)


# -- what copying costs --------------------------------------------------------------------------------------


def median_seconds(work: Callable[[], object], repeats: int = 9) -> float:
    """Median of some calls, after one that does not count."""
    work()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def moved(seq_lens: Sequence[int]) -> Table:
    """Bytes of K and V that gather and attention move in one layer: 2 KV heads of 64 numbers of 4 bytes."""
    pages = make_pages([(1, total) for total in seq_lens], head_dim=64)
    copies = 0
    for table, total in zip(pages.block_tables, seq_lens, strict=True):
        for cache in (pages.key_cache, pages.value_cache):
            rows = cache[table].flatten(0, 1)[:total]
            copies += rows.numel() * rows.itemsize
    return Table(("", "bytes read", "bytes written"), [("gather", copies, copies), ("attention", copies, 0)])


def copy_share(num_seqs: int, seq_len: int, block_size: int = 16) -> float:
    """Share of the time of a decode, gather and then attend, that the gather takes. 8 query and 2 KV heads of 64."""
    num_blocks = num_seqs * seq_len // block_size
    caches = [draw(num_blocks, block_size, 2, 64, seed=i) for i in range(2)]
    tables = torch.randperm(num_blocks).view(num_seqs, -1)
    query = draw(num_seqs, 8, 1, 64, seed=2)

    def gather() -> list[Tensor]:
        return [cache[tables].flatten(1, 2).transpose(1, 2) for cache in caches]

    def attend() -> Tensor:
        keys, values = gathered
        return torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    gathered = gather()
    copying, attending = median_seconds(gather), median_seconds(attend)
    return copying / (copying + attending)
