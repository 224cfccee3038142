"""The bench for chapter and exercise 11: devices as numbers, the house's split kernel at any number of splits, and an
engine whose decodes run on a reader's two kernels."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from exercises.tasks.ex08_scene import Pages
from exercises.tasks.kernel_checks import unwritten
from kernels import backend_for, cuda
from kernels.cuda.decode_split import BLOCKS_PER_PROCESSOR, decode_split_kernel, share_of
from kernels.cuda.elements import element_of
from kernels.cuda.merge import merge_kernel
from kernels.cuda.softmax import LOG2_E
from kernels.cuda.tiling import Tiling, tiling_for
from kernels.interpreter import Report, interpret, is_interpreting
from refengine.commands.bench_kernels import Point, Result, measure
from refengine.viz import Roof, Work

# From NVIDIA's data sheet of the H200 SXM: float32 without tensor cores, and the bandwidth of its memory.
H200 = Roof("an H200", peak=67e12, bandwidth=4.8e12)
PROCESSORS = 132  # of an H200
PLACES = PROCESSORS * BLOCKS_PER_PROCESSOR  # blocks of threads that run at the same time, in our kernels

HEADS, KV_HEADS, HEAD_DIM, ITEMSIZE = 32, 8, 128, 2  # of the model in the examples, bfloat16

# -- work, in operations and bytes -----------------------------------------------------------------------------


def decode_work(seq_lens: Sequence[int], heads: int = HEADS, kv_heads: int = KV_HEADS) -> Work:
    """Attention of one layer for a decode: every key and value read once, and used by its group."""
    tokens, group = sum(seq_lens), heads // kv_heads
    return Work(
        f"decode of {len(seq_lens)} x {seq_lens[0]} tokens, group {group}",
        operations=4 * tokens * heads * HEAD_DIM,  # a multiplication and an addition, for keys and for values
        num_bytes=2 * tokens * kv_heads * HEAD_DIM * ITEMSIZE,
    )


def prefill_work(tokens: int, rows: int, heads: int = HEADS, kv_heads: int = KV_HEADS) -> Work:
    """Attention of one layer for a prompt. rows: of queries, each with one head, that share a reading."""
    group = heads // kv_heads
    pairs = tokens * (tokens + 1) // 2  # of a query and a key that it sees
    readings = pairs * group / rows  # tokens read, for each KV head; all queries of a tile see about as many
    return Work(
        f"prefill of {tokens} tokens, {rows} rows share a reading",
        operations=4 * pairs * heads * HEAD_DIM,
        num_bytes=2 * readings * kv_heads * HEAD_DIM * ITEMSIZE,
    )


# -- the house's kernels ---------------------------------------------------------------------------------------


def split_run(pages: Pages, num_splits: int) -> tuple[Tensor, Tensor, Report]:
    """The split decode and the merge in the interpreter: (result, log_sums in powers of two, what it cost)."""
    num_seqs, num_heads, head_dim = pages.query.shape
    element, tiling, num_kv_heads = element_of(pages.query), tiling_of(pages), pages.key_cache.shape[2]
    partial = unwritten(num_seqs, num_heads, num_splits, head_dim)
    log_sums, out = unwritten(num_seqs, num_heads, num_splits), unwritten(num_seqs, num_heads, head_dim)
    rows = torch.arange(num_seqs, dtype=torch.int32)
    caches = (element.view(cache).view(-1) for cache in (pages.key_cache, pages.value_cache))
    with interpret() as report:
        decode_split_kernel(tiling)[(num_kv_heads * tiling.passes, num_seqs, num_splits), tiling.threads](
            partial,
            log_sums,
            element.view(pages.query).view(-1),
            num_heads * head_dim,
            rows,
            *caches,
            pages.block_tables.int(),
            pages.seq_lens.int(),
            np.float32(pages.scale * LOG2_E),
            int(pages.seq_lens.max()),
        )
        merge_kernel(element)[(num_heads, num_seqs), head_dim](out, rows, partial, log_sums)
    return out, log_sums, report


def shares(pages: Pages, seq_len: int, num_splits: int) -> list[int]:
    """How many keys of a sequence each split of the house's kernel gets."""
    step, function = tiling_of(pages).step, cast(Any, share_of).py_func
    return [max(0, function(split, num_splits, seq_len, seq_len, step)[1]) for split in range(num_splits)]


