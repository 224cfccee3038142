"""The smallest pieces of a network: matrix product, embedding, norm.

vLLM: V0 and V1 model_executor/layers (linear.py, vocab_parallel_embedding.py, layernorm.py).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
    """Scales the last dimension to unit root mean square, then by a learned weight.

    `adds_one`: by 1 + weight, in float32 before the result is rounded to the input's type, as Gemma was trained.
    """

    def __init__(self, size: int, eps: float, adds_one: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if adds_one else torch.ones(size))
        self.eps = eps
        self.adds_one = adds_one

    def forward(self, x: Tensor) -> Tensor:
        if self.adds_one:
            return F.rms_norm(x.float(), self.weight.shape, 1 + self.weight.float(), self.eps).to(x.dtype)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
