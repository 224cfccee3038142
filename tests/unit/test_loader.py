"""Whole checkpoints in every layout, and where a model is looked for."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from refengine.attention import causal_attention
from refengine.errors import CheckpointError
from refengine.model import loader
from refengine.model.decoder import Decoder
from refengine.model.loader import find_model, load_model, read_config
from tests.unit.checkpoints import WEIGHTS, tensors, write, write_shards


@torch.inference_mode()
def logits(decoder: Decoder) -> Tensor:
    return decoder.logits(decoder(torch.arange(9), torch.arange(9), causal_attention))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write(tmp_path / "model")


# Whole checkpoints


def test_every_tensor_finds_its_place(directory: Path) -> None:
    decoder, weights = load_model(directory), tensors()
    for i in range(2):
        layer: Any = decoder.layers[i]
        prefix = f"model.layers.{i}."
        qkv = [weights[f"{prefix}self_attn.{part}_proj.weight"] for part in "qkv"]
        gate_up = [weights[f"{prefix}mlp.{part}_proj.weight"] for part in ("gate", "up")]
        assert torch.equal(layer.self_attn.qkv_proj.weight, torch.cat(qkv))
        assert torch.equal(layer.mlp.gate_up_proj.weight, torch.cat(gate_up))
        assert torch.equal(layer.self_attn.k_norm.weight, weights[f"{prefix}self_attn.k_norm.weight"])
    assert torch.equal(decoder.lm_head.weight, weights["lm_head.weight"])
    assert not any(p.requires_grad or p.is_meta for p in decoder.parameters())
    assert not decoder.training and not decoder.rotary["full_attention"].inv_freq.is_meta


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
    inv_freq = decoder.rotary["full_attention"].inv_freq
    assert inv_freq.dtype == torch.float32  # a position of 1000 has no room in half a float
    assert logits(decoder).dtype == dtype


def test_inv_freq_of_old_checkpoints_is_ignored(tmp_path: Path) -> None:
    weights = tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(3)}
    decoder = load_model(write(tmp_path, weights))
    assert decoder.rotary["full_attention"].inv_freq.count_nonzero() == 3


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
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    load_model("org/name")
    assert "*.safetensors" in hub.patterns
    assert not any(pattern.endswith((".bin", ".pt", "*")) for pattern in hub.patterns)


def test_the_hub_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(ConnectionError("no route to host\nand a long story"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    with pytest.raises(CheckpointError, match=r"the Hugging Face hub did not give it: no route to host$"):
        load_model("org/name")


def test_without_the_hub_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        CheckpointError, match=r"the package huggingface_hub is needed \(pip install 'refengine\[hub\]'"
    ):
        load_model("org/name")
