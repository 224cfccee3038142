"""Puts the attention over parts of the keys together: the second half of `decode_split`.

A part is known by its result, normalised by its own weights, and by the logarithm of their sum. The whole is the
mean of the results, each weighted by its sum; the largest logarithm is taken out first, as in every softmax.
vLLM: V0 `paged_attention_v2_reduce_kernel` in csrc/attention/attention_kernels.cuh, V0 and V1 `merge_attn_states`.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code=attr-defined

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32

from kernels.cuda.elements import Element
from kernels.cuda.intrinsics import exp2
from kernels.cuda.jit import kernel
from kernels.cuda.softmax import LOWEST, ZERO


@cache
def merge_kernel(element: Element) -> Any:
    """The kernel for one number format of the output, to be launched as `[(num_heads, num_seqs), head_dim]`.

    Arguments of the kernel:
        out: `[num_tokens, num_heads, head_dim]`. query_rows: `[num_seqs]` row of each sequence.
        partial, log_sums: as `decode_split` leaves them. A sequence whose parts are all empty gets zeros.
    """
    narrow = element.narrow

    @kernel
    def merge(out, query_rows, partial, log_sums):
        head, seq, d = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
        top = LOWEST
        for part in range(log_sums.shape[2]):
            top = max(top, log_sums[seq, head, part])
        weights, x = float32(0), float32(0)
        for part in range(log_sums.shape[2]):
            log_sum = log_sums[seq, head, part]
            if log_sum != LOWEST:  # else its row of `partial` holds whatever was there before
                weight = exp2(log_sum - top)
                weights += weight
                x += weight * partial[seq, head, part, d]
        out[query_rows[seq], head, d] = narrow(x / weights if weights != ZERO else ZERO)

    return merge
