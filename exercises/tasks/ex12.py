"""Tasks of exercise 12."""

from __future__ import annotations

from collections.abc import Callable

from exercises.grader import Task, WrongAnswer
from exercises.tasks.ex12_checks import (
    check_behind,
    check_counting,
    check_hits,
    check_hurried,
    check_lookup,
    check_map,
    check_most_held,
    check_tables,
)

OTHER_BEHIND = """
class Behind(SlidingWindowManager):
    def num_skipped_tokens(self, num_computed_tokens):
        return max(0, num_computed_tokens + 1 - self.window)

    def remove_skipped_blocks(self, request_id, num_computed_tokens):
        table, gone = self.table(request_id), []
        i = min(len(table), self.num_skipped_tokens(num_computed_tokens) // self.block_size) - 1
        while i >= 0 and table[i] is not self.pool.null_block:
            gone.append(table[i])
            table[i] = self.pool.null_block
            i -= 1
        self.pool.free_blocks(gone)
"""
OTHER_LOOKUP = """
class Lookup(SlidingWindowManager):
    def find_longest_cache_hit(self, block_hashes, max_length, drop_last):
        need = (self.window - 2) // self.block_size + 1 + int(drop_last)
        blocks = [self.cached_block(h) for h in block_hashes[: max_length // self.block_size]]
        for end in range(len(blocks), 0, -1):
            begin = max(end - need, 0)
            if None not in blocks[begin:end]:
                hit = [self.pool.null_block for _ in range(begin)] + blocks[begin:end]
                return hit[: end - drop_last]
        return []
"""
LEFT_TO_RIGHT = """
class Lookup(SlidingWindowManager):
    def find_longest_cache_hit(self, block_hashes, max_length, drop_last):
        hits = []
        for block_hash in block_hashes[: max_length // self.block_size]:
            block = self.cached_block(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits[:-1] if drop_last else hits
"""
OTHER_MOST_HELD = """
def most_held(window, num_tokens, block_size):
    stage = WindowStage(num_tokens + 2, block_size, window=window, snapshots=False)
    tables = [stage.start("ada", [0])]
    while len(tables) < num_tokens:
        tables.append(stage.grow("ada", 1))
    return max(len([block for block in table if block]) for table in tables)
with_window, without = 9, 1000 // 16 + 1
"""
AT_THE_END = """
def most_held(window, num_tokens, block_size):
    stage = WindowStage(1000, block_size, window=window, snapshots=False)
    stage.start("ada", [0])
    return num_held(stage.decode("ada", num_tokens - 1))
with_window, without = 9, 63
"""
BY_FORMULA = """
def most_held(window, num_tokens, block_size):
    return min(-(-(window or num_tokens) // block_size) + 1, -(-num_tokens // block_size))
with_window, without = 9, 63
"""
GIVES_BACK = "        self.coordinator.remove_skipped_blocks(request.request_id, num_computed_tokens)\n"
FREES = "self.pool.free_blocks(gone[::-1])"
SUMMED = "held = len(self.table(request_id)) + len(hits)"
ADOPTED = "block.ref_count == 0 and not block.is_null for block in hits"

