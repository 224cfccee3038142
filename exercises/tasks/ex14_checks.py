"""How the answers to exercise 14 are judged: by what they know after real events of real engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from exercises.grader import Report
from exercises.grader.report import Known
from exercises.tasks.ex14_scene import (
    CALLS,
    CHUNKS,
    FULL,
    FULL_AND_WINDOW,
    MODELS,
    POOLS,
    SMALL,
    NewsStage,
    Seat,
    Workload,
    compare,
    routed,
)
from refengine.errors import ConfigError
from refengine.hashing import BlockHash
from refengine.sampling import SamplingParams
from refengine.v1.block import KVCacheBlock
from refengine.v1.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from refengine.v1.groups.spec import CHUNKED_LOCAL, FULL_ATTENTION, MAMBA, SLIDING_WINDOW
from refengine.v1.mirror import PrefixMirror, num_certain
from refengine.v1.publisher import EventPublisher
from refengine.v1.request import Request

# -- 14.1 ---------------------------------------------------------------------------------------------------

Told = list[tuple[Any, ...]]


def small_story() -> tuple[dict[int, Told], str]:
    """The story of task 14.1 on the engine. Returns: what each step tells, and what can be found at the end."""
    stage = NewsStage(6)
    for block_hash in [*stage.hashes(range(12)), *stage.hashes(range(20, 28))]:
        stage.name(block_hash)  # a, b, c are Ada's, d and e Cleo's
    news = {}
    stage.start("ada", range(9))
    news[1] = _told(stage)
    stage.append("ada", 9, 10, 11)
    stage.schedule("ada")
    news[2] = _told(stage)
    stage.finish("ada")
    news[3] = _told(stage)
    stage.start("bob", range(8))
    news[4] = _told(stage)
    stage.start("cleo", range(20, 29))
    news[5] = _told(stage)
    return news, "".join(sorted(stage.name(block_hash) for _, block_hash in stage.index))


def _told(stage: NewsStage) -> Told:
    """The events since the last call, in the words of the task."""
    told: Told = []
    for event in stage.take():
        if isinstance(event, BlockStored):
            parent = event.parent_block_hash
            hashes = "".join(map(stage.name, event.block_hashes))
            told.append(("stored", None if parent is None else stage.name(parent), hashes))
        elif isinstance(event, BlockRemoved):
            told.append(("removed", *map(stage.name, event.block_hashes)))
    return told


CLEO = ("stored", None, "de")
KNOWN_NEWS: dict[int, tuple[Known, ...]] = {
    1: (
        (
            [("stored", None, "a"), ("stored", "a", "b")],
            "one event per block",
            "All blocks of one group that one allocation fills are told in one event.",
        ),
        (
            [("stored", None, "abc")],
            "a block is told when it is allocated, full or not",
            "Her third block holds one token of four. It has no hash yet.",
        ),
    ),
    2: (
        (
            [("stored", None, "c")],
            "every event begins a new chain",
            "The parent of c is b. Without it, nobody could hang c into a tree.",
        ),
        ([("stored", None, "abc")], "what was told is told again", "a and b were published in step 1."),
    ),
    3: (
        (
            [("removed", "c"), ("removed", "b"), ("removed", "a")],
            "ending removes",
            "A block that nobody uses can still be found. It is free and cached.",
        ),
        (
            [("removed", "a"), ("removed", "b"), ("removed", "c")],
            "ending removes",
            "A block that nobody uses can still be found. It is free and cached.",
        ),
    ),
    4: (
        (
            [],
            "equal blocks are merged",
            "Bob computes his second block himself. In V1 it is a second block with the hash b, and it is told.",
        ),
        (
            [("stored", None, "ab")],
            "what is found is told",
            "a was found, and nothing new can be found by it. Only report mode full tells it again.",
        ),
    ),
    5: (
        (
            [CLEO, ("removed", "c"), ("removed", "b")],
            "stored before removed",
            "Blocks are taken from the queue first, and lose their hashes. What they hold next is told after it.",
        ),
        ([CLEO], "eviction is silent", "Two of the blocks that she gets were cached."),
        (
            [("removed", "c"), CLEO],
            "a copy goes silently",
            "Every block that loses its hash is told, also if another block has the same hash.",
        ),
        (
            [("removed", "b"), ("removed", "c"), CLEO],
            "the head goes before the tail",
            "Ada's blocks went into the queue last one first, and come out in that order.",
        ),
        (
            [("removed", "c"), ("removed", "b"), ("removed", "a"), CLEO],
            "a block in use is taken",
            "Bob uses the block of a. It is not in the queue.",
        ),
        (
            [("removed", "cb"), CLEO],
            "one removed event for all",
            "Each block that loses its hash has an event.",
        ),
    ),
}


def check_news(news: dict[int, Told], found: str, report: Report) -> None:
    expected, left = small_story()
    with report.case("every step has an answer"):
        report.equal(sorted(expected), sorted(news), "steps")
    for number, told in expected.items():
        with report.case(f"step {number}"):
            report.equal(told, news.get(number), "events", known=KNOWN_NEWS[number])
    with report.case("what can be found at the end"):
        forgets: Known = (
            "ade",
            "one copy is all",
            "b was removed once, and there were two blocks of it. Bob's is still there.",
        )
        keeps: Known = ("abcde", "what is removed is still found", "c had one block, and Cleo got it.")
        report.equal(left, "".join(sorted(found)), "letters", known=(forgets, keeps))


# -- 14.2 ---------------------------------------------------------------------------------------------------


def stored(hashes: str, group: int = 0, **facts: Any) -> BlockStored:
    """A stored event in which every hash is a letter."""
    told: dict[str, Any] = {
        "parent_block_hash": None,
        "token_ids": tuple(range(4 * len(hashes))),
        "block_size": 4,
        "kind": FULL_ATTENTION,
        "window": None,
        "extra_keys": (None,) * len(hashes),
    }
    named = tuple(letter.encode() for letter in hashes)
    return BlockStored(block_hashes=named, group_id=group, **{**told, **facts})


def removed(letter: str, group: int = 0) -> BlockRemoved:
    return BlockRemoved((letter.encode(),), group)


def known_after(mirror_class: Any, *events: KVCacheEvent) -> list[Any]:
    """What a fresh mirror knows after these events, sorted: `(0, "a")` is the group and the letter."""
    mirror = mirror_class()
    for event in events:
        mirror.apply(event)
    known = mirror.prefixes()
    if not isinstance(known, Iterable):
        raise TypeError(f"prefixes() should give a set of (group id, hash), and gives {known!r}")
    return sorted(map(_lettered, known), key=str)


def named(letters: str) -> list[Any]:
    """Prefixes of group 0 as `known_after` gives them."""
    return [(0, letter) for letter in letters]


def _lettered(prefix: Any) -> Any:
    """A prefix with the letter of its hash. What is no (group id, hash) stays as it is."""
    match prefix:
        case (int(group), bytes(block_hash)):
            return group, block_hash.decode()
    return prefix


SET = ("a set forgets a copy", "Two blocks had this hash and one is left. The engine still finds the prefix.")
ALL_GROUPS = (
    "removed in every group",
    "Each group has blocks of its own. Here only the window has lost its block.",
)
REUSED = (
    "an announcement is counted as a copy",
    "The request found these blocks. They were stored before, and there are no more of them now.",
)
KEPT = ("counts outlive a clear", "The index is empty after it, copies included.")
SHARED = (
    "one count for all mirrors",
    "Every engine has a mirror of its own. The counts belong to the object.",
)


def check_mirror(mirror: Any, report: Report) -> None:
    with report.case("what was stored is known, and no longer when it was removed"):
        report.equal(named("ab"), known_after(mirror, stored("ab")), "stored a and b")
        report.equal(named("a"), known_after(mirror, stored("ab"), removed("b")), "b removed")
    with report.case("two blocks with one hash: one goes, and the prefix stays"):
        twice = (stored("ab"), stored("b", parent_block_hash=b"a"), removed("b"))
        report.equal(
            named("ab"), known_after(mirror, *twice), "b twice, one removed", known=((named("a"), *SET),)
        )
        report.equal(named("a"), known_after(mirror, *twice, removed("b")), "both removed")
    with report.case("groups are kept apart"):
        window = {"kind": SLIDING_WINDOW, "window": 6}
        both = (stored("a"), stored("a", 1, **window), removed("a", 1))
        report.equal(named("a"), known_after(mirror, *both), "removed in group 1", known=(([], *ALL_GROUPS),))
    with report.case("what is reused is not one more copy"):
        events = (stored("a"), stored("a", reused=True), stored("a", reused=True), removed("a"))
        report.equal(
            [], known_after(mirror, *events), "announced twice, removed once", known=((named("a"), *REUSED),)
        )
    with report.case("an event may name no hash"):
        masked = stored("", 1, kind=MAMBA, token_ids=tuple(range(16)), extra_keys=())
        report.equal(named("a"), known_after(mirror, stored("a"), masked), "16 tokens, no hash")
    with report.case("cleared is everything"):
        report.equal([], known_after(mirror, stored("a"), stored("a", 1), AllBlocksCleared()), "cleared")
        again = (stored("a"), stored("a"), AllBlocksCleared(), stored("a"), removed("a"))
        report.equal(
            [], known_after(mirror, *again), "stored and removed after it", known=((named("a"), *KEPT),)
        )
    with report.case("two mirrors know nothing of each other"):
        report.equal(named("a"), known_after(mirror, stored("a")), "the first")
        report.equal(
            named("b"), known_after(mirror, stored("b")), "the second", known=((named("ab"), *SHARED),)
        )
    with report.case("12 random engines, compared after every step"):
        where = compare(mirror)
        report.true(not where, f"The mirror is not the engine's index at {where}.")


# -- 14.3 ---------------------------------------------------------------------------------------------------


def heard(listener_class: Any, arriving: Iterable[int], num_published: int, num_kept: int = 100) -> list[int]:
    """What a listener applies, if of the batches 0, 1, ... only `arriving` reach it. Batch n holds the letter n."""
    applied: list[int] = []
    listener = _listener(listener_class, applied, publisher := EventPublisher(num_kept))
    for number in range(num_published):
        publisher.publish([removed(chr(97 + number))])
    batches = {batch.sequence: batch for batch in publisher.replay(max(0, num_published - num_kept))}
    for number in arriving:
        listener.receive(batches[number])
    return applied


def _listener(listener_class: Any, applied: list[int], publisher: EventPublisher) -> Any:
    def apply(event: BlockRemoved) -> None:
        applied.append(event.block_hashes[0][0] - 97)

    return listener_class(publisher.replay, apply)


TWICE = (
    "the batch that came is applied twice",
    "`replay` gives all batches from that number on, and so the one that came is among them.",
)
AGAIN = ("a batch that comes again is applied again", "It has been applied before. Counts would be too high.")


def check_listener(listener: Any, report: Report) -> None:
    with report.case("a gap is filled, in order, and each batch is applied once"):
        got = heard(listener, [0, 3], num_published=5)
        if got == [0, 3, 4]:
            report.as_given()
        known: tuple[Known, ...] = (
            (
                [0, 2, 3, 4],
                "the first missing batch is left out",
                "`next_sequence` is the first that was not applied, so batch 1 is missing too.",
            ),
            (
                [0, 3],
                "the gap is passed over",
                "What was in batches 1 and 2 is never known, and nothing says so.",
            ),
            ([0, 1, 2, 3, 4, 3], *TWICE),
            ([0], "what comes after a gap is thrown away", "Then nothing is ever heard again."),
            (
                [0, 0, 1, 2, 3, 4],
                "replayed from too early",
                "Batch 0 was applied before: its copies count twice.",
            ),
        )
        up_to_it = [0, 1, 2, 3]  # right as well: batch 4 is on its way
        expected = up_to_it if got == up_to_it else [0, 1, 2, 3, 4]
        report.equal(expected, got, "batches 0 and 3 arrive; 4 is published already", known=known)
    with report.case("without a gap nothing is asked for"):
        report.equal([0, 1, 2], heard(listener, [0, 1, 2], num_published=3), "0, 1, 2 arrive")
    with report.case("what was applied is not applied again"):
        after: Known = ([0, 1, 2, 3, 3], *AGAIN)
        again: Known = ([0, 1, 1], *AGAIN)
        report.equal([0, 1], heard(listener, [0, 1, 1], num_published=2), "0, 1, 1 arrive", known=(again,))
        report.equal(
            [0, 1, 2, 3], heard(listener, [0, 2, 3], num_published=4), "0, 2, 3 arrive", known=(after,)
        )
    with report.case("who comes late asks for everything"):
        report.equal([0, 1, 2, 3], heard(listener, [3], num_published=4), "only 3 arrives")
    with report.case("a gap that cannot be filled is said, and nothing is applied"):
        applied: list[int] = []
        publisher = EventPublisher(num_kept=2)
        late = _listener(listener, applied, publisher)
        for number in range(6):
            publisher.publish([removed(chr(97 + number))])
        report.raises(ConfigError, lambda: late.receive(publisher.replay(5)[0]), "batch 5; 4 and 5 are kept")
        report.equal([], applied, "applied")


# -- 14.4 ---------------------------------------------------------------------------------------------------


def check_answer(answer: Any, report: Report) -> None:
    def of(stage: NewsStage) -> Any:
        return answer(stage.groups, stage.hasher, _mirrored(stage))

    with report.case("one group: the prefix is there, or it is not"):
        stage = NewsStage(20)
        stage.start("ada", range(9))
        a, b = stage.hashes(range(8))
        _want_blocks(of(stage).get_cached_block(b, [0]), 1, report)
        listed = ("a list where None is wanted", "Only None means that the prefix is not there.")
        got = of(NewsStage(20)).get_cached_block(a, [0])
        report.equal(None, got, "an empty mirror", known=(([None], *listed), ([], *listed)))
    with report.case("several groups: all of them must hold it"):
        stage = NewsStage(40, FULL_AND_WINDOW)
        stage.start("ada", range(9))
        _, window = stage.manager.block_ids("ada")
        stage.evict(window[0])
        a, b = stage.hashes(range(8))
        one = of(stage).get_cached_block(a, [0, 1])
        if _num_blocks(one) == 2:
            report.misconception(
                "one group is enough", "The block of the window is gone. Both groups were asked for."
            )
        report.equal(None, one, "in groups 0 and 1; 1 has lost it")
        _want_blocks(of(stage).get_cached_block(b, [0, 1]), 2, report)
    with report.case("one token is always left to compute"):
        stage = NewsStage(20)
        stage.start("ada", range(8))
        cap: Known = (
            8,
            "the whole prompt may be found",
            "One token has to run. The engine asks for at most one token less than the prompt has.",
        )
        report.equal(4, of(stage).expected_hit(list(range(8))), "the same 8 tokens", known=(cap,))
        report.equal(8, of(stage).expected_hit(list(range(9))), "and one more")
    with report.case("another salt is another prefix"):
        stage = NewsStage(20)
        stage.salted("ada", range(9), "tenant")
        unsalted: Known = (0, "the salt is forgotten", "The hash of the first block covers it.")
        report.equal(8, of(stage).expected_hit(list(range(9)), "tenant"), "her salt", known=(unsalted,))
        report.equal(0, of(stage).expected_hit(list(range(9))), "no salt")
    with report.case("random engines of every kind: the mirror answers as the engine does"):
        for seed, groups in enumerate(MODELS):
            workload, mirror = Workload(seed, groups), PrefixMirror(groups)
            kinds = " and ".join(group.kind for group in groups)
            asked = answer(groups, workload.hasher, mirror)
            for step in range(25):
                for event in workload.step():
                    mirror.apply(event)
                prompt = [*workload.stems[step % 3][: 5 + step], 7]
                said = f"{kinds}, step {step}, {len(prompt)} tokens"
                report.equal(_engine_hit(workload, prompt), asked.expected_hit(prompt), said)


def _num_blocks(answer: Any) -> int | None:
    """How many blocks an answer holds. None: it is no list of blocks."""
    if not isinstance(answer, (list, tuple)) or not all(isinstance(each, KVCacheBlock) for each in answer):
        return None
    return len(answer)


def _want_blocks(answer: Any, num_groups: int, report: Report) -> None:
    said = "A block for each group that was asked for"
    report.true(_num_blocks(answer) == num_groups, f"{said}: {num_groups} in a list, not {answer!r}.")


def _mirrored(stage: NewsStage) -> PrefixMirror:
    stage.take()
    mirror = PrefixMirror(stage.groups)
    for batch in stage.publisher.replay():
        mirror.receive(batch)
    return mirror


def _engine_hit(workload: Workload, prompt: list[int]) -> int:
    request = Request("?", prompt, SamplingParams(), hasher=workload.hasher)
    return workload.manager.get_computed_blocks(request)[1]


# -- 14.5 ---------------------------------------------------------------------------------------------------

HELD = (
    "every announced block is held",
    "A hit names its whole prefix in every group. Of a sparse group only the last blocks must be there.",
)
ROUNDED = (
    "the window counts without the token itself",
    "The next token is one of the window. It looks back over window - 1 tokens.",
)
ROUNDED_DOWN = (
    "the window is rounded down",
    "Its first tokens are in one block more, and all of it is needed.",
)
DOUBTED = ("what is stored is doubted", "Only an announcement may name blocks that are not there.")
NEGATIVE = (
    "less than none is counted",
    "The copy that went was not counted here. The one stored after it is there.",
)
MINUS_ZERO = ("the last none are all", "hashes[-0:] is the whole list.")


def check_late(late: Any, report: Report) -> None:
    def told(hashes: str, kind: str = FULL_ATTENTION, window: int | None = None) -> BlockStored:
        return stored(hashes, kind=kind, window=window, reused=True)

    with report.case("what is stored from now on is known"):
        report.equal(named("ab"), known_after(late, stored("ab")), "stored")
        report.equal(named("a"), known_after(late, stored("ab"), removed("b")), "b removed")
        report.equal([], known_after(late, stored("ab"), AllBlocksCleared()), "cleared")
        sparse = stored("abc", kind=SLIDING_WINDOW, window=6)
        doubted: Known = (named("bc"), *DOUBTED)
        report.equal(
            named("abc"), known_after(late, sparse), "stored in a group with a window", known=(doubted,)
        )
    with report.case("full attention: what is announced is held"):
        unheard: Known = (
            [],
            "announcements are ignored",
            "They are the only way to learn what was stored before.",
        )
        report.equal(named("abc"), known_after(late, told("abc")), "announced", known=(unheard,))
    with report.case("an announcement is not a copy"):
        events = (told("a"), told("a"), removed("a"))
        report.equal(
            [], known_after(late, *events), "announced twice, removed once", known=((named("a"), *REUSED),)
        )
        events = (stored("a"), told("a"), removed("a"))
        report.equal(
            [], known_after(late, *events), "stored, announced, removed", known=((named("a"), *REUSED),)
        )
    everything: Known = (named("abcde"), *HELD)
    with report.case("a window: only the blocks that the next token looks back on"):
        for window, letters in ((6, "de"), (10, "cde"), (5, "e"), (9, "de")):
            got = known_after(late, told("abcde", SLIDING_WINDOW, window))
            rounded: Known = (named("de" if window == 5 else "cde"), *ROUNDED)
            down: Known = (named(letters[1:]), *ROUNDED_DOWN)
            report.equal(named(letters), got, f"window {window}", known=(everything, rounded, unheard, down))
        zero: Known = (everything[0], *MINUS_ZERO)
        report.equal([], known_after(late, told("abcde", SLIDING_WINDOW, 1)), "window 1", known=(zero,))
        report.equal(named("a"), known_after(late, told("a", SLIDING_WINDOW, 10)), "window 10, one block")
    with report.case("states: only the last one"):
        report.equal(named("e"), known_after(late, told("abcde", MAMBA)), "announced", known=(everything,))
    with report.case("chunks: none, they may have been over"):
        report.equal([], known_after(late, told("abcde", CHUNKED_LOCAL)), "announced", known=(everything,))
    with report.case("what goes and was never heard of is no mistake"):
        report.equal(named("a"), known_after(late, removed("b"), stored("a")), "b removed first")
        got = known_after(late, removed("a"), stored("a"))
        report.equal(named("a"), got, "a removed, then stored", known=(([], *NEGATIVE),))
    with report.case("random engines: never more than the engine, never less than was certain"):
        for where, known, index, certain in _late_runs(late):
            report.true(known <= index, f"It holds prefixes that the engine has not, at {where}.")
            report.true(certain <= known, f"It does not know what was told, at {where}.")


def _late_runs(late: Any) -> Iterator[tuple[str, set[Any], set[Any], set[Any]]]:
    """Where, what the mirror knows, the engine's index, and what is certain: of mirrors that come after ten steps."""
    for seed, groups in enumerate((*MODELS, FULL, CHUNKS)):
        workload, mirror, certain = Workload(seed + 20, groups), late(), Least()
        for step in range(35):
            events = workload.step()
            for event in events if step >= 10 else []:
                mirror.apply(event)
                certain.apply(event)
            yield f"workload {seed}, step {step}", set(mirror.prefixes()), workload.index, certain.known


