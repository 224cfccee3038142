"""Known reports about simulators and graders, one test each, named after the case."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import cuda, float32, int32

from kernels.interpreter import BarrierError, BoundsError, KernelError, RaceError
from tests.kernels.interpreter.launching import SCHEDULES, failure, launch


def floats(n: int) -> np.ndarray[Any, Any]:
    return np.zeros(n, np.float32)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_g1_constant_data_hides_a_wrong_index(schedule: str) -> None:
    """With ones everywhere the wrong kernel is right; with distinct values and three blocks it is not."""

    @cuda.jit
    def wrong(out, a):
        out[cuda.grid(1)] = a[cuda.threadIdx.x] + 10

    ones, distinct = np.ones(8, np.float32), np.arange(12, dtype=np.float32)
    out = floats(8)
    launch(wrong, (2, 4), out, ones, schedule=schedule)
    assert (out == ones + 10).all()
    out = floats(12)
    launch(wrong, (3, 4), out, distinct, schedule=schedule)
    assert (out != distinct + 10).sum() == 8


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_g2_a_missing_guard(schedule: str) -> None:
    @cuda.jit
    def no_guard(out, a):
        i = cuda.threadIdx.x
        out[i] = a[i] + 10

    error = failure(BoundsError, no_guard, (1, 8), floats(4), floats(4), schedule=schedule)
    assert error.thread is not None and error.thread[0] >= 4


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_g3_the_edge_of_a_block(schedule: str) -> None:
    """A window sum that looks back within its tile, guarded by the global index: right for one block only."""

    @cuda.jit
    def window_sum(out, a):
        tile = cuda.shared.array(4, float32)
        i, local = cuda.grid(1), cuda.threadIdx.x
        tile[local] = a[i]
        cuda.syncthreads()
        total = tile[local]
        if i > 0:
            total += tile[local - 1]
        out[i] = total

    launch(window_sum, (1, 4), floats(4), floats(4), schedule=schedule)
    error = failure(BoundsError, window_sum, (3, 4), floats(12), floats(12), schedule=schedule)
    assert error.thread == (0, 0, 0) and error.source == "total += tile[local - 1]"


class TestG4TheSimulatorIsAWeakJudge:
    """What Numba's own simulator lets pass; each in every schedule."""

    @pytest.mark.parametrize("schedule", SCHEDULES)
    def test_a_reversal_without_a_barrier(self, schedule: str) -> None:
        @cuda.jit
        def kernel(out, a):
            tile = cuda.shared.array(64, float32)
            i = cuda.threadIdx.x
            tile[i] = a[i]
            out[i] = tile[63 - i]

        failure(RaceError, kernel, (1, 64), floats(64), floats(64), schedule=schedule)

    @pytest.mark.parametrize("schedule", SCHEDULES)
    def test_a_barrier_in_a_branch(self, schedule: str) -> None:
        @cuda.jit
        def kernel(out):
            if cuda.threadIdx.x < 16:
                cuda.syncthreads()
            out[cuda.threadIdx.x] = 1

        failure(BarrierError, kernel, (1, 32), floats(32), schedule=schedule)

    @pytest.mark.parametrize("schedule", SCHEDULES)
    def test_an_early_return_before_a_barrier(self, schedule: str) -> None:
        @cuda.jit
        def kernel(out):
            if cuda.threadIdx.x == 7:
                return
            cuda.syncthreads()
            out[cuda.threadIdx.x] = 1

        failure(BarrierError, kernel, (1, 32), floats(32), schedule=schedule)

    def test_shared_memory_that_nobody_wrote(self) -> None:
        @cuda.jit
        def kernel(out):
            tile = cuda.shared.array(32, float32)
            tile[cuda.threadIdx.x] += 1.0
            out[cuda.threadIdx.x] = tile[cuda.threadIdx.x]

        out = floats(32)
        launch(kernel, (1, 32), out)
        assert np.isnan(out).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_g8_a_failing_kernel_ends(schedule: str) -> None:
    """One of four threads raises before a barrier at which the others wait."""

    @cuda.jit
    def kernel(out, a):
        i = cuda.threadIdx.x
        if i == 2:
            out[i] = a[i] // 0
        cuda.syncthreads()
        out[i] = a[i]

    error = failure(KernelError, kernel, (2, 4), floats(4), np.ones(4, np.int32), schedule=schedule)
    assert error.thread == (2, 0, 0)
    assert "block (" in str(error) and "thread (2, 0, 0)" in str(error)
    assert isinstance(error.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_s33_padding_slot(schedule: str) -> None:
    """Slot -1 writes nothing. Taken as an index it is the last slot of the last block."""

    @cuda.jit
    def careless(cache, values, slots):
        i = cuda.threadIdx.x
        slot = slots[i]
        cache[slot // 4, slot % 4] = values[i]

    @cuda.jit
    def careful(cache, values, slots):
        i = cuda.threadIdx.x
        slot = slots[i]
        if slot >= 0:
            cache[slot // 4, slot % 4] = values[i]

    cache, values, slots = np.zeros((3, 4), np.float32), np.array([10.0, 99.0]), np.array([5, -1])
    error = failure(BoundsError, careless, (1, 2), cache, values, slots, schedule=schedule)
    assert error.thread == (1, 0, 0) and "negative" in str(error)
    cache[:] = 0
    launch(careful, (1, 2), cache, values, slots, schedule=schedule)
    expected = np.zeros((3, 4))
    expected[1, 1] = 10
    np.testing.assert_array_equal(cache, expected)


def test_s34_offsets_larger_than_32_bits() -> None:
    """Integers do not overflow here, so a kernel that counts in 32 bits has to say so to be found out."""

    @cuda.jit
    def offsets(out, block, per_block):
        out[0] = block * per_block
        out[1] = int32(block * per_block)

    out = np.zeros(2, np.int64)
    launch(offsets, (1, 1), out, 65537, 16 * 2 * 8 * 128)
    assert out.tolist() == [2_147_516_416, -2_147_450_880]
