"""What a generated notebook must and must not hold. Every rule yields sentences; none of them stops at the first."""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Iterator

from exercises.grader.task import Task
from exercises.notebook import VOLATILE, Cell, Notebook, without_magics

MOST_BYTES = 200_000
MEDIAN_LINES, P90_LINES = 8, 20
FORBIDDEN = (
    r"let['’]s",
    "simply",
    "obviously",
    "powerful",
    "seamless",
    "robust",
    "delv",
    r"div(?:e|es|ing) in",
    "crucial",
    "journey",
    "unlock",
    "leverag",
    "in this chapter we will",
)
WORDS = re.compile(rf"\b(?:{'|'.join(FORBIDDEN)})\w*", re.IGNORECASE)
HEAD = ("Goals", "Prerequisites", "Reading time", "Points")
BOX = ("In V0", "In V1")
IMAGE = re.compile(r"<img\b[^>]*>", re.IGNORECASE)
ALT = re.compile(r"\balt\s*=\s*(\"[^\"]*\S[^\"]*\"|'[^']*\S[^']*')", re.IGNORECASE)
DATA_URI = re.compile(r"data:[a-z]+/[a-z+.-]+;base64,[A-Za-z0-9+/=]+")
PATHS = re.compile(
    r"(?<![\w.:/])/(?:home|root|tmp|work|usr|opt|var|mnt|private|Users)/[\w.-]+|\b[A-Z]:\\\w+|site-packages"
)
ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]{6,}|\b0x[0-9a-fA-F]{10,16}\b|ipykernel_\d+")
CLOCK = re.compile(r"\b\d{4}-\d\d-\d\d[ T]\d\d:\d\d|\b\d\d:\d\d:\d\d\b")
DURATION = re.compile(
    r"\b\d+(?:\.\d+)?\s?(?:ms|µs|us|ns)\b|\b\d+\.\d+\s?(?:s|sec|seconds)\b|\d(?:it|tok(?:ens)?)/s\b"
)


def everywhere(notebook: Notebook, text: str) -> Iterator[str]:
    """Rules for every generated notebook. `text` is the whole file as it is written."""
    size = len(text.encode())
    if size > MOST_BYTES:
        yield f"it has {size:,} bytes; the most is {MOST_BYTES:,}"
    for position, cell in enumerate(notebook.cells):
        for sentence in _cell(cell):
            yield f"cell {position + 1}: {sentence}"


def of_chapter(notebook: Notebook, tasks: list[Task]) -> Iterator[str]:
    """Rules for chapters: how one opens, its box, and the length of its code."""
    head = "\n".join(_opening(notebook))
    number = notebook.name[:2]
    if not re.match(rf"# {number}\b", head):
        yield f'the first line must be a heading that starts with "# {number}"'
    for label in HEAD:
        if f"**{label}**" not in head:
            yield f"before its first code there must be a line with **{label}**"
    points = re.search(r"\*\*Points\*\*.*", head)
    total = sum(task.points for task in tasks)
    if tasks and points and str(total) not in re.findall(r"\d+", points[0]):
        yield f"exercise {number} is worth {total} points, and the line with **Points** does not say so"
    every = "\n".join(cell.source for cell in notebook.cells if not cell.is_code)
    for label in BOX:
        if f"**{label}**" not in every:
            yield f"the box with **{label}** is missing"
    yield from _lengths(notebook)


def of_exercise(notebook: Notebook, tasks: list[Task]) -> Iterator[str]:
    """Rules for exercises: each task is asked, answered and handed in exactly once."""
    handed_in = [task_id for cell in notebook.cells for task_id in cell.checks]
    answered = {cell.task for cell in notebook.cells if cell.task}
    for task in tasks:
        if task.id not in answered:
            yield f'no cell answers task {task.id}: # %% task="{task.id}"'
        if handed_in.count(task.id) != 1:
            yield f"task {task.id} is handed in {handed_in.count(task.id)} times; it must be once: {task.call}"
        in_cells = {cell.meta.get("part") for cell in notebook.cells if cell.task == task.id} - {None}
        if in_cells != ({task.part} - {None}):
            yield f"task {task.id} fills the slot {task.part} in the registry and {in_cells or None} in its cells"
    known = {task.id for task in tasks}
    for task_id in sorted((answered | set(handed_in)) - known):
        yield f"task {task_id} is not in the registry"
    for cell in notebook.cells:
        name = cell.meta.get("name")
        if name and name not in (defined := _defined(cell)):
            yield f'the cell of task {cell.task} says name="{name}" and defines {", ".join(defined) or "nothing"}'


