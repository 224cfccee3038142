"""The result of one task, in words. The notebook and the terminal show the same ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import Literal

from exercises.grader.report import Row

Status = Literal["passed", "failed", "not started", "not run"]
# A sign and a word carry the status; the colour (Okabe-Ito) only repeats it.
COLOURS: dict[Status, str] = {
    "passed": "#0072B2",
    "failed": "#D55E00",
    "not started": "#999999",
    "not run": "#999999",
}


@dataclass(frozen=True)
class Table:
    """Rows of equal length; the first is the heading."""

    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Result:
    """What is known about a task after a check.

    Args:
        sentence: why it did not pass, where the table does not say it.
        cases: title and whether it passed, in the order they ran.
        failed_case: title of the first case that failed.
        rows: what that case compared: what, expected, got; the last row is the one that differs.
        misconception: its name and why it is wrong.
        not_checked: what this run could not look at.
        slot: the slot of the engine that the answer fills.
    """

    task: str
    title: str
    status: Status
    total: int
    sentence: str = ""
    cases: tuple[tuple[str, bool], ...] = ()
    failed_case: str = ""
    rows: tuple[Row, ...] = ()
    misconception: tuple[str, str] | None = None
    not_checked: tuple[str, ...] = field(default=())
    slot: str | None = None

    @property
    def points(self) -> int:
        """All or nothing: a part that is nearly right does not run in the engine."""
        return self.total if self.status == "passed" else 0

    def document(self) -> list[str | Table]:
        """The content, one paragraph or table after the other; the first is the headline."""
        blocks: list[str | Table] = [
            f"{self.task} {self.title}: {self.status}, {self.points} of {self.total} points"
        ]
        right = sum(passed for _, passed in self.cases)
        if self.status == "passed":
            blocks.append(f"Checked: {'; '.join(title for title, _ in self.cases)}.")
        elif self.status == "failed" and self.failed_case:
            blocks.append(
                f"{right} of {len(self.cases)} cases are right. The first that is not: {self.failed_case}."
            )
        if self.rows:
            blocks.append(Table((("", "expected", "got"), *self.rows)))
        if self.sentence:
            blocks.append(self.sentence)
        if self.misconception:
            name, why = self.misconception
            blocks.append(f"This looks like: {name}. {why}")
        blocks += [f"Not checked: {note}." for note in self.not_checked]
        if self.status == "passed" and self.slot:
            blocks.append(
                "Save the notebook, and the engine can run on your part: refengine demo --parts mine"
            )
        if self.status == "failed":
            blocks.append(f"For a hint, in a terminal: refengine hint {self.task}")
        return blocks

    def as_dict(self) -> dict[str, object]:
        """For --json."""
        return {
            "task": self.task,
            "title": self.title,
            "status": self.status,
            "points": self.points,
            "total": self.total,
            "sentence": self.sentence,
            "cases": [{"title": title, "passed": passed} for title, passed in self.cases],
            "failed_case": self.failed_case,
            "rows": [list(row) for row in self.rows],
            "misconception": list(self.misconception) if self.misconception else None,
            "not_checked": list(self.not_checked),
            "slot": self.slot,
        }

    def __str__(self) -> str:
        head, *rest = self.document()
        lines = [str(head)]
        for block in rest:
            lines += (
                _text_table(block)
                if isinstance(block, Table)
                else [f"  {line}" for line in block.split("\n")]
            )
        return "\n".join(lines)

    __repr__ = __str__  # what a plain Python prompt shows

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """What Jupyter shows: the same words, set as HTML."""
        return {"text/plain": str(self), "text/html": self._html()}

    def _html(self) -> str:
        head, *rest = self.document()
        colour = COLOURS[self.status]
        parts = [f'<div role="status" style="border-left:4px solid {colour};padding-left:10px">']
        parts.append(f"<b>{escape(str(head))}</b>")
        parts += [_html_table(b) if isinstance(b, Table) else f"<div>{_html_text(b)}</div>" for b in rest]
        return "\n".join([*parts, "</div>"])


def from_dict(data: dict[str, object]) -> Result:
    """The inverse of `as_dict`: results cross from the child process as JSON."""
    fields = dict(data)
    fields.pop("points")
    cases: list[dict[str, object]] = fields.pop("cases")  # type: ignore[assignment]  # as `as_dict` wrote it
    fields["cases"] = tuple((case["title"], case["passed"]) for case in cases)
    for name in ("rows", "not_checked"):
        items: list[object] = fields[name]  # type: ignore[assignment]
        fields[name] = tuple(tuple(item) if isinstance(item, list) else item for item in items)
    if isinstance(fields["misconception"], list):
        fields["misconception"] = tuple(fields["misconception"])
    return Result(**fields)  # type: ignore[arg-type]


def _text_table(table: Table) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table.rows, strict=True)]
    return [
        ("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in table.rows
    ]


def _html_table(table: Table) -> str:
    def row(cells: tuple[str, ...], tag: str) -> str:
        return (
            "<tr>" + "".join(f'<{tag} style="text-align:left">{escape(c)}</{tag}>' for c in cells) + "</tr>"
        )

    head, *body = table.rows
    return "<table>" + row(head, "th") + "".join(row(cells, "td") for cells in body) + "</table>"


def _html_text(text: str) -> str:
    return escape(text).replace("\n", "<br>")
