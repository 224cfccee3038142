"""A task: what is asked, how it is judged, and the wrong answers that are known."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["build", "predict", "bug", "map", "measure", "kernel"]
Edits = tuple[tuple[str, str], ...]
KINDS_WITH_THREE_WRONG: tuple[Kind, ...] = ("build", "bug", "kernel")  # the others need one


@dataclass(frozen=True)
class WrongAnswer:
    """An answer people really give. The tests run it and want to see it fail with the message it deserves.

    Args:
        name: what this variant does, for the test report: "append at the front".
        misconception: the name that the check must find from the behaviour, `report.misconception(name, ...)`.
        source: replaces all answer cells of the task.
        edits: instead of `source`: (old, new) pairs applied to the answer cells of the solution; each `old` must
            occur in exactly one place. Most wrong answers are the right one with a line changed.
    """

    name: str
    misconception: str
    source: str = ""
    edits: Edits = ()

    def __post_init__(self) -> None:
        if bool(self.source) == bool(self.edits):
            raise ValueError(f"wrong answer {self.name!r} needs either source or edits")


@dataclass(frozen=True, kw_only=True)
class Task:
    """One graded question.

    Args:
        id: exercise and place in it, "03.1".
        title: a few words; the stub, the result and the table of points show it.
        answers: name in the notebook -> type, in the order in which `check` gets them. `type` means a class,
            `Callable` a function; a list accepts a tuple, an int accepts whatever counts as one (but no bool).
        check: called with the answers and then a `Report`; runs named cases on it.
        hints: three, from a nudge to nearly the answer.
        wrong: known-wrong answers; build, bug and kernel tasks need three different misconceptions.
        other: source of a right answer written in another way, or edits to the solution.
        part: the slot of the engine that the answer fills.
        accepts_none: None is an answer here, and not "not started".
    """

    id: str
    kind: Kind
    title: str
    points: int
    answers: Mapping[str, object]
    check: Callable[..., None]
    hints: tuple[str, str, str]
    wrong: tuple[WrongAnswer, ...]
    other: str | Edits
    part: str | None = None
    accepts_none: bool = False

    def __post_init__(self) -> None:
        problems = [
            (not re.fullmatch(r"\d\d\.\d+", self.id), "the id must look like 03.1"),
            (self.kind not in get_args(Kind), f"the kind must be one of {', '.join(get_args(Kind))}"),
            (self.points < 1, "it must be worth a point or more"),
            (len(self.hints) != 3 or not all(self.hints), "it needs three hints"),
            (not self.answers, "it must name its answers"),
            (not self.other, "it needs a right answer in another style"),
        ]
        for broken, sentence in problems:
            if broken:
                raise ValueError(f"task {self.id}: {sentence}")

    @property
    def exercise(self) -> str:
        return self.id.partition(".")[0]

    @property
    def label(self) -> str:
        """How a stub names it: "ex03 task 1"."""
        return f"ex{self.exercise} task {self.id.partition('.')[2]}"

    @property
    def call(self) -> str:
        """How a notebook hands it in."""
        return f'check("{self.id}", {", ".join(self.answers)})'

    @property
    def wrong_needed(self) -> int:
        return 3 if self.kind in KINDS_WITH_THREE_WRONG else 1
