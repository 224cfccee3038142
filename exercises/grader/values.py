"""Comparing and showing values.

The rule for numbers: whole numbers, booleans, bytes and text must be equal. Floating-point numbers may differ by
`atol + rtol * |expected|`, by the coarser of the two dtypes, since a right answer may add up in another order:

    dtype      rtol   atol
    float64    1e-9   1e-9
    float32    1e-4   1e-5
    float16    2e-3   1e-3
    bfloat16   2e-2   1e-2

A check that needs another bound says so in its call, and the result names the bound.
"""

from __future__ import annotations

import operator
import re
from typing import Any

import numpy as np

TOLERANCE = {
    "float64": (1e-9, 1e-9),
    "float32": (1e-4, 1e-5),
    "float16": (2e-3, 1e-3),
    "bfloat16": (2e-2, 1e-2),
}
LONGEST = 160  # characters of a value in a table


def show(value: object) -> str:
    """A value for a table: short, on one line, without addresses of objects."""
    try:
        text = value if isinstance(value, str) and "\n" not in value and _is_phrase(value) else repr(value)
    except Exception as error:  # the learner's __repr__ may be broken, and that is not what is judged
        text = f"an object of type {type(value).__name__} whose repr raises {type(error).__name__}"
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", re.sub(r"\s+", " ", text))
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 20]} ... ({len(text)} chars)"


def _is_phrase(text: str) -> bool:
    """Plain words, as in "raises ValueError", are shown without quotes."""
    return " " in text


def kind_of(value: object) -> str:
    """The type in plain words."""
    words = {int: "a whole number", bool: "True or False", float: "a number with a fraction", str: "text"}
    words |= {
        list: "a list",
        tuple: "a tuple",
        dict: "a dict",
        set: "a set",
        bytes: "bytes",
        type(None): "None",
    }
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return words.get(type(value)) or f"an object of type {type(value).__name__}"


def plain(value: Any) -> Any:
    """Removes differences of form that no check is about: numpy ints become int, tuples become lists."""
    if isinstance(value, (bool, str, bytes)) or value is None:
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()} if _hashable(value) else value
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return operator.index(value)
    return value


def _hashable(value: dict[Any, Any]) -> bool:
    """Keys that are tuples would become lists, which cannot be keys."""
    return not any(isinstance(key, (list, tuple)) for key in value)


def equal(expected: Any, got: Any) -> bool:
    """Exact equality after `plain`; True is not 1, and an object whose == fails or is no bool is not equal."""
    expected, got = plain(expected), plain(got)
    if isinstance(expected, bool) != isinstance(got, bool):
        return False
    try:
        return bool(expected == got)
    except Exception:  # ambiguous truth of an array, or the learner's __eq__: different is all that matters
        return False


def difference(expected: Any, got: Any, rtol: float | None = None, atol: float | None = None) -> str | None:
    """None if the two are close, else one sentence on where they differ.

    Args:
        expected, got: numbers, nested lists, numpy arrays or torch tensors.
        rtol, atol: instead of the table at the head of this module.
    """
    try:
        (want, want_type), (have, have_type) = _array(expected), _array(got)
    except (TypeError, ValueError):
        return f"expected numbers, got {kind_of(got)}"
    if want.shape != have.shape:
        return f"expected the shape {list(want.shape)}, got {list(have.shape)}"
    bounds = [TOLERANCE[name] for name in (want_type, have_type) if name in TOLERANCE]
    default_rtol, default_atol = max(bounds, default=(0.0, 0.0))
    rtol, atol = default_rtol if rtol is None else rtol, default_atol if atol is None else atol
    bad = ~np.isclose(have, want, rtol=rtol, atol=atol, equal_nan=True)
    if not bad.any():
        return None
    where = tuple(int(axis[0]) for axis in np.nonzero(bad)) if want.shape else ()
    place = f"at index {list(where)}: " if where else ""
    counted = f"; {int(bad.sum())} of {bad.size} numbers differ" if bad.size > 1 else ""
    allowed = f" (allowed: {atol:g} + {rtol:g} of the expected value)" if rtol or atol else ""
    digits = ".7g" if {want_type, have_type} & set(TOLERANCE) else ".0f"  # of whole numbers every digit
    return f"{place}expected {want[where]:{digits}}, got {have[where]:{digits}}{counted}{allowed}"


def _array(value: Any) -> tuple[np.ndarray[Any, np.dtype[np.float64]], str]:
    """As float64, and the name of the dtype it had."""
    if hasattr(value, "detach"):  # a torch tensor, without importing torch here
        return value.detach().cpu().double().numpy(), str(value.dtype).removeprefix("torch.")
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise TypeError("not numbers")
    return array.astype(np.float64), array.dtype.name


def unanswered(value: Any) -> bool:
    """True if `...` stands anywhere in it: the mark of a value that was not filled in."""
    if value is ...:
        return True
    if isinstance(value, dict):
        return any(unanswered(item) for item in [*value.keys(), *value.values()])
    return isinstance(value, (list, tuple, set, frozenset)) and any(unanswered(item) for item in value)


def wrong_type(wanted: object, value: Any) -> str | None:
    """None if `value` is of the wanted kind, else what was wanted, in plain words."""
    if wanted is type:
        return None if isinstance(value, type) else "the class itself, without calling it"
    if isinstance(wanted, type):
        return None if _is_a(wanted, value) else f"{_name(wanted)}"
    return None if callable(value) and not isinstance(value, type) else "a function, without calling it"


def _is_a(wanted: type, value: Any) -> bool:
    value = plain(value)
    if wanted is bool or isinstance(value, bool):
        return isinstance(value, wanted) and isinstance(value, bool) == (wanted is bool)
    if wanted is float:
        return isinstance(value, (int, float, np.floating))
    if wanted is tuple:
        return isinstance(value, list)
    return isinstance(value, wanted)


def _name(wanted: type) -> str:
    words = {int: "a whole number", bool: "True or False", float: "a number", str: "text in quotes"}
    words |= {list: "a list", tuple: "a tuple", dict: "a dict", set: "a set", bytes: "bytes"}
    return words.get(wanted) or f"an object of type {wanted.__name__}"
