"""How the answers to exercise 12 are judged: by their behaviour, through public calls, on fresh objects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from exercises.grader import Report
from exercises.grader.report import Known
from exercises.tasks.ex12_scene import WindowStage, num_held
from exercises.tasks.ex12_traces import RELEASE_TRACES, WINDOW_TRACES, replay, replay_bare
from refengine.parts import Parts
from refengine.trace.codemap import topic
from refengine.v1.block import KVCacheBlock
from refengine.v1.groups.sliding_window import SlidingWindowManager

NEW = range(500, 600)  # tokens that no other request of a story has


def ada_has_ended(
    num_tokens: int = 24, block_size: int = 4, window: int = 8, evicted: Iterable[int] = (), **options: Any
) -> WindowStage:
    """Ada had the tokens 0, 1, ... in blocks 1, 2, ... and has ended; some of the blocks are not cached any more."""
    stage = WindowStage(40, block_size, window=window, **options)
    stage.start("ada", range(num_tokens))
    stage.finish("ada")
    stage.evict(*evicted)
    return stage


def grown(steps: Iterable[int], **options: Any) -> tuple[WindowStage, list[list[int] | None]]:
    """Ada computes so many tokens in each step. Returns: the stage, and her table after each step."""
    stage = WindowStage(**options)
    first, *others = steps
    tables = [stage.start("ada", range(first))]
    return stage, tables + [stage.grow("ada", count) for count in others]


# -- 12.1 ---------------------------------------------------------------------------------------------------

TOO_SOON = (
    "a block goes when its first token is out of sight",
    "It goes when its last one is. The token that comes next may still look at the end of it.",
)
ITSELF = (
    "the window does not count the token itself",
    "A window of w is the token and the w - 1 before it.",
)
SHORTENED = (
    "the table is shortened",
    "Block i of a table holds the tokens from i * block_size on. Without nulls every later token has another place.",
)
EARLY = (
    "it is given back in the step that passes it",
    "The first tokens of a step still look back from where the step begins. What counts is what was computed before.",
)


def check_tables(tables: list[list[int]], queue: list[int], report: Report) -> None:
    stage, expected = grown((10, 4, 3, 1), num_blocks=9, block_size=4, window=6)
    wrong: list[tuple[Any, ...]] = [
        ((2, [0, 0, 3, 4]), TOO_SOON),
        ((4, [0, 0, 3, 4, 5]), ITSELF),
        ((2, [2, 3, 4]), SHORTENED),
        ((1, [0, 2, 3]), EARLY),
    ]
    for step, table in enumerate(expected, 1):
        with report.case(f"the table after step {step}"):
            known = tuple((value, *why) for (at, value), why in wrong if at == step)
            got = tables[step - 1] if len(tables) >= step else None
            report.equal(table, list(got) if isinstance(got, list | tuple) else got, "table", known=known)
    with report.case("the free queue at the end"):
        front: Known = (
            [3, 2, 1, 6, 7, 8],
            "what goes back is next out",
            "Its blocks are full and published, so they can still be found. They go to the back of the queue.",
        )
        in_order: Known = ([1, 2, 3, 6, 7, 8], *front[1:])
        at_once: Known = (
            [6, 7, 8, 3, 2, 1],
            "all go back at once",
            "Last one first is the order of one call. Here each of the three goes back in a step of its own.",
        )
        report.equal(stage.queue, list(queue), "free queue", known=(front, in_order, at_once))


# -- 12.2 ---------------------------------------------------------------------------------------------------


def check_behind(behind: Any, report: Report) -> None:
    with report.case("a table after every step"):
        stage, tables = grown((6, 3), num_blocks=13, window=4, group=behind)
        _know_tables(tables, report)
        report.equal([[1, 2, 3], [0, 2, 3, 4, 5]], tables, "window 4, blocks of 2; 6 and 3 tokens")
        report.equal([0, 0, 0, 4, 5], stage.grow("ada", 1), "and 1 token more")
    for window, size, steps in (
        (6, 4, (10, 4, 3, 1)),
        (5, 2, (7, 1, 1, 1, 1)),
        (1, 4, (3, 1, 1, 6)),
        (9, 4, (5, 1, 8)),
    ):
        with report.case(f"window {window}, blocks of {size}"):
            _, right = grown(steps, num_blocks=20, block_size=size, window=window)
            _, got = grown(steps, num_blocks=20, block_size=size, window=window, group=behind)
            itself: Known = (_with(window + 1, size, steps), *ITSELF)
            negative: Known = (
                [[1, 2], [0, 2], [0, 2, 3, 4]],
                "a negative number of blocks goes back",
                "While the window is not full, num_skipped_tokens is negative, and table[:-1] is not empty in Python.",
            )
            report.equal(right, got, f"tables after steps of {steps}", known=(itself, negative))
    _check_given_back(behind, report)
    with report.case("vLLM's recorded decisions"):
        for name in RELEASE_TRACES:
            result = replay_bare(name, Parts(sliding_window=behind))
            report.true(result.difference is None, f"{name}: {result.difference}")


def _know_tables(tables: list[Any], report: Report) -> None:
    """Names what a wrong table after the second step shows."""
    second = tables[1] or []
    if len(second) < 5 or second[0] == 2:
        report.misconception(*SHORTENED)
    elif second[:2] == [0, 0]:
        report.misconception(*TOO_SOON)
    elif second[0] != 0:
        report.misconception(
            "they stay in the table",
            "What was given back may be somebody else's in the next moment. The null block takes its place.",
        )


def _with(window: int, block_size: int, steps: Iterable[int]) -> list[list[int] | None]:
    return grown(steps, num_blocks=20, block_size=block_size, window=window)[1]


def _check_given_back(behind: Any, report: Report) -> None:
    with report.case("they stand in the free queue, the last one first"):
        stage, _ = grown((6, 3, 1), num_blocks=13, window=4, group=behind)
        kept: Known = (
            [6, 7, 8, 9, 10, 11, 12],
            "they never go back",
            "Nobody holds them and nobody can have them: the pool has lost them.",
        )
        forward: Known = (
            [6, 7, 8, 9, 10, 11, 12, 1, 2, 3],
            "the first one goes back first",
            "What stands in front is overwritten first. A block is worth less than those before it, so it goes first.",
        )
        right = [6, 7, 8, 9, 10, 11, 12, 1, 3, 2]
        report.equal(right, stage.queue, "free queue after 6, 3 and 1 tokens", known=(kept, forward))
        stage.manager.check_integrity()
    with report.case("blocks without a hash, in one call"):
        options: dict[str, Any] = {"num_blocks": 13, "window": 4, "retention": 0}
        right, got = (
            grown((13, 1), **options, group=group)[0].queue for group in (SlidingWindowManager, behind)
        )
        singly: Known = (
            [1, 2, 3, 4, *right[4:]],
            "every block has a call of its own",
            "What has no hash goes to the front of the queue, and the next call puts its block before it: the order is "
            "turned around. Give all of them to one free_blocks.",
        )
        report.equal(right, got, "free queue after 13 and 1 tokens, interval 0", known=(singly,))
    with report.case("asked twice, it gives nothing back twice"):
        stage, _ = grown((9,), num_blocks=13, window=4, group=behind)
        for _ in range(2):
            stage.group.remove_skipped_blocks("ada", 9)
        report.equal([0, 0, 0, 4, 5], stage.table("ada"), "table")
        report.equal(10, len(stage.queue), "free blocks of 12")
    with report.case("a refused request gives back, too"):
        stage, tables = grown((8, 12), num_blocks=8, window=4, group=behind)
        report.equal(None, tables[1], "12 tokens more, for which there is no room")
        report.equal(([0, 0, 3, 4], 5), (stage.table("ada"), len(stage.queue)), "table, and free blocks")
    with report.case("a request without blocks"):
        stage = WindowStage(9, window=4, group=behind)
        stage.group.remove_skipped_blocks("nobody", 20)
        report.equal(8, len(stage.queue), "free blocks")


# -- 12.3 ---------------------------------------------------------------------------------------------------

EVICTED: dict[str, tuple[int, ...]] = {"a": (), "b": (5,), "c": (5, 3), "d": (5, 3, 2), "e": (5, 3, 1)}
LEFT_TO_RIGHT = (
    "the first hole ends it",
    "That is full attention. Behind a window a hole is harmless, and the walk begins at the right end.",
)
ONE_IS_ENOUGH = (
    "one block is a hit",
    "The next token looks at w - 1 tokens before it. All of their blocks must be there, one beside the other.",
)
NO_SHORT_RUN = (
    "a short run is no hit, not even at the beginning",
    "Before the first block there is nothing that the window could reach. So a run that begins there is long enough.",
)
NO_NULLS = (
    "blocks that are not needed are left out",
    "The table is by position. Where no block is needed stands the null block.",
)
ANY_RUN = (
    "blocks need not be adjacent",
    "Between them is a token that the next one looks at, and its keys are not there.",
)
ROUNDED_DOWN = (
    "rounded down",
    "A block of which one token is needed must be there as a whole. Round up.",
)
OWN_KEY = (
    "the next token's own key must be cached",
    "It is computed in the next step. Only the w - 1 tokens before it must be there.",
)


def check_hits(hits: dict[str, list[int]], needed: list[int], report: Report) -> None:
    known: dict[str, tuple[Known, ...]] = {
        "a": (([5, 6], *NO_NULLS), ([1, 2, 3, 4, 5, 6], *LEFT_TO_RIGHT)),
        "b": (
            ([1, 2, 3, 4], *LEFT_TO_RIGHT),
            ([0, 0, 0, 0, 0, 6], *ONE_IS_ENOUGH),
            ([3, 4], *NO_NULLS),
            ([0, 0, 0, 4, 0, 6], *ANY_RUN),
        ),
        "c": (([0, 0, 0, 0, 0, 6], *ONE_IS_ENOUGH), ([0, 0, 0, 4, 0, 6], *ANY_RUN)),
        "d": (([0, 0, 0, 0, 0, 6], *ONE_IS_ENOUGH), ([], *NO_SHORT_RUN)),
        "e": (
            ([0, 0, 0, 0, 0, 6], *ONE_IS_ENOUGH),
            (
                [0, 2],
                "a short run is a hit anywhere",
                "Before block 2 are tokens that the next one would look at. Only at the very beginning there are none.",
            ),
        ),
    }
    with report.case("every case has an answer"):
        report.equal(sorted(EVICTED), sorted(hits), "cases")
    for name, evicted in EVICTED.items():
        with report.case(f"case {name}"):
            expected = ada_has_ended(evicted=evicted).lookup(range(25))
            got = hits.get(name)
            got = list(got) if isinstance(got, list | tuple) else got
            report.equal(expected, got, "blocks", known=known[name])
    with report.case("how many blocks a hit needs"):
        right = [-(-(window - 1) // 4) for window in (8, 9, 10)]
        known_counts: tuple[Known, ...] = (([2, 3, 3], *OWN_KEY), ([1, 2, 2], *ROUNDED_DOWN))
        report.equal(right, list(needed), "windows of 8, 9 and 10", known=known_counts)


# -- 12.4 ---------------------------------------------------------------------------------------------------


def check_lookup(lookup: Any, report: Report) -> None:
    def found(evicted: Iterable[int] = (), asked: int = 25, **options: Any) -> list[int]:
        return ada_has_ended(evicted=evicted, group=lookup, **options).lookup(range(asked))

    with report.case("it returns a list of blocks, also if nothing is found"):
        for what, ended in (("nothing", False), ("a hit", True)):
            stage = ada_has_ended(group=lookup) if ended else WindowStage(9, 4, window=8, group=lookup)
            hashes = stage.wait("?", range(25)).block_hashes
            hit = stage.group.find_longest_cache_hit(hashes, 24, False)
            are_blocks = isinstance(hit, list) and all(isinstance(block, KVCacheBlock) for block in hit)
            report.true(are_blocks, f"If {what} is found, it returned {hit!r:.60}, and not a list of blocks.")
    with report.case("three neighbours for a window of 10 and blocks of 4"):
        known: tuple[Known, ...] = (
            ([0, 0, 0, 0, 0, 6], *ONE_IS_ENOUGH),
            ([0, 0, 3, 4], *ROUNDED_DOWN),
            ([0, 0, 3, 4, 6], *ANY_RUN),
            ([2, 3, 4], *NO_NULLS),
            ([1, 2, 3, 4], *LEFT_TO_RIGHT),
            (
                [0, 4, 3, 2],
                "blocks stand in the order of the walk",
                "The walk goes from right to left, and a table from left to right. Put each block before the others.",
            ),
        )
        report.equal([0, 2, 3, 4], found((5,), window=10), "without 5", known=known)
    with report.case("two blocks at the end, nulls before them"):
        known = (([5, 6], *NO_NULLS), ([1, 2, 3, 4, 5, 6], *LEFT_TO_RIGHT))
        report.equal([0, 0, 0, 0, 5, 6], found(), "all six cached", known=known)
        report.equal([0, 0, 0, 0, 5, 6], found((1, 3)), "without 1 and 3", known=(([], *LEFT_TO_RIGHT),))
    with report.case("the blocks are adjacent"):
        report.equal([0, 0, 3, 4], found((5,)), "without 5")
        report.equal([1, 2], found((5, 3)), "without 5 and 3")
    with report.case("at the beginning a shorter run will do"):
        report.equal([1], found((5, 3, 2)), "without 5, 3 and 2", known=(([], *NO_SHORT_RUN),))
        report.equal([], found((5, 3, 1)), "without 5, 3 and 1")
        report.equal([1], found((), 8), "only 8 tokens asked for", known=(([], *NO_SHORT_RUN),))
    _check_how_many(lookup, report)
    _check_limits(lookup, report)
    with report.case("vLLM's recorded lookups"):
        for name in WINDOW_TRACES:
            result = replay_bare(name, Parts(sliding_window=lookup))
            report.true(result.difference is None, f"{name}: {result.difference}")
    with report.case("the engine runs on it, under guard"):
        result = replay("script_swa_release", {"sliding_window": lookup})
        report.equal("all equal", result.difference or "all equal", "script_swa_release")


def _check_how_many(lookup: Any, report: Report) -> None:
    with report.case("ceil((w - 1) / B) blocks are enough"):
        for window, size, evicted, expected in (
            (9, 4, 4, [0, 0, 0, 0, 5, 6]),
            (5, 4, 5, [0, 0, 0, 0, 0, 6]),
            (5, 2, 10, [0] * 10 + [11, 12]),
        ):
            got = found_with(lookup, window, size, evicted)
            if len(got) < len(expected):
                report.misconception(*OWN_KEY)
            report.equal(expected, got, f"window {window}, blocks of {size}, without {evicted}")
    with report.case("and one less is not"):
        for window, size, evicted, expected in (
            (8, 4, 5, [0, 0, 3, 4]),
            (6, 2, 10, [0] * 6 + [7, 8, 9]),
        ):
            got = found_with(lookup, window, size, evicted)
            report.equal(expected, got, f"window {window}, blocks of {size}, without {evicted}")


def found_with(lookup: Any, window: int, block_size: int, evicted: int) -> list[int]:
    """What a prompt of 25 tokens finds of Ada's 24, one block of which is not cached any more."""
    stage = ada_has_ended(block_size=block_size, window=window, evicted=(evicted,), group=lookup)
    return stage.lookup(range(25))


