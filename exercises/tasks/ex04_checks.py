"""How the answers to exercise 04 are judged: by their behaviour, through public calls, on fresh objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from exercises.grader import Report
from exercises.grader.report import Known
from exercises.tasks.ex04_scene import Stage, workload
from exercises.tasks.ex04_traces import LOOKUP_TRACES, MANAGER_TRACES, replay, replay_bare
from refengine.errors import IntegrityError
from refengine.parts import Parts
from refengine.trace.codemap import Generation, call_path
from refengine.v1.block import KVCacheBlock

NEW = range(500, 600)  # tokens that no other request of a story has
DECIDES = "who_decides_which_blocks_are_computed"
SKIPS = "who_skips_computing_those_tokens"


def ids(blocks: Iterable[KVCacheBlock]) -> list[int]:
    """Block ids, in order."""
    return [block.block_id for block in blocks]


def ada_has_ended(num_blocks: int = 11, num_tokens: int = 14, **options: Any) -> Stage:
    """Ada had the tokens 0, 1, ... in blocks 1, 2, ... and has ended."""
    stage = Stage(num_blocks, **options)
    stage.start("ada", range(num_tokens))
    stage.finish("ada")
    return stage


# -- 04.1 ---------------------------------------------------------------------------------------------------

CAP: Known = (
    12,
    "the whole prompt may be found",
    "One token must be left to run, or there is nothing to sample from. Hits are whole blocks, so block 3 goes.",
)
ONE_LESS: Known = (
    11,
    "only the last token is computed again",
    "That is V0. In V1 a hit is a list of whole blocks: 11 tokens allow two of them.",
)
HOLE: Known = (
    8,
    "later blocks are found after a difference",
    "The hash of a block covers everything before it. After the first difference no block is the same.",
)
PARTIAL_D: Known = (
    6,
    "a part of a block is found",
    "Block 2 differs in its last token, and then all of it differs.",
)
UNHASHED: Known = (14, "a part of a block is found", "Ada's block 4 was never full, so it has no hash.")
THIRTEEN: Known = (13, "only the last token is computed again", "A hit is a list of whole blocks: 12 tokens.")
SHIFTED: Known = (
    12,
    "any common piece is found",
    "Only a common beginning counts. With another first token every hash is another.",
)


def check_found(found: dict[str, int], bobs_table: list[int], cleos_table: list[int], report: Report) -> None:
    prompts: dict[str, Iterable[int]] = {
        "a": range(14),
        "b": range(12),
        "c": range(3),
        "d": [*range(7), 99, *range(8, 14)],
        "e": [99, *range(13)],
        "f": range(20),
    }
    known: dict[str, tuple[Known, ...]] = {
        "a": (UNHASHED, THIRTEEN),
        "b": (CAP, ONE_LESS),
        "d": (PARTIAL_D, HOLE, (12, *HOLE[1:])),
        "e": (SHIFTED,),
        "f": (UNHASHED,),
    }
    with report.case("every prompt has an answer"):
        report.equal(sorted(prompts), sorted(found), "prompts")
    for name, tokens in prompts.items():
        with report.case(f"prompt {name}"):
            expected = 4 * len(ada_has_ended().lookup(tokens))
            report.equal(expected, found.get(name), "tokens found", known=known.get(name, ()))
    stage = ada_has_ended()
    bob, cleo = stage.start("bob", range(12)), stage.start("cleo", range(13))
    with report.case("Bob's block table"):
        shared: Known = ([1, 2, 3], *CAP[1:])
        report.equal(bob, bobs_table, "Bob's table", known=(shared,))
    with report.case("Cleo's block table"):
        newest: Known = (
            [1, 2, 4, 5],
            "the last copy is found",
            "Blocks 3 and 4 have the same content. The one that was published first is found.",
        )
        late: Known = (
            [1, 2, 5, 6],
            "a block must be computed to be found",
            "In V1 a block can be found as soon as it is allocated; and Ada's block 3 was still there.",
        )
        report.equal(cleo, cleos_table, "Cleo's table", known=(newest, late))


# -- 04.2 ---------------------------------------------------------------------------------------------------


def check_lookup(lookup: Any, report: Report) -> None:
    def ask(stage: Stage, num_tokens: int, max_length: int, drop_last: bool = False) -> list[int]:
        hashes = stage.wait("?", range(num_tokens)).block_hashes
        group = stage.manager.coordinator.groups[0]
        return ids(group.find_longest_cache_hit(hashes, max_length, drop_last))

    with report.case("the chain is found up to its end"):
        for num_tokens, expected in ((14, [1, 2, 3]), (11, [1, 2]), (3, []), (20, [1, 2, 3])):
            stage = ada_has_ended(lookup=lookup)
            report.equal(expected, stage.lookup(range(num_tokens)), f"{num_tokens} tokens")
    with report.case("never more than max_length, rounded down to whole blocks"):
        known: tuple[Known, ...] = (
            (
                [1, 2, 3],
                "the whole prompt may be found",
                "max_length is the number of tokens less one. Without it a prompt that is cached to its end leaves "
                "nothing to run.",
            ),
            (
                [1, 2],
                "the cap is rounded up",
                "Five tokens allow one block of four. A second block would hold three tokens too many.",
            ),
        )
        report.equal(
            [1], ask(ada_has_ended(lookup=lookup), 12, 5), "max_length 5, three blocks cached", known=known
        )
        report.equal([1, 2], ada_has_ended(lookup=lookup).lookup(range(12)), "the 12 tokens once more")
    with report.case("it stops at the first miss"):
        stage = ada_has_ended(lookup=lookup)
        stage.evict(2)
        hole: Known = (
            [1, 3],
            "a hole does not end the prefix",
            "Block 3 belongs behind block 2. At the place of block 2 it would give the wrong tokens to attention.",
        )
        report.equal([1], stage.lookup(range(14)), "without block 2", known=(hole,))
        stage = ada_has_ended(lookup=lookup)
        stage.evict(1)
        bisected: Known = (
            [2, 3],
            "after a hit everything before it is there",
            "A bisection looks at the middle and believes the rest. V0 did, and reported missing blocks as computed.",
        )
        report.equal([], stage.lookup(range(14)), "without block 1", known=(bisected,))
    with report.case("nothing changes, however often it is asked"):
        stage = ada_has_ended(lookup=lookup)
        before = stage.queue, stage.users
        answers = [stage.lookup(range(14)) for _ in range(3)]
        if (stage.queue, stage.users) != before:
            report.misconception(
                "a lookup takes the blocks",
                "Its request may be refused or ask again. Blocks are taken when slots are allocated.",
            )
        report.equal([[1, 2, 3]] * 3, answers, "three lookups")
        report.equal(before, (stage.queue, stage.users), "free queue and users")
    with report.case("drop_last gives one block back"):
        stage = ada_has_ended(lookup=lookup)
        kept: Known = (
            [1, 2, 3],
            "drop_last is for somebody else",
            "A draft head needs the hidden states of the last block's tokens, so that block is computed again.",
        )
        report.equal([1, 2], ask(stage, 14, 13, drop_last=True), "drop_last", known=(kept,))
        report.equal([], ask(stage, 3, 2, drop_last=True), "drop_last without a hit")
    with report.case("vLLM's recorded lookups"):
        for name in LOOKUP_TRACES:
            result = replay_bare(name, Parts(full_attention=lookup))
            report.true(result.difference is None, f"{name}: {result.difference}")
    with report.case("the engine runs on it, under guard"):
        _under_guard(LOOKUP_TRACES[-1], {"full_attention": lookup}, report)


def _under_guard(name: str, parts: dict[str, Any], report: Report) -> None:
    result = replay(name, parts)
    report.equal("all equal", "all equal" if result.difference is None else result.difference, name)


# -- 04.3 ---------------------------------------------------------------------------------------------------

FREE_HITS = (
    "a hit costs nothing",
    "A hit that nobody uses stands in the free queue. Adopting it takes it from there, so it is one free block less.",
)
LEFT_BEHIND = (
    "a refusal leaves something behind",
    "A refused request waits and must hold nothing: nobody gives its blocks back until it runs.",
)


def check_manager(manager: Any, report: Report) -> None:
    _check_publishing(manager, report)
    _check_tables(manager, report)
    _check_decision(manager, report)
    with report.case("vLLM's recorded decisions"):
        for name in MANAGER_TRACES:
            result = replay_bare(name, Parts(kv_cache_manager=manager))
            report.true(result.difference is None, f"{name}: {result.difference}")
    with report.case("the engine runs on it, under guard"):
        _under_guard(MANAGER_TRACES[-1], {"kv_cache_manager": manager}, report)


def _check_tables(manager: Any, report: Report) -> None:
    with report.case("a first request gets blocks from the front"):
        for num_tokens, expected in ((1, [1]), (4, [1]), (5, [1, 2]), (12, [1, 2, 3])):
            stage = Stage(8, manager=manager)
            report.equal(expected, stage.start("ada", range(num_tokens)), f"{num_tokens} tokens")
            report.equal(list(range(len(expected) + 1, 8)), stage.queue, "free queue")
    with report.case("a hit is the head of the table, and leaves the free queue"):
        stage = ada_has_ended(manager=manager)
        table = _published_once(stage, report, lambda: stage.start("bob", [*range(8), 77, 78]))
        report.equal([1, 2, 4], table, "Bob's table")
        stays: Known = (
            [5, 6, 7, 8, 9, 10, 3, 2, 1],
            "a hit stays in the free queue",
            "Bob uses blocks 1 and 2, and the next request would be given them as well. Touch what is adopted.",
        )
        report.equal([5, 6, 7, 8, 9, 10, 3], stage.queue, "free queue", known=(stays,))
        report.equal({1: 1, 2: 1, 4: 1}, stage.users, "users")
    with report.case("two requests on one block are two users"):
        stage = Stage(11, manager=manager)
        stage.start("ada", range(10))
        _published_once(stage, report, lambda: stage.start("bob", [*range(8), 77]))
        report.equal({1: 2, 2: 2, 3: 1, 4: 1}, stage.users, "users")
    with report.case("a running request grows block by block"):
        stage = Stage(11, manager=manager)
        stage.start("ada", range(6))
        tables = []
        for token in range(6, 10):
            stage.append("ada", token)
            tables.append(stage.schedule("ada"))
        report.equal([[1, 2], [1, 2], [1, 2, 3], [1, 2, 3]], tables, "tables with 7 to 10 tokens")
    with report.case("drafts get slots, and none beyond the model's length"):
        stage = Stage(11, manager=manager, max_model_len=10)
        stage.wait("ada", range(10))
        report.equal([1, 2, 3], stage.schedule("ada", drafts=6), "10 tokens and 6 drafts, model length 10")
        stage = Stage(11, manager=manager)
        stage.wait("ada", range(7))
        report.equal([1, 2, 3], stage.schedule("ada", drafts=3), "7 tokens and 3 drafts")


def _published_once(stage: Stage, report: Report, call: Callable[[], list[int] | None]) -> list[int] | None:
    try:
        return call()
    except IntegrityError as error:
        if "published twice" in str(error):
            report.misconception(
                "a hit is published again",
                "A hit is in the index already. Begin to publish behind it: num_published says where.",
            )
        raise


def _check_decision(manager: Any, report: Report) -> None:
    with report.case("hits that stand in the free queue count"):
        stage = _rae_runs(manager)
        refused = _try(lambda: stage.start("cleo", [*range(8), *NEW[:12]]))
        if refused is not None:
            report.misconception(*FREE_HITS)
        report.equal(None, refused, "Cleo: 2 blocks found, 3 new, 4 free")
        stage = _rae_runs(manager)
        table = stage.start("cleo", [*range(8), *NEW[:8]])
        report.equal([1, 2, 4, 5], table, "Cleo: 2 blocks found, 2 new, 4 free")
        report.equal([], stage.queue, "free queue")
    with report.case("hits that others use cost nothing"):
        stage = Stage(6, manager=manager)
        stage.start("ada", range(10))
        table = stage.start("bob", [*range(8), *NEW[:8]])
        if table is None:
            report.misconception(
                "hits are not subtracted",
                "Ada uses blocks 1 and 2, and Bob uses them with her: he needs 2 free blocks, not 4. (V0 asks for 4.)",
            )
        report.equal([1, 2, 4, 5], table, "Bob: 2 blocks found, 2 new, 2 free")
    with report.case("blocks that the request holds are not needed again"):
        stage = Stage(4, manager=manager)
        stage.start("ada", range(11))
        stage.append("ada", 11)
        report.equal([1, 2, 3], stage.schedule("ada"), "Ada's 12th token, no block free")
        stage.append("ada", 12)
        report.equal(None, stage.schedule("ada"), "Ada's 13th token, no block free")
    with report.case("a refusal leaves nothing behind"):
        stage = _rae_runs(manager)
        before = stage.queue, stage.users, stage.lookup(range(9))
        _try(lambda: stage.start("cleo", [*range(8), *NEW[:12]]))
        after = stage.queue, stage.users, stage.lookup(range(9))
        if before != after:
            report.misconception(*LEFT_BEHIND)
        report.equal(before, after, "free queue, users, what is found")
    with report.case("the watermark is left, and a whole sequence can be asked for"):
        for watermark, expected in ((0.0, [1, 2]), (0.25, None)):
            stage = Stage(5, manager=manager, watermark=watermark)
            stage.start("rae", NEW[:5])
            table = stage.start("ada", range(8))
            report.equal(expected and [3, 4], table, f"2 blocks of 2 free, {int(5 * watermark)} to be left")
        stage = Stage(5, manager=manager)
        request = stage.wait("ada", range(20))
        stage.recorder.begin_step()
        report.equal(
            None,
            stage.manager.allocate_slots(request, 4, full_sequence_must_fit=True),
            "the first 4 of 20 tokens, 4 blocks free, all must fit",
        )


def _rae_runs(manager: Any) -> Stage:
    """Case S08: Ada's two blocks are cached and free, and Rae runs. Free queue 4, 5, 2, 1."""
    stage = ada_has_ended(6, 8, manager=manager)
    stage.start("rae", range(300, 303))
    return stage


