"""Pictures for chapter 09: which thread has which element, which sector a lane reads from, and a tree of sums."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from exercises.tasks.ex09_scene import WARP
from refengine.viz import Picture
from refengine.viz.svg import (
    BLUE,
    GREY,
    LARGE,
    LINE,
    PALE_BLUE,
    PALE_YELLOW,
    PAPER,
    SHADE,
    SMALL,
    Canvas,
    text_width,
)

MARGIN, CELL = 20.0, 26.0  # px
WORD, PER_SECTOR, SECTORS_PER_ROW = 20.0, 8, 4  # px; numbers of 4 bytes; sectors


def grid_picture(num_elements: int, grid: int, block: int) -> Picture:
    """Blocks of threads above the elements of an array; threads past the end have none."""
    title = f"{grid} blocks of {block} threads, {num_elements} elements"
    gap, width = 14.0, 34.0
    total = 2 * MARGIN + grid * block * width + (grid - 1) * gap
    canvas = Canvas(max(total, text_width(title, LARGE, True) + 2 * MARGIN))
    canvas.text(MARGIN, 28, title, size=LARGE, bold=True)
    words = [f"{title}."]
    for number in range(grid):
        left = MARGIN + number * (block * width + gap)
        canvas.rect(left - 3, 44, block * width + 6, 58, fill=SHADE, stroke=LINE)
        canvas.text(left + 2, 59, f"block {number}", size=SMALL, bold=True)
        for thread in range(block):
            x, element = left + thread * width, number * block + thread
            has = element < num_elements
            canvas.rect(x + 2, 66, width - 4, 30, fill=PALE_BLUE if has else PAPER, dash="" if has else "3 2")
            canvas.text(x + width / 2, 85, str(thread), anchor="middle")
            if not has:
                continue
            canvas.line([(x + width / 2, 98), (x + width / 2, 124)], stroke=GREY, arrow=True)
            canvas.rect(x + 2, 127, width - 4, 28, fill=PALE_YELLOW, radius=0)
            canvas.text(x + width / 2, 146, str(element), anchor="middle")
        have = [e for e in range(number * block, (number + 1) * block) if e < num_elements]
        words.append(f"  block {number}: threads 0 to {block - 1}; elements {have[0]} to {have[-1]}.")
    idle = grid * block - num_elements
    canvas.text(MARGIN, 174, f"broken outline: {idle} threads without an element", size=SMALL, fill=GREY)
    words.append(f"  {idle} threads of the last block have no element.")
    return Picture.of(canvas, "\n".join(words))


def sector_picture(requests: Mapping[str, Sequence[int]], title: str) -> Picture:
    """For each named request of a warp: the memory it reads from, with the lanes in the numbers they read.

    requests: name -> for each lane the number of 4 bytes that it reads; the memory begins at a sector.
    """
    shown = {name: PER_SECTOR * (max(numbers) // PER_SECTOR + 1) for name, numbers in requests.items()}
    row = PER_SECTOR * SECTORS_PER_ROW
    canvas = Canvas(max(2 * MARGIN + row * WORD + 30, text_width(title, LARGE, True) + 2 * MARGIN))
    canvas.text(MARGIN, 28, title, size=LARGE, bold=True)
    words, top = [f"{title}."], 44.0
    for name, numbers in requests.items():
        lanes = defaultdict[int, list[int]](list)
        for lane, number in enumerate(numbers):
            lanes[number].append(lane)
        touched = sorted({number // PER_SECTOR for number in numbers})
        canvas.text(MARGIN, top + 12, f"{name}: {len(touched)} sectors", size=SMALL, bold=True)
        top += 20
        for first in range(0, shown[name], row):
            _memory_row(canvas, top, first, min(row, shown[name] - first), lanes, touched)
            top += WORD + 6
        top += 14
        words.append(
            f"  {name}: {len(numbers)} lanes, {len(touched)} sectors: {', '.join(map(str, touched))}."
        )
    legend = (
        "a box is a number of 4 bytes, eight are a sector; dark: read by this lane; pale: moved, and not used"
    )
    canvas.text(MARGIN, top + 4, legend, size=SMALL, fill=GREY)
    return Picture.of(canvas, "\n".join(words))


def _memory_row(
    canvas: Canvas, y: float, first: int, count: int, lanes: Mapping[int, list[int]], touched: Sequence[int]
) -> None:
    for number in range(first, first + count):
        sector = number // PER_SECTOR
        x = MARGIN + (number - first) * WORD + (sector % SECTORS_PER_ROW) * 8
        readers = lanes.get(number, [])
        fill = BLUE if readers else PALE_BLUE if sector in touched else PAPER
        canvas.rect(x, y, WORD, WORD, fill=fill, stroke=GREY, thickness=0.6, radius=0)
        if readers:
            canvas.text(x + WORD / 2, y + 14, str(readers[0]), size=SMALL, anchor="middle")


def tree_picture(numbers: Sequence[int]) -> Picture:
    """Sums of a power of two of numbers, step by step: in each, the lower half takes in the upper half."""
    levels, half = [list(numbers)], len(numbers) // 2
    while half:
        before = levels[-1]
        levels.append([before[t] + before[t + half] for t in range(half)])
        half //= 2
    title = f"{len(numbers)} threads add up {len(numbers)} numbers in {len(levels) - 1} steps"
    wide, high = 52.0, 62.0
    left = MARGIN + 66
    canvas = Canvas(max(left + len(numbers) * wide + MARGIN, text_width(title, LARGE, True) + 2 * MARGIN))
    canvas.text(MARGIN, 28, title, size=LARGE, bold=True)
    words = [f"{title}."]
    for step, level in enumerate(levels):
        y = 46 + step * high
        canvas.text(MARGIN, y + 17, f"step {step}" if step else "start", size=SMALL, fill=GREY)
        for thread, number in enumerate(level):
            x = left + thread * wide
            if step:
                for source in (thread, thread + len(level)):
                    begin = (left + source * wide + 17, y - high + CELL + 2)
                    canvas.line([begin, (x + 17, y - 2)], stroke=GREY, arrow=True)
            canvas.rect(x, y, 34, CELL, fill=PALE_YELLOW if step else PALE_BLUE)
            canvas.text(x + 17, y + 18, str(number), anchor="middle")
        words.append(f"  step {step}: threads 0 to {len(level) - 1} hold {', '.join(map(str, level))}.")
    canvas.text(MARGIN, 46 + len(levels) * high - 20, "between two steps: a barrier", size=SMALL, fill=GREY)
    return Picture.of(canvas, "\n".join(words))


def request_widget(first: int = 0, step: int = 1) -> Any:
    """Sliders for the request of a warp whose lane t reads number `first + step * t`, over its picture."""
    widgets: Any = import_module("ipywidgets")
    sliders = (
        widgets.IntSlider(first, 0, 8, description="first"),
        widgets.IntSlider(step, 0, 12, description="step"),
    )
    shown = widgets.HTML()

    def draw(change: object = None) -> None:
        start, by = (slider.value for slider in sliders)
        request = {f"lane t reads number {start} + {by} t": [start + by * t for t in range(WARP)]}
        shown.value = sector_picture(request, "One request").html()

    for slider in sliders:
        slider.observe(draw, "value")
    draw()
    return widgets.VBox([*sliders, shown])
