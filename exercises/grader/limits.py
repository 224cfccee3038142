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


class Stopped(BaseException):
    """The grader ended the answer. Not an Exception, so that `except Exception` in the answer lets it through."""


class OutOfTime(Stopped):
    """The time limit was reached."""


class AskedForInput(Stopped):
    """The answer called input()."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raises OutOfTime in the body after `seconds`. Does nothing without alarms (Windows, a thread) or for None."""
    if seconds is None or not hasattr(signal, "setitimer"):
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    alarms = 0

    def fire(number: int, frame: FrameType | None) -> NoReturn:
        nonlocal alarms
        alarms += 1
        if alarms == 4:
            print("The answer catches the signal that should end it (a bare `except:`?): restart the kernel.", file=sys.stderr)
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, fire)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def no_input() -> Iterator[None]:
    """Makes input() raise AskedForInput in the body, instead of waiting for somebody to type."""
    before = builtins.input

    def refuse(prompt: object = "") -> NoReturn:
        raise AskedForInput

    builtins.input = refuse
    try:
        yield
    finally:
        builtins.input = before
