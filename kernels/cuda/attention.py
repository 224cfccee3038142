"""Launches the attention kernels: which constants, which grid, which scratch memory.

Nothing is read back from the device and no memory is kept: scratch comes from torch's allocator, which inside a
CUDA graph is the graph's own pool.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.cuda.decode_plain import decode_plain_kernel
from kernels.cuda.decode_split import BLOCKS_PER_PROCESSOR, TABLE_BLOCKS, decode_split_kernel
from kernels.cuda.elements import element_of
from kernels.cuda.launch import flat_rows, is_aligned, launch, num_processors
from kernels.cuda.merge import merge_kernel
from kernels.cuda.prefill import PrefillTiling, prefill_kernel
from kernels.cuda.sequences import Sequences
from kernels.cuda.softmax import LOG2_E
from kernels.cuda.tiling import HEAD_DIMS, WARP, Tiling, tiling_for

ROUNDS = 8  # of a block of threads that are worth a split of their own


def fast_kernels_serve(key_cache: Tensor, value_cache: Tensor) -> bool:
    """Whether rows of these caches can be read 16 bytes at a time in the layouts that are written out."""
    return key_cache.shape[3] in HEAD_DIMS and is_aligned(key_cache) and is_aligned(value_cache)


def split_tiling(query: Tensor, key_cache: Tensor, block_size: int) -> Tiling | None:
    """The layout for the split kernel; None for a group that it does not serve."""
    _, _, num_kv_heads, head_dim = key_cache.shape
    return tiling_for(element_of(query), head_dim, query.shape[1] // num_kv_heads, block_size)


def attend_plain(
    out: Tensor, query: Tensor, key_cache: Tensor, value_cache: Tensor, sequences: Sequences, scale: float
) -> None:
    """One query row per sequence, in their order; any shape. Mutates: out."""
    element, head_dim = element_of(query), query.shape[2]
    threads = max(WARP, 1 << (head_dim - 1).bit_length())
    launch(
        decode_plain_kernel(element, head_dim, threads),
        (len(sequences), query.shape[1]),
        threads,
        *map(element.view, (out, query, key_cache, value_cache)),
        sequences.block_tables,
        sequences.seq_lens,
        np.float32(scale),
        sequences.window,
    )


def attend_split(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    sequences: Sequences,
    scale: float,
    tiling: Tiling,
) -> None:
    """One query row per sequence, in kernel blocks. Mutates: out."""
    if not len(sequences):
        return
    element, num_heads, num_kv_heads = tiling.element, query.shape[1], key_cache.shape[2]
    grid = (num_kv_heads * tiling.passes, len(sequences))
    num_splits = choose_splits(grid[0] * grid[1], sequences, tiling.step, num_processors(query.device))
    parts = scratch(query.device, len(sequences), num_heads, num_splits, tiling.head_dim)
    log_sums = scratch(query.device, len(sequences), num_heads, num_splits)
    flat_query, query_stride = flat_rows(query)
    launch(
        decode_split_kernel(tiling),
        (*grid, num_splits),
        tiling.threads,
        parts,
        log_sums,
        element.view(flat_query),
        query_stride,
        sequences.first_rows,
        element.view(key_cache.view(-1)),
        element.view(value_cache.view(-1)),
        sequences.block_tables,
        sequences.seq_lens,
        np.float32(scale * LOG2_E),
        sequences.window,
    )
    merging = (element.view(out), sequences.first_rows, parts, log_sums)
    launch(merge_kernel(element), (num_heads, len(sequences)), tiling.head_dim, *merging)


def scratch(device: torch.device, *shape: int) -> Tensor:
    """fp32 memory for partial results, with anything in it."""
    return torch.empty(shape, dtype=torch.float32, device=device)


def choose_splits(num_blocks: int, sequences: Sequences, step: int, processors: int) -> int:
    """Into how many parts each sequence's keys are cut.

    As many as fill the GPU once where there are few sequences, and twice where there are many, so that the last
    round is not half empty; but no split gets less than a few rounds of work, and none more block ids than it
    can hold.

    Args: num_blocks: of threads, per split. step: tokens per round. processors: of the GPU.
    """
    places = processors * BLOCKS_PER_PROCESSOR
    wanted = places // num_blocks if num_blocks <= places else -(-2 * places // num_blocks)
    useful = -(-sequences.room // (ROUNDS * step))
    needed = -(-sequences.room // ((TABLE_BLOCKS - 2) * sequences.block_size - step))
    return max(1, needed, min(wanted, useful))


def attend_varlen(
    out: Tensor, query: Tensor, key_cache: Tensor, value_cache: Tensor, sequences: Sequences, scale: float
) -> None:
    """Any number of query rows per sequence, any group, in kernel blocks. Mutates: out."""
    element, num_kv_heads, head_dim = element_of(query), key_cache.shape[2], query.shape[2]
    tiling = PrefillTiling(element, head_dim, query.shape[1] // num_kv_heads, sequences.block_size)
    tiles = -(-sequences.max_query_len * tiling.group // tiling.rows)
    flat_query, query_stride = flat_rows(query)
    launch(
        prefill_kernel(tiling),
        (num_kv_heads, tiles, len(sequences)),
        tiling.threads,
        element.view(out),
        element.view(flat_query),
        query_stride,
        sequences.first_rows,
        sequences.query_lens,
        element.view(key_cache.view(-1)),
        element.view(value_cache.view(-1)),
        sequences.block_tables,
        sequences.seq_lens,
        np.float32(scale * LOG2_E),
        sequences.window,
    )