def _try(call: Callable[[], list[int] | None]) -> list[int] | str | None:
    """What the call returns, or in words what the pool said to it."""
    try:
        return call()
    except ValueError as error:
        return f"raised ValueError: {error}"


def _check_publishing(manager: Any, report: Report) -> None:
    with report.case("a chunk publishes what it fills, and no more"):
        stage = Stage(11, manager=manager)
        stage.wait("ada", range(13))
        stage.schedule("ada", num_new_tokens=6)
        known: tuple[Known, ...] = (
            (
                [1, 2],
                "the block that is begun is published",
                "Six tokens fill one block of four. The second holds two tokens and is not full.",
            ),
            (
                [],
                "published one step too late",
                "What this step fills can be found at once: the step's K/V are written before attention reads them.",
            ),
        )
        found = stage.lookup(range(13))
        if found == [] and stage.schedule("ada", num_new_tokens=1) and not stage.lookup(range(13)):
            report.misconception("nothing is published", "Blocks that are never published are never found.")
        report.equal([1], found, "found after 6 of 13 tokens", known=known)
        stage.schedule("ada", num_new_tokens=6)
        report.equal([1, 2, 3], stage.lookup(range(13)), "found after 12 of 13 tokens")
    with report.case("two requests of one step share"):
        stage = Stage(11, manager=manager)
        tables = [stage.start("ada", [*range(8), 77]), stage.start("bob", [*range(8), 78])]
        report.equal([[1, 2, 3], [1, 2, 4]], tables, "tables")
    with report.case("drafts are never published"):
        stage = Stage(11, manager=manager)
        stage.start("ada", range(5))
        stage.append("ada", 5, 6, 7)
        stage.schedule("ada", num_new_tokens=1, drafts=2)
        drafted: Known = (
            [1, 2],
            "drafts are published",
            "6 and 7 are guesses. If the model disagrees, other tokens take their slots, and the hash would lie.",
        )
        report.equal([1], stage.lookup(range(9)), "found of 0 to 8", known=(drafted,))
    with report.case("generated tokens are published too"):
        stage = Stage(11, manager=manager)
        stage.start("ada", range(6))
        for token in (60, 61):
            stage.append("ada", token)
            stage.schedule("ada")
        report.equal([1, 2], stage.lookup([*range(6), 60, 61, 62]), "found of prompt and answer")


