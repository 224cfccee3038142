"""The picture of chapter 14: the hit rate of two routers, over the number of prefixes in use."""

from __future__ import annotations

from collections.abc import Mapping

from refengine.viz import Picture
from refengine.viz.svg import GREY, LARGE, LINE, SMALL, VERMILLION, Canvas

MIRRORS = "#0072b2"  # a blue that stays readable as a line and as a word
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 640, 60, 150, 56, 296  # px
TITLE = "Hit rate over the number of prefixes in use"


def rates_picture(rates: Mapping[int, tuple[float, float]], in_one: int, num_engines: int) -> Picture:
    """`rates`: by number of prefixes, of the router with mirrors and of round robin. `in_one`: room of one pool."""
    canvas = Canvas(WIDTH)
    canvas.text(20, 28, TITLE, size=LARGE, bold=True)
    most = max(rates)

    def at(number: int, rate: float) -> tuple[float, float]:
        return LEFT + (WIDTH - LEFT - RIGHT) * number / most, BOTTOM - (BOTTOM - TOP) * rate

    for percent in (0, 25, 50, 75, 100):
        y = at(0, percent / 100)[1]
        canvas.line([(LEFT, y), (WIDTH - RIGHT, y)], stroke=LINE, thickness=0.5)
        canvas.text(LEFT - 8, y + 4, f"{percent} %", size=SMALL, anchor="end")
    for number, words in ((in_one, "fit into one pool"), (in_one * num_engines, "into all together")):
        x = at(number, 0)[0]
        canvas.line([(x, TOP), (x, BOTTOM)], stroke=GREY, dash="4 3")
        canvas.text(x + 5, BOTTOM - 8, f"{number} {words}", size=SMALL, fill=GREY)
    names = (("with mirrors", MIRRORS), ("round robin", VERMILLION))
    for which, (name, colour) in enumerate(names):
        points = [at(number, pair[which]) for number, pair in rates.items()]
        canvas.line(points, stroke=colour, thickness=2.2)
        for x, y in points:
            canvas.rect(x - 3, y - 3, 6, 6, fill=colour, stroke="none", radius=3 - 3 * which)
        canvas.text(points[-1][0] + 12, points[-1][1] + 4, name, bold=True, fill=colour)
    for number in rates:
        canvas.text(at(number, 0)[0], BOTTOM + 18, str(number), size=SMALL, anchor="middle")
    canvas.text((LEFT + WIDTH - RIGHT) / 2, BOTTOM + 38, "prefixes in use", size=SMALL, anchor="middle")
    said = [
        f"{number} prefixes: {a:.0%} with mirrors, {b:.0%} round robin." for number, (a, b) in rates.items()
    ]
    return Picture.of(canvas, "\n".join([f"{TITLE}.", *said]))
