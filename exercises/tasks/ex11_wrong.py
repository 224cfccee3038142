"""Known-wrong kernels of exercise 11: the solution with some lines changed."""

from __future__ import annotations

from exercises.grader import WrongAnswer


def changed(name: str, misconception: str, *edits: tuple[str, str]) -> WrongAnswer:
    """The solution with some lines changed."""
    return WrongAnswer(name, misconception, edits=edits)


LOST = "the rest of a division is lost"
OVERFLOWS = "the exponential overflows"
INF_INF = "minus infinity minus minus infinity"
READS_EMPTY = "an empty part's results are used"
LARGEST = "the largest is taken for the log sum"
RANGE = "range(split * size, min((split + 1) * size, seq_lens[seq]))"
SKIPPED = "        if log_sums[seq, head, part] != -math.inf:\n"
USED = "\n        cuda.syncthreads()\n    if first + warp < num_queries:"
FILLED = "        cuda.syncthreads()\n        for i in range(min(8, seen - start)):"

RUNNING = """
@cuda.jit
def merge_parts(out, partial, log_sums):
    seq, head, d = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    top, total, mixed = float32(-math.inf), float32(0), float32(0)
    for part in range(log_sums.shape[2]):
        above = max(top, log_sums[seq, head, part])
        shrink, weight = math.exp(top - above), math.exp(log_sums[seq, head, part] - above)
        total, mixed = total * shrink + weight, mixed * shrink
        if weight != 0:
            mixed += weight * partial[seq, head, part, d]
        top = above
    out[seq, head, d] = mixed / total
"""

SPLIT = (
    changed("down", LOST, ("(seq_lens[seq] + cuda.gridDim.z - 1)", "seq_lens[seq]")),
    changed("all keys", "every split reads all keys", (RANGE, "range(seq_lens[seq])")),
    changed(
        "whole splits",
        "reading past the sequence",
        (RANGE, "range(split * size, (split + 1) * size)"),
    ),
    changed(
        "as it is",
        "not divided by the sum",
        (
            "low / total, high / total, largest + math.log(total)",
            "low, high, largest + math.log(total)",
        ),
    ),
    changed("sum", "a sum, not its logarithm", ("largest + math.log(total)", "total")),
    changed("largest", LARGEST, ("largest + math.log(total)", "largest")),
    changed(
        "empty",
        "an empty split is divided by nothing",
        ("    if total > 0:\n", "    if total >= 0:\n"),
    ),
    changed(
        "remainder",
        "KV head by remainder",
        ("head // (query.shape[1] // key_cache.shape[2])", "head % key_cache.shape[2]"),
    ),
    changed("unscaled", "the scale is left out", ("warp_sum(product) * scale", "warp_sum(product)")),
    changed(
        "no rescale",
        "old sums are not rescaled",
        ("total = total * shrink", "total = total"),
        ("low = low * shrink", "low = low"),
        ("high = high * shrink", "high = high"),
    ),
    changed("bare", OVERFLOWS, ("above = max(largest, score)", "above = float32(0)")),
)

MERGE_PARTS = (
    changed(
        "equal",
        "parts are averaged",
        ("weight = math.exp(log_sums[seq, head, part] - top)", "weight = 1"),
    ),
    changed("no maximum", OVERFLOWS, ("top = max(top, log_sums[seq, head, part])", "top = float32(0)")),
    changed("no question", READS_EMPTY, (SKIPPED, "        if top != -math.inf:\n")),
    WrongAnswer("as it goes", INF_INF, source=RUNNING),
    changed("always divided", "nothing divided by nothing", (" if total > 0 else float32(0)", "")),
    changed("zero", "the largest starts at 0", ("top = float32(-math.inf)", "top = float32(0)")),
)

TILE = (
    changed("before", "a barrier is missing", (FILLED, FILLED.replace("        cuda.syncthreads()\n", ""))),
    changed("after", "a barrier is missing", (USED, "\n    if first + warp < num_queries:")),
    changed(
        "left early",
        "a barrier that not all threads reach",
        (
            "    for start in range(0, stop, 8):",
            "    if first + warp >= num_queries:\n        return\n    for start in range(0, stop, 8):",
        ),
    ),
    changed(
        "all see all",
        "a tile's rows all see as much",
        ("min(8, seen - start)", "min(8, stop - start)"),
    ),
    changed("own", "one key too few", ("num_queries + row + 1", "num_queries + row")),
    changed(
        "each its own",
        "every query fetches its own keys",
        (
            "keys[i, lane] +",
            "key_cache[table[(start + i) // block_size], (start + i) % block_size, kv_head, lane] +",
        ),
    ),
    changed(
        "remainder",
        "KV head by remainder",
        ("head // (query.shape[1] // key_cache.shape[2])", "head % key_cache.shape[2]"),
    ),
)
