"""Misconceptions as CUDA kernels, and what each is caught by.

The last two columns: the check of `cuda_checks`, and the kind of what it raises. RaceError, BarrierError,
DeadlockError, BoundsError and AlignmentError come from the interpreter, the others from comparing with float64. A
missing barrier gives the right numbers on most days; no comparison finds it.
"""

from __future__ import annotations

from tests.kernels.mutants.world import KernelMutant as M

DECODE_PLAIN = (
    M(
        "what one thread wrote to shared memory, all see at once",
        "decode_plain",
        "* scale\n        cuda.syncthreads()",
        "* scale",
        ("plain", "RaceError"),
    ),
    M(
        "a reduction may begin before all have put in their number",
        "softmax",
        "scratch[thread] = x\n cuda.syncthreads()\n while half > 0:\n if thread < half:\n scratch[thread] = max",
        "scratch[thread] = x\n    while half > 0:\n        if thread < half:\n            scratch[thread] = max",
        ("plain", "RaceError"),
    ),
    M(
        "the rounds of a reduction need no barrier between them",
        "softmax",
        "max(scratch[thread], scratch[thread + half])\n cuda.syncthreads()",
        "max(scratch[thread], scratch[thread + half])",
        ("plain", "RaceError"),
    ),
    M(
        "scratch memory can be used again as soon as one has the result",
        "softmax",
        "cuda.syncthreads()  # all have read it, `scratch` may be used again",
        "pass",
        ("plain", "RaceError"),
    ),
    M(
        "a sum may begin before all have put in their number",
        "softmax",
        "scratch[thread] = x\n cuda.syncthreads()\n while half > 0:\n if thread < half:\n scratch[thread] +=",
        "scratch[thread] = x\n    while half > 0:\n        if thread < half:\n            scratch[thread] +=",
        ("plain", "RaceError"),
    ),
    M(
        "the rounds of a sum need no barrier between them",
        "softmax",
        "scratch[thread] += scratch[thread + half]\n cuda.syncthreads()",
        "scratch[thread] += scratch[thread + half]",
        ("plain", "RaceError"),
    ),
    M(
        "the next tile may start while the sum is being read",
        "softmax",
        "total = scratch[0]\n cuda.syncthreads()",
        "total = scratch[0]",
        ("plain", "RaceError"),
    ),
    M(
        "threads without a key have no business in a reduction",
        "decode_plain",
        "before, largest = largest, max(largest, block_max(score, scratch))",
        "before = largest\n            if position < seq_len:\n"
        "                largest = max(largest, block_max(score, scratch))",
        ("plain", "RaceError"),
    ),
    M(
        "threads without a dimension of the result may leave",
        "decode_plain",
        "if thread < head_dim:\n q[thread]",
        "if thread >= head_dim:\n            return\n        if thread < head_dim:\n            q[thread]",
        ("plain", "BarrierError"),
    ),
    M(
        "the newest token is at position seq_len",
        "decode_plain",
        "seq_lens[seq]",
        "seq_lens[seq] + 1",
        ("plain", "NotANumber"),
    ),
    M(
        "a key too many may be read if its weight is 0",
        "decode_plain",
        "if position < seq_len:\n block, offset",
        "if position <= seq_len:\n                block, offset",
        ("plain", "BoundsError"),
    ),
    M(
        "a larger score changes only what comes after it",
        "decode_plain",
        "result *= rescale",
        "pass",
        ("plain", "WrongValue"),
    ),
    M(
        "kv heads are dealt out to the query heads in turn",
        "decode_plain",
        "head // (query.shape[1] // key_cache.shape[2])",
        "head % key_cache.shape[2]",
        ("plain", "WrongValue"),
    ),
    M(
        "a tile begins where a block begins",
        "decode_plain",
        "(start + i) // block_size], (start + i) % block_size",
        "(start + i) // block_size], i % block_size",
        ("plain", "NotANumber"),
    ),
    M(
        "a tile is always full",
        "decode_plain",
        "min(threads, seq_len - start)",
        "threads",
        ("plain", "NotANumber"),
    ),
    M(
        "a window of w leaves w keys beside the token's own",
        "decode_plain",
        "max(0, seq_len - window)",
        "max(0, seq_len - window - 1)",
        ("plain", "WrongValue"),
    ),
)

