"""Softmax over keys that come tile by tile, and sums and maxima over the threads of a block or warp.

The largest score so far, the sum of the weights and the weighted values are kept; when a larger score turns
up, all that was kept is scaled down to it. Nothing else remembers the tiles that went by.
vLLM: V0 and V1 `csrc/attention/attention_utils.cuh` and the reductions in `attention_kernels.cuh`.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code=attr-defined

from __future__ import annotations

import numpy as np
from numba import cuda

from kernels.cuda.intrinsics import exp2
from kernels.cuda.jit import device_function

# Below every score, but finite: the difference of two of them is 0 and not NaN. A part of a softmax with this
# as its largest score has seen no key.
LOWEST = np.float32(-3.0e38)
ZERO = np.float32(0)
LOG2_E = 1.4426950408889634  # exp(x) == exp2(x * LOG2_E)
ALL_LANES = 0xFFFFFFFF


@device_function
def block_max(x, scratch):
    """The largest x of the block's threads. Their number is a power of two, `scratch` has room for each."""
    thread, half = cuda.threadIdx.x, cuda.blockDim.x // 2
    scratch[thread] = x
    cuda.syncthreads()
    while half > 0:
        if thread < half:
            scratch[thread] = max(scratch[thread], scratch[thread + half])
        cuda.syncthreads()
        half //= 2
    largest = scratch[0]
    cuda.syncthreads()  # all have read it, `scratch` may be used again
    return largest


@device_function
def block_sum(x, scratch):
    """The sum of x over the block's threads, as in `block_max`."""
    thread, half = cuda.threadIdx.x, cuda.blockDim.x // 2
    scratch[thread] = x
    cuda.syncthreads()
    while half > 0:
        if thread < half:
            scratch[thread] += scratch[thread + half]
        cuda.syncthreads()
        half //= 2
    total = scratch[0]
    cuda.syncthreads()
    return total


@device_function
def lanes_sum(x, lanes):
    """The sum of x over `lanes` neighbouring lanes of a warp, a power of two; every one of them gets it."""
    while lanes > 1:
        lanes //= 2
        x += cuda.shfl_xor_sync(ALL_LANES, x, lanes)
    return x


@device_function
def warp_max(x):
    """The largest x of a warp; every lane gets it."""
    distance = 16
    while distance > 0:
        x = max(x, cuda.shfl_xor_sync(ALL_LANES, x, distance))
        distance //= 2
    return x


@device_function
def fold_scores(g, largest, total, result, num_results, scores, num_scores):
    """Takes new scores of query g into its softmax, and leaves their weights in place of the scores.

    largest, total: a number per query. result: `num_results` per query, brought down to the new largest score.
    scores: `num_scores` per query, LOWEST for a key that is not there. While nothing else was seen, such a key
        weighs 1 like any largest score; the first score of a real key then scales all of that down to 0.
    """
    before, after = largest[g], largest[g]
    for i in range(num_scores):
        after = max(after, scores[g * num_scores + i])
    rescale = exp2(before - after)
    largest[g] = after
    total[g] *= rescale
    for j in range(num_results):
        result[g * num_results + j] *= rescale
    for i in range(num_scores):
        weight = exp2(scores[g * num_scores + i] - after)
        scores[g * num_scores + i] = weight
        total[g] += weight


@device_function
def merge_lanes(g, largest, total, result, num_results, distance):
    """Puts the softmaxes of query g in lanes `distance`, `2 * distance`, ... apart together; all get the whole."""
    while distance < 32:
        other = cuda.shfl_xor_sync(ALL_LANES, largest[g], distance)
        after = max(largest[g], other)
        mine, theirs = exp2(largest[g] - after), exp2(other - after)
        total[g] = total[g] * mine + cuda.shfl_xor_sync(ALL_LANES, total[g], distance) * theirs
        for j in range(num_results):
            own = result[g * num_results + j]
            result[g * num_results + j] = own * mine + cuda.shfl_xor_sync(ALL_LANES, own, distance) * theirs
        largest[g] = after
        distance *= 2
