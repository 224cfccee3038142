"""Where a token's K/V lie: logical positions, the block table, and slots in the cache.

`layout_picture` draws all three under one another and follows one position through them:
`slot = table[position // block_size] * block_size + position % block_size`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from refengine.viz.picture import Picture
from refengine.viz.svg import (
    GREY,
    LARGE,
    PALE_BLUE,
    PALE_GREEN,
    PALE_ORANGE,
    PALE_YELLOW,
    PAPER,
    SMALL,
    VERMILLION,
    Canvas,
    text_width,
)

WIDTH, MARGIN, GAP = 800, 20, 12
MAX_CELL, MIN_CELL = 40.0, 19.0  # px per slot
TINTS = (PALE_BLUE, PALE_YELLOW, PALE_GREEN, PALE_ORANGE)  # by logical block, over and over
TOKENS_TOP, TABLE_TOP, CACHE_TOP = 62, 134, 212


@dataclass(frozen=True)
class _Layout:
    """The measures of one picture. Raises: ValueError if it would not be legible, or if a position has no slot."""

    tokens: Sequence[Any]
    block_ids: Sequence[int]
    block_size: int
    chosen: int | None
    shown: Sequence[int]  # the blocks of the cache that are drawn
    null_block: bool  # whether block 0 is one

    def __post_init__(self) -> None:
        if len(self.tokens) > len(self.block_ids) * self.block_size:
            raise ValueError(
                f"{len(self.tokens)} tokens do not fit into {len(self.block_ids)} blocks of {self.block_size}"
            )
        if self.chosen is not None and not 0 <= self.chosen < len(self.tokens):
            raise ValueError(f"position {self.chosen} is not one of the {len(self.tokens)} tokens")
        if self.cell < MIN_CELL:
            raise ValueError(f"{len(self.shown)} blocks of {self.block_size} slots are too many for one line")

    @property
    def cell(self) -> float:
        """Width of one slot in px: the same above and below, so that a block looks like a block."""
        widest = max(len(self.shown), len(self.block_ids))
        free = WIDTH - 2 * MARGIN - GAP * (widest - 1)
        return min(MAX_CELL, free / (widest * self.block_size))

    def left(self, index: int) -> float:
        """Where the block drawn as number `index` of a line begins."""
        return MARGIN + index * (self.cell * self.block_size + GAP)

    def middle(self, index: int) -> float:
        return self.left(index) + self.cell * self.block_size / 2

    @property
    def target(self) -> tuple[int, int, int] | None:
        """Block index, offset and slot of the chosen position."""
        if self.chosen is None:
            return None
        index, offset = divmod(self.chosen, self.block_size)
        return index, offset, self.block_ids[index] * self.block_size + offset


def layout_picture(
    tokens: Sequence[Any],
    block_ids: Sequence[int],
    block_size: int,
    *,
    chosen: int | None = None,
    num_blocks: int | None = None,
    null_block: bool = True,
    title: str = "Positions, block table, slots",
) -> Picture:
    """Tokens above, their block table in the middle, the cache below; `chosen` is a position to follow.

    `num_blocks`: draw the whole cache, null block included; None: up to the last block of the table. Of a cache
    that would not fit only the table's own blocks are drawn. `null_block`: block 0 is never handed out (V1).
    Raises: ValueError if the tokens do not fit into the blocks, or the blocks not legibly into one line.
    """
    every = range(max(block_ids) + 1 if num_blocks is None else num_blocks)
    widest = max(MIN_CELL, *(text_width(str(token), SMALL) + 4 for token in tokens))
    fits = len(every) * (block_size * widest + GAP) - GAP <= WIDTH - 2 * MARGIN
    shown = every if fits else sorted(set(block_ids))
    layout = _Layout(tokens, block_ids, block_size, chosen, shown, null_block)
    canvas = Canvas(WIDTH)
    canvas.text(MARGIN, 28, title, size=LARGE, bold=True)
    _draw_tokens(canvas, layout)
    _draw_table(canvas, layout)
    _draw_cache(canvas, layout)
    if layout.target is not None:
        _draw_formula(canvas, layout, *layout.target)
    return Picture.of(canvas, _words(layout, title))


def _draw_tokens(canvas: Canvas, layout: _Layout) -> None:
    y, cell = TOKENS_TOP, layout.cell
    canvas.text(MARGIN, y - 8, "positions of the request, and their tokens", size=SMALL, fill=GREY)
    for position in range(len(layout.block_ids) * layout.block_size):
        index, offset = divmod(position, layout.block_size)
        x = layout.left(index) + offset * cell
        if position >= len(layout.tokens):
            canvas.rect(x, y + 16, cell, 26, stroke=GREY, dash="3 3", radius=0)
            continue
        canvas.text(x + cell / 2, y + 11, str(position), size=SMALL, fill=GREY, anchor="middle")
        canvas.rect(x, y + 16, cell, 26, fill=TINTS[index % len(TINTS)], radius=0)
        canvas.text(
            x + cell / 2, y + 33, str(layout.tokens[position]), size=SMALL, anchor="middle", width=cell - 2
        )
    if layout.target is not None:
        index, offset, _ = layout.target
        _ring(canvas, layout.left(index) + offset * cell, y + 16, cell, 26)


def _draw_table(canvas: Canvas, layout: _Layout) -> None:
    """One entry per logical block, straight below its tokens, and an arrow on to the block in the cache."""
    for index, block_id in enumerate(layout.block_ids):
        x, y = layout.middle(index), TABLE_TOP
        words, room = f"table[{index}] = {block_id}", layout.cell * layout.block_size
        words = words if text_width(words, SMALL, True) + 8 <= room + GAP - 6 else str(block_id)
        width = text_width(words, SMALL, True) + 8
        canvas.line([(x, TOKENS_TOP + 46), (x, y - 2)], stroke=GREY, arrow=True)
        canvas.rect(x - width / 2, y, width, 24, fill=TINTS[index % len(TINTS)])
        canvas.text(x, y + 16, words, size=SMALL, bold=True, anchor="middle")
        chosen = layout.target is not None and layout.target[0] == index
        end = (layout.middle(layout.shown.index(block_id)), CACHE_TOP - 2.0)
        canvas.line(
            [(x, y + 26), end],
            stroke=VERMILLION if chosen else GREY,
            thickness=2.2 if chosen else 1.2,
            arrow=True,
        )
        if chosen:
            _ring(canvas, x - width / 2, y, width, 24)


def _draw_cache(canvas: Canvas, layout: _Layout) -> None:
    """Blocks of the cache in the order of their ids, each with its slots and their numbers."""
    y, cell, size = CACHE_TOP, layout.cell, layout.block_size
    for place, block_id in enumerate(layout.shown):
        x = layout.left(place)
        if place and layout.shown[place - 1] != block_id - 1:
            canvas.text(x - GAP / 2, y + 36, "…", size=SMALL, fill=GREY, anchor="middle")
        owner = layout.block_ids.index(block_id) if block_id in layout.block_ids else None
        name = "null block" if layout.null_block and block_id == 0 else f"block {block_id}"
        canvas.text(x + cell * size / 2, y + 13, name, size=SMALL, bold=True, anchor="middle")
        for offset in range(size):
            position = None if owner is None else owner * size + offset
            held = position is not None and position < len(layout.tokens)
            tint = TINTS[owner % len(TINTS)] if owner is not None and held else PAPER
            canvas.rect(
                x + offset * cell,
                y + 19,
                cell,
                26,
                fill=tint,
                stroke=GREY,
                dash="" if held else "3 3",
                radius=0,
            )
            if held and position is not None:
                token = str(layout.tokens[position])
                canvas.text(
                    x + (offset + 0.5) * cell, y + 36, token, size=SMALL, anchor="middle", width=cell - 2
                )
            slot = str(block_id * size + offset)
            canvas.text(x + (offset + 0.5) * cell, y + 58, slot, size=SMALL, fill=GREY, anchor="middle")
    if layout.target is not None:
        index, offset, _ = layout.target
        place = layout.shown.index(layout.block_ids[index])
        _ring(canvas, layout.left(place) + offset * cell, y + 19, cell, 26)
    canvas.text(MARGIN, y + 78, "slots of the cache: numbered through, block by block", size=SMALL, fill=GREY)


def _draw_formula(canvas: Canvas, layout: _Layout, index: int, offset: int, slot: int) -> None:
    for row, line in enumerate(_formula(layout, index, offset, slot)):
        canvas.text(MARGIN, CACHE_TOP + 106 + 19 * row, line, bold=row == 2)


def _formula(layout: _Layout, index: int, offset: int, slot: int) -> list[str]:
    position, size = layout.chosen, layout.block_size
    block_id = layout.block_ids[index]
    return [
        f"position {position}: block index {position} // {size} = {index}, offset {position} % {size} = {offset}",
        f"block table: table[{index}] = block {block_id}",
        f"slot = {block_id} × {size} + {offset} = {slot}",
    ]


def _ring(canvas: Canvas, x: float, y: float, width: float, height: float) -> None:
    canvas.rect(x, y, width, height, stroke=VERMILLION, thickness=3, radius=2)


def _words(layout: _Layout, title: str) -> str:
    """The picture in words: which positions lie in which slots, and the chosen one."""
    size, count = layout.block_size, len(layout.tokens)
    lines = [f"{title}: {count} tokens in blocks of {size} slots, block table {list(layout.block_ids)}."]
    for index, block_id in enumerate(layout.block_ids):
        first, last = index * size, min((index + 1) * size, count) - 1
        if last < first:
            lines.append(f"Block {block_id} is empty so far.")
            continue
        start = block_id * size
        lines.append(
            f"Positions {first} to {last} lie in block {block_id}, slots {start} to {start + last - first}."
        )
    if layout.target is not None:
        lines += [f"{line}." for line in _formula(layout, *layout.target)]
    return "\n".join(lines)
