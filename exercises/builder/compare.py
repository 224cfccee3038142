"""The first difference between a notebook that is committed and one that was made now."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import numpy as np

from exercises.notebook import Cell, Notebook

MOST_PIXELS = (
    0.02  # part of the pixels that may differ: another version of a font library moves the edges of letters
)
VISIBLE = 48  # difference of a channel, of 255


def first_difference(committed: Notebook, fresh: Notebook) -> str | None:
    """One sentence on where they differ, or None. Pictures may differ by what nobody can see."""
    for position, (old, new) in enumerate(zip(committed.cells, fresh.cells, strict=False)):
        if difference := _cell_difference(old, new):
            task = f" (task {new.task})" if new.task else ""
            return f"cell {position + 1}{task}, {difference}"
    if len(committed.cells) != len(fresh.cells):
        return f"it has {len(committed.cells)} cells, and {len(fresh.cells)} when made from its source"
    return None


def same_picture(old: str, new: str) -> bool:
    """Whether two PNG pictures in base64 look the same."""
    if old.strip() == new.strip():
        return True
    first, second = _pixels(old), _pixels(new)
    if first is None or second is None or first.shape != second.shape:
        return False
    differs = (np.abs(first - second) > VISIBLE).any(axis=-1)
    return bool(differs.mean() <= MOST_PIXELS)


def _cell_difference(old: Cell, new: Cell) -> str | None:
    for what in ("kind", "source", "tags", "meta", "cell_id", "execution_count"):
        before, after = getattr(old, what), getattr(new, what)
        if before != after:
            return _text_difference(what, str(before), str(after))
    if len(old.outputs) != len(new.outputs):
        return f"outputs: {len(old.outputs)} committed, {len(new.outputs)} fresh"
    for output, fresh in zip(old.outputs, new.outputs, strict=True):
        if difference := _output_difference(output, fresh):
            return difference
    return None


def _output_difference(old: dict[str, Any], new: dict[str, Any]) -> str | None:
    old_png, new_png = old.get("data", {}).get("image/png"), new.get("data", {}).get("image/png")
    if old_png and new_png and not same_picture(old_png, new_png):
        return "its picture looks different"
    before, after = (_without_picture(output) for output in (old, new))
    if before == after:
        return None
    for key in ("text", "evalue"):
        if old.get(key) != new.get(key):
            return _text_difference("output", str(old.get(key)), str(new.get(key)))
    for mime in sorted({*old.get("data", {}), *new.get("data", {})} - {"image/png"}, reverse=True):
        pair = str(old.get("data", {}).get(mime)), str(new.get("data", {}).get(mime))
        if pair[0] != pair[1]:
            return _text_difference(f"output {mime}", *pair)
    return _text_difference("output", before, after)


def _without_picture(output: dict[str, Any]) -> str:
    data = {mime: value for mime, value in output.get("data", {}).items() if mime != "image/png"}
    return json.dumps({**output, "data": data}, sort_keys=True)


def _text_difference(what: str, old: str, new: str) -> str:
    """Names the first line that differs."""
    before, after = old.split("\n"), new.split("\n")
    for number in range(max(len(before), len(after))):
        pair = [lines[number] if number < len(lines) else "nothing" for lines in (before, after)]
        if pair[0] != pair[1]:
            return f"{what}, line {number + 1}: committed {pair[0][:100]!r}, fresh {pair[1][:100]!r}"
    return f"{what} differs"


def _pixels(picture: str) -> np.ndarray[Any, np.dtype[np.int16]] | None:
    try:
        from PIL import Image  # comes with matplotlib, which drew the picture

        return np.asarray(Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB"), dtype=np.int16)
    except (ImportError, ValueError, OSError):
        return None
