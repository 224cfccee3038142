"""Tiny GGUF files, written with the `gguf` package by llama.cpp's rules, which are spelt out here a second time.

A file is made from a checkpoint directory. Quantizing loses a little, so what is left of each tensor is written
as a second checkpoint, and both must then give the same logits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
}
NORMS = {"post_attention_layernorm": "ffn_norm"}
GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}


def gguf_name(name: str, gemma: bool) -> str:
    """`model.layers.0.self_attn.q_proj.weight` -> `blk.0.attn_q.weight`."""
    names = NAMES | (GEMMA_NORMS if gemma else NORMS)
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, module = stem.split(".", 3)
        return f"blk.{layer}.{names[module]}.{kind}"
    return f"{names[stem]}.{kind}"


def permuted(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order of Llama's Q and K rows."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def write_gguf(
    path: Path,
    source: Path,
    kind: str = "F32",
    *,
    metadata: Mapping[str, Any] | None = None,
    tokenizer: Callable[[Any], None] = lambda writer: writer.add_tokenizer_model("no_vocab"),
    left: Path | None = None,
) -> Path:
    """The checkpoint `source` as a GGUF file, its matrices stored as `kind`.

    `metadata`: further keys, or other values. `left`: where to write what the kind of storage left of the weights.
    """
    gguf = pytest.importorskip("gguf")
    config = json.loads((source / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in _sizes(config).items():
        _add(writer, f"{architecture}.{key}", value)
    if config.get("eos_token_id") is not None:
        writer.add_eos_token_id(config["eos_token_id"])
    tokenizer(writer)
    for key, value in (metadata or {}).items():
        _add(writer, key if key.startswith(("tokenizer.", "split.")) else f"{architecture}.{key}", value)
    storage = gguf.GGMLQuantizationType[kind]
    remains: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        own = storage if tensor.dim() == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(tensor.float().numpy(), own)
        remains[name] = torch.from_numpy(gguf.quants.dequantize(data, own).copy()).view(tensor.shape)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            data = data + 1
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            data = permuted(
                data, config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            )
        writer.add_tensor(gguf_name(name, architecture == "gemma3"), data, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if left is not None:
        left.mkdir()
        (left / "config.json").write_text(json.dumps(config))
        save_file(remains, left / "model.safetensors")
    return path


def _sizes(config: dict[str, Any]) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
    }
    ropes = config["rope_parameters"]
    sizes["rope.freq_base"] = ropes.get("full_attention", ropes)["rope_theta"]
    if config["model_type"] == "gemma3_text":
        sizes["attention.sliding_window"] = config["sliding_window"]
    return sizes


def _add(writer: Any, key: str, value: Any) -> None:
    writer.kv_data[0].pop(key, None)  # a second value would be told in a warning
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)
