"""Which backend runs an operation, and the four operations with their contracts.

A step calls the same operation once per layer with the same metadata (which tokens, which blocks) and other
tensors. Whatever follows from the metadata alone is worth computing once: `plan_step` returns a `StepPlan`
that did so, and a backend with nothing to prepare gets one that only remembers its arguments.
vLLM: V0 `AttentionMetadataBuilder.build`, V1 the same name in `v1/attention/backend.py`, once per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

import torch
from torch import Tensor

from kernels import checks

Caches = Sequence[tuple[Tensor, Tensor]]

# Name of a backend -> the module that holds it, imported when first asked for.
BACKENDS = {
    "reference": "kernels.reference",
    "cpu": "kernels.cpu",
    "cuda": "kernels.cuda",
    "interpreter": "kernels.interpreted",
}
BY_DEVICE = {"cpu": "cpu", "cuda": "cuda"}


class BackendError(ValueError):
    """A backend that does not exist, or that cannot run where the tensors are."""


class StepPlan(Protocol):
    """One step's reads and writes, ready to be repeated for every layer."""

    def write(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
        """`reshape_and_cache` with the step's slot mapping. Mutates: key_cache, value_cache."""

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float) -> Tensor:
        """`paged_attention` with the step's tables and lengths."""


class Backend(Protocol):
    """What a backend module provides. Arguments arrive checked.

    Optional: `plan_step`, and `check_device(device)`, which raises a BackendError where the backend cannot run.
    """

    def reshape_and_cache(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """See `kernels.reshape_and_cache`."""

    def paged_attention(
        self,
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
        ...

    def paged_attention_decode(
        self,
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
        ...

    def copy_blocks(self, caches: Caches, pairs: Sequence[tuple[int, int]]) -> None:
        """See `kernels.copy_blocks`."""


def backend_for(device: torch.device | str, name: str | None = None) -> Backend:
    """The backend of that name, or the one that suits the device.

    Raises: BackendError if there is none, with what exists, or if it cannot run on that device, with what can.
    """
    name = name or BY_DEVICE.get(torch.device(device).type, "reference")
    if name not in BACKENDS:
        raise BackendError(f"there is no kernel backend {name!r}; what exists is {', '.join(BACKENDS)}")
    backend = cast(Backend, import_module(BACKENDS[name]))
    check_device = getattr(backend, "check_device", None)
    if check_device is not None:
        check_device(torch.device(device))
    return backend


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    backend: str | None = None,
) -> None:
    """Writes the key and value of every new token into its slot.

    Args:
        key, value: `[num_tokens, num_kv_heads, head_dim]`.
        key_cache, value_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, of the same dtype.
        slot_mapping: `[num_tokens]` int64, block id * block_size + offset; -1 writes nothing (padding).
    Mutates: key_cache, value_cache.
    Raises: ValueError with one sentence for tensors that do not fit together.
    vLLM: V0 and V1 `reshape_and_cache`, `reshape_and_cache_flash` in csrc/cache_kernels.cu.
    """
    checks.caches(key_cache, value_cache)
    checks.new_tokens("key", key, key_cache)
    checks.new_tokens("value", value, key_cache)
    checks.slots(slot_mapping, len(key))
    backend_for(key.device, backend).reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)


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
    backend: str | None = None,
) -> Tensor:
    """Causal attention of new tokens over cached pages; prefill, chunk and decode in one batch.

    The keys and values of the new tokens are already in the cache. Query i of a sequence whose new tokens
    start at position p sees the keys 0..p+i, and with a sliding window w only the last w of these.

    Args:
        query: `[num_tokens, num_heads, head_dim]`, the sequences one after another.
        block_tables: `[num_seqs, max_blocks]` integer block ids; entries past a sequence's end may hold
            anything, as may those that lie wholly behind the sliding window.
        query_start_loc: `[num_seqs + 1]` integer; sequence i owns the query rows between entries i and i+1.
        seq_lens: `[num_seqs]` tokens in each sequence, this step's included.
        scale: factor on the scores, usually head_dim ** -0.5.
        out: written and returned when given, `[num_tokens, num_heads, head_dim]`.
    Returns: `[num_tokens, num_heads, head_dim]`; rows past the last entry of query_start_loc are zero.
    Mutates: out.
    Raises: ValueError with one sentence for tensors that do not fit together.
    vLLM: V0 `PagedAttention.forward_prefix` and `forward_decode`, V1 `flash_attn_varlen_func`.
    """
    checks.caches(key_cache, value_cache)
    checks.query(query, key_cache, out)
    checks.metadata(block_tables, query_start_loc, seq_lens, key_cache.shape[1], len(query))
    checks.window(sliding_window)
    return backend_for(query.device, backend).paged_attention(
        query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, scale, sliding_window, out
    )