class Least:
    """What even a late mirror without any counting knows: it takes the first removal for the last."""

    def __init__(self) -> None:
        self.known: set[tuple[int, BlockHash]] = set()

    def apply(self, event: KVCacheEvent) -> None:
        """Mutates: `known`."""
        if isinstance(event, AllBlocksCleared):
            self.known.clear()
            return
        named = [(event.group_id, block_hash) for block_hash in event.block_hashes]
        if isinstance(event, BlockRemoved):
            self.known.difference_update(named)
        else:
            self.known.update(named[len(named) - num_certain(event) :] if event.reused else named)


# -- 14.6 ---------------------------------------------------------------------------------------------------

FROM = {
    "stored": ("BlockPool.cache_full_blocks", "publish"),
    "removed": ("BlockPool.get_new_blocks", "allocate"),
    "reused": ("KVCacheManager.get_computed_blocks", "lookup"),
}


def check_places(calls: dict[str, str], marks: dict[str, str], report: Report) -> None:
    names = [name for name, _ in CALLS]
    known_calls: dict[str, tuple[Known, ...]] = {
        "removed": (
            (
                "BlockPool.free_blocks",
                "ending removes",
                "Giving blocks back changes the queue. They can be found until somebody else takes them.",
            ),
        ),
        "reused": (
            (
                "BlockPool.touch",
                "told when it is taken",
                "It is told by the lookup, also if the request is not admitted after it, and again the next time.",
            ),
        ),
        "stored": (
            (
                "BlockPool.free_blocks",
                "stored at the end",
                "Others can find a block as soon as it is published, long before its request ends.",
            ),
        ),
    }
    early: Known = (
        "run",
        "told when the K/V are there",
        "A block is published when it is allocated, before the step runs.",
    )
    with report.case("the names are in the table"):
        for name in calls.values():
            report.true(name in names, f"{name} is not in the table.")
    for event, (call, mark) in FROM.items():
        with report.case(f"where {event!r} comes from"):
            report.equal(call, calls.get(event), "call", known=known_calls[event])
        with report.case(f"the mark of {event!r}"):
            report.equal(mark, marks.get(event), "mark", known=(early,))


