"""How a kernel is judged: what it writes, what is wrong with it, and what it costs. No GPU is needed.

    launch = Launch("80 elements, 3 blocks of 32 threads", grid=3, block=32,
        arguments={"out": unwritten(80), "a": values}, expected={"out": values.double() + 10})
    cost = check_launch(report, add_ten, launch, known={OFF_BY_ONE: {"out": values.double() + 9}})
    check_budgets(report, cost, sectors("a", "read", most=10, least=10, suspect=FAR_APART))

`check_launch` is one case. It runs the kernel in the interpreter under three schedules, each time on fresh copies of
the arguments between guard cells, and wants the expected contents, no change anywhere else, and no race, wrong index,
barrier that not all reach, or loop without an end. A mistake becomes one sentence with kernel, line, block and thread.
`check_budgets` adds a case per budget, whose title is the yardstick: "yours 96, budget 64, least possible 64".

An expectation of the array's own dtype is compared bit by bit, one in float64 by the tolerance of the array's dtype.
Tables of wrong ideas: `known` by what they would have written, `errors` by the kind of error, where `BlockRace` is a
race between blocks, `WarpRace` one between warps of a block, and `WriteRace` one of two writes at the same line;
`ByZero` is a division by zero, or a logarithm of it.
Arguments are known by their place, so that a learner may call them anything. A stub in
the kernel is "not started", as everywhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exercises.grader import Report
from exercises.grader.report import stub_message
from exercises.grader.values import difference
from exercises.tasks.kernel_arrays import BITS, distinct, same, same_bits, unwritten
from kernels.interpreter import (
    BarrierError,
    BoundsError,
    DeadlockError,
    KernelError,
    LimitError,
    RaceError,
    Record,
    interpret,
)
from kernels.interpreter import Report as Counts

__all__ = [
    "NO_GUARD",
    "BlockRace",
    "Budget",
    "ByZero",
    "Contents",
    "Cost",
    "Launch",
    "Suspect",
    "WarpRace",
    "WriteRace",
    "check_budgets",
    "check_launch",
    "distinct",
    "elements",
    "same_bits",
    "sectors",
    "unwritten",
]

Suspect = tuple[str, str]  # a misconception: its name, why it is wrong
Size = int | tuple[int, ...]
Argument = Tensor | int | float
Contents = Mapping[str, Tensor]  # argument -> what it should hold, or would hold

SCHEDULES: tuple[tuple[Any, int], ...] = (("in_order", 0), ("reverse", 0), ("random", 3))
GUARD_BYTES = 256  # before and after each array; keeps the array as aligned as an allocation
MAX_ACCESSES = 400_000  # of one launch; far above what a case of an exercise needs
NOT_CHECKED = "compiling it for a GPU, and how fast it is there"

RACE: Suspect = (
    "a race",
    "Two threads touch one element, one of them writes, and no barrier says which comes first.",
)
SAME_ELEMENT: Suspect = (
    "several threads write the same element",
    "Hand out the work: an element belongs to one thread, and two writes race even with the same value.",
)
NO_GUARD: Suspect = (
    "the guard is missing or one off",
    "A grid has whole blocks. Threads past the end must leave the arrays alone: index < size.",
)
NEGATIVE: Suspect = (
    "-1 used as an index",
    "-1 says that there is nothing to do. As an index it is the last element in Numba, and memory of others in C.",
)
HALF_A_BARRIER: Suspect = (
    "a barrier that not all threads reach",
    "A barrier waits for every thread of the block. None may leave or take another way before it.",
)
ENDLESS: Suspect = ("a loop without an end", "Its condition never becomes false, or its step is zero.")


class BlockRace(RaceError):
    """In tables of errors: a race between threads of different blocks. The interpreter raises a RaceError."""


class WarpRace(RaceError):
    """In tables of errors: a race between threads of different warps of one block, of one dimension."""


class WriteRace(RaceError):
    """In tables of errors: a race between two threads that write one element at the same line."""


class ByZero(KernelError):
    """In tables of errors: the kernel divides by zero, or takes a logarithm of it. The cause of a KernelError."""


ERRORS: Mapping[type[KernelError], Suspect] = {
    WriteRace: SAME_ELEMENT,
    RaceError: RACE,
    BoundsError: NO_GUARD,
    BarrierError: HALF_A_BARRIER,
    DeadlockError: HALF_A_BARRIER,
    LimitError: ENDLESS,
}


@dataclass(frozen=True)
class Launch:
    """One launch to try.

    title: names the case. arguments: in the kernel's order; tensors are contiguous and are copied for every run.
    expected: what the outputs hold afterwards; every other tensor must be as it was. shared_bytes: dynamic memory.
    """

    title: str
    grid: Size
    block: Size
    arguments: Mapping[str, Argument]
    expected: Contents
    shared_bytes: int = 0


@dataclass(frozen=True)
class Cost:
    """What a launch cost in the interpreter, with arrays called by the names of `Launch.arguments`."""

    counts: Counts
    names: Mapping[str, str]  # ours -> the learner's

    def total(self, space: str | None = None, kind: str | None = None, array: str | None = None) -> Record:
        """As `kernels.interpreter.Report.total`."""
        return self.counts.total(space, kind, None if array is None else self.names[array])


@dataclass(frozen=True)
class Budget:
    """What a kernel may use of something, at most. `suspect`: what it looks like if it uses more."""

    what: str
    used: Callable[[Cost], int]
    most: int
    least: int
    suspect: Suspect


def sectors(array: str, kind: str, *, most: int, least: int, suspect: Suspect) -> Budget:
    """32-byte sectors of an array in global memory that are read or written."""
    done = {"read": "read", "write": "written"}[kind]
    return Budget(
        f"sectors of {array} {done}", lambda c: c.total("global", kind, array).sectors, most, least, suspect
    )


def elements(array: str, kind: str, *, most: int, least: int, suspect: Suspect) -> Budget:
    """Accesses of single threads to an array in global memory."""
    done = {"read": "reads", "write": "writes"}[kind]
    return Budget(
        f"{done} of {array} by single threads",
        lambda c: c.total("global", kind, array).lanes,
        most,
        least,
        suspect,
    )


def check_launch(
    report: Report,
    kernel: Any,
    launch: Launch,
    *,
    known: Mapping[Suspect, Contents] | None = None,
    errors: Mapping[type[KernelError], Suspect] | None = None,
) -> Cost | None:
    """One case: the launch under three schedules. Returns: what it cost; None if something was wrong.

    known: wrong ideas by what the outputs would hold. errors: instead of `ERRORS`, for the kinds that it names.
    """
    cost = None
    with report.case(launch.title):
        report.true(_is_kernel(kernel), "It is no kernel: write @cuda.jit above it.")
        for schedule, seed in SCHEDULES:
            ran = Run.of(launch)
            try:
                with interpret(schedule, seed, max_accesses=MAX_ACCESSES) as counts:
                    kernel[launch.grid, launch.block, 0, launch.shared_bytes](*ran.arguments.values())
            except KernelError as error:
                _blame(report, error, schedule, launch.grid, errors or {})
            _compare(report, launch, ran, schedule, known or {})
        cost = Cost(
            counts, dict(zip(launch.arguments, inspect.signature(kernel.py_func).parameters, strict=True))
        )
    if cost is not None and NOT_CHECKED not in report.notes:
        report.not_checked(NOT_CHECKED)
    return cost


def check_budgets(report: Report, cost: Cost | None, *budgets: Budget) -> None:
    """A case per budget. Does nothing for a launch that went wrong, which has failed already."""
    if cost is None:
        return
    for budget in budgets:
        used = budget.used(cost)
        with report.case(f"{budget.what}: yours {used}, budget {budget.most}, least possible {budget.least}"):
            if used > budget.most:
                report.misconception(*budget.suspect)
            report.true(used <= budget.most, f"It uses {used}, and {budget.most} are allowed.")


def _is_kernel(kernel: Any) -> bool:
    """What `@cuda.jit` makes of a function. `@njit` makes something that has no launch."""
    return callable(getattr(kernel, "py_func", None)) and hasattr(kernel, "__getitem__")


# -- one run -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """The arguments of one run: fresh copies, each tensor between guard cells."""

    arguments: dict[str, Argument]
    buffers: dict[str, Tensor]  # each tensor with its guards, flat

    @classmethod
    def of(cls, launch: Launch) -> Run:
        arguments, buffers = dict(launch.arguments), {}
        for name, value in launch.arguments.items():
            if isinstance(value, Tensor):
                guard = GUARD_BYTES // value.itemsize
                buffers[name] = unwritten(value.numel() + 2 * guard, dtype=value.dtype)
                arguments[name] = buffers[name][guard : guard + value.numel()].view(value.shape)
                arguments[name].copy_(value)  # type: ignore[union-attr]  # a tensor, as `value` is
        return cls(arguments, buffers)

    def tensors(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(name, the tensor, its guard cells)."""
        for name, buffer in self.buffers.items():
            guard = GUARD_BYTES // buffer.itemsize
            tensor = self.arguments[name]
            assert isinstance(tensor, Tensor)
            yield name, tensor, torch.cat((buffer[:guard], buffer[-guard:]))


