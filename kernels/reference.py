"""The definition of every operation, in plain PyTorch: gather the pages, then attend as usual.

It is the specification for the faster backends and the only backend that needs nothing installed, so it has
to be both plain and quick. Two things make it quick. A batch is cut into pieces: neighbouring sequences with
the same number of new tokens are gathered and attended together, as long as what is gathered stays in a
core's own cache. And what follows from the metadata is computed once per step, in `Plan`, not once per layer.
vLLM: V0 `attention/backends/torch_sdpa.py`, V1 `v1/attention/backends/cpu_attn.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

# Keys and values of a piece are written by the gather and read by the attention right after. Beyond the size
# of a core's L2 cache that second trip goes to memory: attention of 32 sequences of 512 tokens took half as
# long again in one piece of 16 MB. A small batch fits in one piece and is spared the overhead of more calls.
PIECE_BYTES = 2 << 20


@dataclass(frozen=True)
class Piece:
    """Neighbouring sequences with `query_len` new tokens each, as tensors ready for every layer."""

    rows: slice  # their query rows
    num_seqs: int
    query_len: int  # tokens
    num_keys: int  # gathered per sequence: as many as for the one that sees most
    slots: Tensor  # [num_seqs * num_keys] int64
    mask: Tensor | None  # [num_seqs, 1, query_len, num_keys], 0 or -inf; None: each query sees every key ...
    causal: bool  # ... or, for whole prompts, the usual triangle


class Plan:
    """Where a step writes and reads, computed from its metadata alone."""

    def __init__(
        self,
        slot_mapping: Tensor,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        key_cache: Tensor,
        sliding_window: int | None,
    ) -> None:
        self.writes = Writes(slot_mapping)
        self.pieces = cut(block_tables, query_start_loc, seq_lens, key_cache, sliding_window)

    def write(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
        self.writes(key, value, key_cache, value_cache)

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float) -> Tensor:
        return attend(self.pieces, query, key_cache, value_cache, scale)


plan_step = Plan


class Writes:
    """Slots of new tokens, with the padding left out.

    Padding has to be taken out before indexing: -1 is a legal index and would hit the last slot of the cache.
    """

    def __init__(self, slot_mapping: Tensor) -> None:
        kept = slot_mapping >= 0
        self.rows = None if bool(kept.all()) else kept.nonzero().squeeze(1)
        self.slots = slot_mapping if self.rows is None else slot_mapping[self.rows]

    def __call__(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
        """Mutates: key_cache, value_cache."""
        if self.rows is not None:
            key, value = key[self.rows], value[self.rows]
        _flat(key_cache).index_copy_(0, self.slots, key)
        _flat(value_cache).index_copy_(0, self.slots, value)


def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """See `kernels.reshape_and_cache`."""
    Writes(slot_mapping)(key, value, key_cache, value_cache)


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
    pieces = cut(block_tables, query_start_loc, seq_lens, key_cache, sliding_window)
    result = attend(pieces, query, key_cache, value_cache, scale)
    return result if out is None else out.copy_(result)


def paged_attention_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `kernels.paged_attention_decode`."""
    starts = torch.arange(len(query) + 1)
    return paged_attention(
        query, key_cache, value_cache, block_tables, starts, seq_lens, scale, sliding_window, out
    )


def copy_blocks(caches: Sequence[tuple[Tensor, Tensor]], pairs: Sequence[tuple[int, int]]) -> None:
    """See `kernels.copy_blocks`."""
    for layer in caches:
        for cache in layer:
            for source, destination in pairs:
                cache[destination] = cache[source]


def attend(
    pieces: Sequence[Piece], query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float
) -> Tensor:
    """Attention of one layer, piece by piece. query and result `[num_tokens, num_heads, head_dim]`."""
    if len(pieces) == 1 and pieces[0].rows == slice(0, len(query)):
        return _attend_piece(pieces[0], query, key_cache, value_cache, scale)
    out = torch.zeros_like(query)
    for piece in pieces:
        out[piece.rows] = _attend_piece(piece, query[piece.rows], key_cache, value_cache, scale)
    return out


