"""One warp computes the scores of 32 keys, in five ways: who owns a key, how wide a load is, how the keys lie.

Two layouts of the same keys. NHD is `[num_blocks, block_size, num_kv_heads, head_dim]`: a token's row of a head lies
in one piece. Split is `[num_blocks, num_kv_heads, head_dim / x, block_size, x]` with x numbers in 16 bytes: the first
16 bytes of all tokens of a block, then the next 16 bytes of all. Chapter 10 counts what each way touches.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code=attr-defined

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from numba import cuda
from torch import Tensor

from exercises.grader.values import difference
from exercises.tasks.ex08_scene import draw
from kernels.cuda.elements import ELEMENTS, Element
from kernels.cuda.intrinsics import load_16_bytes
from kernels.cuda.jit import device_function, kernel
from kernels.cuda.softmax import ZERO, lanes_sum
from kernels.interpreter import interpret
from refengine.viz import Table

WARP = 32
TOKENS, BLOCK_SIZE, HEADS, HEAD, NUM_BLOCKS = (
    32,
    16,
    8,
    3,
    5,
)  # of the reading below; HEAD is the one that is read
BLOCKS = [3, 1]  # the block table


# -- where a number lies -------------------------------------------------------------------------------------


def split_keys(keys: Tensor) -> Tensor:
    """An NHD key cache in the split layout, `[num_blocks, num_kv_heads, head_dim / x, block_size, x]`."""
    x = 16 // keys.itemsize
    num_blocks, block_size, num_kv_heads, head_dim = keys.shape
    pieces = keys.view(num_blocks, block_size, num_kv_heads, head_dim // x, x)
    return pieces.permute(0, 2, 3, 1, 4).contiguous()


def nhd_at(block: int, offset: int, head: int, d: int, head_dim: int, x: int) -> int:
    """Element of number d of a token's key in a flat NHD cache."""
    return ((block * BLOCK_SIZE + offset) * HEADS + head) * head_dim + d


