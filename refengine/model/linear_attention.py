"""Gated linear attention: a layer that keeps its whole past in a state of fixed size.

Each head holds a matrix S. Token t lets it fade by a factor a_t between 0 and 1, adds k_t v_t^T, and reads it
with its query: S_t = a_t S_{t-1} + k_t v_t^T, o_t = q_t S_t. Queries, keys and values first pass a short
convolution, so that a token sees the few before it. What a sequence leaves behind is S and the last inputs of
that convolution: as much after ten tokens as after ten thousand, and nothing that could be read token by token.
Hence a prefix can be reused only at lengths for which somebody kept the state.

Like attention, the layer does not know where its past is kept: it hands its input to `recur`, which the caller
supplies. `recurrence` is the arithmetic that every `recur` shares.
vLLM: V0 none with prefix caching; V1 model_executor/layers/mamba (mamba_mixer2.py), and the same shape of layer
in model_executor/models/qwen3_next.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refengine.model.config import ModelConfig
from refengine.model.layers import Linear, RMSNorm

if TYPE_CHECKING:
    from refengine.model.decoder import Step

# (layer index, mixed [num_tokens, 3 * num_heads * head_dim], log_decay [num_tokens, num_heads],
#  conv_weight [3 * num_heads * head_dim, conv_width]) -> output [num_tokens, num_heads * head_dim]
Recur = Callable[[int, Tensor, Tensor, Tensor], Tensor]
PIECE = 128  # tokens that are computed together; their mutual scores are PIECE ** 2 numbers a head


class State(NamedTuple):
    """What `n` sequences have left behind, in float32: sums over thousands of tokens bear no less."""

    matrix: Tensor  # [n, num_heads, head_dim, head_dim], rows by key feature, columns by value feature
    tail: Tensor  # [n, conv_width - 1, 3 * num_heads * head_dim], the last inputs of the convolution


def state_shapes(config: ModelConfig) -> State:
    """The shapes of one sequence's state in one layer, as tensors without memory."""
    heads, head_dim = config.num_heads, config.head_dim
    return State(
        torch.empty(heads, head_dim, head_dim, device="meta"),
        torch.empty(config.conv_width - 1, 3 * heads * head_dim, device="meta"),
    )


def start_state(config: ModelConfig, n: int, device: torch.device | str = "cpu") -> State:
    """The state of `n` sequences before their first token: zeros."""
    return State(*(torch.zeros(n, *part.shape, device=device) for part in state_shapes(config)))


class LinearAttention(nn.Module):
    """Projects to what the recurrence needs, recurs through the caller, norms, gates, projects back.

    The norm runs over all heads together. A head's share of the whole then still tells how much it has summed
    up, so a layer can count.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        width = config.num_heads * config.head_dim
        self.in_proj = Linear(config.hidden_size, 3 * width, bias=False)  # query, key, value
        self.conv_weight = nn.Parameter(torch.full((3 * width, config.conv_width), config.conv_width**-1.0))
        self.decay_proj = Linear(config.hidden_size, config.num_heads)
        self.gate_proj = Linear(config.hidden_size, width, bias=False)
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.o_proj = Linear(width, config.hidden_size, bias=False)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        if step.recur is None:
            raise TypeError("the model has linear-attention layers: give `recur`")
        log_decay = F.logsigmoid(self.decay_proj(x).float())
        out = step.recur(self.layer, self.in_proj(x), log_decay, self.conv_weight)
        return self.o_proj(self.norm(out) * F.silu(self.gate_proj(x)))  # type: ignore[no-any-return]


def recurrence(mixed: Tensor, log_decay: Tensor, conv_weight: Tensor, state: State) -> tuple[Tensor, State]:
    """The next tokens of `n` sequences, equally many of each.

    mixed `[n, num_tokens, 3 * num_heads * head_dim]`, log_decay `[n, num_tokens, num_heads]`.
    Returns: `[n, num_tokens, num_heads * head_dim]` in mixed's dtype, and the states after the last token.
    Tokens go through in pieces; one token at a time gives the same but for rounding. Mutates nothing.
    """
    num_heads, head_dim = state.matrix.shape[1:3]
    width = conv_weight.shape[1]
    seen = torch.cat((state.tail, mixed.float()), dim=1)
    num_tokens = mixed.shape[1]
    taps = [seen[:, i : i + num_tokens] * conv_weight[:, i].float() for i in range(width)]
    q, k, v = (
        part.view(*part.shape[:2], num_heads, head_dim).transpose(
            1, 2
        )  # [n, num_heads, num_tokens, head_dim]
        for part in F.silu(sum(taps, torch.zeros(()))).chunk(3, dim=-1)
    )
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    matrix, outs = state.matrix, []
    for start in range(0, num_tokens, PIECE):
        rows = slice(start, start + PIECE)
        out, matrix = _piece(q[:, :, rows], k[:, :, rows], v[:, :, rows], log_decay[:, rows].mT, matrix)
        outs.append(out)
    out = torch.cat(outs, dim=2).transpose(1, 2).flatten(2)
    return out.to(mixed.dtype), State(matrix, seen[:, num_tokens:])


def _piece(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Some tokens at once: what each takes from the state before them and from one another, and the state after.

    q, k, v `[n, num_heads, t, head_dim]`, log_decay `[n, num_heads, t]`; a decay is a product, its log a sum.
    """
    total = log_decay.cumsum(-1)  # what the state before the piece has faded to at each token
    fade = total[..., :, None] - total[..., None, :]
    hidden = torch.ones(fade.shape[-2:], dtype=torch.bool, device=fade.device).triu(1)
    scores = (q @ k.mT) * fade.masked_fill(hidden, -torch.inf).exp()
    out = scores @ v + total.exp()[..., None] * (q @ matrix)
    left = (total[..., -1:] - total).exp()[..., None]  # of each token's own addition, at the end of the piece
    return out, total[..., -1:, None].exp() * matrix + (k * left).mT @ v