def _attend_piece(
    piece: Piece, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float
) -> Tensor:
    """query and result `[num_seqs * query_len, num_heads, head_dim]`. KV heads are not repeated."""
    result = F.scaled_dot_product_attention(
        query.view(piece.num_seqs, piece.query_len, *query.shape[1:]).transpose(1, 2),
        _gather(key_cache, piece),  # [num_seqs, num_kv_heads, num_keys, head_dim]
        _gather(value_cache, piece),
        attn_mask=piece.mask,
        is_causal=piece.causal,
        scale=scale,
        enable_gqa=True,
    )
    return result.transpose(1, 2).flatten(0, 1)


def _gather(cache: Tensor, piece: Piece) -> Tensor:
    rows = _flat(cache).index_select(0, piece.slots)
    return rows.view(piece.num_seqs, piece.num_keys, *rows.shape[1:]).transpose(1, 2)


def _flat(cache: Tensor) -> Tensor:
    """The same memory by slot: `[num_blocks * block_size, num_kv_heads, head_dim]`."""
    return cache.view(-1, *cache.shape[2:])


def cut(
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    key_cache: Tensor,
    sliding_window: int | None = None,
) -> list[Piece]:
    """The pieces of a step, in order of their rows. Of `key_cache` only shape and dtype are read.

    Only slots that hold a visible key of the sequence itself will be gathered. A shorter sequence is filled up
    by repeating its newest key, which the mask then hides. So neither the padding of a block table, nor the
    unused end of a block, nor a block behind the window is read, whatever it holds.
    """
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    query_lens = [stop - start for start, stop in pairwise(starts)]
    window = sliding_window or max(lengths, default=1)
    counts = [min(length, n + window - 1) for length, n in zip(lengths, query_lens, strict=True)]
    most = PIECE_BYTES // (2 * key_cache[0, 0].numel() * key_cache.dtype.itemsize)
    return [
        _piece(block_tables[i:j], starts[i], query_lens[i], lengths[i:j], counts[i:j], window, key_cache)
        for i, j in _neighbours(query_lens, counts, most)
        if any(query_lens[i:j])
    ]


def _neighbours(query_lens: list[int], counts: list[int], most: int) -> Iterator[tuple[int, int]]:
    """Ranges of sequences with one query length that together gather at most `most` keys, or of a single one."""
    first, widest = 0, 0
    for i, count in enumerate(counts):
        widest = max(widest, count)
        if query_lens[i] != query_lens[first] or (i > first and (i + 1 - first) * widest > most):
            yield first, i
            first, widest = i, count
    yield first, len(counts)


def _piece(
    block_tables: Tensor,
    first_row: int,
    query_len: int,
    lengths: list[int],
    counts: list[int],  # keys that some query of the sequence sees
    window: int,
    key_cache: Tensor,
) -> Piece:
    num_seqs, num_keys, block_size = len(lengths), max(counts), key_cache.shape[1]
    length, count = torch.tensor([lengths, counts], device=block_tables.device)[:, :, None]
    key = length - count + torch.arange(num_keys, device=length.device)  # [num_seqs, num_keys] positions
    held = torch.minimum(key, length - 1)
    slots = block_tables.gather(1, held // block_size).long() * block_size + held % block_size
    alike = query_len == 1 and min(counts) == num_keys
    causal = max(lengths) == query_len <= window
    query = length - query_len + torch.arange(query_len, device=length.device)
    return Piece(
        rows=slice(first_row, first_row + num_seqs * query_len),
        num_seqs=num_seqs,
        query_len=query_len,
        num_keys=num_keys,
        slots=slots.flatten(),
        mask=None if alike or causal else _mask(query, key, window, key_cache.dtype),
        causal=causal,
    )


def _mask(query: Tensor, key: Tensor, window: int, dtype: torch.dtype) -> Tensor:
    """Positions `[num_seqs, query_len]` and `[num_seqs, num_keys]` -> 0 where seen, -inf where hidden."""
    distance = query[:, :, None] - key[:, None, :]
    hidden = (distance < 0) | (distance >= window)
    return torch.zeros(hidden.shape, dtype=dtype, device=key.device).masked_fill_(hidden, -torch.inf)[:, None]
