"""How the answers to exercise 13 are judged: by their behaviour, through public calls, on fresh objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from exercises.grader import Report
from exercises.grader.report import Known
from exercises.tasks.ex13_scene import GroupStage, full, places, states, window
from exercises.tasks.ex13_traces import GROUP_TRACES, replay, replay_bare
from refengine.errors import IntegrityError
from refengine.hashing import BlockHash
from refengine.parts import Parts
from refengine.v1.groups.spec import GroupSpec

A = range(12)
B = [*range(12), 99]  # what Bob brings
EVICTED = {"a": (), "b": (12,), "c": (11,), "d": (12, 3), "e": (7,)}
CHUNKED = {"f": ((4, 8, 1), 4), "g": ((4, 8, 1), 8), "h": ((12, 1), 6), "i": ((12, 1), 12)}


def ada_has_ended(*evicted: int, **options: Any) -> GroupStage:
    """Ada had 12 tokens: blocks 1 to 6 for full attention, 7 to 12 for a window of 4 tokens."""
    stage = GroupStage(31, full(2), window(2, 4), **options)
    stage.start("ada", A)
    stage.finish("ada")
    stage.evict(*evicted)
    return stage


def states_of(chunks: Iterable[int], **options: Any) -> GroupStage:
    """Ada had 13 tokens in these chunks, beside full attention a group of states."""
    stage = GroupStage(41, full(2), states(2), **options)
    stage.start("ada", range(13), *chunks)
    stage.finish("ada")
    return stage


def sharing(num_tokens: int) -> list[int]:
    """So many tokens of Ada's, and three others."""
    return [*range(num_tokens), 500, 501, 502]


# -- 13.1 ---------------------------------------------------------------------------------------------------

ALONE = (
    "full attention decides alone",
    "Full attention has these blocks; the other group must be able to go on there, too.",
)
NO_BOUNDARY = ("no boundary", "Full attention got further than the hit. How far it got is the boundary.")
NEEDLESS = (
    "a boundary where the hit ends",
    "No group got further than the hit. Then there is no boundary: 0.",
)
ANY_STATE = (
    "a state can be cut",
    "Of a state after 12 tokens nobody can make the one after 6. Only where a chunk ended there is one.",
)
SHORTEST = (
    "the boundary is what is not there",
    "The boundary is how far some group got, counted from the first token; 0 if nobody got beyond the hit.",
)


def check_found(found: dict[str, Any], blocks_of_b: list[list[int]], report: Report) -> None:
    expected = {name: ada_has_ended(*evicted).found(B) for name, evicted in EVICTED.items()}
    expected |= {name: states_of(chunks).found(sharing(k)) for name, (chunks, k) in CHUNKED.items()}
    with report.case("every row has an answer"):
        report.equal(sorted(expected), sorted(found), "rows")
    known: dict[str, tuple[Known, ...]] = {
        "b": (((12, 0), *ALONE), ((10, 2), *SHORTEST), ((10, 0), *SHORTEST)),
        "c": (
            (
                (10, 12),
                "one block is enough",
                "10 tokens need blocks 10 and 11: the next token sees three tokens before it, in two blocks.",
            ),
            ((12, 0), *ALONE),
        ),
        "d": (
            (
                (4, 10),
                "the best of any group",
                "The window alone could serve 10 tokens, but it is never asked: full attention ends at 4, and whatever "
                "lies behind that is of no use to anybody.",
            ),
            ((4, 12), "the best of any group", "Nobody got as far as 12: full attention ends at 4."),
        ),
        "e": (((0, 12), "a window needs everything", "At token 12 nobody sees the first two tokens."),),
        "g": (((8, 0), *ANY_STATE), ((8, 12), *ANY_STATE)),
        "h": (
            ((6, 0), *ANY_STATE),
            ((6, 12), *ANY_STATE),
            (
                (0, 12),
                "the boundary is Ada's",
                "It is how far Bob's tokens were found, and 6 of them are hers.",
            ),
        ),
    }
    for name, pair in expected.items():
        with report.case(f"row {name}"):
            got = found.get(name)
            answer = tuple(got) if isinstance(got, list) else got
            hit, boundary = pair
            always = ((hit, 0), *NO_BOUNDARY) if boundary else ((hit, hit), *NEEDLESS)
            report.equal(pair, answer, "(hit, boundary)", known=(*known.get(name, ()), always))
    with report.case("the blocks of row b"):
        uncut: Known = (
            [[1, 2, 3, 4, 5, 6], [0, 0, 0, 10, 11]],
            "only one group is cut",
            "Bob goes on at token 10. Block 6 holds tokens 10 and 11 of others, and he would write into it.",
        )
        null: Known = (
            [[1, 2, 3, 4, 5], [10, 11]],
            "a table without null blocks",
            "Position 3 of a table stands for tokens 6 and 7, in every group. Where nothing is needed stands block 0.",
        )
        all_of_it: Known = (
            [[1, 2, 3, 4, 5], [7, 8, 9, 10, 11]],
            "a window needs everything",
            "Of tokens 0 to 5 the window's layers need nothing any more.",
        )
        too_long: Known = (
            [[1, 2, 3, 4, 5], [0, 0, 0, 0, 10, 11]],
            "null blocks are not counted",
            "10 tokens are five blocks of two, in each group, null blocks included.",
        )
        is_nested = all(isinstance(group, (list, tuple)) for group in blocks_of_b)
        report.true(is_nested, f"A list for each group, as [[...], [...]], and not {blocks_of_b!r}.")
        blocks = [list(group) for group in blocks_of_b]
        known_blocks = (uncut, null, all_of_it, too_long)
        report.equal(ada_has_ended(12).hits(B), blocks, "blocks of each group", known=known_blocks)


