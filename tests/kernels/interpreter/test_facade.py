"""The functions of `numba.cuda`, one by one."""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import pytest
from numba import cuda, float32, int32

from kernels.interpreter import KernelError
from tests.kernels.interpreter.launching import SCHEDULES, failure, launch

FULL = 0xFFFFFFFF
LANES = np.arange(32)
TABLE = np.array([[1.5, 2.5], [3.5, 4.5]], dtype=np.float32)


def per_lane(kernel: Any, schedule: Any = "in_order", lanes: int = 32) -> list[float]:
    """What each lane of one warp stores in `out`."""
    out = np.zeros(lanes)
    launch(kernel, (1, lanes), out, schedule=schedule)
    return out.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_shuffles(schedule: str) -> None:
    @cuda.jit
    def named(out):
        out[cuda.laneid] = cuda.shfl_sync(FULL, 10 * cuda.laneid, (cuda.laneid + 5) % 32)

    @cuda.jit
    def up(out):
        out[cuda.laneid] = cuda.shfl_up_sync(FULL, cuda.laneid, 3)

    @cuda.jit
    def down(out):
        out[cuda.laneid] = cuda.shfl_down_sync(FULL, cuda.laneid, 3)

    @cuda.jit
    def across(out):
        out[cuda.laneid] = cuda.shfl_xor_sync(FULL, cuda.laneid, 6)

    assert per_lane(named, schedule) == [10 * ((k + 5) % 32) for k in LANES]
    assert per_lane(up, schedule) == [k - 3 if k >= 3 else k for k in LANES]
    assert per_lane(down, schedule) == [k + 3 if k < 29 else k for k in LANES]
    assert per_lane(across, schedule) == [k ^ 6 for k in LANES]


def test_a_shuffle_from_a_lane_that_is_not_there_gives_nothing_good() -> None:
    @cuda.jit
    def kernel(out):
        out[cuda.laneid] = cuda.shfl_down_sync(FULL, 1.0, 8)

    values = per_lane(kernel, lanes=16)
    assert values[:8] == [1.0] * 8 and np.isnan(values[8:]).all()


def test_a_sum_over_half_a_warp() -> None:
    @cuda.jit
    def kernel(out):
        value = float(cuda.laneid)
        for delta in (8, 4, 2, 1):
            value += cuda.shfl_down_sync(FULL, value, delta)
        out[cuda.laneid] = value

    assert per_lane(kernel, lanes=16)[0] == sum(range(16))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_votes(schedule: str) -> None:
    @cuda.jit
    def kernel(out):
        lane = cuda.laneid
        out[0 + lane * 6] = cuda.ballot_sync(FULL, lane % 3 == 0)
        out[1 + lane * 6] = cuda.all_sync(FULL, lane < 32)
        out[2 + lane * 6] = cuda.all_sync(FULL, lane < 31)
        out[3 + lane * 6] = cuda.any_sync(FULL, lane == 17)
        out[4 + lane * 6] = cuda.eq_sync(FULL, lane < 16)
        out[5 + lane * 6] = cuda.match_any_sync(FULL, lane % 2)

    out = np.zeros(32 * 6, np.int64)
    launch(kernel, (1, 32), out, schedule=schedule)
    ballot = sum(1 << k for k in range(0, 32, 3))
    for lane, row in enumerate(out.reshape(32, 6).tolist()):
        assert row == [ballot, 1, 0, 1, 0, 0xAAAAAAAA if lane % 2 else 0x55555555]


def test_match_all_and_masks() -> None:
    @cuda.jit
    def kernel(out):
        same, yes = cuda.match_all_sync(FULL, 7)
        none, no = cuda.match_all_sync(FULL, cuda.laneid)
        out[cuda.laneid] = same == FULL and yes and none == 0 and not no
        out[cuda.laneid] += cuda.lanemask_lt() == (1 << cuda.laneid) - 1
        out[cuda.laneid] += cuda.activemask() == FULL
        out[cuda.laneid] += cuda.warpsize == 32

    assert per_lane(kernel) == [4.0] * 32
    assert launch(kernel, (1, 32), np.zeros(32)).votes == 2  # an active mask is no vote


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_barriers_that_count(schedule: str) -> None:
    @cuda.jit
    def kernel(out):
        i = cuda.threadIdx.x
        out[i] = cuda.syncthreads_count(i % 5 == 0)
        out[i] += 100 * cuda.syncthreads_and(i < 40)
        out[i] += 1000 * cuda.syncthreads_or(i == 3)

    out = np.zeros(40)
    launch(kernel, (1, 40), out, schedule=schedule)
    assert (out == 8 + 100 + 1000).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_atomics(schedule: str) -> None:
    @cuda.jit
    def kernel(cells, real, grid):
        i = cuda.threadIdx.x
        cuda.atomic.add(cells, 0, i)
        cuda.atomic.sub(cells, 1, 1)
        cuda.atomic.max(cells, 2, i * 7 % 32)
        cuda.atomic.min(cells, 3, -(i * 7 % 32))
        cuda.atomic.and_(cells, 4, FULL ^ (1 << i))
        cuda.atomic.or_(cells, 5, 1 << i)
        cuda.atomic.xor(cells, 6, 1 << (i % 31))
        cuda.atomic.inc(cells, 7, 9)
        cuda.atomic.dec(cells, 8, 4)
        cuda.atomic.cas(cells, 9, 0, 77)
        cuda.atomic.add(real, 0, 0.25)
        cuda.atomic.nanmax(real, 1, float(i))
        cuda.atomic.add(grid, (i % 2, 1), 1)

    cells = np.zeros(10, np.int64)
    cells[4] = FULL
    real, grid = np.array([0.0, math.nan], np.float32), np.zeros((2, 2), np.int32)
    launch(kernel, (1, 32), cells, real, grid, schedule=schedule)
    assert cells.tolist() == [496, -32, 31, -31, 0, FULL, 0x7FFFFFFE, 2, 3, 77]
    assert real.tolist() == [8.0, 31.0] and grid.tolist() == [[0, 16], [0, 16]]


