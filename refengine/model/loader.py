"""From a model directory to a decoder, and one clear sentence when that is not possible.

Only safetensors are read: a pickle can run any code while it is being opened. Every tensor of the checkpoint
must find its place and every place its tensor, in the right shape, because a decoder with a forgotten weight
still writes fluent text.
vLLM: V0 and V1 model_executor/model_loader (DefaultModelLoader) and each model's `load_weights`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from refengine.errors import CheckpointError
from refengine.model.config import ModelConfig
from refengine.model.decoder import Decoder, Rotary

TINY = Path(__file__).parent / "tiny"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
WANTED = ["*.json", "*.safetensors"]  # of a hub repository

# Our parameter <- the checkpoint's, joined along the output features into one matrix product.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
IGNORED = re.compile(r"\.rotary_emb\.inv_freq$")  # computed from the config; old checkpoints carry it too


def load_model(
    path_or_name: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Decoder:
    """The decoder of a directory, of "tiny" (shipped), or of "org/name" on the Hugging Face hub.

    Raises: CheckpointError with one sentence that names the file or tensor at fault.
    """
    directory = find_model(path_or_name)
    config = read_config(directory)
    with torch.device("meta"):  # no memory and no random numbers for weights that are replaced at once
        decoder = Decoder(config)
    state = _assemble(decoder, config, _Checkpoint(directory), lambda x: x.to(device, dtype, copy=True))
    decoder.load_state_dict(state, assign=True)
    if config.tie_word_embeddings:
        decoder.lm_head.weight = decoder.embed_tokens.weight
    decoder.rotary = Rotary(config).to(device)
    return decoder.eval().requires_grad_(False)


def find_model(path_or_name: str | Path) -> Path:
    """The local directory of a model, downloaded if need be.

    Raises: CheckpointError if it is neither here nor to be had.
    """
    if path_or_name == "tiny":
        return TINY
    directory = Path(path_or_name)
    if directory.is_dir():
        return directory
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


def read_config(directory: Path) -> ModelConfig:
    """`config.json`, with the end-of-text ids that `generation_config.json` adds.

    Raises: CheckpointError for a missing or damaged file, or a network that the decoder does not implement.
    """
    config = ModelConfig.from_hf(read_json(directory / "config.json"))
    generation = directory / "generation_config.json"
    extra = read_json(generation).get("eos_token_id") if generation.exists() else None
    ids = extra if isinstance(extra, list) else [] if extra is None else [extra]
    return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *ids))))


def read_json(file: Path) -> dict[str, Any]:
    """Raises: CheckpointError if the file is missing or is not one JSON object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file.parent} has no {file.name}") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:  # not JSON, or not even UTF-8
        raise CheckpointError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds a {type(content).__name__}, not an object")
    return content


class _Checkpoint:
    """The tensors of a directory by name, read one at a time. `left` are the names not yet taken."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files: dict[str, Any] = {}
        self.left: dict[str, Path] = {}
        for shard in _shards(directory):
            handle = self.files[shard.name] = open_shard(shard)
            for name in sorted(handle.keys()):
                if name in self.left:
                    raise CheckpointError(
                        f"tensor {name!r} is in both {self.left[name].name} and {shard.name}"
                    )
                self.left[name] = shard

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Raises: CheckpointError if the tensor is missing or has another shape."""
        shard = self.left.pop(name, None)
        if shard is None:
            raise CheckpointError(f"{self.directory} has no tensor {name!r}")
        tensor: Tensor = self.files[shard.name].get_tensor(name)
        if tensor.shape != shape:
            raise CheckpointError(
                f"tensor {name!r} in {shard} is {list(tensor.shape)}, but config.json says {list(shape)}"
            )
        if not tensor.is_floating_point():
            raise CheckpointError(
                f"tensor {name!r} in {shard} is {tensor.dtype}; quantized weights are not read"
            )
        return tensor


def _shards(directory: Path) -> Iterator[Path]:
    """The weight files of a directory, whole or split with an index."""
    if (directory / SINGLE).exists():
        yield directory / SINGLE
        return
    if not (directory / INDEX).exists():
        refuse_pickles(directory)
        raise CheckpointError(f"{directory} has neither {SINGLE} nor {INDEX}")
    weight_map = read_json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{directory / INDEX} has no weight_map")
    for name in dict.fromkeys(weight_map.values()):
        if not isinstance(name, str) or Path(name).name != name or "\\" in name:
            raise CheckpointError(
                f"{directory / INDEX} names {name!r}, which is not a file of this directory"
            )
        if not (directory / name).is_file():
            raise CheckpointError(f"{directory / INDEX} names {name}, which is missing")
        yield directory / name


def refuse_pickles(directory: Path) -> None:
    """Raises: CheckpointError if a directory without safetensors has its weights in a pickle."""
    pickles = sorted(f.name for f in directory.iterdir() if f.suffix in PICKLES)
    if pickles:
        raise CheckpointError(
            f"{directory} has its weights only in {pickles[0]}, a pickle, which could run any code when "
            "opened; convert it to safetensors"
        )


def open_shard(shard: Path) -> Any:
    """A handle on a safetensors file. Raises: CheckpointError if it is damaged."""
    try:
        return safe_open(shard, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{shard} is not a whole safetensors file: {error}") from None


def _assemble(
    decoder: Decoder, config: ModelConfig, checkpoint: _Checkpoint, convert: Callable[[Tensor], Tensor]
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
            f"{checkpoint.directory} has a tensor {left[0]!r} that a {config.family} decoder has no place for"
            + (f" (and {len(left) - 1} more)" if len(left) > 1 else "")
        )
    return state


def _check_second_copy(
    checkpoint: _Checkpoint, embedding: Tensor, convert: Callable[[Tensor], Tensor]
) -> None:
    """Some writers store a tied matrix twice. Then both must agree, or the config is wrong about the tie."""
    if "lm_head.weight" not in checkpoint.left:
        return
    if not torch.equal(convert(checkpoint.take("lm_head.weight", tuple(embedding.shape))), embedding):
        raise CheckpointError(
            f"{checkpoint.directory}: 'lm_head.weight' differs from 'model.embed_tokens.weight', "
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
