"""The judge of kernels: what it must find, by which name, and what it must let pass."""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="attr-defined, untyped-decorator"

from __future__ import annotations

from typing import Any

import pytest
import torch
from numba import cuda, float32

from exercises.grader import Report
from exercises.grader.report import StubError
from exercises.tasks.kernel_arrays import BITS, POISON, same_bits
from exercises.tasks.kernel_checks import (
    BlockRace,
    Launch,
    Suspect,
    check_budgets,
    check_launch,
    distinct,
    sectors,
    unwritten,
)

VALUES = distinct(72)
LAUNCH = Launch("72 elements", 3, 32, {"out": unwritten(72), "a": VALUES}, {"out": VALUES.double() + 10})
FAR: Suspect = ("far apart", "neighbours should read neighbours")
OFF: Suspect = ("adds 9", "it is 10")


@cuda.jit
def right(written, read):  # other names than the launch has
    i = cuda.grid(1)
    if i < len(written):
        written[i] = read[i] + 10


@cuda.jit
def scattered(out, a):
    i = cuda.grid(1)
    if i < len(out):
        j = i * 35 % 72
        out[j] = a[j] + 10


@cuda.jit
def nine(out, a):
    i = cuda.grid(1)
    if i < len(out):
        out[i] = a[i] + 9


@cuda.jit
def half(out, a):
    i = cuda.grid(1)
    if i < len(out) // 2:
        out[i] = a[i] + 10


@cuda.jit
def changes_its_input(out, a):
    i = cuda.grid(1)
    if i < len(out):
        out[i] = a[i] + 10
        a[i] = 0


@cuda.jit
def first_block_only(out, a):
    i = cuda.threadIdx.x
    if i < len(out):
        out[i] = a[i] + 10


@cuda.jit
def lucky(out, a):
    tile = cuda.shared.array(32, float32)
    t, i = cuda.threadIdx.x, cuda.grid(1)
    if i < len(out):
        tile[t] = a[i] + 10
        out[i] = tile[t]
        if t > 0:
            out[i] = tile[t] + 0 * tile[t - 1]  # right in order, not in reverse


@cuda.jit
def stub(out, a):
    raise NotImplementedError("ex09 task 1: something (about 1 line)")


class Unchecked:
    """Launches like a kernel and writes as a GPU does: nobody looks at the index."""

    py_func = right.py_func

    def __getitem__(self, configuration: Any) -> Any:
        return self.launch

    def launch(self, out: torch.Tensor, a: torch.Tensor) -> None:
        out.as_strided((73,), (1,))[:72] = a + 10
        out.as_strided((73,), (1,))[72] = 0


def judged(kernel: Any, **options: Any) -> tuple[Report, Any]:
    report = Report()
    return report, check_launch(report, kernel, LAUNCH, **options)


def test_right_kernel_with_other_names_passes_and_is_counted() -> None:
    report, cost = judged(right)
    check_budgets(report, cost, sectors("a", "read", most=9, least=9, suspect=FAR))
    assert [case.passed for case in report.cases] == [True, True]
    assert report.cases[1].title == "sectors of a read: yours 9, budget 9, least possible 9"
    assert report.notes  # what only a GPU can tell


def test_budget_names_its_suspect() -> None:
    report, cost = judged(scattered)
    check_budgets(report, cost, sectors("a", "read", most=9, least=9, suspect=FAR))
    assert [case.passed for case in report.cases] == [True, False]
    assert report.found == FAR


@pytest.mark.parametrize(
    ("kernel", "words", "found"),
    [
        (nine, "expected 11, got 10", OFF),
        (half, "36 never written, the first at [36]", None),
        (changes_its_input, "a, threads in order: it is an input and was changed", None),
        (first_block_only, "block (1, 0, 0)", FAR),
        (lucky, "RaceError", ("a race", "")),
        (lambda out, a: None, "write @cuda.jit above it", None),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_wrong_kernels(kernel: Any, words: str, found: Suspect | None) -> None:
    known = {OFF: {"out": VALUES.double() + 9}}
    report, cost = judged(kernel, known=known, errors={BlockRace: FAR})
    assert cost is None
    assert words in report.cases[0].sentence
    assert (report.found or ("",))[0] == (found or ("",))[0]
    check_budgets(report, cost, sectors("a", "read", most=0, least=0, suspect=FAR))
    assert len(report.cases) == 1  # no budget for a kernel that went wrong


def test_stub_is_not_started() -> None:
    with pytest.raises(StubError):
        judged(stub)


def test_guard_cells_find_what_nobody_else_looks_at() -> None:
    report, cost = judged(Unchecked())
    assert cost is None
    assert report.cases[0].sentence == "It wrote before or behind out, into memory of others."


@pytest.mark.parametrize("dtype", POISON)
def test_poison_is_a_nan_that_can_be_told_apart(dtype: torch.dtype) -> None:
    poison, nan = unwritten(3, dtype=dtype), torch.full((3,), torch.nan, dtype=dtype)
    assert bool(poison.isnan().all()) and same_bits(poison, nan)
    bits = BITS[dtype.itemsize]
    assert not bool((poison.view(bits) == nan.view(bits)).any())
