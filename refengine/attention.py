"""Paged attention as the decoder calls it: what a step knows about its tokens, and the call per layer.

The decoder hands over a query, key and value; where these are stored and what else is read is all in the
metadata, built once per step by the model runner.
vLLM: V0 AttentionMetadata in attention/backends/abstract.py, V1 CommonAttentionMetadata in
v1/attention/backend.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import Backend, BackendError, backend_for, plan_step
from refengine.errors import ConfigError
from refengine.gpu import to_device
from refengine.kv_cache import KVCache


@dataclass(frozen=True)
class AttentionMetadata:
    """One step's tokens: where each is written, and which blocks each sequence reads."""

    slot_mapping: Tensor  # [num_tokens] int64: block id * block_size + offset; -1: padding, not written
    block_tables: Tensor  # [num_seqs, max_blocks] integer; entries past a sequence's end may hold anything
    query_start_loc: Tensor  # [num_seqs + 1] integer: first row of each sequence, and the number of all rows
    seq_lens: Tensor  # [num_seqs] integer: tokens in each sequence, this step's included

    def to(self, device: torch.device) -> AttentionMetadata:
        """The same, there, from tensors on the host."""
        return AttentionMetadata(
            to_device(self.slot_mapping, device),
            to_device(self.block_tables, device),
            to_device(self.query_start_loc, device),
            to_device(self.seq_lens, device),
        )

    @property
    def num_tokens(self) -> int:
        return len(self.slot_mapping)

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)


def choose_backend(device: torch.device, backend: str | Backend | None) -> Backend:
    """The attention kernels to use. Raises: ConfigError, with what exists, for a name that does not."""
    if backend is not None and not isinstance(backend, str):
        return backend
    try:
        return backend_for(device, backend)
    except BackendError as error:
        raise ConfigError(str(error)) from None


class PagedAttention:
    """The `attend` of one step: writes the new keys and values, then reads the pages of every sequence.

    Within a layer all writes come before all reads. That is why two requests with the same prefix can share
    its blocks in the very step that computes them.

    Raises: ValueError for metadata that contradicts itself, ConfigError for an unknown backend.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        backend: str | Backend | None = None,
        sliding_window: int | None = None,
        layer: int = 0,
    ) -> None:
        """`layer`: one that will be attended, for the shape of its cache."""
        backend = choose_backend(metadata.slot_mapping.device, backend)
        self.layers = kv_cache.layers
        self.plan = plan_step(
            backend,
            metadata.slot_mapping,
            metadata.block_tables,
            metadata.query_start_loc,
            metadata.seq_lens,
            kv_cache.layers[layer][0],
            sliding_window,
        )

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query `[num_tokens, num_heads, head_dim]`, key and value with num_kv_heads; returns query's shape.

        Mutates: the cache of this layer.
        """
        key_cache, value_cache = self.layers[layer]
        self.plan.write(key, value, key_cache, value_cache)
        return self.plan.attend(query, key_cache, value_cache, query.shape[-1] ** -0.5)


def causal_attention(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The `attend` of one whole sequence without a cache, for training and comparison."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)
