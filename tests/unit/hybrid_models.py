"""Random tiny models with layers of all three kinds, and what they say without any cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from refengine.model.config import FULL_ATTENTION, LINEAR_ATTENTION, SLIDING_ATTENTION, ModelConfig
from refengine.model.decoder import Decoder
from refengine.model.uncached import attend_rows, recur_rows

VOCAB_SIZE = 40
WINDOW = 6  # tokens
HYBRID = (LINEAR_ATTENTION, SLIDING_ATTENTION, LINEAR_ATTENTION, FULL_ATTENTION)


def make_hybrid(
    seed: int = 0, layer_types: Sequence[str] = HYBRID, window: int = WINDOW, max_model_len: int = 160
) -> Decoder:
    """Weights that are large enough to make every token matter, and states that forget slowly."""
    config = ModelConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_layers=len(layer_types),
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_model_len=max_model_len,
        family="refengine_hybrid",
        layer_types=tuple(layer_types),
        sliding_window=window,
        qk_norm=True,
    )
    decoder = Decoder(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        torch.nn.init.normal_(parameter, std=0.6, generator=generator)
        if name.endswith("decay_proj.bias"):
            parameter.data += 4.0  # of a sum, 98 % are left after one token
    return decoder.eval().requires_grad_(False)


@torch.inference_mode()
def uncached_logits(decoder: Decoder, tokens: Sequence[int]) -> Tensor:
    """Scores of every next token, `[len(tokens), vocab_size]`, the whole sequence at once."""
    attend, recur = attend_rows(decoder.config), recur_rows(decoder.config)
    hidden = decoder(torch.tensor(tokens), torch.arange(len(tokens)), attend, recur=recur)
    return decoder.logits(hidden)


def greedy(decoder: Decoder, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The whole sequence anew for every token."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(int(uncached_logits(decoder, tokens)[-1].argmax()))
    return tokens[len(prompt) :]
