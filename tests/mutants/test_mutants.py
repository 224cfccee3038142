"""Every known-wrong engine fails its directed tests, by their assertions; the right engine passes them."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

import pytest

from tests.mutants.pool import POOL
from tests.mutants.registry import MUTANTS
from tests.mutants.world import OWN, Mutant, failures, is_verdict, source_of, world


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.misconception)
def test_a_known_wrong_engine_is_caught(mutant: Mutant) -> None:
    for test, error in failures(mutant, mutant.caught_by).items():
        assert error is not None, f"{test} passes although {mutant.misconception}"
        if not is_verdict(error):
            raise AssertionError(f"{test} broke instead of failing: {error!r}") from error


def test_the_right_engine_passes_all_of_them() -> None:
    """In the same isolation: so whatever the wrong engines fail by, it is the changed line."""
    tests = sorted({test for mutant in MUTANTS for test in mutant.caught_by})
    failed = {test: error for test, error in failures(None, tests).items() if error is not None}
    assert failed == {}, failed


def test_every_misconception_is_named_once() -> None:
    names = [mutant.misconception for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 20


def test_every_directed_test_says_its_misconception() -> None:
    for test in sorted({test for mutant in MUTANTS for test in mutant.caught_by}):
        module, _, function = test.partition("::")
        text = getattr(import_module(f"tests.unit.{module}"), function).__doc__ or ""
        assert "Misconception" in text, test


def test_mutants_change_the_text_and_fit_exactly_once() -> None:
    for mutant in MUTANTS:
        source = source_of(mutant)
        assert mutant.applied_to(source) != source, mutant.misconception


# The harness itself

REAL = POOL[0]


def own_modules() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.split(".")[0] in OWN}


def test_the_two_engines_share_nothing() -> None:
    right, before = import_module(REAL.module_name), own_modules()
    with world(REAL):
        wrong = import_module(REAL.module_name)
        assert wrong.BlockPool.get_new_blocks.__code__ != right.BlockPool.get_new_blocks.__code__
        assert not set(map(id, own_modules().values())) & set(map(id, before.values()))
    assert own_modules() == before
    assert import_module(REAL.module_name) is right


def test_a_mutant_that_changes_nothing_survives() -> None:
    harmless = Mutant("", REAL.module, REAL.old, f"{REAL.old}  # the same", REAL.caught_by)
    assert failures(harmless, REAL.caught_by) == dict.fromkeys(REAL.caught_by)


@pytest.mark.parametrize("new", ["import nothing_of_that_name", "undefined_name", "raise ValueError"])
def test_an_engine_that_breaks_is_no_catch(new: str) -> None:
    """Whoever cannot run has not been shown to be wrong."""
    (error,) = failures(Mutant("", REAL.module, REAL.old, new, REAL.caught_by), REAL.caught_by).values()
    assert error is not None and not is_verdict(error)


def test_a_mutant_that_cannot_be_compiled_is_no_catch() -> None:
    with pytest.raises(SyntaxError):
        failures(Mutant("", REAL.module, REAL.old, ")", REAL.caught_by), REAL.caught_by)
    assert import_module(REAL.module_name) is sys.modules[REAL.module_name]


@pytest.mark.parametrize("old", ["this text is nowhere", "self"])
def test_a_mutant_that_does_not_fit_is_refused(old: str) -> None:
    with pytest.raises(ValueError, match="times, not once"):
        failures(Mutant("", REAL.module, old, "", REAL.caught_by), REAL.caught_by)


def test_line_breaks_do_not_count() -> None:
    mutant = Mutant("", "x", "f(a, b) is not None", "g()", ())
    assert mutant.applied_to("x = f(\n    a, b\n) is  not None") == "x = g()"
    with pytest.raises(ValueError):
        mutant.applied_to("x = f(a, b) isnot None")
