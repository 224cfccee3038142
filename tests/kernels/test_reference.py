"""The reference backend against the definition in `oracle`, and the contracts that all backends share."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from kernels import reference
from kernels.dispatch import DirectPlan
from tests.kernels.oracle import Pages, attend_slowly, make_pages

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}

MIXES = {
    "one prompt": [(7, 7)],
    "one decode": [(1, 9)],
    "decodes of different lengths": [(1, 1), (1, 4), (1, 5), (1, 17), (1, 8)],
    "decodes of one length": [(1, 8), (1, 8), (1, 8)],
    "prompts of one length": [(6, 6), (6, 6)],
    "chunks": [(5, 12), (3, 4), (5, 5), (1, 30)],
    "decode between prompts": [(4, 4), (1, 9), (4, 11), (1, 3), (2, 2)],
    "a sequence with no query": [(1, 5), (0, 6), (1, 7), (3, 9)],
    "exact blocks": [(4, 8), (1, 16), (8, 8)],
}


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
    kernels.copy_blocks(layers, [(1, 4), (1, 0), (3, 5)])
    sources = [1, 1, 2, 3, 1, 3]
    for after, old in zip(layers, before, strict=True):
        for cache, was in zip(after, old, strict=True):
            assert torch.equal(cache, was[sources])


def test_nothing_to_copy() -> None:
    cache = torch.randn(3, 4, 2, 8)
    kernels.copy_blocks([(cache, cache.clone())], [])
    kernels.copy_blocks([], [(0, 1)])


# One plan for all layers of a step


def plan_and_slots(pages: Pages, backend: kernels.Backend) -> tuple[kernels.StepPlan, torch.Tensor]:
    starts, slots = pages.query_start_loc.tolist(), []
    block_size = pages.key_cache.shape[1]
    for i, seq_len in enumerate(pages.seq_lens.tolist()):
        for position in range(seq_len - (starts[i + 1] - starts[i]), seq_len):
            block = int(pages.block_tables[i, position // block_size])
            slots.append(block * block_size + position % block_size)
    slot_mapping = torch.tensor(slots)
    tables = (pages.block_tables, pages.query_start_loc, pages.seq_lens)
    return kernels.plan_step(backend, slot_mapping, *tables, pages.key_cache), slot_mapping


class Plain:
    """A backend that prepares nothing, as a learner's would be."""

    reshape_and_cache = staticmethod(kernels.reshape_and_cache)
    paged_attention = staticmethod(kernels.paged_attention)
    paged_attention_decode = staticmethod(kernels.paged_attention_decode)
    copy_blocks = staticmethod(kernels.copy_blocks)


@pytest.mark.parametrize("backend", [kernels.backend_for("cpu"), Plain()], ids=["reference", "plain"])
def test_a_plan_serves_every_layer(backend: kernels.Backend) -> None:
    pages = make_pages(MIXES["decode between prompts"])
    plan, slots = plan_and_slots(pages, backend)
    assert isinstance(plan, DirectPlan) == isinstance(backend, Plain)
    for _ in range(2):
        key, value = torch.randn(2, len(slots), 2, 8)
        plan.write(key, value, pages.key_cache, pages.value_cache)
        assert torch.equal(pages.key_cache.flatten(0, 1)[slots], key)
        assert torch.equal(pages.value_cache.flatten(0, 1)[slots], value)
        out = plan.attend(pages.query, pages.key_cache, pages.value_cache, pages.scale)
        assert torch.equal(out, kernels.paged_attention(*pages.arguments))


