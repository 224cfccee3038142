"""Counted numbers against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numba import cuda, float32, float64

from kernels.interpreter import Report, interpret, register
from tests.kernels.interpreter.launching import SCHEDULES, launch


def load_eight(array: Any, i: int) -> tuple[int, ...]:
    """Stands for an intrinsic that loads 16 bytes."""
    raise NotImplementedError


def load_two(array: Any, i: int) -> tuple[float, ...]:
    raise NotImplementedError


def load_four(array: Any, i: int) -> tuple[float, ...]:
    raise NotImplementedError


register(load_eight, lambda array, i: array.load_vector(i, 8))
register(load_four, lambda array, i: array.load_vector(i, 4))
register(load_two, lambda array, i: array.load_vector(i, 2))


@cuda.jit
def strided(out, a, stride):
    i = cuda.threadIdx.x
    out[i] = a[i * stride]


@pytest.mark.parametrize(
    ("dtype", "stride", "sectors", "num_bytes"),
    [
        (np.float32, 1, 4, 128),  # 128 bytes in a row
        (np.float32, 2, 8, 128),
        (np.float32, 4, 16, 128),
        (np.float32, 8, 32, 128),  # a sector for each lane
        (np.float32, 32, 32, 128),
        (np.float32, 0, 1, 4),  # all lanes want the same
        (np.int16, 1, 2, 64),
        (np.int16, 16, 32, 64),
        (np.float64, 1, 8, 256),
        (np.int8, 1, 1, 32),
    ],
)
def test_sectors_of_a_strided_read(dtype: Any, stride: int, sectors: int, num_bytes: int) -> None:
    report = launch(strided, (1, 32), np.zeros(32, dtype), np.zeros(32 * 32, dtype), stride)
    total = report.total("global", "read", "a")
    assert (total.requests, total.lanes) == (1, 32)
    assert (total.sectors, total.bytes) == (sectors, num_bytes)
    assert total.efficiency == pytest.approx(num_bytes / (32 * sectors))


def test_a_read_that_starts_in_the_middle_of_a_sector() -> None:
    a = torch.zeros(64)
    assert launch(strided, (1, 32), np.zeros(32, np.float32), a[1:], 1).total(array="a").sectors == 5
    assert launch(strided, (1, 32), np.zeros(32, np.float32), a[8:], 1).total(array="a").sectors == 4


def test_a_warp_that_is_not_full() -> None:
    report = launch(strided, (3, 40), np.zeros(40, np.float32), np.zeros(40, np.float32), 1, races=False)
    total = report.total(array="a")
    assert (total.requests, total.lanes, total.sectors) == (6, 120, 3 * 5)


@cuda.jit
def transpose(out, a):
    """Reads rows and writes columns: one side is coalesced, the other is not."""
    x, y = cuda.grid(2)
    out[x, y] = a[y, x]


def test_a_transpose() -> None:
    report = launch(
        transpose, ((1, 4), (32, 8)), np.zeros((32, 32), np.float32), np.zeros((32, 32), np.float32)
    )
    reads, writes = report.total("global", "read"), report.total("global", "write")
    assert (reads.requests, reads.sectors, reads.efficiency) == (32, 128, 1.0)
    assert (writes.requests, writes.sectors, writes.efficiency) == (32, 1024, 0.125)


@cuda.jit
def banks(out, stride):
    tile = cuda.shared.array(1024, float32)
    i = cuda.threadIdx.x
    out[i] = tile[i * stride]


@pytest.mark.parametrize(
    ("stride", "wavefronts"),
    [(0, 1), (1, 1), (2, 2), (3, 1), (4, 4), (8, 8), (16, 16), (31, 1), (32, 32)],
)
def test_bank_conflicts(stride: int, wavefronts: int) -> None:
    report = launch(banks, (1, 32), np.zeros(32, np.float32), stride if stride < 32 else 32)
    total = report.total("shared", "read", "tile")
    assert (total.requests, total.wavefronts, total.sectors) == (1, wavefronts, 0)
    assert total.efficiency == pytest.approx(1 / wavefronts)


@cuda.jit
def padded_columns(out, width):
    tile = cuda.shared.array(0, float32)
    i = cuda.threadIdx.x
    out[i] = tile[i * width + 5]


def test_a_padded_tile_has_no_conflict() -> None:
    for width, wavefronts in ((32, 32), (33, 1)):
        report = launch(padded_columns, (1, 32, 0, 33 * 33 * 4), np.zeros(32, np.float32), width)
        assert report.total("shared").wavefronts == wavefronts


@cuda.jit
def wide(out, stride):
    doubles = cuda.shared.array(1024, float64)
    i = cuda.threadIdx.x
    out[i] = doubles[i * stride]


@pytest.mark.parametrize(("stride", "wavefronts"), [(1, 2), (2, 4), (16, 32), (0, 2)])
def test_eight_bytes_are_served_half_a_warp_at_a_time(stride: int, wavefronts: int) -> None:
    assert launch(wide, (1, 32), np.zeros(32), stride).total("shared").wavefronts == wavefronts


@cuda.jit
def wider(out, stride):
    tile = cuda.shared.array(2048, float32, alignment=16)
    i = cuda.threadIdx.x
    out[i] = load_four(tile, i * stride)[0]


@pytest.mark.parametrize(("stride", "wavefronts"), [(4, 4), (8, 8), (32, 32), (0, 4)])
def test_sixteen_bytes_are_served_a_quarter_of_a_warp_at_a_time(stride: int, wavefronts: int) -> None:
    total = launch(wider, (1, 32), np.zeros(32), stride).total("shared")
    assert (total.requests, total.wavefronts) == (1, wavefronts)


@cuda.jit
def small(out):
    tile = cuda.shared.array(128, np.int8)
    i = cuda.threadIdx.x
    out[i] = tile[i] + tile[4 * i]


def test_lanes_that_want_parts_of_one_word_do_not_conflict() -> None:
    assert launch(small, (1, 32), np.zeros(32)).total("shared").wavefronts == 2


# The two cache layouts, as in chapter 10: one warp, 32 tokens of one head, head_dim 128, 2 bytes.
# At least 32 * 128 * 2 / 32 = 256 sectors.

D, BLOCK_SIZE, NUM_HEADS = 128, 16, 8


@cuda.jit
def nhd_scalar(cache, table, out):
    t = cuda.threadIdx.x
    for d in range(D):
        out[t] += cache[((table[t // BLOCK_SIZE] * BLOCK_SIZE + t % BLOCK_SIZE) * NUM_HEADS + 3) * D + d]


@cuda.jit
def nhd_vector(cache, table, out):
    t = cuda.threadIdx.x
    for d in range(0, D, 8):
        row = (table[t // BLOCK_SIZE] * BLOCK_SIZE + t % BLOCK_SIZE) * NUM_HEADS + 3
        out[t] += load_eight(cache, row * D + d)[0]


@cuda.jit
def nhd_lanes_along_the_row(cache, table, out):
    t = cuda.threadIdx.x
    for i in range(16):
        token = 2 * i + t // 16
        row = (table[token // BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE) * NUM_HEADS + 3
        out[t] += load_eight(cache, row * D + t % 16 * 8)[0]


@cuda.jit
def split_key_scalar(cache, table, out):
    t = cuda.threadIdx.x
    for d in range(D):
        block = (table[t // BLOCK_SIZE] * NUM_HEADS + 3) * (D // 8) + d // 8
        out[t] += cache[(block * BLOCK_SIZE + t % BLOCK_SIZE) * 8 + d % 8]


@cuda.jit
def split_key_vector(cache, table, out):
    t = cuda.threadIdx.x
    for d in range(0, D, 8):
        block = (table[t // BLOCK_SIZE] * NUM_HEADS + 3) * (D // 8) + d // 8
        out[t] += load_eight(cache, (block * BLOCK_SIZE + t % BLOCK_SIZE) * 8)[0]


@pytest.mark.parametrize(
    ("kernel", "cache_sectors", "with_the_table"),
    [
        (nhd_scalar, 4096, 4224),
        (nhd_vector, 512, 528),
        (nhd_lanes_along_the_row, 256, 272),
        (split_key_scalar, 2048, 2176),
        (split_key_vector, 256, 272),
    ],
)
def test_cache_layouts(kernel: Any, cache_sectors: int, with_the_table: int) -> None:
    """Per step of the loop the block table costs one sector more."""
    cache = torch.zeros(6 * BLOCK_SIZE * NUM_HEADS * D, dtype=torch.int16)
    table = torch.tensor([4, 1], dtype=torch.int32)
    report = launch(kernel, (1, 32), cache, table, torch.zeros(32))
    assert report.total("global", "read", "cache").sectors == cache_sectors
    assert cache_sectors + report.total("global", "read", "table").sectors == with_the_table
    assert report.total("global", "read", "cache").efficiency == pytest.approx(256 / cache_sectors)


# What is summed, and how it is shown


@cuda.jit
def tree(out, a):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    tile[i] = a[i]
    cuda.syncthreads()
    step = 32
    while step > 0:
        if i < step:
            tile[i] += tile[i + step]
        cuda.syncthreads()
        step //= 2
    if i == 0:
        cuda.atomic.add(out, 0, tile[0])


@cuda.jit
def warp_sum(out, a):
    value = a[cuda.threadIdx.x]
    for k in range(5):
        value += cuda.shfl_xor_sync(0xFFFFFFFF, value, 1 << k)
    if cuda.any_sync(0xFFFFFFFF, value > 0):
        out[cuda.threadIdx.x] = value
    cuda.syncwarp()


def test_barriers_shuffles_votes_and_atomics() -> None:
    report = launch(tree, (3, 64), np.zeros(1, np.float32), np.zeros(64, np.float32))
    assert (report.barriers, report.atomics, report.shuffles) == (3 * 7, 3, 0)
    report = launch(warp_sum, (1, 64), np.zeros(64, np.float32), np.zeros(64, np.float32))
    assert (report.barriers, report.shuffles, report.votes, report.warp_syncs) == (0, 2 * 5, 2, 2)


def test_a_tree_by_hand() -> None:
    report = launch(tree, (1, 64), np.zeros(1, np.float32), np.zeros(64, np.float32))
    reads, writes = report.total("shared", "read"), report.total("shared", "write")
    assert reads.lanes == 2 * 63 + 1 and writes.lanes == 64 + 63
    assert reads.requests == 2 * 6 + 1 and writes.requests == 2 + 6
    assert report.accesses == 64 + 127 + 127 + 1
    (line,) = [r for r in report.lines if r.source == "tile[i] = a[i]" and r.kind == "read"]
    assert (line.kernel, line.space, line.array, line.requests, line.sectors) == ("tree", "global", "a", 2, 8)


def test_launches_add_up() -> None:
    with interpret() as report:
        tree[1, 64](np.zeros(1, np.float32), np.zeros(64, np.float32))
        once = report.total()
        tree[1, 64](np.zeros(1, np.float32), np.zeros(64, np.float32))
        warp_sum[1, 32](np.zeros(32, np.float32), np.ones(32, np.float32))
    assert report.launches == 3
    assert report.total(kernel="tree").requests == 2 * once.requests
    assert report.total(kernel="warp_sum").requests == 2


def test_iterations_are_kept_apart() -> None:
    """Lanes that stay in the loop for longer make requests of their own."""

    @cuda.jit
    def kernel(out, a):
        i = cuda.threadIdx.x
        for k in range(i // 8 + 1):
            out[i] += a[32 * k + i]

    total = launch(kernel, (1, 32), np.zeros(32, np.float32), np.zeros(128, np.float32)).total(array="a")
    assert (total.requests, total.lanes, total.sectors) == (4, 8 * (1 + 2 + 3 + 4), 4 + 3 + 2 + 1)


def test_after_a_sync_lanes_are_together_again() -> None:
    """Odd lanes read once more before the sync; the reads behind it are one request all the same."""

    @cuda.jit
    def kernel(out, a):
        i = cuda.threadIdx.x
        for k in range(2):
            for _ in range(2 if k == 0 and i % 2 else 1):
                out[i] += a[i]
            cuda.syncwarp()

    total = launch(kernel, (1, 32), np.zeros(32, np.float32), np.zeros(32, np.float32)).total(array="a")
    assert (total.requests, total.lanes) == (2 + 1, 48 + 32)


def test_an_array_that_nobody_has() -> None:
    report = launch(warp_sum, (1, 32), np.zeros(32, np.float32), np.zeros(32, np.float32))
    assert report.total(array="a").requests == 1
    assert report.total("shared", array="a").requests == 0
    with pytest.raises(ValueError, match="no kernel had an array 'tilde'; there is a, out"):
        report.total(array="tilde")


def test_a_line_of_a_device_function() -> None:
    @cuda.jit(device=True)
    def first_of(a):
        return a[0]

    @cuda.jit
    def kernel(left, right):
        left[1] = first_of(left) + first_of(right)

    report = launch(kernel, (1, 1), np.zeros(2), np.zeros(2))
    found = {(r.array, r.function, r.source) for r in report.lines if r.kind == "read"}
    assert found == {("left", "first_of", "return a[0]"), ("right", "first_of", "return a[0]")}


def full_report(schedule: Any, seed: int) -> tuple[str, str]:
    with interpret(schedule=schedule, seed=seed) as report:
        tree[3, 64](np.zeros(1, np.float32), np.zeros(64, np.float32))
        transpose[(1, 4), (32, 8)](np.zeros((32, 32), np.float32), np.zeros((32, 32), np.float32))
    return str(report), report._repr_html_()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_same_seed_gives_the_same_report(schedule: str) -> None:
    assert full_report(schedule, 7) == full_report(schedule, 7)
    assert full_report(schedule, 7) == full_report("in_order", 0)  # counts do not depend on the order


def test_the_table() -> None:
    text = launch(tree, (1, 64), np.zeros(1, np.float32), np.zeros(64, np.float32)).table().splitlines()
    assert text[0].split() == [
        "kernel",
        "line",
        "array",
        "space",
        "kind",
        "requests",
        "bytes",
        "sectors",
        "wavefronts",
        "efficiency",
        "source",
    ]
    assert any(
        row.split()[2:10] == ["a", "global", "read", "2", "256", "8", "0", "1.00"]
        and row.endswith("tile[i] = a[i]")
        for row in text
    )
    assert text[-1] == "1 launches, 319 accesses, 7 barriers, 0 shuffles, 1 atomics"
    html = launch(tree, (1, 64), np.zeros(1, np.float32), np.zeros(64, np.float32))._repr_html_()
    assert html.startswith("<table>") and "<code>tile[i] = a[i]</code>" in html
    assert Report().table().splitlines()[-1].startswith("0 launches")
