"""What a kernel is launched with, and what the errors say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numba import cuda

from kernels.interpreter import KernelError, LaunchError, RaceError, interpret
from tests.kernels.interpreter.launching import failure, launch


@cuda.jit
def fill(out, value):
    i = cuda.grid(1)
    if i < len(out):
        out[i] = value


@cuda.jit
def number_all(out):
    x, y, z = cuda.grid(3)
    sx, sy, _ = cuda.gridsize(3)
    out[z, y, x] = x + sx * (y + sy * z)


@pytest.mark.parametrize(
    ("configuration", "says"),
    [
        ((1, 1025), "the block is 1025, but each of x, y, z lies between 1 and (1024, 1024, 64)"),
        ((1, (32, 33)), "1056 threads, more than the 1024"),
        ((1, (1, 1, 65)), "lies between 1 and"),
        ((0, 32), "the grid is 0"),
        ((1, 0), "the block is 0"),
        ((1, -32), "the block is -32"),
        ((2.5, 32), "the grid is 2.5, but it is one to three integers"),
        (((1, 65536), 1), "the grid is (1, 65536)"),
        ((1, (1, 1, 1, 1)), "one to three integers"),
        ((1, 32, 0, -1), "-1 bytes of dynamic shared memory"),
        ((1, 32, 0, 300_000), "300000 bytes of dynamic shared memory"),
    ],
)
def test_a_launch_that_no_gpu_takes(configuration: tuple[Any, ...], says: str) -> None:
    error = failure(LaunchError, fill, configuration, np.zeros(4, np.float32), 1.0)
    assert says in str(error)
    assert str(error).startswith("fill, line") and (error.block, error.thread) == (None, None)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (torch.zeros(4, dtype=torch.bfloat16), "pass tensor.view(torch.int16)"),
        (torch.zeros(4, dtype=torch.complex64), "complex64"),
        (torch.zeros(4, device="meta"), "is on meta"),
        (np.zeros(4, dtype="complex64"), "complex64"),
        (np.zeros(4, dtype=">f4"), "dtype >f4"),
        (np.zeros(4, dtype="U3"), "dtype <U3"),
        (np.zeros(4, dtype=[("a", "i4"), ("b", "i1")])["a"], "strides (5,)"),
        ([1.0, 2.0], "is a list"),
        (None, "is a NoneType"),
        ("text", "is a str"),
    ],
)
def test_an_argument_that_no_kernel_takes(value: Any, says: str) -> None:
    error = failure(LaunchError, fill, (1, 4), value, 1.0)
    assert says in str(error) and "argument out" in str(error)


def test_the_number_of_arguments() -> None:
    assert "takes 2 arguments (out, value), got 1" in str(failure(LaunchError, fill, (1, 4), np.zeros(4)))


@pytest.mark.parametrize("value", [3, 3.0, True, np.float32(3), np.int64(3), np.float16(3)])
def test_numbers(value: Any) -> None:
    out = np.zeros(4)
    launch(fill, (1, 4), out, value)
    assert (out == float(value)).all()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(12),
        torch.zeros(12, dtype=torch.float16),
        torch.zeros(12, dtype=torch.int16),
        torch.zeros(12, dtype=torch.bfloat16).view(torch.int16),
        torch.zeros(3, 4)[:, 2],
        torch.zeros(24)[::2],
        torch.zeros(12, requires_grad=True),
    ],
)
def test_a_tensor_is_written_in_place(tensor: torch.Tensor) -> None:
    launch(fill, (3, 4), tensor, 3)
    assert (tensor == 3).all()


def test_only_the_elements_of_a_view_are_written() -> None:
    memory = torch.zeros(6, 6)
    launch(fill, (1, 8), memory[1:5, 3], 1.0)
    expected = torch.zeros(6, 6)
    expected[1:5, 3] = 1.0
    assert torch.equal(memory, expected)


def test_negative_and_zero_strides() -> None:
    @cuda.jit
    def copy(out, a):
        i, j = cuda.grid(2)
        out[i, j] = a[i, j]

    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    for view in (a[::-1, ::-1], a.T[1:4], np.broadcast_to(a[1], (3, 4)), a[:, :0], a[1:, ::-2]):
        out = np.zeros(view.shape, np.float32)
        if view.size:
            launch(copy, (view.shape, (1, 1)), out, view)
        np.testing.assert_array_equal(out, view)


def test_two_arrays_without_a_common_owner_are_one_memory_too() -> None:
    @cuda.jit
    def kernel(a, b):
        a[cuda.threadIdx.x] = 1.0
        b[cuda.threadIdx.x] = 2.0

    memory = torch.zeros(64)
    failure(RaceError, kernel, (1, 32), memory[::2].numpy(), memory[10:42].numpy())
    failure(RaceError, kernel, (1, 32), memory[::2].numpy(), memory)
    launch(kernel, (1, 32), memory[::2].numpy(), memory[1::2].numpy())


def test_a_tensor_of_no_dimensions_and_one_of_no_elements() -> None:
    @cuda.jit
    def kernel(out, empty):
        out[()] = len(empty) + 5

    out = torch.zeros(())
    launch(kernel, (1, 1), out, torch.zeros(0))
    assert out == 5


def test_a_tuple_of_arrays() -> None:
    @cuda.jit
    def kernel(out, pair):
        out[0] = pair[0][1] + pair[1][0, 0] + pair[2]

    out = np.zeros(1)
    launch(kernel, (1, 1), out, (np.arange(2.0), np.ones((1, 1)), 10))
    assert out[0] == 12


def test_three_dimensions() -> None:
    out = np.zeros((4, 6, 8), np.int32)
    launch(number_all, ((2, 3, 1), (4, 2, 4)), out)
    np.testing.assert_array_equal(out.reshape(-1), np.arange(4 * 6 * 8))


def test_an_exception_of_the_kernels_own_code() -> None:
    @cuda.jit
    def kernel(out):
        i = cuda.grid(1)
        out[i] = 1 / (i - 5)

    error = failure(KernelError, kernel, (2, 4), np.zeros(8, np.float32))
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert (error.block, error.thread, error.source) == ((1, 0, 0), (1, 0, 0), "out[i] = 1 / (i - 5)")
    assert "ZeroDivisionError" in str(error) and "a GPU gives infinity or NaN" in str(error)


def test_an_exception_in_a_device_function_is_placed_there() -> None:
    @cuda.jit(device=True)
    def helper(a):
        return a[0] + undefined_name  # type: ignore[name-defined] # noqa: F821

    @cuda.jit
    def kernel(a):
        a[0] = helper(a)

    error = failure(KernelError, kernel, (1, 1), np.zeros(1))
    assert error.source.startswith("return a[0] + undefined_name") and error.kernel == "kernel"


def test_a_kernel_returns_nothing() -> None:
    @cuda.jit
    def kernel(a):
        return a[0]

    assert "a kernel returns nothing" in str(failure(KernelError, kernel, (1, 1), np.zeros(1)))


def test_a_message_is_one_sentence_with_the_whole_place() -> None:
    @cuda.jit
    def kernel(out):
        out[cuda.threadIdx.y + 9] = 1.0

    with pytest.raises(KernelError) as caught, interpret():
        kernel[(1, 2), (1, 2)](np.zeros(10))
    line = kernel.py_func.__code__.co_firstlineno + 2
    assert str(caught.value) == (
        f"kernel, line {line} `out[cuda.threadIdx.y + 9] = 1.0`, block (0, 0, 0), thread (0, 1, 0): "
        "index [10] is outside out, whose shape is (10,)"
    )
