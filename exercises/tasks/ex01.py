"""Tasks of exercise 01: slots, sizing, block tables, the next block, padding, waste, and two block sizes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from exercises.grader import Report, Task, WrongAnswer
from refengine.errors import RefengineError
from refengine.kv_cache import block_bytes
from refengine.llm import LLM
from refengine.model.config import ModelConfig
from refengine.sampling import SamplingParams
from refengine.trace.codemap import Side, call_path, topic
from refengine.v1.groups.base import num_blocks_for
from refengine.v1.groups.spec import FULL_ATTENTION, GroupSpec
from refengine.v1.kv_cache_manager import KVCacheManager
from refengine.v1.request import Request

# -- 01.1 ---------------------------------------------------------------------------------------------------


def check_slot_mapping(slot_mapping: Callable[..., list[int]], report: Report) -> None:
    def ask(table: list[int], start: int, count: int, size: int, expected: list[int] | None = None) -> None:
        positions = range(start, start + count)
        right = [table[p // size] * size + p % size for p in positions]
        assert expected in (None, right)  # what vLLM recorded
        got = slot_mapping(list(table), start, count, size)
        _name_slots(table, start, count, size, got, report)
        report.equal(right, got, f"slot_mapping({table}, {start}, {count}, {size})")

    with report.case("a prompt over three blocks that are no neighbours"):
        ask([5, 2, 6], 0, 10, 4)
    with report.case("one token of a decode step"):
        ask([5, 2, 6], 9, 1, 4)
    with report.case("a chunk that begins inside a block (recorded: mi_slot_mapping)"):
        table = [170, 57, 70, 33, 163, 23, 118, 19, 112]
        recorded = [
            231,
            *range(280, 284),
            *range(132, 136),
            *range(652, 656),
            *range(92, 96),
            *range(472, 476),
        ]
        recorded += [*range(76, 80), 448, 449]
        ask(table, 7, 27, 4, recorded)
    with report.case("blocks of 16 (recorded: mi_slot_mapping)"):
        ask([146, 114, 46], 0, 39, 16, [*range(2336, 2352), *range(1824, 1840), *range(736, 743)])
    with report.case("blocks of one token"):
        ask([3, 1, 2], 1, 2, 1)
    with report.case("a table that is longer than the tokens need"):
        ask([4, 9, 7], 2, 3, 4)


def _name_slots(table: list[int], start: int, count: int, size: int, got: Any, report: Report) -> None:
    """Names the wrong idea behind a list of slots, if it is a known one."""
    positions = list(range(start, start + count))
    ideas: tuple[tuple[Callable[[int], int], str, str], ...] = (
        (
            lambda p: p,
            "positions instead of slots",
            "That is where the token stands in its request. The table says where its block is.",
        ),
        (
            lambda p: table[p // size] + p % size,
            "the block id is not multiplied",
            "Block 5 does not begin at slot 5: every block before it has slots, too.",
        ),
        (
            lambda p: table[p % size % len(table)] * size + p // size,
            "division and remainder swapped",
            "The quotient chooses the entry of the table, the remainder the place in the block.",
        ),
        (
            lambda p: table[0] * size + p,
            "blocks taken for neighbours",
            "Only the first entry of the table is used, as if the blocks lay one after the other.",
        ),
    )
    for idea, name, why in ideas:
        if got == [idea(p) for p in positions] != [table[p // size] * size + p % size for p in positions]:
            report.misconception(name, why)
    if start and got == [table[p // size] * size + p % size for p in range(count)]:
        report.misconception(
            "always from position 0",
            "The step begins at `start`; the tokens before it have their K/V already.",
        )


# -- 01.2 ---------------------------------------------------------------------------------------------------


def check_sizing(
    bytes_per_block: Callable[..., int],
    blocks_for: Callable[[int, int], int],
    requests_that_fit: Callable[[int, int, int], int],
    report: Report,
) -> None:
    for size, layers, heads, kv_heads, head_dim, width in (
        (16, 32, 32, 8, 128, 2),
        (4, 3, 4, 2, 64, 4),
        (1, 2, 6, 2, 8, 2),
    ):
        with report.case(f"bytes: {layers} layers, {heads} query heads, {kv_heads} KV heads"):
            config = ModelConfig(100, heads * head_dim, 8, layers, heads, kv_heads, head_dim, 64)
            right = block_bytes(config, size, torch.float32 if width == 4 else torch.bfloat16)
            known = (
                (
                    right * heads // kv_heads,
                    "query heads counted",
                    "Only the KV heads have keys and values in the cache; several query heads share one.",
                ),
                (right // 2, "keys without values", "Every token has a key and a value: times 2."),
                (right // size, "bytes of one token", "A block holds block_size tokens."),
            )
            got = bytes_per_block(size, layers, heads, kv_heads, head_dim, width)
            report.equal(
                right,
                got,
                f"bytes_per_block({size}, {layers}, {heads}, {kv_heads}, {head_dim}, {width})",
                known,
            )
    for tokens, size in ((10, 4), (8, 4), (2, 16), (17, 16), (7, 1)):
        with report.case(f"{tokens} tokens in blocks of {size}"):
            down = (tokens // size, "rounded down", "The last, partly filled block is a block as well.")
            more = (
                tokens // size + 1,
                "always one more",
                "If the tokens fill their blocks exactly, there is no further one.",
            )
            report.equal(
                num_blocks_for(tokens, size),
                blocks_for(tokens, size),
                f"blocks_for({tokens}, {size})",
                (down, more),
            )
    for num_blocks, tokens, size in ((11, 9, 4), (13, 9, 4), (10, 12, 4), (101, 10, 1), (3, 33, 16)):
        with report.case(f"{num_blocks} blocks of {size}, requests of {tokens} tokens"):
            each = num_blocks_for(tokens, size)
            counts = (
                (
                    num_blocks // each,
                    "the null block is handed out",
                    "One block of the pool is the null block and holds nobody's tokens.",
                ),
                (
                    (num_blocks - 1) * size // tokens,
                    "slots are shared",
                    "A block belongs to one request as a whole; its free slots are of no use to others.",
                ),
            )
            got = requests_that_fit(num_blocks, tokens, size)
            report.equal(
                (num_blocks - 1) // each, got, f"requests_that_fit({num_blocks}, {tokens}, {size})", counts
            )


# -- 01.3 ---------------------------------------------------------------------------------------------------


def grown_tables(prompts: list[int], num_steps: int, block_size: int) -> list[list[int]]:
    """Tables of requests of these lengths after their prompts and `num_steps` decode steps, in this order."""
    manager = KVCacheManager([GroupSpec(0, FULL_ATTENTION, block_size)], 50, 4096, enable_caching=False)
    requests = [Request(str(i), [i] * count, SamplingParams()) for i, count in enumerate(prompts)]
    for step in range(num_steps + 1):
        for request in requests:
            count = request.num_tokens - request.num_computed_tokens if step == 0 else 1
            manager.allocate_slots(request, count)
            request.num_computed_tokens += count
            request.append([0])
    return [manager.block_ids(request.request_id)[0] for request in requests]


def check_tables(table_a: list[int], table_b: list[int], slot_a: int, slot_b: int, report: Report) -> None:
    right_a, right_b = grown_tables([6, 9], 4, 4)
    with report.case("the table of A"):
        reserved = (
            [1, 2, 3],
            "blocks reserved in advance",
            "A gets a block when a token needs it. By then 3 is B's.",
        )
        from_zero = (
            [0, 1, 5],
            "ids from 0",
            "In V1 block 0 is the null block; the free queue begins with 1.",
        )
        early = (
            [1, 2],
            "no new block",
            "A's position 8 does not fit into two blocks of 4: step 3 takes another one.",
        )
        report.equal(right_a, table_a, "table_a", (reserved, from_zero, early))
    with report.case("the table of B"):
        early = ([3, 4, 5], "no new block", "B's position 12 is the first of a fourth block.")
        both = ([3, 4, 5, 6], "steps of A and B mixed up", "A takes its block in step 3, B only in step 4.")
        report.equal(right_b, table_b, "table_b", (early, both))
    for name, got, table, position in (("slot_a", slot_a, right_a, 9), ("slot_b", slot_b, right_b, 12)):
        with report.case(f"the slot of position {position}"):
            last = table[position // 4]
            known = (
                (position, "positions instead of slots", "A slot is counted over all blocks of the pool."),
                (last, "the block instead of the slot", "That is the block; the slot is a place in it."),
                (
                    last * 4 + position % 4 - 4,
                    "slots counted without block 0",
                    "Block 0 has slots as well, 0 to 3, although nobody gets it.",
                ),
            )
            report.equal(last * 4 + position % 4, got, name, known)


# -- 01.4 ---------------------------------------------------------------------------------------------------

FULL = (False, True, True, True)
IDEAS = {
    (False, False, False, False): (
        "the blocks it holds are asked for again",
        "The request has most of its blocks. Only what is missing must be free.",
    ),
    (False, False, False, True): (
        "a begun block counts as a new one",
        "A last block with room in it needs nothing. V0 is that careful, and preempts where it need not.",
    ),
    (False, False, True, True): (
        "one token too early",
        "The length counts the newest token already. What comes after it is the business of the next step.",
    ),
    (True, True, True, True): ("never a new block", "At 9 tokens there is no slot in two blocks of 4."),
}


def check_may_decode(may_decode: Callable[[int, int, int, int], bool], report: Report) -> None:
    questions = ((8, 2, 0, 4), (9, 2, 0, 4), (10, 3, 0, 4), (6, 2, 1, 4))
    answers = tuple(bool(may_decode(*question)) for question in questions)
    if answers == FULL:
        report.as_given()
    elif answers in IDEAS:
        report.misconception(*IDEAS[answers])
    for question in (
        *questions,
        (9, 2, 1, 4),
        (16, 1, 0, 16),
        (17, 1, 0, 16),
        (17, 1, 3, 16),
        (5, 4, 0, 1),
        (5, 4, 1, 1),
    ):
        num_tokens, held, free, size = question
        with report.case(f"{num_tokens} tokens, blocks of {size}: {held} held, {free} free"):
            right = num_blocks_for(num_tokens, size) - held <= free
            report.equal(right, bool(may_decode(*question)), f"may_decode{question}")


# -- 01.5 ---------------------------------------------------------------------------------------------------


def check_write(write_kv: Callable[..., None], report: Report) -> None:
    def written(
        slots: list[int], shape: tuple[int, ...] = (3, 4, 1, 1)
    ) -> tuple[list[float], list[float], list[float]]:
        """The caches after a write of 10, 20, 30, ... and the keys as they should be, slot by slot."""
        heads = shape[2:]
        number = torch.arange(1, len(slots) + 1).view(-1, 1, 1) * 10.0
        key, value = number.expand(-1, *heads).clone(), number.expand(-1, *heads).clone() + 0.5
        keys, values = torch.zeros(shape), torch.zeros(shape)
        write_kv(key, value, keys, values, torch.tensor(slots))
        want = [0.0] * (shape[0] * shape[1])
        for row, slot in enumerate(slots):
            if slot >= 0:
                want[slot] = 10.0 * (row + 1)
        return keys[..., 0, 0].flatten().tolist(), values[..., 0, 0].flatten().tolist(), want

    with report.case("every token has a slot"):
        keys, values, want = written([5, 2, 8])
        report.equal(want, keys, "keys by slot")
        report.equal([number and number + 0.5 for number in want], values, "values by slot")
    with report.case("padding at the end"):
        keys, _, want = written([5, -1])
        if keys[-1] == 20.0 and keys[5] == 10.0:
            report.as_given()
        if keys[0] == 20.0:
            report.misconception(
                "padding goes to slot 0",
                "-1 means that nothing is written. Slot 0 is a slot, too, and V0 hands it out.",
            )
        report.equal(want, keys, "keys by slot")
    with report.case("padding in the middle"):
        keys, values, want = written([5, -1, 2, -1, 9])
        if keys[-1] == 20.0:
            report.misconception(
                "padding only at the end",
                "The number of real tokens is right, but they need not be the first ones.",
            )
        if keys[2] == 20.0:
            report.misconception(
                "keys and slots out of step", "Slots were left out, and the rows of key and value were not."
            )
        report.equal(want, keys, "keys by slot")
        report.equal([number and number + 0.5 for number in want], values, "values by slot")
    with report.case("nothing but padding"):
        keys, _, want = written([-1, -1, -1])
        report.equal(want, keys, "keys by slot")
    with report.case("several heads, and a cache that is not square"):
        keys, _, want = written([19, -1, 0, 7], (7, 3, 2, 5))
        report.equal(want, keys, "keys by slot")
    with report.case("the engine says the same on it"):
        params, prompts = SamplingParams(max_tokens=6), [list(range(40, 59)), list(range(40, 70))]
        expected = [out.token_ids for out in LLM("tiny", num_blocks=12).generate(prompts, params)]
        part = SimpleNamespace(__name__="writer", reshape_and_cache=write_kv)
        try:
            said = [
                out.token_ids
                for out in LLM("tiny", num_blocks=12, parts={"attention": part}).generate(prompts, params)
            ]
        except RefengineError as error:
            report.true(False, str(error))
        report.equal(expected, said, "tokens of two requests")


# -- 01.6 ---------------------------------------------------------------------------------------------------

LENGTHS = [5, 17, 30, 64, 100, 3, 41, 8]


def check_waste(wasted_4: int, wasted_16: int, wasted_64: int, share_64: float, report: Report) -> None:
    def waste(size: int) -> int:
        return sum(num_blocks_for(length, size) for length in LENGTHS) * size - sum(LENGTHS)

    for size, got in ((4, wasted_4), (16, wasted_16), (64, wasted_64)):
        with report.case(f"blocks of {size}"):
            total = num_blocks_for(sum(LENGTHS), size) * size - sum(LENGTHS)
            known = (
                (
                    waste(size) + sum(LENGTHS),
                    "all slots counted",
                    "Those are the slots that are held. The tokens in them are not waste.",
                ),
                (
                    waste(size) // size,
                    "blocks counted",
                    "Count slots: a wasted block has block_size of them.",
                ),
                (
                    total,
                    "one block for all",
                    "Only the last block of the last request was looked at. Every request has one.",
                ),
            )
            report.equal(waste(size), got, f"wasted_{size}", known)
    with report.case("the share with blocks of 64"):
        if abs(share_64 - waste(64) / sum(LENGTHS)) < 1e-9:
            report.misconception(
                "waste by tokens",
                "The question is about the slots held: divide by tokens and waste together.",
            )
        report.close(waste(64) / (waste(64) + sum(LENGTHS)), share_64, "share_64", rtol=0.01)


# -- 01.7 ---------------------------------------------------------------------------------------------------


def symbols(side: Side) -> set[str]:
    """Names of vLLM's definitions on one side of a topic, with and without their class."""
    names = [place.symbol for place in side.vllm]
    return {*names, *(name.rpartition(".")[2] for name in names)}


