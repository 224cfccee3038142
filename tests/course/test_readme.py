"""The README's course table is true: every chapter that exists is in it, with the points of the registry."""

from __future__ import annotations

import re
from pathlib import Path

from exercises import tasks

ROOT = Path(__file__).parents[2]
ROW = re.compile(
    r"^\| (\d\d) \| \[.+?\]\((chapters/\S+?)\) \| \[\d\d\]\((exercises/\S+?)\) \| (\d+) \|", re.MULTILINE
)


def rows() -> dict[str, tuple[str, str, int]]:
    """Number -> chapter, exercise, points, as the README has them."""
    found = ROW.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    return {number: (chapter, exercise, int(points)) for number, chapter, exercise, points in found}


def test_every_chapter_is_in_the_table() -> None:
    assert sorted(rows()) == sorted(path.name[:2] for path in (ROOT / "chapters").glob("*.ipynb"))


def test_the_files_exist() -> None:
    for chapter, exercise, _ in rows().values():
        assert (ROOT / chapter).is_file() and (ROOT / exercise).is_file()


def test_the_points_are_those_of_the_registry() -> None:
    expected = {number: sum(task.points for task in tasks.of_exercise(number)) for number in rows()}
    assert {number: points for number, (_, _, points) in rows().items()} == expected