def tiling_of(pages: Pages) -> Tiling:
    """The layout of the split kernel for these pages."""
    _, block_size, num_kv_heads, head_dim = pages.key_cache.shape
    tiling = tiling_for(element_of(pages.query), head_dim, pages.query.shape[1] // num_kv_heads, block_size)
    assert tiling is not None  # the chapter's pages are made for it
    return tiling


def prefill_run(pages: Pages) -> Report:
    """What all of a batch costs in the interpreter."""
    with interpret() as report:
        cuda.paged_attention(*pages.arguments)
    return report


# -- an engine on a reader's kernels ---------------------------------------------------------------------------


def on_split(decode_split: Any, merge_parts: Any, num_splits: int = 3) -> SimpleNamespace:
    """What goes into `parts={"attention": ...}`: decodes on a reader's two kernels, all else on the reference.

    decode_split: launched as `[(num_seqs, num_heads, num_splits), 32]`, merge_parts as `[(num_seqs, num_heads), 64]`.
    """
    reference: Any = backend_for("cpu", "reference")

    def launch(kernel: Any, grid: tuple[int, ...], threads: int, *arguments: Any) -> None:
        if is_interpreting():
            kernel[grid, threads](*arguments)
            return
        with interpret():
            kernel[grid, threads](*arguments)

    def decode(
        query: Tensor, caches: Sequence[Tensor], tables: Tensor, seq_lens: Tensor, scale: float
    ) -> Tensor:
        num_seqs, num_heads, _ = query.shape
        partial = unwritten(num_seqs, num_heads, num_splits, query.shape[2])
        log_sums, out = unwritten(num_seqs, num_heads, num_splits), unwritten(*query.shape)
        tensors = (query.contiguous(), *caches, tables.contiguous(), seq_lens)
        launch(decode_split, (num_seqs, num_heads, num_splits), 32, partial, log_sums, *tensors, scale)
        launch(merge_parts, (num_seqs, num_heads), 64, out, partial, log_sums)
        return out

    def paged_attention(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        scale: float,
        sliding_window: int | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The reference for all, then the kernels for the rows of sequences with one new token."""
        if sliding_window is not None:
            raise ValueError("this decode knows no sliding window; chapter 12 is about them")
        caches, starts = (key_cache, value_cache), query_start_loc.tolist()
        result: Tensor = reference.paged_attention(
            query, *caches, block_tables, query_start_loc, seq_lens, scale, None, out
        )
        single = [i for i, (first, stop) in enumerate(pairwise(starts)) if stop - first == 1]
        if single:
            rows = [starts[i] for i in single]
            result[rows] = decode(query[rows], caches, block_tables[single], seq_lens[single], scale)
        return result

    return SimpleNamespace(
        __name__="split decode in the interpreter",
        reshape_and_cache=reference.reshape_and_cache,
        paged_attention=paged_attention,
        paged_attention_decode=reference.paged_attention_decode,
    )


# -- this machine ----------------------------------------------------------------------------------------------


def this_cpu() -> Roof:
    """One core: the speed of a product of matrices that fit into its cache, and of reading memory."""
    a, big = torch.randn(768, 768), torch.randn(32 << 20)
    with _one_thread():
        peak = 2 * 768**3 / _fastest(lambda: a @ a)
        return Roof("this CPU, one thread", peak, big.nbytes / _fastest(lambda: big.sum()))


def measured(point: Point) -> Result:
    """A point of `refengine bench kernels`, on one core."""
    with _one_thread():
        return measure(point, rounds=3)


@contextmanager
def _one_thread() -> Iterator[None]:
    """The time that is taken is this thread's, so it has to do all of torch's work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _fastest(work: Any, repeats: int = 5) -> float:
    work()
    times = []
    for _ in range(repeats):
        begin = time.thread_time()
        work()
        times.append(time.thread_time() - begin)
    return min(times)


def cpu_work(result: Result, contestant: str = "ours") -> Work:
    """A measured point of `refengine bench kernels`; 8 query heads over 2 KV heads, float32."""
    point = result.point
    return Work(
        f"{contestant}, {point.num_seqs} x {point.context} tokens, head_dim {point.head_dim}",
        operations=4
        * point.num_bytes
        // 4,  # each number meets 4 query heads: 4 multiplications, 4 additions
        num_bytes=point.num_bytes,
        seconds=result.seconds[contestant],
    )
