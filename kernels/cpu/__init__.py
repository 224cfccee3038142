"""The backend for a CPU: attention compiled by Numba, on one thread. Needs nothing besides what is installed.

It is compiled when it is first used, once per kind of cache (float32, float64, bfloat16, float16), and kept
on disk for later processes. Writing and copying blocks is left to PyTorch, which does it at the speed of memory.
vLLM: V0 `attention/backends/torch_sdpa.py`, V1 `v1/attention/backends/cpu_attn.py`.
"""

from __future__ import annotations

import sys
from functools import lru_cache, partial
from threading import Timer
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.attention import attend
from kernels.cpu.vectors import MOST_HEADS
from kernels.dispatch import BackendError
from kernels.reference import Writes, copy_blocks, reshape_and_cache

__all__ = [
    "Plan",
    "check_device",
    "copy_blocks",
    "paged_attention",
    "paged_attention_decode",
    "plan_step",
    "reshape_and_cache",
]

PATIENCE = 1.0  # seconds without a word
# What there is to attend over, and as what it is handed on: a half goes by its bits.
KINDS = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.bfloat16: torch.int16,
    torch.float16: torch.uint16,
}


def check_device(device: torch.device) -> None:
    """Raises: BackendError if the tensors are not in the CPU's memory."""
    if device.type != "cpu":
        raise BackendError(f"the backend 'cpu' runs on the CPU, not on {device}; 'cuda' and 'reference' do")


class Plan:
    """A step's metadata as numpy arrays of the types that were compiled for."""

    def __init__(
        self,
        slot_mapping: Tensor,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        key_cache: Tensor,
        sliding_window: int | None,
    ) -> None:
        self.writes = Writes(slot_mapping)
        self.reads = Reads(block_tables, query_start_loc, seq_lens, key_cache, sliding_window)

    def write(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
        self.writes(key, value, key_cache, value_cache)

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float) -> Tensor:
        return self.reads(query, key_cache, value_cache, scale)


plan_step = Plan


class Reads:
    """Which tokens the queries of a step see. Raises: ValueError for a block that does not exist."""

    def __init__(
        self,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        key_cache: Tensor,
        sliding_window: int | None,
    ) -> None:
        self.metadata = tuple(x.numpy().astype(np.int64) for x in (block_tables, query_start_loc, seq_lens))
        self.window = sliding_window or int(self.metadata[2].max(initial=1))
        self.num_tokens = int(self.metadata[1][-1])
        tables, starts, lengths = self.metadata
        check_blocks(tables, starts, lengths, self.window, len(key_cache), key_cache.shape[1])

    def __call__(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float) -> Tensor:
        """query and result `[num_tokens, num_heads, head_dim]`."""
        computed = ready(query)
        out = torch.empty_like(computed)
        if self.num_tokens < len(out):
            out[self.num_tokens :] = 0
        arrays = out.numpy(), computed.numpy(), as_array(key_cache), as_array(value_cache)
        groups = head_groups(query.shape[1], key_cache.shape[2])
        function = attend if query.dtype in _compiled else partial(first_call, query.dtype)
        function(*arrays, *self.metadata, groups, scale, self.window)
        return out if out.dtype == query.dtype else out.to(query.dtype)


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
    """See `kernels.paged_attention`."""
    reads = Reads(block_tables, query_start_loc, seq_lens, key_cache, sliding_window)
    result = reads(query, key_cache, value_cache, scale)
    return result if out is None else out.copy_(result)


def paged_attention_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `kernels.paged_attention_decode`."""
    starts = torch.arange(len(query) + 1)
    return paged_attention(
        query, key_cache, value_cache, block_tables, starts, seq_lens, scale, sliding_window, out
    )


def check_blocks(
    block_tables: Any, query_start_loc: Any, seq_lens: Any, window: int, num_blocks: int, block_size: int
) -> None:
    """Every block that is read exists. Compiled code would read past the cache, and take the process with it.

    Raises: ValueError with the entry of the table.
    """
    query_lens = np.diff(query_start_loc)
    first = np.maximum(seq_lens - query_lens + 1 - window, 0) // block_size
    past = np.where(query_lens, -(-seq_lens // block_size), 0)
    column = np.arange(block_tables.shape[1])
    is_read = (column >= first[:, None]) & (column < past[:, None])
    missing = np.argwhere(is_read & ((block_tables < 0) | (block_tables >= num_blocks)))
    if len(missing):
        i, j = missing[0]
        raise ValueError(
            f"block_tables[{i}, {j}] is {block_tables[i, j]}, but the cache has {num_blocks} blocks"
        )


def ready(query: Tensor) -> Tensor:
    """As the kernel reads it: in one piece, and a half as float32.

    Raises: ValueError for a type that is not attended over.
    """
    if query.dtype not in KINDS:
        kinds = ", ".join(str(kind).removeprefix("torch.") for kind in KINDS)
        raise ValueError(
            f"the cpu backend attends over {kinds}, not {str(query.dtype).removeprefix('torch.')}"
        )
    return (query if query.dtype.itemsize >= 4 else query.float()).contiguous()


def as_array(cache: Tensor) -> Any:
    """The same memory as numpy sees it."""
    kind = KINDS[cache.dtype]
    return (cache if cache.dtype == kind else cache.view(kind)).numpy()


@lru_cache
def head_groups(num_heads: int, num_kv_heads: int) -> Any:
    """Heads that go through a key together: `[num_groups, 3]` first query head, how many, their KV head.

    How many is a power of two. Seven heads of one KV head go as four, two and one.
    """
    groups, sharing = [], num_heads // num_kv_heads
    for kv_head in range(num_kv_heads):
        head, left, size = kv_head * sharing, sharing, MOST_HEADS
        while left:
            while size > left:
                size //= 2
            groups.append((head, size, kv_head))
            head, left = head + size, left - size
    return np.array(groups)


_compiled: set[torch.dtype] = set()


def first_call(dtype: torch.dtype, *arguments: Any) -> None:
    """`attend`, with a word on the terminal if the first call for a dtype turns out to take long.

    From the disk the compiled code is there in no time; on a new machine it takes some seconds. Nothing is said
    where no terminal is, or the words would end up in a notebook.
    """
    name = str(dtype).removeprefix("torch.")
    words = f"compiling attention over {name} for this CPU, once per machine ..."
    timer = Timer(PATIENCE, lambda: print(words, file=sys.stderr, flush=True))
    if sys.stderr.isatty():
        timer.start()
    try:
        attend(*arguments)
        _compiled.add(dtype)
    finally:
        timer.cancel()