# -- 14.7 ---------------------------------------------------------------------------------------------------


def check_policy(policy: Any, report: Report) -> None:
    def choice(costs: list[int], queued: list[int], held: list[int] | None = None) -> int:
        seats = [Seat(*each) for each in zip(queued, held or [0] * len(costs), strict=True)]
        place = policy()(seats, costs)
        if not isinstance(place, int):
            raise TypeError(f"the rule should give a place in the list, as 0 or 1, and gives {place!r}")
        return place

    with report.case("to the engine that holds the prefix"):
        blind: Known = (
            0,
            "only the queue counts",
            "All queues are empty, and one engine has to compute 10 tokens only.",
        )
        report.equal(1, choice([50, 10, 60], [0, 0, 0]), "costs 50, 10, 60", known=(blind,))
    with report.case("a long queue outweighs a hit"):
        drowned: Known = (
            0,
            "the hit alone decides",
            "90 tokens wait there. Computing 40 more elsewhere is quicker.",
        )
        report.equal(1, choice([10, 50], [90, 0]), "costs 10 and 50, queued 90 and 0", known=(drowned,))
    with report.case("a short one does not"):
        afraid: Known = (1, "the queue is looked at first", "30 tokens wait there, and 40 are saved.")
        report.equal(0, choice([10, 50], [30, 0]), "costs 10 and 50, queued 30 and 0", known=(afraid,))
    with report.case("what is computed a second time costs twice"):
        once: Known = (
            1,
            "its own tokens count once",
            "They are waited for once by this request, and once more by whoever comes after it.",
        )
        report.equal(0, choice([10, 50], [60, 0]), "costs 10 and 50, queued 60 and 0", known=(once,))
        report.equal(1, choice([10, 50], [81, 0]), "costs 10 and 50, queued 81 and 0")
    with report.case("where all is equal, the engine that holds least"):
        first: Known = (
            0,
            "always the first",
            "New prefixes would all go to one engine, and the others stay empty.",
        )
        most: Known = (1, "to the engine that holds most", "There the prefix would push another one out.")
        report.equal(2, choice([20, 20, 20], [5, 5, 5], [7, 9, 3]), "they hold 7, 9, 3", known=(first, most))
    with report.case("and if that is equal too, the first"):
        report.equal(
            0, choice([20, 20], [5, 5], [4, 4]), "all equal", known=((1, "the last of equals", "The first."),)
        )
    with report.case("three engines and 36 requests, as the router places them"):
        expected, got = routed(SMALL, "cache_aware"), routed(SMALL, policy())
        report.equal(expected.placed, got.placed, "requests per engine")
        report.close(expected.hit_rate, got.hit_rate, "hit rate")


