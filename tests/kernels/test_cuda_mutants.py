"""Every known-wrong CUDA kernel is caught, by what its line in the registry says; the right ones are not accused."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

import kernels.cuda
from tests.kernels.cuda_checks import CHECKS
from tests.kernels.mutants.registry import MUTANTS
from tests.kernels.mutants.world import KernelMutant, wrong_copy
from tests.mutants.world import source_of

BY_COMPARING = {"WrongValue", "NotANumber", "GuardTouched"}
BY_THE_INTERPRETER = {"RaceError", "BarrierError", "DeadlockError", "BoundsError", "AlignmentError"}


@pytest.mark.parametrize("check", CHECKS)
def test_the_right_kernels_are_not_accused(check: str) -> None:
    CHECKS[check](kernels.cuda)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.misconception)
def test_a_known_wrong_kernel_is_caught(mutant: KernelMutant) -> None:
    try:
        CHECKS[mutant.check](wrong_copy(mutant))
    except Exception as error:
        if type(error).__name__ != mutant.raises:
            raise
    else:
        pytest.fail(f"the check {mutant.check!r} passes although {mutant.misconception}")


def test_the_registry() -> None:
    names = [mutant.misconception for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 12
    assert {mutant.raises for mutant in MUTANTS} <= BY_COMPARING | BY_THE_INTERPRETER
    for mutant in MUTANTS:
        source = source_of(mutant)
        assert mutant.applied_to(source) != source, mutant.misconception


def test_the_two_packages_share_nothing() -> None:
    before = {name: module for name, module in sys.modules.items() if name.startswith("kernels")}
    wrong = wrong_copy(MUTANTS[0])
    right = import_module(MUTANTS[0].module_name)
    assert sys.modules[right.__name__] is right and wrong is not kernels.cuda
    assert wrong.attention.decode_plain_kernel is not right.decode_plain_kernel
    after = {name: module for name, module in sys.modules.items() if name.startswith("kernels")}
    assert after == before and sys.modules["kernels"].cuda is kernels.cuda