# -- 04.4 ---------------------------------------------------------------------------------------------------


def check_resume(resume: Any, report: Report) -> None:
    with report.case("start and share end where the sequence ends"):
        stage = _preempted(8, 1)
        share = _share(resume, stage, report)
        if share == (8, 9):
            report.as_given()
        again: Known = (
            (0, 9),
            "everything is computed again",
            "Her blocks are still in the cache. Preempted means given back, not forgotten.",
        )
        report.equal((8, 1), share, "Ada: 9 tokens, 8 of them found", known=(again,))
        table = stage.table("ada")
        if len(table) > 3:
            report.misconception(
                "the hit is counted twice",
                "allocate_slots adds the hit to the request's computed tokens itself. They are 0 until it is admitted.",
            )
        report.equal([1, 2, 3], table, "her table")
    with report.case("what others took is computed again"):
        stage = _preempted(8, 1)
        stage.evict(2)
        one: Known = (
            (4, 1),
            "one token is left",
            "Only if nobody took anything. Here block 2 is gone, and five tokens must be computed.",
        )
        share = _share(resume, stage, report)
        report.equal((4, 5), share, "Ada without block 2", known=(one,))
    with report.case("generated tokens come back as well"):
        stage = _preempted(7, 6)
        share = _share(resume, stage, report)
        report.equal((12, 1), share, "7 prompt tokens and 6 generated ones")
    with report.case("never more than the budget"):
        stage = _preempted(8, 1)
        stage.evict(1)
        share = _share(resume, stage, report, 4)
        all_of_it: Known = (
            (0, 9),
            "the budget is forgotten",
            "A step has room for so many tokens. The rest comes in the next step.",
        )
        report.equal((0, 4), share, "9 tokens to compute, budget 4", known=(all_of_it,))
        report.equal([1], _renamed(stage.table("ada")), "blocks for 4 tokens")
    with report.case("a refusal is passed on"):
        stage = _preempted(8, 1, num_blocks=4)
        stage.start("rae", NEW[:8])
        report.equal(None, resume(stage.manager, stage.requests["ada"], 100), "with one block free")


