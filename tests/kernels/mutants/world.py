"""A known-wrong copy of `kernels.cuda` beside the real one, in the same process.

All modules of the package are imported afresh, the mutated one from its changed source; then the real ones are
put back. The copy keeps its own kernels, its own caches of them, and its own host code.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

import kernels.cuda
from tests.mutants.world import Mutant

PACKAGE = "kernels.cuda"


@dataclass(frozen=True)
class KernelMutant(Mutant):
    """A misconception as a kernel: `module` (of kernels.cuda) with `old`, which occurs once, read as `new`.

    `caught_by` names two things: the check of `cuda_checks` that must fail, and the class of what it raises.
    `more`: further changes that this one needs.
    """

    more: tuple[tuple[str, str], ...] = ()

    def applied_to(self, source: str) -> str:
        source = super().applied_to(source)
        for old, new in self.more:
            source = replace(self, old=old, new=new, more=()).applied_to(source)
        return source

    @property
    def module_name(self) -> str:
        return f"{PACKAGE}.{self.module}"

    @property
    def check(self) -> str:
        return self.caught_by[0]

    @property
    def raises(self) -> str:
        return self.caught_by[1]


class _Loader(SourceFileLoader):
    def __init__(self, mutant: KernelMutant, path: str) -> None:
        super().__init__(mutant.module_name, path)
        self.mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        source = self.mutant.applied_to(self.get_source(fullname) or "")
        return compile(source, f"{self.path} (known-wrong)", "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    def __init__(self, mutant: KernelMutant) -> None:
        self.mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.mutant.module_name:
            return None
        spec = PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.origin is not None
        loader = _Loader(self.mutant, spec.origin)
        return importlib.util.spec_from_file_location(fullname, spec.origin, loader=loader)


def wrong_copy(mutant: KernelMutant) -> ModuleType:
    """The package with this mistake. Raises: ValueError if the mutant does not fit its module."""
    outside, finder = _take_out(), _Finder(mutant)
    sys.meta_path.insert(0, finder)
    try:
        return importlib.import_module(PACKAGE)
    finally:
        sys.meta_path.remove(finder)
        _take_out()
        sys.modules.update(outside)
        kernels.cuda = outside[PACKAGE]


def _take_out() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name == PACKAGE or name.startswith(f"{PACKAGE}.")]
    return {name: sys.modules.pop(name) for name in names}
