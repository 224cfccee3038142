"""The network: a Llama-shaped decoder over a flat list of tokens, in one file.

Tokens of all requests in a step lie one after another in `[num_tokens]`, with no padding and no batch
dimension, as in vLLM. Nothing here knows about requests, blocks or caches: each layer hands its query, key
and value to `attend`, which the caller supplies. The engine passes paged attention, training passes plain
causal attention, and the network cannot tell the difference. In the same way `adapt`, if there is one, may
change what the attention projections give: that is all the network knows of adapters.

Covers Llama, Qwen2 (bias on Q, K, V) and Qwen3 (RMSNorm on Q and K heads), which is also the shape of the
shipped tiny model.
vLLM: V0 and V1 model_executor/models/llama.py, qwen2.py, qwen3.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refengine.model.config import ModelConfig

# (layer index, query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads, head_dim])
# -> attention output [num_tokens, num_heads, head_dim]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
# (layer index, "qkv_proj" or "o_proj", its input and its output, one row per token) -> the output, adapted
Adapt = Callable[[int, str, Tensor, Tensor], Tensor]


class Linear(nn.Linear):
    """A linear layer that draws no random weights on the meta device, where a checkpoint is about to bring them."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class Embedding(nn.Embedding):
    """An embedding that draws no random weights on the meta device."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class RMSNorm(nn.Module):
    """Scales the last dimension to unit root mean square, then by a learned weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Rotary(nn.Module):
    """Rotary position embedding: turns each pair of features by an angle that grows with the position."""

    inv_freq: Tensor  # [head_dim / 2]

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.register_buffer("inv_freq", rotary_frequencies(config), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions `[num_tokens]` -> cos, sin for `rotate`, each `[num_tokens, 1, head_dim]`.

        The sine of the left half is negated here, once per step, instead of the features in every layer.
        """
        angles = torch.outer(positions.float(), self.inv_freq).unsqueeze(1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """Radians per position for each feature pair, `[head_dim / 2]` float32."""
    exponent = torch.arange(0, config.head_dim, 2, device="cpu").float() / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponent
    scaling = config.rope_scaling
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        # Waves shorter than the old context stay as they are, much longer ones are stretched by `factor`,
        # and between the two limits the stretch is blended in.
        turns = scaling.original_max_position * frequencies / (2 * math.pi)
        span = scaling.high_freq_factor - scaling.low_freq_factor
        keep = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
        return keep * frequencies + (1 - keep) * frequencies / scaling.factor
    return frequencies


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pair (feature i, feature i + head_dim/2) for every i. x `[num_tokens, heads, head_dim]`."""
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin


class Attention(nn.Module):
    """Projects to Q, K, V in one matrix product, rotates, attends through the caller, projects back."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self.head_dim = config.head_dim
        width = sum(self.heads) * config.head_dim
        self.qkv_proj = Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size, bias=config.o_bias)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, adapt: Adapt | None) -> Tensor:
        num_tokens = x.shape[0]
        qkv = self.qkv_proj(x)
        if adapt is not None:
            qkv = adapt(self.layer, "qkv_proj", x, qkv)
        # [num_tokens, num_(kv_)heads, head_dim]
        query, key, value = qkv.view(num_tokens, -1, self.head_dim).split(self.heads, dim=1)
        if self.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        out = attend(self.layer, query, key, value).reshape(num_tokens, -1)
        y: Tensor = self.o_proj(out)
        return y if adapt is None else adapt(self.layer, "o_proj", out, y)


class MLP(nn.Module):
    """SwiGLU: a gate and an up projection in one matrix product, then down."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention and MLP, each normalised before and added back after."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, adapt: Adapt | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend, adapt)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """The whole network. `forward` gives hidden states, `logits` turns chosen rows of them into scores."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.rotary = Rotary(config)

    def forward(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, adapt: Adapt | None = None
    ) -> Tensor:
        """token_ids and positions `[num_tokens]` int64 -> hidden states `[num_tokens, hidden_size]`.

        Mutates: nothing here; `attend` usually writes the KV cache.
        """
        x = self.embed_tokens(token_ids)
        cos, sin = self.rotary(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, attend, adapt)
        return self.norm(x)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden `[n, hidden_size]` -> `[n, vocab_size]`. Only rows that are sampled from need it."""
        return self.lm_head(hidden)  # type: ignore[no-any-return]
