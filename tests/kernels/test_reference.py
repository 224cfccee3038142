"""The values of the backends that a CPU has, against the definition in `oracle`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from kernels import dispatch, reference
from tests.kernels.oracle import MIXES, attend_slowly, make_pages

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.fixture(params=["reference", "cpu"], scope="module", autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """All tests of this file on one backend, then on the other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(dispatch.BY_DEVICE, "cpu", request.param)
        yield


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16])
def test_mixes(name: str, block_size: int) -> None:
    pages = make_pages(MIXES[name], block_size)
    close(kernels.paged_attention(*pages.arguments), pages.expected())


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 100])
def test_sliding_window(name: str, window: int) -> None:
    pages = make_pages(MIXES[name], block_size=4)
    close(kernels.paged_attention(*pages.arguments, sliding_window=window), pages.expected(window))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(1, 1, 8), (4, 4, 8), (4, 1, 8), (6, 2, 24), (8, 2, 64), (3, 3, 1), (4, 2, 64)],
)
def test_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    pages = make_pages(MIXES["chunks"], 4, num_heads, num_kv_heads, head_dim)
    close(kernels.paged_attention(*pages.arguments), pages.expected())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    pages = make_pages(MIXES["chunks"], dtype=dtype, head_dim=64)
    out = kernels.paged_attention(*pages.arguments)
    assert out.dtype == dtype
    close(out, pages.expected())