def _share(resume: Any, stage: Stage, report: Report, budget: int = 100) -> Any:
    """What `resume` says of Ada."""
    try:
        share = resume(stage.manager, stage.requests["ada"], budget)
    except ValueError as error:
        if "asks for slots" in str(error):
            report.misconception(
                "only the prompt comes back",
                "What was generated is part of the sequence too, and its last token was never computed.",
            )
        raise
    return tuple(share) if isinstance(share, list | tuple) else share


def _renamed(table: list[int]) -> list[int]:
    """How many blocks, as 1, 2, ...: which ones they are is the pool's business."""
    return list(range(1, len(table) + 1))


def _preempted(num_prompt: int, num_generated: int, num_blocks: int = 9) -> Stage:
    """Ada ran, generated tokens 0, 1, ... on, and lost her blocks. The last token was sampled and never computed."""
    stage = Stage(num_blocks)
    stage.start("ada", range(num_prompt))
    for token in range(num_prompt, num_prompt + num_generated):
        if token > num_prompt:
            stage.schedule("ada")
        stage.append("ada", token)
    stage.preempt("ada")
    return stage


# -- 04.5 ---------------------------------------------------------------------------------------------------


def check_hasty(manager: Any, report: Report) -> None:
    with report.case("a refused request holds nothing"):
        stage = _rae_runs(manager)
        queue = stage.queue
        granted = _reserve(stage, "cleo", [*range(8), *NEW[:12]], 12)
        if granted is None and stage.table("cleo"):
            report.as_given()
        if granted is not None:
            report.misconception(*FREE_HITS)
        report.equal(None, granted, "Cleo: 2 blocks found, 3 new, 4 free")
        report.equal([], stage.table("cleo"), "Cleo's table")
        report.equal(queue, stage.queue, "free queue")
    with report.case("the order of the free queue is as before"):
        stage = Stage(9, manager=manager)
        stage.start("ada", range(8))
        stage.start("bob", range(100, 108))
        stage.finish("ada")
        stage.finish("bob")
        stage.start("rae", NEW[:13])
        stage.reserve("cleo", [*range(8), *range(600, 616)], 16)
        moved: Known = (
            [4, 3, 2, 1],
            "a refusal reorders the queue",
            "The blocks were taken and given back, and now they are the last to be evicted. Ask first, then take.",
        )
        report.equal([2, 1, 4, 3], stage.queue, "free queue", known=(moved,))
    with report.case("who fits is admitted"):
        stage = Stage(6, manager=manager)
        stage.start("ada", range(10))
        granted = stage.reserve("bob", [*range(8), *NEW[:8]], 8)
        if granted is None:
            report.misconception(
                "hits are not subtracted",
                "Bob uses blocks 1 and 2 together with Ada. He needs 2 of the 2 free blocks.",
            )
        report.equal([1, 2, 4, 5], stage.table("bob"), "Bob: 2 blocks found, 2 new, 2 free")
    with report.case("it can be asked again, and then it fits"):
        stage = _rae_runs(manager)
        stage.reserve("cleo", [*range(8), *NEW[:12]], 12)
        stage.finish("rae")
        report.equal(
            [1, 2, 3, 4, 5], sorted(stage.start("cleo", [*range(8), *NEW[:12]]) or []), "Cleo's blocks"
        )
    with report.case("everything else is as before"):
        for name in ("script_hit_needs_capacity", "script_out_of_blocks", "script_preempt_relookup"):
            result = replay_bare(name, Parts(kv_cache_manager=manager))
            report.true(result.difference is None, f"{name}: {result.difference}")


