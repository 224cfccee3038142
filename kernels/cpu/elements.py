"""Caches that are not read in place: a tile is copied first, as numbers of the type that is computed with.

These are caches of bfloat16 and float16, and those with a head_dim that does not fill whole vectors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from kernels.cpu.options import FLAGS, Array, compiled
from kernels.cpu.vectors import float_of_bits


@compiled
def copy_tile(cache: Array, rows: Array, first: int, stop: int, padded: int, copy: Array) -> None:
    """Tokens of a tile, every head filled up with zeros to `padded`.

    Args:
        cache: `[num_blocks, block_size, num_kv_heads, head_dim]`.
        rows: first element of each token in the flat cache; those of first..stop are copied.
        copy: `[tokens * num_kv_heads * padded]`.
    Mutates: copy.
    """
    flat, num_kv_heads, head_dim = cache.reshape(-1), cache.shape[2], cache.shape[3]
    for t in range(first, stop):
        for head in range(num_kv_heads):
            source, target = rows[t] + head * head_dim, (t * num_kv_heads + head) * padded
            for d in range(head_dim):
                copy[target + d] = _number(flat[source + d])
            for d in range(head_dim, padded):
                copy[target + d] = 0


# What depends on the type of the cache is decided when it is compiled.


def either(in_place: bool, flat: Array, copy: Array) -> Array:
    """The cache or the copy. A cache of another type than the copy is never used in place."""
    raise NotImplementedError("only in compiled code")


@overload(either, strict=False)
def _either_of_type(in_place: Any, flat: Any, copy: Any) -> Any:
    if flat.dtype == copy.dtype:
        return lambda in_place, flat, copy: flat if in_place else copy
    return lambda in_place, flat, copy: copy


def _number(element: Any) -> Any:
    """An element of a cache as a number: int16 holds the bits of a bfloat16, uint16 those of a float16."""
    raise NotImplementedError("only in compiled code")


@overload(_number, strict=False, jit_options=FLAGS)
def _number_of_type(element: Any) -> Any:
    if element == types.int16:  # the upper half of a float32
        return lambda element: float_of_bits(np.uint32(np.uint16(element)) << np.uint32(16))
    if element == types.uint16:
        return _half
    return lambda element: element


def _half(element: int) -> Any:
    """float16 has 5 bits of exponent, biased by 15, and 10 of fraction; float32 has 8, biased by 127, and 23.

    So the bits, moved into place, are a float32 that is 2**112 too small, also for the numbers below 2**-14.
    """
    bits = np.uint32(element)
    sign = (bits & np.uint32(0x8000)) << np.uint32(16)
    rest = (bits & np.uint32(0x7FFF)) << np.uint32(13)
    finite = (bits & np.uint32(0x7C00)) != np.uint32(0x7C00)
    size = (
        float_of_bits(rest) * np.float32(2.0**112) if finite else float_of_bits(rest | np.uint32(0x7F800000))
    )
    return -size if sign else size