# -- 13.2 ---------------------------------------------------------------------------------------------------


def serves(*lengths: int) -> Callable[[int], int]:
    """A group that can serve these lengths, and 0."""
    return lambda length: max(n for n in (0, *lengths) if n <= length)


def check_common_length(common_length: Any, report: Report) -> None:
    everything = serves(*range(1, 41))
    with report.case("one group decides for itself"):
        report.equal(6, common_length([serves(2, 6)], 12), "serves 2 or 6")
        report.equal(2, common_length([serves(2, 6)], 5), "serves 2 or 6, at most 5")
    with report.case("two groups meet at a length that both can serve"):
        got = common_length([serves(2, 4, 6, 8, 10, 12), serves(2, 6, 10)], 12)
        one_yes: Known = (12, "one group is enough", "The first can serve 12, and the second cannot.")
        report.equal(10, got, "10 is in both", known=(one_yes,))
        report.equal(4, common_length([serves(4, 12), everything], 11), "only 4 or 12, at most 11")
    with report.case("each is asked about what the others have left"):
        alone: Known = (
            9,
            "the shortest answer",
            "Asked alone they say 9 and 10. At 9 the second has only 4: it must be asked about the other's answer.",
        )
        first: Known = (4, "one round is enough", "The first group cannot serve 4, and nobody has asked it.")
        report.equal(
            3, common_length([serves(3, 9), serves(3, 4, 10)], 12), "(3, 9), (3, 4, 10)", known=(alone, first)
        )
    with report.case("one round is not enough"):
        groups = [everything, serves(4, 10), serves(4, 6)]
        known: tuple[Known, ...] = (
            (
                6,
                "one round is enough",
                "Six tokens suit the last group. The second was never asked about six, and cannot serve them.",
            ),
        )
        report.equal(4, common_length(groups, 12), "(all), (4, 10), (4, 6)", known=known)
    with report.case("two rounds are not enough"):
        ladder = [serves(1, 3, 5, 7, 9, 12), serves(1, 2, 4, 6, 8, 10)]
        twice: Known = (
            8,
            "two rounds are enough",
            "Every answer may make the next question another one. It ends when a whole round changes nothing.",
        )
        report.equal(1, common_length(ladder, 12), "(1, 3, 5, 7, 9, 12), (1, 2, 4, 6, 8, 10)", known=(twice,))
    with report.case("nothing in common is 0"):
        report.equal(0, common_length([serves(12), serves(10)], 12), "(12), (10)")
        report.equal(0, common_length([everything, serves()], 12), "(all), (nothing)")
        report.equal(0, common_length([everything, everything], 0), "at most 0")
    with report.case("the order of the groups does not matter"):
        for groups in ([serves(3, 8), serves(3, 7)], [serves(3, 7), serves(3, 8)]):
            report.equal(3, common_length(groups, 9), "(3, 8) and (3, 7), both ways")


