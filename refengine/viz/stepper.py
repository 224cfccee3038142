"""Step through a record: the pool after each step, and the marks that led there.

The widget is a convenience over pictures that are complete without it. A notebook keeps the still picture; who
runs the cell gets the controls (Play, slider, buttons; all of them work from the keyboard). Nothing here draws:
each step shows what `pool_picture` and `marks_table` return.
"""

from __future__ import annotations

from collections.abc import Container
from functools import cached_property
from importlib import import_module
from typing import Any

from refengine.trace.record import Record
from refengine.viz.picture import Picture
from refengine.viz.pool import pool_picture
from refengine.viz.state import states
from refengine.viz.tables import Table, marks_table

PLAY_MS = 1200  # from one step to the next
NO_WIDGETS = "To move through the steps, install ipywidgets (pip install ipywidgets) and run this cell again."


class Stepper:
    """A record and a step of it that is shown. `widget` is None where ipywidgets is not installed."""

    def __init__(self, record: Record, start: int = 0) -> None:
        """`start`: the step of the still picture, and the first one that the widget shows (negative: from the end).

        Raises: ValueError if there is no such step.
        """
        count = len(record.steps)
        if not -count <= start < count:
            raise ValueError(f"the record has {count} steps, so there is no step {start} to begin with")
        self.record = record
        self.start = start % count
        self._states = states(record)
        self._height = max(pool_picture(state).height for state in self._states)

    def picture(self, step: int) -> Picture:
        """The pool after `step`; rings mark what changed in it. All steps of a record are equally high."""
        before = self._states[step - 1] if step else None
        return pool_picture(self._states[step], before=before, min_height=self._height)

    def marks(self, step: int) -> Table:
        """What was decided in `step`, in order."""
        return marks_table(self.record, step)

    def html(self, step: int) -> str:
        """Picture and marks of one step."""
        return f"{self.picture(step).html()}{self.marks(step)._repr_html_()}"

    @cached_property
    def widget(self) -> Any | None:
        """The controls over the picture: an ipywidgets box, made on first use."""
        try:
            widgets = import_module("ipywidgets")
        except ImportError:
            return None
        last = len(self.record.steps) - 1
        slider = widgets.IntSlider(
            value=self.start, min=0, max=last, description="step", layout=widgets.Layout(width="360px")
        )
        play = widgets.Play(
            value=self.start, min=0, max=last, interval=PLAY_MS, layout=widgets.Layout(width="150px")
        )
        widgets.jslink((play, "value"), (slider, "value"))
        view = widgets.HTML()

        def show(_change: Any = None) -> None:
            view.value = self.html(slider.value)

        slider.observe(show, names="value")
        show()
        buttons = [
            self._button(widgets, slider, words, hint, move)
            for words, hint, move in (("◀ back", "one step back", -1), ("next ▶", "one step on", 1))
        ]
        return widgets.VBox([widgets.HBox([play, *buttons, slider]), view])

    @staticmethod
    def _button(widgets: Any, slider: Any, words: str, hint: str, move: int) -> Any:
        button = widgets.Button(description=words, tooltip=hint, layout=widgets.Layout(width="84px"))

        def click(_button: Any) -> None:
            slider.value = min(max(slider.value + move, slider.min), slider.max)

        button.on_click(click)
        return button

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
        return f"{self.picture(self.start).alt}\n{self.marks(self.start)}"


def stepper(record: Record, start: int = 0) -> Stepper:
    """Shows a record step by step; the last value of a notebook cell. See `Stepper`."""
    return Stepper(record, start)