def slot_functions(generation: str) -> set[str]:
    """Stops on the call path whose name says that they compute slots."""
    names = [
        step.place.symbol for step in call_path(generation) if "slot_mapping" in step.place.symbol.lower()
    ]
    return {*names, *(name.rpartition(".")[2] for name in names)}


def check_map(
    indices: list[str],
    table_v0: str,
    slots_v0: str,
    slots_v1: str,
    first_v0: int,
    first_v1: int,
    report: Report,
) -> None:
    with report.case("the indices of key_cache"):
        known = (
            (
                ["block", "KV head", "offset in block", "element"],
                "heads before tokens",
                "Here the heads of one token lie side by side: the offset comes before the head.",
            ),
            (
                ["offset in block", "block", "KV head", "element"],
                "the first index is a position",
                "The first index is the block id. A request has no stretch of the tensor of its own.",
            ),
        )
        report.equal(["block", "offset in block", "KV head", "element"], indices, "indices", known)
    table, slots = topic("block_table"), topic("slot_mapping")
    for title, got, right in (
        ("V0's block table", table_v0, symbols(table.v0)),
        ("slots in V0", slots_v0, symbols(slots.v0) | slot_functions("v0")),
        ("slots in V1", slots_v1, symbols(slots.v1) | slot_functions("v1")),
    ):
        with report.case(title):
            name = got.strip().removesuffix("()")
            if title == "V0's block table" and name == "BlockTables":
                report.misconception(
                    "V1's name in V0",
                    "BlockTables belongs to V1's worker. V0 has one table object per sequence.",
                )
            report.true(name in right, f"{got!r} is not what the map of vLLM's code has for: {title}.")
    with report.case("the first block of V0 (recorded: bm_hit_ladder)"):
        report.equal(
            0, first_v0, "first_id_v0", ((1, "a null block in V0", "V0 hands out block 0 like any other."),)
        )
    with report.case("the first block of V1 (recorded: script_first_request)"):
        taken = (
            0,
            "the null block is handed out",
            "V1 takes block 0 out of the free queue before anybody comes.",
        )
        report.equal(1, first_v1, "first_id_v1", (taken,))


