"""One look at the kernels on this machine's GPU, in under six minutes: `python -m kernels.device_check --out DIR`.

Versions, then whether every kernel is right, then how fast the decode kernels are, what a launch costs, and the
whole engine. Each stage runs in a process of its own: a kernel that reads a wrong address takes everything
that its process has on the GPU with it, and one that hangs cannot be interrupted, only ended. A row is written
when it is measured, so a stage that is ended leaves the rows it has.

Exit status: 0 if every kernel was run and was right, 1 if not, 2 if there is no GPU to run them on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from kernels import gpu_stages

SCHEMA = 1  # of the JSON; raised when a field changes its meaning
BUDGET = 330.0  # seconds
LEAST = 5.0  # seconds, below which a stage is not begun
Row = dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """One question. module: what to run, as `python -m module --stage NAME --rows FILE`. limit: seconds."""

    name: str
    limit: float
    module: str = "kernels.device_check"

    def command(self, rows: Path) -> list[str]:
        """What to start; it writes a line of JSON per row to the file `rows`."""
        return [sys.executable, "-m", self.module, "--stage", self.name, "--rows", str(rows)]


@dataclass(frozen=True)
class StageResult:
    """What came of a stage. Only "ok" means that it ran to its end and no row of it has an error."""

    name: str
    status: str  # ok, failed, timed out, not run
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    error: str = ""


STAGES = (
    Stage("versions", 60),
    Stage("correctness", 180),
    Stage("decode", 120),
    Stage("launch", 60),
    Stage("engine", 90, "refengine.commands.engine_speed"),
)


def run_stage(stage: Stage, limit: float) -> StageResult:
    """Runs a stage in a new process for at most `limit` seconds."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "rows")
        began = time.monotonic()
        try:
            done = subprocess.run(stage.command(path), capture_output=True, text=True, timeout=limit)
            error = (
                _what_went_wrong(done.stderr) or f"exit status {done.returncode}" if done.returncode else ""
            )
            status = "failed" if done.returncode else "ok"
        except subprocess.TimeoutExpired:
            status, error = "timed out", f"ended after {limit:.0f} s"
        seconds = time.monotonic() - began
        lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]  # the last may be cut off
    wrong = sum("error" in row for row in rows)
    if status == "ok" and wrong:
        status, error = "failed", f"{wrong} of {len(rows)} rows have an error"
    return StageResult(stage.name, status, seconds, rows, error)


def check(
    stages: Sequence[Stage],
    budget: float,
    run: Callable[[Stage, float], StageResult] = run_stage,
    clock: Callable[[], float] = time.monotonic,
    tell: Callable[[StageResult], None] = lambda result: None,
) -> list[StageResult]:
    """Runs the stages one after the other, as long as the budget (seconds) lasts. tell: hears of each result."""
    began, results = clock(), []
    for stage in stages:
        left = budget - (clock() - began)
        if left < LEAST:
            result = StageResult(stage.name, "not run", error=f"the budget of {budget:.0f} s was used up")
        else:
            result = run(stage, min(stage.limit, left))
        results.append(result)
        tell(result)
    return results


def all_right(results: Sequence[StageResult]) -> bool:
    """Whether the correctness stage ran to its end and each of its rows says that it passed."""
    rows = [row for r in results if r.name == "correctness" and r.status == "ok" for row in r.rows]
    return bool(rows) and all(row.get("passed") is True for row in rows)


def as_json(results: Sequence[StageResult]) -> dict[str, Any]:
    """The whole outcome: {"schema", "kernels_right", "stages": [{"name", "status", "seconds", "rows", "error"}]}."""
    return {"schema": SCHEMA, "kernels_right": all_right(results), "stages": [asdict(r) for r in results]}


def as_text(result: StageResult) -> str:
    """A stage as a heading and a table, with the columns of its rows in the order in which they appear."""
    about = f"{result.status}, {result.seconds:.0f} s" + (f": {result.error}" if result.error else "")
    columns = list(dict.fromkeys(name for row in result.rows for name in row))
    table = [
        columns,
        *([_cell(name, row[name]) if name in row else "" for name in columns] for row in result.rows),
    ]
    widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    ]
    return "\n".join([f"== {result.name} ({about})", *(lines if columns else [])])


def _cell(column: str, value: Any) -> str:
    """Numbers in the unit that suits them: microseconds, TB/s, percent."""
    if isinstance(value, float):
        if column.endswith("seconds"):
            return f"{value:.2f} s" if value >= 0.1 else f"{value * 1e6:.1f} us"
        if column.endswith("bandwidth"):
            return f"{value / 1e12:.3f} TB/s"
        if column.startswith("share"):
            return f"{value:.0%}"
        return f"{value:.3g}"
    return str(value)


def _what_went_wrong(stderr: str) -> str:
    """The last line that names an error; a process that dies of one may go on to complain about its cleaning up."""
    lines = [line.strip() for line in reversed(stderr.splitlines()) if line.strip()]
    return next((line for line in lines if "Error" in line), lines[0] if lines else "")


def write_rows(stage: str, path: Path) -> None:
    """Runs a stage in this process and writes each row, as a line of JSON, when it is there."""
    with path.open("w") as file:
        for row in gpu_stages.STAGES[stage]():
            print(json.dumps(row), file=file, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns: the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m kernels.device_check", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--out", type=Path, help="folder for device_check.json and device_check.txt")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds for everything")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("There is no CUDA device that torch can use, so no kernel was run.")
        return 2
    if options.stage:
        write_rows(options.stage, options.rows)
        return 0
    results: list[StageResult] = []

    def tell(result: StageResult) -> None:
        results.append(result)
        print(as_text(result), flush=True)
        if options.out is not None:
            save(results, options.out)

    check(STAGES, options.budget, tell=tell)
    print(verdict(results))
    return 0 if all_right(results) else 1


def verdict(results: Sequence[StageResult]) -> str:
    """In one sentence."""
    return "Every kernel is right." if all_right(results) else "NOT SHOWN: that every kernel is right."


def save(results: Sequence[StageResult], folder: Path) -> None:
    """Writes what there is so far as JSON and as text. Called after each stage: the next may be the last."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "device_check.json").write_text(json.dumps(as_json(results), indent=1) + "\n")
    text = "\n\n".join([*map(as_text, results), verdict(results)])
    (folder / "device_check.txt").write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