def _check_limits(lookup: Any, report: Report) -> None:
    def ask(num_tokens: int, max_length: int, drop_last: bool = False, **options: Any) -> list[int]:
        stage = ada_has_ended(group=lookup, **options)
        hashes = stage.wait("?", range(num_tokens)).block_hashes
        return [b.block_id for b in stage.group.find_longest_cache_hit(hashes, max_length, drop_last)]

    with report.case("never more than max_length, rounded down to whole blocks"):
        no_cap: Known = (
            [0, 0, 0, 0, 5, 6],
            "the whole prompt may be found",
            "max_length is the number of tokens less one. Without it nothing would be left to run.",
        )
        report.equal([0, 0, 0, 4, 5], ask(24, 23), "24 tokens, max_length 23", known=(no_cap,))
        report.equal([0, 2, 3], ask(24, 13), "24 tokens, max_length 13")
    with report.case("nothing changes, however often it is asked"):
        stage = ada_has_ended(group=lookup)
        before = stage.queue, stage.users
        answers = [stage.lookup(range(25)) for _ in range(3)]
        if (stage.queue, stage.users) != before:
            report.misconception(
                "a lookup takes the blocks",
                "Its request may be refused or ask again. Blocks are taken when slots are allocated.",
            )
        report.equal([[0, 0, 0, 0, 5, 6]] * 3, answers, "three lookups")
        report.equal(before, (stage.queue, stage.users), "free queue and users")
    with report.case("drop_last finds one more and gives the last one back"):
        kept: Known = (
            [0, 0, 0, 4, 5, 6],
            "drop_last is for somebody else",
            "The last block's tokens are computed again, for the draft head.",
        )
        too_few: Known = (
            [0, 0, 0, 0, 5],
            "what is left of the hit is too short",
            "After 20 tokens the next one looks at blocks 4 and 5. So three must be found, and one given back.",
        )
        report.equal([0, 0, 0, 4, 5], ask(25, 24, True), "drop_last", known=(kept, too_few))
        shorter: Known = (
            [0, 2, 3],
            "one block less is looked up",
            "The block that is given back must have been there, too. Block 4 is not, so 3 cannot be what is left.",
        )
        report.equal(
            [1, 2], ask(25, 24, True, evicted=(4, 6)), "drop_last, without 4 and 6", known=(shorter,)
        )


