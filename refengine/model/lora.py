"""LoRA adapters: a small change of the attention projections, chosen per request.

An adapter adds to a projection `W` the product of two thin matrices: `y = W x + scale * B (A x)`, with `A`
`[rank, in]` and `B` `[out, rank]`. The base weights stay as they are, so that one batch may mix requests with
different adapters and with none. But the same tokens now have other keys and values: that is why an adapter is
part of what identifies a block (see `refengine.hashing.extra_keys`).

vLLM: V0 lora/lora.py LoRALayerWeights (which keeps the scale in B as well), lora/worker_manager.py
LRUCacheWorkerLoRAManager, lora/punica_wrapper/punica_base.py add_shrink, add_expand; V1 the same in
lora/lora_weights.py and lora/worker_manager.py, reached from v1/worker/lora_model_runner_mixin.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from refengine.errors import CheckpointError, RequestError
from refengine.hashing import Adapter
from refengine.model.config import LINEAR_ATTENTION, ModelConfig
from refengine.model.decoder import Adapt, Decoder
from refengine.model.lora_loader import Pair, read_lora, target_shapes, write_lora

CAPACITY = 8  # adapters that are kept, those in use not counted against it
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "o_proj": ("o_proj",)}  # ours <- the file's


@dataclass(frozen=True)
class LowRank:
    """The change of one projection, the scale already in `b`."""

    a: Tensor  # [rank, in_features]
    b: Tensor  # [out_features, rank]

    def __call__(self, x: Tensor) -> Tensor:
        """x `[n, in_features]` -> what is to be added to the projection's output, `[n, out_features]`."""
        return F.linear(F.linear(x, self.a), self.b)

    def to(self, dtype: torch.dtype, device: torch.device | str) -> LowRank:
        """The same where the model is."""
        return LowRank(self.a.to(device, dtype), self.b.to(device, dtype))


@dataclass(frozen=True)
class LoraWeights:
    """An adapter as the decoder needs it: for each layer, the change of "qkv_proj", of "o_proj", or of both."""

    layers: tuple[dict[str, LowRank], ...]


