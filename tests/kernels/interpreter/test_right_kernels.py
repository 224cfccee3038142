"""Right kernels, with everything that a careless checker would take for a mistake; in three schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numba import cuda, float32, int32

from tests.kernels.interpreter.launching import SCHEDULES, launch

FULL = 0xFFFFFFFF
Array = np.ndarray[Any, Any]


@cuda.jit
def tree_sum(out, a):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    tile[i] = a[cuda.grid(1)]
    cuda.syncthreads()
    step = 32
    while step > 0:
        if i < step:
            tile[i] += tile[i + step]
        cuda.syncthreads()
        step //= 2
    if i == 0:
        out[cuda.blockIdx.x] = tile[0]


@cuda.jit
def tree_sum_that_ends_in_one_warp(out, a):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    tile[i] = a[cuda.grid(1)]
    cuda.syncthreads()
    if i < 32:
        step = 32
        while step > 0:
            value = tile[i + step] if i < step else 0.0
            cuda.syncwarp()
            tile[i] += value
            cuda.syncwarp()
            step //= 2
        if i == 0:
            out[cuda.blockIdx.x] = tile[0]


@cuda.jit
def shuffle_sum(out, a):
    warps = cuda.shared.array(2, float32)
    i = cuda.threadIdx.x
    value = a[cuda.grid(1)]
    for delta in (16, 8, 4, 2, 1):
        value += cuda.shfl_down_sync(FULL, value, delta)
    if cuda.laneid == 0:
        warps[i // 32] = value
    cuda.syncthreads()
    if i == 0:
        out[cuda.blockIdx.x] = warps[0] + warps[1]


@cuda.jit
def double_buffer(out, a):
    tiles = cuda.shared.array((2, 64), float32)
    i = cuda.threadIdx.x
    total = 0.0
    tiles[0, i] = a[i]
    num_tiles = len(a) // 64
    for k in range(num_tiles):
        cuda.syncthreads()
        if k + 1 < num_tiles:
            tiles[(k + 1) % 2, i] = a[(k + 1) * 64 + i]
        total += tiles[k % 2, (i + 1) % 64]
    out[i] = total


@cuda.jit
def producer_and_consumer(out, a):
    """Half a warp fills a buffer, the other half empties it; nothing but syncwarp between them."""
    buffer = cuda.shared.array(16, float32)
    lane = cuda.threadIdx.x
    for k in range(4):
        if lane < 16:
            buffer[lane] = a[16 * k + lane]
        cuda.syncwarp()
        if lane >= 16:
            out[16 * k + lane - 16] = 2 * buffer[31 - lane]
        cuda.syncwarp()


@cuda.jit
def quarters_with_their_own_masks(out, a):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    quarter = cuda.laneid // 8
    mask = 0xFF << 8 * quarter
    tile[i] = a[i]
    for _ in range(quarter + 1):  # as often as each likes
        cuda.syncwarp(mask)
        neighbour = tile[i // 8 * 8 + (i + 1) % 8]
        cuda.syncwarp(mask)
        tile[i] = neighbour
    out[i] = tile[i]


@cuda.jit
def histogram(counts, a):
    local = cuda.shared.array(8, int32)
    i = cuda.threadIdx.x
    if i < 8:
        local[i] = 0
    cuda.syncthreads()
    for k in range(cuda.grid(1), len(a), cuda.gridsize(1)):
        cuda.atomic.add(local, int(a[k]) % 8, 1)
    cuda.syncthreads()
    if i < 8:
        cuda.atomic.add(counts, i, local[i])


@cuda.jit
def grid_stride(out, a):
    for i in range(cuda.grid(1), len(a), cuda.gridsize(1)):
        out[i] = a[i] * 2


@cuda.jit
def dynamic_slices(out, a):
    whole = cuda.shared.array(0, float32)
    n = cuda.blockDim.x
    first, second = whole[:n], whole[n : 2 * n]
    i = cuda.threadIdx.x
    first[i] = a[i]
    second[i] = -a[i]
    cuda.syncthreads()
    out[i] = first[n - 1 - i] + second[(i + 1) % n]


@cuda.jit
def two_arrays_on_one_line(out, a):
    left, right = cuda.shared.array(64, float32), cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    left[i] = a[i]
    right[i] = -a[i]
    cuda.syncthreads()
    out[i] = left[63 - i] + 2 * right[63 - i]


@cuda.jit
def early_return(out, a):
    i = cuda.grid(1)
    if i >= len(a):
        return
    out[i] = a[i] + 1


@cuda.jit
def guard_around_the_work_not_the_barrier(out, a):
    tile = cuda.shared.array(64, float32)
    i = cuda.grid(1)
    if i < len(a):
        tile[cuda.threadIdx.x] = a[i]
    cuda.syncthreads()
    j = cuda.blockIdx.x * 64 + 63 - cuda.threadIdx.x
    if j < len(a):
        out[j] = tile[63 - cuda.threadIdx.x]


@cuda.jit
def last_block_sums(out, partial, counter, a):
    """Blocks hand their sums on through a fence and a counter; the last one to come adds them."""
    last = cuda.shared.array(1, int32)
    tile = cuda.shared.array(32, float32)
    i = cuda.threadIdx.x
    tile[i] = a[cuda.grid(1)]
    cuda.syncthreads()
    if i == 0:
        total = 0.0
        for k in range(32):
            total += tile[k]
        partial[cuda.blockIdx.x] = total
        cuda.threadfence()
        last[0] = cuda.atomic.add(counter, 0, 1) == cuda.gridDim.x - 1
    cuda.syncthreads()
    if last[0] and i == 1:
        total = 0.0
        for k in range(cuda.gridDim.x):
            total += partial[k]
        out[0] = total


@cuda.jit
def last_block_sums_what_all_threads_wrote(out, partial, counter, a):
    """One thread fences and counts for the whole block, and one tells the whole block."""
    last = cuda.shared.array(1, int32)
    i = cuda.threadIdx.x
    partial[cuda.grid(1)] = a[cuda.grid(1)]
    cuda.syncthreads()
    if i == 0:
        cuda.threadfence()
        last[0] = cuda.atomic.add(counter, 0, 1) == cuda.gridDim.x - 1
    cuda.syncthreads()
    if last[0] and i == 1:
        total = 0.0
        for k in range(len(partial)):
            total += partial[k]
        out[0] = total


@cuda.jit
def last_thread_sums(out, a):
    """The same within a block, with no barrier at all."""
    tile = cuda.shared.array(32, float32)
    counter = cuda.shared.array(1, int32)
    i = cuda.threadIdx.x
    if i == 0:
        counter[0] = 0
    cuda.syncthreads()
    tile[i] = a[i]
    cuda.threadfence_block()
    if cuda.atomic.add(counter, 0, 1) == cuda.blockDim.x - 1:
        total = 0.0
        for k in range(32):
            total += tile[k]
        out[0] = total


@cuda.jit
def maximum_by_compare_and_swap(out, a):
    value = int(a[cuda.grid(1)])
    seen = out[0]
    while value > seen:
        before = cuda.atomic.cas(out, 0, seen, value)
        if before == seen:
            break
        seen = before


@cuda.jit
def shared_memory_in_a_loop_of_blocks(out, a):
    tile = cuda.shared.array(1, float32)
    if cuda.threadIdx.x == 0:
        tile[0] = a[cuda.blockIdx.x]
    cuda.syncthreads()
    out[cuda.grid(1)] = tile[0]


@cuda.jit
def everybody_reads_one_element(out, a):
    out[cuda.grid(1)] = a[0] + a[len(a) - 1]


@cuda.jit
def lanes_of_a_branch(out, a):
    i = cuda.threadIdx.x
    if a[i] % 2 == 0:
        mask = cuda.activemask()
        out[i] = cuda.popc(mask)
        cuda.syncwarp(mask)
    else:
        mask = cuda.activemask()
        out[i] = -cuda.popc(mask)
        cuda.syncwarp(mask)


@cuda.jit
def lanes_leave_one_after_the_other(out, a):
    """A lane that has left is not waited for."""
    i = cuda.threadIdx.x
    total = 0.0
    for k in range(i):
        cuda.syncwarp()
        total += a[k]
    out[i] = total


def sums(a: Array, block: int) -> Array:
    return a.reshape(-1, block).sum(axis=1)


def neighbours(a: Array) -> Array:
    """`quarters_with_their_own_masks` in numpy: quarter q turned by q + 1 places."""
    eights = a.reshape(-1, 8)
    return np.concatenate([np.roll(row, -(k % 4 + 1)) for k, row in enumerate(eights)])


def running_sums(a: Array) -> Array:
    return np.concatenate(([0], np.cumsum(a)[:-1])).astype(np.float32)


def numbers(n: int) -> Array:
    """Small integers in an order of their own: sums are exact, and a wrong index shows."""
    return np.random.default_rng(n).permutation(n).astype(np.float32)


def zeros(n: int, dtype: Any = np.float32) -> Array:
    return np.zeros(n, dtype)


@dataclass(frozen=True)
class Case:
    kernel: Any
    configuration: tuple[Any, ...]
    arguments: Callable[[], tuple[Array, ...]]  # fresh ones; the first is the output
    expected: Callable[[], Array]


A64, A128, A256, A100 = numbers(64), numbers(128), numbers(256), numbers(100)
CASES = {
    "tree sum": Case(tree_sum, (4, 64), lambda: (zeros(4), A256), lambda: sums(A256, 64)),
    "warp tree": Case(
        tree_sum_that_ends_in_one_warp, (4, 64), lambda: (zeros(4), A256), lambda: sums(A256, 64)
    ),
    "shuffle sum": Case(shuffle_sum, (4, 64), lambda: (zeros(4), A256), lambda: sums(A256, 64)),
    "double buffer": Case(
        double_buffer,
        (1, 64),
        lambda: (zeros(64), A256),
        lambda: np.roll(A256.reshape(4, 64).sum(axis=0), -1),
    ),
    "producer and consumer": Case(
        producer_and_consumer,
        (1, 32),
        lambda: (zeros(64), A64),
        lambda: 2 * A64.reshape(4, 16)[:, ::-1].reshape(-1),
    ),
    "quarter masks": Case(
        quarters_with_their_own_masks, (1, 64), lambda: (zeros(64), A64), lambda: neighbours(A64)
    ),
    "histogram": Case(
        histogram,
        (3, 32),
        lambda: (zeros(8, np.int32), A100),
        lambda: np.bincount(A100.astype(int) % 8, minlength=8),
    ),
    "grid stride": Case(grid_stride, (2, 16), lambda: (zeros(100), A100), lambda: 2 * A100),
    "dynamic slices": Case(
        dynamic_slices,
        (1, 64, 0, 512),
        lambda: (zeros(64), A64),
        lambda: A64[::-1] - np.roll(A64, -1),
    ),
    "two arrays on one line": Case(
        two_arrays_on_one_line, (1, 64), lambda: (zeros(64), A64), lambda: -A64[::-1]
    ),
    "early return": Case(early_return, (4, 32), lambda: (zeros(100), A100), lambda: A100 + 1),
    "guard": Case(guard_around_the_work_not_the_barrier, (2, 64), lambda: (zeros(100), A100), lambda: A100),
    "last block": Case(
        last_block_sums,
        (4, 32),
        lambda: (zeros(1), zeros(4), zeros(1, np.int32), A128),
        lambda: A128.sum(keepdims=True),
    ),
    "last block, all threads": Case(
        last_block_sums_what_all_threads_wrote,
        (4, 8),
        lambda: (zeros(1), zeros(32), zeros(1, np.int32), A64),
        lambda: A64[:32].sum(keepdims=True),
    ),
    "last thread": Case(
        last_thread_sums, (1, 32), lambda: (zeros(1), A64), lambda: A64[:32].sum(keepdims=True)
    ),
    "compare and swap": Case(
        maximum_by_compare_and_swap,
        (2, 32),
        lambda: (zeros(1, np.int64), A64),
        lambda: A64.max(keepdims=True),
    ),
    "shared memory per block": Case(
        shared_memory_in_a_loop_of_blocks, (4, 8), lambda: (zeros(32), A64), lambda: np.repeat(A64[:4], 8)
    ),
    "one element": Case(
        everybody_reads_one_element,
        (2, 32),
        lambda: (zeros(64), A64),
        lambda: np.repeat(A64[0] + A64[-1], 64),
    ),
    "lanes of a branch": Case(
        lanes_of_a_branch,
        (1, 32),
        lambda: (zeros(32), np.arange(32) // 10),
        lambda: np.where(np.arange(32) // 10 % 2 == 0, 20, -12),
    ),
    "lanes leave": Case(
        lanes_leave_one_after_the_other, (1, 32), lambda: (zeros(32), A64), lambda: running_sums(A64[:32])
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CASES)
def test_no_accusation_and_the_right_result(name: str, schedule: str) -> None:
    case = CASES[name]
    arguments = case.arguments()
    launch(case.kernel, case.configuration, *arguments, schedule=schedule, seed=5)
    np.testing.assert_array_equal(arguments[0], case.expected())
