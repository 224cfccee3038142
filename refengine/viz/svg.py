"""A sheet to draw on: shapes and words in, one SVG text out.

Hand-written SVG and no plotting library, because the committed notebooks must come out byte for byte the same
on every machine: there is no font file, no version of a renderer and no clock in the result. The price is that
widths of words are computed from a table, which holds for DejaVu Sans and for Verdana, its near twin.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

# Okabe and Ito's colours, which stay apart for colour-blind eyes; pale tints for areas that carry words.
INK, GREY, LINE = "#1a1a1a", "#595959", "#8c8c8c"
PAPER, SHADE = "#ffffff", "#f3f3f3"
BLUE, YELLOW, GREEN, VERMILLION = "#56b4e9", "#f0e442", "#009e73", "#d55e00"
PALE_BLUE, PALE_YELLOW, PALE_GREEN, PALE_ORANGE = "#bbe1f6", "#f9f4b4", "#b3e0d3", "#f6d8ab"

FONT = "DejaVu Sans,Verdana,sans-serif"
BOTTOM = 12  # px below the lowest element
SMALL, NORMAL, LARGE = 11, 12.5, 15  # px; nothing is ever smaller than SMALL

# Advance widths of the characters from space to "~", in hundredths of the font size, regular and bold.
_REGULAR = (
    "32 40 46 84 64 95 78 27 39 39 50 84 32 36 32 34 64 64 64 64 64 64 64 64 64 64 34 34 84 84 84 53 100 68 69 70 77 "
    "63 58 77 75 29 29 66 56 86 75 79 60 79 69 63 61 73 68 99 69 61 69 39 34 39 84 50 50 61 63 55 63 62 35 63 63 28 "
    "28 58 28 97 63 61 63 63 41 52 39 63 59 82 59 59 52 64 34 64 84"
)
_BOLD = (
    "35 46 52 84 70 100 87 31 46 46 52 84 38 42 38 37 70 70 70 70 70 70 70 70 70 70 40 40 84 84 84 58 100 77 76 73 83 "
    "68 68 82 84 37 37 77 64 100 84 85 73 85 77 72 68 81 77 110 77 72 73 46 37 46 84 50 50 67 72 59 72 68 44 72 71 34 "
    "34 67 34 104 71 69 72 72 49 60 48 71 65 92 65 65 58 71 37 71 84"
)
_WIDTHS = {bold: [int(w) for w in table.split()] for bold, table in ((False, _REGULAR), (True, _BOLD))}
_OTHER = 100  # a character outside the table counts as wide as the widest usual one


def text_width(text: str, size: float = NORMAL, bold: bool = False) -> float:
    """Width of `text` in px."""
    table = _WIDTHS[bold]
    return sum(table[ord(c) - 32] if 32 <= ord(c) < 127 else _OTHER for c in text) * size / 100


def shorten(text: str, width: float, size: float = NORMAL, bold: bool = False) -> str:
    """`text`, cut at the end and marked with an ellipsis if it is wider than `width` px."""
    if text_width(text, size, bold) <= width:
        return text
    while text and text_width(text + "…", size, bold) > width:
        text = text[:-1]
    return text.rstrip() + "…"


def wrap(text: str, width: float, *, most: int, size: float = SMALL) -> list[str]:
    """`text` in lines of at most `width` px; what does not fit into `most` lines is cut."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if text_width(longer, size) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    if len(lines) > most:
        lines[most - 1] += " …"
    return [shorten(line, width, size) for line in lines[:most]]


