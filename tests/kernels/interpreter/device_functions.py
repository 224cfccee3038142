"""A module of device functions, as a kernel of another module uses it."""

from __future__ import annotations

from numba import cuda, float32

FACTOR = 3


@cuda.jit(device=True)
def scaled(a, i):
    """Calls a device function of its own module and uses a constant of it."""
    return FACTOR * element(a, i)


@cuda.jit(device=True)
def element(a, i):
    return a[i]


@cuda.jit(device=True)
def block_sum(value):
    """A barrier and shared memory inside a device function."""
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    tile[i] = value
    cuda.syncthreads()
    total = 0.0
    for k in range(cuda.blockDim.x):
        total += tile[k]
    cuda.syncthreads()
    return total
