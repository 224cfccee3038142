"""Gemma 3, and Qwen 3 with sliding layers: logits against `transformers`, its traps one by one, and the engine."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from refengine import LLM, SamplingParams
from refengine.attention import causal_attention
from refengine.errors import CheckpointError
from refengine.model import gemma
from refengine.model.config import FULL_ATTENTION, SLIDING_ATTENTION, ModelConfig
from refengine.model.decoder import Decoder
from refengine.model.layers import RMSNorm
from refengine.model.loader import find_model, load_model
from refengine.model.uncached import attend_rows
from tests.unit.networks import (
    LOGIT,
    SIZES,
    TOKENS,
    VOCAB_SIZE,
    WINDOW,
    expected_logits,
    make_network,
    paged_logits,
)

TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},  # as in Gemma 3 from 4B on
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
GEMMA = {"sliding_window": WINDOW, "query_pre_attn_scalar": 32}
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3", GEMMA),
    "gemma3, queries scaled by another size": ("Gemma3", GEMMA | {"query_pre_attn_scalar": 168}),
    "gemma3, linear rope in its full layers": ("Gemma3", GEMMA | {"rope_parameters": TWO_ROPES}),
    "gemma3, logits bent": ("Gemma3", GEMMA | {"final_logit_softcapping": 2.5}),
    "gemma3, one KV head, not tied": (
        "Gemma3",
        GEMMA | {"num_key_value_heads": 1, "tie_word_embeddings": False},
    ),
    "qwen3, sliding": (
        "Qwen3",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 3},
    ),
}


@pytest.fixture(scope="module", params=NETWORKS)
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Any]:
    """Ours, loaded from the directory that theirs was saved to."""
    family, options = NETWORKS[request.param]
    directory = tmp_path_factory.mktemp("model")
    theirs = make_network(directory, family, **options)
    return load_model(directory), theirs


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gemma")
    make_network(directory, "Gemma3", **GEMMA)
    return directory


# Logits


@torch.inference_mode()
def test_whole_prompt(network: tuple[Decoder, Any]) -> None:
    ours, theirs = network
    assert (
        set(ours.config.kinds) == {FULL_ATTENTION, SLIDING_ATTENTION} and ours.config.sliding_window == WINDOW
    )
    logits = ours.logits(ours(TOKENS, torch.arange(len(TOKENS)), attend_rows(ours.config)))
    expected = expected_logits(theirs)
    assert LOGIT / 2 < expected.abs().max() < LOGIT * 2
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@torch.inference_mode()
def test_the_window_is_not_for_show(network: tuple[Decoder, Any]) -> None:
    """What the other tests compare would be wrong without it, from the first token that has lost one on."""
    ours, theirs = network
    logits = ours.logits(ours(TOKENS, torch.arange(len(TOKENS)), causal_attention))
    difference = (logits - expected_logits(theirs)).abs().amax(1)
    assert difference[:WINDOW].max() < 1e-4 and difference[WINDOW + 1 :].median() > 1e-2


@pytest.mark.parametrize(
    ("chunks", "block_size"),
    [([90], 16), ([1] * 90, 4), ([7, 1, 1, 13, 31, 1, 36], 3), ([40, 1, 1, 48], 8)],
    ids=["at once", "one by one", "odd chunks", "long chunks"],
)
def test_through_the_paged_cache(network: tuple[Decoder, Any], chunks: list[int], block_size: int) -> None:
    ours, theirs = network
    logits = paged_logits(ours, TOKENS, chunks, block_size)
    torch.testing.assert_close(logits, expected_logits(theirs), atol=1e-4, rtol=0)


# Its traps


def make_gemma(**changes: Any) -> Decoder:
    """A random one without `transformers`: two layers, sliding and full, the weights of all norms 0."""
    raw = SIZES | GEMMA | {"model_type": "gemma3_text", "rms_norm_eps": 1e-6, "num_hidden_layers": 2}
    ropes = {"rope_theta": 1e6, "rope_local_base_freq": 100.0, "sliding_window_pattern": 2}
    torch.manual_seed(0)
    return Decoder(ModelConfig.from_hf(raw | ropes | changes)).requires_grad_(False)


def test_a_norm_that_learned_nothing_keeps_the_size() -> None:
    """Misconception: Gemma's norm multiplies by its weight. It multiplies by 1 + weight, and starts at 0."""
    norm = RMSNorm(8, 1e-6, adds_one=True)
    assert torch.equal(norm.weight, torch.zeros(8))
    torch.testing.assert_close(norm(torch.full((1, 8), 3.0)), torch.ones(1, 8))
    norm.weight.data.fill_(0.5)
    torch.testing.assert_close(norm(torch.full((1, 8), 3.0)), torch.full((1, 8), 1.5))


