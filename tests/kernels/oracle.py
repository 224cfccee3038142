"""What the operations mean, one token and one head at a time in float64, and random pages to try them on.

Slow on purpose, and written from the contract rather than from any backend: it has no batch, no mask and no
gather, so it cannot share a mistake with them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# (query_len, seq_len) of each sequence in a step
MIXES = {
    "one prompt": [(7, 7)],
    "one decode": [(1, 9)],
    "decodes of different lengths": [(1, 1), (1, 4), (1, 5), (1, 17), (1, 8)],
    "decodes of one length": [(1, 8), (1, 8), (1, 8)],
    "prompts of one length": [(6, 6), (6, 6)],
    "chunks": [(5, 12), (3, 4), (5, 5), (1, 30)],
    "decode between prompts": [(4, 4), (1, 9), (4, 11), (1, 3), (2, 2)],
    "a sequence with no query": [(1, 5), (0, 6), (1, 7), (3, 9)],
    "exact blocks": [(4, 8), (1, 16), (8, 8)],
}


def attend_slowly(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, sliding_window: int | None = None
) -> Tensor:
    """One sequence without a cache. keys, values `[seq_len, num_kv_heads, head_dim]`, query its last rows."""
    query, keys, values = query.double(), keys.double(), values.double()
    per_kv_head = query.shape[1] // keys.shape[1]
    out = torch.empty_like(query)
    for i in range(len(query)):
        position = len(keys) - len(query) + i
        first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
        for head in range(query.shape[1]):
            k = keys[first : position + 1, head // per_kv_head]
            v = values[first : position + 1, head // per_kv_head]
            weights = torch.softmax(k @ query[i, head] * scale, dim=0)
            out[i, head] = weights @ v
    return out


@dataclass
class Pages:
    """Sequences whose keys and values lie in scattered blocks of a cache, with NaN in every other slot."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    keys: list[Tensor]  # of each sequence, `[seq_len, num_kv_heads, head_dim]`
    values: list[Tensor]
    scale: float

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float]:
        """Those of `paged_attention`, in its order."""
        return (
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_tables,
            self.query_start_loc,
            self.seq_lens,
            self.scale,
        )

    def expected(self, sliding_window: int | None = None) -> Tensor:
        starts = self.query_start_loc.tolist()
        return torch.cat(
            [
                attend_slowly(self.query[starts[i] : starts[i + 1]], k, v, self.scale, sliding_window)
                for i, (k, v) in enumerate(zip(self.keys, self.values, strict=True))
            ]
        )


def make_pages(
    lengths: list[tuple[int, int]],  # (query_len, seq_len) of each sequence
    block_size: int = 4,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    spare_columns: int = 2,
    table_dtype: torch.dtype = torch.int32,
) -> Pages:
    """Random contents. Table entries past a sequence's end name blocks of other sequences or of nobody."""
    random = torch.Generator().manual_seed(seed)
    blocks = [-(-seq_len // block_size) for _, seq_len in lengths]
    num_blocks = sum(blocks) + 3
    order = torch.randperm(num_blocks, generator=random)
    columns = max(blocks) + spare_columns
    tables = torch.randint(num_blocks, (len(lengths), columns), generator=random)
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    key_cache = torch.full(shape, torch.nan, dtype=dtype)
    value_cache = torch.full(shape, torch.nan, dtype=dtype)
    keys, values, taken = [], [], 0
    for row, ((_, seq_len), count) in enumerate(zip(lengths, blocks, strict=True)):
        tables[row, :count] = order[taken : taken + count]
        taken += count
        keys.append(torch.randn(seq_len, num_kv_heads, head_dim, generator=random).to(dtype))
        values.append(torch.randn(seq_len, num_kv_heads, head_dim, generator=random).to(dtype))
        for position in range(seq_len):
            block, offset = tables[row, position // block_size], position % block_size
            key_cache[block, offset] = keys[-1][position]
            value_cache[block, offset] = values[-1][position]
    query_lens = torch.tensor([query_len for query_len, _ in lengths])
    return Pages(
        query=torch.randn(int(query_lens.sum()), num_heads, head_dim, generator=random).to(dtype),
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=tables.to(table_dtype),
        query_start_loc=torch.cat((torch.zeros(1, dtype=torch.int64), query_lens.cumsum(0))),
        seq_lens=torch.tensor([seq_len for _, seq_len in lengths]),
        keys=keys,
        values=values,
        scale=1.3 * head_dim**-0.5,  # not the usual one, which a backend might assume
    )
