"""Step through a followed request: the picture of its path, and for each call where it is and what it decided.

As with `Stepper`, a notebook keeps the whole still picture, and whoever runs the cell gets controls over it.
"""

from __future__ import annotations

from collections.abc import Container
from functools import cached_property
from importlib import import_module
from typing import Any

from refengine.trace.follow import QUESTIONS, Call, Followed, rows
from refengine.trace.words import STEPS
from refengine.viz.callpath import callpath_picture
from refengine.viz.picture import Picture
from refengine.viz.stepper import NO_WIDGETS, Controls
from refengine.viz.tables import Table

Place = tuple[int, str, Call] | None  # step, engine, call; None: no call is pointed at


class CallPathStepper:
    """The calls of the step that admits the request and of its first decode step; place 0 is the whole path.

    `widget` is None where ipywidgets is not installed.
    """

    units = ("call", "call")
    by_marks = has_marks = False

    def __init__(self, followed: Followed, start: int = 0) -> None:
        """Raises: ValueError if there is no call number `start`."""
        self.followed = followed
        self.places: list[Place] = [None]
        for row in rows(followed):
            self.places += [
                (row.step, engine, call)
                for engine, calls in row.calls.items()
                for call in calls
                if row.step > 0
            ]
        if not 0 <= start < len(self.places):
            raise ValueError(
                f"the path has {len(self.places) - 1} calls, so there is no call {start} to begin with"
            )
        self.start = start

    def picture(self, index: int) -> Picture:
        """The path, with a ring around the call of that number."""
        place = self.places[index]
        return callpath_picture(self.followed) if place is None else _picture(self.followed, place)

    def table(self, index: int) -> Table:
        """Where the call is, ours and vLLM's, and what it decided; for the whole path, the two answers."""
        place = self.places[index]
        return _answers(self.followed) if place is None else _details(*place)

    def html(self, index: int, marks: bool = False) -> str:
        """Picture and table of one call."""
        return self.table(index)._repr_html_() + self.picture(index).html()

    def last(self, marks: bool) -> int:
        """The number of the last call."""
        return len(self.places) - 1

    def index_of(self, index: int, marks: bool) -> int:
        """There is one way to count."""
        return index

    @cached_property
    def widget(self) -> Any | None:
        """The controls over the picture: an ipywidgets box, made on first use."""
        try:
            widgets = import_module("ipywidgets")
        except ImportError:
            return None
        return Controls(widgets, self).box

    def _repr_mimebundle_(
        self, include: Container[str] | None = None, exclude: Container[str] | None = None
    ) -> dict[str, Any]:
        """The still picture always; the widget beside it, which JupyterLab prefers if there is a kernel."""
        still = self.html(self.start)
        if self.widget is None:
            still += f"<p>{NO_WIDGETS}</p>"
        bundle: dict[str, Any] = {"text/html": still, "text/plain": repr(self)}
        if self.widget is not None:
            live = self.widget._repr_mimebundle_()
            bundle |= {kind: data for kind, data in live.items() if kind.startswith("application/")}
        return bundle

    def __repr__(self) -> str:
        return f"{self.picture(self.start).alt}\n{self.table(self.start)}"


def _picture(followed: Followed, place: tuple[int, str, Call]) -> Picture:
    step, _, call = place
    return callpath_picture(followed, step=step, at=call)


def _answers(followed: Followed) -> Table:
    rows_of = [
        (words, path.engine.upper(), f"the {calls[0].component}", calls[0].name, calls[0].decided)
        for question, words in QUESTIONS.items()
        for path in followed.paths
        if (calls := path.answering(question))
    ]
    return Table(("question", "in", "who", "our function", "what it decided"), rows_of, wrap=50)


def _details(step: int, engine: str, call: Call) -> Table:
    vllm = "\n".join(map(str, call.vllm))
    line = f"\nbegin with line {call.focus_line}" if call.focus_line else ""
    facts = [
        ("decided", call.decided),
        ("ours", call.ours),
        ("vLLM", vllm + line),
        ("called", "once" if len(call.facts) == 1 else f"{len(call.facts)} times"),
        ("answers", QUESTIONS[call.answers] if call.answers else None),
    ]
    return Table((engine.upper(), f"{call.name}: {STEPS[step].lower()}"), facts, wrap=70)


def callpath_widget(followed: Followed, start: int = 0) -> CallPathStepper:
    """Shows a followed request call by call; the last value of a notebook cell. See `CallPathStepper`."""
    return CallPathStepper(followed, start)
