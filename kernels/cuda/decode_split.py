"""Paged attention of one new token per sequence, fast: the keys of a sequence are split over several blocks of
threads, and `merge` puts their results together.

What `decode_plain` lacks is here:
- A warp reads whole rows, 16 bytes a lane, so every byte that is fetched is used.
- The block ids a split needs are put into shared memory first; then the addresses of the keys and values of
  several tokens are known at once, and their loads are all on the way before the first is used.
- A row is read once for all query heads that share it.
- Lanes meet by shuffles within a warp; the only barriers are before the first key and after the last.
vLLM: V0 `paged_attention_v2`; the splitting is that of flash-decoding, in V1's `flash_attn_varlen_func`.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code=attr-defined

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int32, uint32

from kernels.cuda.addressing import element_offset
from kernels.cuda.intrinsics import exp2, log2
from kernels.cuda.jit import device_function, resident_kernel
from kernels.cuda.rows import row_functions
from kernels.cuda.softmax import LOWEST, ZERO, fold_scores, lanes_sum, merge_lanes
from kernels.cuda.tiling import WARP, Tiling

TABLE_BLOCKS = 512  # block ids that a split can hold
BLOCKS_PER_PROCESSOR = 3  # of threads, at the same time: as many as leave the registers that group 4 needs


@device_function
def share_of(split, num_splits, seq_len, window, step):
    """The keys of a split: (position of the first, their number, 0 or less if it has none).

    Each sequence is divided evenly by its own length, in whole steps of a block of threads.
    """
    visible = min(seq_len, window)
    size = (visible + num_splits * step - 1) // (num_splits * step) * step
    return seq_len - visible + split * size, min(size, visible - split * size)


@device_function
def hold_table(table, block_tables, seq, first_block, num_blocks):
    """Copies a split's part of its sequence's block table to shared memory, all threads together."""
    i = cuda.threadIdx.x
    while i < num_blocks:
        table[i] = block_tables[seq, first_block + i]
        i += cuda.blockDim.x
    cuda.syncthreads()


@cache
def begin_function(tiling: Tiling) -> Any:
    """The start of the kernel: this lane's share of each query of the group, times the scale, and no keys seen."""
    load, widen, _, _ = row_functions(tiling)
    group, words, numbers, head_dim = tiling.group, tiling.words, tiling.numbers, tiling.head_dim

    @device_function
    def begin(q, result, largest, total, query, offset, scale):
        packed = cuda.local.array(words, uint32)
        for g in range(group):
            load(packed, 0, query, offset + g * head_dim)
            widen(q, g * numbers, packed, scale)
            largest[g], total[g] = LOWEST, ZERO
            for j in range(numbers):
                result[g * numbers + j] = ZERO

    return begin


