"""Checkpoints: whole ones in every layout, and each way in which one can be damaged or foreign."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from refengine.attention import causal_attention
from refengine.errors import CheckpointError
from refengine.model import loader
from refengine.model.decoder import Decoder
from refengine.model.loader import find_model, load_model, read_config

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
    weights, weight_map = tensors(), {}
    for i in range(3):
        part = {name: x for n, (name, x) in enumerate(weights.items()) if n % 3 == i}
        file = f"model-0000{i + 1}-of-00003.safetensors"
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


@torch.inference_mode()
def logits(decoder: Decoder) -> Tensor:
    return decoder.logits(decoder(torch.arange(9), torch.arange(9), causal_attention))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write(tmp_path / "model")


# Whole checkpoints


def test_every_tensor_finds_its_place(directory: Path) -> None:
    decoder, weights = load_model(directory), tensors()
    for i, layer in enumerate(decoder.layers):
        prefix = f"model.layers.{i}."
        qkv = [weights[f"{prefix}self_attn.{part}_proj.weight"] for part in "qkv"]
        gate_up = [weights[f"{prefix}mlp.{part}_proj.weight"] for part in ("gate", "up")]
        assert torch.equal(layer.self_attn.qkv_proj.weight, torch.cat(qkv))
        assert torch.equal(layer.mlp.gate_up_proj.weight, torch.cat(gate_up))
        assert torch.equal(layer.self_attn.k_norm.weight, weights[f"{prefix}self_attn.k_norm.weight"])
    assert torch.equal(decoder.lm_head.weight, weights["lm_head.weight"])
    assert not any(p.requires_grad or p.is_meta for p in decoder.parameters())
    assert not decoder.training and not decoder.rotary.inv_freq.is_meta


def test_shards_give_the_same_model(directory: Path, tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "shards")
    assert torch.equal(logits(load_model(str(shards))), logits(load_model(directory)))


@pytest.mark.parametrize("stored_twice", [False, True])
def test_tied_weights_are_one_tensor(tmp_path: Path, stored_twice: bool) -> None:
    weights = tensors(tied=True)
    if stored_twice:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    decoder = load_model(write(tmp_path, weights, tie_word_embeddings=True))
    assert decoder.lm_head.weight is decoder.embed_tokens.weight
    assert torch.equal(decoder.embed_tokens.weight, weights["model.embed_tokens.weight"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_dtype_is_ours_to_choose(directory: Path, dtype: torch.dtype) -> None:
    decoder = load_model(directory, dtype)
    assert {p.dtype for p in decoder.parameters()} == {dtype}
    assert decoder.rotary.inv_freq.dtype == torch.float32  # a position of 1000 has no room in half a float
    assert logits(decoder).dtype == dtype


def test_inv_freq_of_old_checkpoints_is_ignored(tmp_path: Path) -> None:
    weights = tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(3)}
    decoder = load_model(write(tmp_path, weights))
    assert decoder.rotary.inv_freq.count_nonzero() == 3


def test_the_weights_outlive_their_file(directory: Path) -> None:
    """A loaded model holds copies: a file that is mapped and then truncated would kill the process."""
    decoder = load_model(directory)
    before = logits(decoder)
    (directory / WEIGHTS).write_bytes(b"")
    assert torch.equal(logits(decoder), before)


def test_end_of_text_ids_come_from_both_configs(directory: Path) -> None:
    assert read_config(directory).eos_token_ids == (3,)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 3]}))
    assert read_config(directory).eos_token_ids == (3, 5)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert read_config(directory).eos_token_ids == (3, 7)


# Damaged and foreign ones. Each case changes a good directory; the sentence names what is at fault.


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
        "sliding-window layers are not supported",
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
        lambda d: (index(d, {"weight_map": {K_PROJ: "x.bin"}}), torch.save({}, d / "x.bin")),
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


# Finding a model


def test_no_such_directory(tmp_path: Path) -> None:
    for name in (tmp_path / "nowhere", "no-such-model", "a/b/c", "../x y/z"):
        with pytest.raises(CheckpointError, match="there is no model directory"):
            load_model(name)


def test_a_file_is_no_directory(directory: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no model directory"):
        load_model(directory / WEIGHTS)


def test_tiny_is_the_shipped_one() -> None:
    assert find_model("tiny") == Path(loader.__file__).parent / "tiny"


def test_a_directory_comes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    shutil.move(tmp_path / "model", tmp_path / "org" / "name")
    load_model("org/name")


class FakeHub:
    """Stands in for the package: tests do not use the network."""

    def __init__(self, answer: Path | Exception) -> None:
        self.answer = answer
        self.patterns: list[str] = []

    def snapshot_download(self, name: str, allow_patterns: list[str]) -> str:
        self.patterns = allow_patterns
        if isinstance(self.answer, Exception):
            raise self.answer
        return str(self.answer)


def test_the_hub_is_asked_for_safetensors_only(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(directory)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)  # type: ignore[arg-type]
    load_model("org/name")
    assert "*.safetensors" in hub.patterns
    assert not any(pattern.endswith((".bin", ".pt", "*")) for pattern in hub.patterns)


def test_the_hub_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(ConnectionError("no route to host\nand a long story"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"the Hugging Face hub did not give it: no route to host$"):
        load_model("org/name")


def test_a_config_that_cannot_be_read(directory: Path) -> None:
    (directory / "config.json").unlink()
    (directory / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config.json cannot be read"):
        load_model(directory)


def test_without_the_hub_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # type: ignore[arg-type]
    with pytest.raises(
        CheckpointError, match=r"the package huggingface_hub is needed \(pip install 'refengine\[hub\]'"
    ):
        load_model("org/name")
