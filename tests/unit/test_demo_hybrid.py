"""The demo on the hybrid model: who could serve what, and the third request."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from refengine import ConfigError
from refengine.commands.demo import DemoOptions, run_demo
from refengine.trace.record import Record

OPTIONS = {"model": "tiny-hybrid", "facts": 4, "questions": 4}


def shown(**options: object) -> str:
    out = io.StringIO()
    run_demo(DemoOptions(**(OPTIONS | options)), Console(file=out, width=120))  # type: ignore[arg-type]
    return out.getvalue()


def rows_of(text: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if "│" in line
    ]


def test_the_third_request_hits_where_the_second_could_not(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    text = shown(json_file=file)
    q1, q2, q3, q4, again = rows_of(text)
    assert q1[2:7] == ["0", "0", "0", "0", ""]
    shared = q2[2]
    assert int(shared) > 32 and q2[2:7] == [shared, "0", "0", "0", shared]
    assert q3[2:7] == q4[2:7] == [shared, shared, shared, shared, ""]
    assert int(again[5]) >= int(shared) and again[7] == q1[7]
    found = [request.hit_tokens for request in Record.load(file).requests()]
    assert found == [int(row[5]) for row in (q1, q2, q3, q4, again)], (
        "what the demo looked up is what was served"
    )


def test_the_same_options_print_the_same() -> None:
    assert shown(seed=3) == shown(seed=3) != shown(seed=4)


def test_numbers_do_not_survive_a_wiped_state() -> None:
    """q4 is the second count; facts are found all the same."""
    whole, wiped = shown(), shown(corrupt=True)
    assert rows_of(whole)[3][7] != rows_of(wiped)[3][7]
    assert "all cached states were set to zero" in wiped


@pytest.mark.parametrize("engine", ["v0", "both"])
def test_v0_has_no_such_demo(engine: str) -> None:
    with pytest.raises(ConfigError, match="V0 has one block table for all layers"):
        shown(engine=engine)
