"""What a picture of the pool is put together from: cells, the queue, block tables, and the key to the signs.

The three facts about a block never share a sign. *Used* is a filled cell with a firm outline, *free* an empty
cell with a broken outline and its place in the queue, *cached* a solid label at the bottom of the cell. Each is
said in words too, so the picture reads the same without colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from refengine.viz.state import BlockFacts, PoolState, ordinal
from refengine.viz.svg import (
    BLUE,
    GREY,
    LINE,
    NORMAL,
    PALE_BLUE,
    PAPER,
    SMALL,
    VERMILLION,
    YELLOW,
    Canvas,
    text_width,
)

CELL_HEIGHT, CELL_GAP, MIN_CELL, MAX_CELL = 62, 10, 76, 110
CHIP_HEIGHT, CHIP_GAP, CHIP_ROW = 34, 14, 42
ENTRY_WIDTH, ENTRY_HEIGHT, ENTRY_STEP, TABLE_ROW = 34, 34, 40, 46
KEY_HEIGHT = 39
DASH = "4 3"


@dataclass(frozen=True)
class Area:
    """Where on a canvas something is drawn: a column `width` px wide that begins at `x`."""

    canvas: Canvas
    x: float
    width: float


def draw_cells(area: Area, top: float, state: PoolState, changed: Sequence[int]) -> float:
    """One cell per block; those in `changed` carry a ring. Returns: the lower edge."""
    count = len(state.block_ids)
    most = int((area.width + CELL_GAP) // (MIN_CELL + CELL_GAP))
    rows = -(-count // most)
    per_row = -(-count // rows)  # the same number in each row, if that costs no row more
    width = min((area.width - CELL_GAP * (per_row - 1)) / per_row, MAX_CELL)
    for index, facts in enumerate(state):
        row, column = divmod(index, per_row)
        x, y = area.x + column * (width + CELL_GAP), top + row * (CELL_HEIGHT + CELL_GAP)
        _draw_cell(area.canvas, x, y, width, facts)
        if facts.block_id in changed:
            _draw_ring(area.canvas, x, y, width, CELL_HEIGHT, room=3)
    return top + rows * (CELL_HEIGHT + CELL_GAP) - CELL_GAP


def _draw_ring(canvas: Canvas, x: float, y: float, width: float, height: float, room: float) -> None:
    """Around a shape, `room` px away from it."""
    canvas.rect(
        x - room, y - room, width + 2 * room, height + 2 * room, stroke=VERMILLION, thickness=2, radius=5
    )


def _draw_cell(canvas: Canvas, x: float, y: float, width: float, facts: BlockFacts) -> None:
    """One block: number and used or free in the body, cached in the label below."""
    if facts.used:
        canvas.rect(x, y, width, CELL_HEIGHT, fill=PALE_BLUE, thickness=2)
    else:
        canvas.rect(x, y, width, CELL_HEIGHT, fill=PAPER, stroke=GREY, dash=DASH)
    middle = x + width / 2
    canvas.text(middle, y + 17, f"block {facts.block_id}", size=SMALL, bold=True, anchor="middle")
    words = facts.used_words if facts.used else facts.free_words
    canvas.text(middle, y + 33, words, size=SMALL, anchor="middle")
    if facts.cached:
        canvas.rect(x + 6, y + 40, width - 12, 16, fill=YELLOW, radius=8)
        canvas.text(middle, y + 52, "cached", size=SMALL, anchor="middle")
    else:
        canvas.text(middle, y + 52, "not cached", size=SMALL, anchor="middle", fill=GREY)


def draw_queue(
    area: Area, top: float, state: PoolState, ringed: Sequence[int] = (), gone: Sequence[tuple[int, int]] = ()
) -> float:
    """The free queue as a strip of chips, front left, `top` being the heading's baseline. Returns: the lower edge.

    `ringed`: blocks in it that carry a ring. `gone`: blocks that left it, each with the place that it had.
    """
    canvas, count = area.canvas, len(state.free)
    heading = f"Free queue, {count} of {len(state.block_ids)} blocks"
    canvas.text(area.x, top, heading, bold=True)
    if gone:
        told = "taken out: " + ", ".join(f"{block_id} ({ordinal(place)})" for block_id, place in gone)
        beside = text_width(heading, NORMAL, True) + 12
        canvas.text(area.x + beside, top, told, size=SMALL, fill=VERMILLION, width=area.width - beside)
    if not state.free:
        canvas.text(area.x, top + 31, "empty: the next allocation is refused", fill=GREY)
        return top + CHIP_ROW
    width = max(30.0, text_width(str(max(state.free)), NORMAL, True) + 14)
    side = text_width("next out", SMALL) + 10
    per_row = max(1, int((area.width - 2 * side + CHIP_GAP) // (width + CHIP_GAP)))
    canvas.text(area.x, top + 31, "next out", size=SMALL, fill=GREY)
    for index, block_id in enumerate(state.free):
        row, column = divmod(index, per_row)
        x, y = area.x + side + column * (width + CHIP_GAP), top + 10 + row * CHIP_ROW
        _draw_chip(canvas, x, y, width, block_id, block_id in state.cached)
        if block_id in ringed:
            _draw_ring(canvas, x, y, width, CHIP_HEIGHT, room=1)
        end = x + width
        if index + 1 == count:
            canvas.text(end + 8, y + 21, "last out", size=SMALL, fill=GREY)
        else:
            canvas.line([(end + 2, y + 17), (end + CHIP_GAP - 2, y + 17)], arrow=True)
            if column + 1 == per_row:
                canvas.text(end + CHIP_GAP + 2, y + 21, "goes on", size=SMALL, fill=GREY)
    return top + 10 + -(-count // per_row) * CHIP_ROW - (CHIP_ROW - CHIP_HEIGHT)


def _draw_chip(canvas: Canvas, x: float, y: float, width: float, block_id: int, cached: bool) -> None:
    canvas.rect(x, y, width, CHIP_HEIGHT, fill=PAPER, stroke=GREY, dash=DASH)
    canvas.text(x + width / 2, y + (17 if cached else 21), str(block_id), bold=True, anchor="middle")
    if cached:
        canvas.rect(x + 4, y + 23, width - 8, 7, fill=YELLOW, radius=3.5)


def draw_tables(area: Area, top: float, state: PoolState) -> float:
    """One line of entries per request, `top` being the heading's baseline. Returns: the lower edge.

    A block that several requests hold says so, and is tied to the same block in the line above. The null block is
    nobody's: it is drawn as a place without storage.
    """
    canvas = area.canvas
    canvas.text(area.x, top, "Block tables", bold=True)
    names = max(text_width(name) for name in state.tables)
    left = min(names + 14, area.width * 0.35)
    per_row = int((area.width - left + ENTRY_STEP - ENTRY_WIDTH) // ENTRY_STEP)
    y = top + 10
    above: tuple[int, ...] = ()
    for name, table in state.tables.items():
        canvas.text(area.x, y + 22, name, width=left - 6)
        for index, block_id in enumerate(table):
            row, column = divmod(index, per_row)
            x, entry_y = area.x + left + column * ENTRY_STEP, y + row * TABLE_ROW
            if block_id not in state.block_ids:
                _draw_null(canvas, x, entry_y, block_id)
                continue
            if above[index : index + 1] == (block_id,):
                canvas.rect(x + 11, entry_y - 12, 12, 12, fill=BLUE, radius=0)
            _draw_entry(
                canvas, x, entry_y, block_id, sum(block_id in other for other in state.tables.values())
            )
        above = table if len(table) <= per_row else ()  # a tie would run through the folded lines
        y += max(1, -(-len(table) // per_row)) * TABLE_ROW
    return y - (TABLE_ROW - ENTRY_HEIGHT)


def _draw_null(canvas: Canvas, x: float, y: float, block_id: int) -> None:
    canvas.rect(x, y, ENTRY_WIDTH, ENTRY_HEIGHT, fill=PAPER, stroke=GREY, dash=DASH)
    canvas.text(x + ENTRY_WIDTH / 2, y + 22, str(block_id), anchor="middle", fill=GREY)


def _draw_entry(canvas: Canvas, x: float, y: float, block_id: int, users: int) -> None:
    shared = users > 1
    canvas.rect(
        x, y, ENTRY_WIDTH, ENTRY_HEIGHT, fill=BLUE if shared else PALE_BLUE, thickness=2.5 if shared else 1
    )
    middle = x + ENTRY_WIDTH / 2
    canvas.text(middle, y + (15 if shared else 22), str(block_id), bold=True, anchor="middle")
    if shared:
        canvas.text(middle, y + 28, f"by {users}", size=SMALL, anchor="middle")


def draw_key(canvas: Canvas, margin: float, changed: str) -> None:
    """What the signs mean, in one line below everything else. `changed`: what to say of the ring, if any is used."""
    bottom, top = canvas.height + KEY_HEIGHT, canvas.height + 14
    canvas.line([(margin, top), (canvas.width - margin, top)], stroke=LINE, thickness=0.6)
    x, y = margin, top + 10

    def words(text: str) -> float:
        canvas.text(x + 27, y + 11, text, size=SMALL, fill=GREY)
        return x + 27 + text_width(text, SMALL) + 20

    canvas.rect(x, y, 20, 14, fill=PALE_BLUE, thickness=2)
    x = words("used: some request holds it")
    canvas.rect(x, y, 20, 14, fill=PAPER, stroke=GREY, dash=DASH)
    x = words("free: in the queue, contents kept")
    canvas.rect(x, y + 3, 20, 8, fill=YELLOW, radius=4)
    x = words("cached: found by its hash")
    if changed:
        canvas.rect(x, y, 20, 14, stroke=VERMILLION, thickness=2)
        words(changed)
    canvas.height = bottom
