"""How the command ends: what it says, and its exit status."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from refengine import cli
from refengine.commands import demo


def ended(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    """Exit status of `refengine` with these arguments."""
    monkeypatch.setattr(sys, "argv", ["refengine", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code


@pytest.mark.parametrize("where", ["in a command", "before it"])
def test_ctrl_c_ends_in_one_line(
    where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    module, name = (demo, "run_demo") if where == "in a command" else (cli, "_add_plugins")
    monkeypatch.setattr(module, name, interrupted)
    assert ended(monkeypatch, "demo") == 130
    assert capsys.readouterr().err == "refengine: interrupted\n"


@pytest.mark.parametrize(
    "command", [["demo"], ["follow"], ["bench", "engine"], ["bench", "router"], ["bench", "kernels"]]
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(monkeypatch, *command, "--json", str(tmp_path / "no" / "x.json")) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert ended(monkeypatch, *command, "--json", str(tmp_path)) == 2
    assert "is a folder" in capsys.readouterr().err