def _cell(cell: Cell) -> Iterator[str]:
    for found in WORDS.findall(cell.source):
        yield f"the book does without the word {found!r}"
    for found in PATHS.findall(cell.source):
        yield f"it holds a path of one machine: {found}"
    if not cell.is_code and re.search(r"^\s*(```|:::)\{", cell.source, re.MULTILINE):
        yield "JupyterLab does not show MyST directives; write plain Markdown"
    for tag in ("![](", '<img src=""'):
        if not cell.is_code and tag in cell.source:
            yield "a picture without alternative text"
    for output in cell.outputs:
        yield from _output(cell, output)


def _output(cell: Cell, output: dict[str, object]) -> Iterator[str]:
    data: dict[str, str] = output.get("data", {})  # type: ignore[assignment]  # format 4
    metadata: dict[str, dict[str, str]] = output.get("metadata", {})  # type: ignore[assignment]
    if output.get("name") == "stderr":
        yield f"it writes to stderr: {str(output['text']).strip().splitlines()[-1]}"
    if "image/png" in data and not metadata.get("image/png", {}).get("alt"):
        yield 'a picture without alternative text; give the cell alt="what it shows"'
    for image in IMAGE.findall(data.get("text/html", "")):
        if not ALT.search(DATA_URI.sub("", image)):
            yield "an <img> without alternative text"
    if "refused" in metadata:
        formats = ", ".join(metadata["refused"])
        yield f"a freshly cloned notebook shows nothing of this: {formats}; tag the cell {VOLATILE}"
    texts = [str(output.get("text", "")), str(output.get("evalue", ""))]
    texts += [str(value) for mime, value in data.items() if mime.startswith("text/")]
    yield from _leaks(DATA_URI.sub("", "\n".join(texts)), is_recorded="recorded" in cell.tags)


def _leaks(text: str, is_recorded: bool) -> Iterator[str]:
    """What differs from machine to machine or from run to run."""
    kinds = [
        ("a path of one machine", PATHS),
        ("the address of an object", ADDRESS),
        ("a time of day", CLOCK),
    ]
    if not is_recorded:
        kinds.append(
            (f"a duration (tag the cell {VOLATILE}, or recorded if the number comes from a file)", DURATION)
        )
    for what, pattern in kinds:
        if found := pattern.search(text):
            yield f"its output holds {what}: {found[0]}"


def _opening(notebook: Notebook) -> Iterator[str]:
    for cell in notebook.cells:
        if cell.is_code:
            return
        yield cell.source


def _lengths(notebook: Notebook) -> Iterator[str]:
    lengths = sorted(code_lines(cell) for cell in notebook.cells if cell.is_code)
    if not lengths:
        yield "it has no code"
        return
    median, ninetieth = statistics.median(lengths), lengths[int(0.9 * (len(lengths) - 1))]
    if median > MEDIAN_LINES:
        yield f"its median code cell has {median:g} lines; the most is {MEDIAN_LINES}"
    if ninetieth > P90_LINES:
        yield f"the 90th percentile of its code cells is {ninetieth} lines; the most is {P90_LINES}"


def code_lines(cell: Cell) -> int:
    """Lines of a cell that are not blank."""
    return sum(bool(line.strip()) for line in cell.source.split("\n"))


def _defined(cell: Cell) -> list[str]:
    """Names that the cell binds at its top level."""
    names: list[str] = []
    for node in ast.parse(without_magics(cell.source)).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.append(node.target.id)
    return names
