"""Step through a record: the pool after each step or after each mark, and the marks that led there.

The widget is a convenience over pictures that are complete without it. A notebook keeps the still picture; who
runs the cell gets the controls (Play, slider, buttons; all of them work from the keyboard). Nothing here draws:
each place shows what `pool_picture` and `marks_table` return.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import cached_property
from importlib import import_module
from typing import Any, Protocol

from refengine.trace.record import Record
from refengine.viz.picture import Picture
from refengine.viz.pool import pool_picture
from refengine.viz.state import PoolState, moments, states
from refengine.viz.tables import Table, marks_table

PLAY_MS = 1200  # from one picture to the next
NO_WIDGETS = "To move through the steps, install ipywidgets (pip install ipywidgets) and run this cell again."


class Stepper:
    """A record and a step of it that is shown. `widget` is None where ipywidgets is not installed.

    Of a record with snapshots every single moment can be shown, too: with `marks` from the beginning, and by a
    button of the widget.
    """

    units = ("step", "moment")

    def __init__(self, record: Record, start: int = 0, marks: bool = False) -> None:
        """`start`: the step of the still picture (negative: from the end), with `marks` the number of the moment.

        Raises: ValueError if there is no such step, or `marks` is asked of a record without snapshots.
        """
        self.record = record
        self._states, self._moments = states(record), moments(record)
        self.has_marks = any(mark.pool is not None for _, mark in record.marks())
        if marks and not self.has_marks:
            raise ValueError("the record has no snapshots; record with Recorder(snapshots=True)")
        self.by_marks = marks
        count, what = len(self._series(marks)), "moments" if marks else "steps"
        if not -count <= start < count:
            raise ValueError(
                f"the record has {count} {what}, so there is no {what[:-1]} {start} to begin with"
            )
        self.start = start % count

    def _series(self, marks: bool) -> list[PoolState]:
        return self._moments if marks else self._states

    @cached_property
    def _height(self) -> int:
        """Of all pictures of the record: equally high, nothing jumps when one takes the place of another."""
        shown = {(m.free, m.cached, tuple(m.tables.items())): m for m in (*self._states, *self._moments)}
        return max(pool_picture(state).height for state in shown.values())

    def picture(self, index: int, marks: bool = False) -> Picture:
        """The pool after a step, with `marks` at a moment; rings mark what changed since the one before."""
        series = self._series(marks)
        before = series[index - 1] if index else None
        return pool_picture(series[index], before=before, min_height=self._height)

    def table(self, index: int, marks: bool = False) -> Table | None:
        """What was decided in the step, in order; with `marks` an arrow points at the mark of the moment."""
        if not marks:
            return marks_table(self.record, index)
        moment = self._moments[index]
        return None if moment.step is None else marks_table(self.record, moment.step, moment.mark)

    def html(self, index: int, marks: bool = False) -> str:
        """Picture and marks of one step or moment."""
        table = self.table(index, marks)
        return self.picture(index, marks).html() + (table._repr_html_() if table else "")

    @cached_property
    def widget(self) -> Any | None:
        """The controls over the picture: an ipywidgets box, made on first use."""
        try:
            widgets = import_module("ipywidgets")
        except ImportError:
            return None
        return Controls(widgets, self).box

    def index_of(self, index: int, marks: bool) -> int:
        """The same place counted the other way: of a step its last moment (`marks`), of a moment its step."""
        if marks:
            return max((i for i, m in enumerate(self._moments) if (m.step or 0) <= index), default=0)
        return self._moments[index].step or 0

    def last(self, marks: bool) -> int:
        """The last index there is."""
        return len(self._series(marks)) - 1

    def _repr_mimebundle_(
        self, include: Container[str] | None = None, exclude: Container[str] | None = None
    ) -> dict[str, Any]:
        """The still picture always; the widget beside it, which JupyterLab prefers if there is a kernel."""
        still = self.html(self.start, self.by_marks)
        if self.widget is None:
            still += f"<p>{NO_WIDGETS}</p>"
        bundle: dict[str, Any] = {"text/html": still, "text/plain": repr(self)}
        if self.widget is not None:
            live = self.widget._repr_mimebundle_()
            bundle |= {kind: data for kind, data in live.items() if kind.startswith("application/")}
        return bundle

    def __repr__(self) -> str:
        table = self.table(self.start, self.by_marks)
        return f"{self.picture(self.start, self.by_marks).alt}" + (f"\n{table}" if table else "")


class Shown(Protocol):
    """What the controls can step through. `units`: what the slider counts, and what it counts mark by mark."""

    units: tuple[str, str]
    start: int
    by_marks: bool
    has_marks: bool

    def html(self, index: int, marks: bool = False) -> str:
        """What stands at one place."""

    def last(self, marks: bool) -> int:
        """The last index there is."""

    def index_of(self, index: int, marks: bool) -> int:
        """The same place counted the other way."""


class Controls:
    """Play, back, next, slider, and a button for every mark where there are snapshots; below them the picture."""

    def __init__(self, widgets: Any, shown: Shown) -> None:
        self.shown = shown
        last, layout = shown.last(shown.by_marks), widgets.Layout
        self.slider = widgets.IntSlider(value=shown.start, min=0, max=last, layout=layout(width="330px"))
        self.play = widgets.Play(
            value=shown.start, min=0, max=last, interval=PLAY_MS, layout=layout(width="150px")
        )
        self.view = widgets.HTML()
        self.fine = widgets.ToggleButton(
            value=shown.by_marks,
            description="every mark",
            tooltip="stop at every mark, not only at the end of a step",
            layout=layout(width="96px"),
        )
        widgets.jslink((self.play, "value"), (self.slider, "value"))
        controls: Sequence[Any] = (
            self.play,
            self._button(widgets, "◀ back", "one back", -1),
            self._button(widgets, "next ▶", "one on", 1),
            self.slider,
            *([self.fine] if shown.has_marks else []),
        )
        self.slider.observe(self._show, names="value")
        self.fine.observe(self._change, names="value")
        self._name()
        self._show()
        self.box = widgets.VBox([widgets.HBox(controls), self.view])

    def _name(self) -> None:
        self.slider.description = self.shown.units[self.fine.value]

    def _show(self, _change: Any = None) -> None:
        self.view.value = self.shown.html(self.slider.value, self.fine.value)

    def _change(self, _change: Any) -> None:
        """Counts the other way from here on, and stays at the same place."""
        marks = self.fine.value
        index = self.shown.index_of(self.slider.value, marks)
        last = self.shown.last(marks)
        self.slider.unobserve(self._show, names="value")  # drawn once, at the end
        for control in (self.slider, self.play):
            control.value = min(index, control.max)
            control.max = last
            control.value = index
        self.slider.observe(self._show, names="value")
        self._name()
        self._show()

    def _button(self, widgets: Any, words: str, hint: str, move: int) -> Any:
        button = widgets.Button(description=words, tooltip=hint, layout=widgets.Layout(width="84px"))

        def click(_button: Any) -> None:
            self.slider.value = min(max(self.slider.value + move, self.slider.min), self.slider.max)

        button.on_click(click)
        return button


def stepper(record: Record, start: int = 0, marks: bool = False) -> Stepper:
    """Shows a record step by step, with `marks` mark by mark; the last value of a notebook cell. See `Stepper`."""
    return Stepper(record, start, marks)
