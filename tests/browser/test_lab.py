"""A chapter's pictures in JupyterLab: alive when run, whole when not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from refengine.trace.observer import PoolSnapshot
from refengine.trace.record import Mark, Record, Step
from tests.browser.conftest import Lab

READY = (
    "Python 3 (ipykernel) | Idle"  # the status bar; the toolbar's dot says idle before a kernel is connected
)
CELL = """\
from refengine import viz
from refengine.trace.record import Record
viz.stepper(Record.load("record.json"))
"""


@pytest.fixture()
def notebook(lab: Lab) -> Path:
    """A notebook with one stepper, not run, beside its record of three steps."""
    import nbformat

    allocate = Mark("allocate", "ada", {"num_tokens": 4, "block_ids": [[1]]})
    end = Mark("append", "ada", {"token_id": 5, "finish_reason": "length"})
    start, first = PoolSnapshot([1, 2, 3], [], {}), PoolSnapshot([2, 3], [], {"ada": [[1]]})
    steps = [
        Step([replace(allocate, pool=first)], first),
        Step([], PoolSnapshot([2, 3], [1], {"ada": [[1]]})),
        Step([replace(end, pool=first)], PoolSnapshot([2, 3, 1], [1], {})),
    ]
    Record(steps, "v1", 4, 4, start).save(lab.root / "record.json")
    v4 = nbformat.v4
    python = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}}
    path = lab.root / "stepper.ipynb"
    nbformat.write(v4.new_notebook(cells=[v4.new_code_cell(CELL)], metadata=python), path)
    return path


def test_slider_moves_by_keyboard_and_the_picture_follows(lab: Lab, notebook: Path, page: Any) -> None:
    from playwright.sync_api import expect

    page.goto(lab.address(notebook.name))
    page.get_by_text(READY).wait_for()
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    picture = page.locator(".jp-OutputArea-output img")
    expect(picture).to_have_attribute("alt", _says("after step 0"))
    page.locator(".noUi-handle").focus()
    page.keyboard.press("ArrowRight")
    expect(picture).to_have_attribute("alt", _says("after step 1"))
    page.get_by_role("button", name="next").focus()
    page.keyboard.press("Enter")
    expect(picture).to_have_attribute("alt", _says("after step 2"))
    assert picture.evaluate("image => image.naturalWidth") == 800
    page.get_by_role("button", name="every mark").click()
    page.get_by_text("moment", exact=True).wait_for()  # the slider counts moments from here on
    page.locator(".noUi-handle").focus()
    page.keyboard.press("ArrowLeft")
    expect(picture).to_have_attribute("alt", _says("Step 2, mark 1: ada, append"))


def test_picture_of_an_untrusted_notebook_shows_without_being_run(
    lab: Lab, notebook: Path, page: Any
) -> None:
    import nbformat
    from playwright.sync_api import expect

    from refengine import viz

    saved = nbformat.read(notebook, as_version=4)
    bundle = viz.stepper(Record.load(lab.root / "record.json"))._repr_mimebundle_()
    kept = {kind: bundle[kind] for kind in ("text/html", "text/plain")}
    saved.cells[0].outputs = [nbformat.v4.new_output("execute_result", kept, execution_count=1)]
    nbformat.write(saved, lab.root / "stored.ipynb")
    page.goto(lab.address("stored.ipynb"))
    picture = page.locator(".jp-OutputArea-output img")
    expect(picture).to_have_attribute("alt", _says("after step 0"))
    assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") == 800


def _says(words: str) -> Any:
    import re

    return re.compile(re.escape(words))