# -- 13.3 ---------------------------------------------------------------------------------------------------


def asked(stage: GroupStage, token_ids: Iterable[int]) -> tuple[list[list[int]], tuple[int, int]]:
    """Blocks per group, and (hit, boundary)."""
    token_ids = list(token_ids)
    return stage.hits(token_ids), stage.found(token_ids)


def check_coordinator(agree: Any, report: Report) -> None:
    with report.case("three answers: a tuple with the blocks of each group, the length, the boundary"):
        _want_three(agree, report)
    _check_hits(agree, report)
    _check_boundary(agree, report)
    with report.case("vLLM's recorded lookups"):
        for name in GROUP_TRACES:
            result = replay_bare(name, Parts(coordinator=agree))
            report.true(result.difference is None, f"{name}: {result.difference}")
    with report.case("the engine runs on it, under guard"):
        result = replay("script_hybrid_junction", {"coordinator": agree})
        said = "all equal" if result.difference is None else result.difference
        report.equal("all equal", said, result.name)


def _want_three(agree: Any, report: Report) -> None:
    stage = ada_has_ended(12)
    hashes: list[BlockHash] = []
    stage.hasher.extend(hashes, B)
    answer = agree(stage.groups, False).find_longest_cache_hit(hashes, len(A))
    is_three = isinstance(answer, tuple) and len(answer) == 3
    came = f"{len(answer)} came" if isinstance(answer, tuple) else f"a {type(answer).__name__} came"
    report.true(is_three, f"A tuple of three answers is wanted, and {came}.")
    blocks, *numbers = answer
    is_tuple = isinstance(blocks, tuple) and len(blocks) == 2
    is_tuple = is_tuple and all(isinstance(each, (list, tuple)) for each in blocks)
    report.true(
        is_tuple, f"The blocks come in a tuple, a list for each group, not in a {type(blocks).__name__}."
    )
    for name, number in zip(("length", "boundary"), numbers, strict=True):
        report.true(
            isinstance(number, int), f"The {name} is a number of tokens, 0 for none, and not {number!r}."
        )


def _check_hits(agree: Any, report: Report) -> None:
    with report.case("a cold cache serves nothing"):
        stage = GroupStage(31, full(2), window(2, 4), coordinator=agree)
        report.equal(([[], []], (0, 0)), asked(stage, B), "blocks and (hit, boundary)")
    with report.case("all groups have everything"):
        expected = [[1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 11, 12]]
        report.equal(expected, asked(ada_has_ended(coordinator=agree), B)[0], "blocks")
        report.equal((12, 0), ada_has_ended(coordinator=agree).found(B), "(hit, boundary)")
    with report.case("never more than max_length"):
        uncapped: Known = (
            (12, 0),
            "the whole prompt may be found",
            "max_length is one token less than the prompt, so that something is left to run.",
        )
        report.equal(
            (10, 0), ada_has_ended(coordinator=agree).found(A), "the 12 tokens again", known=(uncapped,)
        )
    with report.case("whoever has less makes it shorter for all"):
        uncut: Known = (
            [[1, 2, 3, 4, 5, 6], [0, 0, 0, 10, 11]],
            "only one group is cut",
            "Each group gets the blocks of the common length, or the request writes into a block that others share.",
        )
        stage = ada_has_ended(12, coordinator=agree)
        report.equal([[1, 2, 3, 4, 5], [0, 0, 0, 10, 11]], stage.hits(B), "without block 12", known=(uncut,))
        stage = ada_has_ended(12, 3, coordinator=agree)
        report.equal([[1, 2], [7, 8]], stage.hits(B), "without blocks 12 and 3")
    with report.case("one round is not enough"):
        once: Known = (
            (4, 12),
            "one round is enough",
            "Full attention said 12, the window 10, the states 4. Nobody asked the window about 4, and it cannot.",
        )
        stage = _three_groups(agree)
        report.equal(
            (0, 12), stage.found(sharing(12)), "window without its block of tokens 2 and 3", known=(once,)
        )
    with report.case("the blocks come in the order of the groups"):
        stage = GroupStage(31, window(2, 4), full(2), coordinator=agree)
        stage.start("ada", A)
        stage.finish("ada")
        swapped: Known = (
            [[7, 8, 9, 10, 11, 12], [0, 0, 0, 0, 5, 6]],
            "blocks in the order of asking",
            "Full attention is asked first, and here it is the second group: its blocks are the second list.",
        )
        report.equal(
            [[0, 0, 0, 0, 5, 6], [7, 8, 9, 10, 11, 12]], stage.hits(B), "window, then full", known=(swapped,)
        )
    with report.case("blocks of several sizes"):
        stage = GroupStage(60, full(4), window(2, 4), coordinator=agree)
        stage.start("ada", range(15))
        stage.finish("ada")
        report.equal((12, 0), stage.found(range(15)), "15 tokens, blocks of 4 and of 2")
        report.equal([[1, 2, 3], [0, 0, 0, 0, 9, 10]], stage.hits(range(15)), "their blocks")


