"""When: steps from left to right, requests from top to bottom.

`timeline` shows how many tokens each request computed in each step, which tokens it found in the cache instead,
and who had to give its blocks away. `marks_picture` looks into one step: the six marks, numbered in the order in
which they happened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

from refengine.trace.observer import MarkKind
from refengine.trace.record import Mark, Record
from refengine.viz.picture import Picture
from refengine.viz.state import ranges
from refengine.viz.svg import (
    GREY,
    LARGE,
    LINE,
    PALE_GREEN,
    PALE_ORANGE,
    PAPER,
    SHADE,
    SMALL,
    VERMILLION,
    YELLOW,
    Canvas,
    text_width,
    wrap,
)
from refengine.viz.tables import describe

WIDTH, MARGIN = 800, 20
MAX_STEPS, LANE = 20, 52  # steps in one line; more go on below
MAX_LINES = 6  # of words in a mark
MARKS: tuple[MarkKind, ...] = get_args(MarkKind)


@dataclass
class _Cell:
    """What happened to one request in one step."""

    computed: int = 0
    hit: int = 0
    refused: bool = False
    preempted: bool = False
    ended: str = ""

    @classmethod
    def of(cls, marks: Iterable[Mark]) -> _Cell:
        """Only an admitted lookup counts as a hit: a refused request looks up again later."""
        cell, looked_up = cls(), 0
        for mark in marks:
            facts = mark.facts
            if mark.kind == "lookup":
                looked_up = facts["hit_tokens"]
            elif mark.kind == "admit":
                cell.hit = looked_up if facts["admitted"] else 0
                cell.preempted |= facts["reason"].startswith("preempted")
                cell.refused = not facts["admitted"] and not cell.preempted
            elif mark.kind == "run":
                cell.computed += facts["num_tokens"]
            elif mark.kind == "append" and facts["finish_reason"]:
                cell.ended = facts["finish_reason"]
        return cell

    def words(self) -> str:
        """`24 from the cache, computed 3, ended (length)`."""
        return ", ".join(
            words
            for words, said in (
                (f"{self.hit} from the cache", self.hit),
                (f"computed {self.computed}", self.computed),
                ("had to wait", self.refused),
                ("was preempted", self.preempted),
                (f"ended ({self.ended})", self.ended),
            )
            if said
        )


def timeline(
    record: Record, *, title: str = "Who computed how many tokens, and when", first: int = 0
) -> Picture:
    """Every request in every step from step `first` on."""
    names = list(dict.fromkeys(mark.request_id for index, mark in record.marks() if index >= first))
    cells = {
        (index, name): _Cell.of(mark for mark in step.marks if mark.request_id == name)
        for index, step in enumerate(record.steps)
        for name in names
        if index >= first
    }
    canvas = Canvas(WIDTH)
    canvas.text(MARGIN, 28, title, size=LARGE, bold=True)
    left = min(max([text_width(name) for name in (*names, "step total")], default=0) + 14, 160)
    top, last = 40.0, len(record.steps)
    for start in range(first, last, MAX_STEPS):
        steps = range(start, min(start + MAX_STEPS, last))
        columns = max(8, min(MAX_STEPS, last - first))
        _draw_panel(canvas, top, left, steps, names, cells, (WIDTH - 2 * MARGIN - left) / columns)
        top = canvas.height + 24
    _draw_key(canvas)
    return Picture.of(canvas, _timeline_words(title, names, range(first, last), cells))


def _draw_panel(
    canvas: Canvas,
    top: float,
    left: float,
    steps: Sequence[int],
    names: Sequence[str],
    cells: dict[tuple[int, str], _Cell],
    width: float,
) -> None:
    """Some steps of all requests that do something in them, with the sum of each step below."""
    shown = [name for name in names if any(cells[step, name].words() for step in steps)]
    x0 = MARGIN + left
    canvas.text(MARGIN, top + 14, "step", size=SMALL, fill=GREY)
    for column, step in enumerate(steps):
        canvas.text(x0 + (column + 0.5) * width, top + 14, str(step), size=SMALL, fill=GREY, anchor="middle")
    for row, name in enumerate(shown):
        y = top + 22 + row * LANE
        canvas.line([(MARGIN, y), (x0 + len(steps) * width, y)], stroke=LINE, thickness=0.5)
        canvas.text(MARGIN, y + 37, name, width=left - 6)
        for column, step in enumerate(steps):
            _draw_step_cell(canvas, x0 + column * width, y, width, cells[step, name])
    y = top + 22 + len(shown) * LANE
    canvas.line([(MARGIN, y), (x0 + len(steps) * width, y)], stroke=LINE, thickness=0.5)
    canvas.text(MARGIN, y + 17, "step total", size=SMALL, fill=GREY)
    for column, step in enumerate(steps):
        total = sum(cells[step, name].computed for name in names)
        canvas.text(x0 + (column + 0.5) * width, y + 17, str(total), size=SMALL, anchor="middle")


def _draw_step_cell(canvas: Canvas, x: float, y: float, width: float, cell: _Cell) -> None:
    """A box with the computed tokens; above it, what spared or stopped the work."""
    middle, box = x + width / 2, min(width - 4, 44)
    if cell.hit:
        canvas.rect(middle - box / 2, y + 4, box, 16, fill=YELLOW, radius=8)
        canvas.text(middle, y + 16, str(cell.hit), size=SMALL, anchor="middle")
    if cell.computed:
        canvas.rect(middle - box / 2, y + 24, box, 20, fill=PALE_GREEN, radius=2)
        canvas.text(middle, y + 38, str(cell.computed), size=SMALL, anchor="middle", bold=cell.computed > 1)
    if cell.refused:
        canvas.text(middle, y + 38, "wait", size=SMALL, anchor="middle", fill=GREY)
    if cell.preempted:
        canvas.rect(middle - box / 2, y + 24, box, 20, stroke=VERMILLION, thickness=2, dash="3 2", radius=2)
        canvas.text(middle, y + 38, "out", size=SMALL, anchor="middle", bold=True)
    if cell.ended:
        canvas.rect(middle + box / 2 - 1, y + 22, 5, 24, fill="#1a1a1a", stroke="none", radius=0)


def _draw_key(canvas: Canvas) -> None:
    y = canvas.height + 14
    canvas.line([(MARGIN, y), (WIDTH - MARGIN, y)], stroke=LINE, thickness=0.6)
    x, y = float(MARGIN), y + 10
    for sign, words in (
        ("hit", "tokens found in the cache"),
        ("computed", "tokens computed"),
        ("wait", "refused in this step"),
        ("out", "preempted"),
        ("end", "ended"),
    ):
        cell = _Cell(refused=sign == "wait", preempted=sign == "out")
        if sign == "hit":
            canvas.rect(x, y, 26, 14, fill=YELLOW, radius=7)
        elif sign == "end":
            canvas.rect(x + 16, y - 4, 5, 22, fill="#1a1a1a", stroke="none", radius=0)
        elif sign == "computed":
            canvas.rect(x, y - 1, 26, 16, fill=PALE_GREEN, radius=2)
        else:
            _draw_step_cell(canvas, x - 2, y - 27, 30, cell)
        canvas.text(x + 33, y + 11, words, size=SMALL, fill=GREY)
        x += 33 + text_width(words, SMALL) + 16


def _timeline_words(
    title: str, names: Sequence[str], steps: Sequence[int], cells: dict[tuple[int, str], _Cell]
) -> str:
    """One line per request: `bob: step 2: 24 from the cache, computed 5; steps 3-7: computed 1.`"""
    lines = [f"{title}: {len(names)} requests, steps {ranges(steps)}."]
    for name in names:
        runs: list[tuple[list[int], str]] = []
        for step in steps:
            words = cells[step, name].words()
            if runs and runs[-1][1] == words:
                runs[-1][0].append(step)
            else:
                runs.append(([step], words))
        told = [
            f"{'steps' if len(run) > 1 else 'step'} {ranges(run)} {words}" for run, words in runs if words
        ]
        lines.append(f"{name}: {'; '.join(told)}.")
    return "\n".join(lines)


# -- inside one step ----------------------------------------------------------------------------------------


def marks_picture(record: Record, step: int, *, title: str | None = None) -> Picture:
    """The six marks of one step, a line per request, numbered in the order in which they happened."""
    marks = record.steps[step].marks
    names = list(dict.fromkeys(mark.request_id for mark in marks))
    canvas = Canvas(WIDTH)
    name = f"Step {step}: {len(marks)} marks" if title is None else title
    canvas.text(MARGIN, 28, name, size=LARGE, bold=True)
    left = min(max([text_width(n) for n in names], default=0) + 14, 130)
    width = (WIDTH - 2 * MARGIN - left) / len(MARKS)
    for column, kind in enumerate(MARKS):
        x = MARGIN + left + column * width
        canvas.rect(x + 2, 40, width - 4, 22, fill=SHADE, stroke="none")
        canvas.text(x + width / 2, 55, kind, bold=True, anchor="middle")
    top = 70.0
    numbered = list(enumerate(marks, 1))
    for request_id in names:
        mine = [(number, mark) for number, mark in numbered if mark.request_id == request_id]
        canvas.text(MARGIN, top + 30, request_id, width=left - 6)
        top = _draw_request(canvas, MARGIN + left, top, width, mine) + 6
    canvas.text(MARGIN, top + 14, "The numbers are the order within the step.", size=SMALL, fill=GREY)
    told = [f"{number}. {mark.request_id}: {mark.kind}, {describe(mark)}." for number, mark in numbered]
    return Picture.of(canvas, "\n".join([f"{name}, in the order in which they happened.", *told]))


def _draw_request(
    canvas: Canvas, left: float, top: float, width: float, mine: Sequence[tuple[int, Mark]]
) -> float:
    """The marks of one request, a column per kind, all boxes equally high. Returns: the lower edge."""
    words = {number: wrap(describe(mark), width - 38, most=MAX_LINES) for number, mark in mine}
    height = max(50, *(14 * len(lines) + 8 for lines in words.values()))
    below: Counter[MarkKind] = Counter()
    for number, mark in mine:
        x, y = left + MARKS.index(mark.kind) * width + 2, top + below[mark.kind] * (height + 4)
        _draw_mark(canvas, (x, y, width - 4, height), number, mark, words[number])
        below[mark.kind] += 1
    return top + max(below.values()) * (height + 4)


def _draw_mark(
    canvas: Canvas, box: tuple[float, float, float, float], number: int, mark: Mark, lines: Sequence[str]
) -> None:
    """One mark: its number, and what was decided in a few short lines. `box`: x, y, width, height."""
    x, y, width, height = box
    negative = mark.kind == "admit" and not mark.facts["admitted"]
    canvas.rect(x, y, width, height, fill=PALE_ORANGE if negative else PAPER, dash="4 3" if negative else "")
    canvas.rect(x + 4, y + 4, 20, 15, fill=SHADE, stroke="none", radius=7)
    canvas.text(x + 14, y + 15, str(number), size=SMALL, bold=True, fill=GREY, anchor="middle")
    for row, line in enumerate(lines):
        canvas.text(x + 28, y + 15 + 14 * row, line, size=SMALL)
