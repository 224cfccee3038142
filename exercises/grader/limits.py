"""Ending code that does not end, and refusing input().

In a notebook the answer runs in the kernel itself, and an alarm signal interrupts it. That ends any loop of Python
code, unless the code catches everything; a compiled loop ends only when the learner interrupts the kernel. On the
command line the answer runs in a process of its own and the parent kills it, which ends everything.
"""

from __future__ import annotations

import builtins
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

CELL_SECONDS = 20.0
AGAIN_SECONDS = 0.5  # the alarm is repeated: one that was caught by the answer is not the end
CAUGHT = "The answer catches the signal that should end it (a bare `except:`?): restart the kernel."


class Stopped(BaseException):
    """The grader ended the answer. Not an Exception, so that `except Exception` in the answer lets it through."""


class OutOfTime(Stopped):
    """The time limit was reached."""


class AskedForInput(Stopped):
    """The answer called input()."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[list[Stopped]]:
    """Raises OutOfTime in the body after `seconds`, and yields a list of what it raised so far.

    Does nothing for None, and where there are no alarms: on Windows, and outside the main thread.
    """
    alarms: list[Stopped] = []
    in_main = threading.current_thread() is threading.main_thread()
    if seconds is None or not hasattr(signal, "setitimer") or not in_main:
        yield alarms
        return

    def fire(number: int, frame: FrameType | None) -> NoReturn:
        alarms.append(OutOfTime())
        if len(alarms) == 4:
            print(CAUGHT, file=sys.stderr)
        raise alarms[-1]

    before = signal.signal(signal.SIGALRM, fire)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_SECONDS)
    try:
        yield alarms
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def no_input() -> Iterator[list[Stopped]]:
    """Makes input() raise AskedForInput in the body, which nobody is there to type for. Yields what was raised."""
    asked: list[Stopped] = []
    before = builtins.input

    def refuse(prompt: object = "") -> NoReturn:
        asked.append(AskedForInput())
        raise asked[-1]

    builtins.input = refuse
    try:
        yield asked
    finally:
        builtins.input = before
