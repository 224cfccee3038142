"""Tasks of exercise 10: the cache write, scores over pages, and the decode as one kernel."""

from __future__ import annotations

from collections.abc import Callable

from exercises.grader import Task, WrongAnswer
from exercises.tasks import ex10_other as other
from exercises.tasks.ex10_checks import check_numbers, check_offsets, check_write
from exercises.tasks.ex10_later import LATER
from exercises.tasks.ex10_scores import check_scores

HEAD = "kv_head = head // (query.shape[0] // key_cache.shape[2])"
PLACE = "block, offset = slot // block_size, slot % block_size"
START = "out[position] = numba.int64(block) * block_stride + offset * row_size"

TASKS = [
    Task(
        id="10.1",
        kind="predict",
        title="numbers before a kernel runs",
        points=10,
        answers={
            "written": list,
            "lands": list,
            "first_element": int,
            "in_32_bits": int,
            "kernel_place": list,
            "slot": int,
        },
        check=check_numbers,
        hints=(
            "Slot -1 is no slot. In Python -1 // 4 is -1 and -1 % 4 is 3; index -1 is the last.",
            "A block has 16 * 2 * 8 * 128 elements. A number above 2**31 - 1 comes out 2**32 too small.",
            "Slot 5 is block 1, offset 1. The manager's block 3 begins at slot 24, so its offset 5 is slot "
            "29: cut that "
            "by 4.",
        ),
        wrong=(
            WrongAnswer(
                "99 too", "-1 used as an index", edits=(("[[1, 1, 10]]", "[[1, 1, 10], [2, 3, 99]]"),)
            ),
            WrongAnswer(
                "slot 0", "-1 taken for slot 0", edits=(("[[1, 1, 10]]", "[[0, 0, 99], [1, 1, 10]]"),)
            ),
            WrongAnswer("as in C", "division towards zero", edits=(("lands = [2, 3]", "lands = [0, -1]"),)),
            WrongAnswer(
                "keys", "values are left out", edits=(("65537 * 16 * 2 * 8 * 128", "65537 * 16 * 8 * 128"),)
            ),
            WrongAnswer(
                "fits", "a wrapped number is still right", edits=(("first_element - 2**32", "first_element"),)
            ),
            WrongAnswer("block 6", "the manager's offset in a kernel's block", edits=(("[7, 1]", "[6, 5]"),)),
            WrongAnswer("block 3", "the manager's id in the kernel", edits=(("[7, 1]", "[3, 1]"),)),
        ),
        other=other.OTHER_NUMBERS,
    ),
    Task(
        id="10.2",
        kind="kernel",
        title="the cache write",
        points=15,
        answers={"write": Callable},
        check=check_write,
        hints=(
            "A row is num_kv_heads * head_dim numbers that lie one after another. Which thread takes which "
            "of them?",
            "Thread t takes numbers t, t + 32, t + 64, ...; number i belongs to head i // head_dim, "
            "dimension i % head_dim.",
            "slot = slot_mapping[cuda.blockIdx.x]; return if it is negative; block, offset = slot // "
            "block_size, slot % "
            "block_size; i = cuda.threadIdx.x; while i is in the row: copy a key and a value; i += "
            "cuda.blockDim.x.",
        ),
        wrong=(
            WrongAnswer("no check", "-1 used as an index", edits=(("if slot < 0:", "if slot < -1:"),)),
            WrongAnswer(
                "slot 0", "padding goes to slot 0", edits=(("        return\n", "        slot = 0\n"),)
            ),
            WrongAnswer(
                "once",
                "a thread for each number",
                edits=(("while i < key.shape[1]", "if i < key.shape[1]"), ("i += cuda.blockDim.x", "pass")),
            ),
            WrongAnswer(
                "keys",
                "values are not written",
                edits=(("value_cache[block, offset, head, d] = value[token, head, d]", "pass"),),
            ),
            WrongAnswer(
                "first dimension",
                "an offset from another block size",
                edits=(
                    (
                        "block_size, head_dim = key_cache.shape[1]",
                        "block_size, head_dim = key_cache.shape[0]",
                    ),
                ),
            ),
            WrongAnswer("a chunk per thread", "neighbouring threads touch far apart", source=other.CHUNKS),
        ),
        other=other.OTHER_WRITE,
    ),
    Task(
        id="10.3",
        kind="kernel",
        title="scores of one query",
        points=15,
        answers={"scores": Callable},
        check=check_scores,
        hints=(
            "A warp takes a position, and lane l the numbers l, l + 32, ... of its key.",
            "Positions go warp, warp + 2, ...: the block has two warps. The loop over positions is the same "
            "for all lanes of a "
            "warp, so lanes_sum is called by all of them.",
            "kv_head = head // (num_heads // num_kv_heads). Per position: score += query[head, d] * "
            "key_cache[block, offset, "
            "kv_head, d] for d = lane, lane + 32, ...; score = lanes_sum(score, 32); lane 0 writes score * "
            "scale.",
        ),
        wrong=(
            WrongAnswer(
                "remainder", "KV head by remainder", edits=((HEAD, "kv_head = head % key_cache.shape[2]"),)
            ),
            WrongAnswer("no scale", "the scale is left out", edits=(("score * scale", "score"),)),
            WrongAnswer(
                "one on",
                "reading past the sequence",
                edits=(("while position < seq_len", "while position <= seq_len"),),
            ),
            WrongAnswer(
                "idle lanes",
                "not all lanes call lanes_sum",
                edits=(
                    (
                        "        score = lanes_sum(score, 32)\n",
                        "        if lane < head_dim:\n            score = lanes_sum(score, 32)\n",
                    ),
                ),
            ),
            WrongAnswer("no sum", "one lane's share", edits=(("score = lanes_sum(score, 32)", "pass"),)),
            WrongAnswer(
                "one round",
                "head_dim ends at 32",
                edits=(("while d < head_dim", "while d < min(head_dim, 32)"),),
            ),
            WrongAnswer(
                "no table",
                "a position is a slot",
                edits=(("block_table[position // block_size]", "position // block_size"),),
            ),
            WrongAnswer("a thread per key", "neighbouring threads touch far apart", source=other.BY_THREAD),
        ),
        other=other.OTHER_SCORES,
    ),
    Task(
        id="10.4",
        kind="bug",
        title="a cache of more than 4 GiB",
        points=10,
        answers={"row_starts": Callable},
        check=check_offsets,
        hints=(
            "The second table's blocks are far from the beginning. Which sign has the offset, and by how "
            "much is it off?",
            "numba.int32(...) keeps the lower 32 bits. A product of two ints is an int in C, whatever it is "
            "stored into.",
            "Widen a factor before the product: numba.int64(block) * block_stride + offset * row_size.",
        ),
        wrong=(
            WrongAnswer(
                "after the product",
                "widened too late",
                edits=(
                    (
                        START,
                        "out[position] = numba.int64(numba.int32(block * block_stride)) + offset * row_size",
                    ),
                ),
            ),
            WrongAnswer(
                "without a sign",
                "unsigned only moves the edge",
                edits=((START, "out[position] = (block * block_stride + offset * row_size) & 0xFFFFFFFF"),),
            ),
            WrongAnswer(
                "as a float",
                "a float cannot hold it",
                edits=(
                    (
                        START,
                        "out[position] = int(float32(float32(block * block_stride) + offset * row_size))",
                    ),
                ),
            ),
        ),
        other=other.OTHER_STARTS,
    ),
    *LATER,
]
