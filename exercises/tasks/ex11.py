"""Tasks of exercise 11: keys that are cut, parts that are merged, a tile of queries, and the limit of a device."""

from __future__ import annotations

from collections.abc import Callable

from exercises.grader import Task
from exercises.tasks import ex11_other as other
from exercises.tasks import ex11_wrong as wrong
from exercises.tasks.ex11_checks import check_count, check_limit, check_map, check_merge, check_shares
from exercises.tasks.ex11_kernels import check_merge_parts, check_split, check_tile
from exercises.tasks.ex11_wrong import INF_INF, LARGEST, LOST, OVERFLOWS, READS_EMPTY, changed

ROUNDS = "    rounds = math.ceil(visible / step)\n    size = math.ceil(rounds / num_splits) * step\n"
FOUND = "max(0, min(size, visible - first))"

TASKS = [
    Task(
        id="11.1",
        kind="predict",
        title="count before you cut",
        points=10,
        answers={
            "blocks": int,
            "splits": int,
            "num_bytes": int,
            "floor_us": int,
            "waiting": int,
            "empty": list,
        },
        check=check_count,
        hints=(
            "How many places are there, and how many blocks for one sequence?",
            "132 * 3 places, 8 blocks. All blocks of all splits fit if 8 * splits is no more than the "
            "places. Bytes that are on their way are bandwidth times the time they take.",
            "396 // 8; 2 * 32768 * 8 * 128 * 2 bytes; divide by 4.8e12; 4.8e12 * 0.8e-6 / 132; 396 - 8 * n,"
            " not below 0.",
        ),
        wrong=(
            changed(
                "query heads", "a block for each query head", ("= 8, 132 * 3 // 8", "= 32, 132 * 3 // 8")
            ),
            changed("up", "rounded up", ("132 * 3 // 8", "50")),
            changed("one each", "one block at a time on a processor", ("132 * 3 // 8", "132 // 8")),
            changed("keys", "values are left out", ("= 2 * 32768", "= 32768")),
            changed("all", "of the whole GPU", ("0.8e-6 / 132", "0.8e-6")),
            changed("sequences", "a block for each sequence", ("[388, 332, 4, 0]", "[395, 388, 347, 332]")),
        ),
        other=other.COUNT,
    ),
    Task(
        id="11.2",
        kind="build",
        title="the merge",
        points=15,
        answers={"merge": Callable},
        check=check_merge,
        hints=(
            "A part weighs as much as the sum of its exponentials. You are given the logarithm of that sum.",
            "weights = exp(log_sums - largest). The result is the weighted mean, the log sum is largest + "
            "log(sum of weights). Leave out what has the weight 0, do not multiply it.",
            "top = log_sums.amax(0), and 0 where that is -inf. kept = torch.where((weights > 0)[..., None],"
            " results, 0.0). Divide by the total, or by 1 where it is 0; return top + total.log().",
        ),
        wrong=(
            changed(
                "mean",
                "parts are averaged",
                ("return mixed / share, top", "return results.mean(0), top"),
            ),
            changed(
                "logs",
                "weighted by the log sums",
                (
                    "return mixed / share, top",
                    "return (log_sums[..., None] * results).sum(0) / log_sums.sum(0)[:, None], top",
                ),
            ),
            changed(
                "no maximum", OVERFLOWS, ("top = log_sums.amax(0)", "top = torch.zeros_like(log_sums[0])")
            ),
            changed(
                "multiplied away",
                READS_EMPTY,
                ("kept = torch.where((weights > 0)[..., None], results, 0.0)", "kept = results"),
            ),
            changed("infinite", INF_INF, ("top = torch.where(top == -math.inf, 0.0, top)", "top = top + 0")),
            changed("top", LARGEST, ("top + total.log()", "top + 0 * total")),
            changed("sum", "the largest is not added back", ("top + total.log()", "total.log()")),
        ),
        other=other.MERGE,
    ),
    Task(
        id="11.3",
        kind="bug",
        title="who gets which keys",
        points=15,
        answers={"shares": Callable},
        check=check_shares,
        hints=(
            "Add up what the four splits of 1100 tokens get.",
            "size is rounded down, so num_splits * size is less than there is. Round up; the last splits "
            "get less.",
            "How many rounds of step keys are there (rounded up), and how many rounds for each split "
            "(rounded up)? size = that many rounds, times step.",
        ),
        wrong=(
            changed(
                "the last one",
                "one split takes the rest",
                (ROUNDS, "    size = visible // (num_splits * step) * step\n"),
                (FOUND, "max(0, visible - first if split == num_splits - 1 else size)"),
            ),
            changed(
                "keys",
                "a split begins within a round",
                (ROUNDS, "    size = math.ceil(visible / num_splits)\n"),
            ),
            changed("negative", "a number of keys below zero", (FOUND, "min(size, visible - first)")),
            changed("from 0", "the window is forgotten", ("seq_len - visible + first", "first")),
            changed("whole splits", "reading past the sequence", (FOUND, "size")),
            changed("down", LOST, ("math.ceil(visible / step)", "visible // step")),
        ),
        other=other.SHARES,
    ),
    Task(
        id="11.4",
        kind="kernel",
        title="decode a split",
        points=20,
        answers={"decode_split": Callable},
        check=check_split,
        hints=(
            "It is the loop of task 08.7 with a tile of one key. Only the first and the last position are "
            "new.",
            "Each lane multiplies two numbers of the query with two of the key; warp_sum makes the score. "
            "Carry the largest score, the sum, and two numbers of the values. All lanes run through the "
            "same positions.",
            "size = (seq_len + splits - 1) // splits; for position in range(split * size, min((split + 1) *"
            " size, seq_len)). Afterwards, if total > 0: divide by total, and the log sum is largest + "
            "math.log(total). Lane 0 writes it.",
        ),
        wrong=wrong.SPLIT,
        other=other.SPLIT,
    ),
    Task(
        id="11.5",
        kind="kernel",
        title="merge the splits",
        points=15,
        answers={"merge_parts": Callable},
        check=check_merge_parts,
        hints=(
            "Two loops over the parts: the first finds the largest log sum, the second adds up.",
            "Skip a part whose log sum is -inf: neither its exponential nor its row is needed. At the end "
            "divide, if there is something to divide by.",
            "weight = math.exp(log_sum - top); total += weight; mixed += weight * partial[seq, head, part, "
            "d]; at the end mixed / total if total > 0 else float32(0).",
        ),
        wrong=wrong.MERGE_PARTS,
        other=other.MERGE_PARTS,
    ),
    Task(
        id="11.6",
        kind="map",
        title="where it is in vLLM",
        points=5,
        answers={"splits_in_v0": str, "decides": str, "merges": str, "chunks": str, "takes": list},
        check=check_map,
        hints=(
            "All symbols stand in the column vLLM. For V0's rule, ask the two questions of each batch in "
            "turn.",
            "v2 splits. Above 8192 tokens it is always v2; else one partition, or more than 512 blocks, "
            "makes it v1.",
            "paged_attention_v2, PagedAttention.forward_decode, merge_attn_states, context_attention_fwd. "
            "32 * 32 is above 512.",
        ),
        wrong=(
            changed("first", "v1 splits", ('"paged_attention_v2"', '"paged_attention_v1"')),
            changed(
                "caller", "the caller of the kernels", ('"merge_attn_states"', '"FlashAttentionImpl.forward"')
            ),
            changed(
                "exchanged", "v1 and v2 exchanged", ('["v1", "v2", "v1", "v2"]', '["v2", "v1", "v2", "v1"]')
            ),
            changed(
                "long",
                "long sequences always split",
                ('["v1", "v2", "v1", "v2"]', '["v1", "v2", "v2", "v2"]'),
            ),
        ),
        other=other.MAP,
    ),
    Task(
        id="11.7",
        kind="measure",
        title="what is the limit?",
        points=10,
        answers={"limit": Callable, "per_byte": list, "queries": int},
        check=check_limit,
        hints=(
            "Computing and moving go on at the same time.",
            "The limit is the longer of operations / peak and num_bytes / bandwidth. A number is 2 bytes "
            "and takes part in 2 operations for each query head of its group.",
            "per_byte is the size of the group, 32 / 8 and 32 / 1. The ridge is at 67e12 / 4.8e12 "
            "operations per byte, and each query that shares a reading adds 4: round up.",
        ),
        wrong=(
            changed(
                "sum", "both times are added", ("return max(computing, moving)", "return computing + moving")
            ),
            changed(
                "min", "the shorter time", ("return max(computing, moving)", "return min(computing, moving)")
            ),
            changed("one", "one operation per number", ("[4.0, 32.0]", "[2.0, 16.0]")),
            changed("number", "per number, not per byte", ("[4.0, 32.0]", "[8.0, 64.0]")),
            changed("ridge", "the group is forgotten", ("67e12 / 4.8e12 / 4", "67e12 / 4.8e12")),
        ),
        other=other.LIMIT,
    ),
    Task(
        id="11.8",
        kind="kernel",
        title="a tile of queries",
        points=10,
        answers={"attend_tile": Callable},
        check=check_tile,
        hints=(
            "Two steps, over and over, with a barrier after each: all warps fill the tile, each warp uses "
            "it for its query.",
            "The block walks up to what its last query sees; a query uses the keys of the tile up to its "
            "own position. A warp without a query fills with the others and writes nothing.",
            "stop = seq_len - num_queries + min(first + 4, num_queries). In the tile that begins at start, "
            "warp w brings keys w and w + 4 if they are below stop; a query uses min(8, seen - start) of "
            "them.",
        ),
        wrong=wrong.TILE,
        other=other.TILE,
    ),
]
