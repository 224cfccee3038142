"""Where it is in vLLM: for each thing that the book shows, our symbol and those of both generations.

Two kinds of data lie beside this module, in `codemap/`. `topics.json` has one entry per thing ("the free queue"),
with vLLM's symbols at the two pinned releases and since when they are so. `v1.json`, `v0.json` and
`v1_early.json` are call paths: what one request passes through, in order. `followed.json` lists those of our own
functions that `refengine follow` watches, with their counterparts. A line range covers a whole definition,
decorators included. Nothing is from memory: `verify` compares every range with the sources of the release.

"Since" is counted in the releases that were looked at (`examined`): the first of them that has it.
"""

from __future__ import annotations

import ast
import inspect
import json
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from refengine.config import near_match
from refengine.trace.observer import MarkKind

SCHEMA = 1
HERE = Path(__file__).with_suffix("")  # the folder of the data
Generation = Literal["v0", "v1"]
PATHS = ("v0", "v1", "v1_early")
WHO_DECIDES = "who_decides_which_blocks_are_computed"
WHO_SKIPS = "who_skips_computing_those_tokens"


@dataclass(frozen=True)
class Place:
    """A definition in a release of vLLM. `file` begins with `vllm/`; the lines are those of the release."""

    symbol: str
    file: str
    first_line: int
    last_line: int

    @property
    def where(self) -> str:
        """`v1/core/kv_cache_manager.py 629-638`."""
        return f"{self.file.removeprefix('vllm/')} {self.first_line}-{self.last_line}"

    def __str__(self) -> str:
        return f"{self.symbol}, {self.where}"


@dataclass(frozen=True)
class Side:
    """One generation's answer. Where `ours` or `vllm` is empty, `why` says why."""

    ours: tuple[str, ...]  # dotted paths that can be imported
    vllm: tuple[Place, ...]
    since: str
    why: str = ""


@dataclass(frozen=True)
class Topic:
    """One thing, and where it is."""

    id: str
    title: str
    v1: Side
    v0: Side


@dataclass(frozen=True)
class CallStep:
    """One stop on the path of a request, with what is decided there."""

    component: str
    place: Place
    role: str
    decides: str
    focus_line: int | None  # the line to look at first
    answers: str | None  # which of the book's two questions is answered here


@dataclass(frozen=True)
class Stop:
    """One of our functions on the path of a request, and its counterparts in vLLM, the nearest one first."""

    ours: str  # dotted path
    component: str
    mark: MarkKind | None  # which of the six marks is made here or below
    vllm: tuple[Place, ...]
    focus_line: int | None  # of the first place: the line to look at first
    answers: str | None  # which of the book's two questions is answered here


@cache
def _document(name: str) -> dict[str, Any]:
    path = HERE / f"{name}.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    if document.get("schema") != SCHEMA:
        raise ValueError(f"{path} is not a code map of schema {SCHEMA}")
    return dict(document)


@cache
def topics() -> dict[str, Topic]:
    """All topics by their id, in the order of the book. Treat it as read-only."""
    raw = _document("topics")["topics"]
    return {t["id"]: Topic(t["id"], t["title"], _side(t["v1"]), _side(t["v0"])) for t in raw}


def topic(name: str) -> Topic:
    """One topic by its id. Raises: ValueError, with the nearest id, if there is none."""
    known = topics()
    if name not in known:
        hint = near_match(name, list(known)) or f"; there are {', '.join(known)}"
        raise ValueError(f"the code map has no topic {name!r}{hint}")
    return known[name]


def version(generation: Generation) -> str:
    """The release in which a generation is looked at."""
    return str(_document("topics")["versions"][generation])


def examined() -> tuple[str, ...]:
    """The releases that were looked at to say since when, oldest first."""
    return tuple(_document("topics")["examined"])


