"""The picture of chapter 10: which sectors one request of a warp touches, in each of the five ways to read keys.

A panel is the keys of one head in one block, in pieces of 256 bytes as they lie in memory: in NHD a piece is a token,
in the split layout it is the first, second, ... 16 bytes of all tokens. The kernels' own functions say where.
"""

from __future__ import annotations

from exercises.tasks.ex10_layouts import BLOCK_SIZE, BLOCKS, HEAD, WARP, WAYS, Way, lanes_for_a_row
from refengine.viz import Picture
from refengine.viz.svg import BLUE, GREY, LARGE, LINE, PALE_YELLOW, PAPER, SMALL, Canvas

HEAD_DIM, ITEMSIZE, X = 128, 2, 8  # bf16: numbers of a row, bytes of one, numbers in 16 bytes
PIECE, SECTOR = 256, 32  # bytes
MARGIN, GAP, COLUMN, ROW, TOP = 20, 24, 17, 11, 96  # px
LEGEND = "a row is 256 bytes; yellow: a sector of 32 bytes that is fetched; blue: bytes that lanes asked for"


def first_request(way: Way) -> list[tuple[int, int]]:
    """(first byte, bytes) that each lane asks for at first, if its token lies in the first block of the table."""
    asked = []
    for lane in range(WARP):
        token, d = (lane // 16, lane % 16 * X) if way.make is lanes_for_a_row else (lane, 0)
        if token < BLOCK_SIZE:
            element = way.place(BLOCKS[0], token, HEAD, d, HEAD_DIM, X)
            asked.append((element * ITEMSIZE, ITEMSIZE if way.load == "a number" else 16))
    return asked


def pieces(way: Way) -> list[int]:
    """Numbers of the pieces of 256 bytes that hold this head in this block, in the order of memory."""
    every = range(0, HEAD_DIM, X)
    return sorted(
        {
            way.place(BLOCKS[0], token, HEAD, d, HEAD_DIM, X) * ITEMSIZE // PIECE
            for token in range(BLOCK_SIZE)
            for d in every
        }
    )


def request_picture() -> Picture:
    """The five ways side by side."""
    wide = PIECE // SECTOR * COLUMN
    canvas = Canvas(2 * MARGIN + len(WAYS) * wide + (len(WAYS) - 1) * GAP)
    canvas.text(
        MARGIN, 28, "The first request of a warp, in the first block of the table", size=LARGE, bold=True
    )
    words = ["The first request of a warp, in the first block of the table."]
    for index, (name, way) in enumerate(WAYS.items()):
        left = float(MARGIN + index * (wide + GAP))
        canvas.text(left, 54, f"{name}: {way.layout}", size=SMALL, bold=True)
        canvas.text(left, 69, f"{way.owner},", size=SMALL)
        canvas.text(left, 84, f"{way.load} a load", size=SMALL)
        words.append(_panel(canvas, left, name, way))
    canvas.text(MARGIN, canvas.height + 24, LEGEND, size=SMALL, fill=GREY)
    return Picture.of(canvas, "\n".join(words))


def _panel(canvas: Canvas, left: float, name: str, way: Way) -> str:
    """Draws one way. Returns: the same in words."""
    asked, lines = first_request(way), {piece: row for row, piece in enumerate(pieces(way))}
    for row in lines.values():
        canvas.rect(
            left,
            TOP + row * ROW,
            PIECE // SECTOR * COLUMN,
            ROW,
            fill=PAPER,
            stroke=LINE,
            thickness=0.5,
            radius=0,
        )
    fetched = sorted({first // SECTOR for first, _ in asked})
    for sector in fetched:
        x, y = _corner(left, lines, sector * SECTOR)
        canvas.rect(x, y, COLUMN, ROW, fill=PALE_YELLOW, stroke=GREY, thickness=0.8, radius=0)
    for first, size in asked:
        x, y = _corner(left, lines, first)
        wide = max(size / SECTOR * COLUMN, 2.5)  # a number is a pixel, and would not be seen
        canvas.rect(x, y + 2, wide, ROW - 4, fill=BLUE, stroke="none", radius=0)
    used = sum(size for _, size in asked)
    return (
        f"{name}, {way.layout}, {way.owner}, {way.load} a load: {len(fetched)} sectors in "
        f"{len({sector * SECTOR // PIECE for sector in fetched})} of {len(lines)} pieces; {used} of "
        f"{len(fetched) * SECTOR} bytes are asked for."
    )


def _corner(left: float, lines: dict[int, int], byte: int) -> tuple[float, float]:
    return left + byte % PIECE / SECTOR * COLUMN, TOP + lines[byte // PIECE] * ROW
