"""How fast a piece of work can be at most: by what it computes, or by what it reads.

A device computes so many operations a second and moves so many bytes a second. Work that does few operations per
byte waits for memory, work that does many waits for arithmetic; the ridge lies between. `roofline` draws the
limit over operations per byte, and work as points on it or, where it was measured, below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from refengine.viz.picture import Picture
from refengine.viz.svg import (
    GREY,
    INK,
    LARGE,
    LINE,
    PALE_BLUE,
    PALE_ORANGE,
    PAPER,
    SMALL,
    VERMILLION,
    Canvas,
    text_width,
)

WIDTH, MARGIN = 760, 20
LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT = 96, 50, 620, 250
DOT = 9.0  # px, half of a point
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Roof:
    """What a device can do. peak: operations per second. bandwidth: bytes per second, from and to memory."""

    name: str
    peak: float
    bandwidth: float

    def __post_init__(self) -> None:
        if min(self.peak, self.bandwidth) <= 0:
            raise ValueError(f"{self.name}: peak and bandwidth must be more than 0")

    @property
    def ridge(self) -> float:
        """Operations per byte from which on arithmetic is the limit."""
        return self.peak / self.bandwidth

    def reachable(self, intensity: float) -> float:
        """Operations per second, at most, of work with so many operations per byte."""
        return min(self.peak, self.bandwidth * intensity)

    def limit(self, intensity: float) -> str:
        """What such work waits for."""
        return "memory" if intensity < self.ridge else "arithmetic"

    def floor_seconds(self, operations: float, num_bytes: float) -> float:
        """The shortest time that the work can take."""
        return max(operations / self.peak, num_bytes / self.bandwidth)


@dataclass(frozen=True)
class Work:
    """Something to compute. seconds: what it took; None if that was not measured."""

    name: str
    operations: float
    num_bytes: float
    seconds: float | None = None

    def __post_init__(self) -> None:
        if min(self.operations, self.num_bytes) <= 0 or (self.seconds is not None and self.seconds <= 0):
            raise ValueError(f"{self.name}: operations, bytes and seconds must be more than 0")

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.operations / self.num_bytes

    def share(self, roof: Roof) -> float | None:
        """Shortest possible time over measured time; None if there is no measured one."""
        return (
            None
            if self.seconds is None
            else roof.floor_seconds(self.operations, self.num_bytes) / self.seconds
        )


@dataclass(frozen=True)
class _Axes:
    """Both logarithmic: x in operations per byte, y in operations per second. Whole powers of ten as bounds."""

    x: tuple[int, int]
    y: tuple[int, int]

    @classmethod
    def around(cls, roof: Roof, works: Sequence[Work]) -> _Axes:
        heights = [w.operations / w.seconds if w.seconds else roof.reachable(w.intensity) for w in works]
        x = _decades([w.intensity for w in works] + [roof.ridge])
        return cls(x, _decades([*heights, roof.peak, roof.reachable(10.0 ** x[0])]))

    def at(self, intensity: float, speed: float) -> tuple[float, float]:
        """Where a point lies on the canvas."""
        x = (log10(intensity) - self.x[0]) / (self.x[1] - self.x[0])
        y = (log10(speed) - self.y[0]) / (self.y[1] - self.y[0])
        return LEFT + x * PLOT_WIDTH, TOP + (1 - y) * PLOT_HEIGHT


def roofline(roof: Roof, works: Sequence[Work], *, title: str | None = None) -> Picture:
    """The limit of a device, and where work lies under it. Hollow: at best; full: as measured.

    Raises: ValueError without any work.
    """
    if not works:
        raise ValueError("a roofline needs some work to place under it")
    title = title or f"What {roof.name} can reach"
    axes, canvas = _Axes.around(roof, works), Canvas(WIDTH)
    canvas.text(MARGIN, 28, title, size=LARGE, bold=True)
    _draw_grid(canvas, axes)
    _draw_roof(canvas, axes, roof)
    for number, work in enumerate(works, 1):
        _draw_work(canvas, axes, roof, number, work)
    for row, line in enumerate(_legend(roof, works)):
        canvas.text(MARGIN, TOP + PLOT_HEIGHT + 64 + 18 * row, line, size=SMALL)
    return Picture.of(canvas, _words(title, roof, works))


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """The powers of ten below and above all values."""
    first, last = floor(log10(min(values)) - 1e-9), ceil(log10(max(values)) + 1e-9)
    return first, last


def _draw_grid(canvas: Canvas, axes: _Axes) -> None:
    bottom = TOP + PLOT_HEIGHT
    for power in range(axes.x[0], axes.x[1] + 1):
        x, _ = axes.at(10.0**power, 10.0 ** axes.y[0])
        canvas.line([(x, TOP), (x, bottom)], stroke=LINE, thickness=0.5)
        canvas.text(x, bottom + 16, f"{10.0**power:g}", size=SMALL, anchor="middle", fill=GREY)
    for power in range(axes.y[0], axes.y[1] + 1):
        _, y = axes.at(10.0 ** axes.x[0], 10.0**power)
        canvas.line([(LEFT, y), (LEFT + PLOT_WIDTH, y)], stroke=LINE, thickness=0.5)
        canvas.text(LEFT - 8, y + 4, f"{with_prefix(10.0**power)}op/s", size=SMALL, anchor="end", fill=GREY)
    middle = LEFT + PLOT_WIDTH / 2
    canvas.text(middle, bottom + 36, "operations per byte", size=SMALL, anchor="middle", fill=GREY)


def _draw_roof(canvas: Canvas, axes: _Axes, roof: Roof) -> None:
    left, right = 10.0 ** axes.x[0], 10.0 ** axes.x[1]
    corner = axes.at(roof.ridge, roof.peak)
    canvas.line([axes.at(left, roof.reachable(left)), corner, axes.at(right, roof.peak)], thickness=2.4)
    canvas.line([corner, (corner[0], TOP + PLOT_HEIGHT)], stroke=GREY, dash="4 3")
    canvas.text(
        LEFT + PLOT_WIDTH, corner[1] - 7, f"{with_prefix(roof.peak)}op/s", size=SMALL, anchor="end", bold=True
    )
    along = f"{with_prefix(roof.bandwidth)}B/s"
    x, y = axes.at(left, roof.reachable(left))
    steep = (y - corner[1]) / (corner[0] - x)
    end = 12 + text_width(
        along, SMALL, bold=True
    )  # px from the left edge; the words stand clear of the line there
    canvas.text(x + 12, y - steep * end - 6, along, size=SMALL, bold=True)


def _draw_work(canvas: Canvas, axes: _Axes, roof: Roof, number: int, work: Work) -> None:
    best = axes.at(work.intensity, roof.reachable(work.intensity))
    tint = PALE_BLUE if roof.limit(work.intensity) == "memory" else PALE_ORANGE
    x, y = best
    if work.seconds is not None:
        x, y = axes.at(work.intensity, work.operations / work.seconds)
        canvas.line([(x, y), best], stroke=VERMILLION, dash="2 3")
    canvas.rect(
        x - DOT,
        y - DOT,
        2 * DOT,
        2 * DOT,
        fill=PAPER if work.seconds is None else tint,
        stroke=INK,
        thickness=1.4,
        radius=DOT,
    )
    canvas.text(x, y + 4, str(number), size=SMALL, anchor="middle", bold=True)


def _legend(roof: Roof, works: Sequence[Work]) -> list[str]:
    return [f"{number}  {_sentence(roof, work)}" for number, work in enumerate(works, 1)]


def _sentence(roof: Roof, work: Work) -> str:
    floor_time = _time(roof.floor_seconds(work.operations, work.num_bytes))
    share = work.share(roof)
    measured = "" if share is None else f"; took {_time(work.seconds or 0.0)}, {share:.0%} of the limit"
    return (
        f"{work.name}: {work.intensity:.3g} operations per byte, waits for {roof.limit(work.intensity)}, "
        f"{floor_time} at best{measured}"
    )


def _words(title: str, roof: Roof, works: Sequence[Work]) -> str:
    first = (
        f"{title}. The limit rises with {with_prefix(roof.bandwidth)}B/s up to {roof.ridge:.3g} operations per "
        f"byte, and is level at {with_prefix(roof.peak)}op/s from there on."
    )
    return "\n".join([first, *(f"{line}." for line in _legend(roof, works))])


def with_prefix(value: float) -> str:
    """Three digits and the prefix of the unit that follows: 4.8e12 -> "4.8 T"."""
    for size, prefix in PREFIXES:
        if value >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g} "


def _time(seconds: float) -> str:
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
