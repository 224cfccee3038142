"""What a decoder looks like: sizes, kinds of layers, normalisation, rotary embedding.

The engine is configured in `refengine.config`; this is only about the network, and every field comes from
the checkpoint's own `config.json`. A family or a rotary scheme that the decoder does not implement raises
here, before a single weight is read: a wrong guess would give fluent nonsense.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from refengine.errors import CheckpointError

GEMMA3 = "gemma3_text"
FAMILIES = ("llama", "qwen2", "qwen3", GEMMA3, "refengine_hybrid")
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"
LINEAR_ATTENTION = "linear_attention"  # refengine.model.linear_attention
GEMMA3_PATTERN = 6  # every sixth layer is full, where layer_types does not say it
LAYER_TYPES = (FULL_ATTENTION, SLIDING_ATTENTION, LINEAR_ATTENTION)
MOST_LAYERS = 1000
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_model_len",
    "conv_width",
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
    """Sizes of a Llama-shaped decoder. `num_heads // num_kv_heads` query heads share a KV head.

    `layer_types` names the kind of each layer; empty: all see all earlier tokens. Read it as `kinds`.
    """

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
    layer_types: tuple[str, ...] = ()  # FULL_ATTENTION, SLIDING_ATTENTION or LINEAR_ATTENTION, one per layer
    sliding_window: int | None = None  # tokens a SLIDING_ATTENTION layer sees, the newest included
    sliding_rope_theta: float | None = None  # of SLIDING_ATTENTION layers, unscaled; None: as in the others
    conv_width: int = 4  # tokens the short convolution of a LINEAR_ATTENTION layer sees, the newest included
    attention_scale: float | None = None  # factor on the scores; None: head_dim ** -0.5
    qk_norm: bool = False  # Qwen3, Gemma 3: RMSNorm over every query and key head, before the rotation
    qkv_bias: bool = False  # Qwen2
    o_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    norm_adds_one: bool = False  # Gemma: a norm's factor is 1 + weight
    norm_after: bool = False  # Gemma: attention and MLP are normalised before and after
    gelu: bool = False  # Gemma: the gate of the MLP passes GELU (its tanh form), not SiLU
    embedding_scale: float = 1.0  # Gemma: sqrt(hidden_size)
    final_softcap: float | None = None  # logits are bent into (-softcap, softcap) by tanh
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in SIZES:
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise CheckpointError(f"{name} must be a positive whole number, not {size!r}")
        _check_number_of_layers(self.num_layers)
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        for name in ("rms_norm_eps", "rope_theta", "sliding_rope_theta", "final_softcap"):
            number = getattr(self, name)
            if number is not None and not (isinstance(number, int | float) and 0 < number < math.inf):
                raise CheckpointError(f"{name} must be a positive number, not {number!r}")
        if not all(isinstance(token, int) for token in self.eos_token_ids):
            raise CheckpointError(f"eos_token_id must be token ids, not {self.eos_token_ids!r}")
        self._check_layer_types()

    def _check_layer_types(self) -> None:
        if len(self.kinds) != self.num_layers:
            raise CheckpointError(f"{len(self.kinds)} layer_types for {self.num_layers} layers")
        for kind in self.kinds:
            if kind not in LAYER_TYPES:
                raise CheckpointError(f"layer type {kind!r} is not supported, only {', '.join(LAYER_TYPES)}")
        window = self.sliding_window
        if SLIDING_ATTENTION in self.layer_types and (not isinstance(window, int) or window < 1):
            raise CheckpointError(
                f"the model has sliding-window layers, but its sliding_window is {window!r}"
            )

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer."""
        return self.layer_types or (FULL_ATTENTION,) * self.num_layers

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
            rope, layer_types = _rope(raw), _layer_types(raw)
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
                sliding_rope_theta=_sliding_rope(raw),
                layer_types=layer_types,
                sliding_window=raw.get("sliding_window") if SLIDING_ATTENTION in layer_types else None,
                conv_width=raw.get("linear_conv_kernel_dim", 4),
                qk_norm=family in ("qwen3", "refengine_hybrid", GEMMA3),
                qkv_bias=family == "qwen2" or attention_bias,
                o_bias=attention_bias and family != "qwen2",
                mlp_bias=bool(raw.get("mlp_bias", False)),
                tie_word_embeddings=bool(raw.get("tie_word_embeddings", family == GEMMA3)),
                eos_token_ids=_as_tuple(raw.get("eos_token_id")),
                **(_gemma(raw) if family == GEMMA3 else {}),
            )
        except KeyError as missing:
            raise CheckpointError(f"config.json has no {missing.args[0]!r}") from None
        except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            raise CheckpointError(f"config.json has a value of the wrong kind: {error}") from None