# Refusals


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda p: {"query": p.query[0]}, r"query is \[4, 8\] float32, but this cache needs"),
        (lambda p: {"query": p.query[:, :3]}, "a multiple of 2 heads"),
        (lambda p: {"query": p.query[:, :, :4]}, r"query is \[3, 4, 4\] float32"),
        (lambda p: {"query": p.query.half()}, "query is .* float16, but this cache needs .* float32"),
        (lambda p: {"key_cache": p.key_cache[0]}, r"key_cache has shape \[4, 2, 8\]"),
        (lambda p: {"key_cache": p.key_cache[:, :3]}, "key_cache is .* but value_cache is"),
        (lambda p: {"key_cache": p.key_cache.half()}, "float16 but value_cache is"),
        (lambda p: {"key_cache": p.key_cache.transpose(0, 1).contiguous().transpose(0, 1)}, "contiguous"),
        (lambda p: {"block_tables": p.block_tables[0]}, "block_tables must be"),
        (lambda p: {"block_tables": p.block_tables.float()}, "block_tables must be .* integers"),
        (lambda p: {"seq_lens": p.seq_lens[:1]}, r"seq_lens must be \[2\]"),
        (lambda p: {"query_start_loc": p.query_start_loc[:2]}, r"query_start_loc \[3\]"),
        (lambda p: {"query_start_loc": p.query_start_loc + 1}, "runs from 1 to 4, but there are 3 queries"),
        (
            lambda p: {"query_start_loc": torch.tensor([0, 4, 3])},
            "sequence 1 has 3 tokens, so it cannot have -1",
        ),
        (
            lambda p: {"seq_lens": torch.tensor([1, 3])},
            "sequence 0 has 1 tokens, so it cannot have 2 queries",
        ),
        (
            lambda p: {"seq_lens": torch.tensor([17, 3])},
            r"sequence 0 has 17 tokens, .* room for 16 \(4 blocks of 4",
        ),
        (lambda p: {"sliding_window": 0}, "sliding_window must be at least 1 token, not 0"),
        (lambda p: {"out": p.query[:1]}, "out is .* but query is"),
        (lambda p: {"backend": "abacus"}, "there is no kernel backend 'abacus'; what exists is reference"),
    ],
)
def test_what_does_not_fit_is_said_in_one_sentence(change: object, sentence: str) -> None:
    pages = make_pages([(2, 5), (1, 3)])
    names = ("query", "key_cache", "value_cache", "block_tables", "query_start_loc", "seq_lens", "scale")
    arguments = dict(zip(names, pages.arguments, strict=True))
    arguments |= change(pages)  # type: ignore[operator]
    with pytest.raises(ValueError, match=sentence) as caught:
        kernels.paged_attention(**arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("backend", ["cpu", "interpreter", "cuda"])
def test_backends_to_come_are_refused(backend: str) -> None:
    with pytest.raises(kernels.BackendError, match="what exists is reference"):
        kernels.backend_for("cpu", backend)


@pytest.mark.parametrize(
    ("slots", "key_shape", "sentence"),
    [
        (torch.zeros(2), (2, 2, 8), r"slot_mapping must be \[2\] int64, not \[2\] float32"),
        (torch.zeros(2, dtype=torch.int32), (2, 2, 8), "int32"),
        (torch.zeros(3, dtype=torch.int64), (2, 2, 8), r"slot_mapping must be \[2\] int64, not \[3\]"),
        (
            torch.zeros(2, dtype=torch.int64),
            (2, 3, 8),
            r"key is \[2, 3, 8\] float32, but a token of this cache is",
        ),
    ],
)
def test_writes_that_do_not_fit(slots: torch.Tensor, key_shape: tuple[int, ...], sentence: str) -> None:
    caches = torch.zeros(2, 3, 4, 2, 8)
    with pytest.raises(ValueError, match=sentence):
        kernels.reshape_and_cache(torch.ones(key_shape), torch.ones(2, 2, 8), caches[0], caches[1], slots)
    assert not caches.any()


@pytest.mark.parametrize(
    ("pairs", "sentence"),
    [
        ([(0, 3)], "block 3 does not exist; the cache has 3 blocks"),
        ([(-1, 1)], "block -1 does not exist"),
        ([(0, 1), (1, 2)], "write a block that another pair reads or writes"),
        ([(0, 2), (1, 2)], "write a block that another pair reads or writes"),
    ],
)
def test_copies_that_make_no_sense(pairs: list[tuple[int, int]], sentence: str) -> None:
    cache = torch.zeros(3, 4, 2, 8)
    with pytest.raises(ValueError, match=sentence):
        kernels.copy_blocks([(cache, cache.clone())], pairs)
