"""The commands of the course for `refengine`: check, hint, show, reset, progress, build.

`refengine` never imports the exercises. They register themselves through the entry point group
"refengine.commands", and the engine's command line calls what it finds there.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from exercises.course import current
from exercises.grader import commands
from exercises.grader.limits import CELL_SECONDS

Name = Annotated[str, typer.Argument(help='a task, "04.2"')]
Exercise = Annotated[str, typer.Argument(help='an exercise, "04"')]


def register(app: typer.Typer) -> None:
    """Adds the course commands. Mutates: `app`."""
    for command in (check, hint, show, reset, progress, build):
        app.command()(command)


def check(
    names: Annotated[
        list[str] | None, typer.Argument(help='exercises "04" or tasks "04.2"; none: all')
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the results as JSON")] = False,
    limit: Annotated[float, typer.Option(min=0.1, help="seconds a cell may take")] = CELL_SECONDS,
) -> None:
    """Judge the saved notebook of an exercise in a fresh process. Exit status 0: everything asked for passed."""
    raise typer.Exit(commands.run_check(current(), names or [], limit, as_json, Console()))


def hint(task: Name) -> None:
    """Give the next of three hints."""
    raise typer.Exit(commands.run_hint(current(), task, Console()))


def show(task: Name, yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False) -> None:
    """Print the solution of a task, after asking."""
    raise typer.Exit(commands.run_show(current(), task, yes, Console()))


def reset(exercise: Exercise) -> None:
    """Start an exercise again; a copy of yours is kept in exercises/backup."""
    raise typer.Exit(commands.run_reset(current(), exercise, Console()))


def progress() -> None:
    """Show the points of every exercise."""
    raise typer.Exit(commands.run_progress(current(), Console()))


def build(
    names: Annotated[
        list[str] | None, typer.Argument(help='"03", "chapters/03" or a file name; none: all')
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="change nothing, fail if something is stale")
    ] = False,
) -> None:
    """For authors: make the notebooks from their sources."""
    from exercises.builder.build import run_build  # needs jupytext, which a learner does not

    raise typer.Exit(run_build(current(), names or [], check))
