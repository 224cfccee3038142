"""Launches go to the interpreter inside `interpret`, and nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import cuda
from numba.cuda.dispatcher import CUDADispatcher

from kernels.interpreter import BoundsError, KernelError, interpret
from kernels.interpreter.session import Interception
from tests.kernels.interpreter.launching import failure

ROOT = Path(__file__).parents[3]


@cuda.jit
def fill(out, value):
    i = cuda.grid(1)
    if i < len(out):
        out[i] = value


@cuda.jit
def wrong(out):
    out[cuda.threadIdx.x + cuda.blockIdx.x] = 1.0


def methods() -> list[Any]:
    return [getattr(CUDADispatcher, name) for name in Interception.NAMES]


ORIGINALS = methods()


@pytest.fixture(autouse=True)
def nothing_stays_changed() -> Any:
    yield
    assert methods() == ORIGINALS


def test_methods_are_exchanged_inside_and_put_back() -> None:
    with interpret():
        assert all(now is not before for now, before in zip(methods(), ORIGINALS, strict=True))
    assert methods() == ORIGINALS


def test_they_are_put_back_after_an_error() -> None:
    failure(BoundsError, wrong, (2, 4), np.zeros(4), races=False)
    assert methods() == ORIGINALS


def test_an_interrupt_passes_and_leaves_nothing_behind() -> None:
    class Impatient:
        """A number at which the user presses Ctrl-C."""

        def __float__(self) -> float:
            raise KeyboardInterrupt

    @cuda.jit
    def kernel(out):
        cuda.syncthreads()
        out[0] = interrupting

    interrupting = Impatient()
    with pytest.raises(KeyboardInterrupt), interpret():
        kernel[1, 4](np.zeros(4, np.float32))
    assert methods() == ORIGINALS


def test_the_innermost_interpreter_runs_the_kernel() -> None:
    out = np.zeros(4)
    with interpret() as outer:
        fill[1, 4](out, 1)
        with interpret() as inner:
            fill[1, 4](out, 2)
            fill[1, 4](out, 3)
        fill[1, 4](out, 4)
    assert (outer.launches, inner.launches) == (2, 2)
    assert (out == 4).all()


@pytest.mark.filterwarnings("ignore:Grid size")  # Numba's own, outside of the interpreter
def test_a_configuration_made_before_and_a_stream() -> None:
    configured = fill[1, 4]
    out = np.zeros(4)
    with interpret() as report:
        configured(out, 1)
        fill[1, 4, 0](out, 2)
        fill[1, 4, 0, 128](out, 3)
        fill[(2,), [2]](out, 4)
    assert report.launches == 4 and (out == 4).all()


def test_forall() -> None:
    out = np.zeros(300)
    with interpret() as report:
        fill.forall(300)(out, 1)
        fill.forall(300, tpb=64)(out, 2)
        fill.forall(0)(out, 3)
    assert report.launches == 2 and (out == 2).all()


@pytest.mark.filterwarnings("ignore:Grid size")
def test_a_configuration_that_outlives_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """It launches as any other does outside: here that is seen at the last step before the driver."""
    launched: list[Any] = []
    with interpret() as report:
        configured = fill[1, 4]
    monkeypatch.setattr(CUDADispatcher, "call", lambda *arguments: launched.append(arguments))
    configured(np.zeros(4), 1)
    monkeypatch.undo()
    assert len(launched) == 1 and report.launches == 0


def test_a_launch_without_a_configuration_is_refused_as_ever() -> None:
    with interpret(), pytest.raises(ValueError, match="configuration"):
        fill(np.zeros(4), 1)
    with interpret(), pytest.raises((ValueError, TypeError)):
        fill[4](np.zeros(4), 1)


@pytest.mark.filterwarnings("ignore:Grid size")
def test_another_thread_is_not_affected() -> None:
    seen: list[Any] = []

    def look() -> None:
        seen.append(type(fill[1, 4]))
        with interpret() as report:
            fill[1, 4](np.zeros(4), 1)
        seen.append(report.launches)

    with interpret() as report:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        inside = type(fill[1, 4])
    assert seen[0] is not inside and seen[1] == 1
    assert report.launches == 0


def test_a_failed_launch_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.interpreter.launch.ACCESSES_AT_ONCE", 1)
    with interpret() as report:
        with pytest.raises(KernelError):
            wrong[2, 4](np.zeros(4))
        fill[1, 4](np.zeros(4), 1)
    assert report.launches == 1 and {record.kernel for record in report.lines} == {"fill"}


def test_a_schedule_that_does_not_exist() -> None:
    says = "no schedule 'backwards'; what exists is in_order, reverse, random"
    with pytest.raises(ValueError, match=says), interpret(schedule="backwards"):  # type: ignore[arg-type]
        pass


def test_random_schedules_differ_by_seed_and_by_nothing_else() -> None:
    @cuda.jit
    def kernel(order, counter):
        order[cuda.atomic.add(counter, 0, 1)] = cuda.grid(1)

    def order(schedule: Any, seed: int) -> list[int]:
        out = np.zeros(16, np.int64)
        with interpret(schedule=schedule, seed=seed):
            kernel[4, 4](out, np.zeros(1, np.int64))
        return out.tolist()  # type: ignore[no-any-return]

    assert order("in_order", 0) == list(range(16))
    assert order("reverse", 0) == list(range(15, -1, -1))
    assert order("random", 3) == order("random", 3) != order("random", 4)
    assert sorted(order("random", 3)) == list(range(16))


def test_under_numbas_own_simulator_it_says_what_to_do() -> None:
    """Case G7: the simulator is chosen when numba.cuda is imported, and by then it is too late."""
    program = (
        "from numba import cuda\n"
        "from kernels.interpreter import interpret\n"
        "try:\n"
        "    with interpret(): pass\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (sentence,) = done.stdout.splitlines()
    assert "NUMBA_ENABLE_CUDASIM" in sentence and "restart" in sentence
