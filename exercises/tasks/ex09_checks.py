"""Checks of exercise 09, first half: counting, slots, writing, gathering, sectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from exercises.grader import Report
from exercises.tasks.ex09_scene import WARP, measured, touched, touched_shared
from exercises.tasks.kernel_checks import (
    BlockRace,
    Budget,
    Contents,
    Cost,
    Launch,
    Suspect,
    check_budgets,
    check_launch,
    distinct,
    sectors,
    unwritten,
)
from kernels.interpreter import BoundsError, RaceError

FAR_APART: Suspect = (
    "neighbouring threads read far apart",
    "A sector has 32 bytes. Give neighbouring numbers to neighbouring lanes, and the warp uses all of each sector.",
)

# -- 09.1 and 09.5: numbers ----------------------------------------------------------------------------------

PATTERNS: tuple[tuple[str, Callable[[int], int]], ...] = (
    ("t", lambda t: t),
    ("31 - t", lambda t: 31 - t),
    ("2 t", lambda t: 2 * t),
    ("16 t", lambda t: 16 * t),
    ("0", lambda t: 0),
)
SHARED_PATTERNS = (*PATTERNS[:3], ("33 t", lambda t: 33 * t), PATTERNS[4])
WHOLE_BLOCKS = ("blocks rounded down", "Four positions would have no thread: the last block is not full.")
PER_LANE = (
    "a sector per lane",
    "A request of a warp is served in sectors of 32 bytes, and lanes that share one share its cost.",
)
BY_STRIDE = (
    "a bank conflict from any distance",
    "Lanes collide if they want different words of one bank: word modulo 32. 33 t gives every lane a bank of its own.",
)
NO_FIRST = ("the first barrier is forgotten", "Before the first step all numbers must have been put down.")


def check_count(
    blocks: int, idle: int, of_sectors: list[int], passes: list[int], barriers: int, report: Report
) -> None:
    with report.case("blocks and idle threads"):
        report.equal(4, blocks, "blocks", known=((3, *WHOLE_BLOCKS),))
        report.equal(28, idle, "idle threads")
    with report.case("sectors of five requests"):
        right = [touched([index(lane) for lane in range(WARP)]).sectors for _, index in PATTERNS]
        report.equal(5, len(of_sectors), "requests")
        for (name, _), expected, got in zip(PATTERNS, right, of_sectors, strict=True):
            report.equal(expected, got, f"sectors, lane t reads {name}", known=((32, *PER_LANE),))
    with report.case("passes over the banks"):
        right = [
            touched_shared([index(lane) for lane in range(WARP)]).wavefronts for _, index in SHARED_PATTERNS
        ]
        report.equal(5, len(passes), "requests")
        for (name, _), expected, got in zip(SHARED_PATTERNS, right, passes, strict=True):
            report.equal(
                expected, got, f"passes, lane t reads {name}", known=((32, *BY_STRIDE), (33, *BY_STRIDE))
            )
    with report.case("barriers of a tree over 64 threads"):
        report.equal(7, barriers, "barriers", known=((6, *NO_FIRST),))


BYTES_ONLY = (
    "bytes that are used, not sectors",
    "What is not used of a sector is moved as well: count the sectors that any lane falls into.",
)
ALIGNED = (
    "every start is aligned",
    "A request that starts inside a sector ends inside another, one more than the bytes would need.",
)
FOUR_BYTES = ("every number has four bytes", "Numbers of two bytes lie twice as close.")


def check_sectors(sectors_of: Any, alone_4: int, alone_2: int, report: Report) -> None:
    kinds = ((4, torch.float32), (2, torch.float16), (8, torch.int64))
    for itemsize, dtype in kinds:
        with report.case(f"numbers of {itemsize} bytes, as counted"):
            for first, step in ((0, 1), (0, 0), (0, 2), (0, 5), (0, 8), (0, 31), (1, 1), (7, 1), (3, 3)):
                right = measured(first, step, dtype)
                known = (
                    (len({step * lane * itemsize // 32 for lane in range(WARP)}), *ALIGNED),
                    (len({(first + step * lane) * 4 // 32 for lane in range(WARP)}), *FOUR_BYTES),
                    (WARP * itemsize // 32, *BYTES_ONLY),
                )
                what = f"sectors_of({first}, {step}, {itemsize})"
                report.equal(right, sectors_of(first, step, itemsize), what, known=known)
    with report.case("from which step on each lane is alone"):
        report.equal(8, alone_4, "numbers of 4 bytes")
        report.equal(16, alone_2, "numbers of 2 bytes", known=((8, *FOUR_BYTES),))


# -- 09.2: slots of positions --------------------------------------------------------------------------------

IN_ITS_BLOCK: Suspect = (
    "the place in the block taken for the place in the grid",
    "cuda.threadIdx.x begins anew in each block: every block does the work of the first.",
)
NO_TABLE: Suspect = ("a position is a slot", "Only the block table knows in which block a position lies.")
OTHER_SIZE: Suspect = ("an offset from another block size", "Use the block_size that the kernel is given.")
TOO_FEW: Suspect = (
    "the last one is left out",
    "Indices run from 0 to size - 1, so the guard is index < size.",
)
ONE_THREAD: Suspect = (
    "one thread does it all",
    "The loop is what the launch is for: each thread does the position that is its place in the grid.",
)


def check_slots(slots_of: Any, report: Report) -> None:
    for num_tokens, threads, block_size in ((77, 32, 5), (50, 16, 16), (7, 3, 1)):
        table = torch.randperm(200, generator=torch.Generator().manual_seed(num_tokens))[
            : num_tokens // block_size + 2
        ]
        positions = torch.arange(num_tokens)
        slots = table[positions // block_size] * block_size + positions % block_size
        short = slots.clone()
        short[-1] = torch.iinfo(torch.int64).min
        wrong: dict[Suspect, Contents] = {
            NO_TABLE: {"slots": positions},
            OTHER_SIZE: {"slots": table[positions // block_size] * 4 + positions % 4},
            TOO_FEW: {"slots": short},
        }
        grid = -(-num_tokens // threads)
        launch = Launch(
            f"{num_tokens} positions in blocks of {block_size}, {grid} blocks of {threads} threads",
            grid=grid,
            block=threads,
            arguments={
                "slots": unwritten(num_tokens, dtype=torch.int64),
                "block_table": table,
                "block_size": block_size,
            },
            expected={"slots": slots},
        )
        cost = check_launch(report, slots_of, launch, known=wrong, errors={BlockRace: IN_ITS_BLOCK})
        if num_tokens == 77:
            check_budgets(report, cost, Budget("requests that write slots", _slot_writes, 6, 3, ONE_THREAD))


def _slot_writes(cost: Cost) -> int:
    return cost.total("global", "write", "slots").requests


# -- 09.3: writing into slots --------------------------------------------------------------------------------

TOKEN_AS_SLOT: Suspect = ("a token is written where it stands", "Row t of `new` goes to slot_mapping[t].")
INTO_SLOT_0: Suspect = (
    "padding is written into slot 0",
    "Slot 0 is somebody's. A row of nobody is not written at all.",
)
NO_SLOT_0: Suspect = ("slot 0 is taken for padding", "Slot 0 is a slot. Only what is below zero is not.")
X_AND_Y: Suspect = (
    "x and y exchanged",
    "cuda.grid(2) gives x first, and x goes over the numbers of a row here: neighbouring lanes, neighbouring numbers.",
)


def check_write(write_slots: Any, report: Report) -> None:
    cases = (
        ("slots 5 and -1", 12, 1, [5, -1]),
        ("10 tokens of 40 numbers, 3 without a slot", 30, 40, [7, 0, -1, 29, 28, -1, 3, 11, 12, -1]),
        ("33 numbers, and the first token has no slot", 9, 33, [-1, 8, 0, 4, 5]),
    )
    for title, num_slots, row, slot_list in cases:
        slots = torch.tensor(slot_list)
        cache, new = -distinct(num_slots, row), distinct(len(slots), row)
        launch = Launch(
            title,
            grid=(-(-row // 32), -(-len(slots) // 4)),
            block=(32, 4),
            arguments={"cache": cache, "new": new, "slot_mapping": slots},
            expected={"cache": _written(cache, new, slots)},
        )
        wrong: dict[Suspect, Contents] = {
            TOKEN_AS_SLOT: {"cache": _written(cache, new, torch.arange(len(slots)).where(slots >= 0, -1))},
            INTO_SLOT_0: {"cache": _written(cache, new, slots.clamp(min=0))},
            NO_SLOT_0: {"cache": _written(cache, new, slots.where(slots > 0, -1))},
            X_AND_Y: {"cache": _exchanged(cache, new, slots)},
        }
        cost = check_launch(report, write_slots, launch, known=wrong)
        least = int((slots >= 0).sum()) * row // 8
        if row % 8 == 0:
            check_budgets(report, cost, sectors("cache", "write", most=least, least=least, suspect=FAR_APART))


def _written(cache: Tensor, new: Tensor, slots: Tensor) -> Tensor:
    after = cache.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            after[slot] = new[token]
    return after


def _exchanged(cache: Tensor, new: Tensor, slots: Tensor) -> Tensor:
    """What the launch writes if x is taken for the token: y has threads for the first numbers only."""
    threads = -(-len(slots) // 4) * 4
    after = cache.clone()
    after[:, :threads] = _written(cache, new, slots)[:, :threads]
    return after


# -- 09.4: gathering -----------------------------------------------------------------------------------------

NO_STEP: Suspect = (
    "a warp takes one token and stops",
    "Three warps and 70 tokens: each has to go on, in steps of the number of warps.",
)
ONE_ROUND: Suspect = ("a row is no longer than a warp", "A row of 40 numbers takes a warp two rounds.")
EVERYBODY: Suspect = (
    "every thread does the whole",
    "All lanes write the same elements. The work has to be handed out.",
)
PAST_THE_END: Suspect = (
    "a step past the end",
    "The last token is out.shape[0] - 1, the last number out.shape[1] - 1.",
)


def check_rows(gather_rows: Any, report: Report) -> None:
    cache = distinct(90, 40)
    slots = torch.randperm(90, generator=torch.Generator().manual_seed(4))[:70]
    right = cache[slots]
    only_first, one_round = unwritten(70, 40), unwritten(70, 40)
    only_first[:3], one_round[:, :32] = right[:3], right[:, :32]
    launch = Launch(
        "70 tokens of 40 numbers, 3 blocks of 32 threads",
        grid=3,
        block=32,
        arguments={"out": unwritten(70, 40), "cache": cache, "slots": slots},
        expected={"out": right},
    )
    wrong: dict[Suspect, Contents] = {NO_STEP: {"out": only_first}, ONE_ROUND: {"out": one_round}}
    errors = {RaceError: EVERYBODY, BoundsError: PAST_THE_END}
    cost = check_launch(report, gather_rows, launch, known=wrong, errors=errors)
    if cost is not None and cost.total("global", "read", "cache").sectors == 70 * 40:
        report.as_given()
    least = 70 * 40 // 8
    both = (("cache", "read"), ("out", "write"))
    budgets: list[Budget] = [sectors(*each, most=least, least=least, suspect=FAR_APART) for each in both]
    check_budgets(report, cost, *budgets)
