"""GGUF files: the same logits as the checkpoint they were made from, and a sentence for every damage."""

from __future__ import annotations

import random
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from refengine import LLM, SamplingParams
from refengine.errors import CheckpointError
from refengine.model.config import ModelConfig
from refengine.model.decoder import Decoder
from refengine.model.gguf_convert import convert
from refengine.model.gguf_file import GGUFFile
from refengine.model.loader import load_model, read_config
from refengine.model.uncached import attend_rows
from tests.unit.gguf_files import write_gguf
from tests.unit.networks import TOKENS, WINDOW, expected_logits, make_network

pytest.importorskip("gguf")
GEMMA = {"sliding_window": WINDOW, "query_pre_attn_scalar": 32}
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, one KV head, tied": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "gemma3": ("Gemma3", GEMMA),
}


@torch.inference_mode()
def logits(decoder: Decoder) -> Tensor:
    return decoder.logits(decoder(TOKENS, torch.arange(len(TOKENS)), attend_rows(decoder.config)))


def comparable(config: ModelConfig) -> ModelConfig:
    """Without what may be written in two ways: all layers full, and 1e-6 in 32 bits."""
    return replace(config, layer_types=config.kinds, rms_norm_eps=float(f"{config.rms_norm_eps:.3g}"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    make_network(directory, "Llama", num_hidden_layers=2)
    return directory


# The same network


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_file_says_what_the_checkpoint_says(tmp_path: Path, name: str, kind: str) -> None:
    family, options = NETWORKS[name]
    network = make_network(tmp_path, family, **options)
    file = write_gguf(tmp_path / "model.gguf", tmp_path, kind, left=tmp_path / "left")
    decoder, reference = load_model(file), load_model(tmp_path / "left")
    assert comparable(decoder.config) == comparable(reference.config)
    torch.testing.assert_close(logits(decoder), logits(reference), atol=2e-5, rtol=0)
    if kind == "F32":
        torch.testing.assert_close(logits(decoder), expected_logits(network), atol=1e-4, rtol=0)


def test_llama3_rope_is_read_from_its_divisors(tmp_path: Path) -> None:
    """llama.cpp keeps only the number by which each frequency is divided; a factor of 32 is in its largest."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    make_network(tmp_path, "Llama", rope_parameters=rope, num_hidden_layers=1)
    reference = load_model(tmp_path)
    file = write_gguf(tmp_path / "x.gguf", tmp_path)
    plain = 1 / 500_000.0 ** (np.arange(0, 32, 2) / 32)
    divisors = (plain / reference.rotary["full_attention"].inv_freq.numpy()).astype(np.float32)
    append_tensor(file, "rope_freqs.weight", divisors)
    assert torch.equal(logits(load_model(file)), logits(reference))
    append_tensor(write_gguf(file, tmp_path), "rope_freqs.weight", divisors * 2)
    with pytest.raises(CheckpointError, match=r"has rope_freqs.weight that are not those of Llama 3"):
        load_model(file)


@pytest.mark.parametrize(
    "pattern", [3, [True, True, False] * 2], ids=["every third is full", "layer by layer"]
)
def test_gemmas_pattern_and_second_rope_base_where_the_file_has_them(tmp_path: Path, pattern: Any) -> None:
    make_network(tmp_path, "Gemma3", **GEMMA)
    metadata = {
        "attention.sliding_window_pattern": pattern,
        "rope.freq_base_swa": 5000.0,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
    }
    config = read_config(write_gguf(tmp_path / "x.gguf", tmp_path, metadata=metadata))
    assert config.kinds == ("sliding_attention", "sliding_attention", "full_attention") * 2
    assert (config.sliding_rope_theta, config.rope_scaling.factor, config.rope_theta) == (5000.0, 8.0, 1e6)


def test_the_dtype_is_ours_to_choose(tmp_path: Path, source: Path) -> None:
    file = write_gguf(tmp_path / "x.gguf", source, "Q8_0")
    decoder = load_model(file, torch.bfloat16)
    assert {p.dtype for p in decoder.parameters()} == {torch.bfloat16}


def test_converted_it_is_the_same(tmp_path: Path, source: Path) -> None:
    file = write_gguf(tmp_path / "x.gguf", source, "Q8_0")
    made, told = tmp_path / "made", []
    made.mkdir()
    convert(GGUFFile(file), made, torch.float32, told.append)
    assert sorted(f.name for f in made.iterdir()) == ["config.json", "model.safetensors"]
    assert sum(told) == sum(info.num_bytes for info in GGUFFile(file).tensors.values())
    converted, direct = load_model(made), load_model(file)
    assert converted.config == direct.config and torch.equal(logits(converted), logits(direct))


def test_it_is_served_by_its_path(tmp_path: Path, source: Path) -> None:
    file = write_gguf(tmp_path / "x.gguf", source)
    params = SamplingParams(max_tokens=5)
    prompt = TOKENS[:20].tolist()
    outputs = [LLM(str(path), num_blocks=20).generate([prompt], params)[0] for path in (file, source)]
    assert outputs[0].token_ids == outputs[1].token_ids


# Damage


def append_tensor(file: Path, name: str, data: np.ndarray) -> None:
    """Adds one tensor to a file, as a writer would have. Mutates: the file."""
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(file.with_suffix(".new"), reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind, sub = field.types[0], field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), kind, sub)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file.with_suffix(".new").replace(file)


def test_every_cut_is_noticed(tmp_path: Path, source: Path) -> None:
    data = write_gguf(tmp_path / "x.gguf", source).read_bytes()
    file = tmp_path / "cut.gguf"
    cuts = random.Random(0)
    for length in (0, 3, 4, 8, 23, 24, 25, len(data) - 1, *(cuts.randrange(len(data)) for _ in range(40))):
        file.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"cut.gguf is not a whole GGUF file"):
            load_model(file)


@pytest.mark.filterwarnings("ignore:.*encountered in multiply")  # a damaged scale
def test_no_damage_of_the_header_escapes(tmp_path: Path, source: Path) -> None:
    """Whatever a byte becomes, it is read as a model, or refused in one sentence. It never hangs."""
    data = write_gguf(tmp_path / "x.gguf", source, "Q8_0").read_bytes()
    end_of_header = data.index(b"blk.1.ffn_down.weight") + 60
    file, dice = tmp_path / "bad.gguf", random.Random(0)
    num_refused = 0
    for _ in range(150):
        bad = bytearray(data)
        for _ in range(dice.randint(1, 3)):
            bad[dice.randrange(end_of_header)] = dice.choice((0, 1, 9, 127, 255, dice.randrange(256)))
        file.write_bytes(bad)
        try:
            load_model(file)
        except CheckpointError as error:
            assert "\n" not in str(error)
            num_refused += 1
    assert num_refused > 75


def test_lengths_are_not_trusted(tmp_path: Path) -> None:
    """A list of 2**60 numbers in a file of 60 bytes."""
    file = tmp_path / "x.gguf"
    for kind in (0, 8, 9):  # bytes, texts, lists
        entry = struct.pack("<Q1sIIQ", 1, b"a", 9, kind, 2**60)
        file.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + entry)
        with pytest.raises(CheckpointError, match=r"ends in the middle of its header|unknown kind 9"):
            load_model(file)


DAMAGE: dict[str, tuple[dict[str, Any], str]] = {
    "no size": ({"embedding_length": None}, "has no llama.embedding_length"),
    "a size by layer": (
        {"attention.head_count_kv": [2, 2]},
        "has a list and not a number for llama.attention.head_count_kv",
    ),
    "a size in words": ({"block_count": "two"}, "has a str and not a number for llama.block_count"),
    "one layer more": ({"block_count": 3}, r"has no tensor 'model.layers.2.\S+'"),
    "one layer less": (
        {"block_count": 1},
        r"has a tensor 'model.layers.1.\S+' .* no place for \(and 8 more\)",
    ),
    "another size": (
        {"feed_forward_length": 95},
        r"'model.layers.0.mlp.gate_proj.weight' in .*x.gguf is \[96, 64\], but its metadata says \[95, 64\]",
    ),
    "a part": ({"split.count": 3}, "is one of 3 parts; only whole files are read"),
    "rope": ({"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}, "rope_type 'yarn' is not supported"),
    "rope on a part of a head": ({"rope.dimension_count": 16}, "heads whose parts differ in size"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_metadata_that_does_not_fit_is_named(tmp_path: Path, source: Path, case: str) -> None:
    changes, sentence = DAMAGE[case]
    file = tmp_path / "x.gguf"
    if None in changes.values():
        data = write_gguf(file, source).read_bytes()
        file.write_bytes(data.replace(b"llama.embedding_length", b"llama.embedding_lenght"))
    else:
        write_gguf(file, source, metadata=changes)
    with pytest.raises(CheckpointError, match=sentence):
        load_model(file)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"block_count": 2**31}, "a network of 2147483648 layers can only be a slip"),
        ({"block_count": 1.5}, "a network of 1.5 layers can only be a slip"),
        ({"attention.sliding_window_pattern": "x"}, "has a str for gemma3.attention.sliding_window_pattern"),
        ({"attention.sliding_window_pattern": [True]}, "1 layer_types for 2 layers"),
        ({"attention.sliding_window": 0}, "its sliding_window is 0"),
        ({"attention.head_count": float("nan")}, "has nan and not a number for gemma3.attention.head_count"),
        ({"final_logit_softcapping": -2.0}, "final_softcap must be a positive number, not -2.0"),
    ],
    ids=str,
)
def test_gemmas_metadata_that_does_not_fit_is_named(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    make_network(tmp_path, "Gemma3", num_hidden_layers=2, **GEMMA)
    write_gguf(tmp_path / "x.gguf", tmp_path, metadata=changes)
    with pytest.raises(CheckpointError, match=sentence):
        load_model(tmp_path / "x.gguf")


def test_another_network_is_refused(tmp_path: Path, source: Path) -> None:
    data = write_gguf(tmp_path / "x.gguf", source).read_bytes()
    (tmp_path / "x.gguf").write_bytes(data.replace(b"llama", b"phi33"))
    with pytest.raises(CheckpointError, match="holds a 'phi33' network; from GGUF this engine reads llama, "):
        load_model(tmp_path / "x.gguf")


def test_a_tensor_without_a_place_is_named(tmp_path: Path, source: Path) -> None:
    file = write_gguf(tmp_path / "x.gguf", source)
    append_tensor(file, "blk.0.ffn_gate_inp.weight", np.zeros((4, 64), dtype=np.float32))
    with pytest.raises(
        CheckpointError, match=r"a tensor 'blk.0.ffn_gate_inp.weight' that a llama decoder has no"
    ):
        load_model(file)


def test_integers_are_no_weights(tmp_path: Path, source: Path) -> None:
    file = write_gguf(tmp_path / "x.gguf", source)
    append_tensor(file, "blk.0.attn_q.bias", np.zeros(128, dtype=np.int32))
    with pytest.raises(
        CheckpointError, match=r"'blk.0.attn_q.bias' in .* is I32, which is not read|no place for"
    ):
        load_model(file)


def test_without_the_package_only_plain_numbers_are_read(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = write_gguf(tmp_path / "plain.gguf", source, "F16")
    quantized = write_gguf(tmp_path / "q.gguf", source, "Q8_0")
    monkeypatch.setitem(sys.modules, "gguf", None)
    load_model(plain)
    with pytest.raises(CheckpointError, match=r"q.gguf is quantized, .* \(pip install 'refengine\[gguf\]'\)"):
        load_model(quantized)


def test_a_file_of_another_kind_is_still_no_model(tmp_path: Path, source: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no model directory"):
        load_model(source / "model.safetensors")
    with pytest.raises(CheckpointError, match="there is no model directory"):
        load_model(tmp_path / "nowhere.gguf")