def _reserve(stage: Stage, name: str, token_ids: Iterable[int], count: int) -> Any:
    """Ids of the new blocks, None for a refusal, or in words what the pool said."""
    try:
        granted = stage.reserve(name, token_ids, count)
    except ValueError as error:
        return f"raised ValueError: {error}"
    return None if granted is None else granted.ids()


# -- 04.6 ---------------------------------------------------------------------------------------------------


def check_drafting(manager: Any, report: Report) -> None:
    with report.case("a draft is not found"):
        stage = Stage(11, manager=manager)
        stage.start("ada", range(5))
        stage.append("ada", 5, 6, 7)
        table = stage.schedule("ada", num_new_tokens=1, drafts=2)
        found = stage.lookup(range(9))
        if found == [1, 2]:
            report.as_given()
        report.equal([1, 2], table, "Ada's table")
        report.equal([1], found, "found of 0 to 8")
    with report.case("what is computed is found at once"):
        stage = Stage(11, manager=manager)
        stage.wait("ada", range(9))
        stage.schedule("ada", num_new_tokens=9, drafts=3)
        known: tuple[Known, ...] = (
            (
                [],
                "no publishing beside drafts",
                "The nine tokens are the request's own and computed in this step. Only the drafts are uncertain.",
            ),
            (
                [1],
                "drafts are taken off twice",
                "The drafts come on top of the nine tokens; taking them off once more hides a block that is full.",
            ),
        )
        report.equal([1, 2], stage.lookup(range(9)), "found, 9 tokens and 3 drafts", known=known)
    with report.case("generated tokens are found"):
        stage = Stage(11, manager=manager)
        stage.start("ada", range(6))
        for token in (6, 7):
            stage.append("ada", token)
            stage.schedule("ada", num_new_tokens=1, drafts=2)
        found = stage.lookup(range(9))
        prompt: Known = (
            [1],
            "only prompts are published",
            "Tokens 6 and 7 were sampled and computed. The next turn of a chat begins with them.",
        )
        report.equal([1, 2], found, "found of prompt and answer", known=(prompt,))
    with report.case("a request that was accepted later is found then"):
        stage = Stage(11, manager=manager)
        stage.start("ada", range(5))
        stage.append("ada", 5, 6, 7)
        stage.schedule("ada", num_new_tokens=1, drafts=2)
        stage.schedule("ada", num_new_tokens=2)
        report.equal([1, 2], stage.lookup(range(9)), "found once 6 and 7 are computed")
    with report.case("vLLM's recorded decision"):
        for name in ("script_lookahead", "script_decode_publishes"):
            result = replay_bare(name, Parts(kv_cache_manager=manager))
            report.true(result.difference is None, f"{name}: {result.difference}")


