"""Small checkpoints under the names that Hugging Face uses, whole or in shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 17,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "eos_token_id": 3,
}


def tensors(tied: bool = False) -> dict[str, Tensor]:
    """A checkpoint as Hugging Face names it, written out rather than derived from our own names."""
    torch.manual_seed(0)
    shapes = {"model.embed_tokens.weight": (17, 16), "model.norm.weight": (16,)}
    if not tied:
        shapes["lm_head.weight"] = (17, 16)
    for i in range(2):
        layer = {
            "input_layernorm.weight": (16,),
            "post_attention_layernorm.weight": (16,),
            "self_attn.q_proj.weight": (24, 16),
            "self_attn.k_proj.weight": (12, 16),
            "self_attn.v_proj.weight": (12, 16),
            "self_attn.o_proj.weight": (16, 24),
            "self_attn.q_norm.weight": (6,),
            "self_attn.k_norm.weight": (6,),
            "mlp.gate_proj.weight": (24, 16),
            "mlp.up_proj.weight": (24, 16),
            "mlp.down_proj.weight": (16, 24),
        }
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def write_config(directory: Path, **changes: Any) -> None:
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))


def write(directory: Path, weights: dict[str, Tensor] | None = None, **changes: Any) -> Path:
    directory.mkdir(exist_ok=True)
    write_config(directory, **changes)
    save_file(tensors() if weights is None else weights, directory / WEIGHTS)
    return directory


def write_shards(directory: Path) -> Path:
    write(directory)
    (directory / WEIGHTS).unlink()
    weights = tensors()
    weight_map: dict[str, str] = {}
    for i in range(3):
        part = {name: x for n, (name, x) in enumerate(weights.items()) if n % 3 == i}
        file = f"model-0000{i + 1}-of-00003.safetensors"
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory
