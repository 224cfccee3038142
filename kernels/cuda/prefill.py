"""Causal attention of several new tokens per sequence over paged keys, context included.

A block of threads takes a tile of query rows and walks over the keys they see, a tile at a time. A row is one
query of one head; all heads of a group stand side by side in the tile, because they read the same keys. A tile
of keys is brought to shared memory once for all rows, and after the scores are known the values take its place.

Every warp owns some rows. For the scores a lane owns a key, for the values a few dimensions of the result. The
products are ordinary multiply-adds: Numba has no words for tensor cores, which would be many times faster.
vLLM: V0 `context_attention_fwd` in attention/ops/prefix_prefill.py, V1 `flash_attn_varlen_func`.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code=attr-defined

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from numba import cuda, float32, uint32

from kernels.cuda.addressing import element_offset
from kernels.cuda.elements import Element
from kernels.cuda.intrinsics import WORDS, exp2, load_16_bytes
from kernels.cuda.jit import device_function, resident_kernel
from kernels.cuda.softmax import LOWEST, ZERO, lanes_sum, warp_max
from kernels.cuda.tiling import WARP

KEYS = WARP  # in a tile, one for each lane
BLOCKS_PER_PROCESSOR = 3  # of threads, at the same time
LOADS_AT_ONCE = 4  # of a thread, before it unpacks the first


@dataclass(frozen=True)
class PrefillTiling:
    """The constants of one prefill kernel. group: query heads per kv head, any number."""

    element: Element
    head_dim: int
    group: int
    block_size: int
    warps: int = 4

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def rows_per_warp(self) -> int:
        """As many as shared memory holds beside a tile of keys."""
        return 4 if self.head_dim <= 128 else 2

    @property
    def rows(self) -> int:
        return self.warps * self.rows_per_warp

    @property
    def pieces(self) -> int:
        """Of 16 bytes, in a row of the cache."""
        return self.head_dim // self.element.per_load

    @property
    def results(self) -> int:
        """Dimensions of the result that a lane owns."""
        return self.head_dim // WARP


@cache
def column_functions(tiling: PrefillTiling) -> tuple[Any, Any]:
    """(put, dimension_of): what stands in which column of a tile.

    Number j of piece p stands in column `j * pieces + p`. So lanes that unpack neighbouring pieces write to
    neighbouring columns, each into a bank of its own. Scores do not mind, as queries are laid out alike.
    """
    unpack, per_word = tiling.element.unpack, tiling.element.per_word
    pieces, per_load = tiling.pieces, tiling.element.per_load

    @device_function
    def put(tile, row, piece, words, at, factor):
        for j in range(per_load):
            tile[row, j * pieces + piece] = unpack(words[at + j // per_word], j % per_word) * factor

    @device_function
    def dimension_of(column):
        return column % pieces * per_load + column // pieces

    return put, dimension_of


@cache
def tile_functions(tiling: PrefillTiling) -> tuple[Any, Any]:
    """(load_queries, load_tile): all threads of the block fill a tile.

    A row past the end repeats the last one, which keeps all loads free of conditions and so on their way
    together. Nothing comes of it: such a key is masked, such a query is not stored.
    """
    (put, _), pieces, per_load = column_functions(tiling), tiling.pieces, tiling.element.per_load
    head_dim, group, block_size = tiling.head_dim, tiling.group, tiling.block_size
    threads = tiling.threads
    query_rounds, key_rounds = tiling.rows * pieces // threads, KEYS * pieces // threads
    at_once = min(key_rounds, LOADS_AT_ONCE)
    held_words = at_once * WORDS

    @device_function
    def load_queries(tile, query, offset, query_stride, first_row, num_rows, scale):
        for i in range(query_rounds):
            row, piece = (i * threads + cuda.threadIdx.x) // pieces, (i * threads + cuda.threadIdx.x) % pieces
            held = min(first_row + row, num_rows - 1)
            start = offset + held // group * query_stride + held % group * head_dim
            put(tile, row, piece, load_16_bytes(query, start + piece * per_load), 0, scale)

    @device_function
    def load_tile(tile, cache, table, start, end, row_size, column):
        words = cuda.local.array(held_words, uint32)
        piece = cuda.threadIdx.x % pieces
        for first in range(0, key_rounds, at_once):
            for i in range(at_once):
                position = min(start + ((first + i) * threads + cuda.threadIdx.x) // pieces, end - 1)
                block, offset = table[position // block_size], position % block_size
                row = element_offset(block, offset, block_size, row_size)
                loaded = load_16_bytes(cache, row + column + piece * per_load)
                for j in range(WORDS):
                    words[i * WORDS + j] = loaded[j]
            for i in range(at_once):
                key = ((first + i) * threads + cuda.threadIdx.x) // pieces
                put(tile, key, piece, words, i * WORDS, float32(1))

    return load_queries, load_tile


@cache
def weigh_function(tiling: PrefillTiling) -> Any:
    """From a tile of keys to the weights of each row, and what was there before scaled down to them."""
    rows, head_dim, group, results = tiling.rows_per_warp, tiling.head_dim, tiling.group, tiling.results

    @device_function
    def weigh(weights, queries, tile, largest, total, result, start, first_row, context, window):
        first, lane = cuda.threadIdx.x // WARP * rows, cuda.threadIdx.x % WARP
        scores = cuda.local.array(rows, float32)
        for r in range(rows):
            scores[r] = ZERO
        for d in range(head_dim):
            number = tile[lane, d]
            for r in range(rows):
                scores[r] += queries[first + r, d] * number
        for r in range(rows):
            distance = context + (first_row + first + r) // group - (start + lane)
            score = scores[r] if distance >= 0 and distance < window else LOWEST
            before, after = largest[r], max(largest[r], warp_max(score))
            weight, rescale = exp2(score - after), exp2(before - after)  # see `fold_scores` about LOWEST
            weights[first + r, lane] = weight
            largest[r], total[r] = after, total[r] * rescale + lanes_sum(weight, WARP)
            for j in range(results):
                result[r * results + j] *= rescale

    return weigh


@cache
def value_functions(tiling: PrefillTiling) -> tuple[Any, Any, Any]:
    """(clear, add_values, store): no keys seen; a tile of values into each row's result; the results out."""
    rows, group, results = tiling.rows_per_warp, tiling.group, tiling.results
    narrow = tiling.element.narrow
    _, dimension_of = column_functions(tiling)

    @device_function
    def clear(largest, total, result):
        for r in range(rows):
            largest[r], total[r] = LOWEST, ZERO
            for j in range(results):
                result[r * results + j] = ZERO

    @device_function
    def add_values(result, weights, tile):
        first, lane = cuda.threadIdx.x // WARP * rows, cuda.threadIdx.x % WARP
        for key in range(KEYS):
            for j in range(results):
                number = tile[key, j * WARP + lane]
                for r in range(rows):
                    result[r * results + j] += weights[first + r, key] * number

    @device_function
    def store(out, result, total, first_token, first_row, num_rows, kv_head):
        first, lane = first_row + cuda.threadIdx.x // WARP * rows, cuda.threadIdx.x % WARP
        for r in range(rows):
            if first + r < num_rows:
                token, head = first_token + (first + r) // group, kv_head * group + (first + r) % group
                for j in range(results):
                    x = result[r * results + j] / total[r] if total[r] != ZERO else ZERO
                    out[token, head, dimension_of(j * WARP + lane)] = narrow(x)

    return clear, add_values, store