def _refuse_what_is_not_implemented(raw: dict[str, Any]) -> None:
    family = raw.get("model_type")
    if family == "gemma3":
        raise CheckpointError(
            f"model_type 'gemma3' reads images too and is not supported; its text-only relative is {GEMMA3!r}"
        )
    if family not in FAMILIES:
        raise CheckpointError(
            f"model_type {family!r} is not supported; this engine reads {', '.join(FAMILIES)}"
        )
    name, known = ("hidden_activation", "gelu_pytorch_tanh") if family == GEMMA3 else ("hidden_act", "silu")
    if raw.get(name, known) != known:
        raise CheckpointError(f"{name} {raw[name]!r} is not supported, only {known!r}")
    if raw.get("attn_logit_softcapping"):
        raise CheckpointError("attn_logit_softcapping is not supported: no kernel here bends the scores")
    if raw.get("use_bidirectional_attention"):
        raise CheckpointError("use_bidirectional_attention is not supported: a KV cache needs a causal model")
    if not isinstance(raw.get("layer_types") or [], list):
        raise CheckpointError(f"layer_types must be a list, not {raw['layer_types']!r}")
    if raw.get("use_sliding_window") and not raw.get("layer_types"):
        raise CheckpointError("sliding-window layers are not supported unless layer_types lists them")
    if LINEAR_ATTENTION in (raw.get("layer_types") or ()) and family != "refengine_hybrid":
        raise CheckpointError(f"linear-attention layers are not supported in a {family} model")
    if raw.get("quantization_config"):
        raise CheckpointError("quantized weights are not supported, only float32, bfloat16 and float16")


def _gemma(raw: dict[str, Any]) -> dict[str, Any]:
    """What Gemma 3 has beyond the others."""
    scalar, cap = raw["query_pre_attn_scalar"], raw.get("final_logit_softcapping")
    return {
        "attention_scale": None if scalar == raw["head_dim"] else float(scalar**-0.5),
        "norm_adds_one": True,
        "norm_after": True,
        "gelu": True,
        "embedding_scale": float(raw["hidden_size"] ** 0.5),
        "final_softcap": None if cap is None else float(cap),
    }


def _layer_types(raw: dict[str, Any]) -> tuple[str, ...]:
    """Old Gemma configs only give the pattern: every n-th layer is full, the others slide."""
    if raw.get("layer_types") or raw["model_type"] != GEMMA3:
        return tuple(raw.get("layer_types") or ())
    every = raw.get("sliding_window_pattern") or GEMMA3_PATTERN
    return every_nth_full(raw["num_hidden_layers"], every)


def every_nth_full(num_layers: int, n: int) -> tuple[str, ...]:
    """The kinds of the layers where only every n-th sees all. Raises: CheckpointError for too many layers."""
    _check_number_of_layers(num_layers)
    return tuple(SLIDING_ATTENTION if (i + 1) % n else FULL_ATTENTION for i in range(num_layers))


def _check_number_of_layers(num_layers: int) -> None:
    if not isinstance(num_layers, int) or num_layers > MOST_LAYERS:
        raise CheckpointError(f"a network of {num_layers} layers can only be a slip")


def _as_tuple(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _rope(raw: dict[str, Any]) -> tuple[float, RopeScaling]:
    """transformers 4 writes `rope_theta` and `rope_scaling`, transformers 5 both as `rope_parameters`.

    The latter is by layer type where that matters; this is the one of the full-attention layers.
    """
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope = rope.get(FULL_ATTENTION, rope)
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


def _sliding_rope(raw: dict[str, Any]) -> float | None:
    """The base of the sliding layers if they have their own: by layer type, or Gemma's `rope_local_base_freq`."""
    rope = (raw.get("rope_parameters") or {}).get(SLIDING_ATTENTION)
    if rope is None:
        base = raw.get("rope_local_base_freq")
        return None if base is None else float(base)
    if rope.get("rope_type", "default") != "default":
        raise CheckpointError(f"rope_type {rope['rope_type']!r} is not supported in sliding layers")
    return float(rope["rope_theta"])
