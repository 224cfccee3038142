"""What all backends share: the contracts, one plan for the layers of a step, refusals in one clear sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from kernels.dispatch import DirectPlan
from tests.kernels.oracle import MIXES, Pages, make_pages


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


ON_THE_CPU = ("reference", "cpu", "interpreter")
every_backend = pytest.mark.parametrize("backend", ON_THE_CPU)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [*ON_THE_CPU, "plain"])
def test_a_plan_serves_every_layer(name: str) -> None:
    backend = Plain() if name == "plain" else kernels.backend_for("cpu", name)
    pages = make_pages(MIXES["decode between prompts"])
    plan, slots = plan_and_slots(pages, backend)
    assert isinstance(plan, DirectPlan) == isinstance(backend, Plain)
    for _ in range(2):
        key, value = torch.randn(2, len(slots), 2, 8)
        plan.write(key, value, pages.key_cache, pages.value_cache)
        assert torch.equal(pages.key_cache.flatten(0, 1)[slots], key)
        assert torch.equal(pages.value_cache.flatten(0, 1)[slots], value)
        out = plan.attend(pages.query, pages.key_cache, pages.value_cache, pages.scale)
        close(out, kernels.paged_attention(*pages.arguments, backend="reference").double())


# What every backend promises


@every_backend
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("name", MIXES)
def test_mixes(name: str, window: int | None, backend: str) -> None:
    pages = make_pages(MIXES[name], block_size=4)
    close(kernels.paged_attention(*pages.arguments, window, backend=backend), pages.expected(window))


@every_backend
def test_tables_may_be_64_bit(backend: str) -> None:
    pages = make_pages(MIXES["chunks"], table_dtype=torch.int64)
    close(kernels.paged_attention(*pages.arguments, backend=backend), pages.expected())


@every_backend
def test_padding_of_the_table_does_not_matter(backend: str) -> None:
    pages = make_pages([(1, 5), (3, 9), (1, 2)], block_size=4)
    for row, used in enumerate((2, 3, 1)):
        pages.block_tables[row, used:] = 2**31 - 1
    close(kernels.paged_attention(*pages.arguments, backend=backend), pages.expected())


@every_backend
def test_blocks_behind_the_window_are_not_read(backend: str) -> None:
    pages = make_pages([(1, 20), (2, 19)], block_size=4)
    for row, first_visible in ((0, 15), (1, 13)):
        pages.block_tables[row, : first_visible // 4] = 2**31 - 1
    close(kernels.paged_attention(*pages.arguments, 5, backend=backend), pages.expected(5))


@every_backend
def test_padded_queries_give_zeros(backend: str) -> None:
    pages = make_pages([(2, 5), (1, 3)])
    expected = pages.expected()
    pages.query = torch.cat((pages.query, torch.full((2, 4, 8), torch.nan)))
    out = torch.full_like(pages.query, torch.nan)
    assert kernels.paged_attention(*pages.arguments, out=out, backend=backend) is out
    close(out[:3], expected)
    assert torch.equal(out[3:], torch.zeros(2, 4, 8))


@every_backend
def test_a_query_may_be_a_view(backend: str) -> None:
    pages = make_pages([(2, 5), (1, 3), (1, 6)])
    wide = torch.randn(4, 9, 8)
    wide[:, :4] = pages.query
    pages.query = wide[:, :4]
    close(kernels.paged_attention(*pages.arguments, backend=backend), pages.expected())


@every_backend
@pytest.mark.parametrize("window", [None, 3])
def test_decode_is_the_varlen_form_with_one_query_each(window: int | None, backend: str) -> None:
    pages = make_pages([(1, 5), (1, 12), (1, 1)])
    tensors = (pages.query, pages.key_cache, pages.value_cache, pages.block_tables, pages.seq_lens)
    out = torch.full_like(pages.query, torch.nan)
    result = kernels.paged_attention_decode(*tensors, pages.scale, window, out, backend)
    assert result is out
    close(out, pages.expected(window))


@every_backend
def test_nobody_to_attend(backend: str) -> None:
    pages = make_pages([(0, 3), (0, 5)])
    assert kernels.paged_attention(*pages.arguments, backend=backend).shape == (0, 4, 8)


@every_backend
def test_tokens_land_in_their_slots_and_padding_nowhere(backend: str) -> None:
    key, value = torch.randn(2, 4, 2, 8)
    caches, expected = torch.zeros(2, 3, 4, 2, 8), torch.zeros(2, 12, 2, 8)
    slots = torch.tensor([5, -1, 11, 0])
    kernels.reshape_and_cache(key, value, caches[0], caches[1], slots, backend)
    expected[0, slots[slots >= 0]], expected[1, slots[slots >= 0]] = key[slots >= 0], value[slots >= 0]
    assert torch.equal(caches.flatten(1, 2), expected)


@every_backend
def test_nothing_to_write(backend: str) -> None:
    caches = torch.zeros(2, 3, 4, 2, 8)
    kernels.reshape_and_cache(*torch.ones(2, 2, 2, 8), *caches, torch.tensor([-1, -1]), backend)
    kernels.reshape_and_cache(*torch.ones(2, 0, 2, 8), *caches, torch.zeros(0, dtype=torch.int64), backend)
    assert not caches.any()


@every_backend
def test_blocks_are_copied_in_order_in_every_layer(backend: str) -> None:
    layers = [tuple(torch.randn(2, 6, 4, 2, 8)) for _ in range(2)]
    before = [(key.clone(), value.clone()) for key, value in layers]
    kernels.copy_blocks(layers, [(1, 4), (1, 0), (3, 5), (2, 3), (3, 1)], backend)
    sources = [1, 2, 2, 2, 1, 3]  # 3 was copied away before 2 came to it, and went on to 1
    for after, old in zip(layers, before, strict=True):
        for cache, was in zip(after, old, strict=True):
            assert torch.equal(cache, was[sources])


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
        (lambda p: {"seq_lens": p.seq_lens.double()}, "seq_lens must be integers, not .* float64"),
        (lambda p: {"query_start_loc": p.query_start_loc.half()}, "query_start_loc must be integers"),
        (lambda p: {"query": p.query[:, :0]}, r"query is \[3, 0, 8\] float32, but this cache needs"),
        (
            lambda p: {"key_cache": p.key_cache[:, :, :0], "value_cache": p.value_cache[:, :, :0]},
            r"key_cache has shape \[.*, 4, 0, 8\]",
        ),
        (lambda p: {"query": p.query.to("meta")}, "query is on meta but key_cache is on cpu"),
        (lambda p: {"value_cache": p.value_cache.to("meta")}, "value_cache is on meta but key_cache is on"),
        (lambda p: {"out": p.query.to("meta")}, "out is on meta but query is on cpu"),
        (lambda p: {"sliding_window": 0}, "sliding_window must be at least 1 token, not 0"),
        (lambda p: {"out": p.query[:1]}, "out is .* but query is"),
        (
            lambda p: {"backend": "abacus"},
            "no kernel backend 'abacus'; what exists is reference, cpu, cuda, interpreter$",
        ),
    ],
)
def test_what_does_not_fit_is_said_in_one_sentence(
    change: Callable[[Pages], dict[str, Any]], sentence: str
) -> None:
    pages = make_pages([(2, 5), (1, 3)])
    names = ("query", "key_cache", "value_cache", "block_tables", "query_start_loc", "seq_lens", "scale")
    arguments: dict[str, Any] = dict(zip(names, pages.arguments, strict=True))
    arguments |= change(pages)
    with pytest.raises(ValueError, match=sentence) as caught:
        kernels.paged_attention(**arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("block", "window"), [(1, None), (2, 5)])
@pytest.mark.parametrize("wrong", [-1, 12345])
def test_a_block_that_does_not_exist_is_not_read_on_the_cpu(
    block: int, window: int | None, wrong: int
) -> None:
    pages = make_pages([(1, 3), (1, 12)])
    pages.block_tables[1, block] = wrong
    with pytest.raises(ValueError, match=rf"block_tables\[1, {block}\] is {wrong}, but the cache has"):
        kernels.paged_attention(*pages.arguments, window, backend="cpu")


def test_every_layer_must_have_the_block_that_is_copied() -> None:
    large, small = torch.ones(3, 4, 2, 8), torch.zeros(2, 4, 2, 8)
    with pytest.raises(ValueError, match="block 2 does not exist; the cache has 2 blocks"):
        kernels.copy_blocks([(large, large.clone()), (small, small.clone())], [(0, 2)])


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
        ([(0, 1), (-1, 1)], "block -1 does not exist"),
        ([(0, 1, 2)], r"a pair is \(source, destination\), not \(0, 1, 2\)"),
    ],
)
def test_copies_of_blocks_that_do_not_exist(pairs: list[tuple[int, int]], sentence: str) -> None:
    cache = torch.randn(3, 4, 2, 8)
    before = cache.clone()
    with pytest.raises(ValueError, match=sentence):
        kernels.copy_blocks([(cache, cache.clone())], pairs)
    assert torch.equal(cache, before)
