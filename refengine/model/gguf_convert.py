"""A GGUF file written out as the directory that Hugging Face would have: config, weights, tokenizer.

Done once, it saves at every start the arithmetic of the quantized kinds and the building of the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from refengine.model.checkpoint import SINGLE
from refengine.model.gguf_checkpoint import GGUFCheckpoint
from refengine.model.gguf_config import hf_config
from refengine.model.gguf_file import GGUFFile
from refengine.model.gguf_tokenizer import has_tokenizer, tokenizer_of


def convert(
    file: GGUFFile, directory: Path, dtype: torch.dtype, advance: Callable[[int], None] = lambda _: None
) -> None:
    """Fills `directory`. `advance` is told the bytes of every tensor that was read, as they are in the file.

    Raises: CheckpointError for a file that is damaged or of a kind that is not read; OSError.
    """
    (directory / "config.json").write_text(json.dumps(hf_config(file), indent=1), encoding="utf-8")
    if has_tokenizer(file):
        tokenizer_of(file).save(str(directory / "tokenizer.json"))
    checkpoint = GGUFCheckpoint(file)
    tensors = {}
    for name, stored in list(checkpoint.left.items()):
        info = file.tensors[stored]
        tensors[name] = checkpoint.take(name, info.shape).to(dtype)
        advance(info.num_bytes)
    save_file(tensors, directory / SINGLE)
