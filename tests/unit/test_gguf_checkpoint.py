"""What llama.cpp does to tensors, and what is undone; here without a file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from refengine.model.gguf_checkpoint import GGUFCheckpoint
from refengine.model.gguf_file import GGUFFile, TensorInfo


def checkpoint(architecture: str, tensors: dict[str, Tensor], **metadata: Any) -> GGUFCheckpoint:
    """A file that is not there."""
    keys = {f"{architecture}.{name.replace('__', '.')}": value for name, value in metadata.items()}
    infos = {
        name: TensorInfo(tuple(tensor.shape), 0, 0, 4 * tensor.numel()) for name, tensor in tensors.items()
    }
    file = SimpleNamespace(
        path=Path("x.gguf"),
        metadata={"general.architecture": architecture} | keys,
        tensors=infos,
        read=tensors.__getitem__,
    )
    return GGUFCheckpoint(cast(GGUFFile, file))


def test_llamas_halves_are_put_apart_again() -> None:
    """Misconception: the rows of Q and K are those of the checkpoint. In a Llama file the two features that turn
    together lie side by side, in every head; ours lie half a head apart."""
    stored = torch.tensor([0.0, 2, 1, 3, 10, 12, 11, 13, 20, 22, 21, 23, 30, 32, 31, 33])[:, None]
    heads = {"attention__head_count": 4, "attention__head_count_kv": 2}
    names = {
        "blk.0.attn_q.weight": stored,
        "blk.0.attn_k.weight": stored[:8],
        "blk.0.attn_v.weight": stored[:8],
    }
    model = checkpoint("llama", names, **heads)
    query = model.take("model.layers.0.self_attn.q_proj.weight", (16, 1))
    assert query.flatten().tolist() == [10 * head + i for head in range(4) for i in range(4)]
    key = model.take("model.layers.0.self_attn.k_proj.weight", (8, 1))
    assert key.flatten().tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    assert torch.equal(model.take("model.layers.0.self_attn.v_proj.weight", (8, 1)), stored[:8])
    other = checkpoint("qwen3", {"blk.0.attn_q.weight": stored}, **heads)  # Llama is the only one
    assert torch.equal(other.take("model.layers.0.self_attn.q_proj.weight", (16, 1)), stored)


def test_gemmas_norms_lose_their_one() -> None:
    """Misconception: a norm's weight is stored as it was trained. llama.cpp adds Gemma's 1 when it writes a file."""
    norms = {
        "blk.2.attn_norm.weight": "input_layernorm",
        "blk.2.attn_q_norm.weight": "self_attn.q_norm",
        "blk.2.post_attention_norm.weight": "post_attention_layernorm",
        "blk.2.ffn_norm.weight": "pre_feedforward_layernorm",
        "blk.2.post_ffw_norm.weight": "post_feedforward_layernorm",
    }
    stored = {name: torch.full((4,), 1.0 + i) for i, name in enumerate(norms)}
    model = checkpoint("gemma3", stored | {"output_norm.weight": torch.full((4,), 9.0)})
    for i, name in enumerate(norms.values()):
        assert model.take(f"model.layers.2.{name}.weight", (4,)).tolist() == [i] * 4
    assert model.take("model.norm.weight", (4,)).tolist() == [8.0] * 4
    other = checkpoint("qwen3", {"blk.2.ffn_norm.weight": torch.ones(4)})
    assert other.take("model.layers.2.post_attention_layernorm.weight", (4,)).tolist() == [1.0] * 4
