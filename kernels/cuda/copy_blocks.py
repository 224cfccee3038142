"""Copies whole blocks within the cache, pair after pair.

The order counts: a block that was copied away may be the destination of a later pair. Blocks of threads run in
any order and cannot wait for each other, so pairs must not be spread over them. What is spread is the inside
of a block: a thread owns one place in it, and takes this place through all pairs in their order.
vLLM: V0 `copy_blocks` in csrc/cache_kernels.cu, which runs the pairs side by side.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code=attr-defined

from __future__ import annotations

from collections.abc import Sequence

import torch
from numba import cuda
from torch import Tensor

from kernels.cuda.jit import kernel
from kernels.cuda.launch import in_widest_unit, launch

THREADS = 128


@kernel
def copy_pairs(key_cache, value_cache, pairs):
    """Launch as `[ceil(block / threads), threads]`.

    key_cache, value_cache: `[num_blocks, block]`, a block's contents flat. pairs: `[num_pairs, 2]` int64.
    """
    i = cuda.grid(1)
    if i < key_cache.shape[1]:
        for pair in range(pairs.shape[0]):
            source, destination = pairs[pair, 0], pairs[pair, 1]
            key_cache[destination, i] = key_cache[source, i]
            value_cache[destination, i] = value_cache[source, i]


def copy_in_order(caches: Sequence[tuple[Tensor, Tensor]], pairs: Sequence[tuple[int, int]]) -> None:
    """Launches `copy_pairs` for every layer; see `kernels.copy_blocks`. Mutates: every cache."""
    order = torch.tensor(pairs, dtype=torch.int64, device=caches[0][0].device)
    for layer in caches:
        key_cache, value_cache = in_widest_unit(*(cache.flatten(1) for cache in layer))
        launch(copy_pairs, (-(-key_cache.shape[1] // THREADS),), THREADS, key_cache, value_cache, order)