# -- 12.5 ---------------------------------------------------------------------------------------------------


def check_counting(counting: Any, report: Report) -> None:
    def required(stage: WindowStage, tokens: Iterable[int]) -> int:
        request = stage.wait("bob", tokens)
        hits, _, _ = stage.manager.get_computed_blocks(request)
        groups = stage.manager.coordinator
        return groups.get_num_blocks_to_allocate("bob", request.num_tokens, hits.blocks)

    with report.case("nulls hold their places in the table"):
        stage, _ = grown((9, 1), num_blocks=20, window=4, group=counting)
        got = stage.manager.coordinator.get_num_blocks_to_allocate("ada", 11, ([],))
        if got > 1:
            report.misconception(*PLACES)
        report.equal(1, got, "Ada's 11th token, her table being [0, 0, 0, 4, 5]")
    with report.case("nulls of a hit cost nothing"):
        stage = ada_has_ended(12, 2, 4, group=counting)
        got = required(stage, range(13))
        hit = [stage.pool.null_block] * 4 + stage.pool.blocks[5:7]
        fewer = stage.manager.coordinator.get_num_blocks_to_allocate("bob", 4, ([*hit],))
        if got == 7 and fewer == 2:
            report.misconception(*PLACES)
        elif got == 7 and report.found is None:
            report.as_given()
        report.equal(3, got, "a hit of 4 nulls and 2 free blocks, 1 new", known=((1, *FREE_HITS),))
        report.equal(4, required(stage, range(15)), "the same hit, 2 new")
    with report.case("a hit that others use costs nothing"):
        stage = WindowStage(20, window=4, group=counting)
        stage.start("ada", range(12))
        in_use: Known = (
            3,
            "a block in use is counted",
            "Ada holds blocks 5 and 6. Bob holds them with her, and they do not stand in the free queue.",
        )
        report.equal(
            1, required(stage, range(13)), "a hit of 4 nulls and 2 blocks in use, 1 new", known=(in_use,)
        )
    with report.case("who fits is admitted"):
        stage = WindowStage(9, window=4, group=counting)
        stage.start("ada", range(12))
        stage.finish("ada")
        stage.start("rae", NEW[:4])
        report.equal([0, 0, 0, 0, 5, 6, 4], stage.start("bob", range(13)), "Bob's table, 6 blocks free")


