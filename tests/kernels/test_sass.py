"""The reporter on kernels whose machine code is known, and the budgets of the kernels that must be fast."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numba import cuda, float32, int32

from kernels import sass
from kernels.cuda.decode_plain import decode_plain_kernel
from kernels.cuda.decode_split import BLOCKS_PER_PROCESSOR, decode_split_kernel
from kernels.cuda.elements import ELEMENTS
from kernels.cuda.intrinsics import bits_float, load_16_bytes
from kernels.cuda.prefill import PrefillTiling, prefill_kernel
from kernels.cuda.tiling import Tiling, tiling_for

if MISSING := sass.available():
    pytest.skip(f"no machine code was looked at: {MISSING}", allow_module_level=True)

FLOATS = torch.zeros(1024)
INTEGERS = torch.zeros(1024, dtype=torch.int32)


# Kernels with known properties


@cuda.jit
def scalar_copy(target: Any, source: Any) -> None:
    i = cuda.grid(1)
    if i < source.shape[0]:
        target[i] = source[i]


@cuda.jit
def vector_sum(target: Any, source: Any) -> None:
    """Three loads of 16 bytes that do not depend on each other. A load of which one word is used would shrink."""
    i = cuda.grid(1) * 12
    a, b, c = load_16_bytes(source, i), load_16_bytes(source, i + 4), load_16_bytes(source, i + 8)
    for k in range(4):
        target[i + k] = bits_float(a[k]) + bits_float(b[k]) + bits_float(c[k])


@cuda.jit(device=True)
def sum_of_row(source: Any, i: Any) -> Any:
    words = load_16_bytes(source, i * 4)
    return int32(words[0] + words[1] + words[2] + words[3])


@cuda.jit
def chase(target: Any, source: Any) -> None:
    """Three loads, each of which needs the one before for its address."""
    i = int32(cuda.grid(1))
    for _ in range(3):
        i = sum_of_row(source, i)
    target[cuda.grid(1)] = i


@cuda.jit
def scatter(target: Any, source: Any) -> None:
    """An array whose index is known only at run time cannot live in registers."""
    i = cuda.grid(1)
    bins = cuda.local.array(64, float32)
    for k in range(64):
        bins[k] = float32(0)
    for k in range(16):
        bins[int32(source[i + k]) & 63] += source[i]
    for k in range(64):
        target[i * 64 + k] = bins[k]


@cuda.jit
def shared_turn(target: Any, source: Any) -> None:
    tile = cuda.shared.array(256, float32)
    tile[cuda.threadIdx.x] = source[cuda.grid(1)]
    cuda.syncthreads()
    target[cuda.grid(1)] = tile[255 - cuda.threadIdx.x]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_a_scalar_copy_has_narrow_loads_only(arch: str) -> None:
    report = sass.report(scalar_copy, (FLOATS, FLOATS), arch)
    assert (report.kernel, report.arch) == ("scalar_copy", arch)
    assert (report.vector_loads, report.narrow_loads, report.loads_in_flight) == (0, 1, 0)
    assert (report.stack, report.local_loads, report.local_stores, report.shared) == (0, 0, 0, 0)
    assert 0 < report.registers < 32
    (load,) = (i for i in report.instructions if i.is_global_load)
    assert load.source == "target[i] = source[i]"


def test_independent_loads_of_16_bytes_are_on_their_way_together() -> None:
    report = sass.report(vector_sum, (FLOATS, FLOATS))
    assert (report.vector_loads, report.narrow_loads, report.loads_in_flight) == (3, 0, 3)


def test_loads_that_wait_for_each_other_are_not() -> None:
    for arch in ("sm_90", "sm_80"):
        report = sass.report(chase, (INTEGERS, INTEGERS), arch)
        assert (report.vector_loads, report.loads_in_flight) == (3, 1)


def test_an_array_indexed_at_run_time_shows_as_stack_and_local_memory() -> None:
    report = sass.report(scatter, (FLOATS, FLOATS))
    assert report.stack >= 64 * 4
    assert report.local_loads > 0 and report.local_stores > 0
    assert (report.spill_loads, report.spill_stores) == (0, 0)  # ptxas does not call this a spill


def test_shared_memory_is_counted() -> None:
    assert sass.report(shared_turn, (FLOATS, FLOATS)).shared == 1024


def test_the_options_of_the_decorator_are_used() -> None:
    limited = cuda.jit(max_registers=24)(scatter.py_func)
    assert (
        sass.report(limited, (FLOATS, FLOATS)).registers
        <= 24
        < sass.report(scatter, (FLOATS, FLOATS)).registers
    )


def test_a_report_and_a_listing_can_be_read() -> None:
    report = sass.report(scalar_copy, (FLOATS, FLOATS))
    assert str(report).splitlines()[0] == "scalar_copy, sm_90"
    assert "16-byte global loads    0" in str(report)
    assert "<caption" in report._repr_html_()
    first, second = sass.listing(scalar_copy, (FLOATS, FLOATS), opcodes=("LDG",)).splitlines()
    assert first.endswith("| target[i] = source[i]")
    assert second.strip().startswith("LDG.E R")
    assert sass.listing(scalar_copy, (FLOATS, FLOATS), limit=1).endswith("more")


def test_what_cannot_be_compiled_is_one_sentence() -> None:
    with pytest.raises(sass.SassError, match=r"view\(torch.int16\)"):
        sass.report(scalar_copy, (FLOATS, FLOATS.bfloat16()))
    with pytest.raises(sass.SassError, match="scalar_copy does not compile for sm_90"):
        sass.report(scalar_copy, (FLOATS,))
    with pytest.raises(sass.SassError, match="does not compile for sm_12"):
        sass.report(scalar_copy, (FLOATS, FLOATS), "sm_12")
    with pytest.raises(sass.SassError, match="not of the form sm_90"):
        sass.report(scalar_copy, (FLOATS, FLOATS), "hopper")


# The kernels that must be fast

ONES = torch.ones(1, dtype=torch.int32)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def split_report(dtype: torch.dtype, head_dim: int, group: int, arch: str) -> tuple[Tiling, sass.SassReport]:
    element = ELEMENTS[dtype]
    tiling = tiling_for(element, head_dim, group, block_size=16)
    assert tiling is not None
    cache, table = torch.zeros(16, dtype=element.stored), ONES.view(1, 1)
    parts, log_sums, fraction = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1), np.float32(1)
    arguments = (parts, log_sums, cache, 1, ONES, cache, cache, table, ONES, fraction, 1)
    return tiling, sass.report(decode_split_kernel(tiling), arguments, arch)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "group", "arch"),
    [
        *((BF16, head_dim, group, "sm_90") for head_dim in (64, 128) for group in (1, 2, 4)),
        (F16, 128, 4, "sm_90"),
        (F32, 64, 4, "sm_90"),
        (BF16, 128, 4, "sm_80"),
    ],
    ids=str,
)
def test_the_split_kernel_stays_in_registers_and_loads_16_bytes_at_a_time(
    dtype: torch.dtype, head_dim: int, group: int, arch: str
) -> None:
    tiling, report = split_report(dtype, head_dim, group, arch)
    assert (report.stack, report.local_loads, report.local_stores) == (0, 0, 0)
    rows = 2 * tiling.unroll * tiling.loads  # of keys and values in one round
    assert report.vector_loads == rows + group * tiling.loads  # and the queries
    assert report.narrow_loads == 3  # length, query row and block table of the sequence
    assert report.loads_in_flight == rows == 8  # all of a round, before the first is used
    resident = BLOCKS_PER_PROCESSOR * tiling.threads * report.registers
    assert resident <= 65536  # registers of one processor


def test_the_plain_kernel_is_what_the_split_kernel_repairs() -> None:
    element = ELEMENTS[F32]
    cache, rows = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1)
    arguments = (rows, rows, cache, cache, ONES.view(1, 1), ONES, np.float32(1), 1)
    report = sass.report(decode_plain_kernel(element, 128, 128), arguments)
    assert (report.stack, report.local_loads, report.local_stores) == (0, 0, 0)
    assert (report.vector_loads, report.loads_in_flight) == (0, 0)
    assert report.narrow_loads > 3


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_prefill_kernel_stays_in_registers_and_loads_16_bytes_at_a_time(head_dim: int) -> None:
    element = ELEMENTS[BF16]
    flat, out = torch.zeros(16, dtype=element.stored), torch.zeros(1, 1, 1, dtype=element.stored)
    arguments = (out, flat, 1, ONES, ONES, flat, flat, ONES.view(1, 1), ONES, np.float32(1), 1)
    report = sass.report(prefill_kernel(PrefillTiling(element, head_dim, 4, 16)), arguments)
    assert (report.stack, report.local_loads, report.local_stores) == (0, 0, 0)
    assert report.vector_loads >= 3  # queries, keys, values
    widths = {i.width for i in report.instructions if i.is_global_load}
    assert widths == {4, 16}  # lengths and tables, and the rows; no number of 2 bytes is read alone
