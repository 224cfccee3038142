"""From a solved notebook to the exercise: solution regions become stubs.

    def popleft(self):
        ### BEGIN SOLUTION
        block = self._front.next
        return block
        ### END SOLUTION

becomes `raise NotImplementedError("ex03 task 1: the free queue (about 2 lines)")`. A region outside a function says
what stands in its place, since raising there would stop "Run All":

    ### BEGIN SOLUTION stub: hit_length = ...
    hit_length = 8
    ### END SOLUTION

More than one line, or a part that is given with a bug in it, is written after `### INSTEAD`, commented out:

    ### BEGIN SOLUTION
    self.queue.append(block)
    ### INSTEAD
    # self.queue.prepend(block)
    ### END SOLUTION
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from exercises.course import CourseError
from exercises.grader.task import Task
from exercises.notebook import Cell, Notebook, without_magics

BEGIN = re.compile(r"^(?P<indent> *)### BEGIN SOLUTION(?: stub: (?P<stub>.+))?$")
INSTEAD = re.compile(r"^ *### INSTEAD$")
END = re.compile(r"^ *### END SOLUTION$")


@dataclass(frozen=True)
class Region:
    """A solution region. Lines count from 0; `first` is the BEGIN line and `last` the END line."""

    first: int
    last: int
    indent: str
    stub: str | None
    solution: tuple[str, ...]
    instead: tuple[str, ...]

    @property
    def size(self) -> int:
        """Lines somebody has to write: neither blank nor only a comment."""
        return sum(bool(line.strip()) and not line.strip().startswith("#") for line in self.solution)


def regions(source: str, where: str) -> list[Region]:
    """All regions of a cell. Raises: CourseError, naming `where`, if the markers do not pair."""
    found: list[Region] = []
    begin: int | None = None
    lines = source.split("\n")
    for number, line in enumerate(lines):
        if BEGIN.match(line):
            if begin is not None:
                raise CourseError(f"{where}: BEGIN SOLUTION inside a solution, line {number + 1}")
            begin = number
        elif END.match(line):
            if begin is None:
                raise CourseError(f"{where}: END SOLUTION without BEGIN, line {number + 1}")
            found.append(_region(lines, begin, number))
            begin = None
        elif re.search(r"###? ?(BEGIN|END) SOLUTION", line):
            raise CourseError(f"{where}: this marker is not read: {line.strip()}")
    if begin is not None:
        raise CourseError(f"{where}: BEGIN SOLUTION without END, line {begin + 1}")
    return found


def _region(lines: list[str], begin: int, end: int) -> Region:
    match = BEGIN.match(lines[begin])
    assert match is not None  # the caller found it with the same pattern
    body = lines[begin + 1 : end]
    split = next((i for i, line in enumerate(body) if INSTEAD.match(line)), len(body))
    instead = tuple(re.sub(r"^( *)# ?", r"\1", line) for line in body[split + 1 :])
    return Region(begin, end, match["indent"], match["stub"], tuple(body[:split]), instead)


def stubbed(notebook: Notebook, tasks: Mapping[str, Task]) -> Notebook:
    """The exercise made from a solved notebook: stubs for solutions, and nothing run. Raises: CourseError."""
    cells = []
    for position, cell in enumerate(notebook.cells):
        source = cell.source
        if cell.is_code:
            where = f"{notebook.name}, cell {position + 1}"
            source = stub_cell(cell, tasks, where)
        cells.append(replace(cell, source=source, outputs=(), execution_count=None))
    return notebook.with_cells(cells)


def stub_cell(cell: Cell, tasks: Mapping[str, Task], where: str) -> str:
    """The source of one cell with its regions replaced. Raises: CourseError for a region outside an answer cell."""
    found = regions(cell.source, where)
    if not found:
        return cell.source
    if cell.task is None:
        raise CourseError(f'{where}: a solution outside an answer cell; give the cell a task="03.1"')
    if cell.task not in tasks:
        raise CourseError(f"{where}: task {cell.task} is not in the registry")
    lines = cell.source.split("\n")
    for region in reversed(found):
        stub = _replacement(region, tasks[cell.task], cell.source, len(found) > 1, where)
        lines[region.first : region.last + 1] = stub
    return "\n".join(lines)


def _replacement(region: Region, task: Task, source: str, is_one_of_many: bool, where: str) -> list[str]:
    if region.stub is not None:
        return [region.indent + region.stub]
    if region.instead:
        return list(region.instead)
    function = _function_around(region, source, where)
    what = f"{task.label}: {task.title}" + (f", {function}" if is_one_of_many else "")
    size = "about 1 line" if region.size == 1 else f"about {region.size} lines"
    message = f"{what} ({size})".replace("\\", "\\\\").replace('"', '\\"')
    return [f'{region.indent}raise NotImplementedError("{message}")']


def _function_around(region: Region, source: str, where: str) -> str:
    """Name of the innermost function that holds the region. Raises: CourseError if there is none."""
    best: tuple[int, str] | None = None
    for node in ast.walk(ast.parse(without_magics(source))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            holds = node.lineno - 1 < region.first and node.end_lineno is not None
            reaches = holds and (node.end_lineno or 0) > region.first
            if reaches and (best is None or node.lineno > best[0]):
                best = (node.lineno, node.name)
    if best is None:
        raise CourseError(f"{where}: a solution outside a function needs `stub: name = ...` or ### INSTEAD")
    return best[1]


def solution_text(source: str) -> str:
    """A solved cell for reading: without markers, and without what stood there instead."""
    lines, number = source.split("\n"), 0
    kept: list[str] = []
    for region in regions(source, "solution"):
        kept += lines[number : region.first]
        kept += region.solution
        number = region.last + 1
    return "\n".join([*kept, *lines[number:]])
