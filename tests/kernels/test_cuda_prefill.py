"""The prefill kernel in the interpreter, and whole steps through the host code, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
import kernels.cuda
from tests.kernels.cuda_checks import SCHEDULES, attend, small
from tests.kernels.oracle import make_pages
from tests.kernels.test_cuda_decode import DTYPES, some, windows

TILE = 32  # keys

sequences = st.tuples(
    st.one_of(st.integers(0, 6), st.just(9)), st.one_of(st.integers(0, 70), st.just(3 * TILE))
)


@settings(some, max_examples=10)
@given(
    lengths=st.lists(sequences, min_size=1, max_size=2),
    block_size=st.sampled_from([8, 16, 32, 40]),
    group=st.sampled_from([1, 2, 3, 4]),
    dtype=st.sampled_from(DTYPES),
    window=windows,
    schedule=st.sampled_from(SCHEDULES),
    seed=st.integers(0, 1000),
)
def test_any_step(lengths, block_size, group, dtype, window, schedule, seed) -> None:  # type: ignore[no-untyped-def]
    """Sequences with one new token go to the split kernel, the others to this one; group 3 goes to it whole."""
    lengths = [(query_len, query_len + context) for query_len, context in lengths]
    pages = make_pages(lengths, block_size, group, 1, 64, dtype, seed)
    with small(kernels.cuda, warps=1):
        attend(kernels.cuda, pages, window, "varlen", schedule)


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, torch.bfloat16), (128, torch.float32), (256, torch.float16)]
)
def test_prefill_as_it_is_launched(head_dim: int, dtype: torch.dtype) -> None:
    """With its four warps: two tiles of keys, and rows that fill no tile."""
    attend(kernels.cuda, make_pages([(3, 34)], 16, 2, 1, head_dim, dtype), None, "varlen")


@settings(some, max_examples=20)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), min_size=1, max_size=5),
    block_size=st.sampled_from([1, 2, 3, 4, 16]),
    heads=st.sampled_from([(2, 2), (4, 2), (6, 1)]),
    window=st.one_of(st.none(), st.integers(1, 20)),
    seed=st.integers(0, 1000),
)
def test_any_step_of_any_shape(lengths, block_size, heads, window, seed) -> None:  # type: ignore[no-untyped-def]
    """A head_dim that the fast kernels do not serve: every query is the newest token of a shorter sequence."""
    lengths = [(query_len, query_len + context) for query_len, context in lengths]
    attend(kernels.cuda, make_pages(lengths, block_size, *heads, 8, seed=seed), window, "varlen")


def test_attention_is_the_same_however_a_sequence_is_cut() -> None:
    """Case S37: a mask made square, skipped with a cache, or aligned to the left gives another answer."""
    whole = make_pages([(12, 12)], 8, 2, 1, 64)

    def rows(first: int, size: int) -> torch.Tensor:
        tensors = (whole.query[first : first + size], whole.key_cache, whole.value_cache, whole.block_tables)
        starts, seq_lens = torch.tensor([0, size]), torch.tensor([first + size])
        return kernels.paged_attention(*tensors, starts, seq_lens, whole.scale, backend="interpreter")

    with small(kernels.cuda, warps=1):
        at_once = rows(0, 12)
        torch.testing.assert_close(at_once.double(), whole.expected(), atol=1e-5, rtol=1e-5)
        for chunks in ((5, 4, 3), (1,) * 12):
            parts = [rows(sum(chunks[:i]), size) for i, size in enumerate(chunks)]
            torch.testing.assert_close(torch.cat(parts), at_once, atol=1e-5, rtol=1e-5)


def test_a_query_may_be_a_view_and_its_padding_gives_zeros() -> None:
    """The decoder cuts query, key and value out of one projection; a step may be padded."""
    pages = make_pages([(2, 5), (1, 3)], 8, 4, 2, 64)
    expected = pages.expected()
    wide = torch.full((5, 8, 64), torch.nan)
    wide[:3, :4] = pages.query
    pages.query = wide[:, :4]
    out = kernels.paged_attention(*pages.arguments, backend="interpreter")
    torch.testing.assert_close(out[:3].double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(out[3:], torch.zeros(2, 4, 64))


def test_a_query_whose_rows_are_not_aligned_is_copied() -> None:
    pages = make_pages([(1, 5), (1, 3)], 8, 2, 1, 64)
    wide = torch.randn(2, 129)
    wide[:, 1:] = pages.query.flatten(1)
    pages.query = wide[:, 1:].unflatten(1, (2, 64))
    out = kernels.paged_attention(*pages.arguments, backend="interpreter")
    torch.testing.assert_close(out.double(), pages.expected(), atol=1e-5, rtol=1e-5)
