"""A GGUF file as a checkpoint: its tensors under the names, and with the numbers, of Hugging Face.

llama.cpp stores the same tensors with other habits. It reorders the rows of Llama's Q and K, so that the two
features which turn together lie side by side, and it adds the 1 of Gemma's norms to their weights. Both are
undone here, so that one loader and one decoder serve both formats.
"""

from __future__ import annotations

import re
from pathlib import Path

from torch import Tensor

from refengine.model.checkpoint import Checkpoint
from refengine.model.gguf_config import ROPE_FACTORS, Metadata
from refengine.model.gguf_file import GGUFFile

OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
IN_GEMMA_LAYER = IN_LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class GGUFCheckpoint(Checkpoint):
    """One file. `left` maps Hugging Face's names to the file's."""

    config_name = "its metadata"

    def __init__(self, file: GGUFFile) -> None:
        self.path = file.path
        self.file = file
        self.metadata = Metadata(file)
        self.architecture = self.metadata.architecture
        names = (name for name in file.tensors if name != ROPE_FACTORS)
        self.left: dict[str, str] = {_hf_name(name, self.architecture): name for name in names}

    def where(self, name: str, place: str) -> tuple[Path, tuple[int, ...]]:
        return self.path, self.file.tensors[place].shape

    def read(self, name: str, place: str) -> Tensor:
        """Raises: CheckpointError if it is stored in a way that is not read."""
        tensor = self.file.read(place)
        if self.architecture == "gemma3" and place.endswith("norm.weight"):
            return tensor - 1
        if self.architecture == "llama" and (match := re.search(r"\.attn_([qk])\.", place)):
            return _halves_apart(
                tensor, self.metadata.num_heads if match[1] == "q" else self.metadata.num_kv_heads
            )
        return tensor


def _halves_apart(tensor: Tensor, num_heads: int) -> Tensor:
    """Rows (or biases) of each head from a0 b0 a1 b1 ... to a0 a1 ... b0 b1 ..., where a_i and b_i turn together."""
    pairs = tensor.view(num_heads, -1, 2, *tensor.shape[1:])  # [num_heads, head_dim / 2, 2, ...]
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _hf_name(name: str, architecture: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; a name that is not known stays."""
    in_layer = IN_GEMMA_LAYER if architecture == "gemma3" else IN_LAYER
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None:
        return name
    layer, module, kind = match.groups()
    if layer is None:
        return f"{OUTSIDE[module]}.{kind}" if module in OUTSIDE else name
    return f"model.layers.{layer}.{in_layer[module]}.{kind}" if module in in_layer else name