@cache
def prefill_kernel(tiling: PrefillTiling) -> Any:
    """The kernel for one shape, to be launched as
    `[(num_kv_heads, ceil(max_query_len * group / tiling.rows), num_seqs), tiling.threads]`.

    Arguments of the kernel:
        out: `[num_tokens, num_heads, head_dim]`. query: flat, rows `query_stride` numbers apart.
        first_rows, query_lens, seq_lens: `[num_seqs]`, first row in query, number of rows, tokens.
        key_cache, value_cache: flat. block_tables: `[num_seqs, max_blocks]`.
        scale: fp32, times LOG2_E. window: tokens that a query sees, at most.
    """
    load_queries, load_tile = tile_functions(tiling)
    weigh, (clear, add_values, store) = weigh_function(tiling), value_functions(tiling)
    head_dim, pitch, group = tiling.head_dim, tiling.head_dim + 1, tiling.group
    rows, tile_rows, num_results = tiling.rows_per_warp, tiling.rows, tiling.rows_per_warp * tiling.results

    @resident_kernel(tiling.threads, BLOCKS_PER_PROCESSOR)
    def prefill(
        out, query, query_stride, first_rows, query_lens, key_cache, value_cache, block_tables, seq_lens,
        scale, window,
    ):  # fmt: skip
        kv_head, first_row, seq = cuda.blockIdx.x, cuda.blockIdx.y * tile_rows, cuda.blockIdx.z
        num_rows, context = query_lens[seq] * group, seq_lens[seq] - query_lens[seq]
        if first_row >= num_rows:
            return
        queries = cuda.shared.array((tile_rows, head_dim), float32)
        tile = cuda.shared.array((KEYS, pitch), float32)
        weights = cuda.shared.array((tile_rows, KEYS), float32)
        largest, total = cuda.local.array(rows, float32), cuda.local.array(rows, float32)
        result = cuda.local.array(num_results, float32)
        clear(largest, total, result)
        row_size, column, table = cuda.gridDim.x * head_dim, kv_head * head_dim, block_tables[seq]
        offset = first_rows[seq] * query_stride + column * group
        load_queries(queries, query, offset, query_stride, first_row, num_rows, scale)
        start = max(0, context + first_row // group - window + 1)
        end = context + (min(first_row + tile_rows, num_rows) - 1) // group + 1
        while start < end:
            load_tile(tile, key_cache, table, start, end, row_size, column)
            cuda.syncthreads()
            weigh(weights, queries, tile, largest, total, result, start, first_row, context, window)
            cuda.syncthreads()  # the keys are used by all
            load_tile(tile, value_cache, table, start, end, row_size, column)
            cuda.syncthreads()
            add_values(result, weights, tile)
            cuda.syncthreads()  # the values are used by all
            start += KEYS
        store(out, result, total, first_rows[seq], first_row, num_rows, kv_head)

    return prefill