@cache
def walk_function(tiling: Tiling) -> Any:
    """The part of the kernel between its two barriers: a warp's way through its share of the keys.

    Arguments: the queries and the softmax to fold into, local arrays; the table in shared memory; `skew` and
    `count`, the keys are tokens skew .. skew + count - 1 of the held blocks; the caches; `row_size`, numbers
    in a token of the cache, and `column`, where this lane's share starts in it.
    """
    load, _, dot, add = row_functions(tiling)
    block_size, group, step, lanes = tiling.block_size, tiling.group, tiling.step, tiling.lanes
    rows, unroll, words, numbers = tiling.rows, tiling.unroll, tiling.words, tiling.numbers
    held_words, num_scores = unroll * words, group * unroll

    @device_function
    def walk(q, result, largest, total, table, skew, count, key_cache, value_cache, row_size, column):
        keys, values = cuda.local.array(held_words, uint32), cuda.local.array(held_words, uint32)
        scores = cuda.local.array(num_scores, float32)
        first = cuda.threadIdx.x // WARP * rows * unroll  # of this warp's tokens in the round
        own = cuda.threadIdx.x % WARP // lanes
        while first < count:
            for u in range(unroll):
                token = skew + min(first + u * rows + own, count - 1)
                block, offset = table[token // block_size], token % block_size
                start = element_offset(block, offset, block_size, row_size) + column
                load(keys, u * words, key_cache, start)
                load(values, u * words, value_cache, start)
            for u in range(unroll):
                is_key = first + u * rows + own < count
                for g in range(group):
                    score = lanes_sum(dot(q, g * numbers, keys, u * words), lanes)
                    scores[g * unroll + u] = score if is_key else LOWEST
            for g in range(group):
                fold_scores(g, largest, total, result, numbers, scores, unroll)
                for u in range(unroll):
                    add(result, g * numbers, values, u * words, scores[g * unroll + u])
            first += step

    return walk


@cache
def store_function(tiling: Tiling) -> Any:
    """The end of the kernel: the warps' results meet in shared memory, and the block's goes out."""
    group, warps, head_dim, lanes = tiling.group, tiling.warps, tiling.head_dim, tiling.lanes
    numbers, per_load, size = tiling.numbers, tiling.element.per_load, tiling.group * tiling.head_dim
    pitch = lanes * per_load

    @device_function
    def store(partial, log_sums, seq, first_head, split, largest, total, result):
        maxima = cuda.shared.array((warps, group), float32)
        totals = cuda.shared.array((warps, group), float32)
        results = cuda.shared.array((warps, group, head_dim), float32)
        warp, lane = cuda.threadIdx.x // WARP, cuda.threadIdx.x % WARP
        for g in range(group):
            if lane == 0:
                maxima[warp, g], totals[warp, g] = largest[g], total[g]
            if lane < lanes:
                for j in range(numbers):
                    d = j // per_load * pitch + lane * per_load + j % per_load
                    results[warp, g, d] = result[g * numbers + j]
        cuda.syncthreads()
        i = cuda.threadIdx.x
        while i < size:
            g, d = i // head_dim, i % head_dim
            top, weights, x = LOWEST, ZERO, ZERO
            for w in range(warps):
                top = max(top, maxima[w, g])
            for w in range(warps):
                share = exp2(maxima[w, g] - top)
                weights += share * totals[w, g]
                x += share * results[w, g, d]
            partial[seq, first_head + g, split, d] = x / weights
            if d == 0:
                log_sums[seq, first_head + g, split] = top + log2(weights)
            i += cuda.blockDim.x

    return store


@cache
def decode_split_kernel(tiling: Tiling) -> Any:
    """The kernel for one layout, to be launched as
    `[(num_kv_heads * passes, num_seqs, num_splits), tiling.threads]`.

    Arguments of the kernel:
        partial: `[num_seqs, num_heads, num_splits, head_dim]` fp32, the attention over each split's keys alone.
        log_sums: `[num_seqs, num_heads, num_splits]` fp32, base-2 logarithm of the sum of the split's weights;
            LOWEST for a split without keys, whose row of `partial` is not written.
        query: flat, rows `query_stride` numbers apart. query_rows: `[num_seqs]` row of each sequence.
        key_cache, value_cache: flat, `[num_blocks * block_size * num_kv_heads * head_dim]`.
        block_tables: `[num_seqs, max_blocks]`. seq_lens: `[num_seqs]` tokens.
        scale: fp32, times LOG2_E. window: tokens that a query sees, at most.
    """
    begin, walk, store = begin_function(tiling), walk_function(tiling), store_function(tiling)
    group, passes, all_numbers = tiling.group, tiling.passes, tiling.group * tiling.numbers
    block_size, head_dim, step, lanes = tiling.block_size, tiling.head_dim, tiling.step, tiling.lanes
    numbers, per_load = tiling.numbers, tiling.element.per_load

    @resident_kernel(tiling.threads, BLOCKS_PER_PROCESSOR)
    def decode_split(
        partial, log_sums, query, query_stride, query_rows, key_cache, value_cache, block_tables, seq_lens,
        scale, window,
    ):  # fmt: skip
        thread, seq, split = cuda.threadIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
        kv_head, first_head = cuda.blockIdx.x // passes, cuda.blockIdx.x * group
        first, count = share_of(split, cuda.gridDim.z, seq_lens[seq], window, step)
        if count <= 0:
            if thread < group:
                log_sums[seq, first_head + thread, split] = LOWEST
            return
        skew = first % block_size
        num_blocks = (skew + count + block_size - 1) // block_size
        table = cuda.shared.array(TABLE_BLOCKS, int32)
        hold_table(table, block_tables, seq, first // block_size, num_blocks)

        q, result = cuda.local.array(all_numbers, float32), cuda.local.array(all_numbers, float32)
        largest, total = cuda.local.array(group, float32), cuda.local.array(group, float32)
        column = thread % lanes * per_load  # of a head's numbers, the first that is this lane's
        head = query_rows[seq] * query_stride + first_head * head_dim
        begin(q, result, largest, total, query, head + column, scale)
        row_size, column = cuda.gridDim.x // passes * head_dim, kv_head * head_dim + column
        walk(q, result, largest, total, table, skew, count, key_cache, value_cache, row_size, column)
        for g in range(group):
            merge_lanes(g, largest, total, result, numbers, lanes)
        store(partial, log_sums, seq, first_head, split, largest, total, result)

    return decode_split
