"""The block pool as a picture: one cell per block, the free queue in order, block tables over it.

The three facts about a block never share a sign. *Used* is a filled cell with a firm outline, *free* an empty
cell with a broken outline and its place in the queue, *cached* a solid label at the bottom of the cell. Each is
said in words too, so the picture reads the same without colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from refengine.viz.picture import Picture
from refengine.viz.state import BlockFacts, PoolState, ordinal, ranges
from refengine.viz.svg import (
    BLUE,
    GREY,
    LARGE,
    LINE,
    NORMAL,
    PALE_BLUE,
    PAPER,
    SMALL,
    VERMILLION,
    YELLOW,
    Canvas,
    shorten,
    text_width,
)

WIDTH, MARGIN = 800, 20
CELL_HEIGHT, CELL_GAP = 62, 8
CHIP_HEIGHT, CHIP_GAP = 34, 12
TABLE_CELL, TABLE_ROW = 42, 44
DASH = "4 3"


@dataclass(frozen=True)
class _Area:
    """Where on the canvas something is drawn: a column `width` px wide from `x`."""

    canvas: Canvas
    x: float
    width: float


def pool_picture(
    state: PoolState,
    *,
    title: str | None = None,
    before: PoolState | None = None,
    queue: bool = True,
    tables: bool = True,
    min_rows: int = 0,
) -> Picture:
    """The pool at one moment. With `before`, blocks whose facts changed since then carry a ring.

    `min_rows`: leave room for so many lines of block tables, so that pictures of a series are equally high.
    """
    canvas = Canvas(WIDTH)
    name = title if title is not None else _title(state)
    _draw_pool(_Area(canvas, MARGIN, WIDTH - 2 * MARGIN), state, name, before, queue, tables, min_rows)
    _legend(canvas, canvas.height + 18, ring=before is not None)
    return Picture.of(canvas, _alt(state, name, before))


def pool_pair(
    before: PoolState, after: PoolState, *, titles: tuple[str, str] | None = None, queue: bool = True, tables: bool = True
) -> Picture:
    """Two moments beside each other (large pools: above each other). What changed carries a ring on the right."""
    names = titles or (_title(before), _title(after))
    canvas = Canvas(WIDTH)
    gap = 34
    if len(after.block_ids) <= 16:
        half = (WIDTH - 2 * MARGIN - gap) / 2
        areas = [_Area(canvas, MARGIN, half), _Area(canvas, MARGIN + half + gap, half)]
        tops = [0.0, 0.0]
    else:
        areas = [_Area(canvas, MARGIN, WIDTH - 2 * MARGIN)] * 2
        tops = [0.0, -1.0]
    _draw_pool(areas[0], before, names[0], None, queue, tables, 0, tops[0])
    middle = canvas.height
    _draw_pool(areas[1], after, names[1], before, queue, tables, 0, 0.0 if tops[1] == 0 else middle + 14)
    if tops[1] == 0:
        x = WIDTH / 2
        canvas.line([(x - 11, 66), (x + 11, 66)], thickness=2.5, arrow=True)
    _legend(canvas, canvas.height + 18, ring=True)
    return Picture.of(canvas, f"{_alt(before, names[0], None)}\n{_alt(after, names[1], before)}")


def changed_blocks(before: PoolState, after: PoolState) -> list[int]:
    """Blocks with another fact than before. A mere step forward in the queue is no change of the block."""

    def essence(state: PoolState, block_id: int) -> tuple[int, bool, bool]:
        facts = state.facts(block_id)
        return facts.used, facts.place is not None, facts.cached

    return [i for i in after.block_ids if i not in before.block_ids or essence(before, i) != essence(after, i)]


def _title(state: PoolState) -> str:
    return f"Block pool {state.when}".strip()


# -- drawing ------------------------------------------------------------------------------------------------


def _draw_pool(
    area: _Area,
    state: PoolState,
    title: str,
    before: PoolState | None,
    queue: bool,
    tables: bool,
    min_rows: int,
    top: float = 0.0,
) -> None:
    area.canvas.text(area.x, top + 28, title, size=LARGE, bold=True, width=area.width)
    y = _draw_cells(area, top + 44, state, changed_blocks(before, state) if before else [])
    if queue:
        y = _draw_queue(area, y + 24, state)
    if tables and (state.tables or min_rows):
        _draw_tables(area, y + 24, state, min_rows)


def _draw_cells(area: _Area, top: float, state: PoolState, changed: Sequence[int]) -> float:
    """One cell per block. Returns: where the next thing may begin."""
    per_row = min(_cells_per_row(area.width, len(state.block_ids)), len(state.block_ids))
    width = min((area.width - CELL_GAP * (per_row - 1)) / per_row, 110.0)
    for index, facts in enumerate(state):
        row, column = divmod(index, per_row)
        x, y = area.x + column * (width + CELL_GAP), top + row * (CELL_HEIGHT + CELL_GAP)
        _draw_cell(area.canvas, x, y, width, facts)
        if facts.block_id in changed:
            area.canvas.rect(
                x - 3.5, y - 3.5, width + 7, CELL_HEIGHT + 7, stroke=VERMILLION, thickness=2.5, radius=6
            )
    return top + -(-len(state.block_ids) // per_row) * (CELL_HEIGHT + CELL_GAP)


def _cells_per_row(width: float, num_blocks: int) -> int:
    """As many as fit with legible words, and the same number in each row if that costs no row more."""
    most = int((width + CELL_GAP) // (78 + CELL_GAP))
    rows = -(-num_blocks // most)
    return -(-num_blocks // rows)


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


def _draw_queue(area: _Area, top: float, state: PoolState) -> float:
    """The free queue as a strip of chips, front left. Returns: where the next thing may begin."""
    canvas, count = area.canvas, len(state.free)
    canvas.text(area.x, top, f"Free queue, {count} of {len(state.block_ids)} blocks", bold=True)
    if not state.free:
        canvas.text(area.x, top + 28, "empty: the next allocation is refused", fill=GREY)
        return top + 46
    first, last = "next out", "last out"
    width = max(30.0, text_width(str(max(state.free)), NORMAL, True) + 14)
    side = text_width(first, SMALL) + 10
    per_row = max(1, int((area.width - 2 * side + CHIP_GAP) // (width + CHIP_GAP)))
    canvas.text(area.x, top + 29, first, size=SMALL, fill=GREY)
    for index, block_id in enumerate(state.free):
        row, column = divmod(index, per_row)
        x, y = area.x + side + column * (width + CHIP_GAP), top + 10 + row * (CHIP_HEIGHT + 8)
        _draw_chip(canvas, x, y, width, block_id, block_id in state.cached)
        if index + 1 < count and column + 1 < per_row:
            canvas.line([(x + width + 2, y + 17), (x + width + CHIP_GAP - 2, y + 17)], arrow=True)
        elif index + 1 < count:
            canvas.line([(x + width + 2, y + 17), (x + width + 12, y + 17)], arrow=True)
            canvas.text(x + width + 16, y + 21, "goes on", size=SMALL, fill=GREY)
        else:
            canvas.text(x + width + 8, y + 21, last, size=SMALL, fill=GREY)
    return top + 10 + -(-count // per_row) * (CHIP_HEIGHT + 8)


def _draw_chip(canvas: Canvas, x: float, y: float, width: float, block_id: int, cached: bool) -> None:
    canvas.rect(x, y, width, CHIP_HEIGHT, fill=PAPER, stroke=GREY, dash=DASH)
    canvas.text(x + width / 2, y + (17 if cached else 21), str(block_id), bold=True, anchor="middle")
    if cached:
        canvas.rect(x + 4, y + 23, width - 8, 7, fill=YELLOW, radius=3.5)


def _draw_tables(area: _Area, top: float, state: PoolState, min_rows: int) -> None:
    """One line per request; a block that several hold is marked, and tied to its neighbour above."""
    canvas = area.canvas
    canvas.text(area.x, top, "Block tables", bold=True)
    names = max([text_width(name, NORMAL) for name in state.tables], default=0.0)
    left = min(names, area.width * 0.3) + 12
    per_row = int((area.width - left) // TABLE_CELL)
    y, above = top + 10, ()
    for name, table in state.tables.items():
        canvas.text(area.x, y + 21, name, width=left - 8)
        for index, block_id in enumerate(table):
            row, column = divmod(index, per_row)
            x, cell_y = area.x + left + column * TABLE_CELL, y + row * TABLE_ROW
            users = sum(block_id in other for other in state.tables.values())
            if row == 0 and above[index : index + 1] == (block_id,):
                canvas.rect(x + 12, cell_y - 12, 12, 12, fill=BLUE, radius=0)
            _draw_entry(canvas, x, cell_y, block_id, users)
        above = table[:per_row] if len(table) <= per_row else ()
        y += max(1, -(-len(table) // per_row)) * TABLE_ROW
    canvas.height = max(canvas.height, y - TABLE_ROW + CHIP_HEIGHT, top + 10 + min_rows * TABLE_ROW - 12)


def _draw_entry(canvas: Canvas, x: float, y: float, block_id: int, users: int) -> None:
    """One entry of a block table; a shared block has a second outline and says by how many it is held."""
    width = TABLE_CELL - 6
    canvas.rect(x, y, width, 32, fill=PALE_BLUE if users == 1 else BLUE, thickness=1 if users == 1 else 2.5)
    if users == 1:
        canvas.text(x + width / 2, y + 21, str(block_id), bold=True, anchor="middle")
        return
    canvas.text(x + width / 2, y + 15, str(block_id), bold=True, anchor="middle")
    canvas.text(x + width / 2, y + 27, f"by {users}", size=SMALL, anchor="middle")


def _legend(canvas: Canvas, y: float, ring: bool) -> None:
    """What the signs mean, in one line."""
    canvas.line([(MARGIN, y - 6), (canvas.width - MARGIN, y - 6)], stroke=LINE, thickness=0.6)
    x, y = float(MARGIN), y + 4
    for words, draw in (("used", "used"), ("free", "free"), ("cached", "cached"), ("changed", "ring")):
        if draw == "ring" and not ring:
            continue
        if draw == "used":
            canvas.rect(x, y, 20, 14, fill=PALE_BLUE, thickness=2)
        elif draw == "free":
            canvas.rect(x, y, 20, 14, fill=PAPER, stroke=GREY, dash=DASH)
        elif draw == "cached":
            canvas.rect(x, y + 3, 20, 8, fill=YELLOW, radius=4)
        else:
            canvas.rect(x, y, 20, 14, stroke=VERMILLION, thickness=2.5)
        text = _LEGEND[words]
        canvas.text(x + 27, y + 11, text, size=SMALL, fill=GREY)
        x += 27 + text_width(text, SMALL) + 20


_LEGEND = {
    "used": "used: some request holds it",
    "free": "free: in the queue, contents kept",
    "cached": "cached: found by its hash",
    "changed": "changed",
}


# -- in words -----------------------------------------------------------------------------------------------


def _alt(state: PoolState, title: str, before: PoolState | None) -> str:
    """The picture in words: every block, the queue, the tables, and what changed."""
    lines = [f"{title}: {len(state.block_ids)} blocks, {len(state.free)} free, {len(state.cached)} cached."]
    lines += [f"{words}." for words in _grouped(list(state))]
    order = ", ".join(map(str, state.free)) or "empty"
    lines.append(f"Free queue, next out first: {order}.")
    lines += [f"Block table of {name}: {', '.join(map(str, table))}." for name, table in state.tables.items()]
    if before is not None:
        lines.append(f"Changed: blocks {ranges(changed_blocks(before, state))}.")
    return "\n".join(lines)


def _grouped(blocks: list[BlockFacts]) -> list[str]:
    """Neighbours with the same facts in one sentence, if the pool is large; places are in the queue's sentence."""
    if len(blocks) <= 12:
        return [facts.words() for facts in blocks]
    groups: dict[str, list[int]] = {}
    for facts in blocks:
        state = facts.used_words if facts.used else "free"
        groups.setdefault(f"{state}, {facts.cached_words}", []).append(facts.block_id)
    return [f"blocks {ranges(ids)}: {words}" for words, ids in groups.items()]


__all__ = ["changed_blocks", "pool_pair", "pool_picture"]
_ = (ordinal, shorten)
