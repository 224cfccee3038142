"""Where a token lies in a cache, and the same cache in blocks of another size."""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code=attr-defined

from __future__ import annotations

import torch
from numba import int64
from torch import Tensor

from kernels.cuda.jit import device_function


@device_function
def element_offset(block, offset, block_size, row_size):
    """Where a token's row starts in a flat cache, in elements: 64 bits, whatever the block id has.

    With 16 tokens of 8 heads of 128 dimensions, keys and values together, a block is 32768 elements, and block
    65536 starts at element 2**31: 4 GiB into a cache of bf16, and a negative number in 32 bits.
    """
    return (int64(block) * block_size + offset) * row_size


def kernel_blocks(block_tables: Tensor, manager_block_size: int, kernel_block_size: int) -> Tensor:
    """The table of a manager whose blocks are larger than a kernel's.

    Manager block b is kernel blocks b * ratio to b * ratio + ratio - 1; a token keeps its slot. From here on
    only kernel_block_size may be used: the manager's own size belongs to its own block ids.

    Args:
        block_tables: `[num_seqs, max_blocks]` ids of manager blocks.
    Returns: `[num_seqs, max_blocks * ratio]` ids of kernel blocks.
    vLLM: V1 0.33.0 `prepare_kernel_block_sizes`, `map_kv_caches_to_kernel_blocks` in v1/worker/utils.py, which view
    the cache in smaller blocks.
    """
    ratio = manager_block_size // kernel_block_size
    if ratio == 1:
        return block_tables
    parts = torch.arange(ratio, device=block_tables.device, dtype=block_tables.dtype)
    return (block_tables[:, :, None] * ratio + parts).flatten(1)
