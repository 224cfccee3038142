"""Options of the engine: one frozen, validated dataclass.

An unknown option raises and names the near match, an impossible one says what would be possible. Nothing is
silently dropped or corrected, and nothing changes after construction.
vLLM: V0 config.py (CacheConfig, SchedulerConfig), V1 config/cache.py and config/scheduler.py.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from refengine.errors import ConfigError

HASH_ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
POLICIES = ("fcfs", "priority")
DTYPES = ("float32", "bfloat16", "float16")
ENGINES = ("v1", "v0")
MODES = ("fixed", "faithful")
PREEMPTION_MODES = ("recompute", "swap")


def one_of(name: str, value: str, choices: Sequence[str]) -> None:
    """Raises ConfigError, with the nearest choice, unless `value` is one of `choices`."""
    if value not in choices:
        raise ConfigError(
            f"{name} {value!r} is not one of {', '.join(choices)}{near_match(str(value), choices)}"
        )


def near_match(name: str, choices: Sequence[str]) -> str:
    """`"; did you mean 'block_size'?"`, or nothing when no choice is near."""
    close = difflib.get_close_matches(name, choices, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def is_int(value: object) -> bool:
    """Whether it is a whole number; `True` is none."""
    return isinstance(value, int) and not isinstance(value, bool)


KINDS: dict[str, Callable[[Any], bool]] = {
    "int": is_int,
    "float": lambda value: is_int(value) or (isinstance(value, float) and math.isfinite(value)),
    "bool": lambda value: isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "None": lambda value: value is None,
}
KIND_WORDS = {
    "int": "a whole number",
    "float": "a finite number",
    "bool": "True or False",
    "str": "text",
}


class Options:
    """Base of option dataclasses: a misspelt keyword is refused with the field it resembles."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        for option in options:
            if option not in names:
                raise ConfigError(f"{cls.__name__} has no option {option!r}{near_match(option, names)}")
        return super().__new__(cls)

    def at_least(self, **limits: float) -> None:
        """Raises ConfigError if a named field is below its limit."""
        for name, limit in limits.items():
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int | float) or value < limit
            ):
                raise ConfigError(f"{name} must be a number of at least {limit}, not {value!r}")

    def check_kinds(self) -> None:
        """Raises ConfigError if a field that is declared as plain numbers, text or truth values holds another kind."""
        for f in fields(self):  # type: ignore[arg-type]
            kinds = [kind.strip() for kind in str(f.type).split("|")]
            value = getattr(self, f.name)
            if all(kind in KINDS for kind in kinds) and not any(KINDS[kind](value) for kind in kinds):
                words = " or ".join(KIND_WORDS[kind] for kind in kinds if kind != "None")
                raise ConfigError(f"{f.name} must be {words}, not {value!r}")


@dataclass(frozen=True)
class EngineConfig(Options):
    """Everything that decides how the engine behaves, except the model itself and the requests."""

    model: str = "tiny"  # or "tiny-hybrid" (both shipped), a directory, or "org/name" on the Hugging Face hub
    engine: str = "v1"
    mode: str = "fixed"  # "faithful": vLLM's known defects included, for replaying its decisions
    device: str = "cpu"
    dtype: str = "float32"
    backend: str | None = None  # attention kernels; None: chosen by device
    cuda_graphs: bool = True  # record decode steps, on a GPU
    seed: int = 0  # for sampled requests that bring no seed of their own

    block_size: int = 16  # tokens per block
    num_blocks: int | None = None  # blocks, null block included; None: as many as fit in kv_cache_bytes
    kv_cache_bytes: int | None = None  # None: 256 MiB on a CPU, on a GPU by gpu_memory_utilization
    gpu_memory_utilization: float = 0.9  # share of a GPU's memory for weights, a step's results and the cache
    max_model_len: int | None = None  # tokens, prompt and output together; None: what the model was made for
    enable_prefix_caching: bool = True
    hash_algorithm: str = "sha256"
    hash_seed: str | None = None  # None: as in vLLM, PYTHONHASHSEED or a fixed text (random for xxhash)
    enable_kv_events: bool = False

    max_num_seqs: int = 128  # requests running at once
    max_num_batched_tokens: int = 2048  # tokens per step, all requests together
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0  # V1: longest chunk of one request while others wait; 0: no limit
    policy: str = "fcfs"
    watermark: float = 0.0  # share of the blocks that admitting a request must leave free
    reserve_full_sequence: bool = True  # admit a prompt only if all of it would fit
    # V1, window and Mamba layers: publish where hits can end once every so many tokens. None: at every block. 0: only
    # before the end of the prompt and at shared-prefix boundaries, as vLLM does it
    prefix_cache_retention_interval: int | None = 0
    check_integrity: bool = False  # verify every structure after every step; for parts under test

    # V0 only
    num_cpu_blocks: int = 0  # blocks in CPU memory, to swap to
    preemption_mode: str | None = None  # None: recompute, and swap only a request with several sequences
    max_num_partial_prefills: int = 1  # prompts that are computed in parts at the same time
    max_long_partial_prefills: int = 1  # of these, prompts longer than long_prefill_token_threshold
    sliding_window: int | None = None  # tokens; V0 refuses it together with prefix caching

    def __post_init__(self) -> None:
        one_of("engine", self.engine, ENGINES)
        one_of("mode", self.mode, MODES)
        one_of("dtype", self.dtype, DTYPES)
        one_of("policy", self.policy, POLICIES)
        one_of("hash_algorithm", self.hash_algorithm, HASH_ALGORITHMS)
        if self.preemption_mode is not None:
            one_of("preemption_mode", self.preemption_mode, PREEMPTION_MODES)
        self.at_least(
            num_cpu_blocks=0,
            max_num_partial_prefills=1,
            max_long_partial_prefills=1,
            sliding_window=1,
            block_size=1,
            num_blocks=2,  # the null block and one that can be used
            kv_cache_bytes=1,
            max_model_len=1,
            max_num_seqs=1,
            max_num_batched_tokens=1,
            long_prefill_token_threshold=0,
            prefix_cache_retention_interval=0,
            watermark=0,
        )
        self.check_kinds()
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization must be above 0 and at most 1, not {self.gpu_memory_utilization!r}"
            )
        if self.engine == "v1" and self.sliding_window is not None:
            raise ConfigError("sliding_window is V0's option; in V1 a window is a property of the model's layers")
        if self.watermark >= 1:
            raise ConfigError(f"watermark {self.watermark} would keep every block free; it must be below 1")
