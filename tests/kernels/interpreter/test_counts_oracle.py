"""Random accesses of a block: sectors, bytes and wavefronts against a slow count, one byte at a time."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import cuda

from kernels.interpreter import register
from tests.kernels.interpreter.launching import SCHEDULES, launch

ELEMENTS = 512


def load(array: Any, i: int, n: int) -> tuple[Any, ...]:
    """Stands for an intrinsic."""
    raise NotImplementedError


register(load, lambda array, i, n: array.load_vector(i, n))


def make_kernel(dtype: Any) -> Any:
    @cuda.jit
    def kernel(out, a, indices, width):
        tile = cuda.shared.array(ELEMENTS, dtype, alignment=16)
        i = cuda.threadIdx.x
        if indices[i] >= 0:
            out[i] = load(a, indices[i], width)[0]
            out[i] = load(tile, indices[i], width)[0]

    return kernel


KERNELS = {size: make_kernel(dtype) for size, dtype in ((2, np.int16), (4, np.float32), (8, np.float64))}
DTYPES = {2: np.int16, 4: np.float32, 8: np.float64}


def slow_sectors(indices: list[int], size: int, width: int) -> tuple[int, int]:
    """(sectors, distinct bytes) of one warp."""
    touched = {i * size + k for i in indices if i >= 0 for k in range(size * width)}
    return len({byte // 32 for byte in touched}), len(touched)


def slow_wavefronts(indices: list[int], size: int, width: int) -> int:
    """Lanes go through the banks in groups that want 32 words at most."""
    words_each = max(1, size * width // 4)
    turns: dict[int, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for lane, i in enumerate(indices):
        for byte in range(i * size, (i + width) * size) if i >= 0 else ():
            turns[lane * words_each // 32][byte // 4 % 32].add(byte // 4)
    return sum(max(map(len, banks.values())) for banks in turns.values())


@settings(max_examples=60, deadline=None)
@given(data=st.data(), schedule=st.sampled_from(SCHEDULES), size=st.sampled_from([2, 4, 8]))
def test_counts_agree_with_a_slow_count(data: st.DataObject, schedule: str, size: int) -> None:
    width = data.draw(st.sampled_from([n for n in (1, 2, 4, 8) if n * size <= 16]))
    index = st.integers(-1, ELEMENTS // width - 1).map(lambda k: k * width if k >= 0 else -1)
    indices = data.draw(st.lists(index, min_size=1, max_size=70))
    report = launch(
        KERNELS[size],
        (1, len(indices)),
        np.zeros(len(indices), DTYPES[size]),
        np.zeros(ELEMENTS, DTYPES[size]),
        np.array(indices),
        width,
        poison=False,
        schedule=schedule,
    )
    warps = [indices[k : k + 32] for k in range(0, len(indices), 32)]
    counted, shared = report.total(array="a"), report.total("shared")
    assert counted.lanes == sum(i >= 0 for i in indices)
    assert counted.requests == sum(any(i >= 0 for i in warp) for warp in warps)
    expected = [slow_sectors(warp, size, width) for warp in warps]
    assert counted.sectors == sum(sectors for sectors, _ in expected)
    assert counted.bytes == shared.bytes == sum(num_bytes for _, num_bytes in expected)
    assert shared.wavefronts == sum(slow_wavefronts(warp, size, width) for warp in warps)
