"""Several groups and one hit: what each group has, who was asked for what, and how the candidate shrinks.

Above, a row per group with its blocks along the tokens; below, a line per question with what was asked for and what
could be served. The lines go on until everybody can serve what everybody was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from refengine.viz.picture import Picture
from refengine.viz.state import ranges
from refengine.viz.svg import (
    BLUE,
    GREY,
    INK,
    LARGE,
    PALE_BLUE,
    PALE_GREEN,
    PAPER,
    SMALL,
    VERMILLION,
    Canvas,
)

WIDTH, MARGIN, LEFT, RIGHT = 800, 20, 130, 190
TOP, ROW, BOX, BAR = 78, 40, 28, 14
LINE = 26  # px from one question to the next
DASH = "4 3"


@dataclass(frozen=True)
class GroupRow:
    """A group before the lookup: the positions of blocks that can be found, and those that the hit needs."""

    name: str
    block_size: int  # tokens
    cached: frozenset[int]
    needed: frozenset[int]


@dataclass(frozen=True)
class Answer:
    """A group, by its place among the rows, was asked for at most `asked` tokens and can serve `served`."""

    row: int
    asked: int
    served: int


def rounds(answers: Sequence[Answer]) -> list[int]:
    """The round of each answer, from 1. A new one begins when a group is asked again."""
    found: list[int] = []
    asked: set[int] = set()
    for answer in answers:
        if answer.row in asked:
            asked.clear()
            found.append(found[-1] + 1)
        else:
            found.append(found[-1] if found else 1)
        asked.add(answer.row)
    return found


def fixed_point_picture(
    rows: Sequence[GroupRow],
    answers: Sequence[Answer],
    num_tokens: int,
    hit: int,
    boundary: int = 0,
    *,
    title: str = "Until nobody wants it shorter",
) -> Picture:
    """One lookup of `num_tokens` tokens. `hit` and `boundary` in tokens; boundary 0: there is none."""
    canvas = Canvas(WIDTH)
    scale = (WIDTH - 2 * MARGIN - LEFT - RIGHT) / num_tokens
    canvas.text(MARGIN, 28, title, size=LARGE, bold=True)
    bottom = _draw_rows(canvas, rows, scale, num_tokens)
    bottom = _draw_answers(canvas, rows, answers, scale, bottom + 34)
    _draw_end(canvas, hit, scale, bottom, f"hit {hit}", INK, "")
    if boundary:
        _draw_end(canvas, boundary, scale, bottom, f"boundary {boundary}", VERMILLION, DASH)
    return Picture.of(canvas, _words(rows, answers, num_tokens, hit, boundary, title))


def _x(tokens: int, scale: float) -> float:
    return MARGIN + LEFT + tokens * scale


def _draw_rows(canvas: Canvas, rows: Sequence[GroupRow], scale: float, num_tokens: int) -> float:
    """A row of blocks per group, with its position in each. Returns: the lower edge."""
    y: float = TOP
    for row in rows:
        canvas.text(MARGIN, y + 12, row.name, bold=True, width=LEFT - 8)
        canvas.text(MARGIN, y + 26, f"blocks of {row.block_size}", size=SMALL, fill=GREY)
        for i in range(num_tokens // row.block_size):
            x, width = _x(i * row.block_size, scale), row.block_size * scale - 3
            is_cached = i in row.cached
            fill = BLUE if is_cached and i in row.needed else PALE_BLUE if is_cached else PAPER
            canvas.rect(
                x, y, width, BOX, fill=fill, stroke=INK if is_cached else GREY, dash="" if is_cached else DASH
            )
            words = str(i) if is_cached else "-"
            canvas.text(x + width / 2, y + 18, words, size=SMALL, anchor="middle")
        y += ROW
    x = WIDTH - MARGIN - RIGHT + 30
    for place, (fill, dash, words) in enumerate(
        ((BLUE, "", "cached, and in the hit"), (PALE_BLUE, "", "cached"), (PAPER, DASH, "not cached"))
    ):
        canvas.rect(x, TOP + 24 * place, 16, 16, fill=fill, stroke=GREY if dash else INK, dash=dash)
        canvas.text(x + 24, TOP + 12 + 24 * place, words, size=SMALL)
    return max(y, TOP + 72)


def _draw_answers(
    canvas: Canvas, rows: Sequence[GroupRow], answers: Sequence[Answer], scale: float, y: float
) -> float:
    """A line per question: dashed what was asked for, filled what can be served. Returns: the lower edge."""
    canvas.text(MARGIN, y, "Asked in turn", bold=True)
    y += 14
    before = 0
    for number, answer in zip(rounds(answers), answers, strict=True):
        if number > before:
            canvas.text(MARGIN, y + 11, f"round {number}", size=SMALL, fill=GREY)
        before = number
        canvas.text(MARGIN + 56, y + 11, rows[answer.row].name, size=SMALL, bold=True, width=LEFT - 60)
        canvas.rect(_x(0, scale), y, answer.asked * scale, BAR, fill=PAPER, stroke=GREY, dash=DASH, radius=0)
        if answer.served:
            canvas.rect(_x(0, scale), y, answer.served * scale, BAR, fill=PALE_GREEN, radius=0)
        words = f"asked for {answer.asked}, serves {answer.served}"
        canvas.text(WIDTH - MARGIN - RIGHT + 30, y + 11, words, size=SMALL)
        y += LINE
    return y


def _draw_end(
    canvas: Canvas, tokens: int, scale: float, bottom: float, words: str, colour: str, dash: str
) -> None:
    """A line from top to bottom behind so many tokens, with its name above."""
    x = _x(tokens, scale) - 1.5
    y = 50 if not dash else 66
    canvas.text(x, y, words, size=SMALL, bold=True, fill=colour, anchor="middle" if tokens else "start")
    canvas.line([(x, y + 4), (x, bottom)], stroke=colour, thickness=2, dash=dash)


def _words(
    rows: Sequence[GroupRow],
    answers: Sequence[Answer],
    num_tokens: int,
    hit: int,
    boundary: int,
    title: str,
) -> str:
    """The picture in words."""
    lines = [f"{title}: a lookup of {num_tokens} tokens in {len(rows)} groups."]
    for row in rows:
        cached = ranges(sorted(row.cached)) if row.cached else "none"
        lines.append(f"{row.name}, blocks of {row.block_size}: positions that are cached: {cached}.")
    for number, answer in zip(rounds(answers), answers, strict=True):
        lines.append(
            f"Round {number}: {rows[answer.row].name} is asked for at most {answer.asked} tokens and can serve "
            f"{answer.served}."
        )
    lines.append(f"Common hit: {hit} tokens." + (f" Boundary: {boundary} tokens." if boundary else ""))
    return "\n".join(lines)
