"""A decode step to be measured: a cache full of numbers, block tables into it, and the three ways to attend.

Whatever can be prepared once for all layers of a step is prepared, as the engine does it; what is left, and
measured, is what a layer costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cuda.attention import attend_plain, attend_split, split_tiling
from kernels.cuda.sequences import Sequences, sequences_of
from kernels.gpu_device import Device, Work


@dataclass(frozen=True)
class Layout:
    """Heads, block size and dtype: by default those of an 8B Llama."""

    num_kv_heads: int = 8
    group: int = 4  # query heads per kv head
    head_dim: int = 128
    block_size: int = 16  # tokens
    dtype: torch.dtype = torch.bfloat16

    @property
    def block_bytes(self) -> int:
        """Keys and values of one block."""
        return 2 * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def blocks(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return ceil(tokens / self.block_size)


LLAMA = Layout()


class Pool:
    """One large cache, from which every case takes its blocks. Contents are random and finite."""

    def __init__(self, device: Device, layout: Layout, num_blocks: int) -> None:
        shape = (num_blocks, layout.block_size, layout.num_kv_heads, layout.head_dim)
        self.layout, self.num_blocks = layout, num_blocks
        self.key_cache = torch.empty(shape, dtype=layout.dtype, device=device.name).normal_()
        self.value_cache = torch.empty_like(self.key_cache).normal_()

    def tables(self, num_seqs: int, context: int, cold_bytes: int) -> list[Tensor]:
        """Block tables `[num_seqs, max_blocks]` int32 of disjoint sets of scattered blocks.

        As many sets as `cold_bytes` take, or as fit into the pool.
        """
        per_seq = self.layout.blocks(context)
        per_set = num_seqs * per_seq
        wanted = ceil(cold_bytes / (per_set * self.layout.block_bytes))
        count = min(max(1, wanted), self.num_blocks // per_set)
        random = torch.Generator().manual_seed(0)
        order = torch.randperm(self.num_blocks, generator=random)[: count * per_set].int()
        return list(order.view(count, num_seqs, per_seq).to(self.key_cache.device))


@dataclass(frozen=True)
class DecodeStep:
    """One new token for each sequence, all of them of one length."""

    out: Tensor  # [num_seqs, num_heads, head_dim], like query
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    scale: float

    def sequences(self) -> Sequences:
        """Tables and lengths as the kernels read them."""
        starts = torch.arange(len(self.query) + 1, device=self.query.device)
        return sequences_of(self.block_tables, starts, self.seq_lens, self.key_cache.shape[1], None, 1)


def decode_step(pool: Pool, block_tables: Tensor, context: int) -> DecodeStep:
    """A step over blocks of the pool, with random queries. context: tokens in each sequence."""
    layout, num_seqs, device = pool.layout, len(block_tables), block_tables.device
    shape = (num_seqs, layout.num_kv_heads * layout.group, layout.head_dim)
    query = torch.empty(shape, dtype=layout.dtype, device=device).normal_()
    seq_lens = torch.full((num_seqs,), context, dtype=torch.int32, device=device)
    scale = layout.head_dim**-0.5
    return DecodeStep(
        torch.empty_like(query), query, pool.key_cache, pool.value_cache, block_tables, seq_lens, scale
    )


Kernel = Callable[[DecodeStep], Work]


def plain(step: DecodeStep) -> Work:
    """A block of threads for each head of each sequence."""
    sequences = step.sequences()
    operands = (step.out, step.query, step.key_cache, step.value_cache)
    return partial(attend_plain, *operands, sequences, step.scale)


def split(step: DecodeStep) -> Work:
    """The keys of a sequence spread over several blocks of threads, and the merging of their results.

    Raises: ValueError for a layout that this kernel does not serve.
    """
    found = step.sequences().in_kernel_blocks()
    tiling = split_tiling(step.query, step.key_cache, found.block_size) if found else None
    if found is None or tiling is None:
        raise ValueError(f"the split kernel does not serve blocks of {list(step.key_cache.shape[1:])}")
    operands = (step.out, step.query, step.key_cache, step.value_cache)
    return partial(attend_split, *operands, found, step.scale, tiling)


def gather(step: DecodeStep) -> Work:
    """What torch offers: copy the pages together, then its own attention.

    The query heads of a group are given as so many queries of one head, which is the fastest way to say it.
    """
    blocks = step.block_tables.long()
    num_kv_heads = step.key_cache.shape[2]

    def attend() -> None:
        keys = step.key_cache[blocks].flatten(1, 2).transpose(1, 2)
        values = step.value_cache[blocks].flatten(1, 2).transpose(1, 2)
        grouped = step.query.view(len(step.query), num_kv_heads, -1, step.query.shape[2])
        result = F.scaled_dot_product_attention(grouped, keys, values, scale=step.scale)
        step.out.copy_(result.reshape(step.out.shape))

    return attend


KERNELS: dict[str, Kernel] = {
    "plain": plain,
    "split": split,
    "torch gather + SDPA": gather,
}