@pytest.mark.parametrize("keys_per_piece", [1, 8, 20, 10_000])
def test_pieces_are_bounded_and_complete(keys_per_piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece gathers no more than its budget, unless it is a single sequence that alone needs more."""
    lengths = [(1, 7), (1, 5), (1, 6), (2, 9), (2, 2), (0, 30), (2, 3), (1, 1), (1, 1), (1, 1)]
    pages = make_pages(lengths)
    monkeypatch.setattr(reference, "PIECE_BYTES", keys_per_piece * 2 * pages.key_cache[0, 0].nbytes)
    tensors = (pages.block_tables, pages.query_start_loc, pages.seq_lens, pages.key_cache)
    pieces = reference.cut(*tensors)
    assert all(p.num_seqs == 1 or p.num_seqs * p.num_keys <= keys_per_piece for p in pieces)
    expected = {1: [1] * 9, 8: [1, 1, 1, 1, 1, 1, 3], 20: [2, 1, 2, 1, 3], 10_000: [3, 2, 1, 3]}
    assert [p.num_seqs for p in pieces] == expected[keys_per_piece]
    close(kernels.paged_attention(*pages.arguments), pages.expected())


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 2, 3, 4, 16]),
    heads=st.sampled_from([(2, 2), (4, 2), (6, 1)]),
    window=st.one_of(st.none(), st.integers(1, 20)),
    seed=st.integers(0, 1000),
)
def test_any_batch(
    lengths: list[tuple[int, int]], block_size: int, heads: tuple[int, int], window: int | None, seed: int
) -> None:
    lengths = [(query_len, query_len + context) for query_len, context in lengths]
    pages = make_pages(lengths, block_size, *heads, seed=seed, table_dtype=torch.int64)
    close(kernels.paged_attention(*pages.arguments, sliding_window=window), pages.expected(window))


def test_attention_is_the_same_however_a_sequence_is_cut() -> None:
    """Case S37: a mask made square, skipped with a cache, or aligned to the left gives another answer."""
    whole = make_pages([(12, 12)], block_size=4)
    at_once = kernels.paged_attention(*whole.arguments)
    for chunks in ((5, 4, 3), (1,) * 12):
        done, parts = 0, []
        for size in chunks:
            parts.append(
                kernels.paged_attention(
                    whole.query[done : done + size],
                    whole.key_cache,
                    whole.value_cache,
                    whole.block_tables,
                    torch.tensor([0, size]),
                    torch.tensor([done + size]),
                    whole.scale,
                )
            )
            done += size
        torch.testing.assert_close(torch.cat(parts), at_once, atol=1e-5, rtol=1e-5)


def test_a_key_is_seen_from_its_own_position_on() -> None:
    """Moves one key far away and looks which queries notice: exactly its own and the later ones."""
    for moved in range(9):
        pages = make_pages([(6, 9)], block_size=4)
        before = kernels.paged_attention(*pages.arguments)
        block = pages.block_tables[0, moved // 4]
        pages.value_cache[block, moved % 4] += 100.0
        after = kernels.paged_attention(*pages.arguments)
        noticed = [bool((before[i] != after[i]).any()) for i in range(6)]
        assert noticed == [3 + i >= moved for i in range(6)]


def test_blocks_behind_the_window_are_not_read() -> None:
    pages = make_pages([(1, 20), (2, 19)], block_size=4)
    expected = pages.expected(5)
    for row, first_visible in ((0, 15), (1, 13)):
        hidden = pages.block_tables[row, : first_visible // 4].long()
        pages.key_cache[hidden] = torch.nan
        pages.value_cache[hidden] = torch.nan
        pages.block_tables[row, : first_visible // 4] = 0  # as a manager with a null block leaves them
    close(kernels.paged_attention(*pages.arguments, sliding_window=5), expected)


def test_padding_of_the_table_does_not_matter() -> None:
    pages = make_pages([(1, 5), (3, 9), (1, 2)], block_size=4)
    expected = kernels.paged_attention(*pages.arguments)
    for row, used in enumerate((2, 3, 1)):
        pages.block_tables[row, used:] = 2**31 - 1
    assert torch.equal(kernels.paged_attention(*pages.arguments), expected)


def test_sequences_may_share_blocks() -> None:
    pages = make_pages([(1, 8), (1, 8)], block_size=4)
    pages.block_tables[1] = pages.block_tables[0]
    pages.query[1] = pages.query[0]
    out = kernels.paged_attention(*pages.arguments)
    torch.testing.assert_close(out[0], out[1])
    close(out[:1], attend_slowly(pages.query[:1], pages.keys[0], pages.values[0], pages.scale))


def test_padded_queries_give_zeros() -> None:
    pages = make_pages([(2, 5), (1, 3)])
    expected = pages.expected()
    pages.query = torch.cat((pages.query, torch.full((2, 4, 8), torch.nan)))
    out = kernels.paged_attention(*pages.arguments)
    close(out[:3], expected)
    assert torch.equal(out[3:], torch.zeros(2, 4, 8))


def test_a_query_may_be_a_view() -> None:
    """The decoder cuts query, key and value out of one projection."""
    pages = make_pages([(2, 5), (1, 3), (1, 6)])
    expected = pages.expected()
    wide = torch.randn(4, 9, 8)
    wide[:, :4] = pages.query
    pages.query = wide[:, :4]
    close(kernels.paged_attention(*pages.arguments), expected)


def test_out_is_written_and_returned() -> None:
    pages = make_pages([(2, 5), (1, 3)])
    out = torch.full_like(pages.query, torch.nan)
    assert kernels.paged_attention(*pages.arguments, out=out) is out
    close(out, pages.expected())


@pytest.mark.parametrize("window", [None, 3])
def test_decode_is_the_varlen_form_with_one_query_each(window: int | None) -> None:
    pages = make_pages([(1, 5), (1, 12), (1, 1)])
    tensors = (pages.query, pages.key_cache, pages.value_cache, pages.block_tables, pages.seq_lens)
    out = torch.empty_like(pages.query)
    result = kernels.paged_attention_decode(*tensors, pages.scale, sliding_window=window, out=out)
    assert result is out
    close(result, pages.expected(window))


# Writing and copying


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_tokens_land_in_their_slots(block_size: int) -> None:
    key, value = torch.randn(2, 5, 2, 8)
    caches = torch.zeros(2, 6, block_size, 2, 8)
    slots = torch.randperm(6 * block_size)[:5]
    kernels.reshape_and_cache(key, value, caches[0], caches[1], slots)
    expected = torch.zeros(2, 6, block_size, 2, 8)
    for i, slot in enumerate(slots.tolist()):
        expected[0, slot // block_size, slot % block_size] = key[i]
        expected[1, slot // block_size, slot % block_size] = value[i]
    assert torch.equal(caches, expected)


def test_slot_minus_one_writes_nothing() -> None:
    """Case S33: plain indexing by -1 would hit the last slot of the last block."""
    key_cache, value_cache = torch.zeros(2, 3, 4, 1, 1)
    new = torch.tensor([10.0, 99.0]).view(2, 1, 1)
    kernels.reshape_and_cache(new, new, key_cache, value_cache, torch.tensor([5, -1]))
    expected = torch.zeros(12)
    expected[5] = 10
    assert torch.equal(key_cache.flatten(), expected)
    assert torch.equal(value_cache.flatten(), expected)


def test_only_padding_writes_nothing() -> None:
    key_cache, value_cache = torch.zeros(2, 3, 4, 1, 1)
    new = torch.ones(2, 1, 1)
    kernels.reshape_and_cache(new, new, key_cache, value_cache, torch.tensor([-1, -1]))
    assert not key_cache.any() and not value_cache.any()


def test_blocks_are_copied_in_every_layer() -> None:
    layers = [tuple(torch.randn(2, 6, 4, 2, 8)) for _ in range(3)]
    before = [(key.clone(), value.clone()) for key, value in layers]
    kernels.copy_blocks(layers, [(1, 4), (1, 0), (3, 5), (2, 3), (3, 1)])
    sources = [1, 2, 2, 2, 1, 3]  # 3 was copied away before 2 came to it, and went on to 1
    for after, old in zip(layers, before, strict=True):
        for cache, was in zip(after, old, strict=True):
            assert torch.equal(cache, was[sources])


def test_nothing_to_copy() -> None:
    cache = torch.randn(3, 4, 2, 8)
    kernels.copy_blocks([(cache, cache.clone())], [])
    kernels.copy_blocks([], [(0, 1)])
