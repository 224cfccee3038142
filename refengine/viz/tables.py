"""Tables that read the same in a terminal, in a notebook and through a screen reader.

`repr` gives aligned text, JupyterLab shows HTML, and both hold the same cells, so an untrusted notebook, a test
and a person on a telephone see one result.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import zip_longest
from typing import Any

from refengine.trace.observer import MarkKind
from refengine.trace.record import Mark, Record, RequestSummary
from refengine.viz.state import PoolState, ordinal, ranges

GAP = "  "


@dataclass(frozen=True, repr=False)
class Table:
    """Rows of plain values under named columns. Numbers and whatever is `right` stand to the right.

    Raises: ValueError if a row has more or fewer cells than there are columns.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    title: str = ""
    right: Container[str] = field(default_factory=tuple)  # columns of text that line up to the right
    wrap: int = 0  # characters: longer cells of the text form go on below; 0: never

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{len(self.columns)} columns, but a row of {len(row)} cells: {list(row)}")

    def _lines(self, cell: str) -> list[str]:
        """A cell of the text form, in lines that are not broken inside a word."""
        lines = cell.split("\n")
        if not self.wrap:
            return lines
        return [
            part
            for line in lines
            for part in textwrap.wrap(line, self.wrap, break_long_words=False, break_on_hyphens=False) or [""]
        ]

    def _html(self, cell: str) -> str:
        """A cell of the HTML form. Where the text form wraps, a long name may be broken behind a dot or a bar."""
        lines = [escape(line) for line in cell.split("\n")]
        if self.wrap:
            lines = [re.sub(r"([._/])(?=[A-Za-z]\w\w)", r"\1<wbr/>", line) for line in lines]
        indented = [re.sub("^ +", lambda found: "\u00a0" * len(found[0]), line) for line in lines]
        return "<br/>".join(indented)

    def _is_right(self, index: int) -> bool:
        cells = [row[index] for row in self.rows]
        numbers = bool(cells) and all(
            isinstance(cell, int | float) and not isinstance(cell, bool) for cell in cells
        )
        return numbers or self.columns[index] in self.right

    def __repr__(self) -> str:
        """Aligned text. A cell with several lines makes its row as high."""
        lines = [[[column] for column in self.columns]]
        lines += [[self._lines(_text(cell)) for cell in row] for row in self.rows]
        widths = [max(len(line) for row in lines for line in row[i]) for i in range(len(self.columns))]
        sides = [self._is_right(i) for i in range(len(self.columns))]
        aligned = (
            GAP.join(
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(line, widths, sides, strict=True)
            ).rstrip()
            for row in lines
            for line in zip_longest(*row, fillvalue="")
        )
        return "\n".join(([self.title] if self.title else []) + list(aligned))

    def _repr_html_(self) -> str:
        sides = ["right" if self._is_right(i) else "left" for i in range(len(self.columns))]

        def line(tag: str, cells: Iterable[str]) -> str:
            return "".join(
                f'<{tag} style="text-align:{side};vertical-align:top;padding:2px 8px;line-height:1.4">'
                f"{self._html(cell)}</{tag}>"
                for side, cell in zip(sides, cells, strict=True)
            )

        caption = f'<caption style="text-align:left">{escape(self.title)}</caption>' if self.title else ""
        head = f"<thead><tr>{line('th', self.columns)}</tr></thead>"
        body = "".join(f"<tr>{line('td', map(_text, row))}</tr>" for row in self.rows)
        return f"<table>{caption}{head}<tbody>{body}</tbody></table>"


def _text(cell: Any) -> str:
    """A cell in words: a truth value as yes or no, nothing as a dash."""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return "-" if cell is None or cell == "" else str(cell)


# -- the tables of the book ---------------------------------------------------------------------------------


def block_table(state: PoolState, block_ids: Iterable[int] | None = None) -> Table:
    """The three facts about each block (or about `block_ids`): used, free (place in the queue), cached."""
    chosen = [state.facts(i) for i in (state.block_ids if block_ids is None else block_ids)]
    rows = [(f.block_id, f.used, ordinal(f.place) if f.place else None, f.cached) for f in chosen]
    return Table(("block", "used", "free", "cached"), rows, right=("free", "cached"))