def test_atomics_return_the_old_value() -> None:
    @cuda.jit
    def kernel(out, cell):
        i = cuda.threadIdx.x
        out[i] = cuda.atomic.add(cell, 0, 2)
        if i == 3:
            out[4] = cuda.atomic.exch(cell, 0, 50)
            out[5] = cuda.atomic.cas(cell, 0, 50, 51)
            out[6] = cuda.atomic.compare_and_swap(cell, 50, 52)

    out = np.zeros(7)
    launch(kernel, (1, 4), out, np.zeros(1, np.int32))
    assert out.tolist() == [0, 2, 4, 6, 8, 50, 51]


def test_integer_functions() -> None:
    @cuda.jit
    def kernel(out):
        out[0], out[1], out[2] = cuda.popc(0b1011), cuda.clz(1), cuda.ffs(0b1000)
        out[3], out[4], out[5] = cuda.brev(1), cuda.popc(-1), cuda.ffs(0)
        out[6], out[7] = cuda.clz(0), cuda.selp(out[0] > 0, 5, 6)
        out[8] = cuda.fma(2, 3, 4)

    out = np.zeros(9, np.int64)
    launch(kernel, (1, 1), out)
    assert out.tolist() == [3, 31, 4, 1 << 31, 32, 0, 32, 5, 10]


def test_math_goes_on_where_python_raises() -> None:
    @cuda.jit
    def kernel(out):
        out[0], out[1] = math.exp(1000.0), math.log(0.0)
        out[2], out[3] = math.sqrt(-1.0), math.exp(-math.inf)
        out[4], out[5] = math.log(-1.0), math.fabs(-2.0)
        out[6] = np.exp(1000.0)

    out = np.zeros(7)
    launch(kernel, (1, 1), out)
    np.testing.assert_array_equal(out, [math.inf, -math.inf, math.nan, 0, math.nan, 2, math.inf])


def test_casts_round_and_wrap() -> None:
    @cuda.jit
    def kernel(out):
        out[0], out[1] = float32(0.1), np.float32(1e300)
        out[2], out[3] = numba.types.float16(0.1), numba.float64(0.1)
        out[4], out[5] = int32(2**31), numba.types.uint8(257.9)
        out[6], out[7] = numba.int64(2**63), np.int16(-40000)
        out[8] = float32(1.0) / 3  # a double: only the cast rounds

    out = np.zeros(9)
    launch(kernel, (1, 1), out)
    expected = [np.float32(0.1), math.inf, np.float16(0.1), 0.1, -(2**31), 1, -(2.0**63), 25536, 1 / 3]
    assert out.tolist() == [float(value) for value in expected]


def test_half_precision_and_libdevice() -> None:
    from numba.cuda import libdevice

    @cuda.jit
    def kernel(out):
        out[0] = cuda.fp16.hadd(2048.0, 1.0)
        out[1] = cuda.fp16.hfma(0.1, 3.0, 1.0)
        out[2], out[3] = libdevice.rsqrtf(4.0), libdevice.exp2f(3.0)
        out[4], out[5] = libdevice.fast_expf(0.0), libdevice.fmaxf(math.nan, 2.0)

    out = np.zeros(6)
    launch(kernel, (1, 1), out)
    assert out.tolist() == [2048.0, float(np.float16(1.3)), 0.5, 8.0, 1.0, 2.0]


def test_constant_memory() -> None:
    @cuda.jit
    def kernel(out):
        constant = cuda.const.array_like(TABLE)
        out[cuda.threadIdx.x] = constant[1, cuda.threadIdx.x] + TABLE[0, 0]

    out = np.zeros(2)
    report = launch(kernel, (1, 2), out)
    assert out.tolist() == [5.0, 6.0]
    assert report.total("const", "read").lanes == 4


def test_local_arrays_belong_to_their_threads() -> None:
    @cuda.jit
    def kernel(out):
        mine = cuda.local.array((2, 2), float32)
        for k in range(4):
            mine[k // 2, k % 2] = cuda.threadIdx.x + k
        cuda.syncthreads()
        out[cuda.threadIdx.x] = mine[0, 1] * mine[1, 1]

    out = np.zeros(40)
    report = launch(kernel, (1, 40), out)
    assert out.tolist() == [(i + 1) * (i + 3) for i in range(40)]
    assert report.total("local", "write").lanes == 160 and report.total("local").sectors == 0


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (lambda: cuda.cg.this_grid(), "has no cuda.cg: blocks run one after another"),
        (lambda: cuda.float32x4(1, 2, 3, 4), "has no cuda.float32x4"),
        (lambda: cuda.to_device(1), "has no cuda.to_device"),
        (lambda: cuda.atomic.multiply(None, 0, 1), "has no cuda.atomic.multiply"),
        (lambda: cuda.syncthread(), "has no cuda.syncthread; is it syncthreads?"),
    ],
)
def test_what_is_missing_is_named(use: Any, says: str) -> None:
    @cuda.jit
    def kernel():
        use()

    assert says in str(failure(KernelError, kernel, (1, 1)))
