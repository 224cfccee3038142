"""How the answers to exercise 06 are judged: by what gets scheduled, through public calls, on fresh objects."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

from exercises.grader import Report
from exercises.grader.report import Known
from exercises.tasks.ex06_scene import Desk, StoryV0, places, tight, workload
from exercises.tasks.ex06_traces import PHASE_TRACES, SCHEDULER_TRACES, replay, replay_bare, replay_v0, steps
from refengine.parts import Parts
from refengine.trace.record import Record

# -- 06.1 ---------------------------------------------------------------------------------------------------


def _shares(name: str, number: int) -> dict[str, int]:
    return {each["id"]: each["num_scheduled"] for each in steps(name)[number - 1]["scheduled"]}


def check_next(
    loses: str,
    as_block: int,
    shares_b: dict[str, int],
    shares_c: dict[str, int],
    first_d: dict[str, int],
    report: Report,
) -> None:
    step = steps("sched_preempt_fcfs")[6]
    with report.case("a: who loses its blocks"):
        oldest: Known = (
            "a",
            "the oldest gives way",
            "First come, first served: who was admitted last gives way.",
        )
        report.equal(step["preempted_ids"], [loses], "preempted", known=(([oldest[0]], *oldest[1:]),))
    with report.case("a: which block"):
        head: Known = (
            4,
            "blocks come back first one first",
            "The end of a request goes back first, so its last block is the next to be handed out.",
        )
        report.equal(step["scheduled"][0]["block_ids"][0][0], as_block, "block", known=(head,))
    with report.case("b: the least important gives way"):
        last: Known = (
            {"mid": 1, "low": 1},
            "the last admitted gives way",
            "That is the rule of first come, first served. Here the largest (priority, arrival) gives way: low.",
        )
        all_three: Known = (
            {"mid": 1, "low": 1, "high": 1},
            "a share cannot be withdrawn",
            "low had its share already, but high needs a block, and none is free.",
        )
        report.equal(_shares("sched_preempt_priority", 4), shares_b, "shares", known=(last, all_three))
    with report.case("c: nobody is admitted after a preemption"):
        admits: Known = (
            {"a": 1, "small": 3},
            "freed blocks go to newcomers",
            "After a preemption nobody is admitted in that step; and big stands before small in the queue.",
        )
        cut: Known = (
            {"a": 1, "big": 4},
            "a share shrinks to the free blocks",
            "Shares are cut at the budget and the threshold, not at the free blocks. big is its own victim.",
        )
        report.equal(_shares("sched_no_gate", 3), shares_c, "shares", known=(admits, cut))
    with report.case("d: the threshold, and alone"):
        trace = "sched_long_prefill_threshold"
        alone = next(step for step in steps(trace) if any(s["id"] == "c" for s in step["scheduled"]))
        expected = _shares(trace, 1) | {"c": alone["scheduled"][0]["num_scheduled"]}
        always: Known = (
            {"a": 8, "b": 8, "c": 8},
            "the threshold always holds",
            "c is alone: nobody could go hungry, and it gets its whole prompt.",
        )
        never: Known = (
            {"a": 30, "b": 2, "c": 30},
            "the threshold is not seen",
            "Two requests: at most 8 each.",
        )
        report.equal(expected, first_d, "tokens", known=(always, never))


# -- 06.2 ---------------------------------------------------------------------------------------------------

BUDGET = (
    "the budget is forgotten",
    "All requests of a step share one budget. A share is cut at what is left of it.",
)
FROM_ZERO = (
    "found tokens are computed again",
    "Only num_tokens - num_computed_tokens are left, hits included.",
)


def check_scheduler(scheduler: Any, report: Report) -> None:
    def desk(usable: int = 60, **options: Any) -> Desk:
        return Desk(usable, Parts(scheduler=scheduler), **options)

    _check_budget(desk, report)
    _check_threshold(desk, report)
    _check_queue(desk, report)
    _check_victims(desk, report)
    with report.case("vLLM's recorded steps"):
        for name in SCHEDULER_TRACES:
            result = replay_bare(name, Parts(scheduler=scheduler))
            report.true(result.difference is None, f"{name}: {result.difference}")
    with report.case("the engine runs on it, under guard"):
        name = "sched_rand_priority"
        result = replay(name, {"scheduler": scheduler})
        report.equal("all equal", "all equal" if result.difference is None else result.difference, name)


def _check_budget(desk: Callable[..., Desk], report: Report) -> None:
    with report.case("a prompt in chunks, then one token per step"):
        for budget, expected in ((8, [8, 8, 1, 1, 1]), (17, [17, 1, 1]), (5, [5, 5, 5, 2, 1, 1])):
            one = desk(max_num_batched_tokens=budget)
            one.add("ada", 17, max_tokens=3)
            got = [one.step().get("ada") for _ in expected]
            if got[0] == 17 != expected[0]:
                report.misconception(*BUDGET)
            report.equal(expected, got, f"budget {budget}")
    with report.case("who runs comes first, and the rest goes to the queue"):
        one = desk(max_num_batched_tokens=8)
        one.add("ada", 6)
        one.step()
        one.add("bob", 20)
        prompts: Known = (
            {"bob": 8},
            "prompts first",
            "That is V0's default. In V1 who runs is served first, and prompts get what is left.",
        )
        report.equal({"ada": 1, "bob": 7}, one.step(), "second step", known=(prompts,))
        report.equal({"ada": 1, "bob": 7}, one.step(), "third step")
        report.equal({"ada": 1, "bob": 6}, one.step(), "fourth step")
    with report.case("what is found is not computed"):
        one = desk()
        one.add("ada", range(40, 53), max_tokens=1)
        one.step()
        one.add("bob", [*range(40, 53), 7], max_tokens=1)
        again: Known = ({"bob": 14}, *FROM_ZERO)
        report.equal({"bob": 2}, one.step(), "14 tokens, 12 found", known=(again,))
    with report.case("without chunked prefill a prompt comes whole or not at all"):
        one = desk(max_num_batched_tokens=12, max_model_len=12, enable_chunked_prefill=False)
        one.add("ada", 7, max_tokens=4)
        one.add("bob", 8, max_tokens=4)
        cut: Known = (
            {"ada": 7, "bob": 5},
            "cut although chunking is off",
            "With enable_chunked_prefill off, a request that does not fit into the budget is not admitted.",
        )
        report.equal({"ada": 7}, one.step(), "first step", known=(cut,))
        report.equal({"ada": 1, "bob": 8}, one.step(), "second step")


def _check_threshold(desk: Callable[..., Desk], report: Report) -> None:
    with report.case("the threshold leaves something for others"):
        one = desk(max_num_batched_tokens=20, long_prefill_token_threshold=6)
        one.add("ada", 15, max_tokens=2)
        one.add("bob", 4, max_tokens=6)
        report.equal({"ada": 6, "bob": 4}, one.step(), "first step")
        report.equal({"ada": 6, "bob": 1}, one.step(), "second step")
    with report.case("and is not seen by a request that is alone"):
        one = desk(max_num_batched_tokens=20, long_prefill_token_threshold=6)
        one.add("ada", 15, max_tokens=2)
        always: Known = (
            {"ada": 6},
            "the threshold always holds",
            "Nobody else is there who could go hungry; vLLM gives it the whole budget.",
        )
        report.equal({"ada": 15}, one.step(), "first step", known=(always,))


def _check_queue(desk: Callable[..., Desk], report: Report) -> None:
    with report.case("nobody overtakes"):
        one = desk(6)
        one.add("ada", 11, max_tokens=3)
        one.step()
        one.add("big", 15, max_tokens=1)
        one.add("small", 2, max_tokens=1)
        got = one.step()
        overtakes: Known = (
            {"ada": 1, "small": 2},
            "small ones overtake",
            "big would wait for as long as small ones come. The first that does not fit ends the admissions.",
        )
        report.equal({"ada": 1}, got, "second step", known=(overtakes,))
        report.equal(["big", "small"], one.waiting, "waiting queue")
    with report.case("not more requests than seats"):
        one = desk(max_num_seqs=2)
        for name in ("ada", "bob", "cleo"):
            one.add(name, 3, max_tokens=2)
        seats: Known = (
            {"ada": 3, "bob": 3, "cleo": 3},
            "seats are not counted",
            "max_num_seqs is a budget as well: step.is_full.",
        )
        try:
            got = one.step()
        except IndexError:  # a third request has no row in the batch
            report.misconception(*seats[1:])
            raise
        report.equal({"ada": 3, "bob": 3}, got, "first step", known=(seats,))


def _check_victims(desk: Callable[..., Desk], report: Report) -> None:
    with report.case("the last admitted gives way, and nobody is admitted in that step"):
        one = desk(7)
        for name, size in (("ada", 8), ("bob", 8), ("cleo", 8)):
            one.add(name, size, max_tokens=6)
        one.step()
        one.add("dan", 2, max_tokens=1)
        got = one.step()
        known: tuple[Known, ...] = (
            (
                {"ada": 1, "bob": 1, "dan": 2},
                "freed blocks go to newcomers",
                "cleo has just lost blocks for who runs. They must not go to somebody who came later.",
            ),
            (
                {"bob": 1, "cleo": 1},
                "the oldest gives way",
                "The last admitted has lost least by starting over.",
            ),
            ({"ada": 1}, "everybody gives way", "Preempt one, try again, and stop as soon as it fits."),
        )
        report.equal({"ada": 1, "bob": 1}, got, "second step", known=known)
        report.equal(["cleo", "dan"], one.waiting, "waiting queue")
    with report.case("a request can be its own victim"):
        one = desk(4)
        one.add("ada", 8, max_tokens=4)
        one.add("bob", 8, max_tokens=4)
        one.step()
        report.equal({"ada": 1}, one.step(), "second step")
        report.equal(["bob"], one.waiting, "waiting queue")
    with report.case("priority: the least important gives way, even with a share"):
        one = desk(7, policy="priority")
        for name, size, priority in (("low", 7, 5), ("high", 7, 0), ("mid", 8, 3)):
            one.add(name, size, max_tokens=6, priority=priority)
            one.step()
        got = one.step()
        report.equal({"high": 1, "mid": 1}, got, "fourth step", known=_priority_mistakes())
        report.equal(["low"], one.waiting, "waiting queue")
    with report.case("priority: of equals the latest arrival gives way"):
        one = desk(4, policy="priority")
        one.add("first", 8, max_tokens=4, priority=1)
        one.add("second", 8, max_tokens=4, priority=1)
        one.step()
        report.equal({"first": 1}, one.step(), "second step")
    with report.case("everybody gets the tokens of a run with plenty of room"):
        tokens = []
        for usable in (60, 10):
            one = desk(usable, max_num_batched_tokens=10)
            for number, name in enumerate(("ada", "bob", "cleo")):
                one.add(name, range(100 * number + 40, 100 * number + 51), max_tokens=9)
            one.run()
            tokens.append(one.tokens)
        report.equal(tokens[0], tokens[1], "tokens on 10 blocks")


def _priority_mistakes() -> tuple[Known, ...]:
    newest = "the last admitted gives way"
    important = "a small number is unimportant"
    return (
        ({"low": 1, "high": 1}, newest, "Under this policy importance counts: largest (priority, arrival)."),
        ({"mid": 1, "low": 1}, important, "The smallest number is the most important request."),
        ({"low": 1, "mid": 1}, important, "The smallest number is the most important request."),
    )


# -- 06.3 ---------------------------------------------------------------------------------------------------


class _Told:
    """A step in which nothing happens but that the calls are written down."""

    def __init__(self, num_swapped: int, prompts: int, lost: int) -> None:
        self.num_swapped, self._prompts, self._lost = num_swapped, prompts, lost
        self.calls: list[str] = []

    def prompts(self) -> int:
        self.calls.append("prompts")
        return self._prompts

    def running(self) -> int:
        self.calls.append("running")
        return self._lost

    def swap_in(self) -> int:
        self.calls.append("swap_in")
        return self.num_swapped


def check_phases(phases: Callable[[Any, bool], object], report: Report) -> None:
    def calls(chunked: bool, num_swapped: int = 0, prompts: int = 0, lost: int = 0) -> list[str]:
        told = _Told(num_swapped, prompts, lost)
        phases(told, chunked)
        # Bringing back nobody changes nothing, and may be left out or not.
        return [call for call in told.calls if call != "swap_in" or num_swapped]

    with report.case("without chunking: prompts, and nothing beside them"):
        mixed: Known = (
            ["prompts", "running"],
            "prompts and decodes in one step",
            "Without chunked prefill a step is prompts or decodes. Who decodes waits.",
        )
        decodes: Known = (
            ["running", "prompts"],
            "decodes first",
            "That is V0 with chunked prefill, and V1. By default V0 admits prompts first.",
        )
        report.equal(["prompts"], calls(False, prompts=2), "two prompts fit", known=(mixed, decodes))
        report.equal(["prompts", "running"], calls(False), "no prompt fits", known=(decodes,))
    with report.case("without chunking: no prompt while somebody is swapped out"):
        pushed: Known = (
            ["prompts"],
            "newcomers before swapped ones",
            "A group in CPU memory would never come back while prompts arrive.",
        )
        report.equal(
            ["running", "swap_in"], calls(False, num_swapped=1, prompts=2), "one swapped", known=(pushed,)
        )
    with report.case("nobody comes back in a step in which somebody lost blocks"):
        back: Known = (
            ["running", "swap_in"],
            "swapped in after a preemption",
            "The blocks were taken for who runs. They would go to the one who comes back.",
        )
        report.equal(["running"], calls(False, num_swapped=1, lost=1), "default", known=(back,))
        also: Known = (["running", "swap_in", "prompts"], *back[1:])
        report.equal(["running", "prompts"], calls(True, num_swapped=1, lost=1), "chunked", known=(also,))
    with report.case("with chunking: who runs first, prompts last"):
        first: Known = (
            ["prompts", "running"],
            "prompts first",
            "With chunked prefill they get what is left.",
        )
        ends: Known = (["prompts"], *first[1:])
        report.equal(["running", "prompts"], calls(True, prompts=1), "a prompt fits", known=(first, ends))
        every = calls(True, num_swapped=1, prompts=1)
        no_prompt: Known = (
            ["running", "swap_in"],
            "no prompts while somebody is swapped out",
            "With chunked prefill prompts come last, and are not kept out.",
        )
        report.equal(["running", "swap_in", "prompts"], every, "one swapped", known=(no_prompt,))
    with report.case("vLLM's recorded steps"):
        for name in PHASE_TRACES:
            result = replay_v0(name, phases)
            report.true(result.difference is None, f"{name}: {result.difference}")


# -- 06.4 ---------------------------------------------------------------------------------------------------


def check_remembering(tracker: Any, report: Report) -> None:
    def story() -> StoryV0:
        made = StoryV0(8, tracker=tracker)
        made.start("ada", range(12))
        made.finish("ada")
        made.wait("bob", range(13))
        made.found("bob")
        return made

    evicted = story()
    evicted.start("cleo", range(100, 128))
    left = evicted.found("bob")
    own = story()
    own.wait("dan", range(200, 213))
    own.found("dan")
    own.admit("dan")
    own.compute("dan", 8)
    if left == 12 and own.found("dan") == 0:
        report.as_given()
    with report.case("what was evicted while it waits is not reported"):
        stale: Known = (
            12,
            "the first answer is kept while it waits",
            "Two of the three blocks belong to Cleo now.",
        )
        report.equal(4, left, "after Cleo took seven of eight blocks", known=(stale,))
    with report.case("what is still there is reported"):
        report.equal(12, story().found("bob"), "nothing happened in between")
        kept = story()
        kept.start("cleo", range(100, 109))
        report.equal(12, kept.found("bob"), "Cleo took others")
    with report.case("what came meanwhile is found"):
        later = StoryV0(20, tracker=tracker)
        later.wait("bob", range(13))
        later.found("bob")
        later.start("ada", range(12))
        less: Known = (
            0,
            "an answer only shrinks",
            "Ada has computed twelve of Bob's tokens while he waited. Look anew.",
        )
        report.equal(12, later.found("bob"), "Ada came after the first look", known=(less,))
    with report.case("its own blocks are no hit"):
        counted: Known = (
            8,
            "its own blocks are counted",
            "Dan computed them himself. Once he is admitted, his first answer stays until the prompt is done.",
        )
        report.equal(0, own.found("dan"), "after 8 of 13 tokens", known=(counted,))


# -- 06.5 ---------------------------------------------------------------------------------------------------


def check_prefix(cached_prefix: Callable[..., int], report: Report) -> None:
    def count(pattern: tuple[bool, ...]) -> int:
        return cached_prefix(list(range(len(pattern))), lambda i: pattern[i])

    hole, two_holes = (False, True), (True, False, True, True)
    if count(hole) == 2:
        report.as_given()
    with report.case("recorded: the first block is gone, the second is there"):
        bisected: Known = (
            2,
            "after a hit everything before it is there",
            "Nobody asked about the first block.",
        )
        counted: Known = (
            1,
            "hits are counted",
            "A prefix ends at the first miss. What comes after is no prefix.",
        )
        report.equal(0, count(hole), "missing, found", known=(bisected, counted))
    with report.case("a hole in the middle"):
        jumps: Known = (4, *bisected[1:])
        three: Known = (3, *counted[1:])
        report.equal(1, count(two_holes), "found, missing, found, found", known=(jumps, three))
    with report.case("nothing, everything, and an empty list"):
        simple: tuple[tuple[tuple[bool, ...], int], ...] = (
            ((), 0),
            ((False,), 0),
            ((True,), 1),
            ((True,) * 5, 5),
        )
        for pattern, expected in simple:
            short: Known = (
                expected - 1,
                "the last block is left out",
                "One token must be left to run; that rule is not here. V0 may find a prompt to its end.",
            )
            report.equal(expected, count(pattern), f"{list(pattern)}", known=(short,))
    with report.case("every pattern of up to six blocks"):
        for size in range(7):
            for pattern in product((True, False), repeat=size):
                expected = next((i for i, found in enumerate(pattern) if not found), size)
                report.equal(expected, count(pattern), f"{list(pattern)}")


# -- 06.6 ---------------------------------------------------------------------------------------------------


def check_marking(manager: Any, report: Report) -> None:
    def seen(chunks: tuple[int, ...], num_tokens: int) -> list[int]:
        story, found = StoryV0(30, manager=manager), []
        story.wait("ada", range(num_tokens))
        story.admit("ada")
        for number, chunk in enumerate(chunks):
            story.compute("ada", chunk)
            story.wait(f"bob{number}", range(num_tokens + 2))
            found.append(story.found(f"bob{number}"))
        return found

    whole = seen((16, 8, 8), 32)
    others = StoryV0(30, manager=manager)
    for name, tokens in (("ada", range(16)), ("bob", range(100, 116))):
        others.wait(name, tokens)
        others.admit(name)
    others.compute("ada", 8)
    others.wait("cleo", range(100, 117))
    if whole[0] == 32 and others.found("cleo") == 16:
        report.as_given()
    with report.case("as much as was computed, after each chunk"):
        known: tuple[Known, ...] = (
            (
                [32, 32, 32],
                "allocated is computed",
                "Blocks for the whole prompt are taken before its first chunk.",
            ),
            (
                [0, 16, 24],
                "marked one step late",
                "This step is certain to run before the next one is scheduled.",
            ),
            (
                [16, 16, 16],
                "only this chunk counts",
                "Chunks add up: num_computed_tokens holds those before.",
            ),
        )
        report.equal([16, 24, 32], whole, "chunks of 16, 8, 8", known=known)
    with report.case("only full blocks"):
        rounded: Known = (
            [8, 12, 12],
            "a block counts when it is begun",
            "Six tokens fill one block of four; the second holds two.",
        )
        report.equal([4, 12, 12], seen((6, 6, 1), 13), "chunks of 6, 6, 1", known=(rounded,))
        report.equal([0, 4], seen((3, 4), 12), "chunks of 3 and 4 of 12")
    with report.case("only the sequence that was asked about"):
        report.equal(0, others.found("cleo"), "Bob's prompt, of which nothing is computed")


# -- 06.7 ---------------------------------------------------------------------------------------------------


def check_measure(
    longest_gap: Callable[[Record, str], int],
    first_token: Callable[[Desk, str], int],
    with_gate: int,
    without_gate: int,
    report: Report,
) -> None:
    desks = (
        workload(engine="v0", enable_chunked_prefill=False, budget=48),
        workload(engine="v0"),
        workload(),
        tight(),
    )
    with report.case("the longest gap"):
        for desk in desks:
            for summary in desk.record.requests():
                name = summary.request_id
                when = _tokens(desk, name)
                gap = max(b - a for a, b in pairwise(when))
                between: Known = (gap - 1, "steps in between", "From step 3 to step 4 is one step.")
                mean = (when[-1] - when[0]) / (len(when) - 1)
                average: Known = (
                    mean,
                    "the mean gap",
                    "One long pause is what a reader sees; a mean hides it.",
                )
                known: tuple[Known, ...] = (between, average) if gap != 1 else (between,)
                report.equal(gap, longest_gap(desk.record, name), f"{name}'s longest gap", known=known)
    with report.case("the first token"):
        for desk in desks:
            for summary in desk.record.requests():
                name = summary.request_id
                began = _tokens(desk, name)[0]
                steps_ = began - desk.arrived[name] + 1
                mistakes: tuple[Known, ...] = (
                    (
                        steps_ - 1,
                        "the first step is not counted",
                        "A token in the first step is one step away.",
                    ),
                    (began + 1, "counted from the start of the run", "Count from the request's own arrival."),
                    (began, "counted from the start of the run", "Count from the request's own arrival."),
                )
                report.equal(steps_, first_token(desk, name), f"{name}'s first token", known=mistakes)
    with report.case("preemptions with and without the gate"):
        counts = [
            next(s.num_preemptions for s in tight(**options).record.requests() if s.request_id == "bob")
            for options in ({"reserve_full_sequence": True}, {"reserve_full_sequence": False})
        ]
        swapped: Known = (
            counts[::-1],
            "the gate causes preemptions",
            "The gate keeps out who would not fit to its end; without it Bob comes in and is thrown out again.",
        )
        report.equal(counts, [with_gate, without_gate], "Bob's preemptions", known=(swapped,))


def _tokens(desk: Desk, name: str) -> list[int]:
    return [step for step, mark in desk.record.marks() if mark.kind == "append" and mark.request_id == name]


# -- 06.8 ---------------------------------------------------------------------------------------------------

PLACES = {
    "prompts_first": ("Scheduler._schedule_default", None),
    "chooses_how": ("Scheduler._preempt", None),
    "keeps_watermark": ("SelfAttnBlockSpaceManager.can_allocate", "KVCacheManager.allocate_slots"),
    "forces_out": ("Scheduler._schedule_priority_preemption", None),
}


def check_places(
    prompts_first: dict[str, str | None],
    chooses_how: dict[str, str | None],
    keeps_watermark: dict[str, str | None],
    forces_out: dict[str, str | None],
    report: Report,
) -> None:
    answers = (prompts_first, chooses_how, keeps_watermark, forces_out)
    with report.case("the names are in the code map"):
        known = {(generation, symbol) for _, generation, symbol, _ in places()}
        for answer in answers:
            for generation in ("V0", "V1"):
                name = answer.get(generation)
                report.true(
                    name is None or (generation, name) in known, f"{name} is not there in {generation}."
                )
    for (question, (v0, v1)), answer in zip(PLACES.items(), answers, strict=True):
        with report.case(question):
            if question == "prompts_first" and answer.get("V1") is not None:
                report.misconception(
                    "V1 has phases", "V1 knows no prompts and decodes, only tokens that are not computed yet."
                )
            if question == "chooses_how" and answer.get("V1") is not None:
                report.misconception("V1 swaps", "In V1 there is nothing to choose: blocks are given back.")
            if question == "forces_out" and answer.get("V1") is not None:
                report.misconception(
                    "waiting requests preempt",
                    "In V1 only a running request that finds no block takes somebody else's. A waiting one never does.",
                )
            if question == "prompts_first" and answer.get("V0") == "Scheduler._schedule_chunked_prefill":
                report.misconception("chunked prefill is prompts first", "There who runs comes first.")
            report.equal(v0, answer.get("V0"), "V0")
            report.equal(v1, answer.get("V1"), "V1")
