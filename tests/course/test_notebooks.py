"""Every chapter and every solved exercise: runs on its own from a clean kernel, and is what is committed.

Each notebook runs once here. A pull request that changes a source without building fails, and so does one that
leaves no notebook at all.
"""

from __future__ import annotations

import pytest

from exercises.builder.build import Source, make, orphans, sources, stale
from exercises.course import current

COURSE = current()
SOURCES = sources(COURSE)


def test_there_are_notebooks() -> None:
    assert any(source.is_chapter for source in SOURCES)
    assert any(not source.is_chapter for source in SOURCES)


def test_no_notebook_without_a_source() -> None:
    assert orphans(COURSE) == []


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_notebook(source: Source) -> None:
    built = make(source, COURSE)
    assert built.problems + stale(built, COURSE) == []
