"""What every task has to prove, as functions that return sentences; no sentence, no fault.

The answers run in this process, in the same session as `refengine check` uses, one fresh namespace per variant.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import exercises.tasks as registry
from exercises.builder.build import Source
from exercises.builder.regions import solution_text, stubbed
from exercises.builder.sources import read_source
from exercises.course import Course
from exercises.grader.result import Result
from exercises.grader.session import Plan, Session
from exercises.grader.task import Edits, Task, WrongAnswer
from exercises.notebook import Cell, Notebook

VARIANT_SECONDS = 60.0


@dataclass
class Proof:
    """One exercise: its solved notebook from the source, and its tasks."""

    notebook: Notebook
    tasks: dict[str, Task]

    @classmethod
    def of(cls, source: Source, course: Course) -> Proof:
        tasks = registry.of_exercise(source.path.stem[:2], course)
        return cls(read_source(source.path), {task.id: task for task in tasks})

    @cached_property
    def stub(self) -> dict[str, Result]:
        """The verdicts on the untouched exercise."""
        return self._run(stubbed(self.notebook, self.tasks), None)

    @cached_property
    def solution(self) -> dict[str, Result]:
        return self._run(self.notebook, None)

    def variant(self, task: Task, answer: str | Edits) -> Result | None:
        """The verdict on another answer to one task, all others solved."""
        return self._run(with_answer(self.notebook, task, answer), task.id).get(task.id)

    def _run(self, notebook: Notebook, only: str | None) -> dict[str, Result]:
        chosen = None if only is None else frozenset([only])
        return Session(notebook, self.tasks).run(Plan(only=chosen, lean=True, seconds=VARIANT_SECONDS))


def with_answer(notebook: Notebook, task: Task, answer: str | Edits) -> Notebook:
    """The notebook with the answer cells of `task` replaced by source, or edited. Raises: AssertionError."""
    places = [i for i, cell in enumerate(notebook.cells) if cell.task == task.id]
    assert places, f"no cell answers task {task.id}"
    cells = list(notebook.cells)
    if isinstance(answer, str):
        for place in places:
            cells[place] = replace(cells[place], source="")
        cells[places[0]] = replace(cells[places[0]], source=answer)
        return notebook.with_cells(cells)
    for place in places:
        cells[place] = replace(cells[place], source=solution_text(cells[place].source))
    for old, new in answer:
        _edit(cells, places, old, new, task)
    return notebook.with_cells(cells)


def _edit(cells: list[Cell], places: list[int], old: str, new: str, task: Task) -> None:
    count = sum(cells[place].source.count(old) for place in places)
    assert count == 1, f"task {task.id}: an edit must match one place; {old!r} is there {count} times"
    for place in places:
        cells[place] = replace(cells[place], source=cells[place].source.replace(old, new))


def faults(proof: Proof, task: Task) -> Iterator[str]:
    """Everything that is not proven about one task."""
    stub = proof.stub.get(task.id)
    if stub is None or stub.status != "not started":
        yield f"the untouched stub should be not started:\n{stub}"
    if not task.hints or len(set(task.hints)) != 3:
        yield "its three hints must differ"
    misconceptions = {wrong.misconception for wrong in task.wrong}
    if len(misconceptions) < task.wrong_needed:
        yield f"it needs {task.wrong_needed} wrong answers with different misconceptions; it has {len(misconceptions)}"
    solved = proof.solution.get(task.id)
    if solved is None or solved.status != "passed":
        yield f"the solution should pass:\n{solved}"
    other = proof.variant(task, task.other)
    if other is None or other.status != "passed":
        yield f"the right answer in another style should pass:\n{other}"
    for wrong in task.wrong:
        yield from _wrong_faults(proof, task, wrong)


def _wrong_faults(proof: Proof, task: Task, wrong: WrongAnswer) -> Iterator[str]:
    result = proof.variant(task, wrong.source or wrong.edits)
    if result is None or result.status != "failed":
        yield f"the wrong answer {wrong.name!r} should fail:\n{result}"
    elif result.misconception is None or result.misconception[0] != wrong.misconception:
        yield f"the wrong answer {wrong.name!r} should be told {wrong.misconception!r}:\n{result}"
    elif not result.misconception[1]:
        yield f"the misconception {wrong.misconception!r} does not say why it is wrong"
