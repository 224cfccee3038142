"""From a model directory or a GGUF file to a decoder, and one clear sentence when that is not possible.

Every tensor of the checkpoint must find its place and every place its tensor, in the right shape, because a
decoder with a forgotten weight still writes fluent text.
vLLM: V0 and V1 model_executor/model_loader (DefaultModelLoader) and each model's `load_weights`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from refengine.errors import CheckpointError
from refengine.model import gemma
from refengine.model.checkpoint import Checkpoint, SafetensorsCheckpoint, read_json
from refengine.model.config import ModelConfig
from refengine.model.decoder import Decoder, rotaries
from refengine.model.gguf_checkpoint import GGUFCheckpoint
from refengine.model.gguf_config import hf_config
from refengine.model.gguf_file import GGUFFile

TINY, TINY_HYBRID = Path(__file__).parent / "tiny", Path(__file__).parent / "tiny_hybrid"
SHIPPED = {"tiny": TINY, "tiny-hybrid": TINY_HYBRID}
GGUF = ".gguf"
WANTED = ["*.json", "*.safetensors"]  # of a hub repository

# Our parameter <- the checkpoint's, joined along the output features into one matrix product.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
IGNORED = re.compile(r"\.rotary_emb\.inv_freq$")  # computed from the config; old checkpoints carry it too


def load_model(
    path_or_name: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Decoder:
    """The decoder of a directory, of a GGUF file, or of a name that `find_model` knows.

    Raises: CheckpointError with one sentence that names the file or tensor at fault.
    """
    path = find_model(path_or_name)
    config = read_config(path)
    try:
        with torch.device("meta"):  # no memory and no random numbers for weights that are replaced at once
            decoder = Decoder(config)
    except RuntimeError:  # more elements than can be counted
        raise CheckpointError(f"the config of {path} has sizes that no network can have") from None
    checkpoint = GGUFCheckpoint(GGUFFile(path)) if path.suffix == GGUF else SafetensorsCheckpoint(path)
    state = _assemble(decoder, config, checkpoint, lambda x: x.to(device, dtype, copy=True))
    decoder.load_state_dict(state, assign=True)
    if config.tie_word_embeddings:
        decoder.lm_head.weight = decoder.embed_tokens.weight
    decoder.rotary = rotaries(config).to(device)
    return decoder.eval().requires_grad_(False)


def find_model(path_or_name: str | Path) -> Path:
    """The local directory or GGUF file of a model: "tiny" and "tiny-hybrid" are shipped, "gemma-3-270m" was fetched,
    "org/name" comes from the Hugging Face hub, and everything else is a path.

    Raises: CheckpointError if it is neither here nor to be had.
    """
    if path_or_name in SHIPPED:
        return SHIPPED[str(path_or_name)]
    directory = Path(path_or_name)
    if directory.is_dir() or (directory.is_file() and directory.suffix == GGUF):
        return directory
    if path_or_name == gemma.NAME:
        return gemma.fetched()
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path_or_name)) or directory.exists():
        raise CheckpointError(f"there is no model directory {str(path_or_name)!r}")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            f"there is no directory {str(path_or_name)!r}, and to look for it on the Hugging Face hub "
            "the package huggingface_hub is needed (pip install 'refengine[hub]')"
        ) from None
    try:
        return Path(snapshot_download(str(path_or_name), allow_patterns=WANTED))
    except Exception as error:  # a dozen kinds: no network, no such model, no permission, ...
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"there is no directory {str(path_or_name)!r}, and the Hugging Face hub did not give it: {reason}"
        ) from error


def read_config(path: Path) -> ModelConfig:
    """A GGUF file's metadata, or a directory's `config.json` with the end-of-text ids of `generation_config.json`.

    Raises: CheckpointError for a missing or damaged file, or a network that the decoder does not implement.
    """
    if path.suffix == GGUF:
        return ModelConfig.from_hf(hf_config(GGUFFile(path)))
    config = ModelConfig.from_hf(read_json(path / "config.json"))
    generation = path / "generation_config.json"
    extra = read_json(generation).get("eos_token_id") if generation.exists() else None
    ids = extra if isinstance(extra, list) else [] if extra is None else [extra]
    return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *ids))))


def _assemble(
    decoder: Decoder, config: ModelConfig, checkpoint: Checkpoint, convert: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Our state dict from the checkpoint's tensors; every one of both must be used.

    Names differ in the prefix "model." (all but lm_head) and in the fused projections.
    """
    state = {}
    for name, parameter in decoder.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        parts = _parts(config, name, tuple(parameter.shape))
        tensors = [convert(checkpoint.take(part, shape)) for part, shape in parts]
        state[name] = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["embed_tokens.weight"]
        _check_second_copy(checkpoint, state["lm_head.weight"], convert)
    left = [name for name in checkpoint.left if not IGNORED.search(name)]
    if left:
        raise CheckpointError(
            f"{checkpoint.path} has a tensor {left[0]!r} that a {config.family} decoder has no place for"
            + (f" (and {len(left) - 1} more)" if len(left) > 1 else "")
        )
    return state


def _check_second_copy(
    checkpoint: Checkpoint, embedding: Tensor, convert: Callable[[Tensor], Tensor]
) -> None:
    """Some writers store a tied matrix twice. Then both must agree, or the config is wrong about the tie."""
    if "lm_head.weight" not in checkpoint.left:
        return
    if not torch.equal(convert(checkpoint.take("lm_head.weight", tuple(embedding.shape))), embedding):
        raise CheckpointError(
            f"{checkpoint.path}: 'lm_head.weight' differs from 'model.embed_tokens.weight', "
            "though config.json ties them"
        )


def _parts(config: ModelConfig, name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """The checkpoint's tensors, with their shapes, that make up our parameter `name`."""
    prefix = "" if name.startswith("lm_head") else "model."
    module = name.split(".")[-2]
    if module not in FUSED:
        return [(prefix + name, shape)]
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = (query, kv, kv) if module == "qkv_proj" else (config.intermediate_size,) * 2
    return [
        (prefix + name.replace(module, part), (size, *shape[1:]))
        for part, size in zip(FUSED[module], rows, strict=True)
    ]