def split_at(block: int, offset: int, head: int, d: int, head_dim: int, x: int) -> int:
    """The same in the split layout."""
    piece = (block * HEADS + head) * (head_dim // x) + d // x
    return (piece * BLOCK_SIZE + offset) * x + d % x


# -- who reads it --------------------------------------------------------------------------------------------


@cache
def number_by_number(element: Element, head_dim: int, place: Any) -> Any:
    """A thread owns a token and loads one number at a time."""
    widen, x, at = element.widen, element.per_load, device_function(place)

    @kernel
    def scores(out, query, keys, table):
        token = cuda.threadIdx.x
        score = ZERO
        for d in range(head_dim):
            block = table[token // BLOCK_SIZE]
            score += query[d] * widen(keys[at(block, token % BLOCK_SIZE, HEAD, d, head_dim, x)])
        out[token] = score

    return scores


@cache
def piece_by_piece(element: Element, head_dim: int, place: Any) -> Any:
    """A thread owns a token and loads 16 bytes at a time."""
    unpack, per_word, x, at = element.unpack, element.per_word, element.per_load, device_function(place)

    @kernel
    def scores(out, query, keys, table):
        token = cuda.threadIdx.x
        score = ZERO
        for d in range(0, head_dim, x):
            block = table[token // BLOCK_SIZE]
            words = load_16_bytes(keys, at(block, token % BLOCK_SIZE, HEAD, d, head_dim, x))
            for j in range(x):
                score += query[d + j] * unpack(words[j // per_word], j % per_word)
        out[token] = score

    return scores


@cache
def lanes_for_a_row(element: Element, head_dim: int, place: Any) -> Any:
    """Neighbouring lanes share a token, 16 bytes each, and add up what they have."""
    unpack, per_word, x, at = element.unpack, element.per_word, element.per_load, device_function(place)
    lanes = head_dim // x
    rows = WARP // lanes

    @kernel
    def scores(out, query, keys, table):
        lane = cuda.threadIdx.x
        d = lane % lanes * x
        for i in range(TOKENS // rows):
            token = i * rows + lane // lanes
            block = table[token // BLOCK_SIZE]
            words = load_16_bytes(keys, at(block, token % BLOCK_SIZE, HEAD, d, head_dim, x))
            score = ZERO
            for j in range(x):
                score += query[d + j] * unpack(words[j // per_word], j % per_word)
            score = lanes_sum(score, lanes)
            if d == 0:
                out[token] = score

    return scores


@dataclass(frozen=True)
class Way:
    """How a warp reads its keys."""

    layout: str
    owner: str
    load: str
    make: Any  # (element, head_dim, place) -> kernel

    @property
    def place(self) -> Any:
        return split_at if self.layout == "split" else nhd_at


WAYS = {
    "a": Way("NHD", "a thread per token", "a number", number_by_number),
    "b": Way("NHD", "a thread per token", "16 bytes", piece_by_piece),
    "c": Way("NHD", "lanes per token", "16 bytes", lanes_for_a_row),
    "d": Way("split", "a thread per token", "a number", number_by_number),
    "e": Way("split", "a thread per token", "16 bytes", piece_by_piece),
}


# -- counting ------------------------------------------------------------------------------------------------


def count(name: str, head_dim: int = 128, dtype: torch.dtype = torch.bfloat16) -> tuple[int, int, int]:
    """Runs one way. Returns: requests for keys, sectors of keys, sectors of the block table.

    Raises: ArithmeticError if the scores are not those of the keys.
    """
    way, element = WAYS[name], ELEMENTS[dtype]
    keys = draw(NUM_BLOCKS, BLOCK_SIZE, HEADS, head_dim).to(dtype)
    query, out = draw(head_dim, seed=1), torch.full((TOKENS,), torch.nan)
    laid = split_keys(keys) if way.layout == "split" else keys
    arguments = (out, query, element.view(laid.flatten()), torch.tensor(BLOCKS))
    with interpret() as report:
        way.make(element, head_dim, way.place)[1, WARP](*arguments)
    wanted = keys[BLOCKS].flatten(0, 1)[:, HEAD].double() @ query.double()
    if sentence := difference(wanted.float(), out):
        raise ArithmeticError(f"way {name} computes other scores: {sentence}")
    of_keys = report.total("global", "read", "keys")
    return of_keys.requests, of_keys.sectors, report.total("global", "read", "table").sectors


def reading_table(head_dim: int = 128, dtype: torch.dtype = torch.bfloat16) -> Table:
    """All five ways, counted. 32 tokens of one head."""
    rows = []
    for name, way in WAYS.items():
        requests, of_keys, of_table = count(name, head_dim, dtype)
        rows.append((name, way.layout, way.owner, way.load, requests, of_keys, of_keys + of_table))
    return Table(("", "layout", "who owns what", "a load", "requests", "sectors", "with block table"), rows)


@cache
def write_row(head_dim: int, x: int, place: Any) -> Any:
    """A warp writes a token's keys of all heads, 32 numbers at a time."""
    at = device_function(place)

    @kernel
    def write(keys, row, block, offset):
        i = cuda.threadIdx.x
        while i < HEADS * head_dim:
            keys[at(block, offset, i // head_dim, i % head_dim, head_dim, x)] = row[i]
            i += WARP

    return write


def write_count(layout: str, head_dim: int = 128, dtype: torch.dtype = torch.bfloat16) -> tuple[int, int]:
    """Writes one token's keys of all heads. Returns: bytes, sectors."""
    element = ELEMENTS[dtype]
    row = element.view(draw(HEADS * head_dim).to(dtype))
    keys = torch.zeros(NUM_BLOCKS * BLOCK_SIZE * HEADS * head_dim, dtype=element.stored)
    place = split_at if layout == "split" else nhd_at
    with interpret() as report:
        write_row(head_dim, element.per_load, place)[1, WARP](keys, row, 1, 5)
    written = report.total("global", "write", "keys")
    return written.bytes, written.sectors
