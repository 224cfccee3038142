"""The network against `transformers`: same weights, same tokens, same logits, with and without paged cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from refengine.attention import AttentionMetadata, PagedAttention, causal_attention
from refengine.kv_cache import KVCache
from refengine.model.config import FULL_ATTENTION, ModelConfig
from refengine.model.decoder import Decoder, rotaries, rotate
from refengine.model.loader import load_model

VOCAB_SIZE, MAX_LEN = 101, 256
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,  # so small that every kind of wave is among the 6
}
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, one KV head, tied": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama, llama3 rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama, linear rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
    ),
    "qwen2": ("Qwen2", {"rms_norm_eps": 1e-5, "rope_theta": 1e6}),
    "qwen3": ("Qwen3", {"head_dim": 20}),  # 4 * 20 != 48
    "qwen3, tied": ("Qwen3", {"head_dim": 12, "tie_word_embeddings": True}),
}


@pytest.fixture(scope="module", params=NETWORKS)
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Any]:
    """Ours, loaded from the directory that theirs was saved to."""
    transformers = pytest.importorskip("transformers")
    family, options = NETWORKS[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(SIZES | options))
    theirs = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for (
            name,
            parameter,
        ) in theirs.named_parameters():  # norms and biases start at 1 and 0: nothing would show
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif "embed" not in name:
                parameter.mul_(4.0)  # attention that is nearly uniform hides a wrong mask
    directory = tmp_path_factory.mktemp("model")
    theirs.save_pretrained(directory)
    return load_model(directory), theirs


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(VOCAB_SIZE, (90,), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def expected(theirs: Any, tokens: Tensor) -> Tensor:
    logits: Tensor = theirs(tokens[None]).logits[0]
    assert logits.std() > 0.1  # something to get wrong
    return logits


@torch.inference_mode()
def in_chunks(decoder: Decoder, tokens: Tensor, chunks: list[int], block_size: int) -> Tensor:
    """One sequence through the paged cache, in steps of these sizes, over scattered blocks."""
    num_blocks = -(-len(tokens) // block_size)
    cache = KVCache(decoder.config, num_blocks + 4, block_size)
    table = torch.randperm(num_blocks + 3, generator=torch.Generator().manual_seed(2))[:num_blocks] + 1
    done, parts = 0, []
    for size in chunks:
        positions = torch.arange(done, done + size)
        metadata = AttentionMetadata(
            slot_mapping=table[positions // block_size] * block_size + positions % block_size,
            block_tables=table[None],
            query_start_loc=torch.tensor([0, size]),
            seq_lens=torch.tensor([done + size]),
        )
        attend = PagedAttention(cache, metadata)
        parts.append(decoder.logits(decoder(tokens[done : done + size], positions, attend)))
        done += size
    return torch.cat(parts)


@torch.inference_mode()
def test_whole_prompt(network: tuple[Decoder, Any], tokens: Tensor) -> None:
    ours, theirs = network
    hidden = ours(tokens, torch.arange(len(tokens)), causal_attention)
    assert hidden.shape == (len(tokens), SIZES["hidden_size"])
    torch.testing.assert_close(ours.logits(hidden), expected(theirs, tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("chunks", "block_size"),
    [([90], 16), ([1] * 90, 4), ([7, 1, 1, 13, 31, 1, 36], 3), ([16, 16, 1, 57], 1)],
    ids=["at once", "one by one", "odd chunks", "blocks of one"],
)
def test_through_the_paged_cache(
    network: tuple[Decoder, Any], tokens: Tensor, chunks: list[int], block_size: int
) -> None:
    ours, theirs = network
    logits = in_chunks(ours, tokens, chunks, block_size)
    torch.testing.assert_close(logits, expected(theirs, tokens), atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_a_mixed_batch_of_sequences(network: tuple[Decoder, Any], tokens: Tensor) -> None:
    """Two steps, three sequences: a prompt in chunks beside decodes, and a padding token at the end."""
    ours, theirs = network
    texts = [tokens[:20], tokens[30:37], tokens[50:90]]
    block_size, tables = 4, torch.randperm(30, generator=torch.Generator().manual_seed(3)).view(3, 10)
    cache = KVCache(ours.config, 30, block_size)
    got: list[list[Tensor]] = [[], [], []]
    for bounds in ([(0, 19), (0, 6), (0, 25)], [(19, 20), (6, 7), (25, 40)]):
        positions = torch.cat([torch.arange(a, b) for a, b in bounds])
        counts = torch.tensor([b - a for a, b in bounds])
        rows = torch.arange(3).repeat_interleave(counts)
        slots = tables[rows, positions // block_size] * block_size + positions % block_size
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
        lengths = torch.tensor([b for _, b in bounds])
        ids = torch.cat([text[a:b] for text, (a, b) in zip(texts, bounds, strict=True)])
        metadata = AttentionMetadata(torch.cat((slots, torch.tensor([-1]))), tables, starts, lengths)
        assert (metadata.num_tokens, metadata.num_seqs) == (len(ids) + 1, 3)
        padded = torch.cat((ids, ids[:1])), torch.cat((positions, positions[:1]))
        logits = ours.logits(ours(*padded, PagedAttention(cache, metadata)))[:-1]
        for sequence, part in zip(got, torch.split(logits, counts.tolist()), strict=True):
            sequence.append(part)
    for text, parts in zip(texts, got, strict=True):
        torch.testing.assert_close(torch.cat(parts), expected(theirs, text), atol=1e-4, rtol=1e-4)


def test_old_configs_mean_the_same_rope() -> None:
    """transformers 4 wrote `rope_theta` and `rope_scaling` where 5 writes `rope_parameters`."""
    sizes = SIZES | {"model_type": "llama", "rms_norm_eps": 1e-6}
    new = ModelConfig.from_hf(sizes | {"rope_parameters": LLAMA3})
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    old = ModelConfig.from_hf(sizes | {"rope_theta": 10_000.0, "rope_scaling": scaling})
    older = scaling | {"type": scaling["rope_type"]}
    del older["rope_type"]
    assert new == old == ModelConfig.from_hf(sizes | {"rope_theta": 10_000.0, "rope_scaling": older})
    assert new.rope_scaling.factor == 8.0


def test_rotation_turns_pairs_by_the_position() -> None:
    """Feature i and i + d/2 are one complex number, multiplied by exp(position * frequency * i)."""
    sizes = SIZES | {"model_type": "llama", "rms_norm_eps": 1e-6, "head_dim": 8}
    rotary = rotaries(ModelConfig.from_hf(sizes))[FULL_ATTENTION]
    x = torch.randn(5, 3, 8)
    positions = torch.tensor([0, 1, 2, 50, 200])
    angle = positions[:, None, None] * rotary.inv_freq
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(rotate(x, *rotary(positions, torch.float32)), expected)