def _blame(
    report: Report,
    error: KernelError,
    schedule: str,
    grid: Size,
    errors: Mapping[type[KernelError], Suspect],
) -> None:
    """Ends the case with the interpreter's sentence. Raises: the error itself, if a stub is behind it."""
    if stub_message(error):
        raise error
    kinds = [*_finer(error), *type(error).__mro__]
    suspect = next((table[kind] for table in (errors, ERRORS) for kind in kinds if kind in table), None)
    if isinstance(error, BoundsError) and BoundsError not in errors:
        if "negative" in error.message:
            suspect = NEGATIVE
        elif not _in_last_block(error, grid):
            suspect = None  # this thread has an element, so no guard is missing
    if suspect is not None:
        report.misconception(*suspect)
    end = "" if error.message.endswith("?") else "."
    report.true(False, f"{type(error).__name__}, threads {WORDS[schedule]}: {error}{end}")


def _finer(error: KernelError) -> list[type[KernelError]]:
    """The finer kinds of an error, the first one first."""
    cause = error.__cause__
    if isinstance(cause, ZeroDivisionError) or "math domain" in str(cause):
        return [ByZero]
    if not isinstance(error, RaceError) or error.thread is None or error.other.thread is None:
        return []
    kinds: list[type[KernelError]] = []
    if error.block != error.other.block:
        kinds.append(BlockRace)
    elif error.thread[0] // 32 != error.other.thread[0] // 32:
        kinds.append(WarpRace)
    if error.line == error.other.line and "two writes" in error.message:
        kinds.append(WriteRace)
    return kinds