def _three_groups(coordinator: Any) -> GroupStage:
    """States after 4 and 12 tokens; the window lacks its block of tokens 2 and 3, and the last one."""
    stage = GroupStage(60, full(2), window(2, 4), states(2), coordinator=coordinator)
    stage.start("ada", range(13), 4, 8, 1)
    stage.finish("ada")
    stage.forget(range(12), group=1, positions=(1, 5))
    return stage


def _check_boundary(agree: Any, report: Report) -> None:
    with report.case("the boundary is how far some group got"):
        known: tuple[Known, ...] = (
            (
                (10, 0),
                "no boundary",
                "Full attention could serve 12. The next request finds 12 if the window is kept.",
            ),
            (
                (10, 10),
                "the boundary is the hit",
                "At the hit nothing has to be kept: everybody has it already. It is the longest answer, 12.",
            ),
            ((10, 2), "the boundary is a difference", "It is a position, counted from the first token: 12."),
        )
        report.equal((10, 12), ada_has_ended(12, coordinator=agree).found(B), "without block 12", known=known)
    with report.case("there is none if nobody got further than the hit"):
        needless: Known = (
            (12, 12),
            "a boundary where the hit ends",
            "All groups serve 12 already. A boundary would make them keep what they have.",
        )
        report.equal(
            (12, 0), ada_has_ended(coordinator=agree).found(B), "everything is there", known=(needless,)
        )
    with report.case("what lies behind full attention's end is of no use"):
        best: Known = (
            (4, 10),
            "the best of any group",
            "The window alone could serve 10, but full attention ends at 4, and nobody could start at 10.",
        )
        stage = ada_has_ended(12, 3, coordinator=agree)
        report.equal((4, 0), stage.found(B), "without blocks 12 and 3", known=(best,))
        stage = GroupStage(31, window(2, 4), full(2), coordinator=agree)
        stage.start("ada", A)
        stage.finish("ada")
        stage.evict(9)
        listed: Known = (
            (4, 12),
            "asked in the order of the groups",
            "The window is the first group of the list here, and full attention is asked first all the same.",
        )
        report.equal((4, 0), stage.found(B), "window, then full, without block 9", known=(listed, best))
    with report.case("states that no chunk has left"):
        for chunks, k, expected in (((6, 6, 1), 10, (6, 10)), ((12, 1), 6, (0, 6)), ((6, 6, 1), 12, (12, 0))):
            stage = states_of(chunks, coordinator=agree)
            report.equal(expected, stage.found(sharing(k)), f"chunks {chunks}, {k} shared")
    with report.case("the third request finds what the second could not"):
        stage = GroupStage(200, full(4), states(4), retention=0, coordinator=agree)
        found = []
        for number in (1, 2, 3):
            prompt = [*range(16), *range(1000 * number, 1000 * number + 9)]
            found.append(stage.found(prompt))
            stage.start(str(number), prompt)
            stage.finish(str(number))
        report.equal(
            [(0, 0), (0, 16), (16, 0)], found, "(hit, boundary) of three prompts that share 16 tokens"
        )


