"""The container that llama.cpp writes: metadata, a table of tensors, then their numbers, often quantized.

    magic "GGUF", version, number of tensors, number of metadata entries
    metadata:  name, kind, value                          one after another
    tensors:   name, dimensions, kind, offset             one after another
    data:      aligned, each tensor at its offset

This reads the header itself, and trusts no length in it: a damaged file must end in a sentence, not in a loop
over 2**60 tokens. The arithmetic of the quantized kinds comes from the package `gguf`.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from refengine.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # 3 only adds big-endian files, which are not read
TEXT, ARRAY = 8, 9
SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # kind of metadata -> its struct letter
PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # kinds of tensors that need no arithmetic
DEFAULT_ALIGNMENT = 32  # bytes
MOST_DIMENSIONS = 4


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies and how it is stored. `shape` is torch's order, the file has it backwards."""

    shape: tuple[int, ...]
    kind: int  # GGML's number of the storage type
    start: int  # byte in the file
    num_bytes: int


class GGUFFile:
    """`metadata` by key and `tensors` by name; `read` brings one tensor into memory.

    Raises: CheckpointError if the file is missing, no GGUF, damaged, or quantized while `gguf` is not installed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._read_header(_Cursor(file))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        except _Damage as damage:
            raise CheckpointError(f"{path} is not a whole GGUF file: {damage}") from None

    def read(self, name: str) -> Tensor:
        """The tensor as numbers: float32 for every quantized kind, the stored type for the others."""
        info = self.tensors[name]
        with self.path.open("rb") as file:
            file.seek(info.start)
            data = np.frombuffer(file.read(info.num_bytes), dtype=np.uint8)
        if len(data) != info.num_bytes:
            raise CheckpointError(f"{self.path} became shorter while it was being read")
        if info.kind in PLAIN:
            return torch.from_numpy(data.copy()).view(PLAIN[info.kind]).view(info.shape)
        quants = _quantization(self.path)
        kind = quants.GGMLQuantizationType(info.kind)
        try:
            numbers = quants.dequantize(data.reshape(*info.shape[:-1], -1), kind)
        except NotImplementedError:
            raise CheckpointError(
                f"tensor {name!r} in {self.path} is {kind.name}, which is not read"
            ) from None
        return torch.from_numpy(numbers).view(info.shape)

    def _read_header(self, cursor: _Cursor) -> None:
        if cursor.take(4) != MAGIC:
            raise _Damage("it does not begin with GGUF")
        version = cursor.scalar("I")
        if version not in VERSIONS:
            raise _Damage(f"version {version} is not one of {VERSIONS}")
        num_tensors, num_entries = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = cursor.text()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        table = [self._read_entry(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise _Damage(f"general.alignment is {alignment!r}")
        start = -(-cursor.position // alignment) * alignment
        self.tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in table:
            info = TensorInfo(shape, kind, start + offset, self._num_bytes(name, shape, kind))
            if name in self.tensors:
                raise _Damage(f"tensor {name!r} is there twice")
            if info.start + info.num_bytes > cursor.size:
                raise _Damage(f"tensor {name!r} ends behind the end of the file")
            self.tensors[name] = info

    @staticmethod
    def _read_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
        name = cursor.text()
        num_dimensions = cursor.scalar("I")
        if not 1 <= num_dimensions <= MOST_DIMENSIONS:
            raise _Damage(f"tensor {name!r} has {num_dimensions} dimensions")
        shape = tuple(reversed([cursor.scalar("Q") for _ in range(num_dimensions)]))
        return name, shape, cursor.scalar("I"), cursor.scalar("Q")

    def _num_bytes(self, name: str, shape: tuple[int, ...], kind: int) -> int:
        if kind in PLAIN:
            return math.prod(shape) * PLAIN[kind].itemsize
        quants = _quantization(self.path)
        try:
            block, size = quants.GGML_QUANT_SIZES[quants.GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            raise _Damage(f"tensor {name!r} is of an unknown kind {kind}") from None
        if shape[-1] % block:
            raise _Damage(f"the rows of tensor {name!r}, {shape[-1]} long, are not blocks of {block}")
        return int(math.prod(shape) // block * size)


class _Damage(Exception):
    """What is wrong with the file, to be told with its name."""


class _Cursor:
    """Walks through the header. Raises: _Damage as soon as it would have to read beyond the end."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.position = 0
        self.size = os.fstat(file.fileno()).st_size  # bytes

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        if count > self.size - self.position:
            raise _Damage("it ends in the middle of its header")
        self.position += count
        return self.file.read(count)

    def scalar(self, letter: str) -> Any:
        """One number, stored as `struct` calls it."""
        return struct.unpack(f"<{letter}", self.take(struct.calcsize(letter)))[0]

    def text(self) -> str:
        """A string with its length before it."""
        try:
            return self.take(self.scalar("Q")).decode()
        except UnicodeDecodeError:
            raise _Damage("a text in its header is not UTF-8") from None

    def value(self, kind: int) -> Any:
        """One value of the metadata: a number, a text, or a list of either."""
        if kind == TEXT:
            return self.text()
        if kind == ARRAY:
            kind, count = self.scalar("I"), self.scalar("Q")
            if kind == TEXT:
                return [self.text() for _ in range(count)]
            letter = self._letter(kind)
            return list(struct.unpack(f"<{count}{letter}", self.take(count * struct.calcsize(letter))))
        return self.scalar(self._letter(kind))

    @staticmethod
    def _letter(kind: int) -> str:
        if kind not in SCALARS:
            raise _Damage(f"a value in its header is of an unknown kind {kind}")
        return SCALARS[kind]


def _quantization(path: Path) -> Any:
    """The package that knows the quantized kinds, some 30 by now."""
    try:
        import gguf
    except ImportError:
        raise CheckpointError(
            f"{path} is quantized, and to read it the package gguf is needed (pip install 'refengine[gguf]')"
        ) from None
    return gguf
