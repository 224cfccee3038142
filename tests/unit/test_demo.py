"""The demo: one engine as ever, or both, the same prompts beside each other."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from refengine import ConfigError
from refengine.commands.demo import DemoOptions, run_demo
from refengine.trace.record import Record


def shown(options: DemoOptions, width: int = 120) -> str:
    out = io.StringIO()
    run_demo(options, Console(file=out, width=width))
    return out.getvalue()


def rows_of(text: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if "│" in line
    ]


def test_both_engines_stand_beside_each_other(tmp_path: Path) -> None:
    text = shown(DemoOptions(engine="both", facts=4, questions=3, json_file=tmp_path / "record.json"))
    lines = rows_of(text)
    assert [line[0] for line in lines] == ["q1", "", "q2", "", "q3", ""]
    assert [line[1] for line in lines] == ["V0", "V1"] * 3
    for v0, v1 in zip(lines[::2], lines[1::2], strict=True):
        assert v0[2:5] == v1[2:5] and v0[6] == v1[6], "prompt, hits, steps and answers are the same"
        assert v0[5] != v1[5], "block ids are not: V1 has a null block"
    assert all(int(line[3]) > 0 for line in lines[2:])
    assert len(re.findall(r"^V[01]$", text, re.MULTILINE)) == 2 == text.count("Hit rate")
    for engine in ("v0", "v1"):
        record = Record.load(tmp_path / f"record-{engine}.json")
        assert record.engine == engine
        assert [s.hit_tokens for s in record.requests()] == [int(line[3]) for line in lines[::2]]


@pytest.mark.parametrize("engine", ["v0", "v1"])
def test_one_engine_has_no_column_for_its_name(engine: str, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    text = shown(DemoOptions(engine=engine, facts=3, questions=2, json_file=file))
    assert [len(line) for line in rows_of(text)] == [6, 6]
    assert text.count("Hit rate") == 1 and Record.load(file).engine == engine


def test_an_engine_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="engine 'v2' is not one of"):
        shown(DemoOptions(engine="v2", facts=3, questions=1))
