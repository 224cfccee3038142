"""LoRA adapters: a small change of the attention projections, chosen per request.

An adapter adds to a projection `W` a product of two thin matrices: `y = W x + scale * B (A x)`, with `A`
`[rank, in]` and `B` `[out, rank]`. The base weights stay as they are, so that one batch may mix requests with
different adapters and with none. Other keys and values come out of the same tokens, though: that is why an
adapter is part of what identifies a block (see `refengine.hashing.extra_keys`).

The files are those that PEFT writes, read by `lora_loader`. Only the attention projections are adapted.
vLLM: V0 lora/lora.py LoRALayerWeights (which also keeps the scale in B), lora/worker_manager.py
LRUCacheWorkerLoRAManager, lora/punica_wrapper/punica_base.py add_shrink, add_expand; V1 the same in
lora/lora_weights.py and lora/worker_manager.py, used by v1/worker/lora_model_runner_mixin.py set_active_loras.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from refengine.errors import CheckpointError, RequestError
from refengine.hashing import Adapter
from refengine.model.config import ModelConfig
from refengine.model.decoder import Adapt, Decoder
from refengine.model.lora_loader import TARGETS, read_lora, write_lora

CAPACITY = 8  # adapters that stay loaded while nobody uses them


@dataclass(frozen=True)
class LowRank:
    """The change of one projection. `scale` is in `b` already."""

    a: Tensor  # [rank, in_features]
    b: Tensor  # [out_features, rank]

    def __call__(self, x: Tensor) -> Tensor:
        """x `[n, in_features]` -> what is added to the projection's output, `[n, out_features]`."""
        return F.linear(F.linear(x, self.a), self.b)


@dataclass(frozen=True)
class LoraWeights:
    """An adapter, ready for the decoder's fused projections: by layer, "qkv_proj" and "o_proj" if they change."""

    layers: tuple[dict[str, LowRank], ...]


def load_lora(
    path: str, config: ModelConfig, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> LoraWeights:
    """The adapter in the directory `path`.

    Raises: CheckpointError with one sentence, if it is missing, damaged, or not for this model.
    """
    lora = read_lora(path, config)
    layers = []
    for pairs in lora.layers:
        q, k, v, o = ([pairs[target]] if target in pairs else [] for target in TARGETS)
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        fused = {"qkv_proj": _fuse([(query, q), (kv, k), (kv, v)]), "o_proj": _fuse([(config.hidden_size, o)])}
        layers.append(
            {
                name: LowRank(a.to(device, dtype), (lora.scale * b).to(device, dtype))
                for name, (a, b) in fused.items()
                if len(a)
            }
        )
    return LoraWeights(tuple(layers))


def _fuse(parts: Sequence[tuple[int, Sequence[tuple[Tensor, Tensor]]]]) -> tuple[Tensor, Tensor]:
    """One pair for projections that lie one after another in the output, each with its width and at most one pair.

    The A are stacked; the B stand on a diagonal, so that each feeds its own rows only.
    """
    ...