def paged_attention_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Attention of the newest token of each sequence: `paged_attention` with one query row per sequence.

    Args: as in `paged_attention`, with query `[num_seqs, num_heads, head_dim]`.
    Returns: `[num_seqs, num_heads, head_dim]`.
    Mutates: out.
    Raises: ValueError with one sentence for tensors that do not fit together.
    vLLM: V0 `paged_attention_v1`, `paged_attention_v2`; V1 uses the varlen form for both.
    """
    checks.caches(key_cache, value_cache)
    checks.query(query, key_cache, out)
    starts = torch.arange(len(query) + 1)
    checks.metadata(block_tables, starts, seq_lens, key_cache.shape[1], len(query))
    checks.window(sliding_window)
    return backend_for(query.device, backend).paged_attention_decode(
        query, key_cache, value_cache, block_tables, seq_lens, scale, sliding_window, out
    )


def copy_blocks(caches: Caches, pairs: Sequence[tuple[int, int]], backend: str | None = None) -> None:
    """Copies whole blocks within the cache, in every layer, one pair after another.

    The order counts: a block may be freed after it was copied, and be the destination of a later pair.

    Args:
        caches: one (key_cache, value_cache) per layer.
        pairs: (source, destination) block ids.
    Mutates: every cache.
    Raises: ValueError for a block that does not exist.
    vLLM: V0 `copy_blocks` in csrc/cache_kernels.cu (copy-on-write); V1 never copies blocks.
    """
    if not caches or not pairs:
        return
    for key_cache, value_cache in caches:
        checks.caches(key_cache, value_cache)
    checks.pairs(pairs, min(len(key_cache) for key_cache, _ in caches))
    backend_for(caches[0][0].device, backend).copy_blocks(caches, pairs)


@dataclass(frozen=True)
class DirectPlan:
    """The plan of a backend with nothing to prepare: calls its operations with the remembered metadata."""

    backend: Backend
    slot_mapping: Tensor
    block_tables: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    sliding_window: int | None

    def write(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
        self.backend.reshape_and_cache(key, value, key_cache, value_cache, self.slot_mapping)

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float) -> Tensor:
        return self.backend.paged_attention(
            query,
            key_cache,
            value_cache,
            self.block_tables,
            self.query_start_loc,
            self.seq_lens,
            scale,
            self.sliding_window,
        )


def plan_step(
    backend: Backend,
    slot_mapping: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    key_cache: Tensor,
    sliding_window: int | None = None,
) -> StepPlan:
    """Checks the metadata of a step once and prepares what all layers share.

    Args: as in `reshape_and_cache` and `paged_attention`; key_cache of any layer, for its shape and dtype.
    Raises: ValueError with one sentence for metadata that does not fit together.
    """
    checks.slots(slot_mapping, len(slot_mapping))
    checks.metadata(block_tables, query_start_loc, seq_lens, key_cache.shape[1], len(slot_mapping))
    checks.window(sliding_window)
    prepare = getattr(backend, "plan_step", None)
    if prepare is None:
        return DirectPlan(backend, slot_mapping, block_tables, query_start_loc, seq_lens, sliding_window)
    return cast(
        StepPlan,
        prepare(slot_mapping, block_tables, query_start_loc, seq_lens, key_cache, sliding_window),
    )