class Canvas:
    """A sheet `width` px wide that grows downwards. Mutates: every call adds one element.

    Looks are kept as numbered classes: most elements share one of a dozen looks, and the file halves.
    """

    def __init__(self, width: float) -> None:
        self.width = width
        self.height = 0.0
        self._elements: list[str] = []
        self._looks: dict[str, str] = {}

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = "none",
        stroke: str = INK,
        thickness: float = 1.0,
        dash: str = "",
        radius: float = 3.0,
    ) -> None:
        """A rectangle; `stroke` "none" leaves the outline away, `dash` "4 3" breaks it."""
        self._grow(y + height)
        look = self._look(f"fill:{fill}", _outline(stroke, thickness, dash))
        corners = f' rx="{_n(radius)}"' if radius else ""
        self._elements.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"{corners}{look}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = NORMAL,
        anchor: str = "start",
        bold: bool = False,
        fill: str = INK,
        width: float | None = None,
    ) -> None:
        """One line of words with its baseline at `y`; with `width` it is shortened to fit."""
        self._grow(y + size / 3)
        if width is not None:
            words = shorten(words, width, size, bold)
        look = self._look(
            f"font-size:{_n(size)}px" if size != NORMAL else "",
            "font-weight:bold" if bold else "",
            f"text-anchor:{anchor}" if anchor != "start" else "",
            f"fill:{fill}" if fill != INK else "",
        )
        self._elements.append(f'<text x="{_n(x)}" y="{_n(y)}"{look}>{escape(words, quote=False)}</text>')

    def line(
        self,
        points: Sequence[tuple[float, float]],
        *,
        stroke: str = INK,
        thickness: float = 1.2,
        dash: str = "",
        arrow: bool = False,
    ) -> None:
        """Straight pieces through `points`; with `arrow` a head at the last one."""
        self._grow(max(y for _, y in points))
        path = "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in points)
        look = self._look("fill:none", _outline(stroke, thickness, dash))
        self._elements.append(f'<path d="{path}"{look}/>')
        if arrow:
            self._head(points[-2], points[-1], stroke, 5.5 + thickness)

    def _head(self, start: tuple[float, float], tip: tuple[float, float], fill: str, size: float) -> None:
        (x0, y0), (x1, y1) = start, tip
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5 or 1.0
        ux, uy = (x1 - x0) / length, (y1 - y0) / length
        bx, by = x1 - size * ux, y1 - size * uy
        wing = size * 0.45
        self._elements.append(
            f'<path d="M{_n(x1)} {_n(y1)}L{_n(bx - wing * uy)} {_n(by + wing * ux)}'
            f'L{_n(bx + wing * uy)} {_n(by - wing * ux)}z"{self._look(f"fill:{fill}")}/>'
        )

    def _look(self, *properties: str) -> str:
        """The class attribute for some style properties; empty ones do not count."""
        style = ";".join(filter(None, properties))
        if not style:
            return ""
        name = self._looks.setdefault(style, f"l{len(self._looks)}")
        return f' class="{name}"'

    @property
    def full_height(self) -> int:
        """Height of the finished picture in px, with a margin below."""
        return round(self.height + BOTTOM)

    def svg(self, alt: str) -> str:
        """The finished picture. `alt` begins with its title, for whoever opens the file on its own."""
        width, height = _n(self.width), _n(self.full_height)
        looks = "".join(f".{name}{{{style}}}" for style, name in self._looks.items())
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img" font-family="{FONT}" font-size="{NORMAL}" fill="{INK}">'
            f"<title>{escape(alt.splitlines()[0], quote=False)}</title><style>{looks}</style>"
            f'<rect width="{width}" height="{height}" rx="6" fill="{PAPER}"/>'
            + "".join(self._elements)
            + "</svg>"
        )

    def _grow(self, y: float) -> None:
        self.height = max(self.height, y)


def _n(value: float) -> str:
    """A number with at most one decimal: more would only make the file longer."""
    return f"{round(value, 1):g}"


def _outline(stroke: str, thickness: float, dash: str) -> str:
    if stroke == "none":
        return ""
    dashes = f";stroke-dasharray:{dash}" if dash else ""
    return f"stroke:{stroke};stroke-width:{_n(thickness)}{dashes}"
