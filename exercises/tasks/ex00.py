"""Tasks of exercise 00: hits in whole blocks, the six marks, who decides and who skips, and a first part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from exercises.grader import Report, Task, WrongAnswer
from refengine.errors import RefengineError
from refengine.hashing import BlockHasher
from refengine.llm import LLM
from refengine.sampling import SamplingParams
from refengine.trace.codemap import call_path
from refengine.v1.groups.spec import FULL_ATTENTION, GroupSpec
from refengine.v1.kv_cache_manager import KVCacheManager
from refengine.v1.request import Request, RequestStatus

DECIDES, SKIPS = "who_decides_which_blocks_are_computed", "who_skips_computing_those_tokens"


def hits(prompts: list[list[int]], block_size: int) -> list[int]:
    """What the engine's own manager finds for prompts that come and go one after the other."""
    manager = KVCacheManager([GroupSpec(0, FULL_ATTENTION, block_size)], 100, 4096)
    hasher = BlockHasher("sha256", block_size)
    found = []
    for i, prompt in enumerate(prompts):
        request = Request(str(i), prompt, SamplingParams(), hasher=hasher)
        blocks, length, _ = manager.get_computed_blocks(request)
        manager.allocate_slots(request, len(prompt) - length, blocks, length)
        request.status = RequestStatus.RUNNING
        manager.free(request)
        found.append(length)
    return found


# -- 00.1 ---------------------------------------------------------------------------------------------------


