"""The registry of tasks: what is asked, what it is worth, and how it is judged.

One module per exercise, `ex03.py` for exercise 03, holding a list `TASKS`. Totals of points come from here and
never from what happened to run. Importing this package imports no task: the modules load on first use.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from exercises.course import Course, CourseError, current

if TYPE_CHECKING:
    from exercises.grader.task import Task


def numbers(course: Course | None = None) -> list[str]:
    """The numbers of all exercises, in order."""
    return [path.stem[2:] for path in sorted((course or current()).tasks.glob("ex[0-9][0-9].py"))]


def exercises(course: Course | None = None) -> dict[str, list[Task]]:
    """All tasks by exercise number, both in order: {"03": [task 03.1, ...]}. Raises: CourseError."""
    return {number: of_exercise(number, course) for number in numbers(course)}


def of_exercise(number: str, course: Course | None = None) -> list[Task]:
    """The tasks of one exercise; no other module is loaded. Raises: CourseError naming the exercises there are."""
    course = course or current()
    if number not in numbers(course):
        raise CourseError(
            f"there is no exercise {number!r} (what is there: {', '.join(numbers(course)) or 'none yet'})"
        )
    return _load(course.tasks / f"ex{number}.py")


def find(task_id: str, course: Course | None = None) -> Task:
    """One task by its id, "03.1". Raises: CourseError with the nearest id there is."""
    number = str(task_id).partition(".")[0]
    if number in numbers(course):
        for task in of_exercise(number, course):
            if task.id == task_id:
                return task
    every = [task.id for tasks in exercises(course).values() for task in tasks]
    near = difflib.get_close_matches(str(task_id), every, n=1)
    raise CourseError(f"there is no task {task_id!r}" + (f"; did you mean {near[0]!r}?" if near else ""))


@functools.cache
def _load(path: Path) -> list[Task]:
    number = path.stem[2:]
    tasks: list[Task] = list(getattr(_module(path), "TASKS", []))
    ids = [task.id for task in tasks]
    if ids != [f"{number}.{i}" for i in range(1, len(ids) + 1)] or not ids:
        raise CourseError(
            f"{path.name}: TASKS must be numbered {number}.1, {number}.2, ... in order; it has {ids}"
        )
    return tasks


def _module(path: Path) -> ModuleType:
    """Imports by name where the file is part of this package, and by place where a test brought its own."""
    if path.parent == Path(__file__).resolve().parent:
        return importlib.import_module(f"{__name__}.{path.stem}")
    name = f"course_tasks_{re.sub(r'[^0-9A-Za-z]', '_', str(path.with_suffix('')))}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # a .py file always has both
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
