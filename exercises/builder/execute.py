"""Running a notebook so that two runs give the same bytes.

One kernel per notebook, from a clean start, without a GPU, without the user's own Jupyter set-up and without
remembering any result. Outputs lose what changes from run to run; what would change and is kept is refused later,
by `leaks`.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from exercises.course import PROGRESS_VARIABLE, ROOT_VARIABLE, Course, CourseError
from exercises.notebook import VOLATILE, Cell, Notebook, from_json, to_json

CELL_SECONDS = 300
KEPT = ("text/plain", "text/html", "text/markdown", "text/latex", "image/png")
# Figures of one size and resolution, and without the version of matplotlib in them.
MATPLOTLIB = """
figure.figsize: 7, 3
figure.dpi: 100
figure.constrained_layout.use: True
"""
INLINE = """
c.InlineBackend.print_figure_kwargs = {"bbox_inches": None, "metadata": {"Software": None}}
c.InlineBackend.figure_formats = {"png"}
"""


def execute(notebook: Notebook, folder: Path, course: Course) -> Notebook:
    """Runs all code cells in a fresh kernel that works in `folder`, and returns the notebook with clean outputs.

    Raises: CourseError with the cell and its error if a cell fails that is not tagged "raises-exception".
    """
    node = nbformat.from_dict(to_json(notebook))  # type: ignore[no-untyped-call]
    client = NotebookClient(
        node,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        record_timing=False,
        store_widget_state=False,
        extra_arguments=[
            "--IPKernelApp.log_level=40"
        ],  # errors only: warnings of the kernel are not the author's
        resources={"metadata": {"path": str(folder)}},
    )
    with _environment(course):
        try:
            client.execute()
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            raise CourseError(f"{notebook.name}: {_failure(error)}") from None
    ran = from_json(notebook.name, node).cells
    return notebook.with_cells(list(_numbered(notebook.cells, ran)))


def _numbered(cells: tuple[Cell, ...], ran: tuple[Cell, ...]) -> Iterator[Cell]:
    """The cells with the outputs of the run, and execution counts 1, 2, 3."""
    count = 0
    for cell, result in zip(cells, ran, strict=True):
        if not cell.is_code:
            yield cell
            continue
        count += 1
        outputs = () if VOLATILE in cell.tags else tuple(_clean(list(result.outputs), count, cell))
        yield replace(cell, outputs=outputs, execution_count=count)


def _clean(outputs: list[dict[str, Any]], count: int, cell: Cell) -> Iterator[dict[str, Any]]:
    """Outputs as they are stored: streams joined, other formats dropped, error without its traceback."""
    stream: dict[str, Any] | None = None
    for output in outputs:
        kind = output["output_type"]
        if kind == "stream":
            if stream is not None and stream["name"] == output["name"]:
                stream["text"] += output["text"]
                continue
            stream = {"output_type": "stream", "name": output["name"], "text": output["text"]}
            yield stream
            continue
        stream = None
        if kind == "error":
            said = f"{output['ename']}: {output['evalue']}"
            yield {
                "output_type": kind,
                "ename": output["ename"],
                "evalue": output["evalue"],
                "traceback": [said],
            }
        else:
            yield _clean_data(output, count, cell)


def _clean_data(output: dict[str, Any], count: int, cell: Cell) -> dict[str, Any]:
    """A shown value. The picture of a cell with `alt` gets that text as its description."""
    kept = {mime: value for mime, value in output["data"].items() if mime in KEPT}
    clean: dict[str, Any] = {"output_type": output["output_type"], "data": kept, "metadata": {}}
    if "image/png" in kept:
        kept["image/png"] = kept["image/png"].replace("\n", "") + "\n"
        given = output.get("metadata", {}).get("image/png", {}).get("alt") or output.get("metadata", {}).get(
            "alt"
        )
        if alt := given or cell.meta.get("alt"):
            clean["metadata"] = {"image/png": {"alt": alt}}
    refused = sorted(set(output["data"]) - set(kept) - {"application/json"})
    if refused and not ({"text/html", "image/png"} & set(kept)):
        clean["metadata"]["refused"] = refused  # `rules` names it: nothing a reader would see is left
    if output["output_type"] == "execute_result":
        clean["execution_count"] = count
    return clean


def _failure(error: Exception) -> str:
    """The end of what nbclient says, which holds the cell's source, the error and its line; without colours."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    return "\n".join(text.strip().splitlines()[-25:])


@contextmanager
def _environment(course: Course) -> Iterator[None]:
    """The same surroundings for every kernel, whatever the author's machine has. Restores the old ones."""
    with tempfile.TemporaryDirectory() as own:
        profile = Path(own) / "profile_default"
        profile.mkdir()
        (profile / "ipython_kernel_config.py").write_text(INLINE)
        (Path(own) / "matplotlibrc").write_text(MATPLOTLIB)
        fixed = {
            "IPYTHONDIR": own,  # no start-up files of the user
            "JUPYTER_CONFIG_DIR": own,
            "MATPLOTLIBRC": str(Path(own) / "matplotlibrc"),
            "JUPYTER_PREFER_ENV_PATH": "1",
            "PYTHONHASHSEED": "0",
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "100",
            "NO_COLOR": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            PROGRESS_VARIABLE: "off",
            ROOT_VARIABLE: str(course.root),
        }
        before = {name: os.environ.get(name) for name in [*fixed, "MPLBACKEND"]}
        os.environ.update(fixed)
        os.environ.pop("MPLBACKEND", None)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