DECODE_SPLIT = (
    M(
        "the block table is there once it has been asked for",
        "decode_split",
        "i += cuda.blockDim.x\n    cuda.syncthreads()",
        "i += cuda.blockDim.x",
        ("split", "RaceError"),
    ),
    M(
        "a warp may read what the other warps found without waiting",
        "decode_split",
        "= result[g * numbers + j]\n        cuda.syncthreads()",
        "= result[g * numbers + j]",
        ("split", "RaceError"),
    ),
    M(
        "only lanes with a key need to take part in a shuffle",
        "decode_split",
        "score = lanes_sum(dot(q, g * numbers, keys, u * words), lanes)\n"
        " scores[g * unroll + u] = score if is_key else LOWEST",
        "scores[g * unroll + u] = (\n"
        "    lanes_sum(dot(q, g * numbers, keys, u * words), lanes) if is_key else LOWEST)",
        ("split", "DeadlockError"),
    ),
    M(
        "a lane group past the end repeats a key, and that does no harm",
        "decode_split",
        "is_key = first + u * rows + own < count",
        "is_key = first + u * rows < count",
        ("split", "WrongValue"),
    ),
    M(
        "the last round is as long as the others",
        "decode_split",
        "min(first + u * rows + own, count - 1)",
        "first + u * rows + own",
        ("split", "NotANumber"),
    ),
    M(
        "a split begins where a block begins",
        "decode_split",
        "skew = first % block_size",
        "skew = 0",
        ("split", "WrongValue"),
    ),
    M(
        "a window of w leaves w keys beside the token's own, in a split too",
        "decode_split",
        "visible = min(seq_len, window)",
        "visible = min(seq_len, window + 1)",
        ("split", "BoundsError"),
    ),
    M(
        "a larger score changes only the sum of the weights",
        "softmax",
        "result[g * num_results + j] *= rescale",
        "pass",
        ("split", "WrongValue"),
    ),
    M(
        "results of lanes can be added as they are",
        "softmax",
        "own * mine + cuda.shfl_xor_sync(ALL_LANES, own, distance) * theirs",
        "own + cuda.shfl_xor_sync(ALL_LANES, own, distance)",
        ("split", "WrongValue"),
    ),
    M(
        "a split without keys counts as one whose weights sum to 1",
        "decode_split",
        "log_sums[seq, first_head + thread, split] = LOWEST",
        "log_sums[seq, first_head + thread, split] = ZERO",
        ("split", "NotANumber"),
    ),
    M(
        "a weight of 0 removes whatever it is multiplied with",
        "merge",
        "if log_sum != LOWEST:",
        "if True:",
        ("split", "NotANumber"),
    ),
    M(
        "every split weighs the same",
        "merge",
        "weight = exp2(log_sum - top)",
        "weight = float32(1)",
        ("split", "WrongValue"),
    ),
    M(
        "the largest logarithm need not be taken out before the powers",
        "merge",
        "weight = exp2(log_sum - top)",
        "weight = exp2(log_sum)",
        ("large scores", "NotANumber"),
    ),
    M(
        "16 bytes can be loaded from anywhere",
        "rows",
        "load_16_bytes(array, offset + i * pitch)",
        "load_16_bytes(array, offset + i * pitch + 1)",
        ("split", "AlignmentError"),
    ),
    M(
        "a block id is 32 bits, so an address is",
        "addressing",
        "return (int64(block) * block_size + offset) * row_size",
        "return int32((block * block_size + offset) * row_size)",
        ("address", "WrongValue"),
        more=(("from numba import int64", "from numba import int32"),),
    ),
)

PREFILL = (
    M(
        "a tile of keys is there once it has been asked for",
        "prefill",
        "load_tile(tile, key_cache, table, start, end, row_size, column)\n cuda.syncthreads()",
        "load_tile(tile, key_cache, table, start, end, row_size, column)",
        ("prefill", "RaceError"),
    ),
    M(
        "the values may replace the keys while others still use them",
        "prefill",
        "cuda.syncthreads()  # the keys are used by all",
        "pass",
        ("prefill", "RaceError"),
    ),
    M(
        "a tile of values is there once it has been asked for",
        "prefill",
        "load_tile(tile, value_cache, table, start, end, row_size, column)\n cuda.syncthreads()",
        "load_tile(tile, value_cache, table, start, end, row_size, column)",
        ("prefill", "RaceError"),
    ),
    M(
        "the next keys may replace the values while others still use them",
        "prefill",
        "cuda.syncthreads()  # the values are used by all",
        "pass",
        ("prefill", "RaceError"),
    ),
    M(
        "the mask starts at the left edge, context or not",
        "prefill",
        "distance = context + (first_row",
        "distance = (first_row",
        ("prefill", "WrongValue"),
    ),
    M(
        "a query does not see its own key",
        "prefill",
        "distance >= 0 and",
        "distance > 0 and",
        ("prefill", "WrongValue"),
    ),
    M(
        "a window of w leaves w keys beside each query's own",
        "prefill",
        "distance < window",
        "distance <= window",
        ("prefill", "WrongValue"),
    ),
    M(
        "a tile of rows is always full",
        "prefill",
        "if first + r < num_rows:",
        "if True:",
        ("prefill", "RaceError"),
    ),
    M(
        "the last query of a tile sees as far as the first",
        "prefill",
        "(min(first_row + tile_rows, num_rows) - 1) // group + 1",
        "first_row // group + 1",
        ("prefill", "WrongValue"),
    ),
)

WRITING = (
    M(
        "slot -1 is a slot like any other",
        "cache_write",
        "if slot >= 0:",
        "if True:",
        ("write", "BoundsError"),
    ),
    M(
        "tokens are stored in the order in which they come",
        "cache_write",
        "value_cache[slot, i] = value[token, i]",
        "value_cache[token, i] = value[token, i]",
        ("write", "WrongValue"),
    ),
    M(
        "the threads of a launch are as many as the elements",
        "copy_blocks",
        "if i < key_cache.shape[1]:",
        "if True:",
        ("copy", "BoundsError"),
    ),
    M(
        "pairs can be copied in any order",
        "copy_blocks",
        "range(pairs.shape[0])",
        "range(pairs.shape[0] - 1, -1, -1)",
        ("copy", "WrongValue"),
    ),
    M(
        "each block of threads takes a pair",
        "copy_blocks",
        "for pair in range(pairs.shape[0]):",
        "for pair in range(cuda.blockIdx.x, pairs.shape[0], cuda.gridDim.x):",
        ("copy", "WrongValue"),
    ),
)

MUTANTS = DECODE_PLAIN + DECODE_SPLIT + PREFILL + WRITING
