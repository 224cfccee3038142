"""Running the code cells of an exercise without Jupyter.

The cells run in order in one namespace, as in a kernel. `check(...)` in a cell hands in an answer; an answer cell
that raises is a verdict by itself, whatever a later cell does to the name. The process of `refengine check` and the
tests of the tasks both run this.
"""

from __future__ import annotations

import builtins
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from exercises.course import CourseError
from exercises.grader.hand_in import Desk, at
from exercises.grader.judge import ENDED, INPUT, not_started
from exercises.grader.limits import AskedForInput, OutOfTime, no_input, time_limit
from exercises.grader.report import said, stub_message
from exercises.grader.result import Result
from exercises.grader.task import Task
from exercises.notebook import SETUP, Cell, Notebook, without_magics


@dataclass(frozen=True)
class Plan:
    """Which cells to run.

    Args:
        only: hand in only these tasks, and run nothing after the last of them; None for all.
        skip: positions of cells not to run, since they ended an earlier process.
        done: tasks whose verdict is known: their cells may run, their checks do not.
        lean: only set-up, answers and checks; otherwise the cells that only show something run too.
        seconds: time limit per cell; None where the parent process watches the clock.
    """

    only: frozenset[str] | None = None
    skip: frozenset[int] = frozenset()
    done: frozenset[str] = frozenset()
    lean: bool = False
    seconds: float | None = None


@dataclass
class Listener:
    """Told what happens, as it happens. The child process turns each call into a line for its parent."""

    on_cell: Callable[[int], None] = lambda position: None
    on_case: Callable[[str], None] = lambda title: None
    on_result: Callable[[Result], None] = lambda result: None
    on_note: Callable[[str], None] = lambda sentence: None


@dataclass
class Session:
    """One run over a notebook. `namespace` is what the cells see."""

    notebook: Notebook
    tasks: Mapping[str, Task]
    listener: Listener = field(default_factory=Listener)
    module: ModuleType = field(default_factory=lambda: ModuleType("__main__"))
    results: dict[str, Result] = field(default_factory=dict)
    _final: set[str] = field(default_factory=set)  # tasks whose answer cell raised

    @property
    def namespace(self) -> dict[str, Any]:
        return self.module.__dict__

    def run(self, plan: Plan) -> dict[str, Result]:
        """Runs the cells and returns the verdicts. Raises: nothing that a cell raised."""
        desk = Desk(self._take, self._find, self.listener.on_case, plan.seconds)
        with _as_main(self.module), at(desk):
            for position, cell in self._chosen(plan):
                self.listener.on_cell(position)
                self._run_cell(position, cell, plan.seconds)
        return self.results

    def _chosen(self, plan: Plan) -> Iterator[tuple[int, Cell]]:
        """The cells to run, with their positions in the notebook."""
        last = len(self.notebook.cells)
        wanted = set(self.tasks) if plan.only is None else set(plan.only)
        if plan.only is not None:
            handing_in = [i for i, cell in enumerate(self.notebook.cells) if wanted & set(cell.checks)]
            last = max(handing_in, default=last - 1) + 1
        for position, cell in enumerate(self.notebook.cells[:last]):
            if not cell.is_code or position in plan.skip:
                continue
            only_shows = not cell.task and not cell.checks and SETUP not in cell.tags
            is_judged = bool(set(cell.checks) & (wanted - plan.done))
            if (cell.task or not cell.checks or is_judged) and not (plan.lean and only_shows):
                yield position, cell

    def _run_cell(self, position: int, cell: Cell, seconds: float | None) -> None:
        name = f"<cell {position + 1}>"
        source = without_magics(cell.source)
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        try:
            with no_input(), time_limit(seconds):
                exec(compile(source, name, "exec", dont_inherit=True), self.namespace)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            self._raised(position, cell, error, seconds)

    def _raised(self, position: int, cell: Cell, error: BaseException, seconds: float | None) -> None:
        """An answer cell that raised is a verdict; a check cell that raised is one if there is none yet."""
        sentence, stub = _sentence(error, seconds), stub_message(error)
        ids = [cell.task] if cell.task else list(cell.checks)
        for task_id in ids:
            task = self.tasks.get(task_id)
            if task is None or task_id in self.results:
                continue
            sentence = self._missing(task, error) or sentence
            failed = Result(task.id, task.title, "failed", task.points, sentence, slot=task.part)
            self._take(not_started(task, f"Still to write: {stub}") if stub else failed)
            if cell.task:
                self._final.add(task_id)
        if not ids and not stub and "raises-exception" not in cell.tags:
            kind = "Set-up cell" if SETUP in cell.tags else "Cell"
            self.listener.on_note(f"{kind} {position + 1} of the notebook has a fault. {sentence}")

    def _find(self, task_id: str) -> Task:
        if task_id not in self.tasks:
            raise CourseError(f"there is no task {task_id!r} in this exercise")
        return self.tasks[task_id]

    def _missing(self, task: Task, error: BaseException) -> str:
        """If a name is missing that another task should have made: which."""
        name = error.name if isinstance(error, NameError) else None
        makers = [other.id for other in self.tasks.values() if name in other.answers and other.id != task.id]
        return f"It needs {name}, the answer of task {makers[0]}, and there is none." if makers else ""

    def _take(self, result: Result) -> Result:
        """The latest check counts, but an answer cell that raised stays a verdict."""
        if result.task not in self._final:
            self.results[result.task] = result
            self.listener.on_result(result)
        return result


def _sentence(error: BaseException, seconds: float | None) -> str:
    if isinstance(error, AskedForInput):
        return INPUT
    if isinstance(error, OutOfTime):
        return f"The cell did not end within {seconds:g} s (an endless loop?)."
    if isinstance(error, SystemExit):
        return ENDED
    if isinstance(error, SyntaxError):
        line = (error.text or "").strip()
        return f"Python cannot read it: {error.msg}, in line {error.lineno} of the cell: {line}"
    return said(error)


@contextmanager
def _as_main(module: ModuleType) -> Iterator[None]:
    """The cells see themselves as __main__ and find `display`, as in a kernel."""
    before = sys.modules["__main__"]
    sys.modules["__main__"] = module
    module.__dict__.update({"display": lambda *shown, **options: None, "get_ipython": lambda: None})
    module.__dict__.setdefault("__builtins__", builtins)
    try:
        yield
    finally:
        sys.modules["__main__"] = before
