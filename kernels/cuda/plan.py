"""One step on the GPU: what its metadata says is worked out once, then only kernels are launched, layer by layer.

vLLM: V0 `FlashAttentionMetadata` with its prefill and decode halves, V1 `FlashAttentionMetadataBuilder.build`.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from kernels.cuda.attention import (
    attend_plain,
    attend_split,
    attend_varlen,
    fast_kernels_serve,
    split_tiling,
)
from kernels.cuda.cache_write import write_slots
from kernels.cuda.sequences import Sequences, sequences_of


class Plan:
    """Where a step writes and reads. Of `key_cache` only the shape is read."""

    def __init__(
        self,
        slot_mapping: Tensor,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        key_cache: Tensor,
        sliding_window: int | None,
    ) -> None:
        self.slot_mapping = slot_mapping
        self.reads = Reads(block_tables, query_start_loc, seq_lens, key_cache, sliding_window)

    def write(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
        write_slots(key, value, key_cache, value_cache, self.slot_mapping)

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float) -> Tensor:
        return self.reads(query, key_cache, value_cache, scale)


class Reads:
    """The attention of a step, for any layer. This reads the number of queries from the device, once."""

    def __init__(
        self,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        key_cache: Tensor,
        sliding_window: int | None,
    ) -> None:
        starts = query_start_loc.tolist()
        self.query_lens = [stop - start for start, stop in pairwise(starts)]
        self.num_rows: int = starts[-1]
        longest = max(self.query_lens, default=0)
        self.all = sequences_of(
            block_tables.to(key_cache.device),
            query_start_loc,
            seq_lens,
            key_cache.shape[1],
            sliding_window,
            longest,
        )

    @cached_property
    def in_kernel_blocks(self) -> Sequences | None:
        """All sequences for the fast kernels."""
        return self.all.in_kernel_blocks()

    @cached_property
    def by_row(self) -> Sequences:
        """All rows for the plain kernel."""
        return self.all.by_row(self.num_rows)

    @cached_property
    def halves(self) -> tuple[Sequences, Sequences]:
        """The sequences with one new token, which are split, and those with several."""
        assert self.in_kernel_blocks is not None
        single = [i for i, n in enumerate(self.query_lens) if n == 1]
        several = [i for i, n in enumerate(self.query_lens) if n > 1]
        return self.in_kernel_blocks.select(single, 1), self.in_kernel_blocks.select(
            several, self.all.max_query_len
        )

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `kernels.paged_attention`."""
        if out is None:
            out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        out[self.num_rows :] = 0
        operands = (out, query, key_cache, value_cache)
        sequences = self.in_kernel_blocks
        if sequences is None or not fast_kernels_serve(key_cache, value_cache):
            attend_plain(*operands, self.by_row, scale)
            return out
        tiling = split_tiling(query, key_cache, sequences.block_size)
        if tiling is None:
            attend_varlen(*operands, sequences, scale)
            return out
        single, several = self.halves
        attend_split(*operands, single, scale, tiling)
        attend_varlen(*operands, several, scale)
        return out
