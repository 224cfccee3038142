"""Every link to a local file or place must lead somewhere.

Places are named with a line `(label)=` in a MyST source, or `<a id="label"></a>`: the ids that GitHub and
JupyterLab make from the words of a heading differ, so a link to a heading itself would work in one of them only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote

from exercises.notebook import Notebook, read

LINK = re.compile(r"(?<!\\)!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
HREF = re.compile(r"""\b(?:href|src)\s*=\s*["']([^"']+)["']""")
ANCHOR = re.compile(r"""<a\s+(?:id|name)\s*=\s*["']([^"']+)["']""")
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)


def broken(notebook: Notebook, folder: Path, made: Mapping[Path, Notebook]) -> Iterator[str]:
    """Sentences on the links of `notebook`, which lies in `folder`, that lead nowhere.

    Args:
        made: notebooks as they will be written, by path; they count before the files on the disk.
    """
    for position, cell in enumerate(notebook.cells):
        if cell.is_code:
            continue
        text = CODE.sub("", cell.source)
        for target in [*LINK.findall(text), *HREF.findall(text)]:
            if problem := _problem(target, notebook, folder, made):
                yield f"cell {position + 1}: the link {target} {problem}"


def anchors(notebook: Notebook) -> set[str]:
    """The places in a notebook that can be linked to."""
    return {label for cell in notebook.cells if not cell.is_code for label in ANCHOR.findall(cell.source)}


def _problem(target: str, notebook: Notebook, folder: Path, made: Mapping[Path, Notebook]) -> str | None:
    if re.match(r"(https?|mailto|data):", target):
        return None
    name, _, label = unquote(target).partition("#")
    if not name:
        return (
            None
            if label in anchors(notebook)
            else "names a place that is not there; write (label)= before it"
        )
    path = (folder / name).resolve()
    other = made.get(path)
    if other is None and not path.exists():
        return "leads to no file"
    if not label:
        return None
    if other is None and path.suffix == ".ipynb":
        other = read(path)
    known = anchors(other) if other else set(ANCHOR.findall(path.read_text(encoding="utf-8")))
    return None if label in known else "names a place that is not in that file"
