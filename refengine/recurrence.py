"""Linear attention as the decoder calls it: whose state is read from which block, and written to which.

The counterpart of `refengine.attention` for layers with a recurrent state. A block of theirs holds a single
state, the one after the last token that its sequence computed in it; see `refengine.v1.groups.spec`.
vLLM: V0 none with prefix caching; V1 v1/attention/backends/mamba_attn.py and v1/worker/mamba_utils.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from refengine.attention import AttentionMetadata
from refengine.kv_cache import KVCache
from refengine.model.linear_attention import State, recurrence


@dataclass(frozen=True)
class Piece:
    """Neighbouring sequences with equally many new tokens."""

    rows: slice  # their tokens
    num_seqs: int
    read: Tensor  # [num_seqs] int64: the block of the state to start from ...
    fresh: Tensor  # [num_seqs] bool: ... which a sequence without computed tokens has not
    write: Tensor  # [num_seqs] int64: the block for the state after the new tokens


class PagedRecurrence:
    """The `recur` of one step: reads the state of every sequence, goes on from it, writes the new one.

    Where reading and writing block differ, the old state stays as it is: it may be published, and others may
    start from it too.
    """

    def __init__(self, kv_cache: KVCache, metadata: AttentionMetadata) -> None:
        self.layers = kv_cache.layers
        self.pieces = list(_cut(metadata, kv_cache.block_size))

    def __call__(self, layer: int, mixed: Tensor, log_decay: Tensor, conv_weight: Tensor) -> Tensor:
        """See `Recur`. Rows of no sequence give zeros. Mutates: the states of this layer."""
        matrices, tails = self.layers[layer]
        out = mixed.new_zeros(len(mixed), mixed.shape[1] // 3)
        for piece in self.pieces:
            state = State(matrices[piece.read], tails[piece.read])
            for part in state:
                part[piece.fresh] = 0.0
            new, state = recurrence(
                mixed[piece.rows].view(piece.num_seqs, -1, mixed.shape[1]),
                log_decay[piece.rows].view(piece.num_seqs, -1, log_decay.shape[1]),
                conv_weight,
                state,
            )
            out[piece.rows] = new.flatten(0, 1)
            matrices[piece.write], tails[piece.write] = state
        return out


def _cut(metadata: AttentionMetadata, block_size: int) -> Iterator[Piece]:
    """The pieces of a step, in order of their rows."""
    starts = metadata.query_start_loc.tolist()
    counts = [stop - start for start, stop in pairwise(starts)]
    after = metadata.seq_lens.to(torch.int64)
    before = after - metadata.query_start_loc.diff()
    # the state after n tokens lies in the block of token n - 1
    read, write = (
        metadata.block_tables.gather(1, (n - 1).clamp(min=0)[:, None] // block_size).squeeze(1).long()
        for n in (before, after)
    )
    first = 0
    for i in range(1, len(counts) + 1):
        if i == len(counts) or counts[i] != counts[first]:
            if counts[first]:
                seqs = slice(first, i)
                rows = slice(starts[first], starts[i])
                yield Piece(rows, i - first, read[seqs], before[seqs] == 0, write[seqs])
            first = i