FREE_HITS = (
    "a hit costs nothing",
    "A hit that nobody uses stands in the free queue, and adopting it takes it from there.",
)
PLACES = (
    "a null holds no place",
    "It is not storage, but it is an entry of the table: the tokens of that place need no new block.",
)


# -- 12.6 ---------------------------------------------------------------------------------------------------


def check_hurried(manager: Any, report: Report) -> None:
    with report.case("what the first token of the step sees is there"):
        _, tables = grown((6, 3), num_blocks=13, window=4, manager=manager)
        if tables == [[1, 2, 3], [0, 0, 0, 4, 5]]:
            report.as_given()
        after: Known = (
            [0, 0, 0, 4, 5],
            "given back before the step has run",
            "When allocate_slots returns, none of the new tokens has looked yet, and token 6 looks at block number 1.",
        )
        last: Known = (
            [0, 0, 3, 4, 5],
            "what the last token of the step sees",
            "The first token of the step looks farther back than the last.",
        )
        never: Known = (
            [1, 2, 3, 4, 5],
            "nothing is given back",
            "Block 1 holds tokens that nobody sees any more. Kept for ever, the window saves no memory at all.",
        )
        report.equal([0, 2, 3, 4, 5], tables[1], "6 tokens, then 3", known=(after, last, never))
    with report.case("one token at a time"):
        _, right = grown((6, *[1] * 8), num_blocks=13, window=4)
        _, got = grown((6, *[1] * 8), num_blocks=13, window=4, manager=manager)
        late: Known = (
            _with(5, 2, (6, *[1] * 8)),
            "the last computed token looks back, too",
            "It has looked already. The next one, at position num_computed_tokens, looks from one further.",
        )
        report.equal(right, got, "tables from 6 to 14 tokens", known=(late,))
    with report.case("a long step and a long window"):
        _, right = grown((21, 16, 5), num_blocks=20, block_size=4, window=10)
        _, got = grown((21, 16, 5), num_blocks=20, block_size=4, window=10, manager=manager)
        report.equal(right, got, "tables after 21, 16 and 5 tokens")
    with report.case("what goes back makes room"):
        stage, tables = grown((8, 10), num_blocks=8, window=4, manager=manager)
        asked: Known = (
            None,
            "first asked, then given back",
            "She needs five blocks. Three are free, and two of hers she will never look at again.",
        )
        report.equal([0, 0, 3, 4], (tables[1] or [])[:4] or None, "10 tokens more, 3 free", known=(asked,))
        report.equal([], stage.queue, "free queue")
    with report.case("a hit is adopted as before"):
        stage = ada_has_ended(12, 2, 4, manager=manager)
        report.equal([0, 0, 0, 0, 5, 6], (stage.start("bob", range(13)) or [])[:6], "Bob's hit")


