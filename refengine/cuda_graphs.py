"""Decode steps as CUDA graphs: recorded once for each batch size, then started with a single call.

A decode step of a small model is some hundred kernels that take microseconds each, and to start one from Python
takes longer than that. A graph starts all of them at once. In return nothing may differ from step to step but the
contents of memory: the same kernels, on the same addresses, with the same shapes. So the inputs of a step are
copied into buffers that stay, and its batch is filled up to the next size that is recorded.

What the graphs do not serve runs as ever, kernel by kernel: prompts, adapters, layers with a recurrent state.
vLLM: V0 worker/model_runner.py CUDAGraphRunner and `_get_cuda_graph_pad_size`; V1 compilation/cuda_graph.py
CUDAGraphWrapper and v1/cudagraph_dispatcher.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import Backend
from kernels.dispatch import BACKENDS
from refengine.attention import AttentionMetadata
from refengine.config import EngineConfig
from refengine.gpu import GraphCapture, Work, staged, to_device
from refengine.kv_cache import KVCache
from refengine.model.decoder import Decoder

STEP = 8  # between the larger sizes


@dataclass(frozen=True)
class GraphLimits:
    """The largest step that graphs are made for."""

    num_seqs: int
    num_columns: int  # of a block table

    @classmethod
    def of(cls, config: EngineConfig, max_model_len: int) -> GraphLimits:
        """What an engine can schedule at all: as many requests as run at once, each as long as it may be."""
        return cls(config.max_num_seqs, -(-max_model_len // config.block_size))


@dataclass(frozen=True)
class LayerTable:
    """What a layer reads: the block table of this cache group, as far back as this window (tokens)."""

    group: int = 0
    window: int | None = None


def captured_sizes(most: int) -> list[int]:
    """Batch sizes that are recorded, in sequences: 1, 2, 4, 8, 16, 24, 32, ..., and `most` as the last."""
    return [*(size for size in (1, 2, 4, *range(STEP, most, STEP)) if size < most), most]


class DecodeBuffers:
    """The inputs of a decode step at addresses that never change; a step of n sequences uses the first rows."""

    def __init__(self, limits: GraphLimits, num_groups: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.limits, self.device = limits, device
        self.token_ids = zeros(limits.num_seqs)
        self.positions = zeros(limits.num_seqs)
        self.seq_lens = zeros(limits.num_seqs, dtype=torch.int32)
        self.slots = zeros(num_groups, limits.num_seqs)
        self.tables = zeros(num_groups, limits.num_seqs, limits.num_columns, dtype=torch.int32)

    def have_room_for(self, groups: Sequence[AttentionMetadata]) -> bool:
        """Whether a step has no more sequences, and no wider block tables, than there is room for."""
        widest = max(group.block_tables.shape[1] for group in groups)
        return groups[0].num_seqs <= self.limits.num_seqs and widest <= self.limits.num_columns

    def load(
        self, token_ids: Tensor, positions: Tensor, groups: Sequence[AttentionMetadata], size: int
    ) -> None:
        """Takes over a step, with all its tensors on the host, and fills it up to `size` sequences.

        A sequence that is filled in has one token, in the first slot of block 0, reads it and writes nothing.
        That is a legal sequence for every backend. Columns that this step does not use are cleared.
        Mutates: the first `size` rows of all buffers.
        """
        self._fill(self.token_ids[:size], token_ids, 0)
        self._fill(self.positions[:size], positions, 0)
        self._fill(self.seq_lens[:size], groups[0].seq_lens, 1)
        for slots, tables, group in zip(self.slots, self.tables, groups, strict=True):
            self._fill(slots[:size], group.slot_mapping, -1)
            num_seqs, width = group.block_tables.shape
            tables[:size].zero_()
            tables[:num_seqs, :width] = to_device(group.block_tables.int(), self.device)

    def _fill(self, buffer: Tensor, values: Tensor, padding: int) -> None:
        padded = F.pad(values.to(buffer.dtype), (0, len(buffer) - len(values)), value=padding)
        buffer.copy_(staged(padded, self.device), non_blocking=True)


class GraphedDecode:
    """The network's decode steps by batch size, each recorded when it is first needed."""

    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCache,
        backend: Backend,
        layers: Sequence[LayerTable],
        limits: GraphLimits,
        capture: Callable[[Work], Work],
    ) -> None:
        """`layers`: one for each layer of the model. `capture`: see GraphCapture."""
        self.model, self.kv_cache, self.backend, self.layers = model, kv_cache, backend, layers
        num_groups = 1 + max(layer.group for layer in layers)
        self.buffers = DecodeBuffers(limits, num_groups, model.embed_tokens.weight.device)
        self.sizes = captured_sizes(limits.num_seqs)
        self.capture = capture
        self.replays: dict[int, Work] = {}  # by size
        self.has_failed = False

    def run(self, token_ids: Tensor, positions: Tensor, groups: Sequence[AttentionMetadata]) -> Tensor | None:
        """The hidden states `[num_seqs, hidden_size]` of a step whose tensors are on the host.

        Returns: None, with nothing done, for a step that no graph serves. Otherwise rows that are valid until the
        next step. Mutates: the KV cache.
        """
        num_seqs = groups[0].num_seqs
        is_decode = len(token_ids) == num_seqs  # every sequence has a token, so none has several
        if self.has_failed or not is_decode or not self.buffers.have_room_for(groups):
            return None
        size = next(size for size in self.sizes if size >= num_seqs)
        self.buffers.load(token_ids, positions, groups, size)
        if size not in self.replays:
            try:
                self.replays[size] = self.capture(partial(self._forward, size))
            except Exception as error:  # whatever it is, the step can still run without a graph
                self.has_failed = True
                reason = f"{type(error).__name__}: {error}".split("\n")[0]
                warnings.warn(
                    f"a decode step of {size} sequences could not be recorded as a CUDA graph, so all steps run "
                    f"without graphs from here on ({reason})",
                    stacklevel=2,
                )
                return None
        return self.replays[size]()[:num_seqs]

    def _forward(self, size: int) -> Tensor:
        """The network over the first `size` rows of the buffers. Mutates: the KV cache."""
        buffers = self.buffers
        seq_lens = buffers.seq_lens[:size]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            key_cache, value_cache = self.kv_cache.layers[layer]
            table = self.layers[layer]
            slots, tables = buffers.slots[table.group, :size], buffers.tables[table.group, :size]
            self.backend.reshape_and_cache(key, value, key_cache, value_cache, slots)
            scale = query.shape[-1] ** -0.5
            return self.backend.paged_attention_decode(
                query, key_cache, value_cache, tables, seq_lens, scale, table.window
            )

        return self.model(buffers.token_ids[:size], buffers.positions[:size], attend)  # type: ignore[no-any-return]


def graphs_for(
    model: Decoder,
    kv_cache: KVCache,
    backend: Backend,
    layers: Sequence[LayerTable],
    limits: GraphLimits | None,
    stream: torch.cuda.Stream | None,
) -> GraphedDecode | None:
    """Graphs for an engine that runs on `stream`; None where there can be none.

    On a CPU there are none, nor without limits, nor with a backend of which nobody knows whether it could be
    recorded: one that reads its metadata back from the device cannot.
    """
    can_be_recorded = getattr(backend, "__name__", None) == BACKENDS["cuda"]
    if stream is None or limits is None or not can_be_recorded:
        return None
    return GraphedDecode(model, kv_cache, backend, layers, limits, GraphCapture(stream))