# -- 04.7 ---------------------------------------------------------------------------------------------------


def check_map(
    decides: dict[str, str], skips: dict[str, str], publishes: dict[str, str], report: Report
) -> None:
    generations: tuple[Generation, Generation] = ("v1", "v0")
    publishing = {
        "v1": "BlockPool.cache_full_blocks",
        "v0": "PrefixCachingBlockAllocator.mark_blocks_as_computed",
    }
    with report.case("the names are on the path of a request"):
        for generation in generations:
            path = {step.place.symbol for step in call_path(generation)}
            for answer in (decides, skips, publishes):
                name = str(answer.get(generation.upper()))
                report.true(name in path, f"{name} is not on the path of a request in {generation.upper()}.")
    for generation in generations:
        name = generation.upper()
        steps = call_path(generation)
        deciders = {step.place.symbol for step in steps if step.answers == DECIDES}
        skippers = {step.place.symbol for step in steps if step.answers == SKIPS}
        with report.case(f"who decides in {name}"):
            if decides[name] in skippers:
                report.misconception(
                    "deciding is skipping", "One says which blocks are computed, the other uses it."
                )
            report.true(decides[name] in deciders, f"{decides[name]} does not say which blocks are computed.")
        with report.case(f"who skips in {name}"):
            if name == "V0" and skips[name].startswith(("Scheduler", "SelfAttn", "ComputedBlocks", "Prefix")):
                report.misconception(
                    "V0's scheduler skips",
                    "It hands block ids on, and the worker cuts the tokens off its input.",
                )
            if name == "V1" and skips[name].startswith(("GPUModelRunner", "KVCacheManager")):
                report.misconception(
                    "V1's runner skips",
                    "The runner only starts at a later position. The tokens were never scheduled.",
                )
            report.equal(sorted(skippers), [skips[name]], "who skips")
        with report.case(f"who publishes in {name}"):
            if publishes[name] == "BlockPool.free_blocks":
                report.misconception(
                    "published at the end", "A block can be found long before its request ends."
                )
            report.equal(publishing[generation], publishes[name], "who publishes")