# -- 12.7 ---------------------------------------------------------------------------------------------------


def check_map(v1: dict[str, str], v0: dict[str, str], report: Report) -> None:
    window, null, published = topic("sliding_window"), topic("null_block"), topic("retention")
    looks_up, gives_back = (place.symbol for place in window.v1.vllm)
    refuses, reads = (place.symbol for place in window.v0.vllm)
    chunk: Known = (
        topic("chunked_local").v1.vllm[0].symbol,
        "a chunk is a window",
        "Chunks lie at fixed places, and their lookup goes from left to right.",
    )
    swapped: Known = (
        published.v1.vllm[0].symbol,
        "what is published is what is given back",
        "Whether a block is published says who can find it. Giving it back says who holds it.",
    )
    cuts: Known = (
        reads,
        "V0 ignores the one and takes the other",
        "Refused means when the engine is configured. That function cuts down what a decode reads, caching or not.",
    )
    asked: tuple[tuple[str, dict[str, str], str, str, tuple[Known, ...]], ...] = (
        ("V1", v1, "looks up", looks_up, (chunk,)),
        ("V1", v1, "gives back", gives_back, (swapped,)),
        ("V1", v1, "published", published.v1.vllm[0].symbol, ()),
        ("V0", v0, "refuses", refuses, (cuts,)),
        ("V0", v0, "reads", reads, ()),
        ("V0", v0, "nothing", null.v0.vllm[0].symbol, ()),
    )
    for generation, answers, what, right, known in asked:
        with report.case(f"{generation}: {what}"):
            report.equal(right, answers.get(what), what, known=known)