# -- 13.4 ---------------------------------------------------------------------------------------------------


def check_cutting(cutting: Any, report: Report) -> None:
    def stage_of(*groups: GroupSpec, evicted: int, num_tokens: int = 17) -> GroupStage:
        stage = GroupStage(60, *groups, coordinator=cutting)
        stage.start("ada", range(num_tokens))
        stage.finish("ada")
        stage.evict(evicted)
        return stage

    with report.case("every group is cut to the common length"):
        stage = stage_of(full(2), full(4), window(2, 4), evicted=21)
        hits = stage.hits(range(17))
        if hits[1] == [10, 11, 12, 13] and len(hits[0]) == 6:
            report.as_given()
        known: tuple[Known, ...] = (
            (
                [[1, 2, 3], [10, 11, 12], [0, 0, 0]],
                "blocks are of one size",
                "12 tokens are six blocks of two and three blocks of four. Each group has its own block size.",
            ),
            (
                [[1, 2, 3, 4], [10, 11, 12, 13], [0, 0, 0, 0]],
                "the shortest list",
                "The common length is in tokens. Four blocks of two hold 8 tokens, and four of four hold 16.",
            ),
            (
                [[1, 2, 3, 4, 5, 6, 7, 8], [10, 11, 12, 13], [0, 0, 0, 0, 19, 20]],
                "longer than the hit",
                "The hit is 12 tokens: six blocks of two, three of four. Full attention has 16, and keeps 12 of them.",
            ),
            (
                [[1, 2, 3, 4, 5, 6, 7, 8], [10, 11, 12], [0, 0, 0, 0, 19, 20]],
                "the other one keeps too much",
                "Both groups with full attention have 16 tokens, so both are cut.",
            ),
        )
        report.equal([[1, 2, 3, 4, 5, 6], [10, 11, 12], [0, 0, 0, 0, 19, 20]], hits, "blocks", known=known)
        report.equal((12, 16), stage.found(range(17)), "(hit, boundary)")
    with report.case("in any order of the groups"):
        stage = stage_of(window(2, 4), full(4), full(2), evicted=7)
        expected = [[0, 0, 0, 0, 5, 6], [10, 11, 12], [15, 16, 17, 18, 19, 20]]
        report.equal(expected, stage.hits(range(17)), "blocks of window, full 4, full 2")
    with report.case("three groups with full attention"):
        groups = full(2), full(4), full(8), window(2, 4)
        stage = stage_of(*groups, evicted=47, num_tokens=33)
        counts = [len(blocks) for blocks in stage.hits(range(33))]
        report.equal([12, 6, 3, 12], counts, "24 tokens in blocks of 2, 4, 8, 2")
    with report.case("the request's own tokens get blocks of its own"):
        stage = stage_of(full(2), full(4), window(2, 4), evicted=21)
        tables = stage.start("bob", range(17))
        report.equal([9, 5, 9], [len(table) for table in tables], "lengths of Bob's tables")
        shared = {10, 11, 12, 13} & set(tables[1])
        report.equal({10, 11, 12}, shared, "blocks of Ada's in his second table")
    with report.case("what is complete is not cut"):
        stage = GroupStage(60, full(2), full(4), window(2, 4), coordinator=cutting)
        stage.start("ada", range(17))
        report.equal((16, 0), stage.found(range(17)), "(hit, boundary)")
        report.equal([8, 4, 8], [len(blocks) for blocks in stage.hits(range(17))], "blocks in each group")


# -- 13.5 ---------------------------------------------------------------------------------------------------


