"""What a GGUF file says about its network, as the `config.json` that Hugging Face would have written.

Only this translation knows GGUF's keys. Whether the decoder implements the network is then asked in one place
for both formats, `ModelConfig.from_hf`.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from refengine.errors import CheckpointError
from refengine.model.config import (
    FULL_ATTENTION,
    GEMMA3_PATTERN,
    SLIDING_ATTENTION,
    RopeScaling,
    every_nth_full,
)
from refengine.model.decoder import rotary_frequencies
from refengine.model.gguf_file import GGUFFile

FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3_text",
}  # GGUF's name -> ours

# Gemma's files leave out what is the same in all of its sizes, or can be told from the size.
GEMMA_LOCAL_BASE = 10_000.0  # rope base of the sliding layers
GEMMA_27B_LAYERS = (
    62  # the one size whose queries are scaled by hidden size / heads and not by the head's size
)

# Llama 3's rope is stored as the factor of every frequency. These are the same in all of its sizes.
LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ROPE_FACTORS = "rope_freqs.weight"


class Metadata:
    """The keys of one architecture. Raises: CheckpointError for one that is not read, or a missing key."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        name = file.metadata.get("general.architecture")
        if name not in FAMILIES:
            raise CheckpointError(
                f"{file.path} holds a {name!r} network; from GGUF this engine reads {', '.join(FAMILIES)}"
            )
        self.architecture: str = name

    def get(self, key: str, default: Any = None) -> Any:
        """`key` without the architecture before it; `default` if the file does not say."""
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: float | None = None) -> Any:
        """Raises: CheckpointError if the file says no number, or one for each layer, and there is no default."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or not math.isfinite(value):
            kind = value if isinstance(value, float) else f"a {type(value).__name__}"
            what = "has no" if value is None else f"has {kind} and not a number for"
            raise CheckpointError(f"{self.file.path} {what} {self.architecture}.{key}")
        return value

    @property
    def num_heads(self) -> int:
        return int(self.number("attention.head_count"))

    @property
    def num_kv_heads(self) -> int:
        return int(self.number("attention.head_count_kv", self.num_heads))


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """The `config.json` of a file. Raises: CheckpointError for another architecture or a missing size."""
    of = Metadata(file)
    num_parts = file.metadata.get("split.count", 1)
    if num_parts != 1:
        raise CheckpointError(f"{file.path} is one of {num_parts} parts; only whole files are read")
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path} has no tensor 'token_embd.weight'")
    num_heads, hidden_size = of.num_heads, of.number("embedding_length")
    hidden_per_head = hidden_size // max(num_heads, 1)
    head_dim = of.number("attention.key_length", hidden_per_head)
    turned = of.number("rope.dimension_count", head_dim)
    if of.number("attention.value_length", head_dim) != head_dim or turned != head_dim:
        raise CheckpointError(f"{file.path} has heads whose parts differ in size, which is not supported")
    theta = float(of.number("rope.freq_base", 10_000.0))
    return {
        "model_type": FAMILIES[of.architecture],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": of.number("feed_forward_length"),
        "num_hidden_layers": of.number("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": of.num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": of.number("context_length"),
        "rms_norm_eps": of.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(of, head_dim, theta),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos_token_ids(file),
    } | (_gemma(of, hidden_per_head, head_dim) if of.architecture == "gemma3" else {})


def _gemma(of: Metadata, hidden_per_head: int, head_dim: int) -> dict[str, Any]:
    """What Gemma 3 has beyond the others."""
    num_layers = of.number("block_count")
    slides = of.get("attention.sliding_window_pattern", GEMMA3_PATTERN)
    if isinstance(slides, int):  # newer files say it layer by layer
        kinds = every_nth_full(num_layers, max(slides, 1))
    elif isinstance(slides, list):
        kinds = tuple(SLIDING_ATTENTION if does else FULL_ATTENTION for does in slides)
    else:
        raise CheckpointError(
            f"{of.file.path} has a {type(slides).__name__} for gemma3.attention.sliding_window_pattern"
        )
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": list(kinds),
        "sliding_window": of.number("attention.sliding_window"),
        "rope_local_base_freq": of.number("rope.freq_base_swa", GEMMA_LOCAL_BASE),
        "query_pre_attn_scalar": hidden_per_head if num_layers == GEMMA_27B_LAYERS else head_dim,
        "attn_logit_softcapping": of.get("attn_logit_softcapping"),
        "final_logit_softcapping": of.get("final_logit_softcapping"),
    }


def _rope_scaling(of: Metadata, head_dim: int, theta: float) -> dict[str, Any] | None:
    kind = of.get("rope.scaling.type", "none")
    if kind != "none":
        return {"rope_type": kind, "factor": of.number("rope.scaling.factor")}
    return _llama3_rope(of.file, head_dim, theta) if ROPE_FACTORS in of.file.tensors else None


def _llama3_rope(file: GGUFFile, head_dim: int, theta: float) -> dict[str, Any]:
    """The scaling whose frequencies are those of the file. Raises: CheckpointError if it is not Llama 3's."""
    divisors = file.read(ROPE_FACTORS).float()  # [head_dim / 2]
    factor = float(divisors.max())
    low, high, length = LLAMA3_ROPE.values()
    expected = rotary_frequencies(head_dim, theta, RopeScaling("llama3", factor, low, high, int(length)))
    plain = rotary_frequencies(head_dim, theta, RopeScaling())
    if divisors.shape != plain.shape or not torch.allclose(plain / divisors, expected, rtol=1e-4, atol=0):
        raise CheckpointError(f"{file.path} has {ROPE_FACTORS} that are not those of Llama 3")
    return {"rope_type": "llama3", "factor": factor, **LLAMA3_ROPE}


def _eos_token_ids(file: GGUFFile) -> list[int]:
    """End of text, and end of turn where it is another token."""
    ids = (file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    return list(dict.fromkeys(i for i in ids if i is not None))
