"""A finished picture: what to see, and the same in words.

A notebook that was cloned and not run yet is untrusted, and JupyterLab then shows no bare SVG. An `<img>` with
the SVG inside its address it does show, and only an `<img>` carries an alternative text.
"""

from __future__ import annotations

import base64
from collections.abc import Container
from dataclasses import dataclass
from html import escape
from pathlib import Path

from refengine.viz.svg import Canvas


@dataclass(frozen=True, repr=False)
class Picture:
    """An SVG and its alternative text: one sentence for the whole, then one line per thing in it."""

    svg: str
    alt: str
    width: int  # px
    height: int  # px

    def __post_init__(self) -> None:
        if not self.alt.strip():
            raise ValueError("a picture needs an alternative text, for those who do not see it")

    @classmethod
    def of(cls, canvas: Canvas, alt: str) -> Picture:
        """The picture on a canvas."""
        return cls(canvas.svg(alt), alt, round(canvas.width), canvas.full_height)

    def html(self) -> str:
        """One `<img>` that needs no other file."""
        data = base64.b64encode(self.svg.encode()).decode()
        return (
            f'<img alt="{escape(self.alt)}" width="{self.width}" style="max-width:100%" '
            f'src="data:image/svg+xml;base64,{data}">'
        )

    def _repr_mimebundle_(
        self, include: Container[str] | None = None, exclude: Container[str] | None = None
    ) -> dict[str, str]:
        return {"text/html": self.html(), "text/plain": self.alt}

    def __repr__(self) -> str:
        return self.alt

    def save(self, path: str | Path) -> None:
        """Writes the picture, as a web page if the name ends in `.html`, in words if in `.txt`, else as SVG.

        Mutates: the file.
        """
        path = Path(path)
        content = {".html": self.html(), ".txt": self.alt}.get(path.suffix, self.svg)
        path.write_text(content + "\n", encoding="utf-8")
