"""Tasks of exercise 10 from the decode on."""

from __future__ import annotations

from collections.abc import Callable

from exercises.grader import Task, WrongAnswer
from exercises.tasks import ex10_other as other
from exercises.tasks.ex10_decode import check_decode
from exercises.tasks.ex10_map import check_map, check_sectors
from exercises.tasks.ex10_scores import check_group

DECODE_HEAD = "kv_head = head // (query.shape[1] // key_cache.shape[2])"
SHARED = "        weights[thread] = weight\n"
SUM = "        total = total * shrink + block_sum(weight, scratch)\n"
KEY_BLOCK = "block, offset = block_tables[seq, position // block_size], position % block_size"
VALUE_BLOCK = "block, offset = block_tables[seq, (start + i) // block_size], (start + i) % block_size"
BEGIN = "    largest, total, mixed = float32(-3e38), float32(0), float32(0)\n"
START, LOOP = "    start = 0\n", "    while start < seq_len:\n"
LOCAL = "    sums = cuda.local.array(4, float32)\n"
ZERO_SUMS = "        for g in range(group):\n            sums[g] = 0\n"
BEST = 'best = [way for way in "abcde" if count(way, 128, torch.float16)[1] == least_sectors(32, 128, 2)]'

LATER = [
    Task(
        id="10.5",
        kind="kernel",
        title="the decode",
        points=25,
        answers={"decode": Callable},
        check=check_decode,
        hints=(
            "Task 08.7 had the three numbers that go from tile to tile. Here every thread has its own copy "
            "of the largest "
            "score and of the sum, and its own dimension of the mixture.",
            "Per tile: a score per thread (very low past the end), the block's largest, a weight per thread "
            "into shared "
            "memory, the block's sum. Then thread d adds weights[i] * value[i, d] over the tile. block_sum "
            "has the barriers "
            "that show the weights to all, and block_max those that keep them until all are done.",
            "largest = max(largest, block_max(score, scratch)); weights[thread] = weight; shrink = "
            "exp(before - largest); "
            "total = total * shrink + block_sum(weight, scratch); mixed = mixed * shrink + the tile's "
            "values; at the end "
            "out[seq, head, thread] = mixed / total for thread < head_dim.",
        ),
        wrong=(
            WrongAnswer(
                "remainder",
                "KV head by remainder",
                edits=((DECODE_HEAD, "kv_head = head % key_cache.shape[2]"),),
            ),
            WrongAnswer(
                "no rescale",
                "old sums are not rescaled",
                edits=(
                    ("total = total * shrink", "total = total"),
                    ("mixed = mixed * shrink", "mixed = mixed"),
                ),
            ),
            WrongAnswer(
                "half", "only the sum is rescaled", edits=(("mixed = mixed * shrink", "mixed = mixed"),)
            ),
            WrongAnswer(
                "afresh",
                "only the last tile counts",
                edits=(
                    (
                        BEGIN + START + LOOP,
                        START + LOOP + "    " + BEGIN,
                    ),
                ),
            ),
            WrongAnswer(
                "one on",
                "reading past the sequence",
                edits=(
                    ("        if position < seq_len:", "        if position <= seq_len:"),
                    ("if position < seq_len else", "if position <= seq_len else"),
                ),
            ),
            WrongAnswer("no scale", "the scale is left out", edits=(("score *= scale", "pass"),)),
            WrongAnswer("no total", "the mixture is not divided", edits=(("mixed / total", "mixed"),)),
            WrongAnswer(
                "keys", "keys are mixed", edits=(("weights[i] * value_cache", "weights[i] * key_cache"),)
            ),
            WrongAnswer(
                "idle threads",
                "threads without a key have weight",
                edits=(
                    ("start + thread, float32(-3e38)", "start + thread, float32(0)"),
                    (
                        "math.exp(score - largest) if position < seq_len else float32(0)",
                        "math.exp(score - largest)",
                    ),
                ),
            ),
            WrongAnswer(
                "first table",
                "everybody reads the first table",
                edits=(
                    (KEY_BLOCK, KEY_BLOCK.replace("seq,", "0,")),
                    (VALUE_BLOCK, VALUE_BLOCK.replace("seq,", "0,")),
                ),
            ),
            WrongAnswer(
                "bare exp",
                "the exponential overflows",
                edits=(
                    ("largest = max(largest, block_max(score, scratch))", "largest = float32(0)"),
                    ("float32(-3e38), float32(0), float32(0)", "float32(0), float32(0), float32(0)"),
                    (SHARED, "        cuda.syncthreads()\n" + SHARED),
                ),
            ),
            WrongAnswer("weights late", "a race", edits=((SHARED, ""), (SUM, SUM + SHARED))),
            WrongAnswer(
                "threads without a key leave",
                "a barrier that not all threads reach",
                edits=(("while start < seq_len:", "while start + thread < seq_len:"),),
            ),
            WrongAnswer("two passes", "keys are read twice", source=other.TWO_PASSES),
        ),
        other=other.OTHER_DECODE,
        part="attention",
    ),
    Task(
        id="10.6",
        kind="kernel",
        title="each key once",
        points=10,
        answers={"group_scores": Callable},
        check=check_group,
        hints=(
            "Turn the loops around: first the position and the dimension, then the heads of the group.",
            "A lane loads a number of the key into a variable and multiplies it with the query of every head "
            "of the group, into a "
            "sum per head.",
            "sums = cuda.local.array(4, float32), set to 0 for each position; number = key_cache[block, "
            "offset, kv_head, d]; "
            "sums[g] += query[kv_head * group + g, d] * number; then lanes_sum(sums[g], 32) per head.",
        ),
        wrong=(
            WrongAnswer(
                "a loop over heads outside", "a key is read for each query head", source=other.EACH_HEAD
            ),
            WrongAnswer(
                "a thread per key", "neighbouring threads touch far apart", source=other.GROUP_BY_THREAD
            ),
            WrongAnswer(
                "strided heads",
                "KV head by remainder",
                edits=(
                    (
                        "sums[g] += query[kv_head * group + g, d]",
                        "sums[g] += query[kv_head + g * key_cache.shape[2], d]",
                    ),
                    ("out[kv_head * group + g, position]", "out[kv_head + g * key_cache.shape[2], position]"),
                ),
            ),
            WrongAnswer("not set", "sums begin with anything", edits=((ZERO_SUMS, ""),)),
            WrongAnswer(
                "set once",
                "a sum goes on from key to key",
                edits=(
                    (ZERO_SUMS, ""),
                    (LOCAL, f"{LOCAL}    for g in range(4):\n        sums[g] = 0\n"),
                ),
            ),
            WrongAnswer(
                "first head",
                "one query head per KV head",
                edits=(("            if lane == 0:", "            if lane == 0 and g == 0:"),),
            ),
        ),
        other=other.OTHER_GROUP,
    ),
    Task(
        id="10.7",
        kind="map",
        title="where it is in vLLM",
        points=5,
        answers={"decodes": dict, "splits_keys": str, "tokens_first": str, "chooses_size": str},
        check=check_map,
        hints=(
            "Every answer stands in the column vLLM; the first column says which line is about what.",
            "V1 has no kernel of its own for decodes. A name with split is what it says; a shape is asked of "
            "a backend.",
            "paged_attention_v1 and FlashAttentionImpl.forward; PagedAttention.split_kv_cache; "
            "FlashAttentionBackend.get_kv_cache_shape; prepare_kernel_block_sizes.",
        ),
        wrong=(
            WrongAnswer(
                "the write",
                "writing taken for reading",
                edits=(("FlashAttentionImpl.forward", "FlashAttentionImpl.do_kv_cache_update"),),
            ),
            WrongAnswer(
                "exchanged",
                "the two layouts exchanged",
                edits=(
                    (
                        'splits_keys = "PagedAttention.split_kv_cache"',
                        'splits_keys = "FlashAttentionBackend.get_kv_cache_shape"',
                    ),
                    (
                        'tokens_first = "FlashAttentionBackend.get_kv_cache_shape"',
                        'tokens_first = "PagedAttention.split_kv_cache"',
                    ),
                ),
            ),
            WrongAnswer(
                "the view",
                "the view taken for the choice",
                edits=(("prepare_kernel_block_sizes", "map_kv_caches_to_kernel_blocks"),),
            ),
        ),
        other=(
            'decodes = dict(V1="FlashAttentionImpl.forward", V0="paged_attention_v1")\n'
            'splits_keys, chooses_size = "PagedAttention.split_kv_cache", "prepare_kernel_block_sizes"\n'
            'tokens_first = "FlashAttentionBackend" + ".get_kv_cache_shape"'
        ),
    ),
    Task(
        id="10.8",
        kind="measure",
        title="sectors by layout",
        points=10,
        answers={"least_sectors": Callable, "best": list, "worst_times": int},
        check=check_sectors,
        hints=(
            "How many bytes are the keys, and how many does a sector hold?",
            "num_tokens * head_dim * itemsize // 32. The second number that count gives is the sectors of "
            "keys.",
            "count(way, 128, torch.float16)[1] for each of a to e: keep those that equal least_sectors(32, "
            "128, 2), and divide "
            "the largest by it.",
        ),
        wrong=(
            WrongAnswer("numbers", "a sector per number", edits=(("head_dim * itemsize // 32", "head_dim"),)),
            WrongAnswer(
                "32 numbers",
                "a sector of 32 numbers",
                edits=(
                    ("head_dim * itemsize // 32", "head_dim // 32"),
                    (
                        BEST,
                        "best = ['c', 'e']",
                    ),
                    ("// least_sectors(32, 128, 2)", "// 256"),
                ),
            ),
            WrongAnswer(
                "V0's",
                "the layout alone",
                edits=(
                    (
                        BEST,
                        "best = ['d', 'e']",
                    ),
                ),
            ),
            WrongAnswer(
                "wide",
                "wide loads alone",
                edits=(
                    (
                        BEST,
                        "best = ['b', 'c', 'e']",
                    ),
                ),
            ),
            WrongAnswer(
                "requests",
                "requests instead of sectors",
                edits=(
                    (
                        "max(count(way, 128, torch.float16)[1] for",
                        "8 * min(count(way, 128, torch.float16)[1] for",
                    ),
                ),
            ),
        ),
        other=other.OTHER_SECTORS,
    ),
]
