"""The definition of every operation, in plain PyTorch: gather the pages, then attend as usual.

It is the specification for the faster backends and the only backend that needs nothing installed, so it has
to be both plain and quick. Two ideas make it quick. Sequences with the same number of new tokens form a
group and are computed together, so a step has one gather and one attention call per group (all decodes are
one group). And what follows from the metadata is computed once per step, in `Plan`, not once per layer.
vLLM: V0 `attention/backends/torch_sdpa.py`, V1 `v1/attention/backends/cpu_attn.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Group:
    """The sequences of a step that have `query_len` new tokens each, as tensors ready for every layer."""

    num_seqs: int
    query_len: int  # tokens
    num_keys: int  # keys gathered per sequence: as many as the one that sees most
    rows: slice | Tensor  # their query rows, sequence after sequence
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
        block_size: int,
        dtype: torch.dtype,
        sliding_window: int | None,
    ) -> None:
        self.writes = Writes(slot_mapping)
        self.groups = groups(block_tables, query_start_loc, seq_lens, block_size, dtype, sliding_window)

    def write(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
        self.writes(key, value, key_cache, value_cache)

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float) -> Tensor:
        return attend(self.groups, query, key_cache, value_cache, scale)


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
    block_size = key_cache.shape[1]
    step = groups(block_tables, query_start_loc, seq_lens, block_size, query.dtype, sliding_window)
    result = attend(step, query, key_cache, value_cache, scale)
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
    sources, destinations = torch.tensor(pairs, device=caches[0][0].device).T
    for layer in caches:
        for cache in layer:
            cache[destinations] = cache[sources]


def attend(
    step: Sequence[Group], query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float
) -> Tensor:
    """Attention of one layer, group by group. query and result `[num_tokens, num_heads, head_dim]`."""
    if len(step) == 1 and step[0].num_seqs * step[0].query_len == len(query):
        return _attend_group(step[0], query, key_cache, value_cache, scale)
    out = torch.zeros_like(query)
    for group in step:
        out[group.rows] = _attend_group(group, query[group.rows], key_cache, value_cache, scale)
    return out


def _attend_group(
    group: Group, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float
) -> Tensor:
    """query and result `[num_seqs * query_len, num_heads, head_dim]`. KV heads are not repeated."""
    result = F.scaled_dot_product_attention(
        query.view(group.num_seqs, group.query_len, *query.shape[1:]).transpose(1, 2),
        _gather(key_cache, group),  # [num_seqs, num_kv_heads, num_keys, head_dim]
        _gather(value_cache, group),
        attn_mask=group.mask,
        is_causal=group.causal,
        scale=scale,
        enable_gqa=True,
    )
    return result.transpose(1, 2).flatten(0, 1)


def _gather(cache: Tensor, group: Group) -> Tensor:
    rows = _flat(cache).index_select(0, group.slots)
    return rows.view(group.num_seqs, group.num_keys, *rows.shape[1:]).transpose(1, 2)


def _flat(cache: Tensor) -> Tensor:
    """The same memory by slot: `[num_blocks * block_size, num_kv_heads, head_dim]`."""
    return cache.view(-1, *cache.shape[2:])


def groups(
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_size: int,
    dtype: torch.dtype,
    sliding_window: int | None = None,
) -> list[Group]:
    """Sorts the sequences of a step by their number of new tokens. Sequences with none are left out."""
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    members = defaultdict(list)
    for i, length in enumerate(lengths):
        if query_len := starts[i + 1] - starts[i]:
            members[query_len].append((i, starts[i], length))
    return [
        _group(query_len, seqs, block_tables, block_size, dtype, sliding_window)
        for query_len, seqs in members.items()
    ]


def _group(
    query_len: int,
    seqs: list[tuple[int, int, int]],  # (row of the block table, first query row, tokens) of each
    block_tables: Tensor,
    block_size: int,
    dtype: torch.dtype,
    sliding_window: int | None,
) -> Group:
    """Only slots that hold a visible key of the sequence itself are ever gathered.

    A shorter sequence is filled up by repeating its newest key, which the mask then hides. So neither the
    padding of a block table, nor the unused end of a block, nor a block behind the window is read, whatever
    it holds.
    """
    lengths = [length for _, _, length in seqs]
    window = sliding_window or max(lengths)
    counts = [min(length, query_len + window - 1) for length in lengths]  # keys that some query sees
    num_keys = max(counts)
    alike = query_len == 1 and min(counts) == num_keys
    causal = min(lengths) == max(lengths) == query_len <= window

    device = block_tables.device
    index, row, length, count = torch.tensor(
        [(*seq, n) for seq, n in zip(seqs, counts, strict=True)], device=device
    ).T[:, :, None]  # each [num_seqs, 1]
    key = length - count + torch.arange(num_keys, device=device)  # [num_seqs, num_keys] positions
    held = torch.minimum(key, length - 1)
    block = block_tables[index[:, 0]].gather(1, held // block_size).long()

    start, stop = seqs[0][1], seqs[-1][1] + query_len
    together = stop - start == len(seqs) * query_len
    query = torch.arange(query_len, device=device)
    return Group(
        num_seqs=len(seqs),
        query_len=query_len,
        num_keys=num_keys,
        rows=slice(start, stop) if together else (row + query).flatten(),
        slots=(block * block_size + held % block_size).flatten(),
        mask=None if alike or causal else _mask(key, length - query_len + query, window, dtype),
        causal=causal,
    )


def _mask(key: Tensor, query: Tensor, window: int, dtype: torch.dtype) -> Tensor:
    """Positions `[num_seqs, num_keys]` and `[num_seqs, query_len]` -> 0 where seen, -inf where hidden."""
    distance = query[:, :, None] - key[:, None, :]
    hidden = (distance < 0) | (distance >= window)
    return torch.zeros(hidden.shape, dtype=dtype, device=key.device).masked_fill_(hidden, -torch.inf)[:, None]
