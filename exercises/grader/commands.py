"""What the course commands do; `cli` only parses arguments. Each function returns an exit status."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

import exercises.tasks as registry
from exercises.builder.regions import solution_text, stubbed
from exercises.course import Course, CourseError
from exercises.grader import progress
from exercises.grader.result import Result
from exercises.grader.runner import Grading, grade
from exercises.notebook import dumps, read


def exercise_number(name: str) -> str:
    """ "04", "4" or "ex04" -> "04". Raises: CourseError if it is none of these."""
    found = re.fullmatch(r"(?:ex)?(\d{1,2})", name.strip())
    if not found:
        raise CourseError(f'{name!r} is no exercise; write "04", or "04.2" for one task')
    return found.group(1).zfill(2)


def task_id(name: str) -> str:
    """ "04.2" or "4.2" -> "04.2". Raises: CourseError if it does not look like a task."""
    number, dot, place = name.strip().partition(".")
    if not dot or not place.isdigit():
        raise CourseError(f'{name!r} is no task; write for example "04.2"')
    return f"{exercise_number(number)}.{int(place)}"


def run_check(course: Course, names: list[str], seconds: float, as_json: bool, console: Console) -> int:
    """Judges exercises ("04") and tasks ("04.2"); nothing named means every exercise. 0 if all asked for passed."""
    gradings = []
    for number, only in _asked(course, names).items():
        shown = None if as_json else console
        gradings.append(_grade(course, number, only, seconds, shown))
        progress.record(course, gradings[-1].results)
    results = [result for grading in gradings for result in grading.results]
    points, total = sum(result.points for result in results), sum(result.total for result in results)
    if as_json:
        notes = [note for grading in gradings for note in grading.notes]
        tasks = [result.as_dict() for result in results]
        data = {"schema": 1, "points": points, "total": total, "notes": notes, "tasks": tasks}
        print(json.dumps(data, indent=1))
    else:
        console.print(f"{points} of {total} points", highlight=False)
    return 0 if results and all(result.status == "passed" for result in results) else 1


def _grade(
    course: Course, number: str, only: list[str] | None, seconds: float, console: Console | None
) -> Grading:
    def show(text: object) -> None:
        if console:
            console.print(str(text), markup=False, highlight=False, soft_wrap=True)

    early: set[str] = set()

    def show_result(result: Result) -> None:
        early.add(result.task)
        show(result)

    show(f"{course.short(course.exercise_file(number))}, as it was saved")
    grading = grade(course, number, only, seconds, show_result)
    for result in grading.results:
        if result.task not in early:
            show(result)
    for note in grading.notes:
        show(note)
    return grading


def _asked(course: Course, names: list[str]) -> dict[str, list[str] | None]:
    """Exercise number -> tasks, or None for all of them. Raises: CourseError for a task that does not exist."""
    if not names:
        return dict.fromkeys(registry.numbers(course))
    asked: dict[str, list[str] | None] = {}
    for name in names:
        if "." not in name:
            asked[exercise_number(name)] = None
            continue
        task = registry.find(task_id(name), course)
        tasks = asked.setdefault(task.exercise, [])
        if tasks is not None:
            tasks.append(task.id)
    return asked


def run_hint(course: Course, name: str, console: Console) -> int:
    """Gives the next of three hints; after the third, all of them again."""
    task = registry.find(task_id(name), course)
    before = progress.load(course).get(task.id, progress.Entry()).hints
    number = progress.take_hint(course, task.id)
    numbers = range(1, 4) if before == 3 else [number]
    console.print(f"{task.id} {task.title}", markup=False, highlight=False)
    for i in numbers:
        console.print(f"Hint {i} of 3: {task.hints[i - 1]}", markup=False, highlight=False)
    if before == 3:
        console.print(
            f"There are no more. The solution: refengine show {task.id}", markup=False, highlight=False
        )
    return 0


def run_show(course: Course, name: str, yes: bool, console: Console) -> int:
    """Prints the solution of a task, after asking."""
    task = registry.find(task_id(name), course)
    if not yes and not typer.confirm(f"Show the solution of {task.id} {task.title}?", default=False):
        return 1
    solution = read(course.solution_file(task.exercise))
    for cell in solution.cells:
        if cell.task == task.id:
            console.print(solution_text(cell.source), markup=False, highlight=False, soft_wrap=True)
    return 0


def run_reset(course: Course, name: str, console: Console) -> int:
    """Puts the untouched exercise in place of the learner's, of which it keeps a copy."""
    number = exercise_number(name)
    tasks = {task.id: task for task in registry.of_exercise(number, course)}
    solution = course.solution_file(number)
    mine = course.exercises / solution.name
    if mine.exists():
        kept = _backup(course, mine)
        console.print(f"Your notebook is kept as {course.short(kept)}.", markup=False, highlight=False)
    mine.write_text(dumps(stubbed(read(solution), tasks)), encoding="utf-8")
    progress.forget(course, tasks)
    console.print(
        f"{course.short(mine)} is as at the beginning. If it is open in JupyterLab: File, Reload Notebook from Disk.",
        markup=False,
        highlight=False,
    )
    return 0


def _backup(course: Course, mine: Path) -> Path:
    course.backups.mkdir(exist_ok=True)
    number = 1
    while (kept := course.backups / f"{mine.stem}.{number}.ipynb").exists():
        number += 1
    shutil.copy2(mine, kept)
    return kept


def run_progress(course: Course, console: Console) -> int:
    """A table of points, one row per exercise, from the registry and the progress file."""
    entries = progress.load(course)
    table = Table(title="Progress", title_justify="left")
    for heading in ("exercise", "tasks passed", "points", "hints"):
        table.add_column(heading, justify="left" if heading == "exercise" else "right")
    sums = [0, 0, 0, 0, 0]
    for number, tasks in registry.exercises(course).items():
        known = [entries.get(task.id, progress.Entry()) for task in tasks]
        earned = sum(
            task.points for task, entry in zip(tasks, known, strict=True) if entry.status == "passed"
        )
        passed = sum(entry.status == "passed" for entry in known)
        row = [
            passed,
            len(tasks),
            earned,
            sum(task.points for task in tasks),
            sum(entry.hints for entry in known),
        ]
        sums = [a + b for a, b in zip(sums, row, strict=True)]
        table.add_row(number, f"{row[0]} of {row[1]}", f"{row[2]} of {row[3]}", str(row[4]))
    table.add_section()
    table.add_row("all", f"{sums[0]} of {sums[1]}", f"{sums[2]} of {sums[3]}", str(sums[4]))
    console.print(table)
    return 0