# -- 01.8 ---------------------------------------------------------------------------------------------------


def check_kernel_place(kernel_place: Callable[[int, int, int, int], tuple[int, int]], report: Report) -> None:
    for block, offset, large, small in (
        (3, 5, 8, 4),
        (3, 0, 8, 4),
        (0, 7, 8, 4),
        (5, 40, 48, 16),
        (2, 3, 4, 4),
        (7, 2, 6, 1),
    ):
        with report.case(f"block {block} of {large} tokens, offset {offset}, kernel blocks of {small}"):
            got = kernel_place(block, offset, large, small)
            right = divmod(block * large + offset, small)
            if (block, offset) == (3, 5) and tuple(got) == (3, 5):
                report.as_given()
            ideas = (
                (
                    (block * (large // small), offset % small),
                    "the first kernel block",
                    "The token may lie in a later one of the kernel's blocks.",
                ),
                (
                    (block + offset // small, offset % small),
                    "the block id is not scaled",
                    "Manager block 3 of 8 tokens does not begin at kernel block 3 of 4 tokens.",
                ),
                (
                    (right[1], right[0]),
                    "offset before block",
                    "The block comes first, then the offset in it.",
                ),
            )
            known = tuple((list(value), name, why) for value, name, why in ideas)
            report.equal(list(right), got, f"kernel_place({block}, {offset}, {large}, {small})", known)


TASKS = [
    Task(
        id="01.1",
        kind="build",
        title="the slot mapping of a step",
        points=10,
        answers={"slot_mapping": Callable},
        check=check_slot_mapping,
        hints=(
            "Do one position by hand: which entry of the table, which place in the block?",
            "position // block_size chooses the entry, position % block_size the place.",
            "block_table[p // block_size] * block_size + p % block_size, for p from start to start + num_tokens - 1.",
        ),
        wrong=(
            WrongAnswer(
                "no table",
                "positions instead of slots",
                edits=(("block_table[position // block_size]", "position // block_size"),),
            ),
            WrongAnswer(
                "no product", "the block id is not multiplied", edits=(("block * block_size +", "block +"),)
            ),
            WrongAnswer(
                "from zero",
                "always from position 0",
                edits=(("range(start, start + num_tokens)", "range(num_tokens)"),),
            ),
            WrongAnswer(
                "contiguous",
                "blocks taken for neighbours",
                edits=(
                    ("        block = block_table[position // block_size]\n", ""),
                    ("block * block_size + position % block_size", "block_table[0] * block_size + position"),
                ),
            ),
            WrongAnswer(
                "swapped",
                "division and remainder swapped",
                edits=(
                    (
                        "block_table[position // block_size]",
                        "block_table[position % block_size % len(block_table)]",
                    ),
                    ("+ position % block_size", "+ position // block_size"),
                ),
            ),
        ),
        other="""
import numpy as np

def slot_mapping(block_table, start, num_tokens, block_size):
    every = np.array(block_table)[:, None] * block_size + np.arange(block_size)
    return every.flatten()[start : start + num_tokens].tolist()
""",
    ),
    Task(
        id="01.2",
        kind="build",
        title="how many requests fit",
        points=15,
        answers={"bytes_per_block": Callable, "blocks_for": Callable, "requests_that_fit": Callable},
        check=check_sizing,
        hints=(
            "What is stored for one token in one layer? Whose heads are they?",
            "Two vectors of head_dim numbers per KV head. Blocks are rounded up. One block of the pool is not for use.",
            "2 * tokens * layers * KV heads * head_dim * bytes; ceil(tokens / size); (num_blocks - 1) // blocks.",
        ),
        wrong=(
            WrongAnswer("query heads", "query heads counted", edits=(("* num_kv_heads *", "* num_heads *"),)),
            WrongAnswer(
                "no values", "keys without values", edits=(("return 2 * block_size", "return block_size"),)
            ),
            WrongAnswer(
                "floor",
                "rounded down",
                edits=(("(num_tokens + block_size - 1) // block_size", "num_tokens // block_size"),),
            ),
            WrongAnswer(
                "one more",
                "always one more",
                edits=(("(num_tokens + block_size - 1) // block_size", "num_tokens // block_size + 1"),),
            ),
            WrongAnswer(
                "all blocks",
                "the null block is handed out",
                edits=(("(num_blocks - 1) // blocks", "num_blocks // blocks"),),
            ),
            WrongAnswer(
                "by slots",
                "slots are shared",
                edits=(
                    (
                        "(num_blocks - 1) // blocks_for(num_tokens, block_size)",
                        "(num_blocks - 1) * block_size // num_tokens",
                    ),
                ),
            ),
        ),
        other="""
import math

def bytes_per_block(block_size, num_layers, num_heads, num_kv_heads, head_dim, bytes_per_number):
    return math.prod((num_layers, 2, block_size, num_kv_heads, head_dim)) * bytes_per_number

def blocks_for(num_tokens, block_size):
    return -(-num_tokens // block_size)

def requests_that_fit(num_blocks, num_tokens, block_size):
    left, count = num_blocks - 1, 0
    while left >= blocks_for(num_tokens, block_size):
        left, count = left - blocks_for(num_tokens, block_size), count + 1
    return count
""",
    ),
    Task(
        id="01.3",
        kind="predict",
        title="say the tables before you see them",
        points=10,
        answers={"table_a": list, "table_b": list, "slot_a": int, "slot_b": int},
        check=check_tables,
        hints=(
            "Write the positions of each step under one another. Which are the first of a block?",
            "Step 3 computes A's position 8, step 4 computes B's position 12. Who is next in the free queue then?",
            "After the prompts A has 1, 2 and B has 3, 4, 5; block 6 goes to A in step 3, block 7 to B in step 4.",
        ),
        wrong=(
            WrongAnswer("reserved", "blocks reserved in advance", edits=(("[1, 2, 6]", "[1, 2, 3]"),)),
            WrongAnswer("from zero", "ids from 0", edits=(("[1, 2, 6]", "[0, 1, 5]"),)),
            WrongAnswer("too few", "no new block", edits=(("[3, 4, 5, 7]", "[3, 4, 5]"),)),
            WrongAnswer("no null slots", "slots counted without block 0", edits=(("= 25", "= 21"),)),
        ),
        other="table_a, table_b = (1, 2, 6), (3, 4, 5, 7)\nslot_a, slot_b = table_a[9 // 4] * 4 + 9 % 4, 7 * 4",
    ),
    Task(
        id="01.4",
        kind="bug",
        title="may this request take its next step?",
        points=10,
        answers={"may_decode": Callable},
        check=check_may_decode,
        hints=(
            "At which position are K/V written in the coming step, if the length is num_tokens?",
            "At num_tokens - 1. Is that position in a block the request holds already?",
            "Blocks for num_tokens tokens, less the blocks held, must not be more than the free ones.",
        ),
        wrong=(
            WrongAnswer(
                "all anew",
                "the blocks it holds are asked for again",
                edits=(("num_needed - num_held <= num_free", "num_needed <= num_free"),),
            ),
            WrongAnswer(
                "a block at all times",
                "a begun block counts as a new one",
                edits=(("num_needed - num_held <= num_free", "num_free >= 1"),),
            ),
            WrongAnswer(
                "one ahead",
                "one token too early",
                edits=(
                    (
                        "(num_tokens + block_size - 1) // block_size",
                        "(num_tokens + block_size) // block_size",
                    ),
                ),
            ),
            WrongAnswer("never", "never a new block", edits=(("num_needed - num_held <= num_free", "True"),)),
        ),
        other="""
def may_decode(num_tokens, num_held, num_free, block_size):
    return num_free > 0 if (num_tokens - 1) % block_size == 0 else True
""",
    ),
    Task(
        id="01.5",
        kind="bug",
        title="padding that hits somebody",
        points=15,
        answers={"write_kv": Callable},
        check=check_write,
        hints=(
            "What are -1 // 4 and -1 % 4 in Python? Which slot is that?",
            "Find the tokens that have a slot, and leave the others out of everything.",
            "kept = slot_mapping >= 0 selects rows: key[kept], value[kept], slot_mapping[kept].",
        ),
        wrong=(
            WrongAnswer(
                "clamped",
                "padding goes to slot 0",
                edits=(
                    ("    kept = slot_mapping >= 0\n", ""),
                    (
                        "key, value, slots = key[kept], value[kept], slot_mapping[kept]",
                        "slots = slot_mapping.clamp(min=0)",
                    ),
                ),
            ),
            WrongAnswer(
                "counted",
                "padding only at the end",
                edits=(("kept = slot_mapping >= 0", "kept = slice(int((slot_mapping >= 0).sum()))"),),
            ),
            WrongAnswer(
                "slots only",
                "keys and slots out of step",
                edits=(("key[kept], value[kept], slot", "key[: kept.sum()], value[: kept.sum()], slot"),),
            ),
        ),
        other="""
def write_kv(key, value, key_cache, value_cache, slot_mapping):
    keys, values = key_cache.flatten(0, 1), value_cache.flatten(0, 1)
    for row, slot in enumerate(slot_mapping.tolist()):
        if slot != -1:
            keys[slot], values[slot] = key[row], value[row]

writer = SimpleNamespace(reshape_and_cache=write_kv)
""",
        part="attention",
    ),
    Task(
        id="01.6",
        kind="measure",
        title="measure what block size costs",
        points=10,
        answers={"wasted_4": int, "wasted_16": int, "wasted_64": int, "share_64": float},
        check=check_waste,
        hints=(
            "How many blocks do all tables list together? How many slots are those?",
            "Slots held less tokens is the waste; len(table) is the number of blocks of a request.",
            "sum(len(table) for (table,) in tables.values()) * block_size - sum(lengths)",
        ),
        wrong=(
            WrongAnswer(
                "held, not wasted",
                "all slots counted",
                source="wasted_4, wasted_16, wasted_64, share_64 = 280, 368, 640, 1.0",
            ),
            WrongAnswer(
                "share of tokens",
                "waste by tokens",
                edits=(("wasted_64 / (wasted_64 + sum(lengths))", "wasted_64 / sum(lengths)"),),
            ),
        ),
        other="""
wasted_4, wasted_16, wasted_64 = (sum(-length % size for length in lengths) for size in (4, 16, 64))
share_64 = round(wasted_64 / sum(-(-length // 64) * 64 for length in lengths), 3)
""",
    ),
    Task(
        id="01.7",
        kind="map",
        title="where is it, and which index is which?",
        points=10,
        answers={
            "indices": list,
            "table_in_v0": str,
            "slots_in_v0": str,
            "slots_in_v1": str,
            "first_id_v0": int,
            "first_id_v1": int,
        },
        check=check_map,
        hints=(
            "The chapter prints the shape of the tensor, and the box at its end has the names.",
            "num_blocks, block_size, num_kv_heads, head_dim. V0: one class, one function. Block 0 differs.",
            "BlockTable; compute_slot_mapping; BlockTables.compute_slot_mappings; 0 in V0 and 1 in V1.",
        ),
        wrong=(
            WrongAnswer(
                "heads first",
                "heads before tokens",
                edits=(('"offset in block", "KV head"', '"KV head", "offset in block"'),),
            ),
            WrongAnswer(
                "position first",
                "the first index is a position",
                edits=(('"block", "offset in block"', '"offset in block", "block"'),),
            ),
            WrongAnswer(
                "null handed out",
                "the null block is handed out",
                edits=(("first_id_v1 = 1", "first_id_v1 = 0"),),
            ),
            WrongAnswer(
                "null block in V0", "a null block in V0", edits=(("first_id_v0 = 0", "first_id_v0 = 1"),)
            ),
            WrongAnswer("plural", "V1's name in V0", edits=(('"BlockTable"', '"BlockTables"'),)),
        ),
        other='indices = ("block", "offset in block", "KV head", "element")\ntable_in_v0 = "BlockTable"\n'
        'slots_in_v0 = "compute_slot_mapping()"\nslots_in_v1 = "BlockTable.compute_slot_mapping"\n'
        "first_id_v0, first_id_v1 = 0, 1",
    ),
    Task(
        id="01.8",
        kind="bug",
        title="two block sizes",
        points=10,
        answers={"kernel_place": Callable},
        check=check_kernel_place,
        hints=(
            "The slot is right. Who divides it next, the manager or the kernel?",
            "The kernel's block is the slot divided by the size of the kernel's blocks.",
            "slot // kernel_size and slot % kernel_size",
        ),
        wrong=(
            WrongAnswer(
                "first of them",
                "the first kernel block",
                edits=(("slot // kernel_size, slot", "manager_block * (manager_size // kernel_size), slot"),),
            ),
            WrongAnswer(
                "unscaled",
                "the block id is not scaled",
                edits=(("slot // kernel_size, slot", "manager_block + offset // kernel_size, slot"),),
            ),
            WrongAnswer(
                "reversed",
                "offset before block",
                edits=(
                    ("slot // kernel_size, slot % kernel_size", "slot % kernel_size, slot // kernel_size"),
                ),
            ),
        ),
        other="def kernel_place(manager_block, offset, manager_size, kernel_size):\n"
        "    more, rest = divmod(offset, kernel_size)\n"
        "    return [manager_block * (manager_size // kernel_size) + more, rest]\n",
    ),
]
