"""Pictures for chapter 11: how the keys of each sequence are cut, and what each part weighs in the result."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from torch import Tensor

from exercises.tasks.ex08_scene import Pages
from exercises.tasks.ex11_scene import shares, split_run
from refengine.viz import Picture
from refengine.viz.svg import (
    GREY,
    LARGE,
    PALE_BLUE,
    PALE_GREEN,
    PALE_ORANGE,
    PALE_YELLOW,
    SMALL,
    Canvas,
    text_width,
)

WIDTH, MARGIN, LEFT = 760, 20, 110
BAR, ROW = 30, 84  # px
TINTS = (PALE_BLUE, PALE_YELLOW, PALE_GREEN, PALE_ORANGE)


def split_picture(pages: Pages, log_sums: Tensor, title: str = "Cut and merged, query head 0") -> Picture:
    """A bar for the keys of each sequence, cut where its splits begin; under each part its share of the result.

    log_sums: in powers of two, `[num_seqs, num_heads, num_splits]`, as the split kernel leaves them.
    """
    num_splits, seq_lens = log_sums.shape[2], pages.seq_lens.tolist()
    weights = (log_sums[:, 0].double() * 0.6931471805599453).softmax(-1).tolist()
    canvas, words = Canvas(WIDTH), [f"{title}, {num_splits} splits for each sequence."]
    canvas.text(MARGIN, 28, title, size=LARGE, bold=True)
    scale = (WIDTH - LEFT - MARGIN) / max(seq_lens)
    for row, seq_len in enumerate(seq_lens):
        cut = shares(pages, seq_len, num_splits)
        _draw_row(canvas, 50 + row * ROW, seq_len, cut, weights[row], scale)
        words += _words(row, seq_len, cut, weights[row])
    canvas.text(
        MARGIN,
        canvas.height + 20,
        "a cell: the keys of one block of threads; below it: its share of all weights",
        size=SMALL,
        fill=GREY,
    )
    return Picture.of(canvas, "\n".join(words))


def _draw_row(
    canvas: Canvas, y: float, seq_len: int, cut: Sequence[int], weights: Sequence[float], scale: float
) -> None:
    canvas.text(MARGIN, y + 19, f"{seq_len} tokens", bold=True)
    x = float(LEFT)
    for split, (count, weight) in enumerate(zip(cut, weights, strict=True)):
        if not count:
            continue
        width = count * scale
        canvas.rect(x, y, width, BAR, fill=TINTS[split % len(TINTS)], radius=0)
        label = f"split {split}: {count}"
        label = label if text_width(label, SMALL) + 4 <= width else str(count)
        canvas.text(x + width / 2, y + 19, label, size=SMALL, anchor="middle")
        canvas.text(x + width / 2, y + BAR + 15, f"{weight:.0%}", size=SMALL, anchor="middle", bold=True)
        x += width
    empty = sum(not count for count in cut)
    if empty:
        canvas.text(LEFT, y + BAR + 31, f"without keys: {_counted(empty)}", size=SMALL, fill=GREY)


def _counted(empty: int) -> str:
    return f"{empty} split" + ("s" if empty > 1 else "")


def _words(row: int, seq_len: int, cut: Sequence[int], weights: Sequence[float]) -> list[str]:
    held = [
        f"split {split} has {count} keys and {weight:.0%} of the weight"
        for split, (count, weight) in enumerate(zip(cut, weights, strict=True))
        if count
    ]
    empty = sum(not count for count in cut)
    without = f"; {_counted(empty)} without keys" if empty else ""
    return [f"Sequence {row}, {seq_len} tokens: {', '.join(held)}{without}."]


def split_widget(pages: Pages, most: int = 6) -> Any:
    """A slider for the number of splits over the picture of the run with so many."""
    widgets: Any = import_module("ipywidgets")
    slider = widgets.IntSlider(2, 1, most, description="splits", continuous_update=False)
    shown = widgets.HTML()

    def draw(change: object = None) -> None:
        shown.value = split_picture(pages, split_run(pages, slider.value)[1]).html()

    slider.observe(draw, "value")
    draw()
    return widgets.VBox([slider, shown])
