"""Weights on disk, by the names that Hugging Face gives them, one tensor at a time.

Only safetensors are opened here: a pickle can run any code while it is being opened. What the tensors are for
is not known here; `refengine.model.loader` gives each its place.
vLLM: V0 and V1 model_executor/model_loader/weight_utils.py.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from refengine.errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class Checkpoint(ABC):
    """The tensors of one model. `left` are the names not yet taken, each with where it is."""

    path: Path
    config_name: str  # where the sizes were said
    left: dict[str, Any]

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Raises: CheckpointError if the tensor is missing, has another shape, or is quantized in a way not read."""
        if name not in self.left:
            raise CheckpointError(f"{self.path} has no tensor {name!r}")
        place = self.left.pop(name)
        file, stored = self.where(name, place)
        if stored != shape:
            raise CheckpointError(
                f"tensor {name!r} in {file} is {list(stored)}, but {self.config_name} says {list(shape)}"
            )
        return self.read(name, place)

    @abstractmethod
    def where(self, name: str, place: Any) -> tuple[Path, tuple[int, ...]]:
        """The file in which a tensor is, and its shape."""

    @abstractmethod
    def read(self, name: str, place: Any) -> Tensor:
        """One tensor, of the right shape, as floating-point numbers."""


class SafetensorsCheckpoint(Checkpoint):
    """A directory with one safetensors file, or with several and an index.

    Raises: CheckpointError if one is missing or damaged, or if a tensor is there twice.
    """

    config_name = "config.json"

    def __init__(self, directory: Path) -> None:
        self.path = directory
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

    def where(self, name: str, place: Path) -> tuple[Path, tuple[int, ...]]:
        return place, tuple(self.files[place.name].get_slice(name).get_shape())

    def read(self, name: str, place: Path) -> Tensor:
        """Raises: CheckpointError if it does not hold floating-point numbers."""
        tensor: Tensor = self.files[place.name].get_tensor(name)
        if not tensor.is_floating_point():
            raise CheckpointError(
                f"tensor {name!r} in {place} is {tensor.dtype}; quantized weights are not read"
            )
        return tensor


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
