"""What a lane does with its share of a cache row: load it, multiply it with a query, add it to a result.

A share stays packed, as the words that were loaded, until it is used. So several rows can be on their way at
once and take a register per word, not one per number.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code=attr-defined

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from kernels.cuda.intrinsics import WORDS, load_16_bytes
from kernels.cuda.jit import device_function
from kernels.cuda.softmax import ZERO
from kernels.cuda.tiling import Tiling


class RowFunctions(NamedTuple):
    """For kernels to call. `words` and `numbers` are local arrays, `at` is an index into the one before it."""

    load: Any  # (words, at, array, offset): the share that starts at this element of a flat array
    widen: Any  # (numbers, at, words, factor): as fp32, times a factor
    dot: Any  # (numbers, at, words, at) -> fp32: this share's part of a score
    add: Any  # (numbers, at, words, at, weight): numbers += weight * share


@cache
def row_functions(tiling: Tiling) -> RowFunctions:
    """Compiled for one layout. A lane's share is `tiling.loads` pieces of 16 bytes, a row's width apart."""
    unpack, per_word = tiling.element.unpack, tiling.element.per_word
    loads, num_numbers = tiling.loads, tiling.numbers
    pitch = tiling.lanes * tiling.element.per_load

    @device_function
    def load(words, at, array, offset):
        for i in range(loads):
            piece = load_16_bytes(array, offset + i * pitch)
            for j in range(WORDS):
                words[at + i * WORDS + j] = piece[j]

    @device_function
    def widen(numbers, at, words, factor):
        for j in range(num_numbers):
            numbers[at + j] = unpack(words[j // per_word], j % per_word) * factor

    @device_function
    def dot(numbers, at, words, words_at):
        x = ZERO
        for j in range(num_numbers):
            x += numbers[at + j] * unpack(words[words_at + j // per_word], j % per_word)
        return x

    @device_function
    def add(numbers, at, words, words_at, weight):
        for j in range(num_numbers):
            numbers[at + j] += weight * unpack(words[words_at + j // per_word], j % per_word)

    return RowFunctions(load, widen, dot, add)
