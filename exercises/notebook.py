"""A notebook as the course sees it: cells with a role.

The .ipynb format is JSON. This module reads and writes it without Jupyter's own packages, so that a check on the
command line starts fast, and so that two builds of the same notebook give the same bytes.
"""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from exercises.course import CourseError

KERNEL = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
SETUP, VOLATILE = "setup", "volatile"


@dataclass(frozen=True)
class Cell:
    """One cell.

    `meta` is what the course knows about it and is stored as metadata under "refengine": `task` (id of the task
    that this cell answers), `part` (slot of the engine that it fills), `name` (the object that fills it), `alt`
    (what the picture shows). `tags`: "setup", "volatile", "raises-exception".
    """

    kind: str  # "code" or "markdown"
    source: str
    tags: tuple[str, ...] = ()
    meta: dict[str, str] = field(default_factory=dict)
    cell_id: str = ""
    outputs: tuple[dict[str, Any], ...] = ()
    execution_count: int | None = None

    @property
    def is_code(self) -> bool:
        return self.kind == "code"

    @property
    def task(self) -> str | None:
        """Id of the task this cell answers, "03.1"."""
        return self.meta.get("task")

    @property
    def checks(self) -> tuple[str, ...]:
        """Ids of the tasks this cell hands in: every `check("03.1", ...)` in it."""
        if not self.is_code or "check(" not in self.source:
            return ()
        try:
            tree = ast.parse(without_magics(self.source))
        except SyntaxError:
            return ()
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
        return tuple(
            call.args[0].value
            for call in calls
            if isinstance(call.func, ast.Name)
            and call.func.id == "check"
            and isinstance(call.args[0], ast.Constant)
            and isinstance(call.args[0].value, str)
        )


@dataclass(frozen=True)
class Notebook:
    """Cells in order. `name` is the file's name without its ending."""

    name: str
    cells: tuple[Cell, ...]

    def with_cells(self, cells: list[Cell]) -> Notebook:
        return replace(self, cells=tuple(cells))


def read(path: Path) -> Notebook:
    """Reads a saved notebook. Raises: CourseError if the file is missing or is not a notebook."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Notebook(path.stem, tuple(_cell(raw) for raw in data["cells"] if raw["cell_type"] != "raw"))
    except FileNotFoundError:
        raise CourseError(f"{path} does not exist") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CourseError(
            f"{path} is not a notebook that can be read: {type(error).__name__}: {error}"
        ) from None


def from_json(name: str, data: dict[str, Any]) -> Notebook:
    """The notebook in parsed JSON of format 4."""
    return Notebook(name, tuple(_cell(raw) for raw in data["cells"]))


def to_json(notebook: Notebook) -> dict[str, Any]:
    """Format 4.5, with sources and outputs as one string each (the form nbclient wants)."""
    return {
        "cells": [_raw(cell) for cell in notebook.cells],
        "metadata": KERNEL,
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def dumps(notebook: Notebook) -> str:
    """The text of the .ipynb file: sorted keys, one line of text per line, so that diffs stay small."""
    data = to_json(notebook)
    for cell in data["cells"]:
        cell["source"] = _lines(cell["source"])
        for output in cell.get("outputs", []):
            if isinstance(output.get("text"), str):
                output["text"] = _lines(output["text"])
            output_data = output.get("data", {})
            for mime, value in output_data.items():
                if isinstance(value, str) and not mime.startswith("image/"):
                    output_data[mime] = _lines(value)
    return json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def without_magics(source: str) -> str:
    """Python that a plain interpreter can run: IPython's `%magic`, `!command` and `name?` lines become blank.

    A cell that is valid Python is left alone, since a line may begin with the operator %.
    """
    lines = source.split("\n")
    first = next((line.strip() for line in lines if line.strip()), "")
    if first.startswith("%%"):
        timing = first.split()[0] in ("%%time", "%%timeit", "%%capture", "%%prun")
        return "\n".join("" if line.strip().startswith("%%") else line for line in lines) if timing else ""
    try:
        ast.parse(source)
        return source
    except (SyntaxError, ValueError):
        blank = [line.strip().startswith(("%", "!", "?")) or line.strip().endswith("?") for line in lines]
        return "\n".join(_pass(line) if drop else line for line, drop in zip(lines, blank, strict=True))


def _pass(line: str) -> str:
    """Keeps a block whose only line was a magic valid."""
    indent = line[: len(line) - len(line.lstrip())]
    return indent + "pass" if indent else ""


def _cell(raw: dict[str, Any]) -> Cell:
    metadata = raw.get("metadata", {})
    return Cell(
        kind=raw["cell_type"],
        source=_joined(raw["source"]),
        tags=tuple(metadata.get("tags", ())),
        meta=dict(metadata.get("refengine", {})),
        cell_id=raw.get("id", ""),
        outputs=tuple(_output(output) for output in raw.get("outputs", ())),
        execution_count=raw.get("execution_count"),
    )


def _output(output: dict[str, Any]) -> dict[str, Any]:
    joined = dict(output)
    if "text" in joined:
        joined["text"] = _joined(joined["text"])
    if "data" in joined:
        joined["data"] = {mime: _joined(value) for mime, value in joined["data"].items()}
    return joined


def _raw(cell: Cell) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    if cell.meta:
        metadata["refengine"] = dict(cell.meta)
    if cell.tags:
        metadata["tags"] = list(cell.tags)
    raw: dict[str, Any] = {
        "cell_type": cell.kind,
        "id": cell.cell_id,
        "metadata": metadata,
        "source": cell.source,
    }
    if cell.is_code:
        raw["execution_count"] = cell.execution_count
        raw["outputs"] = [_output(output) for output in cell.outputs]
    return raw


def _joined(value: Any) -> Any:
    return (
        "".join(value) if isinstance(value, list) and all(isinstance(part, str) for part in value) else value
    )


def _lines(text: str) -> list[str]:
    lines = text.split("\n")
    return [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
