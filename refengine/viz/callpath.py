"""One request through both generations, as a picture: two columns of calls, cut at the six marks.

What is in one band happens for the same reason; what is higher happens earlier. The calls that answer one of the
two questions have a thick border and carry its number.
"""

from __future__ import annotations

from collections.abc import Sequence

from refengine.trace.codemap import WHO_DECIDES, WHO_SKIPS
from refengine.trace.follow import QUESTIONS, Call, Followed, Row, rows
from refengine.trace.words import MARKS, STEPS, count
from refengine.viz.picture import Picture
from refengine.viz.svg import (
    GREY,
    INK,
    LARGE,
    LINE,
    PALE_GREEN,
    PALE_YELLOW,
    PAPER,
    SHADE,
    SMALL,
    VERMILLION,
    Canvas,
    text_width,
    wrap,
)

WIDTH, MARGIN, GAP = 800, 16, 16
INDENT, MOST_INDENTS = 6, 5
TEXT_LINE, PAD, INSIDE, BETWEEN, BAND = 14, 4, 6, 4, 22
MOST_LINES = 2  # of what was decided, in a box
FILLS = {WHO_DECIDES: PALE_YELLOW, WHO_SKIPS: PALE_GREEN}
TAGS = {WHO_DECIDES: "1 who decides", WHO_SKIPS: "2 who skips"}


def callpath_picture(
    followed: Followed, *, step: int = 1, at: Call | None = None, title: str = "One request, call by call"
) -> Picture:
    """The calls of one step, one column per generation. `at`: the call to point at.

    `step`: 0 the arrival, 1 the step that admits the request, 2 its first decode step.
    Raises: ValueError if there is no such step.
    """
    shown = [row for row in rows(followed) if row.step == step]
    if not shown:
        raise ValueError(
            f"the path has no step {step}; 0 is the arrival, 1 the admission, 2 the first decode"
        )
    canvas = Canvas(WIDTH)
    canvas.text(MARGIN, 26, f"{title}: {STEPS[step][0].lower()}{STEPS[step][1:]}", size=LARGE, bold=True)
    y = _draw_legend(canvas, followed, 44)
    width = (WIDTH - 2 * MARGIN - GAP * (len(followed.paths) - 1)) / len(followed.paths)
    for number, path in enumerate(followed.paths):
        x = MARGIN + number * (width + GAP)
        canvas.text(x, y + 14, f"{path.engine.upper()} (vLLM {path.release})", bold=True)
    y += 22
    for row in shown:
        y = _draw_band(canvas, row, y)
        ends = [y]
        for number, path in enumerate(followed.paths):
            x = MARGIN + number * (width + GAP)
            ends.append(_draw_column(canvas, row.calls[path.engine], x, y, width, at))
        y = max(ends)
    return Picture.of(canvas, _words(followed, shown, step, title, at))


def _draw_legend(canvas: Canvas, followed: Followed, y: float) -> float:
    """The two questions, in the look of the boxes that answer them. Returns: where to go on."""
    before = "a request with the same beginning ran before" if followed.warm else "the cache is cold"
    about = f"{count(followed.num_tokens, 'prompt token')}, blocks of {followed.block_size}; {before}"
    canvas.text(MARGIN, y + 2, about, size=SMALL, fill=GREY)
    x = float(MARGIN)
    for number, (question, words) in enumerate(QUESTIONS.items(), 1):
        label = f"{number} {words}"
        width = text_width(label, SMALL, True) + 16
        _draw_border(canvas, x, y + 12, width, 22, question)
        canvas.text(x + 8, y + 27, label, size=SMALL, bold=True)
        x += width + GAP
    return y + 44


def _draw_band(canvas: Canvas, row: Row, y: float) -> float:
    """The name of a mark across both columns; what comes before the first mark has none."""
    if row.mark is None:
        return y
    canvas.rect(MARGIN, y, WIDTH - 2 * MARGIN, BAND - 4, fill=SHADE, stroke="none")
    canvas.text(MARGIN + 6, y + 13, row.mark, size=SMALL, bold=True)
    after = text_width(row.mark, SMALL, True) + 14
    canvas.text(MARGIN + after, y + 13, MARKS[row.mark], size=SMALL, fill=GREY)
    return y + BAND


def _draw_column(
    canvas: Canvas, calls: Sequence[Call], x: float, y: float, width: float, at: Call | None
) -> float:
    """Boxes from `y` downwards, each as far to the right as it is deep. Returns: where the next band may begin."""
    for call in calls:
        left = x + INDENT * min(max(call.depth - 1, 0), MOST_INDENTS)
        room = x + width - left - 2 * INSIDE
        head = [TAGS[call.answers]] if call.answers else []
        head.append(call.name if text_width(call.name, SMALL, True) <= room else call.name.rpartition(".")[2])
        lines = head + wrap(call.decided, room, most=MOST_LINES)
        height = TEXT_LINE * len(lines) + 2 * PAD
        _draw_border(canvas, left, y, x + width - left, height, call.answers)
        for number, line in enumerate(lines):
            baseline = y + PAD + 11 + TEXT_LINE * number
            canvas.text(left + INSIDE, baseline, line, size=SMALL, bold=number < len(head))
        if call is at:
            canvas.rect(left - 3, y - 3, x + width - left + 6, height + 6, stroke=VERMILLION, thickness=3)
        y += height + BETWEEN
    return y + BETWEEN


def _draw_border(
    canvas: Canvas, x: float, y: float, width: float, height: float, answers: str | None
) -> None:
    fill = FILLS[answers] if answers else PAPER
    canvas.rect(
        x, y, width, height, fill=fill, stroke=INK if answers else LINE, thickness=2 if answers else 1
    )


def _words(followed: Followed, shown: Sequence[Row], step: int, title: str, at: Call | None) -> str:
    """The picture in words: the two answers first, then every call in order."""
    lines = [f"{title}: {STEPS[step].lower()}, {count(followed.num_tokens, 'prompt token')}."]
    for question, words in QUESTIONS.items():
        for path in followed.paths:
            calls = [call for row in shown for call in row.calls[path.engine] if call.answers == question]
            if calls:
                names = ", ".join(call.name for call in calls)
                lines.append(f"{words} In {path.engine.upper()} the {calls[0].component}: {names}.")
    for row in shown:
        for path in followed.paths:
            for call in row.calls[path.engine]:
                mark = f"{row.mark}, " if row.mark else ""
                lines.append(f"{path.engine.upper()}, {mark}{call.name}: {call.decided}.")
    if at is not None:
        lines.append(f"Pointed at: {at.name}.")
    return "\n".join(lines)
