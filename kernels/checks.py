"""Argument checks shared by all backends: each failure is one sentence with the two things that disagree.

They look at shapes and at the small metadata tensors, never at keys, values or queries. A kernel that gets
wrong metadata reads another request's memory without complaint, which is why these are not assertions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

INTEGERS = (torch.int32, torch.int64)


def caches(key_cache: Tensor, value_cache: Tensor) -> None:
    """Both `[num_blocks, block_size, num_kv_heads, head_dim]`, equal in shape and dtype, and contiguous."""
    if key_cache.dim() != 4 or 0 in key_cache.shape[1:]:
        raise ValueError(
            "a cache is [num_blocks, block_size, num_kv_heads, head_dim], "
            f"but key_cache has shape {list(key_cache.shape)}"
        )
    if key_cache.shape != value_cache.shape or key_cache.dtype != value_cache.dtype:
        raise ValueError(f"key_cache is {_describe(key_cache)} but value_cache is {_describe(value_cache)}")
    _together("value_cache", value_cache, "key_cache", key_cache)
    if not (key_cache.is_contiguous() and value_cache.is_contiguous()):
        raise ValueError(
            "key_cache and value_cache must be contiguous, or a write to a view of them would be lost"
        )


def new_tokens(name: str, x: Tensor, cache: Tensor) -> None:
    """`[num_tokens, num_kv_heads, head_dim]`, with the heads and dtype of the cache."""
    if x.dim() != 3 or x.shape[1:] != cache.shape[2:] or x.dtype != cache.dtype:
        raise ValueError(
            f"{name} is {_describe(x)}, but a token of this cache is {list(cache.shape[2:])} {_dtype(cache)}"
        )
    _together(name, x, "key_cache", cache)


def slots(slot_mapping: Tensor, num_tokens: int) -> None:
    """`[num_tokens]` int64."""
    if slot_mapping.dtype != torch.int64 or slot_mapping.shape != (num_tokens,):
        raise ValueError(f"slot_mapping must be [{num_tokens}] int64, not {_describe(slot_mapping)}")


def query(x: Tensor, cache: Tensor, out: Tensor | None) -> None:
    """`[num_tokens, num_heads, head_dim]`, heads a multiple of the cache's, and `out` just like it."""
    num_kv_heads, head_dim = cache.shape[2:]
    fits = x.dim() == 3 and x.shape[2] == head_dim and x.shape[1] and x.shape[1] % num_kv_heads == 0
    if not fits or x.dtype != cache.dtype:
        raise ValueError(
            f"query is {_describe(x)}, but this cache needs [num_tokens, a multiple of {num_kv_heads} heads, "
            f"{head_dim}] {_dtype(cache)}"
        )
    _together("query", x, "key_cache", cache)
    if out is None:
        return
    if out.shape != x.shape or out.dtype != x.dtype:
        raise ValueError(f"out is {_describe(out)} but query is {_describe(x)}")
    _together("out", out, "query", x)


def metadata(
    block_tables: Tensor, query_start_loc: Tensor, seq_lens: Tensor, block_size: int, num_tokens: int
) -> None:
    """Tables, starts and lengths agree with each other and with the number of query rows."""
    num_seqs = len(block_tables)
    if block_tables.dim() != 2 or block_tables.dtype not in INTEGERS:
        raise ValueError(
            f"block_tables must be [num_seqs, max_blocks] integers, not {_describe(block_tables)}"
        )
    if seq_lens.shape != (num_seqs,) or query_start_loc.shape != (num_seqs + 1,):
        raise ValueError(
            f"block_tables has {num_seqs} sequences, so seq_lens must be [{num_seqs}] and query_start_loc "
            f"[{num_seqs + 1}], not {list(seq_lens.shape)} and {list(query_start_loc.shape)}"
        )
    for name, x in (("query_start_loc", query_start_loc), ("seq_lens", seq_lens)):
        if x.dtype not in INTEGERS:
            raise ValueError(f"{name} must be integers, not {_describe(x)}")
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    if starts[0] != 0 or starts[-1] > num_tokens:
        raise ValueError(
            f"query_start_loc runs from {starts[0]} to {starts[-1]}, but there are {num_tokens} queries"
        )
    room = block_tables.shape[1] * block_size
    for i, length in enumerate(lengths):
        query_len = starts[i + 1] - starts[i]
        if not 0 <= query_len <= length:
            raise ValueError(f"sequence {i} has {length} tokens, so it cannot have {query_len} queries")
        if length > room:
            raise ValueError(
                f"sequence {i} has {length} tokens, but its block table has room for {room} "
                f"({block_tables.shape[1]} blocks of {block_size})"
            )


def window(sliding_window: int | None) -> None:
    """A window that holds at least the token itself. Raises: ValueError."""
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1 token, not {sliding_window}")


def pairs(block_pairs: Sequence[tuple[int, int]], num_blocks: int) -> None:
    """Every block id exists."""
    for pair in block_pairs:
        if len(pair) != 2:
            raise ValueError(f"a pair is (source, destination), not {pair}")
        for block in pair:
            if not 0 <= block < num_blocks:
                raise ValueError(f"block {block} does not exist; the cache has {num_blocks} blocks")


def _together(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """Both lie on one device."""
    if x.device != other.device:
        raise ValueError(f"{name} is on {x.device} but {other_name} is on {other.device}")


def _describe(x: Tensor) -> str:
    return f"{list(x.shape)} {_dtype(x)}"


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
