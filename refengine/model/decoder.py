"""The network: a Llama-shaped decoder over a flat list of tokens, in one file.

Tokens of all requests in a step lie one after another in `[num_tokens]`, with no padding and no batch
dimension, as in vLLM. Nothing here knows about requests, blocks or caches: each layer hands its query, key
and value to `attend`, which the caller supplies. The engine passes paged attention, training passes plain
causal attention, and the network cannot tell the difference. In the same way a linear-attention layer hands
its input to `recur`, which knows where a sequence begins and where its state is kept, and `adapt`, if there is
one, may change what the attention projections give: that is all the network knows of adapters.

Covers Llama, Qwen2 (bias on Q, K, V) and Qwen3 (RMSNorm on Q and K heads), which is also the shape of the
shipped tiny model; mixtures of full-attention, sliding-window and linear-attention layers; and Gemma 3, which has
sliding layers with a rope base of their own, norms after attention and MLP as well, and a scaled embedding.
vLLM: V0 and V1 model_executor/models/llama.py, qwen2.py, qwen3.py; V1 gemma3.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refengine.model.config import (
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    SLIDING_ATTENTION,
    ModelConfig,
    RopeScaling,
)
from refengine.model.layers import Embedding, Linear, RMSNorm
from refengine.model.linear_attention import LinearAttention, Recur

# (layer index, query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads, head_dim])
# -> attention output [num_tokens, num_heads, head_dim]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
# (layer index, "qkv_proj" or "o_proj", its input and its output, one row per token) -> the output, adapted
Adapt = Callable[[int, str, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Step:
    """What the layers need of a step besides the tokens: angles, and where the past is kept."""

    turns: dict[str, tuple[Tensor, Tensor]]  # layer type -> cos and sin for `rotate`
    attend: Attend
    adapt: Adapt | None
    recur: Recur | None


class Rotary(nn.Module):
    """Rotary position embedding: turns each pair of features by an angle that grows with the position."""

    inv_freq: Tensor  # [head_dim / 2]

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling) -> None:
        super().__init__()
        self.register_buffer("inv_freq", rotary_frequencies(head_dim, theta, scaling), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions `[num_tokens]` -> cos, sin for `rotate`, each `[num_tokens, 1, head_dim]`.

        The sine of the left half is negated here, once per step, instead of the features in every layer.
        """
        angles = torch.outer(positions.float(), self.inv_freq).unsqueeze(1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rotaries(config: ModelConfig) -> nn.ModuleDict:
    """One Rotary by layer type; sliding-window layers have their own only if their base is another one."""
    modules = {FULL_ATTENTION: Rotary(config.head_dim, config.rope_theta, config.rope_scaling)}
    if config.sliding_rope_theta is not None:
        modules[SLIDING_ATTENTION] = Rotary(config.head_dim, config.sliding_rope_theta, RopeScaling())
    return nn.ModuleDict(modules)


def rotary_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Radians per position for each feature pair, `[head_dim / 2]` float32."""
    exponent = torch.arange(0, head_dim, 2, device="cpu").float() / head_dim
    frequencies = 1.0 / theta**exponent
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
        own_turn = config.kinds[layer] == SLIDING_ATTENTION and config.sliding_rope_theta is not None
        self.turn = SLIDING_ATTENTION if own_turn else FULL_ATTENTION
        self.heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self.head_dim = config.head_dim
        width = sum(self.heads) * config.head_dim
        self.qkv_proj = Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size, bias=config.o_bias)
        # `attend` scales the scores by head_dim ** -0.5; another scale is reached through the query
        scale = config.attention_scale
        self.query_factor = 1.0 if scale is None else scale * config.head_dim**0.5
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, config.norm_adds_one)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, config.norm_adds_one)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        num_tokens = x.shape[0]
        qkv = self.qkv_proj(x)
        if step.adapt is not None:
            qkv = step.adapt(self.layer, "qkv_proj", x, qkv)
        # [num_tokens, num_(kv_)heads, head_dim]
        query, key, value = qkv.view(num_tokens, -1, self.head_dim).split(self.heads, dim=1)
        if self.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotate(query, *step.turns[self.turn]), rotate(key, *step.turns[self.turn])
        if self.query_factor != 1.0:
            query = query * self.query_factor
        out = step.attend(self.layer, query, key, value).reshape(num_tokens, -1)
        y: Tensor = self.o_proj(out)
        return y if step.adapt is None else step.adapt(self.layer, "o_proj", out, y)


class MLP(nn.Module):
    """A gate and an up projection in one matrix product, then down. SwiGLU, or GeGLU in Gemma."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.gelu = config.gelu

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        gate = F.gelu(gate, approximate="tanh") if self.gelu else F.silu(gate)
        return self.down_proj(gate * up)  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention, of the kind that the config says, and MLP, each normalised before and added back after.

    Gemma normalises what is added back, too. Hugging Face's names are kept, though the two families do not mean
    the same norm by `post_attention_layernorm`.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = _norm(config)
        linear = config.kinds[layer] == LINEAR_ATTENTION
        self.self_attn = LinearAttention(config, layer) if linear else Attention(config, layer)
        self.post_attention_layernorm = _norm(config)
        self.norm_after = config.norm_after
        if config.norm_after:
            self.pre_feedforward_layernorm = _norm(config)
            self.post_feedforward_layernorm = _norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        out = self.self_attn(self.input_layernorm(x), step)
        if not self.norm_after:
            x = x + out
            return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]
        x = x + self.post_attention_layernorm(out)
        out = self.mlp(self.pre_feedforward_layernorm(x))
        return x + self.post_feedforward_layernorm(out)  # type: ignore[no-any-return]


def _norm(config: ModelConfig) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_adds_one)


class Decoder(nn.Module):
    """The whole network. `forward` gives hidden states, `logits` turns chosen rows of them into scores."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.norm = _norm(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.rotary = rotaries(config)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        adapt: Adapt | None = None,
        recur: Recur | None = None,
    ) -> Tensor:
        """token_ids and positions `[num_tokens]` int64 -> hidden states `[num_tokens, hidden_size]`.

        `recur` is needed if the model has linear-attention layers.
        Mutates: nothing here; `attend` and `recur` usually write the cache.
        """
        x = self.embed_tokens(token_ids)
        if self.config.embedding_scale != 1.0:  # rounded to the type of the weights, as it was in training
            x = x * torch.tensor(self.config.embedding_scale, dtype=x.dtype).item()
        turns = {kind: rotary(positions, x.dtype) for kind, rotary in self.rotary.items()}
        step = Step(turns, attend, adapt, recur)
        for layer in self.layers:
            x = layer(x, step)
        return self.norm(x)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden `[n, hidden_size]` -> `[n, vocab_size]`. Only rows that are sampled from need it."""
        logits: Tensor = self.lm_head(hidden)
        cap = self.config.final_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)