def queue_table(state: PoolState) -> Table:
    """The free queue from its front, which is handed out next, to its back."""
    rows = [(ordinal(i + 1), block_id, block_id in state.cached) for i, block_id in enumerate(state.free)]
    return Table(("place", "block", "cached"), rows, right=("place", "cached"))


def request_table(record: Record) -> Table:
    """One line per request: what it found, what it computed in which step, and how it ended."""
    columns = (
        "request",
        "tokens",
        "hit",
        "step: computed",
        "blocks found | own",
        "output",
        "preempted",
        "end",
    )
    rows = [
        (
            s.request_id,
            s.num_prompt_tokens,
            s.hit_tokens,
            _scheduled(s),
            f"{ranges(s.block_ids[: s.num_shared_blocks])} | {ranges(s.block_ids[s.num_shared_blocks :])}",
            s.num_output_tokens,
            s.num_preemptions,
            s.finish_reason,
        )
        for s in record.requests()
    ]
    return Table(columns, rows)


def _scheduled(summary: RequestSummary) -> str:
    """`2: 37, 3-9: 1 each`: steps in a row that computed the same number of tokens are folded."""
    runs: list[tuple[int, int, int]] = []  # first step, last step, tokens
    for step, tokens in summary.scheduled:
        if runs and runs[-1][1:] == (step - 1, tokens):
            runs[-1] = (runs[-1][0], step, tokens)
        else:
            runs.append((step, step, tokens))
    return ", ".join(f"{a}: {n}" if a == b else f"{a}-{b}: {n} each" for a, b, n in runs)


def marks_table(record: Record, step: int, at: Mark | None = None) -> Table:
    """Every mark of one step, in the order in which it happened; an arrow points at the mark `at`."""
    rows = [
        (f"→ {number}" if mark is at else str(number), mark.kind, mark.request_id, describe(mark))
        for number, mark in enumerate(record.steps[step].marks, 1)
    ]
    return Table(("", "mark", "request", "what was decided"), rows, title=f"step {step}", right=("",))


def describe(mark: Mark) -> str:
    """What a mark decided, in words: `hit 24 of 27 tokens, blocks 1-6`."""
    return _WORDS[mark.kind](mark.facts)


def _blocks(groups: Sequence[Sequence[int]]) -> str:
    """`block 3`, `blocks 1-6`, `no new block`; groups apart by a bar."""
    if not any(groups):
        return "no new block"
    one = sum(len(ids) for ids in groups) == 1
    return ("block " if one else "blocks ") + " | ".join(ranges(ids) for ids in groups)


def _lookup(facts: dict[str, Any]) -> str:
    found = f", {_blocks(facts['block_ids'])}" if any(facts["block_ids"]) else ""
    return f"hit {facts['hit_tokens']} of {_tokens(facts['num_tokens'])}{found}"


def _admit(facts: dict[str, Any]) -> str:
    """`yes: new`, `not now: not enough free blocks`, `preempted: ...`."""
    if facts["reason"].startswith("preempted"):
        return str(facts["reason"])
    return f"{'yes' if facts['admitted'] else 'not now'}: {facts['reason']}"


def _allocate(facts: dict[str, Any]) -> str:
    """V0 gives no number of tokens: it allocates for the whole prompt."""
    count = facts["num_tokens"]
    return _blocks(facts["block_ids"]) + (f" for {_tokens(count)}" if count else "")


def _tokens(count: int) -> str:
    return f"{count} token{'' if count == 1 else 's'}"


def _run(facts: dict[str, Any]) -> str:
    start, count = facts["start"], facts["num_tokens"]
    return f"position {start}" if count == 1 else f"positions {start} to {start + count - 1}"


_WORDS: dict[MarkKind, Callable[[dict[str, Any]], str]] = {
    "lookup": _lookup,
    "admit": _admit,
    "allocate": _allocate,
    "publish": lambda facts: _blocks([facts["block_ids"]]),
    "run": _run,
    "append": lambda facts: (
        f"token {facts['token_id']}" + (f", ends: {facts['finish_reason']}" if facts["finish_reason"] else "")
    ),
}