def _in_last_block(error: KernelError, grid: Size) -> bool:
    """Whether the thread's block is the last of some dimension: threads past the end are in no other."""
    sizes = (grid,) if isinstance(grid, int) else grid
    if error.block is None or max(sizes) == 1:
        return True
    return any(size > 1 and at == size - 1 for at, size in zip(error.block, sizes, strict=False))


WORDS = {"in_order": "in order", "reverse": "in reverse order", "random": "in random order"}


def _compare(
    report: Report, launch: Launch, ran: Run, schedule: str, known: Mapping[Suspect, Contents]
) -> None:
    """Wants what is expected in the outputs, and no change of inputs and guards."""
    outputs = {name: tensor for name, tensor, _ in ran.tensors() if name in launch.expected}
    for name, got, guards in ran.tensors():
        before = launch.arguments[name]
        assert isinstance(before, Tensor)
        expected = launch.expected.get(name, before)
        sentence = _differs(expected, got)
        if sentence:
            for suspect, contents in known.items():
                if all(not _differs(contents[output], outputs[output]) for output in contents):
                    report.misconception(*suspect)
                    break
            if name not in launch.expected:
                sentence = f"it is an input and was changed; {sentence}"
            elif torch.equal(before.view(BITS[before.itemsize]), got.view(BITS[got.itemsize])):
                sentence = "nothing was written into it"
            else:
                sentence += _never_written(before, expected, got)
        report.true(not sentence, f"{name}, threads {WORDS[schedule]}: {sentence}.")
        untouched = same_bits(guards, unwritten(len(guards), dtype=guards.dtype))
        report.true(untouched, f"It wrote before or behind {name}, into memory of others.")


def _differs(expected: Tensor, got: Tensor) -> str:
    """How the two differ, bit by bit or, for an expectation in float64, by more than the tolerance."""
    if expected.dtype == got.dtype:
        return "" if same_bits(expected, got) else difference(expected, got, 0.0, 0.0) or "other bits"
    return difference(expected.to(got.dtype), got) or ""


def _never_written(before: Tensor, expected: Tensor, got: Tensor) -> str:
    """Names the first element that should have been written and still holds what it held."""
    untouched = before.view(BITS[before.itemsize]) == got.view(BITS[got.itemsize])
    left = untouched & ~same(got, expected.to(got.dtype))
    if not bool(left.any()):
        return ""
    first = left.nonzero()[0].tolist()
    return f"; {int(left.sum())} never written, the first at {first}"
