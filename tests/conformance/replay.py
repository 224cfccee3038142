"""Replays a recorded trace on an engine and stops at the first answer that differs.

A trace (see `golden/FORMAT_V1.md`) is a list of operations with the answers of the real vLLM. Every later
answer follows from the earlier ones, so only the first difference says anything. This module knows neither
engine: it drives whatever fulfils `Driver`. That is why the same file can test this repository's engine
(`python -m tests.conformance`) and vLLM itself (`python -m tests.conformance.against_vllm`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

SHOWN_CHARS = 100  # a longer value is cut in the one-line rendering of a difference
MISSING = "(no such key)"


class TraceError(Exception):
    """What was asked to be replayed is not a trace, or holds none. The text is one sentence for the user."""


class NotSupported(Exception):
    """Raised by the constructor of a driver for a configuration that its engine does not carry (yet)."""


class Driver(Protocol):
    """An engine behind the operations of one kind of trace. Its constructor takes the trace's `config`."""

    def apply(self, op: dict[str, Any]) -> dict[str, Any]:
        """Perform one operation and return everything that `expect` may ask for, under the same keys.

        Mutates: the engine behind the driver. Never reads `op["expect"]`.
        """


@dataclass(frozen=True)
class Trace:
    """One trace file: `kind` chooses the driver, `document` is the whole file as read."""

    path: Path
    kind: str
    name: str
    config: dict[str, Any]
    ops: list[dict[str, Any]]
    document: dict[str, Any]


@dataclass(frozen=True)
class Difference:
    """The first answer that differs. `op` is the operation's name, with its request id where it has one."""

    op_index: int
    op: str
    key: str
    expected: Any
    got: Any

    def __str__(self) -> str:
        """One line that starts at the innermost position where both values still have the same shape."""
        if self.key == "exception":
            return f"op {self.op_index} {self.op}: raised {self.got}"
        where, expected, got = _narrow(self.key, self.expected, self.got)
        return f"op {self.op_index} {self.op}: {where}: expected {_show(expected)}, got {_show(got)}"


MakeDriver = Callable[[dict[str, Any]], Driver]
Check = Callable[[Trace], Difference | None]


def load(path: Path | str) -> Trace:
    """Read one trace file.

    A V0 trace says `family` where a V1 trace says `kind`; it becomes the kind `v0.<family>`, because both
    generations have a "scheduler".

    Raises: TraceError if the file cannot be read or is not a trace.
    """
    path = Path(path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise TraceError(f"{path} is not a trace: it is not JSON ({error}).") from error
    if not isinstance(document, dict) or not ("kind" in document or "family" in document):
        raise TraceError(f"{path} is not a trace: it names neither a kind nor a family.")
    kind = str(document["kind"]) if "kind" in document else f"v0.{document['family']}"
    config, ops = document.get("config", {}), document.get("ops", [])
    if not isinstance(config, dict) or not isinstance(ops, list) or not all(map(_is_op, ops)):
        raise TraceError(f"{path} is not a trace: its config or one of its operations is malformed.")
    if not ops and kind != "hashes":
        raise TraceError(f"{path} is not a trace: it has no operations.")
    return Trace(path, kind, str(document.get("name", path.stem)), config, ops, document)


def replay(trace: Trace, make_driver: MakeDriver) -> Difference | None:
    """Apply every operation in order and compare exactly the keys of its `expect`.

    Returns: the first difference, or None when all answers are equal. An exception of an operation is a
    difference under the key `exception`, unless the trace says that vLLM raised one of this name.
    Raises: whatever the driver's constructor does, `NotSupported` above all.
    """
    driver = make_driver(trace.config)
    for index, op in enumerate(trace.ops):
        label = f"{op['op']}({op['id']})" if "id" in op else str(op["op"])
        try:
            answer = dict(driver.apply(op))
        except Exception as error:
            # Where vLLM itself raised, its name for the error is the answer. It is always the last operation.
            return None if op["expect"].get("raises") == type(error).__name__ else raised(index, label, error)
        for key, expected in op["expect"].items():
            got = answer.get(key, MISSING)
            if not same(expected, got):
                return Difference(index, label, key, expected, got)
    return None


def raised(op_index: int, op: str, error: Exception) -> Difference:
    """An exception, as a difference: its type and its text."""
    return Difference(op_index, op, "exception", None, f"{type(error).__name__}: {error}")


def same(expected: Any, got: Any) -> bool:
    """Equality of JSON values. A tuple counts as a list; `True` is not 1."""
    if isinstance(expected, Mapping):
        return (
            isinstance(got, Mapping)
            and expected.keys() == got.keys()
            and all(same(value, got[key]) for key, value in expected.items())
        )
    if _is_list(expected):
        return _is_list(got) and len(expected) == len(got) and all(map(same, expected, got))
    return isinstance(expected, bool) == isinstance(got, bool) and bool(expected == got)


def find_traces(paths: Iterable[Path | str]) -> list[Path]:
    """All trace files below the given folders and files, in a stable order.

    Raises: TraceError if a path does not exist or a folder holds no trace.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise TraceError(f"{path} does not exist.")
        files = sorted(path.rglob("*.json")) if path.is_dir() else [path]
        if not files:
            raise TraceError(f"{path} holds no trace (no .json file).")
        found += files
    return found


def run(paths: Sequence[Path | str], checks: Mapping[str, Check]) -> int:
    """Replay all traces below `paths`, print one line per difference and a last line with the counts.

    `checks` maps a trace's kind to what checks it; a kind that is not listed is "not supported yet".

    Returns: an exit status. 0 only if at least one trace was compared and all compared ones are equal.
    """
    try:
        traces = [load(path) for path in find_traces(paths)]
    except TraceError as error:
        print(error, file=sys.stderr)
        return 2
    equal = unsupported = 0
    for trace in traces:
        try:
            difference = _unknown(trace) if trace.kind not in checks else checks[trace.kind](trace)
        except NotSupported:
            unsupported += 1
            continue
        except Exception as error:
            difference = raised(-1, "(before the first)", error)
        if difference is None:
            equal += 1
        else:
            print(f"{trace.name}: {difference}", flush=True)
    print(f"{equal}/{len(traces)} traces equal, {unsupported} not supported yet")
    return 0 if equal and equal + unsupported == len(traces) else 1


def _unknown(trace: Trace) -> Difference | None:
    raise NotSupported(f"kind {trace.kind!r}")


def _is_op(value: Any) -> bool:
    return isinstance(value, dict) and "op" in value and isinstance(value.get("expect"), dict)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _narrow(where: str, expected: Any, got: Any) -> tuple[str, Any, Any]:
    """Descend while both sides have the same shape and exactly say where they part."""
    if isinstance(expected, Mapping) and isinstance(got, Mapping) and expected.keys() == got.keys():
        pairs = [(f"{where}.{key}", expected[key], got[key]) for key in expected]
    elif _is_list(expected) and _is_list(got) and len(expected) == len(got):
        pairs = [(f"{where}[{i}]", e, g) for i, (e, g) in enumerate(zip(expected, got, strict=True))]
    else:
        return where, expected, got
    return next((_narrow(*pair) for pair in pairs if not same(*pair[1:])), (where, expected, got))


def _show(value: Any) -> str:
    text = value if isinstance(value, str) and value == MISSING else json.dumps(value, default=repr)
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 3]}..."
