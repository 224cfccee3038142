"""The machine code that chapter 11 shows is that of the kernels as they are."""

from __future__ import annotations

import pytest

from exercises.tasks import ex11_sass
from kernels import sass


def test_the_file_has_the_kernels_that_the_chapter_names() -> None:
    assert set(ex11_sass.recorded()["rows"]) == set(ex11_sass.kernels())


@pytest.mark.skipif(sass.available() is not None, reason=f"nothing was compiled: {sass.available()}")
def test_compiling_again_gives_what_the_file_holds() -> None:
    assert ex11_sass.compiled() == ex11_sass.recorded(), "run: python -m exercises.tasks.ex11_sass"
