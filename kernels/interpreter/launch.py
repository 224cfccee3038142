"""One launch: from `kernel[grid, block](*arguments)` to what the kernel wrote, what it cost, or what is wrong."""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NoReturn

import numpy as np

from kernels.interpreter import counts
from kernels.interpreter.allocation import Allocator
from kernels.interpreter.arguments import Arguments
from kernels.interpreter.block import Block
from kernels.interpreter.clock import Clock
from kernels.interpreter.errors import KernelError, LaunchError, Place, Position, RaceError
from kernels.interpreter.facade import Cuda
from kernels.interpreter.findings import Findings
from kernels.interpreter.log import Log
from kernels.interpreter.memory import View
from kernels.interpreter.races import Race, RaceSearch
from kernels.interpreter.rebuild import Rebuilder
from kernels.interpreter.report import Record, Report
from kernels.interpreter.thread import Thread

Schedule = Literal["in_order", "reverse", "random"]

MAX_THREADS = 1024
MAX_BLOCK: Position = (1024, 1024, 64)
MAX_GRID: Position = (2**31 - 1, 65535, 65535)
MAX_DYNAMIC_SHARED_BYTES = 227 * 1024
ACCESSES_AT_ONCE = 500_000  # looked at in one go, if a barrier comes by


@dataclass(frozen=True)
class Options:
    """See `interpret`."""

    schedule: Schedule = "in_order"
    seed: int = 0
    races: bool = True
    poison: bool = True
    max_accesses: int = 10_000_000


