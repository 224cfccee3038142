"""Races are found whatever the schedule, and named with both sides."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from numba import cuda, float32, int32

from kernels.interpreter import KernelError, RaceError, interpret
from tests.kernels.interpreter.launching import SCHEDULES, failure, launch, source_lines


@cuda.jit
def reverse_without_barrier(out, a):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    tile[i] = a[i]
    out[i] = tile[63 - i]


@cuda.jit
def sum_with_a_barrier_dropped(out, a):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    tile[i] = a[i]
    cuda.syncthreads()
    step = 32
    while step > 0:
        if i < step:
            tile[i] += tile[i + step]
        step //= 2
    if i == 0:
        out[0] = tile[0]


@cuda.jit
def tile_overwritten_too_early(out, a):
    tile = cuda.shared.array(32, float32)
    i = cuda.threadIdx.x
    total = 0.0
    for start in range(0, 128, 32):
        tile[i] = a[start + i]
        cuda.syncthreads()
        for k in range(32):
            total += tile[k]
        # here a barrier is missing
    out[i] = total


@cuda.jit
def all_write_the_same(out):
    out[0] = 1.0


@cuda.jit
def blocks_write_the_same_element(out):
    if cuda.threadIdx.x == 0:
        out[cuda.blockIdx.x // 2] = cuda.blockIdx.x


@cuda.jit
def block_reads_what_another_writes(out, a):
    i = cuda.grid(1)
    out[i] = a[i]
    if i > 0:
        a[i] = out[i - 1]


@cuda.jit
def counter_read_while_others_add(out, counter):
    cuda.atomic.add(counter, 0, 1)
    out[cuda.threadIdx.x] = counter[0]


@cuda.jit
def warps_meet_only_within_themselves(out, a):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    tile[i] = a[i]
    cuda.syncwarp()
    out[i] = tile[63 - i]


@cuda.jit
def half_masks_do_not_order_the_halves(out, a):
    tile = cuda.shared.array(32, float32)
    i = cuda.threadIdx.x
    tile[i] = a[i]
    cuda.syncwarp(0x0000FFFF if i < 16 else 0xFFFF0000)
    out[i] = tile[31 - i]


@cuda.jit
def a_shuffle_is_no_memory_barrier(out, a):
    tile = cuda.shared.array(32, float32)
    i = cuda.threadIdx.x
    tile[i] = a[i]
    cuda.shfl_sync(0xFFFFFFFF, i, 0)
    out[i] = tile[31 - i]


@cuda.jit
def bytes_and_words_of_one_memory(out):
    words = cuda.shared.array(0, int32)
    halves = cuda.shared.array(0, np.int16)
    i = cuda.threadIdx.x
    words[i] = i
    out[i] = halves[(2 * i + 3) % 64]


@cuda.jit
def flag_without_a_fence(out, partial, counter):
    i = cuda.blockIdx.x
    partial[i] = i + 1.0
    if cuda.atomic.add(counter, 0, 1) == cuda.gridDim.x - 1:
        for k in range(cuda.gridDim.x):
            out[0] += partial[k]


A = np.arange(64, dtype=np.float32)


def floats(n: int) -> np.ndarray[Any, Any]:
    return np.zeros(n, np.float32)


def ints(n: int) -> np.ndarray[Any, Any]:
    return np.zeros(n, np.int32)


WRONG: dict[str, tuple[Any, tuple[Any, ...], Any]] = {  # kernel, configuration, fresh arguments
    "reverse": (reverse_without_barrier, (1, 64), lambda: (floats(64), A)),
    "reduction": (sum_with_a_barrier_dropped, (1, 64), lambda: (floats(1), A)),
    "tile": (tile_overwritten_too_early, (1, 32), lambda: (floats(32), floats(128))),
    "same value": (all_write_the_same, (1, 2), lambda: (floats(1),)),
    "two blocks write": (blocks_write_the_same_element, (4, 32), lambda: (floats(2),)),
    "two blocks, read and write": (block_reads_what_another_writes, (4, 1), lambda: (floats(4), floats(4))),
    "plain read beside atomics": (counter_read_while_others_add, (1, 32), lambda: (floats(32), ints(1))),
    "across warps": (warps_meet_only_within_themselves, (1, 64), lambda: (floats(64), A)),
    "across masks": (half_masks_do_not_order_the_halves, (1, 32), lambda: (floats(32), A)),
    "shuffle": (a_shuffle_is_no_memory_barrier, (1, 32), lambda: (floats(32), A)),
    "parts of an element": (bytes_and_words_of_one_memory, (1, 32, 0, 128), lambda: (floats(32),)),
    "no fence": (flag_without_a_fence, (4, 1), lambda: (floats(1), floats(4), ints(1))),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", WRONG)
def test_a_race_is_found_in_every_schedule(name: str, schedule: str) -> None:
    kernel, configuration, arguments = WRONG[name]
    error = failure(RaceError, kernel, configuration, *arguments(), schedule=schedule)
    assert error.kernel == kernel.py_func.__name__
    assert (error.block, error.thread) != (error.other.block, error.other.thread)
    assert "races with" in str(error)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_both_sides_are_named(schedule: str) -> None:
    error = failure(RaceError, reverse_without_barrier, (1, 64), floats(64), A, schedule=schedule)
    (writes,), (reads,) = (
        source_lines(reverse_without_barrier, "tile[i] = a[i]"),
        source_lines(reverse_without_barrier, "out[i] = tile[63 - i]"),
    )
    assert {error.line, error.other.line} == {writes, reads}
    assert error.thread is not None and error.other.thread is not None
    assert error.thread[0] + error.other.thread[0] == 63
    assert "of tile[" in str(error) and "no barrier between them" in str(error)
    assert error.source in str(error) and error.source.startswith(("tile[i]", "out[i]"))


def test_two_blocks_are_named() -> None:
    error = failure(RaceError, blocks_write_the_same_element, (4, 32), floats(2))
    assert (error.block, error.other.block) == ((1, 0, 0), (0, 0, 0))
    assert "block (0, 0, 0)" in str(error) and "write of out[0]" in str(error)
    assert "even if they write the same value" in str(error)


def test_an_error_goes_to_another_process_whole() -> None:
    error = failure(RaceError, reverse_without_barrier, (1, 64), floats(64), A)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.place, again.other) == (str(error), error.place, error.other)
    plain = KernelError("something", error.place)
    assert str(pickle.loads(pickle.dumps(plain))) == str(plain)


def test_an_element_of_a_matrix_is_named_by_its_indices() -> None:
    @cuda.jit
    def kernel(out):
        out[2, 3 + cuda.threadIdx.x // 2] = 1.0

    error = failure(RaceError, kernel, (1, 4), np.zeros((4, 8), np.float32))
    assert "out[2, 3]" in str(error)


def test_two_views_of_one_tensor_are_one_memory() -> None:
    @cuda.jit
    def kernel(a, b):
        i = cuda.threadIdx.x
        a[i] = 1.0
        b[i] = 2.0

    memory = np.zeros(40, np.float32)
    failure(RaceError, kernel, (1, 32), memory[:32], memory[8:])
    launch(kernel, (1, 8), memory[:8], memory[8:])


def test_a_race_that_leads_to_another_error_is_what_is_reported() -> None:
    @cuda.jit
    def kernel(out, a):
        where = cuda.shared.array(32, int32)
        i = cuda.threadIdx.x
        where[i] = i
        out[where[31 - i]] = a[i]  # reads what is not written yet

    error = failure(RaceError, kernel, (1, 32), floats(32), A)
    assert error.__cause__ is not None and "negative" in str(error.__cause__)


def test_the_search_can_be_switched_off() -> None:
    with interpret(races=False):
        reverse_without_barrier[1, 64](floats(64), A)