def load_lora(
    path: str, config: ModelConfig, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> LoraWeights:
    """The adapter in the directory `path`, for a model of this shape.

    Q, K and V are one matrix product in the decoder, so their changes become one as well: the A are stacked,
    and the B stand on a diagonal, where each feeds only its own rows of the output.
    Raises: CheckpointError with one sentence, if the adapter is missing, damaged, or for another model.
    """
    if LINEAR_ATTENTION in config.kinds:
        raise CheckpointError("adapters for models with linear-attention layers are not supported")
    lora = read_lora(path, config)
    return LoraWeights(
        tuple(
            {
                name: _fuse(pairs, lora.scale, targets, config).to(dtype, device)
                for name, targets in FUSED.items()
                if pairs.keys() & targets
            }
            for pairs in lora.layers
        )
    )


def _fuse(pairs: dict[str, Pair], scale: float, targets: Sequence[str], config: ModelConfig) -> LowRank:
    """One change for projections that lie one after another in the output, of which some may not be adapted."""
    shapes = target_shapes(config)
    stacked = torch.cat([pairs[target][0] for target in targets if target in pairs])
    nothing = {target: torch.zeros(shapes[target][0], 0) for target in targets}  # takes rows, but no rank
    diagonal = [(pairs[target][1] if target in pairs else nothing[target]).double() for target in targets]
    return LowRank(stacked, scale * torch.block_diag(*diagonal))  # type: ignore[no-untyped-call]


class AdaptStep:
    """The `adapt` of one step: adds to a projection's output what each adapter changes, for its own tokens."""

    def __init__(self, parts: Sequence[tuple[LoraWeights, Tensor]]) -> None:
        """`parts`: each adapter of the step with the rows of its tokens, `[n]` int64."""
        self.parts = parts

    def __call__(self, layer: int, projection: str, x: Tensor, y: Tensor) -> Tensor:
        """x `[num_tokens, in_features]`, y `[num_tokens, out_features]` -> y. Mutates: `y`."""
        for weights, rows in self.parts:
            change = weights.layers[layer].get(projection)
            if change is not None:
                y.index_add_(0, rows, change(x[rows]))
        return y


class LoadedAdapters:
    """The adapters of a model that are in memory, by path, least recently used first.

    Beyond `capacity` the first of them are dropped, but never one that an unfinished request still needs: its
    directory may be gone by now. What lies under a path must not change; other weights need another path, or
    cached blocks of the old ones would be taken for theirs.
    """

    def __init__(self, model: Decoder, capacity: int = CAPACITY) -> None:
        self.config = model.config
        self.dtype, self.device = model.embed_tokens.weight.dtype, model.embed_tokens.weight.device
        self.capacity = capacity
        self._weights: dict[str, LoraWeights] = {}

    @property
    def paths(self) -> list[str]:
        return list(self._weights)

    def load(self, request_id: str, adapter: Adapter, in_use: Iterable[Adapter | None] = ()) -> None:
        """Makes sure that a new request's adapter is in memory. Mutates: what is loaded.

        `in_use`: the adapters of all unfinished requests. Raises: RequestError, with nothing changed, for an
        adapter that cannot be loaded.
        """
        try:
            self._use(adapter.path)
        except CheckpointError as error:
            raise RequestError(request_id, f"adapter {adapter.name!r}: {error}") from None
        if len(self._weights) > self.capacity:
            needed = {adapter.path, *(other.path for other in in_use if other is not None)}
            idle = [path for path in self._weights if path not in needed]
            for path in idle[: len(self._weights) - self.capacity]:
                del self._weights[path]

    def for_requests(
        self, adapters: Sequence[Adapter | None], counts: Sequence[int] | np.ndarray
    ) -> Adapt | None:
        """The `adapt` of a step in which request i has `counts[i]` tokens, one after another; None without adapters.

        Mutates: the order of use. vLLM: V1 v1/worker/gpu_input_batch.py InputBatch.make_lora_inputs.
        """
        paths = list(dict.fromkeys(adapter.path for adapter in adapters if adapter is not None))
        if not paths:
            return None
        owners = [paths.index(adapter.path) if adapter is not None else -1 for adapter in adapters]
        owner = np.repeat(owners, counts)  # [num_tokens], an index into `paths`, -1: no adapter
        rows = (torch.from_numpy(np.flatnonzero(owner == i)).to(self.device) for i in range(len(paths)))
        return AdaptStep([(self._use(path), its_rows) for path, its_rows in zip(paths, rows, strict=True)])

    def for_tokens(self, mapping: Sequence[Adapter | None]) -> Adapt | None:
        """The same from one adapter per token, as V0 has it. vLLM: V0 LoRAMapping, lora/layers.py."""
        runs = [(adapter, len(list(tokens))) for adapter, tokens in itertools.groupby(mapping)]
        return self.for_requests([adapter for adapter, _ in runs], [count for _, count in runs])

    def _use(self, path: str) -> LoraWeights:
        """Mutates: the order of use; what is loaded, if it was not."""
        weights = self._weights.pop(path, None)
        if weights is None:
            weights = load_lora(path, self.config, self.dtype, self.device)
        self._weights[path] = weights
        return weights


def write_example_adapter(
    directory: str | Path, config: ModelConfig, seed: int, *, rank: int = 4, strength: float = 1.5
) -> str:
    """A random adapter of all four projections, strong enough to change what the model says. It teaches it nothing.

    `strength`: by how much, about, each feature of a projection moves if the input's features are of size 1. With
    the shipped model 0.5 leaves most answers as they are, 1.5 changes all of them, 2 leaves no sentence whole.
    Mutates: the directory. Returns: it, as the path of an `Adapter`.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, columns: int, size: float) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * size

    layers = [
        {
            target: (draw(rank, inputs, inputs**-0.5), draw(outputs, rank, strength * rank**-0.5))
            for target, (outputs, inputs) in target_shapes(config).items()
        }
        for _ in range(config.num_layers)
    ]
    write_lora(directory, layers, alpha=rank)
    return str(directory)
