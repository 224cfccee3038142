"""The process that runs the learner's notebook for `refengine check`.

It tells its parent what it does, one JSON object per line on its standard output: `ready`, `cell`, `case`,
`result`, `note`, `done`. What the learner's code prints goes nowhere. The parent watches the clock and ends this
process if need be, so nothing here tries to.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

import exercises.tasks as registry
from exercises.grader.result import Result
from exercises.grader.session import Listener, Plan, Session
from exercises.notebook import read


def main(arguments: list[str]) -> None:
    """Runs one notebook. `arguments`: exercise number, path of the notebook, a plan as JSON."""
    parent = _own_line()
    number, path, plan = arguments[0], Path(arguments[1]), json.loads(arguments[2])

    def tell(event: str, **facts: Any) -> None:
        parent.write(json.dumps({"event": event, **facts}) + "\n")
        parent.flush()

    def result(result: Result) -> None:
        tell("result", result=result.as_dict())

    tasks = {task.id: task for task in registry.of_exercise(number)}
    listener = Listener(
        on_cell=lambda position: tell("cell", position=position),
        on_case=lambda title: tell("case", title=title),
        on_result=result,
        on_note=lambda sentence: tell("note", sentence=sentence),
    )
    os.chdir(path.parent)
    sys.path.insert(0, str(path.parent))  # as in a kernel
    tell("ready")
    Session(read(path), tasks, listener).run(
        Plan(
            only=None if plan["only"] is None else frozenset(plan["only"]),
            skip=frozenset(plan["skip"]),
            done=frozenset(plan["done"]),
        )
    )
    tell("done")
    os._exit(0)  # threads that the learner's code left behind must not keep the process alive


def _own_line() -> TextIO:
    """Takes the standard output for the parent, and gives everything else the null device instead."""
    sys.stdout.flush()
    parent = os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # for the life of the process
    return parent


if __name__ == "__main__":
    main(sys.argv[1:])