# -- 04.8 ---------------------------------------------------------------------------------------------------

IN_TOKENS = (
    "every request weighs the same",
    "vLLM divides tokens by tokens: a long prompt weighs more than a short one. Sum first, divide once.",
)


def check_hit_rate(
    hit_rate: Callable[..., float], never_found_at_16: int, zero_from: int, report: Report
) -> None:
    with report.case("a rate of tokens"):
        prompts = [list(range(8)), list(range(8)), list(range(40))]
        per_request, in_blocks = (0 + 4 / 8 + 8 / 40) / 3, 3 / 56
        got = hit_rate(4, prompts)
        if abs(got - per_request) < 1e-9:
            report.misconception(*IN_TOKENS)
        if abs(got - in_blocks) < 1e-9:
            report.misconception("blocks divided by tokens", "A block found is block_size tokens found.")
        if abs(got - 12 / 48) < 1e-9:
            report.misconception(
                "the first request is left out", "It asks too, and finds nothing: it counts below."
            )
        report.close(12 / 56, got, "8, 8 and 40 tokens")
    with report.case("every prompt finds what came before it"):
        report.close(0.0, hit_rate(4, [list(range(20))]), "one prompt alone")
        report.close(16 / 40, hit_rate(4, [list(range(20))] * 2), "the same 20 tokens twice")
    with report.case("whole blocks only"):
        prompts = workload(50, 12)
        total = sum(map(len, prompts))
        for block_size, shared in ((1, 50), (8, 48), (32, 32), (64, 0)):
            report.close(11 * shared / total, hit_rate(block_size, prompts), f"block size {block_size}")
    with report.case("what a block size of 16 cannot find of 50 shared tokens"):
        known = (
            (48, "found, not lost", "48 tokens are found. Asked was what is never found."),
            (
                16,
                "a whole block is lost",
                "Three blocks of 16 are 48 tokens, and as the prompts go on, no cap takes one away.",
            ),
        )
        report.equal(2, never_found_at_16, "tokens", known=known)
    with report.case("where the hit rate becomes 0"):
        early: Known = (32, "less is nothing", "32 of the 50 tokens fill a block of 32 and are found.")
        report.equal(64, zero_from, "block size", known=(early,))
