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


def exercises(course: Course | None = None) -> dict[str, list[Task]]:
    """All tasks by exercise number, both in order: {"03": [task 03.1, ...]}. Raises: CourseError."""
    return _load((course or current()).tasks)


def of_exercise(number: str, course: Course | None = None) -> list[Task]:
    """The tasks of one exercise. Raises: CourseError naming the exercises there are."""
    known = exercises(course)
    if number not in known:
        raise CourseError(f"there is no exercise {number!r} (there is: {', '.join(known) or 'none yet'})")
    return known[number]


def find(task_id: str, course: Course | None = None) -> Task:
    """One task by its id, "03.1". Raises: CourseError with the nearest id there is."""
    every = {task.id: task for tasks in exercises(course).values() for task in tasks}
    if task_id in every:
        return every[task_id]
    near = difflib.get_close_matches(str(task_id), every, n=1)
    raise CourseError(f"there is no task {task_id!r}" + (f"; did you mean {near[0]!r}?" if near else ""))


@functools.cache
def _load(folder: Path) -> dict[str, list[Task]]:
    found: dict[str, list[Task]] = {}
    for path in sorted(folder.glob("ex[0-9][0-9].py")):
        number = path.stem[2:]
        tasks: list[Task] = list(getattr(_module(path), "TASKS", []))
        ids = [task.id for task in tasks]
        if ids != [f"{number}.{i}" for i in range(1, len(ids) + 1)] or not ids:
            raise CourseError(f"{path.name}: TASKS must be numbered {number}.1, {number}.2, ... in order; it has {ids}")
        found[number] = tasks
    return found


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
