"""What kernels did to memory, line by line."""

from __future__ import annotations

import difflib
import html
from dataclasses import dataclass, field, fields
from typing import Any

SECTOR = 32  # bytes


@dataclass
class Record:
    """Accesses of one line to one array, summed over the launches.

    Units: lanes are accesses of single threads, requests those of warps; bytes are distinct within a request;
    sectors are the 32-byte pieces of global memory that requests touch; wavefronts are the passes over the banks
    of shared memory, one for a request without a bank conflict. Local arrays are counted (lanes and bytes) at the
    line that asks for them.
    """

    kernel: str = ""
    function: str = ""  # the kernel itself, or the device function that the line is in
    line: int = 0
    source: str = ""
    space: str = ""  # "global", "shared", "local" or "const"
    kind: str = ""  # "read", "write" or "atomic"
    array: str = ""  # the argument of the kernel, or the variable of an allocation
    requests: int = 0
    lanes: int = 0
    bytes: int = 0
    sectors: int = 0
    wavefronts: int = 0
    least: int = 0  # what the best access pattern would need, in 1/32 of a sector or wavefront

    @property
    def efficiency(self) -> float:
        """Sectors (or wavefronts) that these bytes need at least / those that were needed; 1.0 is best."""
        used = self.sectors + self.wavefronts
        return self.least / (SECTOR * used) if used else 1.0

    def add(self, other: Record) -> None:
        """Adds the counts of another. Mutates: this record."""
        for name in COUNTED:
            setattr(self, name, getattr(self, name) + getattr(other, name))


IDENTITY = ("kernel", "function", "line", "source", "space", "kind", "array")
COUNTED = tuple(f.name for f in fields(Record) if f.name not in IDENTITY)
SHOWN = ("requests", "bytes", "sectors", "wavefronts")


@dataclass(repr=False)
class Report:
    """The accesses of all launches inside one `interpret`.

    Attributes: launches; accesses (of single threads; a vector access is one); barriers passed, summed over
    blocks; shuffles (of warps; `shfl_*` only) and votes (`ballot`, `all`, `any`, `eq`, `match`), `syncwarp`s;
    atomics (of single threads).
    """

    launches: int = 0
    barriers: int = 0
    shuffles: int = 0
    votes: int = 0
    warp_syncs: int = 0
    _records: dict[tuple[Any, ...], Record] = field(default_factory=dict)
    _arrays: set[str] = field(default_factory=set)

    @property
    def lines(self) -> list[Record]:
        """One record per line, array and kind, in the order of the source."""
        return sorted(self._records.values(), key=lambda r: (r.kernel, r.function, r.line, r.array, r.kind))

    @property
    def accesses(self) -> int:
        return sum(record.lanes for record in self._records.values())

    @property
    def atomics(self) -> int:
        return sum(record.lanes for record in self._records.values() if record.kind == "atomic")

    def total(
        self,
        space: str | None = None,
        kind: str | None = None,
        array: str | None = None,
        kernel: str | None = None,
    ) -> Record:
        """The sum over the lines that match, for example `total("global", "read", "key_cache").sectors`.

        Raises: ValueError for an array that no launch had; one that was never touched counts zero.
        """
        if array is not None and array not in self._arrays:
            near = difflib.get_close_matches(array, self._arrays, 1) or sorted(self._arrays)
            raise ValueError(f"no kernel had an array {array!r}; there is {', '.join(near) or 'none at all'}")
        wanted = {"space": space, "kind": kind, "array": array, "kernel": kernel}
        wanted = {name: value for name, value in wanted.items() if value is not None}
        total = Record(**wanted)  # type: ignore[arg-type]
        for record in self._records.values():
            if all(getattr(record, name) == value for name, value in wanted.items()):
                total.add(record)
        return total

    def add_launch(self, arrays: list[str], records: list[Record], passed: dict[str, int]) -> None:
        """Notes a launch: its arrays, what was done to them, and how often threads met at what.

        Mutates: the report.
        """
        for record in records:
            key = tuple(getattr(record, name) for name in IDENTITY)
            self._records.setdefault(key, Record(*key)).add(record)
            self._arrays.add(record.array)
        self.launches += 1
        self._arrays |= set(arrays)
        for name, times in passed.items():
            if name.startswith("syncthreads"):
                self.barriers += times
            elif name.startswith("shfl"):
                self.shuffles += times
            elif name == "syncwarp":
                self.warp_syncs += times
            elif not name.startswith("activemask"):
                self.votes += times

    def table(self) -> str:
        """The lines as an aligned text table, and what was synchronised below it."""
        rows = self._rows()
        widths = [max(map(len, texts)) for texts in zip(*rows, strict=True)]
        numeric = [False, True, False, False, False] + [True] * (len(rows[0]) - 6) + [False]
        lines = []
        for row in rows:
            cells = zip(row, widths, numeric, strict=True)
            lines.append("  ".join(t.rjust(w) if right else t.ljust(w) for t, w, right in cells).rstrip())
        return "\n".join([*lines, self._footer()])

    def _rows(self) -> list[tuple[str, ...]]:
        head = ("kernel", "line", "array", "space", "kind", *SHOWN, "efficiency", "source")
        rows: list[tuple[str, ...]] = [head]
        for r in self.lines:
            counts = (str(getattr(r, name)) for name in SHOWN)
            used = f"{r.efficiency:.2f}" if r.sectors + r.wavefronts else ""
            rows.append(
                (r.function or r.kernel, str(r.line), r.array, r.space, r.kind, *counts, used, r.source)
            )
        return rows

    def _footer(self) -> str:
        return (
            f"{self.launches} launches, {self.accesses} accesses, {self.barriers} barriers, "
            f"{self.shuffles} shuffles, {self.atomics} atomics"
        )

    def __str__(self) -> str:
        return self.table()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *rows = self._rows()
        cells = "".join(f"<th>{html.escape(text)}</th>" for text in head)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in row[:-1])
            + f"<td style='text-align:left'><code>{html.escape(row[-1])}</code></td></tr>"
            for row in rows
        )  # fmt: skip
        return f"<table><tr>{cells}</tr>{body}</table><p>{html.escape(self._footer())}</p>"