# -- 12.8 ---------------------------------------------------------------------------------------------------


def check_most_held(most_held: Any, with_window: int, without: int, report: Report) -> None:
    nulls = (
        "nulls are counted",
        "The null block is nobody's. A table grows for ever, and what it holds does not.",
    )
    at_end = (
        "what is held at the end",
        "There are worse moments on the way: a window of 16 tokens may lie across two blocks of 16.",
    )
    with report.case("the worst moment of a run"):
        for window, tokens, size, expected in ((8, 64, 4, 3), (8, 60, 1, 8), (16, 160, 16, 2), (5, 33, 2, 3)):
            got = most_held(window, tokens, size)
            table = (
                grown((1, *[1] * (tokens - 1)), num_blocks=90, block_size=size, window=window)[1][-1] or []
            )
            counted: Known = (
                -(-window // size) + 1,
                "all w tokens, and a block more",
                "The first token of a window may be the last of its block. The other w - 1 need no more than "
                "ceil((w - 1) / B).",
            )
            known: tuple[Known, ...] = ((len(table), *nulls), (num_held(table), *at_end), counted)
            report.equal(expected, got, f"window {window}, {tokens} tokens, blocks of {size}", known=known)
    with report.case("without a window everything is held"):
        for tokens, size, expected in ((33, 4, 9), (1, 4, 1)):
            report.equal(expected, most_held(None, tokens, size), f"{tokens} tokens, blocks of {size}")
    with report.case("a prompt shorter than the window"):
        report.equal(2, most_held(16, 7, 4), "window 16, 7 tokens, blocks of 4")
    with report.case("with a window of 128"):
        aligned: Known = (
            8,
            "a window begins at a block's beginning",
            "128 tokens lie across 9 blocks of 16, unless they happen to begin where a block does.",
        )
        every: Known = (63, *nulls)
        report.equal(9, with_window, "blocks of 16 at 1,000 tokens", known=(aligned, every))
    with report.case("without one"):
        report.equal(63, without, "blocks of 16 at 1,000 tokens")
