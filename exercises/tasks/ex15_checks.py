"""How the answers to exercise 15 are judged: by runs of both engines, by records, and by a queue's public calls."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import astuple
from functools import cache
from typing import Any

from exercises.grader import Report
from exercises.grader.report import Known
from exercises.tasks.ex06_traces import replay_bare
from exercises.tasks.ex15_scene import Totals, Wave, busy, crowd, documents, favourite, serve, totals
from refengine.parts import Parts
from refengine.trace.codemap import topic
from refengine.trace.record import Mark, Record, Step
from refengine.v1.block import KVCacheBlock
from refengine.v1.kv_cache_manager import KVCacheBlocks, KVCacheManager
from refengine.v1.request import Request

# -- 15.1 ---------------------------------------------------------------------------------------------------

ADA = list(range(100, 112))
CAY = [*ADA[:8], *range(200, 206)]
STORY: list[Wave] = [{"ada": ADA}, {"bob": ADA, "cay": CAY, "dan": CAY}]
NEWCOMERS = ("bob", "cay", "dan")


def check_story(v0: dict[str, int], v1: dict[str, int], tables: dict[str, list[int]], report: Report) -> None:
    one_token: Known = (
        1,
        "V1 gives one token back",
        "V1's hits are whole blocks, and one token must be left to compute: the whole last block is.",
    )
    one_block: Known = (
        4,
        "V0 gives a whole block back",
        "V0's worker skips all computed blocks and keeps the last token, which it runs on once more.",
    )
    nothing: Known = (
        0,
        "a full hit leaves nothing to compute",
        "A token is sampled from what the model says at the last token of the prompt, so it must run on that one.",
    )
    same_step = (
        "who comes in the same step shares alike in both",
        "V1 publishes a block when its slots are allocated, V0 when scheduling ends: only in V1 does dan find it.",
    )
    cold: Known = (
        14,
        "who comes in the same step finds nothing in V0",
        "Two of the blocks were Ada's, and were computed in an earlier step. Those are found.",
    )
    known: dict[tuple[str, str], tuple[Known, ...]] = {
        ("v0", "bob"): (one_block, nothing),
        ("v1", "bob"): (one_token, nothing),
        ("v0", "cay"): (cold,),
        ("v0", "dan"): ((2, *same_step), cold),
        ("v1", "dan"): ((6, *same_step),),
    }
    for engine, answers in (("v0", v0), ("v1", v1)):
        _, record = serve(STORY, engine, num_blocks=17 - (engine == "v0"), max_tokens=1)
        computed = {each.request_id: each.scheduled[0][1] for each in record.requests()}
        for name in NEWCOMERS:
            with report.case(f"{name} in {engine.upper()}"):
                wrong = known.get((engine, name), ())
                report.equal(computed[name], answers.get(name), "tokens that the model runs on", known=wrong)
    right = {each.request_id: each.block_ids for each in record.requests()}
    fresh: Known = (
        [1, 2, 3],
        "a block that is not part of the hit is used all the same",
        "Block 3 holds what bob's last four tokens will be, but the hit ends before it: he gets a new one.",
    )
    merged: Known = (
        [1, 2, 5, 6],
        "a block that is not full is shared",
        "Block 6 holds two of cay's tokens. Only full blocks have a hash, so dan has one of his own.",
    )
    for name, wrong_tables in zip(NEWCOMERS, ((fresh,), (), (merged,)), strict=True):
        with report.case(f"{name}'s table in V1"):
            got = tables.get(name)
            got = list(got) if isinstance(got, list | tuple) else got
            report.equal(right[name], got, "block table", known=wrong_tables)


# -- 15.2 ---------------------------------------------------------------------------------------------------


def check_places(v1: dict[str, str], v0: dict[str, str], report: Report) -> None:
    skipping = topic("who_skips").v1.vllm
    publishing, slots = topic("publish"), topic("allocate_slots")
    offsets = tuple(
        (
            place.symbol,
            "the runner skips in V1",
            "The runner is told where to begin. The tokens before that were subtracted by the scheduler.",
        )
        for place in skipping[1:]
    )
    carries: Known = (
        topic("who_decides").v0.vllm[1].symbol,
        "who carries the answer decides it",
        "It turns the count into block ids. How many tokens are cached was said by the tracker, before.",
    )
    takes: Known = (
        slots.v0.vllm[1].symbol,
        "who takes the blocks says whether there is room",
        "In V0 these are two calls: one asks, the other one takes. In V1 they are one.",
    )
    index: Known = (
        topic("duplicates").v1.vllm[0].symbol,
        "the index fills itself",
        "It is the index that lookups ask. What puts the blocks of a request into it is asked for.",
    )
    caller: Known = (
        topic("preemption").v1.vllm[1].symbol,
        "who asks for room preempts",
        "It finds no room and says whose turn it is. Taking the blocks away is a method of its own.",
    )
    hashed: Known = (
        topic("duplicates").v0.vllm[0].symbol,
        "a hash makes a block computed",
        "It registers a full block under its hash. A lookup counts the block only once it is marked as computed, too.",
    )
    evicts: Known = (
        topic("free_queue").v0.vllm[1].symbol,
        "who takes a block keeps the order",
        "It asks the free list, and then somebody else, who knows which cached block is the next to go.",
    )
    how: tuple[Known, ...] = tuple(
        (
            place.symbol,
            "one way to preempt is the decision",
            "Something above it chooses between this and the other.",
        )
        for place in topic("preemption").v0.vllm[1:]
    )
    asked: tuple[tuple[str, Mapping[str, str], str, tuple[str, ...], tuple[Known, ...]], ...] = (
        ("V1", v1, "finds", (topic("who_decides").v1.vllm[0].symbol,), ()),
        ("V1", v1, "skips", (skipping[0].symbol,), offsets),
        ("V1", v1, "room", (slots.v1.vllm[0].symbol,), ()),
        ("V1", v1, "findable", _symbols(publishing.v1.vllm), (index,)),
        ("V1", v1, "order", (topic("free_queue").v1.vllm[0].symbol,), ()),
        ("V1", v1, "preempts", (topic("preemption").v1.vllm[0].symbol,), (caller,)),
        ("V0", v0, "finds", (topic("who_decides").v0.vllm[0].symbol,), (carries,)),
        ("V0", v0, "skips", (topic("who_skips").v0.vllm[0].symbol,), ()),
        ("V0", v0, "room", (slots.v0.vllm[0].symbol,), (takes,)),
        ("V0", v0, "findable", _symbols(publishing.v0.vllm), (hashed,)),
        ("V0", v0, "order", (topic("free_queue").v0.vllm[0].symbol,), (evicts,)),
        ("V0", v0, "preempts", (topic("preemption").v0.vllm[0].symbol,), how),
    )
    for generation, answers, what, right, known in asked:
        with report.case(f"{generation}: {what}"):
            got = answers.get(what)
            report.equal(got if got in right else right[0], got, what, known=known)


def _symbols(places: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(place.symbol for place in places)


# -- 15.3 ---------------------------------------------------------------------------------------------------

RETRIES = (
    "every lookup counts",
    "A request is looked up before every attempt to admit it. Only the attempt that succeeds spares it anything.",
)
FIRST_ONLY = (
    "only the first admission finds something",
    "Who lost its blocks is admitted again, and finds what nobody has overwritten meanwhile.",
)
ALL_AGAIN = (
    "whoever loses its blocks computes everything again",
    "What it finds when it comes back is not computed again. Look at where its next run starts.",
)
FARTHEST = (
    "whatever lies before the farthest position was computed",
    "Positions that were found at first were not. If they are lost, the request computes them for the first time.",
)
PROMPTS_ONLY = (
    "a decode is not computed",
    "A decode is a run of one token. The model runs on it as on any other.",
)

Written = tuple[str, Mapping[str, Any]]  # kind of a mark and its facts


def _record(*marks: Written, name: str = "ada") -> Record:
    """A record with one mark in each step."""
    return Record([Step([Mark(kind, name, dict(facts))]) for kind, facts in marks])  # type: ignore[arg-type]


def _looked(hit: int) -> Written:
    return "lookup", {"num_tokens": 20, "hit_tokens": hit, "block_ids": [[]]}


def _ran(start: int, num_tokens: int) -> Written:
    return "run", {"start": start, "num_tokens": num_tokens}


YES = ("admit", {"admitted": True, "reason": "new"})
NOT_NOW = ("admit", {"admitted": False, "reason": "not enough free blocks"})
LOST = ("admit", {"admitted": False, "reason": "preempted: bob needs blocks"})
BACK = ("admit", {"admitted": True, "reason": "resumed"})


def check_account(account: Any, report: Report) -> None:
    with report.case("one request that is admitted at once"):
        got = account(_record(_looked(8), YES, _ran(8, 5), _ran(13, 1)))
        known: Known = ({"ada": (8, 5, 0)}, *PROMPTS_ONLY)
        report.equal({"ada": (8, 6, 0)}, _rows(got), "8 found, runs of 5 and 1", known=(known,))
    with report.case("a request that has to wait"):
        got = account(_record(_looked(8), NOT_NOW, _looked(8), NOT_NOW, _looked(4), YES, _ran(4, 9)))
        known = ({"ada": (20, 9, 0)}, *RETRIES)
        first: Known = (
            {"ada": (8, 9, 0)},
            "the first answer holds",
            "What was found then has been overwritten while it waited. The lookup before the admission is the one.",
        )
        report.equal(
            {"ada": (4, 9, 0)}, _rows(got), "finds 8, 8 and 4, is admitted then", known=(known, first)
        )
    with report.case("a request that loses its blocks"):
        got = account(
            _record(
                _looked(0), YES, _ran(0, 12), _ran(12, 1), LOST, _looked(8), BACK, _ran(8, 6), _ran(14, 1)
            )
        )
        wrong = (({"ada": (0, 20, 5)}, *FIRST_ONLY), ({"ada": (8, 20, 13)}, *ALL_AGAIN))
        report.equal({"ada": (8, 20, 5)}, _rows(got), "13 computed, lost, 8 found, 7 computed", known=wrong)
    with report.case("a request that loses its blocks twice"):
        first_life, second_life = (_looked(4), YES, _ran(4, 9), LOST), (_looked(0), BACK, _ran(0, 6), LOST)
        got = account(_record(*first_life, *second_life, _looked(4), BACK, _ran(4, 10)))
        farther: Known = ({"ada": (8, 25, 15)}, *FARTHEST)
        report.equal({"ada": (8, 25, 11)}, _rows(got), "runs on 4-12, 0-5 and 4-13", known=(farther,))
    for engine in ("v0", "v1"):
        for num_blocks in (100, 24, 16):
            with report.case(f"sixteen requests in {engine.upper()} on {num_blocks} blocks"):
                _, record = serve(busy(), engine, num_blocks=num_blocks)
                rows = _rows(account(record))
                right = totals(record)
                sums = tuple(sum(column) for column in zip(*rows.values(), strict=True))
                report.equal(
                    (right.found, right.computed, right.again), sums, "found, computed, again in all"
                )
                report.equal(16, len(rows), "requests")


def _rows(got: Any) -> Any:
    """The answer with tuples for rows."""
    return {name: tuple(row) for name, row in got.items()} if isinstance(got, dict) else got


# -- 15.4 ---------------------------------------------------------------------------------------------------


class _Written:
    """The queue of task 4 as one list, to be compared with."""

    def __init__(self, ids: list[int]) -> None:
        self.ids, self.found = list(ids), set[int]()

    def popleft_n(self, n: int) -> list[int]:
        taken, self.ids = self.ids[:n], self.ids[n:]
        self.found -= set(taken)
        return taken

    def remove(self, block_id: int) -> None:
        self.ids.remove(block_id)
        self.found.add(block_id)

    def append_n(self, ids: list[int]) -> None:
        self.ids = _in_order(self.ids + ids, self.found)

    def prepend_n(self, ids: list[int]) -> None:
        self.ids = ids + self.ids
        self.found -= set(ids)


def _in_order(ids: list[int], found: set[int]) -> list[int]:
    return [i for i in ids if i not in found] + [i for i in ids if i in found]


FOREVER = (
    "what was found once is kept for ever",
    "When a block is handed out it gets other contents. That its old ones were found says nothing about them.",
)
NEVER_OUT = (
    "a favourite is never handed out",
    "It is free. If nobody else is there to go, it goes, or the engine stands still with free blocks.",
)
NOTHING_NEW = (
    "a hit changes nothing",
    "That is the queue of chapter 03: whatever comes back goes to the back, found or not, and goes out in its turn.",
)
NEWEST_FIRST = (
    "the newest favourite goes first",
    "Within each order, who has been there longest goes first.",
)
BACKWARDS = (
    "the last of the worthless blocks is foremost",
    "The first of those that come back in one call is to be the first that goes out.",
)
WORTHLESS = (
    "a favourite without contents is a favourite",
    "Its hash is gone and nobody can find it again. Overwriting it costs nothing, so it goes before all others.",
)


def check_queue(queue_class: Any, report: Report) -> None:
    _check_one_order(queue_class, report)
    _check_two_orders(queue_class, report)
    _check_refusals(queue_class, report)
    for seed in range(4):
        with report.case(f"a hundred random calls, seed {seed}"):
            _compare(queue_class, seed, report)
    with report.case("the engine runs on it"):
        tokens, _ = serve(favourite(), num_blocks=11, max_tokens=2)
        own_tokens, record = serve(
            favourite(), num_blocks=11, max_tokens=2, parts={"free_queue": queue_class}
        )
        report.equal(tokens, own_tokens, "tokens")
        report.equal(96, totals(record).found, "tokens found by the favourite")
    with report.case("and under pressure"):
        tokens, _ = serve(busy(), num_blocks=16)
        own_tokens, _ = serve(busy(), num_blocks=16, parts={"free_queue": queue_class})
        report.equal(tokens, own_tokens, "tokens")


def _queue(queue_class: Any, count: int) -> tuple[Any, list[KVCacheBlock]]:
    """A queue of blocks 1 to `count`, and the blocks; number 0 stands in no queue."""
    blocks = [KVCacheBlock(i) for i in range(count + 1)]
    return queue_class(blocks[1:]), blocks


def _ids(blocks: Any) -> list[int]:
    return [block.block_id for block in blocks]


def _check_one_order(queue_class: Any, report: Report) -> None:
    with report.case("blocks that were never found go in the order in which they came"):
        queue, _ = _queue(queue_class, 5)
        report.equal([1, 2, 3, 4, 5], _ids(queue), "walk over a new queue of 5")
        taken = queue.popleft_n(3)
        report.equal([1, 2, 3], _ids(taken), "popleft_n(3)")
        queue.append_n(taken[::-1])
        report.equal([4, 5, 3, 2, 1], _ids(queue), "after 3, 2, 1 came back")
        report.equal(5, queue.num_free_blocks, "num_free_blocks")
    with report.case("worthless blocks come to the front"):
        queue, _ = _queue(queue_class, 5)
        queue.prepend_n(queue.popleft_n(2))
        backwards: Known = ([2, 1, 3, 4, 5], *BACKWARDS)
        report.equal([1, 2, 3, 4, 5], _ids(queue), "after prepend_n of 1 and 2", known=(backwards,))


def _check_two_orders(queue_class: Any, report: Report) -> None:
    with report.case("a block that was found goes last"):
        queue, blocks = _queue(queue_class, 5)
        queue.remove(blocks[2])
        queue.append_n([blocks[2]])
        taken = queue.popleft_n(2)
        queue.append_n(taken)
        report.equal([1, 3], _ids(taken), "2 was found and came back; popleft_n(2)")
        known: tuple[Known, ...] = (([4, 5, 2, 1, 3], *NOTHING_NEW), ([1, 3, 4, 5, 2], *NEWEST_FIRST))
        report.equal([4, 5, 1, 3, 2], _ids(queue), "after 1 and 3 came back, overwritten", known=known)
    with report.case("among those that were found, the longest there goes first"):
        queue, blocks = _queue(queue_class, 4)
        for block in (blocks[3], blocks[1]):
            queue.remove(block)
            queue.append_n([block])
        newest: Known = ([2, 4, 1, 3], *NEWEST_FIRST)
        report.equal([2, 4, 3, 1], _ids(queue), "3 was found, then 1", known=(newest,))
        queue.remove(blocks[3])
        report.equal(3, queue.num_free_blocks, "num_free_blocks while 3 is used again")
        queue.append_n([blocks[3]])
        report.equal([2, 4, 1, 3], _ids(queue), "3 was found a second time")
    with report.case("if nobody else is there, they are handed out"):
        queue, blocks = _queue(queue_class, 3)
        queue.remove(blocks[1])
        queue.append_n([blocks[1]])
        try:
            taken = queue.popleft_n(3)
        except (ValueError, KeyError):
            report.misconception(*NEVER_OUT)
            raise
        report.equal([2, 3, 1], _ids(taken), "popleft_n(3) of 3, of which 1 was found")
    with report.case("overwritten, it is a block like any other"):
        queue, blocks = _queue(queue_class, 3)
        queue.remove(blocks[1])
        queue.append_n([blocks[1]])
        queue.append_n(queue.popleft_n(3)[::-1])  # 1, 3, 2
        forever: Known = ([3, 2, 1], *FOREVER)
        report.equal([1, 3, 2], _ids(queue), "all handed out; 1, 3 and 2 came back", known=(forever,))
    with report.case("worthless, it goes before all others"):
        queue, blocks = _queue(queue_class, 4)
        queue.remove(blocks[3])
        queue.prepend_n([blocks[3]])
        kept: Known = ([1, 2, 4, 3], *WORTHLESS)
        report.equal([3, 1, 2, 4], _ids(queue), "3 was found, lost its hash and came back", known=(kept,))


def _check_refusals(queue_class: Any, report: Report) -> None:
    with report.case("it refuses what cannot be"):
        queue, blocks = _queue(queue_class, 3)
        report.raises(ValueError, lambda: queue.popleft_n(4), "popleft_n(4) of 3")
        report.raises(ValueError, lambda: queue.popleft_n(-1), "popleft_n(-1)")
        report.raises(ValueError, lambda: queue.remove(blocks[0]), "remove of a block that is not there")
        report.equal([1, 2, 3], _ids(queue), "and nothing has changed")
        report.equal([], _ids(queue.popleft_n(0)), "popleft_n(0)")


def _compare(queue_class: Any, seed: int, report: Report) -> None:
    rng = random.Random(seed)
    queue, blocks = _queue(queue_class, 9)
    expected, out = _Written(list(range(1, 10))), list[int]()
    for _ in range(100):
        kind = rng.choice(("popleft_n", "remove", "append_n", "prepend_n"))
        if kind == "popleft_n":
            count = rng.randint(0, min(3, len(expected.ids)))
            out += expected.popleft_n(count)
            queue.popleft_n(count)
        elif kind == "remove" and expected.ids:
            out.append(rng.choice(expected.ids))
            expected.remove(out[-1])
            queue.remove(blocks[out[-1]])
        elif out:
            rng.shuffle(out)
            back, out = out[:2], out[2:]
            getattr(expected, kind if kind != "remove" else "append_n")(back)
            getattr(queue, kind if kind != "remove" else "append_n")([blocks[i] for i in back])
        report.equal(expected.ids, _ids(queue), f"the walk after {kind}")
        report.equal(len(expected.ids), queue.num_free_blocks, "num_free_blocks")


# -- 15.5 ---------------------------------------------------------------------------------------------------

NOTHING_FOUND = (
    "nothing is found by anybody",
    "If the limit is what the first admission found: a newcomer has had none, so its limit is nothing.",
)
FROM_NOTHING = (
    "who lost its blocks starts from nothing",
    "Its blocks went back to the queue with their hashes. Those that nobody has overwritten are found.",
)
PROMPTS = (
    "only prompts are cached",
    "A block is a block: those that decodes have filled are published as well.",
)
Limit = Callable[[Request], int]  # how much of a hit the request may use, in tokens


def check_cutting(manager: Any, report: Report) -> None:
    parts = {"kv_cache_manager": manager}
    right_tokens, right = serve(crowd(), num_blocks=18)
    tokens, got = serve(crowd(), num_blocks=18, parts=parts)
    if totals(got) == _limited(lambda request: request.num_prompt_tokens - 1):
        report.as_given()
    wrong: tuple[tuple[Limit, tuple[str, str]], ...] = (
        (lambda request: request.num_prompt_tokens, PROMPTS),
        (lambda request: 0, NOTHING_FOUND),
        (lambda request: 0 if request.num_preemptions else request.num_tokens, FROM_NOTHING),
    )
    known = tuple((_limited(limit).found, *why) for limit, why in wrong)
    with report.case("the same tokens as ever"):
        report.equal(right_tokens, tokens, "tokens of four requests on 18 blocks")
    with report.case("what can be found is found"):
        report.equal(totals(right).found, totals(got).found, "tokens found on 18 blocks", known=known)
        report.equal(totals(right).computed, totals(got).computed, "tokens computed on 18 blocks")
    for num_blocks in (100, 16):
        with report.case(f"sixteen requests on {num_blocks} blocks"):
            records = [serve(busy(), num_blocks=num_blocks, parts=each)[1] for each in (None, parts)]
            expected, own = (astuple(totals(record)) for record in records)
            report.equal(expected, own, "steps, preemptions, found, computed, again")
    with report.case("vLLM's recorded decisions"):
        for name in ("sched_preempt_fcfs", "sched_rand_tight", "sched_prefix_hits"):
            result = replay_bare(name, Parts(kv_cache_manager=manager))
            report.true(result.difference is None, f"{name}: {result.difference}")


def _limited(limit: Limit) -> Totals:
    """What the four requests cost if a hit is cut to so many tokens."""

    class Limited(KVCacheManager):
        def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int, int]:
            hits, num_tokens, boundary = super().get_computed_blocks(request)
            size = self.coordinator.groups[0].block_size
            count = min(num_tokens, limit(request)) // size
            return KVCacheBlocks(tuple(blocks[:count] for blocks in hits.blocks)), count * size, boundary

    return totals(serve(crowd(), num_blocks=18, parts={"kv_cache_manager": Limited})[1])


# -- 15.6 ---------------------------------------------------------------------------------------------------


LONG_ANSWERS = (
    "an answer of twelve tokens is one of one",
    "Each token of an answer after the first is computed, too: max_tokens=1 is what was asked for.",
)
ALIKE = (
    "both engines find alike",
    "That is what V1 finds. `serve` runs V1 unless it is told which engine.",
)


@cache
def _asked(engine: str, num_blocks: int, max_tokens: int = 1) -> tuple[int, int]:
    """Tokens found and computed by the questions about five texts."""
    sums = totals(serve(documents(), engine, num_blocks=num_blocks, max_tokens=max_tokens)[1])
    return sums.found, sums.computed


def check_measured(measure: Any, enough: dict[str, int], one_text_less: int, report: Report) -> None:
    for engine, num_blocks in (("v0", 38), ("v1", 38), ("v1", 60)):
        with report.case(f"{engine.upper()} with {num_blocks} blocks"):
            right, got = _asked(engine, num_blocks), measure(num_blocks, engine)
            got = tuple(got) if isinstance(got, list | tuple) else got
            report.true(
                isinstance(got, tuple) and len(got) == 2, "measure() gives two numbers: found and computed"
            )
            if got != right and got == _asked(engine, num_blocks, max_tokens=12):
                report.misconception(*LONG_ANSWERS)
            if engine == "v0" and got != right and got == _asked("v1", num_blocks):
                report.misconception(*ALIKE)
            report.equal(right, got, "tokens found, computed")
    null: Known = (
        41,
        "the null block can be used",
        "Block 0 of V1 is nobody's. Of 41 blocks there are 40 to be used.",
    )
    question: Known = (
        40,
        "only the texts need room",
        "While a question runs, it has a block of its own, and that must not be a block of a text.",
    )
    reserved: Known = (
        42,
        "V0 has a null block",
        "V0 takes one only for sliding windows, when it is first needed. Its block 0 is like the others.",
    )
    too_many = ("more than enough", "It is enough. So is one block fewer: go on until it is not.")
    with report.case("enough for V1"):
        if enough.get("v1") in range(43, 1000):
            report.misconception(*too_many)
        report.equal(42, enough.get("v1"), "num_blocks", known=(null, question))
    with report.case("enough for V0"):
        if enough.get("v0") in range(43, 1000):
            report.misconception(*too_many)
        report.equal(41, enough.get("v0"), "num_blocks", known=(reserved, question))
    with report.case("room for one text less"):
        share: Known = (
            256,
            "four texts of five are found",
            "Which four? Each text is overwritten in the turn before its own, by the one that was overwritten before.",
        )
        report.equal(0, one_text_less, "tokens that V1 finds", known=(share,))
