"""Layers of several kinds in one network: what the config may say, and what each kind sees."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from refengine.errors import CheckpointError
from refengine.model.config import FULL_ATTENTION, LINEAR_ATTENTION, SLIDING_ATTENTION, ModelConfig
from refengine.model.decoder import Decoder
from refengine.model.loader import load_model
from refengine.model.uncached import attend_rows, recur_rows
from tests.unit.checkpoints import CONFIG
from tests.unit.hybrid_models import HYBRID, WINDOW, make_hybrid, uncached_logits

RAW: dict[str, Any] = CONFIG | {
    "model_type": "refengine_hybrid",
    "num_hidden_layers": 4,
    "layer_types": list(HYBRID),
    "sliding_window": 5,
    "linear_conv_kernel_dim": 3,
}


def test_a_config_names_the_kind_of_each_layer() -> None:
    config = ModelConfig.from_hf(RAW)
    assert config.kinds == HYBRID and config.sliding_window == 5 and config.conv_width == 3
    assert config.qk_norm
    assert ModelConfig.from_hf(CONFIG).kinds == (FULL_ATTENTION, FULL_ATTENTION)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"layer_types": ["full_attention"] * 3}, "3 layer_types for 4 layers"),
        (
            {"layer_types": ["chunked_attention"] * 4},
            "layer type 'chunked_attention' is not supported, only full",
        ),
        ({"layer_types": 5}, "layer_types must be a list, not 5"),
        ({"layer_types": "full_attention"}, "layer_types must be a list, not 'full_attention'"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a positive number, not 'small'"),
        ({"rope_theta": -1}, "rope_theta must be a positive number, not -1"),
        ({"rope_local_base_freq": float("nan")}, "sliding_rope_theta must be a positive number, not nan"),
        ({"eos_token_id": "x"}, "eos_token_id must be token ids"),
        ({"sliding_window": None}, "sliding-window layers, but its sliding_window is None"),
        ({"sliding_window": 0}, "sliding-window layers, but its sliding_window is 0"),
        ({"linear_conv_kernel_dim": 0}, "conv_width must be a positive whole number, not 0"),
        ({"model_type": "qwen3"}, "linear-attention layers are not supported in a qwen3 model"),
        ({"layer_types": None, "use_sliding_window": True}, "unless layer_types lists them"),
    ],
)
def test_a_config_that_no_network_can_have(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        ModelConfig.from_hf(RAW | change)


def test_a_pattern_is_not_spelt_out_for_more_layers_than_can_be() -> None:
    raw = RAW | {"model_type": "gemma3_text", "layer_types": None, "num_hidden_layers": 2**40}
    with pytest.raises(CheckpointError, match="1099511627776 layers can only be a slip"):
        ModelConfig.from_hf(raw)


def changes(decoder: Decoder, tokens: Tensor, at: int) -> list[int]:
    """Positions whose logits change with the token `at`."""
    other = tokens.clone()
    other[at] = (other[at] + 1) % decoder.config.vocab_size
    before, after = uncached_logits(decoder, tokens.tolist()), uncached_logits(decoder, other.tolist())
    return ((before - after).abs().amax(1) > 1e-6).nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("kind", "reach"), [(FULL_ATTENTION, 30), (SLIDING_ATTENTION, WINDOW), (LINEAR_ATTENTION, 30)]
)
def test_what_a_layer_sees(kind: str, reach: int) -> None:
    """A window of w tokens counts the token itself: the w-th before it is out of sight."""
    decoder = make_hybrid(layer_types=[kind])
    tokens = torch.randint(40, (30,), generator=torch.Generator().manual_seed(0))
    assert changes(decoder, tokens, 10) == list(range(10, min(10 + reach, 30)))


def test_sliding_layers_may_turn_by_another_base() -> None:
    decoder = make_hybrid(layer_types=[SLIDING_ATTENTION, FULL_ATTENTION])
    other = Decoder(replace(decoder.config, sliding_rope_theta=100.0))
    other.load_state_dict(decoder.state_dict())
    alike = Decoder(replace(decoder.config, sliding_rope_theta=decoder.config.rope_theta))
    alike.load_state_dict(decoder.state_dict())
    tokens = list(range(20))
    expected = uncached_logits(decoder, tokens)
    torch.testing.assert_close(uncached_logits(alike, tokens), expected)
    assert not torch.allclose(uncached_logits(other, tokens), expected, atol=0.1)


def test_another_attention_scale_is_the_same_as_other_queries() -> None:
    decoder = make_hybrid(layer_types=[FULL_ATTENTION])
    config = decoder.config
    scaled = Decoder(replace(config, attention_scale=3.0 * config.head_dim**-0.5))
    scaled.load_state_dict(decoder.state_dict())
    decoder.layers[0].self_attn.q_norm.weight.data *= 3.0  # type: ignore[union-attr, operator]
    tokens = list(range(20))
    expected = uncached_logits(decoder, tokens)
    torch.testing.assert_close(uncached_logits(scaled, tokens), expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_rows_of_a_batch_do_not_see_one_another() -> None:
    decoder = make_hybrid()
    tokens = torch.randint(40, (3, 17), generator=torch.Generator().manual_seed(1))
    attend, recur = attend_rows(decoder.config, 3), recur_rows(decoder.config, 3)
    hidden = decoder(tokens.flatten(), torch.arange(17).repeat(3), attend, recur=recur)
    logits = decoder.logits(hidden).view(3, 17, -1)
    for row, its_logits in zip(tokens, logits, strict=True):
        torch.testing.assert_close(its_logits, uncached_logits(decoder, row.tolist()), atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_sliding_layers_of_a_foreign_family(tmp_path: Path) -> None:
    """Qwen3 with windows, against `transformers`."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=40,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=128,
        use_sliding_window=True,
        sliding_window=7,
        layer_types=[SLIDING_ATTENTION, FULL_ATTENTION, SLIDING_ATTENTION],
    )
    theirs = transformers.Qwen3ForCausalLM(config).eval()
    for name, parameter in theirs.named_parameters():
        if parameter.dim() == 2 and "embed" not in name:
            parameter.mul_(4.0)  # attention that is nearly uniform hides a wrong mask
    theirs.save_pretrained(tmp_path)
    tokens = torch.randint(40, (50,), generator=torch.Generator().manual_seed(1))
    expected = theirs(tokens[None]).logits[0]
    ours = load_model(tmp_path)
    assert ours.config.kinds[0] == SLIDING_ATTENTION
    torch.testing.assert_close(uncached_logits(ours, tokens.tolist()), expected, atol=1e-4, rtol=1e-4)
