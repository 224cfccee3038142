"""The command `python -m tests.conformance`, run as a test; and proof that it would notice a difference."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.__main__ import TRACES, main

AT_LEAST_EQUAL = (
    218  # 60 of V0, 158 of V1: all but hits that end inside a block, with a copy of a Mamba state
)
LAST_LINE = re.compile(r"(\d+)/(\d+) traces equal, (\d+) not supported yet")

Damage = Callable[[Any], Any]


def run(capsys: pytest.CaptureFixture[str], *paths: Path) -> tuple[int, list[str]]:
    """Exit status and printed lines of the command."""
    status = main([str(path) for path in paths])
    return status, capsys.readouterr().out.splitlines()


def test_every_trace_that_the_engine_carries_is_equal(capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = run(capsys)
    assert lines[:-1] == [], "each line is a trace that differs"
    counts = LAST_LINE.fullmatch(lines[-1])
    assert counts is not None, lines[-1]
    equal, total, unsupported = map(int, counts.groups())
    print(lines[-1])
    assert status == 0
    assert equal >= AT_LEAST_EQUAL
    assert equal + unsupported == total == len(list(TRACES.rglob("*.json")))


def load(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((TRACES / "v1" / f"{name}.json").read_text(encoding="utf-8"))
    return document


def damage_trace(name: str, directory: Path, key: str, damage: Damage, place: int) -> int:
    """Writes a copy of a trace in which one expected answer is changed: the first or last that can be.

    Returns: the index of its operation.
    """
    document = load(name)
    can_be = [
        i
        for i, op in enumerate(document["ops"])
        if key in op["expect"] and _changes(damage, op["expect"][key])
    ]
    expect = document["ops"][can_be[place]]["expect"]
    expect[key] = damage(expect[key])
    (directory / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")
    return can_be[place]


def _changes(damage: Damage, value: Any) -> bool:
    return bool(damage(value) != value)


@pytest.mark.parametrize(
    ("name", "key", "damage"),
    [
        ("rand_full_bs4", "num_computed_tokens", lambda tokens: tokens + 4),
        ("rand_full_bs4", "free_queue", lambda ids: ids[::-1]),
        ("rand_full_bs4", "num_free_blocks", lambda count: count - 1),
        ("rand_full_events", "events", lambda events: [*events, {"type": "cleared"}]),
        ("sched_rand_tight", "running", lambda ids: [*ids, "ghost"]),
        ("sched_rand_tight", "scheduled", lambda shares: shares[1:]),
    ],
)
@pytest.mark.parametrize("place", [0, -1], ids=["first", "last"])
def test_a_damaged_answer_is_reported_at_its_operation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, key: str, damage: Damage, place: int
) -> None:
    index = damage_trace(name, tmp_path, key, damage, place)
    status, lines = run(capsys, tmp_path)
    assert status == 1
    assert lines[1:] == ["0/1 traces equal, 0 not supported yet"]
    assert re.match(rf"{name}: op {index} \S+: {key}", lines[0]), lines[0]


def test_a_damaged_hash_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (TRACES / "v1" / "hashes.json").read_text(encoding="utf-8")
    digest = re.findall(r'"digest_hex": ?"([0-9a-f]{64})"', text)[-1]
    flipped = digest[:-1] + ("0" if digest[-1] != "0" else "1")
    (tmp_path / "hashes.json").write_text(text.replace(digest, flipped), encoding="utf-8")
    status, lines = run(capsys, tmp_path)
    assert status == 1
    assert flipped in lines[0]


def test_one_difference_among_equals_fails_the_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage_trace("sched_fcfs_basic", tmp_path, "num_free_blocks", lambda count: count + 1, place=0)
    status, lines = run(capsys, TRACES / "v1" / "sched_prefix_hits.json", tmp_path)
    assert status == 1
    assert lines[-1] == "1/2 traces equal, 0 not supported yet"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no trace"),
        ({"a.json": "{"}, "is not a trace: it is not JSON"),
        ({"a.json": "[]"}, "is not a trace: it names neither a kind nor a family"),
        ({"a.json": '{"kind": "scheduler"}'}, "is not a trace: it has no operations"),
    ],
)
def test_what_is_no_trace_is_said_and_never_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: dict[str, str], message: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    assert main([str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_nothing_compared_is_not_a_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text(
        '{"kind": "tarot", "ops": [{"op": "x", "expect": {}}]}', encoding="utf-8"
    )
    status, lines = run(capsys, tmp_path)
    assert (status, lines) == (1, ["0/1 traces equal, 1 not supported yet"])
