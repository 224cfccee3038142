"""The operations as Numba CUDA kernels, on torch's current stream.

The same kernels run on a CPU in the interpreter, as the backend of that name. A kernel module is one stage of
the way from a first working kernel to a fast one: `cache_write`, `copy_blocks`, `decode_plain`, `decode_split` with
`merge`, `prefill`.

Which attention kernel runs:
- head_dim 64, 128 or 256, block size a multiple of 8, groups of 1, 2, 4 or 8 query heads per kv head: `decode_split`
  for sequences with one new token, `prefill` for the others.
- other groups: `prefill` for all. The split kernel keeps a group's queries and results in registers, and those are
  counted for these four sizes.
- anything else: `decode_plain`, with every query as a sequence of its own. A row of the cache then does not fall
  into pieces of 16 bytes that fill a warp.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import numba.cuda
import torch
from torch import Tensor

from kernels.cuda.attention import attend_plain, attend_split, attend_varlen, fast_kernels_serve, split_tiling
from kernels.cuda.cache_write import write_slots
from kernels.cuda.copy_blocks import copy_in_order
from kernels.cuda.plan import Plan, Reads
from kernels.cuda.sequences import sequences_of
from kernels.dispatch import BackendError
from kernels.interpreter import is_interpreting


def check_device(device: torch.device) -> None:
    """Raises: BackendError, with what to do instead, where these kernels cannot run."""
    if device.type != "cuda" and not is_interpreting():
        raise BackendError(
            f"backend 'cuda' needs tensors on a GPU, and these are on {device}: "
            "use backend='cpu', 'reference' or 'interpreter'"
        )
    if device.type == "cuda" and not _numba_finds_a_gpu():
        raise BackendError(
            "numba finds no GPU, although torch does: pip install -e '.[gpu]', or use backend='reference'"
        )


@cache
def _numba_finds_a_gpu() -> bool:
    return bool(numba.cuda.is_available())  # type: ignore[no-untyped-call]


reshape_and_cache = write_slots
copy_blocks = copy_in_order
plan_step = Plan


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `kernels.paged_attention`."""
    reads = Reads(block_tables, query_start_loc, seq_lens, key_cache, sliding_window)
    return reads(query, key_cache, value_cache, scale, out)


def paged_attention_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int | None = None,
    out: Tensor | None = None,
    kernel: Literal["plain", "split"] | None = None,
) -> Tensor:
    """See `kernels.paged_attention_decode`. Can be recorded in a CUDA graph: nothing is read from the device.

    A sequence of 0 tokens, as padding of a recorded batch, gets zeros.

    Args: kernel: the one to use; None: the fastest that serves the shape.
    Raises: ValueError for the split kernel and a shape that it does not serve.
    """
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    starts = torch.arange(len(query) + 1, device=query.device, dtype=torch.int32)
    sequences = sequences_of(
        block_tables.to(query.device), starts, seq_lens, key_cache.shape[1], sliding_window, 1
    )
    operands = (out, query, key_cache, value_cache)
    fast = sequences.in_kernel_blocks() if fast_kernels_serve(key_cache, value_cache) else None
    tiling = split_tiling(query, key_cache, fast.block_size) if fast else None
    if kernel == "split" and tiling is None:
        raise ValueError(
            f"the split kernel does not serve {query.shape[1]} query heads with blocks of "
            f"{list(key_cache.shape[1:])}"
        )
    if fast is None or kernel == "plain":
        attend_plain(*operands, sequences, scale)
    elif tiling is None:
        attend_varlen(*operands, fast, scale)
    else:
        attend_split(*operands, fast, scale, tiling)
    return out
