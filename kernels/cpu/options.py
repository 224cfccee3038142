"""How all functions of this backend are compiled, and the types that Python sees in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., Any])
Array = Any  # of numpy; the compiler works the types out from the first call

# Sums may be regrouped, products and sums fused. That there is no NaN and no infinity must not be assumed.
FLAGS: Any = {"error_model": "numpy", "fastmath": {"contract", "reassoc", "nsz", "arcp"}}


def compiled(function: F) -> F:
    """A function that compiled functions call."""
    return cast(F, njit(**FLAGS)(function))


def inlined(function: F) -> F:
    """The same for one whose call would cost more than what it does: its body is put where it is called."""
    return cast(F, njit(forceinline=True, **FLAGS)(function))


def entry(function: Callable[..., None]) -> Any:
    """A function to be called from Python. Its code is kept on disk, and it runs without the interpreter's lock."""
    return njit(cache=True, nogil=True, **FLAGS)(function)