class Launch:
    """Runs one kernel once.

    Args: report: gets what the launch did, if it goes well; the number of launches in it is part of the seed of
        the random schedule.
    """

    def __init__(
        self,
        kernel: Callable[..., Any],
        grid: Any,
        block: Any,
        shared_bytes: int,
        options: Options,
        report: Report,
    ) -> None:
        self.kernel, self.options, self.report = kernel, options, report
        self.log = Log(options.max_accesses)
        self._findings = Findings(kernel, self.log)
        self.passed: dict[str, int] = {}
        self.published: dict[int, Clock] = {}
        self._random = random.Random(f"{options.seed} {report.launches}")
        self._races = RaceSearch()
        self._records: list[Record] = []  # kept back until the launch has gone well
        self._block: Block | None = None
        self._position: Position | None = None
        self.grid, self.block = self._shape("grid", grid, MAX_GRID), self._shape("block", block, MAX_BLOCK)
        self._check_sizes(shared_bytes)
        self._findings.grid, self._findings.block = self.grid, self.block
        self._allocator = Allocator(self.log, self.fail, shared_bytes, options.poison)
        self._cuda = Cuda(self.grid, self.block, self.log.sites, self._allocator, self.fail, options.poison)
        self._rebuilder = Rebuilder(self._cuda, self.log.sites, self.fail, self._allocator.const)

    def run(self, arguments: tuple[Any, ...]) -> None:
        """Mutates: the arrays among the arguments, as the kernel does; the report. Raises: KernelError."""
        names = self._argument_names(arguments)
        binder = Arguments(self.log, self.fail, self.refuse, self._allocator.region)
        bound = binder.bind(names, arguments)
        body = self._rebuilder.function(self.kernel)
        try:
            for number, position in self._blocks():
                self._allocator.empty_shared()
                self._position = position
                self._block = Block(self, number, body, self.block)
                self._cuda.enter_block(self._block, position)
                self._block.run(bound)
                self._settle(ACCESSES_AT_ONCE)
        except KernelError as error:
            # A race is often why a thread went astray, so it is what should be reported.
            if self.log.limit > len(self.log.entries):
                self._look_for_races_behind(error)
            raise
        self._settle(0)
        self._report_race(self._races.between_blocks() if self.options.races else None)
        arrays = [name for name, value in zip(names, bound, strict=True) if isinstance(value, View)]
        self._records += self._findings.local_records(self._allocator.local_arrays())
        self.report.add_launch(arrays, self._records, self.passed)

    # What blocks ask of it

    def enter(self, thread: Thread) -> None:
        """See `block.Context`."""
        self._cuda.enter_thread(thread)
        for names, name in self._rebuilder.lane_names:
            names[name] = thread.lane

    def order(self, threads: list[Thread]) -> list[Thread]:
        """See `block.Context`."""
        if self.options.schedule == "reverse":
            return threads[::-1]
        if self.options.schedule == "random":
            return self._random.sample(threads, len(threads))
        return threads

    def place(self, site: int, position: Position | None) -> Place:
        """See `block.Context`."""
        return self._findings.place(site, self._position, position)

    def wrapped(self, error: Exception, thread: Thread) -> KernelError:
        """See `block.Context`."""
        site, trace = -1, error.__traceback__
        while trace is not None:
            base = self.log.sites.bases.get(id(trace.tb_frame.f_code))
            site = site if base is None else base + trace.tb_lasti
            trace = trace.tb_next
        hint = " (a GPU gives infinity or NaN here)" if isinstance(error, ZeroDivisionError) else ""
        place = self.place(self.log.sites.canonical(site), thread.position)
        return KernelError(f"{type(error).__name__}: {error}{hint}", place)

    # Errors

    def fail(self, kind: type[KernelError], message: str) -> NoReturn:
        """Raises an error at the instruction that is running."""
        site = self.log.sites.at(sys._getframe(1))
        raise kind(message, self.place(site, self._block.current.position if self._block else None))

    def refuse(self, message: str) -> NoReturn:
        """Raises a LaunchError, which has no thread yet."""
        raise LaunchError(message, self._findings.place(-1, None, None))

    def _argument_names(self, arguments: tuple[Any, ...]) -> list[str]:
        parameters = list(inspect.signature(self.kernel).parameters)
        if len(parameters) != len(arguments):
            self.refuse(
                f"the kernel takes {len(parameters)} arguments ({', '.join(parameters)}), got {len(arguments)}"
            )
        return parameters

    def _shape(self, what: str, given: Any, limits: Position) -> Position:
        """One to three sizes as three."""
        sizes = list(given) if isinstance(given, tuple | list) else [given]
        if not 1 <= len(sizes) <= 3 or not all(isinstance(size, int | np.integer) for size in sizes):
            self.refuse(f"the {what} is {given!r}, but it is one to three integers")
        x, y, z = (*map(int, sizes), 1, 1)[:3]
        if any(not 1 <= size <= limit for size, limit in zip((x, y, z), limits, strict=True)):
            self.refuse(f"the {what} is {given!r}, but each of x, y, z lies between 1 and {limits}")
        return x, y, z

    def _check_sizes(self, shared_bytes: int) -> None:
        if prod(self.block) > MAX_THREADS:
            self.refuse(
                f"a block of {self.block} has {prod(self.block)} threads, more than the {MAX_THREADS} of a GPU"
            )
        if not 0 <= shared_bytes <= MAX_DYNAMIC_SHARED_BYTES:
            self.refuse(
                f"{shared_bytes} bytes of dynamic shared memory, but a GPU has 0 to {MAX_DYNAMIC_SHARED_BYTES}"
            )

    # Blocks, and what is in the log

    def _blocks(self) -> Iterator[tuple[int, Position]]:
        x, y, z = self.grid
        numbers: Any = range(x * y * z)
        if self.options.schedule == "reverse":
            numbers = reversed(numbers)
        elif self.options.schedule == "random":
            numbers = self._random.sample(numbers, len(numbers))
        for number in numbers:
            yield number, (number % x, number // x % y, number // (x * y))

    def _settle(self, at_least: int) -> None:
        """Looks through the log if it is long enough, and empties it."""
        if len(self.log) <= at_least:
            return
        accesses = self.log.take()
        if self.options.races:
            self._report_race(self._races.within_blocks(accesses, self.log.tags))
        self._records += self._findings.records(counts.count(accesses, self.log.tags))

    def _look_for_races_behind(self, error: KernelError) -> None:
        if self.options.races and len(self.log):
            try:
                self._report_race(self._races.within_blocks(self.log.take(), self.log.tags))
                self._report_race(self._races.between_blocks())
            except RaceError as race:
                raise race from error

    def _report_race(self, race: Race | None) -> None:
        if race is not None:
            raise self._findings.race(race)
