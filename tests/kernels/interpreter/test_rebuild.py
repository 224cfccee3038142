"""What the names of a kernel may refer to, and where a kernel may come from."""

from __future__ import annotations

import linecache
import math
from math import exp
from typing import Any

import numba
import numba.cuda as gpu
import numpy as np
import pytest
from numba import cuda, float32
from numba.cuda import atomic, grid, laneid, shared, syncthreads, threadIdx
from numba.cuda.extending import intrinsic

from kernels.interpreter import BoundsError, KernelError, register
from tests.kernels.interpreter import device_functions
from tests.kernels.interpreter.device_functions import block_sum
from tests.kernels.interpreter.launching import SCHEDULES, failure, launch

LEFT = [10, 20]
WORDS = np.array(["no", "number"])
HALF = np.float32(0.5)


def result(kernel: Any, block: int = 4, dtype: Any = np.float64, grid: int = 1) -> list[float]:
    out = np.zeros(block * grid, dtype)
    launch(kernel, (grid, block), out)
    return out.tolist()  # type: ignore[no-any-return]


def test_names_imported_one_by_one() -> None:
    @cuda.jit
    def kernel(out):
        tile = shared.array(4, numba.float32)
        tile[threadIdx.x] = laneid
        syncthreads()
        out[grid(1)] = tile[3 - threadIdx.x]
        atomic.add(out, grid(1), 10)

    assert result(kernel) == [13, 12, 11, 10]


def test_other_names_of_the_module() -> None:
    @gpu.jit
    def kernel(out):
        out[gpu.threadIdx.x] = numba.cuda.laneid + gpu.blockDim.x

    assert result(kernel) == [4, 5, 6, 7]


def test_device_functions_in_this_module_and_in_others() -> None:
    @cuda.jit(device=True)
    def plus_one(x):
        return x + 1

    @cuda.jit
    def kernel(out):
        i = cuda.threadIdx.x
        out[i] = i
        out[i] = plus_one(device_functions.scaled(out, i))

    assert result(kernel) == [1, 4, 7, 10]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_device_function_with_a_barrier(schedule: str) -> None:
    @cuda.jit
    def kernel(out):
        i = cuda.threadIdx.x
        out[i] = block_sum(i) + 100 * block_sum(1)

    out = np.zeros(40)
    launch(kernel, (1, 40), out, schedule=schedule)
    assert (out == 780 + 4000).all()


def test_plain_helpers_and_constants() -> None:
    def helper(x):
        return x * cuda.blockDim.x + LEFT[1]

    @cuda.jit
    def kernel(out):
        i = cuda.threadIdx.x
        out[i] = helper(i) + HALF + exp(0.0) + math.pi * 0 + len(WORDS) - 2

    assert result(kernel) == [21.5, 25.5, 29.5, 33.5]


def make_kernel(operation: Any, width: int) -> Any:
    @cuda.jit
    def kernel(out):
        for k in range(width):
            out[cuda.threadIdx.x] = operation(out[cuda.threadIdx.x], k)

    return kernel


def test_a_closure() -> None:
    @cuda.jit(device=True)
    def added(x, k):
        return x + k

    assert result(make_kernel(added, 3)) == [3.0] * 4
    assert result(make_kernel(lambda x, k: x - k, 4)) == [-6.0] * 4


def make_sharer(sign: float) -> Any:
    @cuda.jit(device=True)
    def turned(value):
        tile = cuda.shared.array(4, float32)
        tile[cuda.threadIdx.x] = sign * value
        cuda.syncwarp()
        return tile[3 - cuda.threadIdx.x]

    return turned


def test_two_functions_of_one_factory_have_shared_memory_of_their_own() -> None:
    plus, minus = make_sharer(1.0), make_sharer(-1.0)

    @cuda.jit
    def kernel(out):
        i = cuda.threadIdx.x
        out[i] = plus(i) + minus(10 * i)

    assert result(kernel) == [-27, -18, -9, 0]


def test_recursion_and_functions_that_know_each_other() -> None:
    @cuda.jit(device=True)
    def even(n):
        return True if n == 0 else odd(n - 1)

    @cuda.jit(device=True)
    def odd(n):
        return False if n == 0 else even(n - 1)

    @cuda.jit
    def kernel(out):
        out[cuda.threadIdx.x] = even(cuda.threadIdx.x)

    assert result(kernel) == [1, 0, 1, 0]