def two_have_ended(manager: Any, num_blocks: int = 9) -> GroupStage:
    """Ada, then Cy, with four tokens each in blocks 1 to 4 and 5 to 8. Free queue 2 1 4 3 6 5 8 7."""
    stage = GroupStage(num_blocks, full(2), window(2, 4), manager=manager)
    for name, first in (("ada", 0), ("cy", 50)):
        stage.start(name, range(first, first + 4))
        stage.finish(name)
    return stage


def check_adoption(manager: Any, report: Report) -> None:
    with report.case("the hits of all groups are taken before any new block"):
        stage = two_have_ended(manager)
        tables = _tables(stage, report)
        if tables == [[1, 2, 4], [3, 4, 6]]:
            report.as_given()
        elif tables and set(tables[0]) & set(tables[1]):
            report.misconception(
                "one group still takes another one's hit",
                "A block stands in both tables. Whichever group is first, all must adopt before any takes a new one.",
            )
        report.equal([[1, 2, 6], [3, 4, 5]], tables, "Bob's tables")
        report.equal([8, 7], stage.queue, "free queue")
    with report.case("every block has one user"):
        stage = two_have_ended(manager)
        _tables(stage, report)
        twice: Known = (
            {1: 2, 2: 2, 3: 2, 4: 2, 5: 1, 6: 1},
            "hits are counted twice",
            "add_computed_blocks touches the blocks. Touched once more, they never become free again.",
        )
        report.equal(
            dict.fromkeys(range(1, 7), 1), dict(sorted(stage.users.items())), "users", known=(twice,)
        )
    with report.case("a refusal leaves nothing behind"):
        stage = two_have_ended(manager)
        stage.start("rae", range(300, 304))
        before = stage.queue, stage.users
        granted = stage.start("bob", range(50, 55))
        if granted is None and (stage.queue, stage.users) != before:
            report.misconception(
                "a refusal leaves something behind",
                "Ask for all groups at once, and only then take. A request that waits must hold nothing.",
            )
        report.equal(None, granted, "Bob brings Cy's tokens: 4 blocks found, 2 new, 4 free")
        report.equal(before, (stage.queue, stage.users), "free queue and users")
    with report.case("a running request grows in every group"):
        stage = GroupStage(20, full(2), window(2, 4), manager=manager)
        stage.start("ada", range(4))
        stage.append("ada", 4)
        report.equal([[1, 2, 5], [3, 4, 6]], stage.schedule("ada"), "Ada's 5th token")
    with report.case("without a hit all blocks are new"):
        stage = GroupStage(20, full(2), window(2, 4), manager=manager)
        report.equal([[1, 2], [3, 4]], stage.start("ada", range(3)), "Ada's tables")


def _tables(stage: GroupStage, report: Report) -> Any:
    try:
        return stage.start("bob", range(5))
    except IntegrityError as error:
        if "adopts a hit, but holds blocks already" in str(error):
            report.misconception(
                "new blocks come before the hits",
                "The hit is the head of the table, and new blocks are taken from the queue in which it stands.",
            )
        raise


# -- 13.6 ---------------------------------------------------------------------------------------------------

WHERE = {
    "agrees": "HybridKVCacheCoordinator.find_longest_cache_hit",
    "hands_on": "KVCacheManager.get_computed_blocks",
    "ends_chunk": "Scheduler._mamba_block_aligned_split",
    "one_look": "KVCacheCoordinator.get_num_blocks_to_allocate",
    "finds_state": "MambaManager.find_longest_cache_hit",
}


def check_where(where: dict[str, str], report: Report) -> None:
    names = {symbol for symbol, _ in places()}
    known: dict[str, tuple[Known, ...]] = {
        "agrees": (
            (
                "UnitaryKVCacheCoordinator.find_longest_cache_hit",
                "one group agrees with itself",
                "That coordinator is for models with one group, and passes the question on.",
            ),
            (
                "KVCacheManager.get_computed_blocks",
                "the manager agrees",
                "The manager caps the length and asks its coordinator. The groups are the coordinator's.",
            ),
        ),
        "hands_on": (
            (
                "HybridKVCacheCoordinator.find_longest_cache_hit",
                "the scheduler asks the coordinator",
                "The coordinator finds the boundary; the scheduler talks to the manager only.",
            ),
        ),
        "one_look": (
            (
                "MambaManager.get_num_blocks_to_allocate",
                "one group's look",
                "That is what one group needs. Somebody adds up all of them.",
            ),
        ),
    }
    with report.case("the names are in the table"):
        for name in WHERE:
            report.true(where.get(name) in names, f"{name}: {where.get(name)!r} is not in the table.")
    for name, symbol in WHERE.items():
        with report.case(name):
            report.equal(symbol, where.get(name), name, known=known.get(name, ()))


