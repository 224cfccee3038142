"""The CUDA kernels with no GPU: the host code of `kernels.cuda`, with every launch run by the interpreter.

For learning and for tests: right, checked for races, bounds and barriers, and some ten thousand times slower.
Inside an open `interpret(...)` its schedule is used and its report filled.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from kernels import cuda
from kernels.cuda.plan import Plan as CudaPlan
from kernels.dispatch import BackendError
from kernels.interpreter import interpret, is_interpreting

P = ParamSpec("P")
R = TypeVar("R")


def check_device(device: torch.device) -> None:
    """Raises: BackendError for tensors on a GPU."""
    if device.type != "cpu":
        raise BackendError(
            f"the interpreter reads CPU tensors, and these are on {device}: use backend='cuda', or move them"
        )


def interpreter() -> AbstractContextManager[Any]:
    """The `interpret` that is open, or else one of our own."""
    return nullcontext() if is_interpreting() else interpret()


def interpreted(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, with its launches interpreted."""

    @wraps(function)
    def inside(*args: P.args, **kwargs: P.kwargs) -> R:
        with interpreter():
            return function(*args, **kwargs)

    return inside


reshape_and_cache = interpreted(cuda.reshape_and_cache)
paged_attention = interpreted(cuda.paged_attention)
paged_attention_decode = interpreted(cuda.paged_attention_decode)
copy_blocks = interpreted(cuda.copy_blocks)


class Plan(CudaPlan):
    """A step, interpreted."""

    def write(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
        with interpreter():
            super().write(key, value, key_cache, value_cache)

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float) -> Tensor:
        with interpreter():
            return super().attend(query, key_cache, value_cache, scale)


plan_step = Plan