def call_path(name: str) -> list[CallStep]:
    """What one request passes through: "v0" and "v1_early" in 0.7.3, "v1" in 0.33.0.

    Raises: ValueError, with the nearest name, if there is no such path.
    """
    if name not in PATHS:
        raise ValueError(f"{name!r} is no call path; there are {', '.join(PATHS)}{near_match(name, PATHS)}")
    return [
        CallStep(
            raw["component"],
            Place(raw["qualname"], raw["file"], raw["first_line"], raw["last_line"]),
            raw["role"],
            raw["decides"],
            raw["focus_line"],
            raw["answers"],
        )
        for raw in _document(name)["steps"]
    ]


@cache
def followed(generation: Generation) -> tuple[Stop, ...]:
    """Our functions that a request passes through, in the order in which it reaches them."""
    return tuple(
        Stop(
            raw["ours"],
            raw["component"],
            raw["mark"],
            tuple(Place(**place) for place in raw["vllm"]),
            raw["focus_line"],
            raw["answers"],
        )
        for raw in _document("followed")["paths"][generation]["stops"]
    )


def our_place(ours: str) -> Place:
    """Where one of our functions stands: its file, and its lines as they are now."""
    function = inspect.unwrap(resolve(ours))
    lines, first = inspect.getsourcelines(function)
    module, symbol = function.__module__, function.__qualname__
    return Place(symbol, f"{module.replace('.', '/')}.py", first, first + len(lines) - 1)


def resolve(path: str) -> Any:
    """What a dotted path leads to: the longest part of it that is a module, then attributes.

    Raises: ModuleNotFoundError, AttributeError.
    """
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        try:
            found: Any = import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name and not name.startswith(f"{error.name}."):
                raise
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(path)


def _side(raw: dict[str, Any]) -> Side:
    places = tuple(Place(**place) for place in raw["vllm"])
    return Side(tuple(raw["ours"]), places, raw["since"], raw.get("why", ""))


# -- is it still true? --------------------------------------------------------------------------------------


def verify(package_root: str | Path, release: str) -> list[str]:
    """Compares every range of a release with its sources. Returns: what is wrong, one sentence each.

    `package_root` is the folder that holds `vllm/`, installed or unpacked; nothing of it is imported or run.
    Raises: ValueError if the code map says nothing about `release`, or the folder holds no vLLM.
    """
    root = Path(package_root)
    if not (root / "vllm").is_dir():
        raise ValueError(f"{root} holds no folder vllm")
    places = places_in(release)
    if not places:
        raise ValueError(f"the code map says nothing about release {release!r}")
    return [problem for place in places if (problem := _problem(root, place))]


def places_in(release: str) -> list[Place]:
    """Every definition of a release that topics or call paths name, each once."""
    named: list[Place] = []
    for t in topics().values():
        named += t.v1.vllm if version("v1") == release else ()
        named += t.v0.vllm if version("v0") == release else ()
    for name in PATHS:
        if _document(name)["version"] == release:
            named += [step.place for step in call_path(name)]
    for generation, path in _document("followed")["paths"].items():
        if path["version"] == release:
            named += [place for stop in followed(generation) for place in stop.vllm]
    return list(dict.fromkeys(named))


def _problem(root: Path, place: Place) -> str:
    """What is wrong with a place, or nothing."""
    path = root / place.file
    if not path.is_file():
        return f"{place.symbol}: there is no file {place.file}"
    found = _definitions(path).get(place.symbol, [])
    if (place.first_line, place.last_line) in found:
        return ""
    where = ", ".join(f"{first}-{last}" for first, last in found)
    return f"{place}: " + (f"it is at {where}" if found else "there is no such definition in that file")


@cache
def _definitions(path: Path) -> dict[str, list[tuple[int, int]]]:
    """Classes and functions of a file by qualified name, with first (decorators included) and last line."""
    found: dict[str, list[tuple[int, int]]] = {}

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                found.setdefault(prefix + node.name, []).append((first, node.end_lineno or first))
            if isinstance(node, ast.ClassDef):
                walk(node.body, f"{prefix}{node.name}.")

    walk(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return found
