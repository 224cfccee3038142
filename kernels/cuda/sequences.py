"""Some sequences of a step: their block tables and lengths, as kernels read them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.cuda.addressing import kernel_blocks
from kernels.cuda.tiling import BLOCK_SIZES

NO_WINDOW = 2**31 - 1  # tokens; more than any sequence has


@dataclass(frozen=True)
class Sequences:
    """Tensors are int32 and lie where the cache does. `first_rows` and `query_lens`: whose query rows are whose."""

    first_rows: Tensor  # [num_seqs]
    query_lens: Tensor  # [num_seqs]
    block_tables: Tensor  # [num_seqs, max_blocks]
    seq_lens: Tensor  # [num_seqs] tokens, the queries included
    block_size: int  # tokens
    window: int  # tokens that a query sees, at most
    max_query_len: int  # tokens

    def __len__(self) -> int:
        return len(self.seq_lens)

    @property
    def room(self) -> int:
        """Keys that a query can see at most, known without asking the device for the lengths. Tokens."""
        return min(self.block_tables.shape[1] * self.block_size, self.window)

    def select(self, indices: list[int], max_query_len: int) -> Sequences:
        """Those of these sequences alone, with a bound on their queries."""
        if len(indices) == len(self):
            return replace(self, max_query_len=max_query_len)
        chosen = torch.tensor(indices, device=self.seq_lens.device, dtype=torch.int64)
        return replace(
            self,
            first_rows=self.first_rows[chosen],
            query_lens=self.query_lens[chosen],
            block_tables=self.block_tables[chosen],
            seq_lens=self.seq_lens[chosen],
            max_query_len=max_query_len,
        )

    def in_kernel_blocks(self) -> Sequences | None:
        """The same in blocks of a size that the fast kernels know; None if no such size divides the block size."""
        size = next((size for size in reversed(BLOCK_SIZES) if self.block_size % size == 0), None)
        if size is None:
            return None
        tables = kernel_blocks(self.block_tables, self.block_size, size)
        return replace(self, block_tables=tables, block_size=size)

    def by_row(self, num_rows: int) -> Sequences:
        """Every one of the first `num_rows` query rows as a sequence of its own, which ends with it.

        A query that sees the keys up to its own position is the newest token of a shorter sequence. So a
        kernel for decoding can serve any step, at the price of a block table per row.
        """
        rows = torch.arange(num_rows, device=self.seq_lens.device, dtype=torch.int32)
        owner = torch.searchsorted(self.first_rows + self.query_lens, rows, right=True)
        later = self.first_rows[owner] + self.query_lens[owner] - 1 - rows  # queries of its sequence
        return replace(
            self,
            first_rows=rows,
            query_lens=torch.ones_like(rows),
            block_tables=self.block_tables[owner],
            seq_lens=self.seq_lens[owner] - later,
            max_query_len=1,
        )


def sequences_of(
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_size: int,
    sliding_window: int | None,
    max_query_len: int,
) -> Sequences:
    """All sequences of a step, moved to where the block tables are."""
    device = block_tables.device
    starts = query_start_loc.to(device, torch.int32)
    return Sequences(
        first_rows=starts[:-1],
        query_lens=starts.diff(),
        block_tables=block_tables.to(device, torch.int32).contiguous(),
        seq_lens=seq_lens.to(device, torch.int32),
        block_size=block_size,
        window=sliding_window or NO_WINDOW,
        max_query_len=max_query_len,
    )
