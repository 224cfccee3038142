"""Reading the sources: MyST Markdown for chapters, py:percent for solutions."""

from __future__ import annotations

import difflib
import hashlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jupytext  # type: ignore[import-untyped]

from exercises.course import CourseError
from exercises.notebook import SETUP, VOLATILE, Cell, Notebook

META = ("task", "part", "name", "alt")
TAGS = (SETUP, VOLATILE, "raises-exception", "recorded")
FORMATS = {".md": "md:myst", ".py": "py:percent"}
TARGET = re.compile(r"^\((?P<label>[A-Za-z0-9_-]+)\)=$", re.MULTILINE)


def read_source(path: Path) -> Notebook:
    """Parses a source file into cells with ids. Raises: CourseError, naming the cell, for what it does not know."""
    parsed = jupytext.reads(path.read_text(encoding="utf-8"), fmt=FORMATS[path.suffix])
    cells: list[Cell] = []
    seen: dict[str, int] = {}
    for position, raw in enumerate(parsed.cells):
        where = f"{path.name}, cell {position + 1}"
        cell = _cell(raw, where)
        key = cell.kind + cell.source
        seen[key] = seen.get(key, 0) + 1
        cells.append(replace(cell, cell_id=_cell_id(path.stem, key, seen[key])))
    if not cells:
        raise CourseError(f"{path.name} has no cell")
    return Notebook(path.stem, tuple(cells))


def _cell(raw: Any, where: str) -> Cell:
    if raw.cell_type not in ("code", "markdown"):
        raise CourseError(f"{where}: a cell of type {raw.cell_type} is not used here")
    metadata = {key: value for key, value in raw.metadata.items() if key != "lines_to_next_cell"}
    tags = tuple(metadata.pop("tags", ()))
    for given, known, what in ((tags, TAGS, "tag"), (metadata, META, "metadata")):
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
                raise CourseError(f"{where}: unknown {what} {name!r}; {hint}")
    meta = {key: str(value) for key, value in metadata.items()}
    if "part" in meta and ("task" not in meta or "name" not in meta):
        raise CourseError(f"{where}: part={meta['part']!r} needs task= and name= beside it")
    source = raw.source if raw.cell_type == "code" else TARGET.sub(r'<a id="\g<label>"></a>', raw.source)
    return Cell(raw.cell_type, source, tags, meta)


def _cell_id(notebook: str, key: str, count: int) -> str:
    """Depends on the content and not on the place, so that a new cell does not rename those after it."""
    return hashlib.sha256(f"{notebook}\n{count}\n{key}".encode()).hexdigest()[:12]
