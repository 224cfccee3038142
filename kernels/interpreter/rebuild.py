"""A kernel's Python function, with the interpreter in the place of `numba.cuda`.

The code is the kernel's own; only what its names refer to is exchanged, in its globals and in its closure, and
in the same way in every function that it calls. Nothing of the original is changed.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kernels.interpreter import arithmetic
from kernels.interpreter.array import NUMBERS, Fail
from kernels.interpreter.facade import Cuda, Missing
from kernels.interpreter.sites import Sites, global_names

# id of an intrinsic -> (the intrinsic, kept alive; its Python version)
_REGISTERED: dict[int, tuple[Any, Callable[..., Any]]] = {}


def register(intrinsic: Any, python_function: Callable[..., Any]) -> None:
    """Says what an intrinsic means in Python, for kernels that call it.

    The function gets the arguments of the intrinsic; arrays arrive as views, whose `load_vector(index, n)` and
    `store_vector(index, values)` make one access of several elements. It runs as it is, and what it does counts
    for the line of the kernel that called it.
    """
    _REGISTERED[id(intrinsic)] = (intrinsic, python_function)


class Rebuilder:
    """The functions of one launch.

    lane_names: globals in which a kernel has `laneid` under a name of its own; the launch keeps them up to date.
    """

    def __init__(self, cuda: Cuda, sites: Sites, fail: Fail, constant: Callable[[Any], Any]) -> None:
        self._cuda, self._sites, self._fail, self._constant = cuda, sites, fail, constant
        self._functions: dict[int, tuple[Any, Callable[..., Any]]] = {}  # id -> (original, rebuilt)
        self.lane_names: list[tuple[dict[str, Any], str]] = []
        self._names = {id(value): name for name, value in _names_of_numba_cuda()}

    def function(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The same code with the interpreter's names."""
        if id(original) in self._functions:
            return self._functions[id(original)][1]
        assert isinstance(original, types.FunctionType)
        code = original.__code__
        self._sites.add(code)
        names: dict[str, Any] = {"__builtins__": __builtins__, "__name__": original.__module__}
        cells = tuple(types.CellType() for _ in original.__closure__ or ())
        rebuilt = types.FunctionType(code, names, original.__name__, original.__defaults__, cells or None)
        rebuilt.__kwdefaults__ = original.__kwdefaults__
        self._functions[id(original)] = (original, rebuilt)
        for name in global_names(code):
            if name in original.__globals__:
                value = original.__globals__[name]
                names[name] = self.translate(value)
                if self._names.get(id(value)) == "laneid":
                    self.lane_names.append((names, name))
        for cell, old in zip(cells, original.__closure__ or (), strict=True):
            if old != types.CellType():  # one that is not filled yet stays so
                cell.cell_contents = self.translate(old.cell_contents)
        return rebuilt

    def translate(self, value: Any) -> Any:
        """What a kernel gets for a value that one of its names refers to."""
        if id(value) in _REGISTERED:
            return _REGISTERED[id(value)][1]
        if id(value) in self._names:
            return getattr(self._cuda, self._names[id(value)])
        if isinstance(value, types.ModuleType):
            return self._module(value)
        if isinstance(value, types.FunctionType):
            return self.function(value)
        if isinstance(value, types.BuiltinFunctionType):
            return arithmetic.QUIET.get(id(value), value)
        if isinstance(getattr(value, "py_func", None), types.FunctionType):
            return self.function(value.py_func)
        if isinstance(value, np.ndarray) and value.dtype.kind in NUMBERS:
            return self._constant(value)
        if isinstance(value, np.ufunc):
            return _scalar(value)
        if isinstance(value, np.generic):
            return value.item()
        return self._type_or_same(value)

    def _module(self, module: types.ModuleType) -> Any:
        if module is math:
            return arithmetic.MATH
        if module.__name__ == "numba.cuda":
            return self._cuda
        if module.__name__.startswith("numba.cuda.libdevice"):
            return self._cuda.libdevice
        return ModuleView(module, self.translate)

    def _type_or_same(self, value: Any) -> Any:
        if isinstance(value, type) and issubclass(value, np.number | np.bool_):
            return arithmetic.Cast(np.dtype(value))
        kinds = {cls.__name__ for cls in type(value).__mro__ if cls.__module__.startswith("numba")}
        if kinds & {"Integer", "Float", "Boolean"}:
            return arithmetic.Cast(np.dtype(str(value).replace("boolean", "bool")))
        if "_Intrinsic" in kinds:
            return Missing(
                f"the intrinsic {value.__name__} has no Python version: "
                f"kernels.interpreter.register({value.__name__}, function) gives it one",
                self._fail,
            )
        if getattr(value, "__module__", "").startswith("numba.cuda") and isinstance(value, type):
            return Missing(f"the interpreter has no cuda.{value.__name__}", self._fail)
        return value


class ModuleView:
    """A module whose names are exchanged as they are asked for."""

    def __init__(self, module: types.ModuleType, translate: Callable[[Any], Any]) -> None:
        self._module, self._translate = module, translate

    def __getattr__(self, name: str) -> Any:
        value = self._translate(getattr(self._module, name))
        setattr(self, name, value)
        return value


def _names_of_numba_cuda() -> Iterator[tuple[str, Any]]:
    from numba import cuda

    offered = {name for name in dir(Cuda) if name[0] != "_"} | {
        "threadIdx", "blockIdx", "blockDim", "gridDim", "laneid", "warpsize",
        "shared", "local", "const", "atomic", "fp16", "popc", "clz", "ffs", "brev", "cg",
    }  # fmt: skip
    for name in offered:
        if hasattr(cuda, name):
            yield name, getattr(cuda, name)


def _scalar(function: Any) -> Callable[..., Any]:
    """A ufunc that takes and returns Python numbers, and is silent about infinities."""

    def call(*arguments: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*arguments).item()

    return call