def test_the_norm_multiplies_before_it_rounds() -> None:
    """Misconception: it rounds to the type of its input first, as Llama's does. In bfloat16 that is not the same."""
    torch.manual_seed(0)
    norm, x = RMSNorm(64, 1e-6, adds_one=True).bfloat16(), torch.randn(500, 64).bfloat16()
    norm.weight.data.copy_(torch.randn(64) * 0.1)
    exact = x.float() * (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + norm.weight.float())
    assert torch.equal(norm(x), exact.bfloat16())
    module = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")
    theirs = module.Gemma3RMSNorm(64, 1e-6).bfloat16()
    theirs.weight.data.copy_(norm.weight)
    assert torch.equal(norm(x), theirs(x))


@torch.inference_mode()
def test_the_embedding_is_scaled_by_a_rounded_number() -> None:
    """Misconception: the scale is sqrt(hidden size). Gemma was trained with what is left of it in bfloat16, 25.25."""
    decoder = make_gemma(hidden_size=640, vocab_size=8).bfloat16()
    seen: list[torch.Tensor] = []
    decoder.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    decoder(torch.arange(8), torch.arange(8), causal_attention)
    assert torch.equal(seen[0], decoder.embed_tokens.weight * 25.25)
    assert not torch.equal(seen[0], (decoder.embed_tokens.weight.float() * 640**0.5).bfloat16())


@torch.inference_mode()
def test_what_is_added_back_is_normalised_too() -> None:
    """Misconception: a layer normalises before attention and MLP only. However large their output, what Gemma adds
    has the size that the second norm gives it: here 1, root mean square, twice."""
    decoder = make_gemma()
    layer: Any = decoder.layers[0]
    layer.self_attn.o_proj.weight.mul_(1e4)
    layer.mlp.down_proj.weight.mul_(1e4)
    seen: list[torch.Tensor] = []
    decoder.layers[1].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    decoder(TOKENS, torch.arange(len(TOKENS)), causal_attention)
    added = seen[0] - decoder.embed_tokens.weight[TOKENS] * 8.0
    assert 1.0 < added.square().mean().sqrt() < 2.0


@torch.inference_mode()
def test_sliding_layers_turn_by_their_own_base() -> None:
    """Misconception: there is one rope. The sliding layer here turns by base 100, the full one by 1,000,000."""
    decoder = make_gemma()
    turns: list[float] = []

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        slow = torch.atan2(
            key[:, 0, -1], key[:, 0, 15]
        )  # the pair that turns most slowly: features 15 and 31
        turns.append(math.remainder((slow[1] - slow[0]).item(), 2 * math.pi))
        return torch.zeros_like(query)

    decoder(TOKENS[:1].repeat(2), torch.tensor([0, 1]), attend)
    for turn, base in zip(turns, (100.0, 1e6), strict=True):
        assert abs(turn - base ** (-30 / 32)) < 1e-5


