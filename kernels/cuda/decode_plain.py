"""Paged attention of one new token per sequence, the plain way: a block of threads per sequence and head.

A block walks over its sequence in tiles of as many keys as it has threads. In the first half of a tile each
thread owns a key and computes its score; in the second half each thread owns one dimension of the result and
adds up that dimension of all values. In between the threads agree on the largest score and on the sum of the
weights, which takes shared memory and barriers.

It is right for any head_dim and any block size, and slow: neighbouring threads read keys that lie far apart,
a group's heads each read the same keys again, and a long sequence keeps one processor busy while others wait.
`decode_split` repairs these three.
vLLM: V0 `paged_attention_v1` in csrc/attention/attention_kernels.cuh.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code=attr-defined

from __future__ import annotations

import math
from functools import cache
from typing import Any

from numba import cuda, float32

from kernels.cuda.elements import Element
from kernels.cuda.jit import kernel
from kernels.cuda.softmax import LOWEST, ZERO, block_max, block_sum


@cache
def decode_plain_kernel(element: Element, head_dim: int, threads: int) -> Any:
    """The kernel for one number format and head_dim, to be launched as `[(num_seqs, num_heads), threads]`.

    threads: a power of two, at least head_dim.

    Arguments of the kernel:
        out, query: `[num_seqs, num_heads, head_dim]`.
        key_cache, value_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`.
        block_tables: `[num_seqs, max_blocks]`. seq_lens: `[num_seqs]` tokens; 0 gives zeros.
        scale: fp32. window: tokens that a query sees, at most.
    """
    widen, narrow = element.widen, element.narrow

    @kernel
    def decode_plain(out, query, key_cache, value_cache, block_tables, seq_lens, scale, window):
        seq, head, thread = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
        block_size, seq_len = key_cache.shape[1], seq_lens[seq]
        kv_head = head // (query.shape[1] // key_cache.shape[2])
        q = cuda.shared.array(head_dim, float32)
        weights = cuda.shared.array(threads, float32)
        scratch = cuda.shared.array(threads, float32)
        if thread < head_dim:
            q[thread] = widen(query[seq, head, thread]) * scale
        cuda.syncthreads()

        largest, total, result = LOWEST, ZERO, ZERO
        start = max(0, seq_len - window)
        while start < seq_len:
            # A thread owns a key.
            position, score = start + thread, LOWEST
            if position < seq_len:
                block, offset = block_tables[seq, position // block_size], position % block_size
                score = ZERO
                for d in range(head_dim):
                    score += q[d] * widen(key_cache[block, offset, kv_head, d])
            before, largest = largest, max(largest, block_max(score, scratch))
            weight = math.exp(score - largest) if position < seq_len else ZERO
            weights[thread] = weight
            rescale = math.exp(before - largest)
            total = total * rescale + block_sum(weight, scratch)  # its barriers show the weights to all
            # A thread owns a dimension of the result.
            result *= rescale
            if thread < head_dim:
                for i in range(min(threads, seq_len - start)):
                    block, offset = block_tables[seq, (start + i) // block_size], (start + i) % block_size
                    result += weights[i] * widen(value_cache[block, offset, kv_head, thread])
            start += threads
        if thread < head_dim:
            out[seq, head, thread] = narrow(result / total if total != ZERO else ZERO)

    return decode_plain