# -- 14.8 ---------------------------------------------------------------------------------------------------


def check_rates(hit_rates: Any, enough: int, worth: int, report: Report) -> None:
    with report.case("both hit rates, the mirrors' first"):
        workload = replace(POOLS, prefixes_per_engine=2)
        expected = [routed(workload, policy).hit_rate for policy in ("cache_aware", "round_robin")]
        answer = hit_rates(2)
        is_pair = isinstance(answer, (tuple, list)) and len(answer) == 2
        is_pair = is_pair and all(isinstance(each, float) for each in answer)
        report.true(is_pair, f"hit_rates should give two numbers from 0 to 1, and gives {answer!r}.")
        got = list(answer)
        if got == expected[::-1]:
            report.misconception("in the other order", "First the router with mirrors, then round robin.")
        if got == [routed(POOLS, policy).hit_rate for policy in ("cache_aware", "round_robin")]:
            report.misconception(
                "the pool stays as it is", "`prefixes_per_engine` sets the size of the pools."
            )
        report.close(expected, got, "room for 2 prefixes")
    with report.case("from where on a larger pool is worth little to the router with mirrors"):
        every: Known = (
            12,
            "every engine needs every prefix",
            "Each prefix has a home. Three engines with room for four each hold all twelve.",
        )
        smaller: Known = (3, "the largest pool has still more", "It finds more than 0.02 more than three do.")
        report.equal(4, enough, "prefixes per engine", known=(every, smaller))
    with report.case("the pool with which it is as good as round robin in the largest"):
        same: Known = (
            12,
            "pools of one size are compared",
            "Look for the smallest pool that reaches 12's rate.",
        )
        report.equal(3, worth, "prefixes per engine", known=(same,))