def test_old_configs_mean_the_same() -> None:
    """transformers 4 had flat ropes and the pattern as a number; 5 has both by layer."""
    raw = SIZES | GEMMA | {"model_type": "gemma3_text", "rms_norm_eps": 1e-6}
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    new = ModelConfig.from_hf(raw | {"rope_parameters": TWO_ROPES, "layer_types": kinds})
    flat = {
        "rope_theta": 1e6,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    assert new == ModelConfig.from_hf(raw | flat | {"sliding_window_pattern": 6})
    assert new == ModelConfig.from_hf(raw | flat)
    assert (new.rope_theta, new.rope_scaling.factor, new.sliding_rope_theta) == (1e6, 8.0, 10_000.0)
    assert new.tie_word_embeddings  # it is, where nothing is said
    every_second = ModelConfig.from_hf(raw | flat | {"sliding_window_pattern": 2})
    assert every_second.kinds == ("sliding_attention", "full_attention") * 3


def test_a_window_without_sliding_layers_means_nothing() -> None:
    """Llama and Qwen checkpoints often carry the number, unused."""
    raw = SIZES | {"model_type": "qwen3", "rms_norm_eps": 1e-6, "sliding_window": 4096}
    assert ModelConfig.from_hf(raw).sliding_window is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "gemma3"}, "reads images too and is not supported; .* 'gemma3_text'"),
        ({"model_type": "gemma2"}, "model_type 'gemma2' is not supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported"),
        (
            {"hidden_activation": "silu"},
            "hidden_activation 'silu' is not supported, only 'gelu_pytorch_tanh'",
        ),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type 'yarn' is not supported"),
        (
            {
                "rope_parameters": TWO_ROPES
                | {"sliding_attention": {"rope_type": "linear", "rope_theta": 1.0}}
            },
            "rope_type 'linear' is not supported in sliding layers",
        ),
        ({"sliding_window": None}, "has sliding-window layers, but its sliding_window is None"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 6 layers"),
        ({"layer_types": ["full_attention"] * 5 + ["conv"]}, "layer type 'conv' is not supported"),
        ({"query_pre_attn_scalar": "many"}, "config.json has a value of the wrong kind"),
    ],
)
def test_what_is_not_implemented_is_refused(changes: dict[str, Any], sentence: str) -> None:
    raw = SIZES | GEMMA | {"model_type": "gemma3_text", "rms_norm_eps": 1e-6, "rope_theta": 1e6}
    ModelConfig.from_hf(raw)
    with pytest.raises(CheckpointError, match=sentence):
        ModelConfig.from_hf(raw | changes)


# Through the engine


def test_cached_equals_uncached(directory: Path) -> None:
    """A prompt that begins where another one did, beyond the window: found, and nothing changes but the work."""
    shared, ends = TOKENS[:60].tolist(), ([5, 7, 9], [11])
    params = SamplingParams(max_tokens=8, logprobs=VOCAB_SIZE, ignore_eos=True)
    options: dict[str, Any] = {"block_size": 4, "num_blocks": 200, "hash_seed": "0"}
    with_cache = LLM(str(directory), **options)
    without = LLM(str(directory), enable_prefix_caching=False, **options)
    for end, hit in zip(ends, (0, 60), strict=True):
        (cached,), (plain,) = (llm.generate([shared + end], params) for llm in (with_cache, without))
        assert (cached.num_cached_tokens, plain.num_cached_tokens) == (hit, 0)
        assert cached.token_ids == plain.token_ids and len(cached.token_ids) == 8
        for ours, reference in zip(cached.logprobs, plain.logprobs, strict=True):
            assert ours.keys() == reference.keys() and len(ours) >= VOCAB_SIZE
            assert max(abs(ours[i].logprob - reference[i].logprob) for i in ours) < 1e-5


# The real one, if it was fetched


def test_it_says_how_it_can_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(CheckpointError, match="not here yet; `refengine fetch gemma-3-270m` tells how"):
        find_model(gemma.NAME)
    gemma.cache_directory().mkdir(parents=True)
    assert find_model(gemma.NAME) == tmp_path / "refengine" / gemma.NAME


@pytest.mark.skipif(
    not gemma.cache_directory().is_dir(),
    reason="Gemma 3 270M is not here; `refengine fetch gemma-3-270m` tells how to get it, for those who want it",
)
def test_the_real_one_finds_a_prefix_longer_than_its_window() -> None:
    config = json.loads((gemma.cache_directory() / "config.json").read_text())
    assert config["sliding_window"] == 512
    llm = LLM(gemma.NAME, num_blocks=120)
    params = SamplingParams(max_tokens=7)
    (output,) = llm.generate(["The three primary colors are"], params)
    assert output.text == " red, blue, and yellow."
    facts = " ".join(f"Box {i} holds {i * 7 % 100} coins." for i in range(80))  # nearly 800 tokens
    (first,) = llm.generate([f"{facts} Box"], params)
    (second,) = llm.generate([f"{facts} The"], params)
    (alone,) = LLM(gemma.NAME, num_blocks=120, enable_prefix_caching=False).generate([f"{facts} The"], params)
    assert first.num_cached_tokens == 0 and second.num_cached_tokens > 512
    assert second.token_ids == alone.token_ids
