"""The decode kernels in the interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import kernels.cuda
from kernels.interpreter import interpret
from tests.kernels.cuda_checks import SCHEDULES, attend, guarded, judge, small
from tests.kernels.oracle import make_pages

# A failing case is small enough as it is; making it smaller would take minutes.
some = settings(deadline=None, database=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TILE = 32  # keys, of the plain kernel with head_dim 8
ROUND = 16  # keys, of the split kernel with two warps and fp32


def lengths(tile: int) -> st.SearchStrategy[list[int]]:
    """Of one to three sequences: the edges of tiles, three tiles and more, anything."""
    edges = st.sampled_from([1, tile - 1, tile, tile + 1, 2 * tile, 3 * tile - 1, 3 * tile + 1])
    return st.lists(st.one_of(edges, st.integers(1, 4 * tile)), min_size=1, max_size=3)


windows = st.one_of(st.none(), st.integers(1, 70))


@settings(some, max_examples=25)
@given(
    seq_lens=lengths(TILE),
    block_size=st.sampled_from([1, 3, 4, 16, 48]),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]),
    dtype=st.sampled_from(DTYPES),
    window=windows,
    schedule=st.sampled_from(SCHEDULES),
    seed=st.integers(0, 1000),
)
def test_plain(seq_lens, block_size, heads, dtype, window, schedule, seed) -> None:  # type: ignore[no-untyped-def]
    pages = make_pages([(1, n) for n in seq_lens], block_size, *heads, 8, dtype, seed)
    attend(kernels.cuda, pages, window, "plain", schedule)


@pytest.mark.parametrize("head_dim", [1, 24, 40])
def test_plain_serves_any_head_dim(head_dim: int) -> None:
    attend(kernels.cuda, make_pages([(1, 37), (1, 5)], 5, 2, 1, head_dim), 30, "plain")


@settings(some, max_examples=20)
@given(
    seq_lens=lengths(ROUND),
    block_size=st.sampled_from([8, 16, 32, 24, 64]),
    group=st.sampled_from([1, 2, 4, 8]),
    num_kv_heads=st.integers(1, 2),
    dtype=st.sampled_from(DTYPES),
    window=windows,
    rounds=st.integers(1, 4),
    schedule=st.sampled_from(SCHEDULES),
    seed=st.integers(0, 1000),
)
def test_split(  # type: ignore[no-untyped-def]
    seq_lens, block_size, group, num_kv_heads, dtype, window, rounds, schedule, seed
) -> None:
    num_kv_heads = 1 if group == 8 else num_kv_heads
    heads = (group * num_kv_heads, num_kv_heads)
    pages = make_pages([(1, n) for n in seq_lens], block_size, *heads, 64, dtype, seed)
    with small(kernels.cuda, rounds=rounds):
        attend(kernels.cuda, pages, window, "split", schedule)


@pytest.mark.parametrize(
    ("head_dim", "group", "dtype"),
    [(64, 4, torch.bfloat16), (128, 4, torch.bfloat16), (128, 8, torch.float32), (256, 2, torch.float32),
     (256, 1, torch.float16)],
)  # fmt: skip
def test_split_as_it_is_launched(head_dim: int, group: int, dtype: torch.dtype) -> None:
    """With its four warps: a round and a bit more."""
    step = kernels.cuda.attention.tiling_for(kernels.cuda.elements.ELEMENTS[dtype], head_dim, group, 16).step  # type: ignore[union-attr]
    attend(kernels.cuda, make_pages([(1, step + 3)], 16, group, 1, head_dim, dtype), None, "split")


@pytest.mark.parametrize("num_splits", [1, 2, 3, 7])
def test_the_number_of_splits_does_not_matter(num_splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven splits of at least one round leave three of them empty here, and all but one for the shorter one."""
    pages = make_pages([(1, 60), (1, 9)], 16, 2, 1, 64)
    monkeypatch.setattr(kernels.cuda.attention, "choose_splits", lambda *_: num_splits)
    with small(kernels.cuda):
        attend(kernels.cuda, pages, None, "split")


def test_a_long_sequence_is_split_so_that_each_split_can_hold_its_block_ids(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With room for 6 ids instead of 512, the index check of the interpreter sees it at 13 blocks."""
    monkeypatch.setattr(kernels.cuda.decode_split, "TABLE_BLOCKS", 6)
    monkeypatch.setattr(kernels.cuda.attention, "TABLE_BLOCKS", 6)
    for window in (None, 90):
        with small(kernels.cuda, rounds=100):
            attend(kernels.cuda, make_pages([(1, 101)], 8, 1, 1, 64), window, "split")


@pytest.mark.parametrize("kernel", ["plain", "split", None])
def test_a_sequence_without_tokens_gives_zeros(kernel: str | None) -> None:
    """As the padding of a recorded batch has it; its table names no block."""
    pages = make_pages([(1, 5), (1, 3)], 8, 2, 1, 64)
    expected = pages.expected()
    expected[1] = 0
    pages.seq_lens[1] = 0
    pages.block_tables[1] = 2**31 - 1
    whole, out = guarded(pages.query.shape, pages.query.dtype)
    tensors = (pages.query, pages.key_cache, pages.value_cache, pages.block_tables, pages.seq_lens)
    with interpret(), small(kernels.cuda):
        kernels.cuda.paged_attention_decode(*tensors, pages.scale, out=out, kernel=kernel)  # type: ignore[arg-type]
    judge(out, whole, expected)


@pytest.mark.parametrize("kernel", ["plain", "split", "varlen"])
@pytest.mark.parametrize("cache", ["key_cache", "value_cache"])
def test_a_nan_that_is_visible_is_not_hidden(kernel: str, cache: str) -> None:
    pages = make_pages([(1, 20), (1, 20)], 8, 2, 1, 64)
    block = pages.block_tables[0, 1]
    getattr(pages, cache)[block, 3] = torch.nan
    out = torch.zeros_like(pages.query)
    tensors = (pages.query, pages.key_cache, pages.value_cache, pages.block_tables)
    with interpret(), small(kernels.cuda):
        if kernel == "varlen":
            attend_varlen = kernels.cuda.attention.attend_varlen
            starts = pages.query_start_loc
            sequences = kernels.cuda.sequences_of(tensors[3], starts, pages.seq_lens, 8, None, 1)
            attend_varlen(out, *tensors[:3], sequences, pages.scale)
        else:
            kernels.cuda.paged_attention_decode(*tensors, pages.seq_lens, pages.scale, None, out, kernel)  # type: ignore[arg-type]
    assert out[0].isnan().all() and not out[1].isnan().any()


def test_rows_are_read_once_for_a_group() -> None:
    """The sectors of the keys are those of the tokens, however many heads share them."""
    tokens, sector = 48, 32
    for group in (1, 4):
        pages = make_pages([(1, tokens)], 16, group, 1, 64)
        tensors = (pages.query, pages.key_cache, pages.value_cache, pages.block_tables, pages.seq_lens)
        with interpret() as report, small(kernels.cuda, rounds=8):
            kernels.cuda.paged_attention_decode(*tensors, pages.scale, kernel="split")
        read = report.total(space="global", kind="read", array="key_cache")
        assert read.sectors == tokens * 64 * 4 // sector
        assert read.efficiency == 1.0