def check_hits(hit_14: int, hit_16: int, hit_3: int, report: Report) -> None:
    for shared, got in ((14, hit_14), (16, hit_16), (3, hit_3)):
        with report.case(f"19 tokens, of which {shared} are shared"):
            old = list(range(30))
            new = old[:shared] + list(range(500, 500 + 19 - shared))
            expected = hits([old, new], 4)[1]
            report.equal(
                expected,
                got,
                f"hit, {shared} tokens shared",
                known=(
                    (
                        shared,
                        "token by token",
                        "A hit is made of whole blocks: a block whose tokens differ anywhere has another hash.",
                    ),
                    (
                        shared // 4,
                        "blocks, not tokens",
                        "That is the number of blocks. A hit is reported in tokens: times the block size.",
                    ),
                    (
                        -(-shared // 4) * 4,
                        "rounded up",
                        "The block in which the requests part is not the same block, so it is no hit.",
                    ),
                    (
                        max(expected - 4, 0),
                        "the last block is always given back",
                        "A block is given back only if nothing would be left to compute. Here tokens are left.",
                    ),
                ),
            )


# -- 00.2 ---------------------------------------------------------------------------------------------------


def check_marks(first_step: list[str], second_step: list[str], report: Report) -> None:
    every = ["lookup", "admit", "allocate", "publish", "run", "append"]
    with report.case("the first step"):
        late = ["lookup", "admit", "allocate", "run", "publish", "append"]
        last = ["lookup", "admit", "allocate", "run", "append", "publish"]
        why = (
            "Blocks are published when the step is decided, before the model runs: "
            "a request later in the same step may hit them."
        )
        missing = "Two of its blocks get full in this step, so there is something to publish."
        report.equal(
            every,
            first_step,
            "marks of the first step",
            known=(
                (late, "published after the run", why),
                (last, "published after the run", why),
                ([mark for mark in every if mark != "publish"], "nothing to publish", missing),
            ),
        )
    with report.case("the second step"):
        if "lookup" in second_step:
            report.misconception(
                "lookup in every step",
                "The cache is asked when a request is admitted. A running request holds its blocks already.",
            )
        elif "publish" in second_step:
            report.misconception(
                "published when written",
                "Only a full block is published. The third block holds 2 + 1 of 4 tokens after this step.",
            )
        elif "allocate" not in second_step:
            report.misconception(
                "nothing to allocate",
                "The scheduler asks for slots in every step; the answer may be that no new block is needed.",
            )
        report.equal(["allocate", "run", "append"], second_step, "marks of the second step")


# -- 00.3 ---------------------------------------------------------------------------------------------------


def functions(generation: str, question: str) -> set[str]:
    """Names of the functions that the code map marks as an answer, with and without their class."""
    names = [step.place.symbol for step in call_path(generation) if step.answers == question]
    return {*names, *(name.rpartition(".")[2] for name in names)}


def check_functions(v1_decides: str, v1_skips: str, v0_decides: str, v0_skips: str, report: Report) -> None:
    questions = (
        ("V1: decides which blocks are computed", v1_decides, "v1", DECIDES),
        ("V1: skips the work", v1_skips, "v1", SKIPS),
        ("V0: decides which blocks are computed", v0_decides, "v0", DECIDES),
        ("V0: skips the work", v0_skips, "v0", SKIPS),
    )
    for title, got, generation, question in questions:
        with report.case(title):
            name = got.strip().removesuffix("()").rpartition(":")[2]
            right = functions(generation, question)
            if name not in right:
                _explain(title, name, report)
                swapped = DECIDES if question == SKIPS else SKIPS
                if name in functions(generation, swapped):
                    report.misconception(
                        "decider and skipper swapped",
                        "One function says how far the K/V are computed, another one leaves those tokens out.",
                    )
            report.true(
                name in right, f"{got!r} is not what the map of vLLM's code marks as the answer to: {title}."
            )


def _explain(title: str, name: str, report: Report) -> None:
    short = name.rpartition(".")[2]
    if title == "V1: skips the work" and short in ("_prepare_inputs", "prepare_inputs", "_update_states"):
        report.misconception(
            "the runner skips in V1",
            "V1's runner starts where the scheduler tells it to. The tokens were left out before it was asked.",
        )
    if title == "V0: skips the work" and short in (
        "schedule",
        "_schedule_prefills",
        "_get_num_new_uncached_and_cached_tokens",
    ):
        report.misconception(
            "the scheduler skips in V0",
            "V0's scheduler hands over the whole chunk, cached tokens included; the worker cuts them off.",
        )
    if title == "V0: decides which blocks are computed" and short == "get_computed_blocks":
        report.misconception(
            "V1's name in V0",
            "get_computed_blocks belongs to V1's KVCacheManager. V0 has a tracker over its allocator.",
        )


# -- 00.4 ---------------------------------------------------------------------------------------------------

CAP = (
    ("a step with nothing to do", "If every token is skipped, there is nothing to sample the next one from."),
    (
        "one token instead of a block",
        "Only the last token is given back, and the skipped ones end inside a block. V0's worker does this; V1 gives "
        "the whole block back.",
    ),
    (
        "the last block is always given back",
        "A block is given back only if nothing else would be left to compute.",
    ),
)


def check_tokens_to_compute(function: Callable[[int, int, int], int], report: Report) -> None:
    def ask(num_tokens: int, num_cached: int, block_size: int, known: tuple[Any, ...] = ()) -> None:
        prompt = list(range(num_cached)) + list(range(900, 900 + num_tokens - num_cached))
        expected = num_tokens - hits([[*prompt[:num_cached], 7], prompt], block_size)[1]
        got = function(num_tokens, num_cached, block_size)
        report.equal(expected, got, f"tokens_to_compute({num_tokens}, {num_cached}, {block_size})", known)

    with report.case("nothing is cached"):
        ask(10, 0, 4)
    with report.case("a part is cached"):
        back = (6, *CAP[2])
        ask(10, 8, 4, (back,))
        ask(19, 12, 4, ((11, *CAP[2]),))
    with report.case("everything is cached: a whole block is computed (recorded: script_full_hit_aligned)"):
        ask(12, 12, 4, ((0, *CAP[0]), (1, *CAP[1])))
        ask(32, 32, 16, ((0, *CAP[0]), (1, *CAP[1])))
    with report.case("one token more than is cached"):
        ask(9, 8, 4, ((5, *CAP[2]),))
    with report.case("blocks of one token"):
        ask(5, 5, 1, ((0, *CAP[0]),))


# -- 00.5 ---------------------------------------------------------------------------------------------------


def check_hit_rate(hit_rate: Callable[[list[tuple[int, int]]], float], report: Report) -> None:
    with report.case("a long miss and a short hit"):
        lookups = [(1000, 0), (20, 20)]
        got = hit_rate(list(lookups))
        if got == 0.5:
            report.as_given()
        if got == 1.0:
            report.misconception(
                "misses are left out", "A request that found nothing was looked up too: its tokens count."
            )
        if got == 20 / 1000:
            report.misconception(
                "found by computed", "That divides by the tokens that were not found. Divide by all of them."
            )
        if got == 20:
            report.misconception(
                "a number, not a share", "Those are the tokens found. A rate is between 0 and 1."
            )
        report.close(20 / 1020, got, "hit_rate([(1000, 0), (20, 20)])")
    with report.case("three requests of different lengths"):
        report.close(
            48 / 130, hit_rate([(50, 0), (30, 16), (50, 32)]), "hit_rate([(50, 0), (30, 16), (50, 32)])"
        )
    with report.case("everything is found but what must be computed"):
        report.close(12 / 16, hit_rate([(16, 12)]), "hit_rate([(16, 12)])")
    with report.case("nothing was looked up"):
        try:
            got = hit_rate([])
        except ZeroDivisionError:
            report.misconception(
                "no requests, no answer", "Before the first request the rate is 0.0, not an error."
            )
            raise
        report.close(0.0, got, "hit_rate([])")


# -- 00.6 ---------------------------------------------------------------------------------------------------

SHARED = list(range(100, 144))
PROMPTS = [SHARED + [200 + 10 * i + j for j in range(6)] for i in range(4)]


def check_measured(without_cache: int, blocks_of_4: int, blocks_of_16: int, report: Report) -> None:
    total = sum(map(len, PROMPTS))
    why = "Those are the tokens that were looked up. What the model computed stands in the run marks."
    with report.case("no cache: every token of every prompt"):
        report.equal(total, without_cache, "without_cache")
    for block_size, got in ((4, blocks_of_4), (16, blocks_of_16)):
        with report.case(f"blocks of {block_size}"):
            found = sum(hits(PROMPTS, block_size))
            report.equal(
                total - found,
                got,
                f"blocks_of_{block_size}",
                known=(
                    (total, "lookups counted", why),
                    (found, "hits counted", "Those are the tokens that were found, so nobody computed them."),
                    (
                        len(PROMPTS[0]) - len(SHARED) + len(PROMPTS[0]),
                        "only two requests",
                        "Two of the four requests are counted.",
                    ),
                ),
            )


# -- 00.7 ---------------------------------------------------------------------------------------------------


def check_greedy(greedy: Callable[..., torch.Tensor], report: Report) -> None:
    rows = torch.tensor([[0.1, 0.7, 0.2], [3.0, -1.0, 2.0], [-5.0, -4.0, -3.0], [0.0, 9.0, 1.0]])

    def ask(logits: torch.Tensor) -> torch.Tensor:
        count = len(logits)
        got = greedy(logits.clone(), [SamplingParams()] * count, [None] * count)
        if isinstance(got, int) or (isinstance(got, torch.Tensor) and got.dim() == 0 and count > 1):
            report.misconception(
                "one token for all", "Every row is another request: there must be one token for each of them."
            )
        report.true(
            isinstance(got, torch.Tensor),
            f"it returned {type(got).__name__} instead of a tensor of token ids.",
        )
        return got

    with report.case("one request"):
        got = ask(rows[:1]).tolist()
        report.equal(
            [1],
            got,
            "rows of 1",
            known=(([0], "the worst token", "That is the index of the smallest number."),),
        )
    with report.case("four requests at once"):
        got = ask(rows).tolist()
        down = rows.argmax(dim=0).tolist()
        report.equal(
            [1, 0, 2, 1],
            got,
            "token of each row",
            known=(
                (
                    down,
                    "the best row of each token",
                    "The maximum runs over the requests. It should run over the words.",
                ),
                (
                    rows.max(dim=-1).values.tolist(),
                    "the number instead of its place",
                    "That is the largest number of each row. A token is its index.",
                ),
                (
                    rows.argmin(dim=-1).tolist(),
                    "the worst token",
                    "That is the index of the smallest number.",
                ),
            ),
        )
    with report.case("whole numbers as token ids"):
        dtype = ask(rows).dtype
        report.true(dtype == torch.int64, f"token ids are int64, and these are {dtype}.")
    with report.case("the engine says the same on it"):
        params = SamplingParams(max_tokens=8)
        prompt = list(range(40, 60))
        expected = LLM("tiny", num_blocks=8).generate([prompt], params)[0].token_ids
        try:
            said = (
                LLM("tiny", num_blocks=8, parts={"sampler": greedy}).generate([prompt], params)[0].token_ids
            )
        except RefengineError as error:
            report.true(False, str(error))
        report.equal(expected, said, "8 tokens")


TASKS = [
    Task(
        id="00.1",
        kind="predict",
        title="how long is the hit?",
        points=5,
        answers={"hit_14": int, "hit_16": int, "hit_3": int},
        check=check_hits,
        hints=(
            "How many blocks are the same from their first to their last token?",
            "Positions 0-3, 4-7, 8-11 and 12-15 are one block each. Where do the requests part?",
            "Round the shared tokens down to a multiple of 4.",
        ),
        wrong=(
            WrongAnswer("counts tokens", "token by token", source="hit_14, hit_16, hit_3 = 14, 16, 3"),
            WrongAnswer("counts blocks", "blocks, not tokens", source="hit_14, hit_16, hit_3 = 3, 4, 0"),
            WrongAnswer("rounds up", "rounded up", source="hit_14, hit_16, hit_3 = 16, 16, 4"),
            WrongAnswer(
                "one block less",
                "the last block is always given back",
                source="hit_14, hit_16, hit_3 = 8, 12, 0",
            ),
        ),
        other="hit_14, hit_16, hit_3 = (shared - shared % 4 for shared in (14, 16, 3))",
    ),
    Task(
        id="00.2",
        kind="predict",
        title="which marks, in which order?",
        points=5,
        answers={"first_step": list, "second_step": list},
        check=check_marks,
        hints=(
            "The chapter shows both steps of a request; here only the numbers differ.",
            "Who is in already need not be let in again. And does a block get full?",
            "All six; then only slots, model, token.",
        ),
        wrong=(
            WrongAnswer(
                "publishes late",
                "published after the run",
                edits=(('"publish", "run"', '"run", "publish"'),),
            ),
            WrongAnswer(
                "looks up again",
                "lookup in every step",
                edits=(('second_step = ["allocate"', 'second_step = ["lookup", "allocate"'),),
            ),
            WrongAnswer(
                "publishes each token",
                "published when written",
                edits=(('["allocate", "run"', '["allocate", "publish", "run"'),),
            ),
            WrongAnswer(
                "no block, no mark", "nothing to allocate", edits=(('["allocate", "run"', '["run"'),)
            ),
        ),
        other='first_step = tuple("lookup admit allocate publish run append".split())\n'
        'second_step = ("allocate", "run", "append")',
    ),
    Task(
        id="00.3",
        kind="map",
        title="who decides, who skips?",
        points=10,
        answers={"decides_in_v1": str, "skips_in_v1": str, "decides_in_v0": str, "skips_in_v0": str},
        check=check_functions,
        hints=(
            "The chapter has a box under the question of the book.",
            "In V1 the manager decides and the scheduler skips. In V0 it is a tracker and the worker.",
            "get_computed_blocks, schedule, get_num_cached_tokens, _compute_for_prefix_cache_hit",
        ),
        wrong=(
            WrongAnswer(
                "the runner",
                "the runner skips in V1",
                edits=(('"Scheduler.schedule"', '"GPUModelRunner._prepare_inputs"'),),
            ),
            WrongAnswer(
                "the scheduler",
                "the scheduler skips in V0",
                edits=(('"ModelInputForGPUBuilder._compute_for_prefix_cache_hit"', '"Scheduler.schedule"'),),
            ),
            WrongAnswer(
                "one name for both",
                "V1's name in V0",
                edits=(('"ComputedBlocksTracker.get_num_cached_tokens"', '"get_computed_blocks"'),),
            ),
            WrongAnswer(
                "swapped",
                "decider and skipper swapped",
                edits=(
                    ('"KVCacheManager.get_computed_blocks"', '"Scheduler.schedule" '),
                    ('"Scheduler.schedule"\n', '"KVCacheManager.get_computed_blocks"\n'),
                ),
            ),
        ),
        other='decides_in_v1 = "FullAttentionManager.find_longest_cache_hit"\nskips_in_v1 = "schedule"\n'
        'decides_in_v0 = "get_common_computed_block_ids"\nskips_in_v0 = "_compute_for_prefix_cache_hit()"',
    ),
    Task(
        id="00.4",
        kind="build",
        title="what is left to compute",
        points=15,
        answers={"tokens_to_compute": Callable},
        check=check_tokens_to_compute,
        hints=(
            "Which is the most that may be skipped of a request of num_tokens tokens?",
            "At most num_tokens - 1 tokens are skipped, and then only whole blocks of them.",
            "min(num_cached, num_tokens - 1), rounded down to a multiple of block_size, is the hit.",
        ),
        wrong=(
            WrongAnswer(
                "no cap",
                "a step with nothing to do",
                edits=(("min(num_cached, num_tokens - 1)", "num_cached"),),
            ),
            WrongAnswer(
                "one token",
                "one token instead of a block",
                edits=(("usable // block_size * block_size", "usable"),),
            ),
            WrongAnswer(
                "always a block less",
                "the last block is always given back",
                edits=(("min(num_cached, num_tokens - 1)", "max(num_cached - block_size, 0)"),),
            ),
        ),
        other="""
def tokens_to_compute(num_tokens, num_cached, block_size):
    while num_cached >= num_tokens:
        num_cached -= block_size
    return num_tokens - num_cached
""",
    ),
    Task(
        id="00.5",
        kind="bug",
        title="a hit rate that flatters",
        points=10,
        answers={"hit_rate": Callable},
        check=check_hit_rate,
        hints=(
            "Two requests, 1020 tokens looked up, 20 found. Which share is that?",
            "The mean of two rates gives a request of 20 tokens the same weight as one of 1000.",
            "Add up all tokens found, add up all tokens looked up, divide once.",
        ),
        wrong=(
            WrongAnswer(
                "skips misses",
                "misses are left out",
                edits=(
                    ("for num_tokens, _ in lookups", "for num_tokens, num_found in lookups if num_found"),
                ),
            ),
            WrongAnswer(
                "by computed tokens",
                "found by computed",
                edits=(("sum(num_tokens for num_tokens, _", "sum(num_tokens - _ for num_tokens, _"),),
            ),
            WrongAnswer(
                "count",
                "a number, not a share",
                edits=(("found / looked_up if looked_up else 0.0", "found"),),
            ),
            WrongAnswer("no guard", "no requests, no answer", edits=((" if looked_up else 0.0", ""),)),
        ),
        other="""
def hit_rate(lookups):
    tokens = found = 0
    for pair in lookups:
        tokens += pair[0]
        found += pair[1]
    return 0 if tokens == 0 else found / tokens
""",
    ),
    Task(
        id="00.6",
        kind="measure",
        title="measure what the cache saves",
        points=10,
        answers={"without_cache": int, "blocks_of_4": int, "blocks_of_16": int},
        check=check_measured,
        hints=(
            "Print the marks of one step: which of the six says what the model did?",
            "Every run mark has the fact num_tokens. Add them up over all steps.",
            'sum(mark.facts["num_tokens"] for _, mark in recorder.record.marks() if mark.kind == "run")',
        ),
        wrong=(
            WrongAnswer(
                "adds lookups",
                "lookups counted",
                source="without_cache, blocks_of_4, blocks_of_16 = 200, 200, 200",
            ),
            WrongAnswer(
                "adds hits", "hits counted", source="without_cache, blocks_of_4, blocks_of_16 = 200, 132, 96"
            ),
        ),
        other="""
def computed_tokens(block_size, caching):
    recorder = Recorder()
    llm = LLM("tiny", block_size=block_size, num_blocks=80, enable_prefix_caching=caching, observer=recorder)
    for prompt in prompts:
        llm.generate([prompt], SamplingParams(max_tokens=1))
    return sum(n for request in recorder.record.requests() for _, n in request.scheduled)

without_cache, blocks_of_4, blocks_of_16 = (computed_tokens(*a) for a in ((4, False), (4, True), (16, True)))
""",
    ),
    Task(
        id="00.7",
        kind="build",
        title="the token that joins",
        points=10,
        answers={"greedy": Callable},
        check=check_greedy,
        hints=(
            "A row is a request, a column is a word of the vocabulary.",
            "torch has a function for the index of the largest number along a dimension.",
            "logits.argmax(dim=-1)",
        ),
        wrong=(
            WrongAnswer("over the requests", "the best row of each token", edits=(("dim=-1", "dim=0"),)),
            WrongAnswer("whole tensor", "one token for all", edits=(("argmax(dim=-1)", "argmax()"),)),
            WrongAnswer("smallest", "the worst token", edits=(("argmax", "argmin"),)),
            WrongAnswer(
                "value", "the number instead of its place", edits=(("argmax(dim=-1)", "max(dim=-1).values"),)
            ),
        ),
        other="""
import torch

def greedy(logits, params, generators):
    return torch.stack([row.argsort()[-1] for row in logits])
""",
        part="sampler",
    ),
]
