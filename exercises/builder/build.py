"""Making all notebooks, or checking that those on the disk are what would be made."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import exercises.tasks as registry
from exercises.builder import links, rules
from exercises.builder.compare import first_difference
from exercises.builder.execute import execute
from exercises.builder.regions import stubbed
from exercises.builder.sources import read_source
from exercises.course import Course, CourseError, current
from exercises.grader.task import Task
from exercises.notebook import Notebook, dumps, read


@dataclass(frozen=True)
class Source:
    """A source file, and what is made from it."""

    path: Path
    targets: tuple[Path, ...]  # the executed notebook, then the exercise if there is one

    @property
    def is_chapter(self) -> bool:
        return len(self.targets) == 1

    @property
    def name(self) -> str:
        """ "chapters/03_used_free_cached"."""
        return f"{self.targets[0].parent.name}/{self.path.stem}"


@dataclass
class Built:
    """The notebooks of one source, by path, and what is wrong with them."""

    source: Source
    notebooks: dict[Path, Notebook] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def sources(course: Course, names: Iterable[str] = ()) -> list[Source]:
    """All sources of the course, in order, or those whose name holds one of `names`. Raises: CourseError."""
    found = [
        Source(p, (course.chapters / f"{p.stem}.ipynb",))
        for p in course.chapters.glob("source/[0-9][0-9]_*.md")
    ]
    for path in course.solutions.glob("source/[0-9][0-9]_*.py"):
        target = f"{path.stem}.ipynb"
        found.append(Source(path, (course.solutions / target, course.exercises / target)))
    found.sort(key=lambda source: (source.path.stem[:2], source.name))
    names = list(names)
    for name in names:
        if not any(_matches(name, source) for source in found):
            there = ", ".join(source.name for source in found) or "none"
            raise CourseError(f"no source is called {name!r} (what is there: {there})")
    return [source for source in found if not names or any(_matches(name, source) for name in names)]


def _matches(name: str, source: Source) -> bool:
    wanted = name.removesuffix(".ipynb").removesuffix(source.path.suffix).replace("/source/", "/")
    return wanted.replace("exercises/", "solutions/") in source.name


def make(source: Source, course: Course, others: dict[Path, Notebook] | None = None) -> Built:
    """Makes the notebooks of one source in memory: runs it, stubs it, and applies every rule.

    Args:
        others: notebooks made before in the same build, for links between them.
    """
    built = Built(source)
    try:
        notebook = read_source(source.path)
        number = source.path.stem[:2]
        known = registry.of_exercise(number, course) if number in registry.numbers(course) else []
        if not source.is_chapter:
            built.notebooks[source.targets[1]] = stubbed(notebook, {task.id: task for task in known})
        built.notebooks[source.targets[0]] = execute(notebook, source.targets[0].parent, course)
    except CourseError as error:
        built.problems.append(f"{source.name}: {error}")
        return built
    made = {path.resolve(): notebook for path, notebook in {**(others or {}), **built.notebooks}.items()}
    for path, notebook in built.notebooks.items():
        found = [*_rules(notebook, source, known), *links.broken(notebook, path.parent, made)]
        built.problems += [f"{course.short(path)}: {sentence}" for sentence in found]
    return built


def _rules(notebook: Notebook, source: Source, tasks: list[Task]) -> Iterator[str]:
    yield from rules.everywhere(notebook, dumps(notebook))
    if source.is_chapter:
        yield from rules.of_chapter(notebook, tasks)
    else:
        yield from rules.of_exercise(notebook, tasks)


def stale(built: Built, course: Course) -> list[str]:
    """Sentences on notebooks of `built` that are missing on the disk or differ from what was made."""
    found = []
    for path, fresh in built.notebooks.items():
        if not path.exists():
            found.append(f"{course.short(path)} is missing")
        elif difference := first_difference(read(path), fresh):
            found.append(f"{course.short(path)} is stale: {difference}")
    return found


def orphans(course: Course) -> list[str]:
    """Sentences on notebooks on the disk that no source makes."""
    made = {target for source in sources(course) for target in source.targets}
    folders = (course.chapters, course.solutions, course.exercises)
    there = [path for folder in folders for path in sorted(folder.glob("*.ipynb"))]
    return [f"{course.short(path)} has no source" for path in there if path not in made]


def run_build(course: Course, names: list[str], check: bool, say: Callable[[str], None] = print) -> int:
    """Makes the notebooks of the sources named, or of all. With `check`, writes nothing. Exit status 0: all is well."""
    chosen = sources(course, names)
    problems = [] if names else orphans(course)
    if not chosen:
        problems.append("there is nothing to build: no source was found")
    for problem in problems:
        say(problem)
    done: dict[Path, Notebook] = {}
    planned = _planned(course)
    for i, source in enumerate(chosen):
        say(f"[{i + 1}/{len(chosen)}] {source.name}")
        built = make(source, course, {**planned, **done})
        done.update(built.notebooks)
        found = built.problems + (stale(built, course) if check else [])
        for problem in found:
            say(f"  {problem}")
        problems += found
        if not check:
            for path, notebook in built.notebooks.items():
                path.write_text(dumps(notebook), encoding="utf-8")
    say(f"{len(problems)} problem(s)." if problems else "All is well.")
    return 1 if problems else 0


def _planned(course: Course) -> dict[Path, Notebook]:
    """Every notebook that has a source, not run: what links may point to. One with a fault reports it by itself."""
    found = {}
    for source in sources(course):
        with contextlib.suppress(CourseError):
            found.update(dict.fromkeys(source.targets, read_source(source.path)))
    return found


def main(arguments: list[str] | None = None) -> int:
    """`python -m exercises.builder [--check] [NAMES...]`."""
    parser = argparse.ArgumentParser(prog="python -m exercises.builder", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help='"03", "chapters/03" or a file; none: all')
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something is stale")
    options = parser.parse_args(arguments)
    try:
        return run_build(current(), options.names, options.check)
    except CourseError as error:
        print(f"builder: {error}", file=sys.stderr)
        return 2
