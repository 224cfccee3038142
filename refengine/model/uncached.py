"""Whole sequences without a cache: how the network is trained, and what every cached result must equal.

Both functions take rows of one length that lie flat, one after another, as the decoder wants its tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from refengine.model.config import SLIDING_ATTENTION, ModelConfig
from refengine.model.decoder import Attend
from refengine.model.linear_attention import Recur, recurrence, start_state


def attend_rows(config: ModelConfig, num_rows: int = 1, reach: int | None = None) -> Attend:
    """Causal attention within each row of the flat `[rows * width, heads, head_dim]`.

    Sliding-window layers see as far as their window. `reach`: tokens that any layer sees at most.
    """
    both = [limit for limit in (config.sliding_window, reach) if limit is not None]
    windows = [min(both) if kind == SLIDING_ATTENTION else reach for kind in config.kinds]

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.view(num_rows, -1, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
        window, width = windows[layer], q.shape[2]
        if window is None or window >= width:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            near = torch.ones(width, width, dtype=torch.bool, device=q.device).tril().triu(1 - window)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=near, enable_gqa=True)
        return out.transpose(1, 2).reshape(query.shape)

    return attend


def recur_rows(config: ModelConfig, num_rows: int = 1) -> Recur:
    """Each row of the flat `[rows * width, ...]` begins with the empty state."""

    def recur(layer: int, mixed: Tensor, log_decay: Tensor, conv_weight: Tensor) -> Tensor:
        mixed, log_decay = (x.view(num_rows, -1, x.shape[-1]) for x in (mixed, log_decay))
        out, _ = recurrence(mixed, log_decay, conv_weight, start_state(config, num_rows, mixed.device))
        return out.flatten(0, 1)

    return recur
