"""From an adapter directory to its matrices, and one clear sentence when that is not possible.

    adapter_config.json         r, lora_alpha, target_modules, ...
    adapter_model.safetensors   base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight, ...lora_B.weight, ...

That is the layout that PEFT writes. It has many options, and most of them change what the matrices mean; an
adapter with an option that is not implemented is refused, since half an adapter still writes fluent text.
vLLM: V0 lora/peft_helper.py PEFTHelper, lora/models.py LoRAModel.from_local_checkpoint; V1 lora/peft_helper.py,
lora/lora_model.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from refengine.errors import CheckpointError
from refengine.model.checkpoint import open_shard, read_json, refuse_pickles
from refengine.model.config import ModelConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")

# Options of PEFT that the file may have, with the values under which they change nothing.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "lora_bias": (False, None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (None,),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layers_to_transform": (None,),
    "layer_replication": (None,),
    "alora_invocation_tokens": (None,),
    "init_lora_weights": (
        True,
        False,
        None,
        "gaussian",
        "eva",
        "orthogonal",
    ),  # others change the base weights
}

Pair = tuple[Tensor, Tensor]  # A [rank, in_features], B [out_features, rank]


@dataclass(frozen=True)
class LoraFile:
    """An adapter as it is stored. `layers`: for each layer, the pair of each projection that is adapted."""

    scale: float
    layers: tuple[dict[str, Pair], ...]


def target_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Projection -> (out_features, in_features) of its weight in this model."""
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden = config.hidden_size
    return {
        "q_proj": (query, hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "o_proj": (hidden, query),
    }


def read_lora(path: str | Path, config: ModelConfig) -> LoraFile:
    """Reads and checks an adapter directory against the model that it is for.

    Raises: CheckpointError with one sentence that names the file, option or tensor at fault.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(f"there is no adapter directory {str(path)!r}")
    options = read_json(directory / CONFIG)
    rank, scale = _rank_and_scale(options, directory / CONFIG)
    targets = _targets(options.get("target_modules"), directory / CONFIG)
    _refuse_what_is_not_implemented(options, directory / CONFIG)
    tensors = _tensors(directory)
    shapes = target_shapes(config)
    layers = tuple(
        {t: _take_pair(tensors, directory, layer, t, rank, shapes[t]) for t in targets}
        for layer in range(config.num_layers)
    )
    if tensors:
        name = next(iter(tensors))
        more = f" (and {len(tensors) - 1} more)" if len(tensors) > 1 else ""
        raise CheckpointError(
            f"{directory / WEIGHTS} has a tensor {name!r} that has no place in the model{more}"
        )
    return LoraFile(scale, layers)


def write_lora(path: str | Path, layers: Sequence[dict[str, Pair]], alpha: float) -> None:
    """Writes matrices as PEFT would. Mutates: the directory, which is made if need be."""
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    options = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": len(next(iter(layers[0].values()))[0]),
        "lora_alpha": alpha,
        "target_modules": list(layers[0]),
        "bias": "none",
    }
    (directory / CONFIG).write_text(json.dumps(options, indent=2) + "\n", encoding="utf-8")
    named = (
        (_tensor_name(layer, target, matrix), tensor.contiguous())
        for layer, pairs in enumerate(layers)
        for target, pair in pairs.items()
        for matrix, tensor in zip("AB", pair, strict=True)
    )
    save_file(dict(named), directory / WEIGHTS)


def _rank_and_scale(options: dict[str, Any], file: Path) -> tuple[int, float]:
    """`scale` is lora_alpha / r, or with rank stabilisation lora_alpha / sqrt(r)."""
    for name in ("r", "lora_alpha"):
        if name not in options:
            raise CheckpointError(f"{file} has no {name!r}")
    rank, alpha = options["r"], options["lora_alpha"]
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise CheckpointError(f"{file}: r must be a positive whole number, not {rank!r}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise CheckpointError(f"{file}: lora_alpha must be a number, not {alpha!r}")
    return rank, alpha / (math.sqrt(rank) if options.get("use_rslora") else rank)


def _targets(modules: object, file: Path) -> list[str]:
    supported = f"supported are the attention projections {', '.join(TARGETS)}"
    if not isinstance(modules, list) or not modules:
        raise CheckpointError(f"{file}: target_modules must be a list of names, not {modules!r}; {supported}")
    for name in modules:
        if name not in TARGETS:
            raise CheckpointError(f"{file}: the target module {name!r} is not supported; {supported}")
    return [target for target in TARGETS if target in modules]


def _refuse_what_is_not_implemented(options: dict[str, Any], file: Path) -> None:
    for name, values in HARMLESS.items():
        if name in options and options[name] not in values:
            raise CheckpointError(f"{file}: {name} {options[name]!r} is not supported")


def _tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of the adapter, by name."""
    if not (directory / WEIGHTS).is_file():
        refuse_pickles(directory)
        raise CheckpointError(f"{directory} has no {WEIGHTS}")
    shard = open_shard(directory / WEIGHTS)
    return {name: shard.get_tensor(name) for name in sorted(shard.keys())}


def _take_pair(
    tensors: dict[str, Tensor], directory: Path, layer: int, target: str, rank: int, shape: tuple[int, int]
) -> Pair:
    """A and B of one projection, whose weight is `shape`. Mutates: `tensors`, which loses both."""
    a = _take(tensors, directory, _tensor_name(layer, target, "A"), rank, (rank, shape[1]))
    b = _take(tensors, directory, _tensor_name(layer, target, "B"), rank, (shape[0], rank))
    return a, b


def _take(
    tensors: dict[str, Tensor], directory: Path, name: str, rank: int, shape: tuple[int, int]
) -> Tensor:
    tensor = tensors.pop(name, None)
    if tensor is None:
        raise CheckpointError(f"{directory / WEIGHTS} has no tensor {name!r}")
    if tensor.shape != shape:
        raise CheckpointError(
            f"tensor {name!r} in {directory / WEIGHTS} is {list(tensor.shape)}, but with r {rank} this model needs "
            f"{list(shape)}"
        )
    if not tensor.is_floating_point():
        raise CheckpointError(
            f"tensor {name!r} in {directory / WEIGHTS} is {tensor.dtype}; quantized adapters are not read"
        )
    return tensor


def _tensor_name(layer: int, target: str, matrix: str) -> str:
    return f"base_model.model.model.layers.{layer}.self_attn.{target}.lora_{matrix}.weight"
