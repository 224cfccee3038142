"""What the learner has done so far: exercises/.progress.json, which git ignores.

The schema, version 1:

    {"schema": 1,
     "tasks": {"03.1": {"status": "passed" | "failed" | "not started",
                        "points": 10, "hints": 0,
                        "part": {"slot": "free_queue", "notebook": "exercises/03_used_free_cached.ipynb"} | null}}}

`status` is that of the latest check, so a part that was broken again is not passed. `part` is there for a passed
task that fills a slot of the engine. `hints` counts the hints that were given.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from exercises.course import Course, CourseError
from exercises.grader.result import Result

SCHEMA = 1


@dataclass
class Entry:
    """One task in the file."""

    status: str = "not started"
    points: int = 0
    hints: int = 0
    part: dict[str, str] | None = None


def load(course: Course) -> dict[str, Entry]:
    """All entries. A file that cannot be read is put aside with one sentence, and everything starts anew."""
    path = course.progress_file
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except UnicodeDecodeError:
        text = ""
    try:
        data = json.loads(text)
        if data["schema"] != SCHEMA:
            raise ValueError
        return {str(task): _entry(raw) for task, raw in data["tasks"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        aside = _put_aside(path)
        print(
            f"{path.name} was damaged: it is kept as {aside.name}, and progress starts anew.", file=sys.stderr
        )
        return {}


def record(course: Course, results: Iterable[Result]) -> None:
    """Remembers results. "not run" changes nothing. Mutates: the file, in one move. Raises: OSError."""
    entries = load(course)
    for result in results:
        if result.status == "not run":
            continue
        hints = entries.get(result.task, Entry()).hints
        entries[result.task] = Entry(result.status, result.points, hints, _part(course, result))
    _save(course.progress_file, entries)


def take_hint(course: Course, task_id: str) -> int:
    """Counts one more hint, up to three, and returns the number of the hint to give. Mutates: the file."""
    entries = load(course)
    entry = entries.setdefault(task_id, Entry())
    entry.hints = min(entry.hints + 1, 3)
    _save(course.progress_file, entries)
    return entry.hints


def forget(course: Course, task_ids: Iterable[str]) -> None:
    """After a reset: nothing is started; the hints that were given stay given. Mutates: the file."""
    entries = load(course)
    for task_id in set(task_ids) & set(entries):
        entries[task_id] = Entry(hints=entries[task_id].hints)
    _save(course.progress_file, entries)


def _part(course: Course, result: Result) -> dict[str, str] | None:
    if result.status != "passed" or result.slot is None:
        return None
    try:
        path = course.exercise_file(result.task.partition(".")[0])
    except CourseError:
        return None
    return {"slot": result.slot, "notebook": course.short(path)}


def _entry(raw: dict[str, object]) -> Entry:
    entry = Entry(**raw)  # type: ignore[arg-type]  # checked in the next lines
    sound = isinstance(entry.status, str) and isinstance(entry.points, int) and isinstance(entry.hints, int)
    if not sound or not isinstance(entry.part, (dict, type(None))):
        raise ValueError
    return entry


def _save(path: Path, entries: dict[str, Entry]) -> None:
    """Writes beside and renames: a reader never sees half a file."""
    data = {"schema": SCHEMA, "tasks": {task: asdict(entry) for task, entry in sorted(entries.items())}}
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".progress", suffix=".tmp")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(json.dumps(data, indent=1) + "\n")
    os.replace(name, path)


def _put_aside(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    os.replace(path, aside)
    return aside
