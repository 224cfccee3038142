"""Tasks of exercise 09: kernels from a guard to a product over pages, and what they cost."""

from __future__ import annotations

from collections.abc import Callable

from exercises.grader import Task, WrongAnswer
from exercises.tasks import ex09_other as other
from exercises.tasks.ex09_checks import check_count, check_rows, check_sectors, check_slots, check_write
from exercises.tasks.ex09_reduce import check_softmax, check_stats, check_transpose
from exercises.tasks.ex09_warps import check_dots, check_online, check_pages


def changed(name: str, misconception: str, *edits: tuple[str, str]) -> WrongAnswer:
    """The solution with some lines changed."""
    return WrongAnswer(name, misconception, edits=edits)


GUARD = "the guard is missing or one off"
FAR = "neighbouring threads read far apart"
BARRIER = "a barrier that not all threads reach"
TREE_TOP = "            sums[thread] += sums[thread + half]\n        cuda.syncthreads()"
SHUFFLED = "            x += cuda.shfl_xor_sync(0xFFFFFFFF, x, distance)"

TASKS = [
    Task(
        id="09.1",
        kind="predict",
        title="count before you run",
        points=8,
        answers={"blocks": int, "idle": int, "sectors": list, "passes": list, "barriers": int},
        check=check_count,
        hints=(
            "Blocks are whole: 100 positions need the next multiple of 32. A sector has eight float32 numbers.",
            "For sectors: into how many groups of eight do the 32 numbers fall? For passes: number modulo 32 "
            "is the bank, and a bank serves one word per pass, to all who want it.",
            "2 t reaches 62, so eight groups; 16 t gives each lane its own. 2 t meets each even bank with two "
            "words; 33 t is t modulo 32. 64 halves six times, and one barrier comes before.",
        ),
        wrong=(
            changed("rounded down", "blocks rounded down", ("blocks, idle = 4, 28", "blocks, idle = 3, 0")),
            changed("one per lane", "a sector per lane", ("[4, 4, 8, 32, 1]", "[32, 32, 32, 32, 1]")),
            changed(
                "33 collide", "a bank conflict from any distance", ("[1, 1, 2, 1, 1]", "[1, 1, 2, 33, 1]")
            ),
            changed("six", "the first barrier is forgotten", ("barriers = 7", "barriers = 6")),
        ),
        other=other.COUNT,
    ),
    Task(
        id="09.2",
        kind="kernel",
        title="one thread, one position",
        points=8,
        answers={"slots_of": Callable},
        check=check_slots,
        hints=(
            "Which position is a thread's, counted over all blocks? And what do threads do for which there is none?",
            "cuda.grid(1) is the thread's place in the grid. Compare it with slots.shape[0] before anything else.",
            "position = cuda.grid(1); if position < slots.shape[0]: slots[position] = block_table[position // "
            "block_size] * block_size + position % block_size.",
        ),
        wrong=(
            changed("no guard", GUARD, ("if position < slots.shape[0]:", "if True:")),
            changed("one off", GUARD, ("if position < slots", "if position <= slots")),
            changed("one less", "the last one is left out", ("slots.shape[0]:", "slots.shape[0] - 1:")),
            changed(
                "the thread of the block",
                "the place in the block taken for the place in the grid",
                ("position = cuda.grid(1)", "position = cuda.threadIdx.x"),
            ),
            WrongAnswer("a loop", "one thread does it all", source=other.SLOTS_IN_A_LOOP),
            changed(
                "no table",
                "a position is a slot",
                ("block = block_table[position // block_size]", "block = position // block_size"),
            ),
            changed(
                "blocks of four",
                "an offset from another block size",
                ("block * block_size + position % block_size", "block * 4 + position % 4"),
            ),
        ),
        other=other.SLOTS,
    ),
    Task(
        id="09.3",
        kind="kernel",
        title="write into slots, and not for -1",
        points=10,
        answers={"write_slots": Callable},
        check=check_write,
        hints=(
            "Two guards, one for each dimension, and one question about the slot.",
            "i, token = cuda.grid(2). Leave alone what is past new.shape, read the slot, and write if it is "
            "not negative.",
            "if token < new.shape[0] and i < new.shape[1]: slot = slot_mapping[token]; if slot >= 0: "
            "cache[slot, i] = new[token, i].",
        ),
        wrong=(
            changed("-1 written", "-1 used as an index", ("if slot >= 0:", "if True:")),
            changed("one guard", GUARD, (" and i < new.shape[1]", "")),
            changed("the other guard", GUARD, ("token < new.shape[0] and ", "")),
            changed(
                "to slot 0",
                "padding is written into slot 0",
                ("slot = slot_mapping[token]", "slot = max(slot_mapping[token], 0)"),
            ),
            changed("positive slots", "slot 0 is taken for padding", ("if slot >= 0:", "if slot > 0:")),
            changed("in order", "a token is written where it stands", ("cache[slot, i]", "cache[token, i]")),
            changed("exchanged", "x and y exchanged", ("i, token = cuda.grid(2)", "token, i = cuda.grid(2)")),
        ),
        other=other.WRITE,
    ),
    Task(
        id="09.4",
        kind="kernel",
        title="which thread reads what",
        points=10,
        answers={"gather_rows": Callable},
        check=check_rows,
        hints=(
            "In the report, compare `sectors` with `requests`: each lane of a request has a sector of its own. "
            "What should the lanes of a warp read instead?",
            "Give a token to a warp instead of to a thread. Lane l takes the numbers l, l + 32, ... of the "
            "row. There are three warps, so warp w takes the tokens w, w + 3, ...",
            "warp, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32; for token in range(warp, out.shape[0], "
            "cuda.gridsize(1) // 32): for i in range(lane, out.shape[1], 32): copy one number.",
        ),
        wrong=(
            changed(
                "pieces",
                FAR,
                (
                    "for i in range(lane, out.shape[1], 32):",
                    "for i in range(2 * lane, min(2 * lane + 2, out.shape[1])):",
                ),
            ),
            changed(
                "one token each",
                "a warp takes one token and stops",
                (
                    "range(warp, out.shape[0], cuda.gridsize(1) // 32)",
                    "range(warp, min(warp + 1, out.shape[0]))",
                ),
            ),
            changed(
                "one round",
                "a row is no longer than a warp",
                ("for i in range(lane, out.shape[1], 32):", "for i in range(lane, lane + 1):"),
            ),
            changed(
                "all of it",
                "every thread does the whole",
                ("range(lane, out.shape[1], 32)", "range(out.shape[1])"),
            ),
            changed(
                "one more",
                "a step past the end",
                ("range(warp, out.shape[0],", "range(warp, out.shape[0] + 1,"),
            ),
        ),
        other=other.ROWS,
    ),
    Task(
        id="09.5",
        kind="measure",
        title="sectors",
        points=8,
        answers={"sectors_of": Callable, "alone_4": int, "alone_2": int},
        check=check_sectors,
        hints=(
            "In which sector does a byte lie that is b bytes behind the start?",
            "Lane t reads from byte (first + step * t) * itemsize on. Divide by 32, and count the different results.",
            "len({(first + step * lane) * itemsize // 32 for lane in range(32)}). A lane is alone when its "
            "step is a whole sector.",
        ),
        wrong=(
            changed(
                "bytes",
                "bytes that are used, not sectors",
                (
                    "len({(first + step * lane) * itemsize // 32 for lane in range(32)})",
                    "-(-32 * itemsize // 32)",
                ),
            ),
            changed("aligned", "every start is aligned", ("(first + step * lane)", "(step * lane)")),
            changed("floats", "every number has four bytes", ("* itemsize // 32", "* 4 // 32")),
            changed(
                "the same for 2",
                "every number has four bytes",
                ("alone_4, alone_2 = 8, 16", "alone_4, alone_2 = 8, 8"),
            ),
        ),
        other=other.SECTORS,
    ),
    Task(
        id="09.6",
        kind="kernel",
        title="a tile in between",
        points=12,
        answers={"transpose": Callable},
        check=check_transpose,
        hints=(
            "Both global accesses run along x: reading along the numbers of a key, writing along the tokens. "
            "Only the tile is read across.",
            "Each thread reads keys[first_token + y, first_dim + x] into tile[y, x]. After a barrier for all, "
            "it writes out[first_dim + y, first_token + x] from tile[x, y], with a guard of its own.",
            "Column x of a tile of 32 columns lies in one bank. A tile of (32, 33) moves each row on by a bank.",
        ),
        wrong=(
            changed("no barrier", "a barrier is missing", ("    cuda.syncthreads()\n", "")),
            changed("32 columns", "a bank conflict", ("(32, 33)", "(32, 32)")),
            changed(
                "left too early",
                BARRIER,
                ("    cuda.syncthreads()", "    else:\n        return\n    cuda.syncthreads()"),
            ),
            changed(
                "in the branch",
                "a barrier is missing",
                ("    cuda.syncthreads()", "        cuda.syncthreads()"),
            ),
            changed(
                "one guard",
                "one guard for reading and writing",
                (
                    "if first_dim + y < out.shape[0] and first_token + x < out.shape[1]:",
                    "if first_token + y < keys.shape[0] and first_dim + x < keys.shape[1]:",
                ),
            ),
            changed(
                "both",
                "one guard for reading and writing",
                (
                    "if first_dim + y < out.shape[0] and first_token + x < out.shape[1]:",
                    "if max(first_token + y, first_token + x) < keys.shape[0] and "
                    "max(first_dim + x, first_dim + y) < keys.shape[1]:",
                ),
            ),
            WrongAnswer(
                "no tile",
                FAR,
                source="@cuda.jit\ndef transpose(out, keys):\n    d, token = cuda.grid(2)\n"
                "    if token < keys.shape[0] and d < keys.shape[1]:\n        out[d, token] = keys[token, d]\n",
            ),
        ),
        other=other.TRANSPOSE,
    ),
    Task(
        id="09.7",
        kind="bug",
        title="a softmax that is sometimes right",
        points=10,
        answers={"softmax_rows": Callable},
        check=check_softmax,
        hints=(
            "Run it under another schedule, with races looked for, and with rows of 41 scores. The interpreter "
            "has a sentence for each fault.",
            "One: a thread reads scratch[0] when a faster one has put its weight there. Two: threads that have "
            "left do not come to a barrier, and a barrier waits for all.",
            "Keep scratch[0] in a variable, and set a barrier before `scratch` is written again. Let threads "
            "without a score stay, with minus infinity, and write only where there is a place.",
        ),
        wrong=(
            changed(
                "only the return",
                "the scratch memory is used again too early",
                ("largest = scratch[0]\n    cuda.syncthreads()", "largest = scratch[0]"),
            ),
            changed(
                "warps agree",
                "the scratch memory is used again too early",
                ("largest = scratch[0]\n    cuda.syncthreads()", "largest = scratch[0]\n    cuda.syncwarp()"),
            ),
            changed(
                "only the barrier",
                BARRIER,
                (
                    "    score = scores[row, thread] if thread < n",
                    "    if thread >= n:\n        return\n    score = scores[row, thread] if thread < n",
                ),
            ),
            changed(
                "a 0 for it", "a score that is not there counts as 0", ("float32(-math.inf)", "float32(0)")
            ),
            changed(
                "no guard",
                GUARD,
                ("    if thread < n:\n        weights[row", "    if True:\n        weights[row"),
            ),
        ),
        other=other.SOFTMAX,
    ),
    Task(
        id="09.8",
        kind="kernel",
        title="a block agrees on two numbers",
        points=10,
        answers={"row_stats": Callable},
        check=check_stats,
        hints=(
            "First each thread takes in its own elements of the row, then 64 numbers are halved six times.",
            "Thread t takes the elements t, t + 64, ... and puts its two numbers into two shared arrays. After "
            "a barrier the lower half of the threads takes in the upper half, then a barrier for all, and so "
            "on.",
            "half = 32; while half > 0: if thread < half: tops[thread] = max(tops[thread], tops[thread + "
            "half]), the same with +; cuda.syncthreads() outside of the if; half //= 2. Start with -inf and 0.",
        ),
        wrong=(
            changed("from 0", "the largest starts at 0", ("float32(-math.inf)", "float32(0)")),
            changed("all write", "every thread writes the result", ("if thread == 0:", "if True:")),
            changed(
                "no barrier",
                "a barrier is missing",
                (TREE_TOP, TREE_TOP.replace("        cuda.syncthreads()", "        pass")),
            ),
            changed(
                "in the branch", BARRIER, (TREE_TOP, TREE_TOP.replace("        cuda", "            cuda"))
            ),
            changed(
                "half a row",
                "the tree counts elements, not threads",
                ("half = 32", "half = scores.shape[1] // 2"),
            ),
            changed(
                "one each",
                "a thread has one element",
                ("range(thread, scores.shape[1], 64)", "range(thread, min(thread + 1, scores.shape[1]))"),
            ),
            changed(
                "pairs of neighbours",
                "a bank conflict",
                ("half = 32", "half = 1"),
                ("while half > 0:", "while half < 64:"),
                ("if thread < half:", "if thread < 32 // half:"),
                (
                    "tops[thread] = max(tops[thread], tops[thread + half])",
                    "tops[2 * half * thread] = max(tops[2 * half * thread], tops[2 * half * thread + half])",
                ),
                (
                    "sums[thread] += sums[thread + half]",
                    "sums[2 * half * thread] += sums[2 * half * thread + half]",
                ),
                ("half //= 2", "half *= 2"),
            ),
            changed(
                "a piece each",
                FAR,
                (
                    "range(thread, scores.shape[1], 64)",
                    "range(thread * 3, min(thread * 3 + 3, scores.shape[1]))",
                ),
            ),
            WrongAnswer("two trees", "a tree for each number", source=other.TWO_TREES),
        ),
        other=other.STATS,
    ),
    Task(
        id="09.9",
        kind="kernel",
        title="a warp agrees without memory",
        points=10,
        answers={"dot_products": Callable},
        check=check_dots,
        hints=(
            "A lane adds up the products of its own numbers of the row. Then the 32 sums become one, in five steps.",
            "key = cuda.grid(1) // 32 and lane = cuda.threadIdx.x % 32. Lane l takes the numbers l, l + 32, "
            "... Then x += cuda.shfl_xor_sync(0xFFFFFFFF, x, distance) for 16, 8, 4, 2, 1.",
            "All lanes of the warp must reach every shuffle: guard by the key, which is the same for the whole "
            "warp, and let the loop over the row end before. Lane 0 writes.",
        ),
        wrong=(
            changed("from 8", "half of the warp is left out", ("distance = 16", "distance = 8")),
            changed(
                "one round",
                "a row is no longer than a warp",
                ("range(lane, keys.shape[1], 32)", "range(lane, lane + 1)"),
            ),
            changed("all write", "every lane writes the result", ("if lane == 0:", "if True:")),
            changed(
                "in the loop",
                "a shuffle that some lanes of its mask do not reach",
                ("        while distance > 0:", "        while distance > 0 and lane < 8:"),
            ),
            changed(
                "the warp of the block",
                "two warps have the same row",
                ("cuda.grid(1) // 32", "cuda.threadIdx.x // 32"),
            ),
            changed("no guard", GUARD, ("if key < keys.shape[0]:", "if True:")),
            WrongAnswer("shared memory", "the sum goes through shared memory", source=other.DOTS_IN_SHARED),
            WrongAnswer("a thread per key", FAR, source=other.DOTS_BY_THREAD),
        ),
        other=other.DOTS,
    ),
    Task(
        id="09.10",
        kind="kernel",
        title="a softmax in one pass",
        points=12,
        answers={"online_softmax": Callable},
        check=check_online,
        hints=(
            "Two numbers per lane: the largest score so far, and the sum under it. What happens to the sum "
            "when a larger score comes?",
            "above = max(top, score); sum = sum * exp(top - above) + exp(score - above). Two lanes join in the "
            "same way: both sums shrink to the larger of the two maxima.",
            "In each of five steps fetch the other lane's top and sum by shfl_xor_sync, both before either is "
            "changed; above = max of the two; sum = sum * exp(top - above) + other_sum * exp(other_top - "
            "above).",
        ),
        wrong=(
            changed(
                "no shrinking",
                "the old sum does not shrink",
                (
                    "sum_ = sum_ * math.exp(top - above) + math.exp(score - above)",
                    "sum_ = sum_ + math.exp(score - above)",
                ),
            ),
            changed(
                "lanes as they are",
                "sums of lanes are added as they are",
                (
                    "sum_ = sum_ * math.exp(top - above) + other_sum * math.exp(other_top - above)",
                    "sum_ = sum_ + other_sum",
                ),
            ),
            changed(
                "from 0",
                "the largest starts at 0",
                ("top, sum_ = LOWEST, float32(0)", "top, sum_ = float32(0), float32(0)"),
            ),
            changed(
                "from -inf",
                "minus infinity minus minus infinity",
                ("top, sum_ = LOWEST, float32(0)", "top, sum_ = float32(-math.inf), float32(0)"),
            ),
            WrongAnswer("no maximum", "the exponential overflows", source=other.BARE),
            WrongAnswer("a thread per row", FAR, source=other.ONE_PASS),
            WrongAnswer("two passes", "a second pass over the scores", source=other.TWICE),
            changed("all write", "every lane writes the result", ("if lane == 0:", "if True:")),
        ),
        other=other.ONLINE,
    ),
    Task(
        id="09.11",
        kind="kernel",
        title="scores over pages",
        points=12,
        answers={"paged_scores": Callable},
        check=check_pages,
        hints=(
            "It is 09.9 with another row: which block and offset has the position, and which KV head has the head?",
            "block = block_table[position // block_size] with block_size = key_cache.shape[1]; kv_head = head "
            "// group with group = query.shape[0] // key_cache.shape[2].",
            "The lanes go through key_cache[block, offset, kv_head, d] for d = lane, lane + 32, ..., shuffle "
            "as in 09.9, and lane 0 writes x * scale.",
        ),
        wrong=(
            changed(
                "remainder",
                "KV head by remainder",
                ("head // (query.shape[0] // key_cache.shape[2])", "head % key_cache.shape[2]"),
            ),
            changed("no scale", "the scale is left out", ("= x * scale", "= x")),
            changed(
                "no table",
                "a position is a slot",
                ("block_table[position // block_size], position", "position // block_size, position"),
            ),
            changed(
                "blocks of four",
                "an offset from another block size",
                ("block_size = key_cache.shape[1]", "block_size = 4"),
            ),
            changed("no guard", GUARD, ("if position < scores.shape[1]:", "if True:")),
            changed(
                "one round",
                "a row is no longer than a warp",
                ("range(lane, query.shape[1], 32)", "range(lane, lane + 1)"),
            ),
            changed(
                "pieces",
                FAR,
                ("range(lane, query.shape[1], 32)", "range(3 * lane, min(3 * lane + 3, query.shape[1]))"),
            ),
        ),
        other=other.PAGES,
    ),
]
