"""What a decoder looks like: sizes, normalisation, rotary embedding.

The engine is configured in `refengine.config`; this is only about the network, and every field comes from
the checkpoint's own `config.json`. A family or a rotary scheme that the decoder does not implement raises
here, before a single weight is read: a wrong guess would give fluent nonsense.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from refengine.errors import CheckpointError

FAMILIES = ("llama", "qwen2", "qwen3")
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_model_len",
)


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies are stretched beyond the length the model was first trained on."""

    kind: str = "default"  # default | linear | llama3
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192  # tokens


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a Llama-shaped decoder. `num_heads // num_kv_heads` query heads share a KV head."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int  # tokens
    family: str = "llama"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling = RopeScaling()
    qk_norm: bool = False  # Qwen3: RMSNorm over head_dim of every query and key head, before the rotation
    qkv_bias: bool = False  # Qwen2
    o_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in SIZES:
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise CheckpointError(f"{name} must be a positive whole number, not {size!r}")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers (not bytes) that the keys and values of one token occupy over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> ModelConfig:
        """Reads a Hugging Face `config.json`, in the layouts of transformers 4 and 5.

        Raises: CheckpointError for a family, activation, rotary scheme or attention pattern that the decoder
        does not implement, and for a missing size.
        """
        _refuse_what_is_not_implemented(raw)
        try:
            family = raw["model_type"]
            num_heads, hidden_size = raw["num_attention_heads"], raw["hidden_size"]
            rope = _rope(raw)
            attention_bias = bool(raw.get("attention_bias", False))
            return cls(
                vocab_size=raw["vocab_size"],
                hidden_size=hidden_size,
                intermediate_size=raw["intermediate_size"],
                num_layers=raw["num_hidden_layers"],
                num_heads=num_heads,
                num_kv_heads=raw.get("num_key_value_heads") or num_heads,
                head_dim=raw.get("head_dim") or hidden_size // num_heads,
                max_model_len=raw["max_position_embeddings"],
                family=family,
                rms_norm_eps=raw["rms_norm_eps"],
                rope_theta=rope[0],
                rope_scaling=rope[1],
                qk_norm=family == "qwen3",
                qkv_bias=family == "qwen2" or attention_bias,
                o_bias=attention_bias and family != "qwen2",
                mlp_bias=bool(raw.get("mlp_bias", False)),
                tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
                eos_token_ids=_as_tuple(raw.get("eos_token_id")),
            )
        except KeyError as missing:
            raise CheckpointError(f"config.json has no {missing.args[0]!r}") from None
        except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            raise CheckpointError(f"config.json has a value of the wrong kind: {error}") from None


def _refuse_what_is_not_implemented(raw: dict[str, Any]) -> None:
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise CheckpointError(
            f"model_type {family!r} is not supported; this engine reads {', '.join(FAMILIES)}"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"hidden_act {raw['hidden_act']!r} is not supported, only 'silu'")
    if raw.get("use_sliding_window") or "sliding_attention" in (raw.get("layer_types") or ()):
        raise CheckpointError("sliding-window layers are not supported yet")
    if raw.get("quantization_config"):
        raise CheckpointError("quantized weights are not supported, only float32, bfloat16 and float16")


def _as_tuple(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _rope(raw: dict[str, Any]) -> tuple[float, RopeScaling]:
    """transformers 4 writes `rope_theta` and `rope_scaling`, transformers 5 both as `rope_parameters`."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta", raw.get("rope_theta", 10_000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, RopeScaling()
    if kind == "linear":
        return theta, RopeScaling(kind, factor=float(rope["factor"]))
    if kind == "llama3":
        return theta, RopeScaling(
            kind,
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position=int(rope["original_max_position_embeddings"]),
        )
    raise CheckpointError(f"rope_type {kind!r} is not supported, only default, linear and llama3")
