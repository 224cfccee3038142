"""Each way in which a checkpoint can be damaged or foreign gets one sentence that names what is at fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from refengine.errors import CheckpointError
from refengine.model.loader import load_model
from tests.unit.checkpoints import CONFIG, INDEX, WEIGHTS, tensors, write, write_config, write_shards


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write(tmp_path / "model")


def truncate(directory: Path) -> None:
    data = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(data[: len(data) // 2])


def without(directory: Path, name: str) -> None:
    write(directory, {key: x for key, x in tensors().items() if key != name})


def reshape(directory: Path, name: str, shape: tuple[int, ...]) -> None:
    write(directory, tensors() | {name: torch.zeros(shape)})


def only_pickle(directory: Path, name: str) -> None:
    (directory / WEIGHTS).unlink()
    torch.save({}, directory / name)


def index(directory: Path, content: Any) -> None:
    (directory / WEIGHTS).unlink()
    (directory / INDEX).write_text(content if isinstance(content, str) else json.dumps(content))


def drop_shard(directory: Path) -> None:
    write_shards(directory)
    (directory / "model-00002-of-00003.safetensors").unlink()


def twice(directory: Path) -> None:
    write_shards(directory)
    for name in ("model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"):
        shard = load_file(directory / name) | {"model.norm.weight": torch.zeros(16)}
        save_file(shard, directory / name)


def shard_is_a_pickle(directory: Path) -> None:
    index(directory, {"weight_map": {K_PROJ: "x.bin"}})
    torch.save({}, directory / "x.bin")


K_PROJ = "model.layers.1.self_attn.k_proj.weight"
Q_NORM = "model.layers.0.self_attn.q_norm.weight"
OTHER_HEAD = {"lm_head.weight": torch.ones(17, 16)}

DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), "has no config.json"),
    "config is not JSON": (lambda d: (d / "config.json").write_text("{"), "config.json is not valid JSON"),
    "config is binary": (lambda d: (d / "config.json").write_bytes(b"\xff\xfe\x00"), "is not valid JSON"),
    "config is a list": (lambda d: (d / "config.json").write_text("[]"), "holds a list, not an object"),
    "generation config": (
        lambda d: (d / "generation_config.json").write_text("?"),
        "generation_config.json is not",
    ),
    "family": (
        lambda d: write_config(d, model_type="mamba"),
        "model_type 'mamba' is not supported; .* llama",
    ),
    "no family": (lambda d: (d / "config.json").write_text("{}"), "model_type None is not supported"),
    "activation": (lambda d: write_config(d, hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
    "rope": (
        lambda d: write_config(d, rope_scaling={"rope_type": "yarn"}),
        "rope_type 'yarn' is not supported",
    ),
    "rope without factor": (
        lambda d: write_config(d, rope_scaling={"rope_type": "linear"}),
        "config.json has no 'factor'",
    ),
    "sliding": (
        lambda d: write_config(d, use_sliding_window=True),
        "sliding-window layers are not supported unless",
    ),
    "quantized": (lambda d: write_config(d, quantization_config={"bits": 4}), "quantized weights are not"),
    "no size": (
        lambda d: (d / "config.json").write_text(
            json.dumps({k: v for k, v in CONFIG.items() if k != "hidden_size"})
        ),
        "config.json has no 'hidden_size'",
    ),
    "size is text": (
        lambda d: write_config(d, vocab_size="many"),
        "vocab_size must be a positive whole number",
    ),
    "size is zero": (
        lambda d: write_config(d, num_attention_heads=0, head_dim=None),
        "config.json has a value",
    ),
    "layers": (lambda d: write_config(d, num_hidden_layers=2**24), "16777216 layers can only be a slip"),
    "more numbers than can be counted": (
        lambda d: write_config(d, hidden_size=2**40, vocab_size=2**40),
        "has sizes that no network can have",
    ),
    "heads": (
        lambda d: write_config(d, num_key_value_heads=3),
        "4 is not a multiple of num_key_value_heads 3",
    ),
    "truncated": (truncate, "model.safetensors is not a whole safetensors file"),
    "empty file": (lambda d: (d / WEIGHTS).write_bytes(b""), "is not a whole safetensors file"),
    "not safetensors": (lambda d: (d / WEIGHTS).write_bytes(b"x" * 999), "is not a whole safetensors file"),
    "missing tensor": (lambda d: without(d, K_PROJ), f"has no tensor '{K_PROJ}'"),
    "missing head": (lambda d: without(d, "lm_head.weight"), "has no tensor 'lm_head.weight'"),
    "one layer more": (
        lambda d: write_config(d, num_hidden_layers=3),
        "has no tensor 'model.layers.2.self_attn.q_proj.weight'|'model.layers.2.input_layernorm.weight'",
    ),
    "one layer less": (
        lambda d: write_config(d, num_hidden_layers=1),
        r"has a tensor 'model.layers.1.\S+' that a qwen3 decoder has no place for \(and 10 more\)",
    ),
    "unexpected tensor": (
        lambda d: write(d, tensors() | {"model.layers.0.mlp.extra.weight": torch.zeros(1)}),
        "has a tensor 'model.layers.0.mlp.extra.weight' that a qwen3 decoder has no place for$",
    ),
    "another family's": (
        lambda d: write_config(d, model_type="llama"),
        r"'model.layers.0.self_attn.k_norm.weight' that a llama decoder has no place for",
    ),
    "shape": (
        lambda d: reshape(d, K_PROJ, (24, 16)),
        rf"tensor '{K_PROJ}' .* is \[24, 16\], but config.json says \[12, 16\]",
    ),
    "shape of a norm": (lambda d: reshape(d, Q_NORM, (24,)), rf"'{Q_NORM}' .* is \[24\], .* \[6\]"),
    "transposed": (
        lambda d: reshape(d, "model.layers.0.mlp.up_proj.weight", (16, 24)),
        r"is \[16, 24\], but",
    ),
    "integers": (
        lambda d: write(d, tensors() | {K_PROJ: torch.zeros(12, 16, dtype=torch.int8)}),
        f"'{K_PROJ}' .* is torch.int8; quantized weights are not read",
    ),
    "tied but different": (
        lambda d: write(d, tensors() | OTHER_HEAD, tie_word_embeddings=True),
        "'lm_head.weight' differs from 'model.embed_tokens.weight', though config.json ties them",
    ),
    "no weights": (lambda d: (d / WEIGHTS).unlink(), f"has neither {WEIGHTS} nor {INDEX}"),
    "pickle": (
        lambda d: only_pickle(d, "pytorch_model.bin"),
        "has its weights only in pytorch_model.bin, a pickle, which could run any code when opened",
    ),
    "checkpoint": (lambda d: only_pickle(d, "consolidated.00.pth"), "only in consolidated.00.pth"),
    "index is not JSON": (lambda d: index(d, "{"), f"{INDEX} is not valid JSON"),
    "index without a map": (lambda d: index(d, {"metadata": {}}), f"{INDEX} has no weight_map"),
    "index with a list": (lambda d: index(d, {"weight_map": []}), f"{INDEX} has no weight_map"),
    "missing shard": (drop_shard, "names model-00002-of-00003.safetensors, which is missing"),
    "shard above": (
        lambda d: index(d, {"weight_map": {K_PROJ: "../model.safetensors"}}),
        "names '../model.safetensors', which is not a file of this directory",
    ),
    "absolute shard": (
        lambda d: index(d, {"weight_map": {K_PROJ: "/etc/passwd"}}),
        "names '/etc/passwd', which is not a file of this directory",
    ),
    "shard on another system": (
        lambda d: index(d, {"weight_map": {K_PROJ: "..\\model.safetensors"}}),
        "which is not a file of this directory",
    ),
    "shard is a number": (lambda d: index(d, {"weight_map": {K_PROJ: 1}}), "names 1, which is not a file"),
    "shard is a pickle": (
        shard_is_a_pickle,
        "x.bin is not a whole safetensors file",
    ),
    "tensor in two shards": (twice, "tensor 'model.norm.weight' is in both"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named_in_one_sentence(directory: Path, case: str) -> None:
    damage, sentence = DAMAGE[case]
    load_model(directory)  # it was whole before
    damage(directory)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        load_model(directory)
    assert "\n" not in str(caught.value)


def test_a_config_that_cannot_be_read(directory: Path) -> None:
    (directory / "config.json").unlink()
    (directory / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config.json cannot be read"):
        load_model(directory)
