"""From tensors to a launch: on torch's current stream, or in the interpreter.

Nothing here waits for the GPU and nothing is copied to it, so launches can be recorded in a CUDA graph. What a
graph cannot record is compiling: every kernel must have run once before with arguments of the same types.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from numba import cuda
from torch import Tensor

UNITS = (torch.int64, torch.int32, torch.int16)
VECTOR_BYTES = 16


class DeviceArray:
    """A tensor that is not empty, for Numba: as an address with shape and strides.

    Numba could take the tensor itself, but by a way on which torch refuses its own default stream. Version 3 of
    the protocol, which Numba asks for, adds one optional entry to torch's version 2: a stream to wait for.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {**tensor.detach().__cuda_array_interface__, "version": 3}


def launch(kernel: Any, grid: Sequence[int], threads: int, *arguments: Any) -> None:
    """Runs a kernel on tensors and numbers; fp32 numbers as `np.float32`. An empty grid does nothing.

    Mutates: whatever the kernel writes.
    Raises: ValueError for tensors that do not all lie where the first one does.
    """
    if 0 in grid:
        return
    device = arguments[0].device
    for i, x in enumerate(arguments):
        if isinstance(x, Tensor) and x.device != device:
            name, first = kernel.py_func.__code__.co_varnames[i], kernel.py_func.__code__.co_varnames[0]
            raise ValueError(f"{name} is on {x.device}, but {first} is on {device}")
    if device.type == "cpu":
        kernel[tuple(grid), threads](*arguments)
        return
    stream = torch.cuda.current_stream(device).cuda_stream
    ready = _configured(kernel, tuple(grid), threads, stream)
    ready(*(DeviceArray(x) if isinstance(x, Tensor) else x for x in arguments))


@lru_cache(maxsize=4096)
def _configured(kernel: Any, grid: tuple[int, ...], threads: int, stream: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a small grid leaves processors idle is known
        return kernel[grid, threads, cuda.external_stream(stream)]


@lru_cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU. The interpreter counts as a few: it runs one block at a time."""
    if device.type == "cpu":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def flat_rows(x: Tensor) -> tuple[Tensor, int]:
    """`[num_rows, num_heads, head_dim]` -> (its memory as a flat tensor, elements from a row to the next).

    A tensor cut out of a wider one stays where it is, unless its rows cannot be read 16 bytes at a time.
    """
    row = x.shape[1] * x.shape[2]
    dense = x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1)
    if not dense or not is_aligned(x) or x.stride(0) * x.itemsize % VECTOR_BYTES:
        return x.contiguous().view(-1), row
    return x.as_strided(((len(x) - 1) * x.stride(0) + row,), (1,)), x.stride(0)


def is_aligned(x: Tensor) -> bool:
    """Whether it starts at a multiple of 16 bytes."""
    return x.data_ptr() % VECTOR_BYTES == 0


def in_widest_unit(*tensors: Tensor) -> list[Tensor]:
    """Tensors `[n, m]` of one dtype, to be copied only: as the widest integers that all of them consist of."""
    for unit in UNITS:
        if all(_consists_of(x, unit.itemsize) for x in tensors):
            return [x.view(unit) for x in tensors]
    raise ValueError(f"a cache of {tensors[0].dtype} has no whole 16-bit words")


def _consists_of(x: Tensor, size: int) -> bool:
    """Whether rows are dense and start and end at multiples of `size` bytes."""
    places = (x.data_ptr(), x.stride(0) * x.itemsize, x.shape[1] * x.itemsize)
    return x.stride(1) == 1 and not any(place % size for place in places)
