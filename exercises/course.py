"""Where the course lies on the disk.

Everything that reads or writes course files asks a `Course`, so that the tests can point the same code at a small
course of their own. The environment variable REFENGINE_COURSE does it for child processes and kernels.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from refengine.errors import RefengineError

ROOT_VARIABLE = "REFENGINE_COURSE"
PROGRESS_VARIABLE = "REFENGINE_PROGRESS"  # "off": results are shown and not remembered (builder, tests)


class CourseError(RefengineError):
    """Something about the course a person can act on, in one sentence."""


@dataclass(frozen=True)
class Course:
    """The folders of one course. `root` holds chapters/, exercises/ and solutions/."""

    root: Path

    @property
    def chapters(self) -> Path:
        return self.root / "chapters"

    @property
    def exercises(self) -> Path:
        return self.root / "exercises"

    @property
    def solutions(self) -> Path:
        return self.root / "solutions"

    @property
    def tasks(self) -> Path:
        return self.root / "exercises" / "tasks"

    @property
    def progress_file(self) -> Path:
        return self.exercises / ".progress.json"

    @property
    def backups(self) -> Path:
        """Where `refengine reset` puts the learner's notebook."""
        return self.exercises / "backup"

    def exercise_file(self, number: str) -> Path:
        """The learner's notebook of exercise `number`, for example "03". Raises: CourseError if there is none."""
        return _only(self.exercises, number)

    def solution_file(self, number: str) -> Path:
        """The solved notebook of exercise `number`. Raises: CourseError if there is none."""
        return _only(self.solutions, number)

    def short(self, path: Path) -> str:
        """`path` as seen from the root, with forward slashes on every system."""
        return path.relative_to(self.root).as_posix()


def current() -> Course:
    """The course in use: REFENGINE_COURSE, or the checkout this package lies in."""
    chosen = os.environ.get(ROOT_VARIABLE)
    return Course(Path(chosen) if chosen else Path(__file__).resolve().parent.parent)


def _only(folder: Path, number: str) -> Path:
    found = sorted(folder.glob(f"{number}_*.ipynb"))
    if len(found) != 1:
        there = ", ".join(path.name for path in sorted(folder.glob("*.ipynb"))) or "no notebook"
        what = "no notebook" if not found else f"{len(found)} notebooks"
        raise CourseError(
            f"{folder.name}/ holds {what} whose name starts with {number}_ (what is there: {there})"
        )
    return found[0]
