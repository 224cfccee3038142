"""`refengine check`: the saved notebook in a fresh process, under a time limit that nothing escapes.

The parent kills the process when a cell takes too long, which also ends compiled loops and code that catches every
exception. When the process is gone, a new one goes on without the cell that ended it, so that one endless loop
does not cost the verdicts of the other tasks.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import exercises.tasks as registry
from exercises.course import ROOT_VARIABLE, Course
from exercises.grader.judge import out_of_time
from exercises.grader.limits import CELL_SECONDS
from exercises.grader.result import Result, from_dict
from exercises.grader.task import Task
from exercises.notebook import Notebook, read

START_SECONDS = 120.0  # importing torch on a busy machine
MOST_STARTS = 10


@dataclass
class Grading:
    """What came out: one result per task that was asked for, in the order of the registry."""

    notebook: str
    results: list[Result]
    notes: list[str]


@dataclass
class _State:
    """What is known so far, over all processes."""

    verdicts: dict[str, Result] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    skip: set[int] = field(default_factory=set)


@dataclass
class _End:
    """How one process ended. `sentence` is empty if it ran to its end."""

    position: int | None = None
    case: str = ""
    sentence: str = ""
    is_late: bool = False


def grade(
    course: Course,
    number: str,
    only: list[str] | None = None,
    seconds: float = CELL_SECONDS,
    on_result: Callable[[Result], None] = lambda result: None,
) -> Grading:
    """Judges exercise `number` from its saved notebook.

    Args:
        only: ids of the tasks to judge; None for all of the exercise.
        seconds: time limit for each cell.
        on_result: told each result as soon as it is known.
    Raises: CourseError if the exercise or its notebook does not exist.
    """
    asked = [task for task in registry.of_exercise(number, course) if only is None or task.id in only]
    path = course.exercise_file(number)
    notebook, state = read(path), _State()
    for _ in range(MOST_STARTS):
        plan = {"only": only, "skip": sorted(state.skip), "done": sorted(state.verdicts)}
        end = _run(_command(number, path, plan), _environment(course), seconds, state, on_result)
        if not end.sentence:
            break
        if end.position is None or end.position in state.skip:
            state.notes.append(end.sentence)
            break
        state.skip.add(end.position)
        _blame(notebook, end, asked, seconds, state, on_result)
    results = [state.verdicts.get(task.id) or _not_run(task) for task in asked]
    return Grading(course.short(path), results, list(dict.fromkeys(state.notes)))


def _run(
    command: list[str],
    environment: dict[str, str],
    seconds: float,
    state: _State,
    on_result: Callable[[Result], None],
) -> _End:
    """One process from start to end. Mutates: `state`."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    events: queue.Queue[dict[str, Any] | None] = queue.Queue()
    threading.Thread(target=_listen, args=(process, events), daemon=True).start()
    end, deadline = _End(), _Deadline(START_SECONDS)
    try:
        while True:
            event = events.get(timeout=deadline.left)
            if event is None:
                return _gone(process, end)
            if event["event"] == "done":
                return _End()
            if event["event"] == "cell":
                end = _End(position=event["position"])
                deadline = _Deadline(seconds)
            _note(event, end, state, on_result)
    except queue.Empty:
        end.is_late = True
        late = f"It did not end within {seconds:g} s (an endless loop?)"
        end.sentence = late if end.position is not None else f"No cell ran within {START_SECONDS:g} s"
        return end
    finally:
        _kill(process)


class _Deadline:
    """A moment, and how far away it is."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self._at - time.monotonic())


def _note(event: dict[str, Any], end: _End, state: _State, on_result: Callable[[Result], None]) -> None:
    """Takes in one message of the child. Mutates: `end`, `state`."""
    if event["event"] == "case":
        end.case = event["title"]
    elif event["event"] == "note":
        state.notes.append(event["sentence"])
    elif event["event"] == "result":
        result = from_dict(event["result"])
        state.verdicts[result.task] = result
        end.case = ""
        on_result(result)


def _gone(process: subprocess.Popen[str], end: _End) -> _End:
    """The child closed its line without saying that it was done."""
    status = process.wait()
    how = f"signal {-status}" if status < 0 else f"exit status {status}"
    end.sentence = f"The process ended ({how})"
    return end


def _blame(
    notebook: Notebook,
    end: _End,
    asked: list[Task],
    seconds: float,
    state: _State,
    on_result: Callable[[Result], None],
) -> None:
    """Gives the tasks of the cell that ended a process their verdict. Mutates: `state`."""
    assert end.position is not None  # the caller looked
    cell = notebook.cells[end.position]
    ids = [cell.task] if cell.task else list(cell.checks)
    for task in asked:
        if task.id not in ids or task.id in state.verdicts:
            continue
        where = f", in the case: {end.case}" if end.case else ""
        died = f"{end.sentence} in the cell of task {task.id}{where}."
        sentence = out_of_time(task.id, seconds, end.case) if end.is_late else died
        result = Result(task.id, task.title, "failed", task.points, sentence, slot=task.part)
        state.verdicts[task.id] = result
        on_result(result)
    if not ids:
        state.notes.append(f"Cell {end.position + 1} of the notebook was left out. {end.sentence}.")


def _not_run(task: Task) -> Result:
    sentence = f"No cell that ran calls {task.call}"
    return Result(task.id, task.title, "not run", task.points, sentence, slot=task.part)


def _listen(process: subprocess.Popen[str], events: queue.Queue[dict[str, Any] | None]) -> None:
    """Turns lines into events; None at the end. Lines that are no JSON come from nobody we know."""
    assert process.stdout is not None  # it was opened as a pipe
    for line in process.stdout:
        with contextlib.suppress(ValueError):
            events.put(json.loads(line))
    events.put(None)


def _kill(process: subprocess.Popen[str]) -> None:
    """Ends the process and what it started."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def _command(number: str, path: Path, plan: dict[str, Any]) -> list[str]:
    return [sys.executable, "-m", "exercises.grader.child", number, str(path), json.dumps(plan)]


def _environment(course: Course) -> dict[str, str]:
    fixed = {
        ROOT_VARIABLE: str(course.root),
        "MPLBACKEND": "Agg",
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
    }
    return {**os.environ, "OMP_NUM_THREADS": "1", **fixed}
