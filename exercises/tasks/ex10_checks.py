"""How the answers to exercise 10 are judged: numbers, writes, offsets.

Scores, the decode, and the map with the sectors have modules of their own: `ex10_scores`, `ex10_decode`, `ex10_map`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from exercises.grader import Report
from exercises.tasks.ex08_wrong import same_bits
from exercises.tasks.kernel_checks import (
    NEGATIVE,
    Argument,
    Contents,
    Launch,
    Suspect,
    check_budgets,
    check_launch,
    distinct,
    sectors,
)
from kernels.interpreter import interpret

FAR_APART: Suspect = (
    "neighbouring threads touch far apart",
    "A request of a warp is served in sectors of 32 bytes. Neighbouring lanes should touch neighbouring numbers.",
)
OTHER_SIZE: Suspect = (
    "an offset from another block size",
    "Slot and position are cut by the block size of this cache: its second dimension.",
)

# -- 10.1 ----------------------------------------------------------------------------------------------------

WRAPS: Suspect = (
    "a wrapped number is still right",
    "32 bits with a sign end at 2**31 - 1. What is above comes out 2**32 too small, as a negative number.",
)


def check_numbers(
    written: list[Any],
    lands: list[int],
    first_element: int,
    in_32_bits: int,
    kernel_place: list[int],
    slot: int,
    report: Report,
) -> None:
    with report.case("what is written"):
        both = ([[1, 1, 10], [2, 3, 99]], *NEGATIVE)
        first = (
            [[0, 0, 99], [1, 1, 10]],
            "-1 taken for slot 0",
            "Slot 0 is a place; -1 says that there is none.",
        )
        in_order = (
            sorted(map(list, written)) if all(isinstance(x, (list, tuple)) for x in written) else written
        )
        report.equal([[1, 1, 10]], in_order, "written", known=(both, first))
    with report.case("where a kernel without a check writes"):
        towards_zero = ([0, -1], "division towards zero", "-1 // 4 is -1 in Python, and -1 % 4 is 3.")
        unwrapped = (
            [-1, 3],
            "an index that stays negative",
            "Block -1 is the last of three, in Python and Numba.",
        )
        turned = ([3, 2], "the offset first", "A place is [block, offset].")
        report.equal([2, 3], list(lands), "lands", known=(towards_zero, unwrapped, turned))
    with report.case("the first element of block 65537"):
        right = 65537 * 16 * 2 * 8 * 128
        keys = (right // 2, "values are left out", "A block holds the keys and the values of its tokens.")
        one_head = (right // 8, "one head", "A block holds all eight heads of its tokens.")
        before = (
            65536 * 16 * 2 * 8 * 128,
            "blocks are counted from 1",
            "Block 0 is the first: 65537 blocks lie before block 65537.",
        )
        report.equal(right, first_element, "first_element", known=(keys, one_head, before))
        cut = (
            2**31 - 1,
            "a number that stops at its limit",
            "Integers wrap; they do not stay at the largest.",
        )
        unsigned = (
            right % 2**31,
            "the sign is left out",
            "The highest of the 32 bits is the sign. It is set here, and counts -2**31.",
        )
        report.equal(right - 2**32, in_32_bits, "in_32_bits", known=((right, *WRAPS), cut, unsigned))
    with report.case("manager's block 3, offset 5"):
        whole = (
            [6, 5],
            "the manager's offset in a kernel's block",
            "A kernel's block ends after four tokens.",
        )
        same = (
            [3, 1],
            "the manager's id in the kernel",
            "Block 3 of eight tokens is blocks 6 and 7 of four.",
        )
        report.equal([7, 1], list(kernel_place), "kernel_place", known=(whole, same))
        halved = (3 * 4 + 5, "the manager's id in the kernel", "Its id counts blocks of eight tokens.")
        report.equal(29, slot, "slot", known=(halved,))


# -- 10.2 ----------------------------------------------------------------------------------------------------

ONE_EACH: Suspect = (
    "a thread for each number",
    "A row can have more numbers than the block has threads. Step on by cuda.blockDim.x until the row ends.",
)
KEYS_ONLY: Suspect = (
    "values are not written",
    "A token brings a key and a value, each for a cache of its own.",
)
SLOT_ZERO: Suspect = ("padding goes to slot 0", "Slot 0 may be somebody's. A padded token writes nothing.")

# title -> (blocks, block size, KV heads, head_dim, slots)
WRITES: dict[str, tuple[int, int, int, int, list[int]]] = {
    "rows of 72 numbers, one token of padding": (3, 4, 3, 24, [5, -1, 7, 2]),
    "rows of 10 numbers, blocks of 5": (7, 5, 2, 5, [33, 0, 8, 9]),
    "all tokens are padding": (3, 4, 2, 8, [-1, -1]),
    "two hundred numbers, the last slot": (2, 16, 1, 200, [31, 15, 16]),
}


def check_write(write: Any, report: Report) -> None:
    cost = None
    for title, (blocks, size, heads, head_dim, slots) in WRITES.items():
        shape = (len(slots), heads, head_dim)
        key, value = distinct(*shape), distinct(*shape, first=10_001)
        caches = [torch.full((blocks, size, heads, head_dim), torch.nan) for _ in range(2)]
        given = {"key": key, "value": value, "key_cache": caches[0], "value_cache": caches[1]}
        launch = Launch(
            title,
            len(slots),
            32,
            {**given, "slot_mapping": torch.tensor(slots)},
            _written(given, slots),
        )
        known = {
            ONE_EACH: _written(given, slots, most=32),
            KEYS_ONLY: _written(given, slots) | {"value_cache": caches[1]},
            SLOT_ZERO: _written(given, [max(slot, 0) for slot in slots]),
            OTHER_SIZE: _written(given, slots, size=blocks),
        }
        found = check_launch(report, write, launch, known=known)
        cost = cost or found
    least = 3 * 3 * 24 * 4 // 32
    check_budgets(
        report,
        cost,
        sectors("key_cache", "write", most=least, least=least, suspect=FAR_APART),
        sectors("value_cache", "write", most=least, least=least, suspect=FAR_APART),
        sectors("key", "read", most=least, least=least, suspect=FAR_APART),
    )


def _written(
    given: dict[str, Tensor], slots: list[int], most: int | None = None, size: int = 0
) -> dict[str, Tensor]:
    """Both caches afterwards; with `most` numbers of a row only, or with slots cut by another block size."""
    after = {name: given[name].clone() for name in ("key_cache", "value_cache")}
    for cache, new in zip(after.values(), (given["key"], given["value"]), strict=True):
        size = size or cache.shape[1]
        for token, slot in enumerate(slots):
            block, offset = slot // size, slot % size
            if slot >= 0 and block < len(cache) and offset < cache.shape[1]:
                row = slice(0, most)
                cache[block, offset].view(-1)[row] = new[token].flatten()[row]
    return after


# -- 10.4 ----------------------------------------------------------------------------------------------------

LATE: Suspect = (
    "widened too late",
    "The product has wrapped already. Widen a factor, and the product is 64 bits wide.",
)
UNSIGNED: Suspect = (
    "unsigned only moves the edge",
    "32 bits without a sign reach twice as far, and wrap at 2**32.",
)
ROUNDED: Suspect = (
    "a float cannot hold it",
    "float32 has 24 bits for the number; offsets above 2**24 lose their end.",
)

# title -> (block table, block size, block stride, row size, tokens)
STARTS: dict[str, tuple[list[int], int, int, int, int]] = {
    "a small cache": ([3, 70, 0], 16, 32768, 1024, 41),
    "rows that wrap inside a block": ([2982616, 1], 7, 720, 102, 12),
    "behind 2**31": ([65535, 65536, 65537], 16, 32768, 1024, 48),
    "behind 2**32": ([131072, 9, 460_001], 16, 32768, 1024, 33),
}


def check_offsets(row_starts: Any, report: Report) -> None:
    launches = [_starts_launch(title, *shape) for title, shape in STARTS.items()]
    if all(_does(row_starts, launch, planted) for launch, planted, _ in launches):
        report.as_given()
    for launch, _, known in launches:
        check_launch(report, row_starts, launch, known=known)


def _starts_launch(
    title: str, table: list[int], size: int, stride: int, row: int, tokens: int
) -> tuple[Launch, Tensor, dict[Suspect, Contents]]:
    """A launch, what the planted bug writes, and what other wrong ideas write."""
    position = torch.arange(tokens)
    block, offset = torch.tensor(table)[position // size], position % size
    product, rest = block * stride, offset * row
    out = torch.full((tokens,), -7)
    arguments: dict[str, Argument] = {"out": out, "block_table": torch.tensor(table), "seq_len": tokens}
    arguments |= {"block_size": size, "block_stride": stride, "row_size": row}
    right = product + rest
    known = {
        LATE: product.int() + rest,
        UNSIGNED: right % 2**32,
        ROUNDED: (product.float() + rest.float()).long(),
    }
    launch = Launch(title, -(-tokens // 32), 32, arguments, {"out": right})
    return launch, right.int().long(), {suspect: {"out": starts.long()} for suspect, starts in known.items()}


def _does(kernel: Any, launch: Launch, contents: Tensor) -> bool:
    """Whether the kernel writes these contents; False if it fails."""
    arguments = {name: x.clone() if isinstance(x, Tensor) else x for name, x in launch.arguments.items()}
    try:
        with interpret():
            kernel[launch.grid, launch.block](*arguments.values())
    except Exception:  # whatever it is, it is not what was handed out; the cases say what
        return False
    out = arguments["out"]
    return isinstance(out, Tensor) and same_bits(out, contents)
