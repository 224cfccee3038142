"""Pictures for chapter 08: who sees which key, drawn from the masks themselves, and the running softmax as a table.

A column is a key, by its position; a row is a query, by its position. A chunk that starts at p has rows p, p+1, ... and
p cached columns before its own. Where a wrong mask differs from the right one, the cell is framed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from refengine.viz import Picture
from refengine.viz.svg import (
    BLUE,
    GREY,
    LARGE,
    PALE_YELLOW,
    PAPER,
    SHADE,
    SMALL,
    VERMILLION,
    Canvas,
    text_width,
)

CELL, LABEL, MARGIN, GAP = 21, 26, 20, 30  # px
LEGEND = "a row is a query, a column is a key; full cell: seen; thick line: where the chunk begins"


def mask_picture(
    masks: Mapping[str, Tensor],
    *,
    right: Tensor | None = None,
    tables: Sequence[Sequence[int]] = (),
    block_size: int = 4,
    title: str = "Who sees which key",
    legend: str = LEGEND,
) -> Picture:
    """Masks side by side, each `[num_queries, num_keys]` of booleans, under its name.

    The queries of each are the last of its tokens. `right`: frames the cells in which a mask differs from it.
    `tables`: one block table per mask, or none at all; it is written over the keys, and shared blocks are coloured.
    """
    words_width = max(text_width(title, LARGE, True), text_width(legend, SMALL))
    canvas = Canvas(max(_width(masks), words_width + 2 * MARGIN))
    canvas.text(MARGIN, 28, title, size=LARGE, bold=True)
    left, words = float(MARGIN), [f"{title}."]
    shared = _shared(
        [table[: -(-m.shape[1] // block_size)] for table, m in zip(tables, masks.values(), strict=False)]
    )
    for index, (name, mask) in enumerate(masks.items()):
        table = tables[index] if tables else ()
        _draw(canvas, left, name, mask, right, table, shared, block_size)
        words += _words(name, mask, right, table)
        left += _panel(name, mask) + GAP
    below = canvas.height + 24
    canvas.text(MARGIN, below, legend, size=SMALL, fill=GREY)
    if shared:
        canvas.text(MARGIN, below + 16, "coloured block: in more than one table", size=SMALL, fill=GREY)
        words.append(f"In more than one table: block {', '.join(map(str, sorted(shared)))}.")
    if right is not None:
        canvas.text(MARGIN, below + 16, "framed: wrong", size=SMALL, fill=VERMILLION)
    return Picture.of(canvas, "\n".join(words))


def batch_masks(query_start_loc: Tensor, seq_lens: Tensor) -> list[Tensor]:
    """The mask of each sequence of a batch, `[new tokens, all tokens]`."""
    lengths = [stop - first for first, stop in pairwise(query_start_loc.tolist())]
    return [
        torch.ones(new, total, dtype=torch.bool).tril(total - new)
        for new, total in zip(lengths, seq_lens.tolist(), strict=True)
    ]


def _shared(tables: Sequence[Sequence[int]]) -> set[int]:
    """Blocks that stand in more than one of these tables."""
    counts = Counter(block for table in tables for block in set(table))
    return {block for block, count in counts.items() if count > 1}


def _panel(name: str, mask: Tensor) -> float:
    """Width of a mask with its labels, at least that of its name."""
    return max(LABEL + CELL * mask.shape[1], text_width(name, SMALL, True))


def _width(masks: Mapping[str, Tensor]) -> float:
    return 2 * MARGIN + sum(_panel(*each) + GAP for each in masks.items()) - GAP


def _draw(
    canvas: Canvas,
    left: float,
    name: str,
    mask: Tensor,
    right: Tensor | None,
    table: Sequence[int],
    shared: Collection[int],
    block_size: int,
) -> None:
    rows, columns = mask.shape
    start, x0, y0 = columns - rows, left + LABEL, 92.0 if table else 72.0
    canvas.text(left, 50, name, size=SMALL, bold=True)
    for index in range(0, columns, block_size) if table else ():
        wide = min(block_size, columns - index) * CELL
        block = table[index // block_size]
        fill = PALE_YELLOW if block in shared else PAPER
        canvas.rect(x0 + index * CELL, 57, wide, 18, fill=fill, stroke=GREY, radius=0)
        words = f"block {block}" if wide > text_width(f"block {block}", SMALL) + 4 else str(block)
        canvas.text(x0 + index * CELL + wide / 2, 70, words, size=SMALL, anchor="middle")
    for key in range(columns):
        canvas.text(x0 + (key + 0.5) * CELL, y0 - 4, str(key), size=SMALL, fill=GREY, anchor="middle")
    for row in range(rows):
        y = y0 + row * CELL
        canvas.text(x0 - 5, y + 15, str(start + row), size=SMALL, fill=GREY, anchor="end")
        for key in range(columns):
            seen = bool(mask[row, key])
            fill = BLUE if seen else (SHADE if key < start else PAPER)
            canvas.rect(x0 + key * CELL, y, CELL, CELL, fill=fill, stroke=GREY, thickness=0.6, radius=0)
    if right is not None:
        _frame(canvas, x0, y0, mask != right)
    if start:
        x = x0 + start * CELL
        canvas.line([(x, y0 - 2), (x, y0 + rows * CELL + 4)], stroke=GREY, thickness=2.4)


def _frame(canvas: Canvas, x0: float, y0: float, wrong: Tensor) -> None:
    """Frames after all cells, so that no neighbour is drawn over them."""
    for row, key in wrong.nonzero().tolist():
        corner = (x0 + key * CELL + 1.5, y0 + row * CELL + 1.5)
        canvas.rect(*corner, CELL - 3, CELL - 3, stroke=VERMILLION, thickness=2.4, radius=0)


def _words(name: str, mask: Tensor, right: Tensor | None, table: Sequence[int]) -> list[str]:
    """A panel in words, one line per query."""
    rows, columns = mask.shape
    lines = [f"{name}: keys 0 to {columns - 1}" + (f" in blocks {list(table)}." if table else ".")]
    for row in range(rows):
        seen = mask[row].nonzero().flatten().tolist()
        line = f"  query {columns - rows + row} sees {_ranges(seen)}"
        if right is not None and not torch.equal(mask[row], right[row]):
            line += f"; right: {_ranges(right[row].nonzero().flatten().tolist())}"
        lines.append(line)
    return lines


def _ranges(keys: list[int]) -> str:
    """[0, 1, 2, 5] -> "keys 0 to 2, 5"."""
    runs: list[list[int]] = []
    for key in keys:
        if runs and runs[-1][1] == key - 1:
            runs[-1][1] = key
        else:
            runs.append([key, key])
    if not keys:
        return "no key"
    listed = ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in runs)
    return f"key {listed}" if len(keys) == 1 else f"keys {listed}"
