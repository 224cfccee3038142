"""Indices, alignment, what memory holds before it is written, and what a store makes of a number."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numba import cuda, float32, int32

from kernels.interpreter import AlignmentError, BoundsError, KernelError, LaunchError, register
from tests.kernels.interpreter.launching import SCHEDULES, failure, launch


def floats(*shape: int) -> np.ndarray[Any, Any]:
    return np.zeros(shape, np.float32)


def load_four(array: Any, i: int) -> tuple[float, ...]:
    """Stands for an intrinsic; see the module that registers real ones."""
    raise NotImplementedError


def store_four(array: Any, i: int, values: tuple[float, ...]) -> None:
    raise NotImplementedError


register(load_four, lambda array, i: array.load_vector(i, 4))
register(store_four, lambda array, i, values: array.store_vector(i, values))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_past_the_end(schedule: str) -> None:
    @cuda.jit
    def kernel(out, a):
        i = cuda.grid(1)
        out[i] = a[i]

    error = failure(BoundsError, kernel, (2, 4), floats(8), floats(7), schedule=schedule)
    assert (error.block, error.thread) == ((1, 0, 0), (3, 0, 0))
    assert error.source == "out[i] = a[i]"
    assert "index [7] is outside a, whose shape is (7,)" in str(error)


def test_a_negative_index() -> None:
    @cuda.jit
    def kernel(a):
        a[cuda.threadIdx.x - 1] = 1.0

    error = failure(BoundsError, kernel, (1, 4), floats(8))
    assert error.thread == (0, 0, 0)
    assert "negative: it would wrap to the end in Numba and read outside the array in C" in str(error)


def test_every_dimension_is_checked() -> None:
    @cuda.jit
    def kernel(out):
        out[0, 3] = 1.0  # within the memory, but in the next row

    assert "[0, 3] is outside out, whose shape is (2, 3)" in str(
        failure(BoundsError, kernel, (1, 1), floats(2, 3))
    )


def test_a_slice_is_checked_against_its_own_length() -> None:
    @cuda.jit
    def kernel(out):
        row = out[1, 2:5]
        row[3] = 1.0

    assert "[3] is outside out, whose shape is (3,)" in str(
        failure(BoundsError, kernel, (1, 1), floats(2, 8))
    )


def test_shared_and_local_arrays_have_bounds_too() -> None:
    @cuda.jit
    def kernel(which):
        tile = cuda.shared.array(4, float32)
        mine = cuda.local.array(3, int32)
        if which == 0:
            tile[4] = 0.0
        else:
            mine[3] = 0

    assert "outside tile" in str(failure(BoundsError, kernel, (1, 1), 0))
    assert "outside mine" in str(failure(BoundsError, kernel, (1, 1), 1))


def test_dynamic_shared_memory_that_the_launch_did_not_ask_for() -> None:
    @cuda.jit
    def kernel():
        cuda.shared.array(0, float32)[0] = 1.0

    assert "asked for no dynamic shared memory" in str(failure(BoundsError, kernel, (1, 1)))
    launch(kernel, (1, 1, 0, 4))


def test_an_index_is_an_integer() -> None:
    @cuda.jit
    def kernel(out):
        out[cuda.threadIdx.x / 1] = 1.0

    assert "0.0 is no index for out" in str(failure(KernelError, kernel, (1, 1), floats(4)))


def test_vector_accesses() -> None:
    @cuda.jit
    def kernel(out, a):
        i = 4 * cuda.threadIdx.x
        x, y, z, w = load_four(a, i)
        store_four(out, i, (w, z, y, x))

    a, out = np.arange(16, dtype=np.float32), floats(16)
    report = launch(kernel, (1, 4), out, a)
    np.testing.assert_array_equal(out, a.reshape(4, 4)[:, ::-1].reshape(-1))
    for kind, array in (("read", "a"), ("write", "out")):
        total = report.total("global", kind, array)
        assert (total.requests, total.lanes, total.bytes, total.sectors) == (1, 4, 64, 2)


def test_a_vector_access_in_a_row_of_a_matrix() -> None:
    @cuda.jit
    def kernel(out, a):
        for k, value in enumerate(load_four(a, (1, 4))):
            out[k] = value

    a, out = np.arange(16, dtype=np.float32).reshape(2, 8), floats(4)
    launch(kernel, (1, 1), out, a)
    np.testing.assert_array_equal(out, [12, 13, 14, 15])
    failure(AlignmentError, kernel, (1, 1), out, np.asfortranarray(a))


@cuda.jit
def load_from(out, a, start):
    out[0] = load_four(a, start)[0]


def test_a_misaligned_vector_access() -> None:
    error = failure(AlignmentError, load_from, (1, 1), floats(1), floats(16), 2)
    assert error.source == "out[0] = load_four(a, start)[0]"
    assert "16 bytes at a[2] do not start at a multiple of 16 bytes" in str(error)


def test_alignment_is_that_of_the_allocation_not_of_the_view() -> None:
    whole = torch.zeros(17)
    failure(AlignmentError, load_from, (1, 1), floats(1), whole[1:], 0)
    launch(load_from, (1, 1), floats(1), whole[1:], 3)


def test_a_vector_access_past_the_end_and_before_the_start() -> None:
    assert "4 elements from index 4 of a on" in str(
        failure(BoundsError, load_from, (1, 1), floats(1), floats(6), 4)
    )
    assert "negative" in str(failure(BoundsError, load_from, (1, 1), floats(1), floats(8), -4))


def test_a_vector_access_is_sixteen_bytes_at_most() -> None:
    error = failure(AlignmentError, load_from, (1, 1), floats(1), np.zeros(8), 0)
    assert "1, 2, 4, 8 or 16 bytes, not 32" in str(error)


def test_shared_memory_is_aligned_as_it_was_asked_for() -> None:
    @cuda.jit
    def kernel(out, aligned):
        good = cuda.shared.array(8, float32, alignment=16)
        bad = cuda.shared.array(8, float32)
        out[0] = load_four(good if aligned else bad, 4)[0]

    launch(kernel, (1, 1), floats(1), True)
    error = failure(AlignmentError, kernel, (1, 1), floats(1), False)
    assert "bad is only sure to start at a multiple of 4 bytes: allocate it with alignment=16" in str(error)


def test_a_loop_over_the_elements_of_an_array() -> None:
    @cuda.jit
    def kernel(out, a):
        own = cuda.local.array(2, float32)
        for k, x in enumerate(a[0]):
            own[k] = 10 * x
        for row in a:
            x, y = row
            out[0] += x + y
        for x in own:
            out[0] += x

    out, a = floats(1), np.arange(6, dtype=np.float32).reshape(3, 2)
    report = launch(kernel, (1, 1), out, a)
    assert out[0] == 15 + 10
    assert report.total("global", "read", "a").requests == 2 + 6


def test_what_an_array_does_not_have_is_named() -> None:
    @cuda.jit
    def kernel(out, a):
        out[0] = a.sum()

    error = failure(KernelError, kernel, (1, 1), floats(1), floats(4))
    assert "the interpreter has no .sum of an array, here a" in str(error)


@pytest.mark.parametrize("poison", [True, False])
def test_memory_that_nobody_wrote(poison: bool) -> None:
    @cuda.jit
    def kernel(reals, whole):
        tile, mine = cuda.shared.array(4, float32), cuda.local.array(4, float32)
        reals[0], reals[1], reals[2] = tile[0], mine[0], cuda.shared.array(0, np.float16)[0]
        whole[0] = cuda.shared.array((2, 2), int32)[1, 1]
        tile[0] = 1.0

    reals, whole = floats(3), np.zeros(1, np.int32)
    launch(kernel, (2, 1, 0, 2), reals[:3], whole, poison=poison, races=False)
    assert np.isnan(reals).all() if poison else not reals.any()
    assert whole[0] == (-1 if poison else 0)


DTYPES = [
    np.float16,
    np.float32,
    np.float64,
    np.int8,
    np.uint8,
    np.int16,
    np.int32,
    np.uint32,
    np.int64,
    np.bool_,
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_read_and_written(dtype: Any) -> None:
    @cuda.jit
    def kernel(out, a):
        i = cuda.grid(1)
        out[i] = a[i]

    a = np.array([0, 1, 100, 3]).astype(dtype)
    out = np.zeros(4, dtype)
    launch(kernel, (1, 4), out, a)
    np.testing.assert_array_equal(out, a)


@pytest.mark.parametrize(
    ("dtype", "value", "stored"),
    [
        (np.float32, 0.1, float(np.float32(0.1))),
        (np.float32, 1e300, math.inf),
        (np.float16, 1e6, math.inf),
        (np.float16, -1e6, -math.inf),
        (np.float16, 0.1, float(np.float16(0.1))),
        (np.int32, 2.9, 2),
        (np.int32, -2.9, -2),
        (np.int32, 2**31, -(2**31)),
        (np.uint8, -1, 255),
        (np.int64, 2**63, -(2**63)),
        (np.float32, True, 1.0),
    ],
)
def test_a_store_converts_as_the_hardware_does(dtype: Any, value: Any, stored: Any) -> None:
    @cuda.jit
    def kernel(out, value):
        out[0] = value

    out = np.zeros(1, dtype)
    launch(kernel, (1, 1), out, value)
    assert out[0] == stored


def test_what_cannot_be_stored() -> None:
    @cuda.jit
    def kernel(out):
        out[0] = out[0:2]

    error = failure(KernelError, kernel, (1, 1), floats(4))
    assert isinstance(error.__cause__, TypeError)


def test_a_slice_is_not_assigned_to() -> None:
    @cuda.jit
    def kernel(out):
        out[1:3] = 0.0

    assert "write a loop over its elements" in str(failure(KernelError, kernel, (1, 1), floats(4)))


def test_read_only_memory() -> None:
    @cuda.jit
    def kernel(a):
        a[0] = 1.0

    a = floats(4)
    a.flags.writeable = False
    assert "a is read-only" in str(failure(KernelError, kernel, (1, 1), a))


def test_too_much_static_shared_memory() -> None:
    @cuda.jit
    def kernel():
        cuda.shared.array(8192, float32)
        cuda.shared.array(4097, float32)

    assert "49156 bytes of static shared memory, more than the 49152" in str(
        failure(LaunchError, kernel, (1, 1))
    )


def test_properties_of_an_array() -> None:
    @cuda.jit
    def kernel(out, a):
        part = a[1:, ::2]
        out[0], out[1], out[2] = a.ndim, a.size, len(a)
        out[3], out[4] = part.shape[0], part.shape[1]
        out[5], out[6] = part.strides[0], part.strides[1]
        out[7] = part[1, 2]

    out = np.zeros(8, np.int64)
    launch(kernel, (1, 1), out, np.arange(18, dtype=np.int32).reshape(3, 6))
    np.testing.assert_array_equal(out, [2, 18, 3, 2, 3, 24, 8, 16])
