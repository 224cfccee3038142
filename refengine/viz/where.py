"""The box "In V1 / In V0": where something is in our engine and in vLLM, and since when.

What stands in it comes from the code map (`refengine.trace.codemap`), whose line ranges are checked against the
sources of the two releases.
"""

from __future__ import annotations

from refengine.trace.codemap import Side, Topic, examined, topic, topics, version
from refengine.viz.tables import Table

WRAP = 50  # characters in a cell of the text form


def where_in_vllm(*names: str) -> Table:
    """Two lines per topic, V1 and V0: our symbol, vLLM's symbol with file and lines, since when.

    `names`: ids of topics, as in `where_in_vllm("free_queue")`; none: all that there are. `topics()` of the code
    map lists them. Raises: ValueError, with the nearest id, if there is no such topic.
    """
    chosen = [topic(name) for name in names or topics()]
    rows = [row for one in chosen for row in _rows(one)]
    columns = ("", "ours", "vLLM", "since")
    if len(chosen) == 1:
        return Table(columns, [row[1:] for row in rows], title=f"{chosen[0].title}. {_note()}", wrap=WRAP)
    return Table(("what", *columns), rows, title=_note(), wrap=WRAP)


def _rows(one: Topic) -> list[tuple[str, str, str, str, str]]:
    sides = ((f"In V1 ({version('v1')})", one.v1), (f"In V0 ({version('v0')})", one.v0))
    return [
        (one.title if index == 0 else " ", name, _ours(side), _vllm(side), side.since)
        for index, (name, side) in enumerate(sides)
    ]


def _ours(side: Side) -> str:
    """Symbol and module on lines of their own, as vLLM's beside them: the names are often the same."""
    return "\n".join(f"{symbol}\n  {module}" for module, symbol in map(_split, side.ours)) or side.why


def _split(path: str) -> tuple[str, str]:
    """`refengine.v1.block.KVCacheBlock` into its module and the symbol in it."""
    parts = path.split(".")
    at = next((i for i, part in enumerate(parts) if part[0].isupper()), len(parts) - 1)
    return ".".join(parts[:at]), ".".join(parts[at:])


def _vllm(side: Side) -> str:
    places = "\n".join(f"{place.symbol}\n  {place.where}" for place in side.vllm)
    return places or (side.why if side.ours else "")


def _note() -> str:
    """What "since" means, in one line."""
    seen = examined()
    return f"Since: the first of {len(seen)} releases looked at, {seen[0]} being the oldest."