TASKS = [
    Task(
        id="12.1",
        kind="predict",
        title="tables, before you run it",
        points=10,
        answers={"tables": list, "queue": list},
        check=check_tables,
        hints=(
            "Before a step that begins at token n, ask: which is the first token that token n sees?",
            "Token n sees n - 5 to n. A block goes back when all four of its tokens come before n - 5.",
            "The steps begin at 0, 10, 14 and 17: nothing, then tokens 0 to 4, 0 to 8 and 0 to 11 are out of sight.",
        ),
        wrong=(
            WrongAnswer(
                "rounds up",
                "a block goes when its first token is out of sight",
                edits=(("[0, 2, 3, 4],", "[0, 0, 3, 4],"),),
            ),
            WrongAnswer(
                "w tokens before",
                "the window does not count the token itself",
                edits=(("[0, 0, 0, 4, 5]]", "[0, 0, 3, 4, 5]]"),),
            ),
            WrongAnswer("shorter", "the table is shortened", edits=(("[0, 2, 3, 4],", "[2, 3, 4],"),)),
            WrongAnswer(
                "at once",
                "it is given back in the step that passes it",
                edits=(("[[1, 2, 3],", "[[0, 2, 3],"),),
            ),
            WrongAnswer(
                "one order for all",
                "all go back at once",
                edits=(("[6, 7, 8, 1, 2, 3]", "[6, 7, 8, 3, 2, 1]"),),
            ),
            WrongAnswer(
                "at the front",
                "what goes back is next out",
                edits=(("[6, 7, 8, 1, 2, 3]", "[3, 2, 1, 6, 7, 8]"),),
            ),
        ),
        other="tables = ((1, 2, 3), (0, 2, 3, 4), (0, 0, 3, 4, 5), (0, 0, 0, 4, 5))\nqueue = (*range(6, 9), 1, 2, 3)",
    ),
    Task(
        id="12.2",
        kind="build",
        title="what goes back",
        points=20,
        answers={"Behind": type},
        check=check_behind,
        hints=(
            "With n computed tokens the next one is token n. Which is the first token that it sees?",
            "The tokens before n - (window - 1) are skipped. Divided by the block size, rounded down: so many nulls.",
            "Collect the blocks of table[:num_nulls] that are not null yet, write the null block there, and call "
            "free_blocks once, with the list reversed.",
        ),
        wrong=(
            WrongAnswer(
                "w tokens before",
                "the window does not count the token itself",
                edits=(("num_computed_tokens - (self.window - 1)", "num_computed_tokens - self.window"),),
            ),
            WrongAnswer(
                "rounds up",
                "a block goes when its first token is out of sight",
                edits=(
                    (
                        "max(self.num_skipped_tokens(num_computed_tokens), 0) // self.block_size",
                        "-(-max(self.num_skipped_tokens(num_computed_tokens), 0) // self.block_size)",
                    ),
                ),
            ),
            WrongAnswer(
                "shortens",
                "the table is shortened",
                edits=(
                    ("for i in range(min(num_nulls, len(table))):", "del table[: len(gone)]"),
                    ("            table[i] = self.pool.null_block\n", ""),
                ),
            ),
            WrongAnswer(
                "leaves them there",
                "they stay in the table",
                edits=(("            table[i] = self.pool.null_block\n", "            pass\n"),),
            ),
            WrongAnswer(
                "loses them",
                "they never go back",
                edits=((FREES, "gone.clear()"),),
            ),
            WrongAnswer(
                "one by one",
                "every block has a call of its own",
                edits=((FREES, "for block in gone[::-1]:\n            self.pool.free_blocks([block])"),),
            ),
            WrongAnswer(
                "less than none",
                "a negative number of blocks goes back",
                edits=(
                    (
                        "max(self.num_skipped_tokens(num_computed_tokens), 0)",
                        "self.num_skipped_tokens(num_computed_tokens)",
                    ),
                    ("range(min(num_nulls, len(table)))", "range(len(table[:num_nulls]))"),
                ),
            ),
            WrongAnswer(
                "in order",
                "the first one goes back first",
                edits=(("free_blocks(gone[::-1])", "free_blocks(gone)"),),
            ),
        ),
        other=OTHER_BEHIND,
    ),
    Task(
        id="12.3",
        kind="predict",
        title="hits with holes",
        points=10,
        answers={"hits": dict, "needed": list},
        check=check_hits,
        hints=(
            "Begin at the right end: which two blocks would a hit of 24 tokens need?",
            "Go left until two neighbours are there. Everything before them is null. At the beginning one is enough.",
            "The next token sees w - 1 tokens before itself: 7, 8 or 9, in blocks of four.",
        ),
        wrong=(
            WrongAnswer(
                "as full attention",
                "the first hole ends it",
                edits=(("[0, 0, 3, 4]", "[1, 2, 3, 4]"),),
            ),
            WrongAnswer("one", "one block is a hit", edits=(("[0, 0, 3, 4]", "[0, 0, 0, 0, 0, 6]"),)),
            WrongAnswer(
                "no nulls",
                "blocks that are not needed are left out",
                edits=(("[0, 0, 0, 0, 5, 6]", "[5, 6]"),),
            ),
            WrongAnswer(
                "never short",
                "a short run is no hit, not even at the beginning",
                edits=(('"d": [1]', '"d": []'),),
            ),
            WrongAnswer("always short", "a short run is a hit anywhere", edits=(('"e": []', '"e": [0, 2]'),)),
            WrongAnswer(
                "w tokens",
                "the next token's own key must be cached",
                edits=(("[2, 2, 3]", "[2, 3, 3]"),),
            ),
            WrongAnswer("down", "rounded down", edits=(("[2, 2, 3]", "[1, 2, 2]"),)),
        ),
        other="hits = dict(e=(), d=(1,), c=(1, 2), b=(0, 0, 3, 4), a=(0, 0, 0, 0, 5, 6))\nneeded = (2, 2, 3)",
    ),
    Task(
        id="12.4",
        kind="build",
        title="the lookup",
        points=20,
        answers={"Lookup": type},
        check=check_lookup,
        hints=(
            "Which length is the longest candidate? Begin there and go to shorter ones.",
            "Keep the run of neighbours that are there. A miss empties it; at ceil((w - 1) / B) blocks you are done.",
            "for i in reversed(range(max_length // self.block_size)): a miss gives run = [], a block goes in front of "
            "it. Long enough: i nulls and the run. What is left of it after the loop begins at block 0: a hit, too.",
        ),
        wrong=(
            WrongAnswer("left to right", "the first hole ends it", source=LEFT_TO_RIGHT),
            WrongAnswer(
                "w tokens",
                "the next token's own key must be cached",
                edits=(("-(-(self.window - 1) // self.block_size)", "-(-self.window // self.block_size)"),),
            ),
            WrongAnswer(
                "rounds down",
                "rounded down",
                edits=(("-(-(self.window - 1) // self.block_size)", "(self.window - 1) // self.block_size"),),
            ),
            WrongAnswer("first hit", "one block is a hit", edits=(("if len(run) >= need:", "if run:"),)),
            WrongAnswer(
                "not adjacent",
                "blocks need not be adjacent",
                edits=(("                run = []\n                continue", "                continue"),),
            ),
            WrongAnswer(
                "long runs only",
                "a short run is no hit, not even at the beginning",
                edits=(
                    (
                        "                break\n",
                        "                return run[:-1] if drop_last else run\n        run = []\n",
                    ),
                ),
            ),
            WrongAnswer(
                "no nulls",
                "blocks that are not needed are left out",
                edits=(("run = [self.pool.null_block] * i + run", "pass"),),
            ),
            WrongAnswer(
                "no cap",
                "the whole prompt may be found",
                edits=(("max_length // self.block_size)):", "len(block_hashes))):"),),
            ),
            WrongAnswer(
                "takes them",
                "a lookup takes the blocks",
                edits=(
                    (
                        "            run.insert(0, block)\n",
                        "            run.insert(0, block)\n            self.pool.touch([block])\n",
                    ),
                ),
            ),
            WrongAnswer(
                "keeps the last",
                "drop_last is for somebody else",
                edits=(("return run[:-1] if drop_last else run", "return run"),),
            ),
            WrongAnswer(
                "backwards",
                "blocks stand in the order of the walk",
                edits=(("run.insert(0, block)", "run.append(block)"),),
            ),
            WrongAnswer(
                "one less",
                "one block less is looked up",
                edits=(
                    (" + drop_last\n", "\n"),
                    (
                        "range(max_length // self.block_size)",
                        "range(max_length // self.block_size - drop_last)",
                    ),
                    ("return run[:-1] if drop_last else run", "return run"),
                ),
            ),
            WrongAnswer(
                "drops only",
                "what is left of the hit is too short",
                edits=((" + drop_last\n", "\n"),),
            ),
        ),
        other=OTHER_LOOKUP,
        part="sliding_window",
    ),
    Task(
        id="12.5",
        kind="bug",
        title="a long hit does not fit",
        points=10,
        answers={"Counting": type},
        check=check_counting,
        hints=(
            "Bob's hit has six entries. How many of them stand in the free queue?",
            "The null block has no user and never stands in the queue.",
            "Count the blocks of the hit that have no user and are not the null block.",
        ),
        wrong=(
            WrongAnswer(
                "hits for nothing",
                "a hit costs nothing",
                edits=((f"sum({ADOPTED})", "0"),),
            ),
            WrongAnswer(
                "all that is not null",
                "a block in use is counted",
                edits=((ADOPTED, "not block.is_null for block in hits"),),
            ),
            WrongAnswer(
                "a hit without nulls",
                "a null holds no place",
                edits=((SUMMED, f"hits = [block for block in hits if not block.is_null]\n        {SUMMED}"),),
            ),
            WrongAnswer(
                "nulls hold no place",
                "a null holds no place",
                edits=(
                    (
                        SUMMED,
                        "held = sum(not block.is_null for block in (*self.table(request_id), *hits))",
                    ),
                ),
            ),
        ),
        other=((f"sum({ADOPTED})", "len([b for b in hits if b.block_id and not b.ref_count])"),),
    ),
    Task(
        id="12.6",
        kind="bug",
        title="gone too soon",
        points=10,
        answers={"Hurried": type},
        check=check_hurried,
        hints=(
            "Which token of the step looks back the farthest?",
            "The first one, at position num_computed_tokens. The last one is at num_tokens - 1.",
            "remove_skipped_blocks(request.request_id, num_computed_tokens), at the place where it stands.",
        ),
        wrong=(
            WrongAnswer("never", "nothing is given back", edits=((GIVES_BACK, ""),)),
            WrongAnswer(
                "after the test",
                "first asked, then given back",
                edits=(
                    (GIVES_BACK, ""),
                    (
                        "        new_blocks = self.coordinator",
                        f"{GIVES_BACK}        new_blocks = self.coordinator",
                    ),
                ),
            ),
            WrongAnswer(
                "at the end",
                "given back before the step has run",
                edits=(
                    (GIVES_BACK, ""),
                    (
                        "        return KVCacheBlocks(new_blocks)",
                        "        self.coordinator.remove_skipped_blocks(request.request_id, num_tokens)\n"
                        "        return KVCacheBlocks(new_blocks)",
                    ),
                ),
            ),
            WrongAnswer(
                "the last token",
                "what the last token of the step sees",
                edits=(
                    (
                        "remove_skipped_blocks(request.request_id, num_computed_tokens)",
                        "remove_skipped_blocks(request.request_id, num_tokens - 1)",
                    ),
                ),
            ),
            WrongAnswer(
                "one token late",
                "the last computed token looks back, too",
                edits=(
                    (
                        "remove_skipped_blocks(request.request_id, num_computed_tokens)",
                        "remove_skipped_blocks(request.request_id, num_computed_tokens - 1)",
                    ),
                ),
            ),
        ),
        other=(
            (
                "remove_skipped_blocks(request.request_id, num_computed_tokens)",
                "remove_skipped_blocks(request.request_id, num_tokens - num_new_tokens)",
            ),
        ),
    ),
    Task(
        id="12.7",
        kind="map",
        title="where it is in vLLM",
        points=10,
        answers={"v1": dict, "v0": dict},
        check=check_map,
        hints=(
            "The box at the end of the chapter has all of them.",
            "Giving back is the same for every kind of layer; only how many tokens are skipped differs.",
            "V0 refuses in its configuration, long before a request comes.",
        ),
        wrong=(
            WrongAnswer(
                "chunks",
                "a chunk is a window",
                edits=(
                    (
                        '"SlidingWindowManager.find_longest_cache_hit"',
                        '"ChunkedLocalAttentionManager.find_longest_cache_hit"',
                    ),
                ),
            ),
            WrongAnswer(
                "publishes",
                "what is published is what is given back",
                edits=(
                    (
                        '"SingleTypeKVCacheManager.remove_skipped_blocks"',
                        '"SlidingWindowManager.reachable_block_mask"',
                    ),
                ),
            ),
            WrongAnswer(
                "cuts",
                "V0 ignores the one and takes the other",
                edits=(
                    (
                        '"CacheConfig._verify_prefix_caching"',
                        '"ModelInputForGPUBuilder._compute_for_sliding_window"',
                    ),
                ),
            ),
        ),
        other=(
            ('"looks up": "SlidingWindowManager', '"looks up": "SlidingWindow" "Manager'),
            ('"refuses": "CacheConfig', '"refuses": "Cache" "Config'),
        ),
    ),
    Task(
        id="12.8",
        kind="measure",
        title="blocks held at most",
        points=10,
        answers={"most_held": Callable, "with_window": int, "without": int},
        check=check_most_held,
        hints=(
            "Look after every step, and keep the largest number.",
            "A table is full of nulls; num_held counts the others.",
            "128 tokens in blocks of 16: eight if they begin where a block does. When do they not?",
        ),
        wrong=(
            WrongAnswer(
                "counts entries",
                "nulls are counted",
                edits=(('num_held(stage.grow("ada", 1))', 'len(stage.grow("ada", 1))'),),
            ),
            WrongAnswer("at the end", "what is held at the end", source=AT_THE_END),
            WrongAnswer("by formula", "all w tokens, and a block more", source=BY_FORMULA),
            WrongAnswer(
                "128 / 16",
                "a window begins at a block's beginning",
                edits=(("with_window = 9", "with_window = 8"),),
            ),
        ),
        other=OTHER_MOST_HELD,
    ),
]
