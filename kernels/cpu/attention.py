"""Attention over pages in compiled Python: keys and values are read in place, and once.

For each sequence and tile of its tokens: the scores of the keys, their exponentials, the weighted sum of the
values, with one correction of what came before (online softmax). Tiles begin at multiples of TILE tokens of the
sequence, and a query does the same arithmetic whatever else is in the batch: its result is the same to the last
bit in a whole prompt, in a chunk and in a decode step.
vLLM: V0 `csrc/cpu/attention.cpp`, V1 `csrc/cpu/cpu_attn.cpp`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kernels.cpu.elements import copy_tile, either
from kernels.cpu.options import Array, compiled, entry
from kernels.cpu.softmax import LOWEST, soften
from kernels.cpu.vectors import LANES, dots, fetch, weigh

# Numba keeps the compiled code on disk until this file changes, and does not look at any other. So a change of
# those has to be one of this file: a test holds this number to their contents.
BUILT_FROM = "5cff0b1d37a41703"

TILE = 64  # tokens
AHEAD = 32  # tokens between the one in use and the one that is fetched
QUERIES = 16  # tokens of one sequence that go through its tiles together
ROOM = TILE + LANES  # scores of one head
LINE = 64  # bytes that are fetched at a time
LOG2_E = 1.4426950408889634  # the softmax works with powers of two


class Work(NamedTuple):
    """What is kept of the QUERIES tokens in hand. A row belongs to one head of one of them."""

    queries: Array  # [rows * padded head_dim]
    sums: Array  # [rows * padded head_dim] weighted values so far
    top: Array  # [rows * LANES] highest score so far
    total: Array  # [rows * LANES] sum of the weights so far; heads that share a key lie side by side in the lanes
    scores: Array  # [num_heads * ROOM] of one token on one tile, then its weights
    factor: Array  # [LANES] by what the last tile corrects what was added up before
    rows: Array  # [TILE + AHEAD] int64: where each token of a tile begins in the flat cache
    key_tile: Array  # the copy of a tile, if the cache is not read in place
    value_tile: Array


@entry
def attend(
    out: Array,
    query: Array,
    key_cache: Array,
    value_cache: Array,
    block_tables: Array,
    query_start_loc: Array,
    seq_lens: Array,
    groups: Array,
    scale: float,
    window: int,
) -> None:
    """`kernels.paged_attention` on numpy arrays.

    Args:
        out, query: `[num_tokens, num_heads, head_dim]` float32 or float64.
        key_cache, value_cache: `[num_blocks, block_size, num_kv_heads, head_dim]` of the same type, or the bits
            of bfloat16 as int16 or of float16 as uint16.
        block_tables, query_start_loc, seq_lens: int64.
        groups: `[num_groups, 3]` int64; of heads that go through a key together the first, how many, their KV head.
        window: tokens; as many as the longest sequence if there is none.
    Mutates: out, in the rows that belong to a sequence.
    """
    num_heads, num_kv_heads, head_dim = query.shape[1], key_cache.shape[2], key_cache.shape[3]
    padded = (head_dim + LANES - 1) // LANES * LANES
    in_place = padded == head_dim and key_cache.itemsize == query.itemsize
    size_of_copy = 0 if in_place else ROOM * num_kv_heads * padded
    work = Work(
        np.empty(QUERIES * num_heads * padded, query.dtype),
        np.empty(QUERIES * num_heads * padded, query.dtype),
        np.empty(QUERIES * num_heads * LANES, query.dtype),
        np.empty(QUERIES * num_heads * LANES, query.dtype),
        np.empty(num_heads * ROOM, query.dtype),
        np.empty(LANES, query.dtype),
        np.empty(TILE + AHEAD, np.int64),
        np.empty(size_of_copy, query.dtype),
        np.empty(size_of_copy, query.dtype),
    )
    for i in range(len(seq_lens)):
        stop = query_start_loc[i + 1]
        for row in range(query_start_loc[i], stop, QUERIES):
            after = min(row + QUERIES, stop)
            following = _seen(i + 1, query_start_loc, seq_lens, window) if after == stop else (0, 0)
            position = seq_lens[i] - stop + row
            _begin(work, query[row:after], scale * LOG2_E, padded)
            _over_tiles(
                work,
                key_cache,
                value_cache,
                block_tables[i : i + 2],
                following,
                groups,
                position,
                after - row,
                window,
                in_place,
                padded,
            )
            _finish(work, groups, out[row:after], padded)


@compiled
def _seen(i: int, query_start_loc: Array, seq_lens: Array, window: int) -> tuple[int, int]:
    """The tokens that sequence i is going to read, from and to; none if there is no such sequence."""
    if i >= len(seq_lens) or query_start_loc[i] == query_start_loc[i + 1]:
        return 0, 0
    first_query = seq_lens[i] - (query_start_loc[i + 1] - query_start_loc[i])
    return max(0, first_query - window + 1), seq_lens[i]


@compiled
def _over_tiles(
    work: Work,
    key_cache: Array,
    value_cache: Array,
    tables: Array,
    following: tuple[int, int],
    groups: Array,
    position: int,
    num_queries: int,
    window: int,
    in_place: bool,
    padded: int,
) -> None:
    """Takes the queries at `position` and behind through all tiles that they see.

    Args:
        tables: block tables of the sequence and of the next one; `following`: what that one is going to read.
    Mutates: work.
    """
    block_size, num_kv_heads, head_dim = key_cache.shape[1], key_cache.shape[2], key_cache.shape[3]
    num_heads, width = work.sums.size // (QUERIES * padded), num_kv_heads * head_dim
    keys = either(in_place, key_cache.reshape(-1), work.key_tile)
    values = either(in_place, value_cache.reshape(-1), work.value_tile)
    seen, end = max(0, position - window + 1), position + num_queries
    for tile in range(seen // TILE * TILE, end, TILE):
        first, stop = max(tile, seen) - tile, min(TILE, end - tile)
        known = min(TILE + AHEAD, end - tile)
        _find(work.rows, first, known, tables[0], tile + first, block_size, width)
        more = min(TILE + AHEAD - known, following[1] - following[0])
        if more > 0:
            _find(work.rows, known, known + more, tables[1], following[0], block_size, width)
            known += more
        for t in range(known, TILE + AHEAD):
            work.rows[t] = work.rows[t - 1]
        if not in_place:
            copy_tile(key_cache, work.rows, first, stop, padded, work.key_tile)
            copy_tile(value_cache, work.rows, first, stop, padded, work.value_tile)
            for t in range(TILE + AHEAD):
                work.rows[t] = t * num_kv_heads * padded
        for i in range(num_queries):
            own_first = max(first, position + i - window + 1 - tile)
            own_stop = min(stop, position + i + 1 - tile)
            if own_first < own_stop:
                fetched = known if in_place and i == 0 else 0
                _scores(work, groups, i * num_heads, keys, values, own_first, own_stop, fetched, padded)
                _sums(work, groups, i * num_heads, values, own_first, own_stop, padded)


@compiled
def _begin(work: Work, query: Array, factor: float, padded: int) -> None:
    """Mutates: work, for these queries."""
    num_queries, num_heads, head_dim = query.shape
    for row in range(num_queries * num_heads):
        for lane in range(LANES):
            work.top[row * LANES + lane] = LOWEST
            work.total[row * LANES + lane] = 0
        for d in range(padded):
            work.sums[row * padded + d] = 0
            work.queries[row * padded + d] = 0
        for d in range(head_dim):
            work.queries[row * padded + d] = query[row // num_heads, row % num_heads, d] * factor


@compiled
def _find(rows: Array, first: int, stop: int, table: Array, token: int, block_size: int, width: int) -> None:
    """Where `token` of a sequence begins, and those behind it. Mutates: rows, from `first` to `stop`."""
    column, offset = token // block_size, token % block_size
    for t in range(first, stop):
        rows[t] = (table[column] * block_size + offset) * width
        offset += 1
        if offset == block_size:
            column, offset = column + 1, 0


@compiled
def _scores(
    work: Work,
    groups: Array,
    row: int,
    keys: Array,
    values: Array,
    first: int,
    stop: int,
    known: int,
    padded: int,
) -> None:
    """All heads of the token whose rows begin at `row`, with the keys of the tokens first..stop of a tile.

    In steps of LANES tokens, and in these through all heads, so that pages are read in their order. Those
    that come AHEAD of the tokens in hand are fetched, as far as they are `known`.
    Mutates: work.scores.
    """
    width = (groups[len(groups) - 1, 2] + 1) * padded  # of a token
    for t in range(first, stop, LANES):
        until = min(t + LANES, stop)
        for u in range(t + AHEAD, min(until + AHEAD, known)):
            for d in range(0, width, LINE // keys.itemsize):
                fetch(keys, work.rows[u] + d)
                fetch(values, work.rows[u] + d)
        for g in range(len(groups)):
            head, size, offset = groups[g, 0], groups[g, 1], groups[g, 2] * padded
            query = (row + head) * padded
            for u in range(t, until, LANES // size):
                at = head * ROOM + (u - first) * size
                dots(size, work.scores, at, work.queries, query, keys, work.rows, u, offset, padded)


@compiled
def _sums(work: Work, groups: Array, row: int, values: Array, first: int, stop: int, padded: int) -> None:
    """The scores become weights, and the weighted values are added. Mutates: work."""
    for g in range(len(groups)):
        head, size, offset = groups[g, 0], groups[g, 1], groups[g, 2] * padded
        start, at, count = (row + head) * padded, head * ROOM, stop - first
        soften(size, work.scores, at, count * size, work.top, work.total, (row + head) * LANES, work.factor)
        for i in range(size):
            factor = work.factor[i]
            for d in range(start + i * padded, start + (i + 1) * padded):
                work.sums[d] *= factor
        weigh(size, work.sums, start, work.scores, at, values, work.rows, first, count, offset, padded)


@compiled
def _finish(work: Work, groups: Array, out: Array, padded: int) -> None:
    """Mutates: out `[num_queries, num_heads, head_dim]`."""
    num_queries, num_heads, head_dim = out.shape
    for i in range(num_queries):
        for g in range(len(groups)):
            first, size = i * num_heads + groups[g, 0], groups[g, 1]
            for head in range(size):
                total = work.total[first * LANES + head]
                for lane in range(head + size, LANES, size):
                    total += work.total[first * LANES + lane]
                share = 1 / total
                for d in range(head_dim):
                    out[i, groups[g, 0] + head, d] = work.sums[(first + head) * padded + d] * share
