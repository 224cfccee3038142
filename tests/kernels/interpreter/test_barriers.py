"""Threads that do not meet: different barriers, early exits, wrong masks, deadlocks."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from greenlet import greenlet
from numba import cuda

from kernels.interpreter import BarrierError, DeadlockError, KernelError, LimitError
from tests.kernels.interpreter.launching import SCHEDULES, failure, launch, source_lines

FULL = 0xFFFFFFFF


def floats(n: int) -> np.ndarray[Any, Any]:
    return np.zeros(n, np.float32)


@cuda.jit
def barrier_in_both_branches(out):
    i = cuda.threadIdx.x
    if i < 16:
        out[i] = 1.0
        cuda.syncthreads()  # first
    else:
        cuda.syncthreads()  # second
        out[i] = 2.0


@cuda.jit
def barrier_in_one_branch(out):
    i = cuda.threadIdx.x
    if i < 16:
        cuda.syncthreads()
    out[i] = 1.0


@cuda.jit
def early_return_before_a_barrier(out):
    i = cuda.grid(1)
    if i >= len(out):
        return
    cuda.syncthreads()
    out[i] = 1.0


@cuda.jit
def barriers_as_many_as_the_thread_number(out):
    for _ in range(cuda.threadIdx.x // 32 + 1):
        cuda.syncthreads()


@cuda.jit
def count_here_and_barrier_there(out):
    if cuda.threadIdx.x == 0:
        out[0] = cuda.syncthreads_count(1)
    else:
        cuda.syncthreads()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "kernel",
    [
        barrier_in_both_branches,
        barrier_in_one_branch,
        early_return_before_a_barrier,
        barriers_as_many_as_the_thread_number,
        count_here_and_barrier_there,
    ],
)
def test_a_divergent_barrier_is_found_in_every_schedule(kernel: Any, schedule: str) -> None:
    out = floats(40 if kernel is early_return_before_a_barrier else 64)
    error = failure(BarrierError, kernel, (1, 64), out, schedule=schedule)
    assert error.line in source_lines(kernel, "cuda.syncthreads")
    assert error.block == (0, 0, 0) and error.thread is not None


def test_different_barriers_are_both_named() -> None:
    error = failure(BarrierError, barrier_in_both_branches, (1, 64), floats(64))
    (first,), (second,) = (source_lines(barrier_in_both_branches, word) for word in ("# first", "# second"))
    assert (error.line, error.thread) == (first, (0, 0, 0))
    assert f"16 threads wait at this barrier, but 48 at another: thread (16, 0, 0) at line {second}" in str(
        error
    )


def test_those_who_left_are_counted() -> None:
    error = failure(BarrierError, early_return_before_a_barrier, (2, 32), floats(40))
    assert error.block == (1, 0, 0)
    assert "8 threads wait at this barrier, but 24 have left the kernel before it" in str(error)


def test_a_lane_outside_its_own_mask() -> None:
    @cuda.jit
    def kernel(out):
        out[cuda.threadIdx.x] = cuda.shfl_sync(0x0000FFFF, 1.0, 0)

    error = failure(BarrierError, kernel, (1, 32), floats(32))
    assert error.thread == (16, 0, 0)
    assert "lane 16 calls shfl_sync, but its mask 0x0000ffff leaves it out" in str(error)


@cuda.jit
def shuffle_in_one_branch(out):
    i = cuda.threadIdx.x
    if i < 16:
        out[i] = cuda.shfl_xor_sync(FULL, 1.0, 1)
    else:
        cuda.syncwarp()


@cuda.jit
def warp_at_a_barrier_lane_at_a_vote(out):
    if cuda.threadIdx.x == 40:
        cuda.all_sync(FULL, True)
    cuda.syncthreads()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kernel", [shuffle_in_one_branch, warp_at_a_barrier_lane_at_a_vote])
def test_a_deadlock_is_found_in_every_schedule(kernel: Any, schedule: str) -> None:
    error = failure(DeadlockError, kernel, (1, 64), floats(64), schedule=schedule)
    assert "waits for ever at" in str(error) and "since thread" in str(error)


def test_a_deadlock_names_who_waits_for_whom() -> None:
    error = failure(DeadlockError, warp_at_a_barrier_lane_at_a_vote, (1, 64), floats(64))
    assert error.thread == (40, 0, 0)
    assert "all_sync with mask 0xffffffff, since thread (32, 0, 0) waits at syncthreads" in str(error)


def test_an_endless_loop_ends() -> None:
    @cuda.jit
    def kernel(flag):
        while flag[0] == 0:
            pass

    error = failure(LimitError, kernel, (1, 1), floats(1), max_accesses=10_000)
    assert "max_accesses" in str(error) and error.source == "while flag[0] == 0:"


@cuda.jit
def shuffle_for_ever(out):
    value, offset = cuda.laneid, 16
    while offset > 0:  # nobody halves it
        value += cuda.shfl_down_sync(0xFFFFFFFF, value, offset)
    out[0] = value


@cuda.jit
def barrier_for_ever(out):
    while cuda.gridDim.x > 0:
        cuda.syncthreads()


@pytest.mark.parametrize(
    ("kernel", "line"), [(shuffle_for_ever, "shfl_down_sync"), (barrier_for_ever, "syncthreads")]
)
def test_an_endless_loop_that_only_waits_ends(kernel: Any, line: str) -> None:
    error = failure(LimitError, kernel, (1, 32), floats(1), max_accesses=10_000)
    assert line in error.source and "never ends" in str(error)


@pytest.mark.parametrize("at_once", [1, 1000])  # accesses after which the log is looked at and emptied
def test_the_limit_is_over_the_whole_launch(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.interpreter.launch.ACCESSES_AT_ONCE", at_once)

    @cuda.jit
    def kernel(out):
        out[cuda.grid(1)] = 1.0
        cuda.syncthreads()

    needed = 100 + 4 * 100  # a wait counts as four accesses
    launch(kernel, (10, 10), floats(100), max_accesses=needed)
    failure(LimitError, kernel, (10, 10), floats(100), max_accesses=needed - 1)


@cuda.jit
def one_thread_fails(out):
    if cuda.threadIdx.x == 2:
        out[99] = 1.0
    cuda.syncthreads()


def test_no_greenlet_is_left_behind(capsys: pytest.CaptureFixture[str]) -> None:
    def alive() -> int:
        gc.collect()
        return sum(1 for o in gc.get_objects() if type(o) is greenlet and not o.dead and o.gr_frame)

    before = alive()
    for kernel in (one_thread_fails, barrier_in_both_branches, shuffle_in_one_branch):
        with pytest.raises(KernelError):
            launch(kernel, (1, 64), floats(64))
    assert alive() == before
    assert capsys.readouterr() == ("", "")