def test_a_name_that_is_defined_later_and_one_that_changes() -> None:
    names: dict[str, Any] = {"cuda": cuda}
    exec(
        "@cuda.jit\ndef kernel(out):\n    out[cuda.threadIdx.x] = helper(cuda.threadIdx.x)\n",
        names,
    )
    assert "NameError" in str(failure(KernelError, names["kernel"], (1, 4), np.zeros(4)))
    names["helper"] = lambda i: i + 1
    assert result(names["kernel"]) == [1, 2, 3, 4]
    names["helper"] = lambda i: i + 2
    assert result(names["kernel"]) == [2, 3, 4, 5]


NO_SOURCE = """
@cuda.jit
def kernel(out):
    i = cuda.grid(1)
    out[i + 1] = 1.0
"""


def test_a_kernel_without_source() -> None:
    names: dict[str, Any] = {"cuda": cuda}
    exec(NO_SOURCE, names)
    error = failure(BoundsError, names["kernel"], (1, 4), np.zeros(4))
    assert (error.line, error.source, error.thread) == (5, "", (3, 0, 0))
    assert str(error).startswith("kernel, line 5, block (0, 0, 0), thread (3, 0, 0): ")


def test_a_kernel_of_a_notebook_cell() -> None:
    """A notebook puts the text of a cell where tracebacks look for it."""
    name = "<ipython-input-7-kernel>"
    linecache.cache[name] = (len(NO_SOURCE), None, NO_SOURCE.splitlines(keepends=True), name)
    names: dict[str, Any] = {"cuda": cuda, "__name__": "__main__"}
    exec(compile(NO_SOURCE, name, "exec"), names)
    error = failure(BoundsError, names["kernel"], (1, 4), np.zeros(4))
    assert (error.line, error.source) == (5, "out[i + 1] = 1.0")
    assert launch(names["kernel"], (1, 3), np.zeros(4)).lines[0].source == "out[i + 1] = 1.0"


@intrinsic
def load_pair(typing_context, array, i):  # type: ignore[no-untyped-def]
    """Never typed here: the interpreter calls what is registered for it."""
    raise NotImplementedError


@intrinsic
def nobody_registered_this(typing_context, x):  # type: ignore[no-untyped-def]
    raise NotImplementedError


def test_an_intrinsic_is_replaced_by_what_was_registered() -> None:
    register(load_pair, lambda array, i: array.load_vector(i, 2))

    @cuda.jit
    def kernel(out):
        i = 2 * cuda.threadIdx.x
        out[i] = sum(load_pair(out, i)) + 1

    out = np.arange(4.0)
    report = launch(kernel, (1, 2), out)
    assert out.tolist() == [2, 1, 6, 3]
    (read,) = [r for r in report.lines if r.kind == "read"]
    assert (read.source, read.requests, read.bytes) == ("out[i] = sum(load_pair(out, i)) + 1", 1, 32)


def test_an_error_inside_a_registered_function_is_placed_in_the_kernel() -> None:
    @cuda.jit
    def kernel(out):
        out[0] = load_pair(out, 1)[0]

    register(load_pair, lambda array, i: {}[i])
    error = failure(KernelError, kernel, (1, 1), np.zeros(4))
    assert isinstance(error.__cause__, KeyError)
    assert error.source == "out[0] = load_pair(out, 1)[0]"


def test_an_intrinsic_that_nobody_registered() -> None:
    @cuda.jit
    def kernel(out):
        out[0] = nobody_registered_this(1.0)

    error = failure(KernelError, kernel, (1, 1), np.zeros(4))
    assert "the intrinsic nobody_registered_this has no Python version" in str(error)
    assert "kernels.interpreter.register(nobody_registered_this, function)" in str(error)


def test_the_original_is_left_as_it_was() -> None:
    @cuda.jit
    def kernel(out):
        out[cuda.threadIdx.x] = cuda.blockDim.x

    before = kernel.py_func.__globals__["cuda"]
    assert result(kernel) == [4.0] * 4
    assert kernel.py_func.__globals__["cuda"] is before is numba.cuda
