"""Writes the new tokens' keys and values into their slots.

A copy does not care what the bits mean. The host hands over rows of the widest units that fit, 8 bytes for
the usual caches, so one kernel serves all number formats and a warp moves 256 bytes per request.
vLLM: V0 and V1 `reshape_and_cache_flash` in csrc/cache_kernels.cu.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code=attr-defined

from __future__ import annotations

from numba import cuda
from torch import Tensor

from kernels.cuda.jit import kernel
from kernels.cuda.launch import in_widest_unit, launch

THREADS = 128


@kernel
def write_tokens(key, value, key_cache, value_cache, slot_mapping):
    """Launch as `[num_tokens, threads]`: a block of threads per token.

    key, value: `[num_tokens, row]`. key_cache, value_cache: `[num_slots, row]`. slot_mapping: `[num_tokens]`.
    A row is one token's heads, one after the other.
    """
    token = cuda.blockIdx.x
    slot = slot_mapping[token]
    if slot >= 0:  # -1 is padding
        i = cuda.threadIdx.x
        while i < key.shape[1]:
            key_cache[slot, i] = key[token, i]
            value_cache[slot, i] = value[token, i]
            i += cuda.blockDim.x


def write_slots(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Launches `write_tokens`; see `kernels.reshape_and_cache`. Mutates: key_cache, value_cache."""
    row = key.shape[1] * key.shape[2]
    rows = (key.flatten(1), value.flatten(1), key_cache.view(-1, row), value_cache.view(-1, row))
    launch(write_tokens, (len(key),), THREADS, *in_widest_unit(*rows), slot_mapping)
