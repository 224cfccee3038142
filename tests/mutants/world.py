"""A second, known-wrong engine beside the real one, in the same process.

Importing a package anew costs a tenth of a second, starting Python with torch costs seconds; so a mutant is not
run in a process of its own. Instead every module of `refengine` and of `tests` is taken out of `sys.modules`,
the mutated one is compiled from its changed source, everything else is imported afresh, and in the end the
old modules are put back. Nothing of the two engines touches: no class, no function and no module is shared.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from itertools import pairwise
from types import CodeType, ModuleType

import pytest

OWN = ("refengine", "tests")
MISSED = pytest.fail.Exception  # what `pytest.raises` raises if nothing was raised


@dataclass(frozen=True)
class Mutant:
    """A misconception as an engine: `module` (below refengine) with `old`, which occurs once, read as `new`.

    Spaces and line breaks of `old` do not count, so that a formatter may break its line elsewhere.
    `caught_by` names directed tests as `test_module::test_function`; every one of them has to fail.
    """

    misconception: str
    module: str
    old: str
    new: str
    caught_by: tuple[str, ...]

    @property
    def module_name(self) -> str:
        return f"refengine.{self.module}"

    def applied_to(self, source: str) -> str:
        """The wrong source. Raises: ValueError unless the right one holds the text to change exactly once."""
        found = [match.span() for match in _ignoring_space(self.old).finditer(source)]
        if len(found) != 1:
            raise ValueError(f"{self.module_name} holds {self.old!r} {len(found)} times, not once")
        ((start, end),) = found
        return source[:start] + self.new + source[end:]


def _ignoring_space(text: str) -> re.Pattern[str]:
    tokens = re.findall(r"\w+|[^\w\s]", text)
    pattern = re.escape(tokens[0])
    for before, token in pairwise(tokens):
        between = r"\s+" if before[-1:].isidentifier() and token[:1].isidentifier() else r"\s*"
        pattern += between + re.escape(token)
    return re.compile(rf"(?<!\w){pattern}(?!\w)" if tokens[0][0].isidentifier() else pattern)


class _Loader(SourceFileLoader):
    """Compiles the wrong source; never reads or writes the bytecode of the right one."""

    def __init__(self, mutant: Mutant, path: str) -> None:
        super().__init__(mutant.module_name, path)
        self.mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        source = self.mutant.applied_to(self.get_source(fullname) or "")
        return compile(source, f"{self.path} (known-wrong)", "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.mutant.module_name:
            return None
        spec = PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.origin is not None
        return importlib.util.spec_from_file_location(
            fullname, spec.origin, loader=_Loader(self.mutant, spec.origin)
        )


@contextmanager
def world(mutant: Mutant | None) -> Iterator[None]:
    """Inside, every import gives the modules of an engine with this mistake. None: of one without any.

    Raises: ValueError on entry if the mutant does not fit its module.
    """
    if mutant is not None:
        mutant.applied_to(source_of(mutant))
    finders = [] if mutant is None else [_Finder(mutant)]
    outside = _take_out()
    sys.meta_path[:0] = finders
    try:
        yield
    finally:
        _take_out()
        sys.modules.update(outside)
        for finder in finders:
            sys.meta_path.remove(finder)


def source_of(mutant: Mutant) -> str:
    """The right source of the module that a mutant changes."""
    spec = importlib.util.find_spec(mutant.module_name)
    assert spec is not None and spec.origin is not None, mutant.module_name
    with open(spec.origin, encoding="utf-8") as file:
        return file.read()


def failures(mutant: Mutant | None, tests: Iterable[str]) -> dict[str, BaseException | None]:
    """Runs directed tests in the world of a mutant. Returns: what each raised, None if it passed.

    The engines check their own integrity in most tests. Here they do not: the directed test alone must see
    the mistake.
    """
    with world(mutant):
        vars(importlib.import_module("tests.unit.helpers"))["CHECK_INTEGRITY"] = False
        return {test: _failure(test) for test in tests}


def _failure(test: str) -> BaseException | None:
    module, _, function = test.partition("::")
    run: Callable[[], None] = getattr(importlib.import_module(f"tests.unit.{module}"), function)
    try:
        run()
    except (Exception, MISSED) as error:
        return error
    return None


def is_verdict(error: BaseException | None) -> bool:
    """Whether a test failed by its own assertion, and not because the engine or an import broke."""
    return type(error) is AssertionError or isinstance(error, MISSED)


def _take_out() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.split(".")[0] in OWN]
    return {name: sys.modules.pop(name) for name in names}
