"""The operations on a paged KV cache: write new keys and values, attend over pages, copy blocks.

Each operation exists once per backend and means the same in all of them; `reference` (plain PyTorch) is the
definition that the others are tested against. The functions here check their arguments, choose the backend
by device unless one is named, and call it.
vLLM: V0 `_custom_ops.py` and `attention/ops/paged_attn.py`, V1 `v1/attention/backends/`.
"""

from kernels.dispatch import (
    BACKENDS,
    Backend,
    BackendError,
    StepPlan,
    backend_for,
    copy_blocks,
    paged_attention,
    paged_attention_decode,
    plan_step,
    reshape_and_cache,
)

__all__ = [
    "BACKENDS",
    "Backend",
    "BackendError",
    "StepPlan",
    "backend_for",
    "copy_blocks",
    "paged_attention",
    "paged_attention_decode",
    "plan_step",
    "reshape_and_cache",
]
