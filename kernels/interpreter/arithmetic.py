"""Numbers as a GPU has them: casts that round and wrap, and functions that give infinity instead of raising.

Between casts and stores the interpreter computes with Python's numbers: floats are doubles, and integers do not
overflow.
"""

from __future__ import annotations

import builtins
import ctypes
import math
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from kernels.interpreter.elements import convert


class Cast:
    """A type of Numba or numpy inside a kernel: a conversion when called, and the dtype of an allocation.

    The result is a Python number that the type can hold: float32(0.1) is rounded, int32(2**31) wraps.
    """

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype

    def __call__(self, value: Any) -> Any:
        if self.dtype.kind != "f":
            return convert(value, self.dtype)
        return round_to(float(value), self.dtype.itemsize)

    def __eq__(self, other: object) -> bool:
        return np.dtype(other.dtype if isinstance(other, Cast) else other) == self.dtype  # type: ignore[call-overload, no-any-return]

    def __hash__(self) -> int:
        return hash(self.dtype)


def round_to(value: float, size: int) -> float:
    """The nearest float of 2, 4 or 8 bytes; infinity past the largest."""
    if size == 8:
        return value
    if size == 4:
        return ctypes.c_float(value).value
    try:
        return float(struct.unpack("<e", struct.pack("<e", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `math` that answers with infinity or NaN where Python raises."""

    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except OverflowError:
            return math.inf
        except ValueError:
            return POLES.get((function.__name__, *arguments), math.nan)

    return call


# Where a function goes to minus infinity, which Python calls an error.
POLES = {(name, 0): -math.inf for name in ("log", "log2", "log10")} | {("log1p", -1): -math.inf}

QUIET = {
    id(function): quiet(function)
    for function in vars(math).values()
    if builtins.callable(function) and not isinstance(function, type)
}
MATH = SimpleNamespace(**{name: QUIET.get(id(value), value) for name, value in vars(math).items()})


def exp2(x: float) -> float:
    """2 to the power of x; infinity past the largest double."""
    try:
        return math.pow(2.0, x)
    except OverflowError:
        return math.inf


def reciprocal(x: float) -> float:
    """1 / x, infinity at zero."""
    return 1.0 / x if x else math.copysign(math.inf, x)


def rsqrt(x: float) -> float:
    """1 / sqrt(x), infinity at zero, NaN below."""
    return reciprocal(math.sqrt(x)) if x >= 0 else math.nan


def _bits(value: int) -> int:
    """An integer as the 32 bits it has on a GPU, or 64 if it does not fit."""
    return value & (0xFFFFFFFF if -(1 << 31) <= value < 1 << 32 else (1 << 64) - 1)


def popc(value: int) -> int:
    """Number of bits that are 1."""
    return _bits(value).bit_count()


def clz(value: int) -> int:
    """Leading zero bits of a 32-bit number."""
    return 32 - _bits(value).bit_length()


def ffs(value: int) -> int:
    """1 + place of the lowest bit that is 1; 0 for 0."""
    return (value & -value).bit_length()


def brev(value: int) -> int:
    """The 32 bits in reverse order."""
    return int(f"{_bits(value):032b}"[::-1], 2)


def fp16(function: Callable[..., float]) -> Callable[..., float]:
    """A function whose result is rounded to a float16."""
    return lambda *arguments: round_to(function(*arguments), 2)


FP16 = SimpleNamespace(
    hadd=fp16(lambda a, b: a + b),
    hsub=fp16(lambda a, b: a - b),
    hmul=fp16(lambda a, b: a * b),
    hdiv=fp16(lambda a, b: a * reciprocal(b)),
    hfma=fp16(lambda a, b, c: a * b + c),
    hneg=fp16(lambda a: -a),
    habs=fp16(abs),
    hmax=fp16(max),
    hmin=fp16(min),
    heq=lambda a, b: a == b,
    hne=lambda a, b: a != b,
    hge=lambda a, b: a >= b,
    hgt=lambda a, b: a > b,
    hle=lambda a, b: a <= b,
    hlt=lambda a, b: a < b,
    hexp=fp16(MATH.exp),
    hexp2=fp16(exp2),
    hlog=fp16(MATH.log),
    hlog2=fp16(MATH.log2),
    hsqrt=fp16(MATH.sqrt),
    hrsqrt=fp16(rsqrt),
    hrcp=fp16(reciprocal),
)

# Functions of libdevice by the name without `fast_` and the final f.
LIBDEVICE: dict[str, Callable[..., Any]] = {
    name: getattr(MATH, name)
    for name in ("exp", "log", "log2", "log10", "sqrt", "sin", "cos", "tan", "tanh", "pow", "floor", "ceil")
} | {
    "exp2": exp2,
    "exp10": quiet(lambda x: math.pow(10.0, x)),
    "rsqrt": rsqrt,
    "rcp_rn": reciprocal,
    "fabs": abs,
    "fma": lambda a, b, c: a * b + c,
    "fmax": lambda a, b: b if a != a else a if b != b else max(a, b),
    "fmin": lambda a, b: b if a != a else a if b != b else min(a, b),
}