# -- 13.7 ---------------------------------------------------------------------------------------------------


def measured(group: GroupSpec, retention: int | None, num_shared: int) -> list[int]:
    """Hits of three prompts with a shared beginning."""
    stage = GroupStage(200, full(4), group, retention=retention, snapshots=False)
    hits = []
    for number in range(3):
        prompt = [*range(num_shared), *range(900 + 50 * number, 913 + 50 * number)]
        hits.append(stage.found(prompt)[0])
        stage.start(str(number), prompt)
        stage.finish(str(number))
    return hits


KINDS = {"window": window(4, 8), "state": states(4)}
RETENTION = {"dense": None, "0": 0, "16": 16}


def check_three_hits(
    three_hits: Any, first_with_all_20: dict[str, int], states_left: dict[str, list[int]], report: Report
) -> None:
    with report.case("three prompts beside a window"):
        for retention in RETENTION.values():
            expected = measured(window(4, 8), retention, 20)
            got = three_hits(window(4, 8), retention, 20)
            is_list = isinstance(got, (list, tuple)) and all(isinstance(each, int) for each in got)
            report.true(is_list, f"three_hits should give three numbers of tokens, and gives {got!r}.")
            got = list(got)
            if got == [32, 32, 32]:
                report.misconception(
                    "looked up after it ran", "A prompt that has run finds itself. Ask before it starts."
                )
            if got[1:] == [32, 32]:
                report.misconception(
                    "all of the prompt is shared",
                    "Each prompt has 13 tokens of its own after the shared ones.",
                )
            if got == [0, 0, 0]:
                report.misconception(
                    "nothing is shared", "The prompts begin with the same tokens: 0 to num_shared - 1."
                )
            if expected[1] == 0 and got == [0, 20, 20]:
                report.misconception(
                    "the boundary is found, too", "The boundary says what was shared, not what was found."
                )
            report.equal(expected, got, f"retention {retention}, 20 shared")
    with report.case("three prompts beside a state"):
        for num_shared in (8, 18, 20):
            expected = measured(states(4), 0, num_shared)
            report.equal(expected, list(three_hits(states(4), 0, num_shared)), f"{num_shared} shared")
    with report.case("the first request with all 20"):
        names = ["state, dense", "window, 0", "window, 16", "window, dense"]
        report.equal(names, sorted(first_with_all_20), "rows of the answer")
        for name, number in first_with_all_20.items():
            kind, kept = name.split(", ")
            hits = measured(KINDS[kind], RETENTION[kept], 20)
            dense: Known = (
                2,
                "dense keeps every state",
                "Nobody can keep a state that never existed: no chunk of the first prompt ended at 20.",
            )
            part: Known = (
                2,
                "a part is not all",
                "The second one finds 16 of the 20: 16 is kept, 20 is not.",
            )
            known = (dense,) if kind == "state" else (part,) if kept == "16" else ()
            report.equal(hits.index(20) + 1, number, name, known=known)
    with report.case("which chunks leave which states"):
        every: Known = (
            [2, 4, 6, 8, 10, 12],
            "a state at every block",
            "Keys exist for every token; a state exists only where a chunk ended.",
        )
        report.equal(["12, 1", "4, 4, 4, 1", "6, 6, 1"], sorted(states_left), "rows of the answer")
        for name, left in states_left.items():
            stage = states_of([int(count) for count in name.split(", ")])
            right = stage.ends_cached(range(13))
            inside: Known = (
                [*right, 13],
                "a state inside a block",
                "13 tokens end inside a block, which has no hash.",
            )
            report.equal(right, list(left), f"chunks {name}", known=(every, inside))
