"""What surrounds the CUDA kernels: which one runs, with how many splits, on which device, and the number formats."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numba import cuda as numba_cuda

import kernels
import kernels.cuda
from kernels.cuda.attention import choose_splits
from kernels.cuda.elements import ELEMENTS, Element
from kernels.cuda.sequences import sequences_of
from kernels.cuda.tiling import tiling_for
from kernels.interpreter import interpret
from tests.kernels.oracle import Pages, make_pages

H200 = 132  # processors


def kernels_of(pages: Pages, **options: Any) -> list[str]:
    with interpret() as report:
        kernels.cuda.paged_attention(*pages.arguments, **options)
    return list(dict.fromkeys(record.kernel for record in report.lines))


@pytest.mark.parametrize(
    ("lengths", "heads", "head_dim", "block_size", "expected"),
    [
        ([(1, 9), (1, 3)], (2, 1), 64, 8, ["decode_split", "merge"]),
        ([(1, 9), (2, 3)], (2, 1), 64, 8, ["decode_split", "merge", "prefill"]),
        ([(3, 9), (2, 3)], (2, 1), 64, 8, ["prefill"]),
        ([(1, 9), (2, 3)], (3, 1), 64, 8, ["prefill"]),
        ([(1, 9), (2, 3)], (2, 1), 32, 8, ["decode_plain"]),
        ([(1, 9), (2, 3)], (2, 1), 64, 4, ["decode_plain"]),
    ],
)
def test_which_kernel_runs(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    expected: list[str],
) -> None:
    assert kernels_of(make_pages(lengths, block_size, *heads, head_dim)) == expected


def test_a_cache_that_is_not_aligned_goes_to_the_plain_kernel() -> None:
    pages = make_pages([(1, 5)], 8, 1, 1, 64)
    shifted = torch.zeros(pages.key_cache.numel() + 1)[1:].view(pages.key_cache.shape)
    pages.key_cache = shifted.copy_(pages.key_cache)
    assert kernels_of(pages) == ["decode_plain"]


def test_a_split_kernel_that_does_not_serve_the_shape_says_so() -> None:
    pages = make_pages([(1, 5)], 8, 3, 1, 64)
    tensors = (pages.query, pages.key_cache, pages.value_cache, pages.block_tables, pages.seq_lens)
    with pytest.raises(ValueError, match=r"does not serve 3 query heads with blocks of \[8, 1, 64\]"):
        kernels.cuda.paged_attention_decode(*tensors, 1.0, kernel="split")


def test_a_number_format_that_no_kernel_knows() -> None:
    pages = make_pages([(1, 5)], dtype=torch.float64)
    sentence = "the CUDA kernels know float32, float16, bfloat16, but query and cache are float64"
    with pytest.raises(ValueError, match=sentence):
        kernels.paged_attention(*pages.arguments, backend="interpreter")


def test_a_tensor_that_lies_elsewhere_is_named() -> None:
    pages = make_pages([(1, 5)])
    out = torch.empty_like(pages.query, device="meta")
    with pytest.raises(ValueError, match="out is on meta but query is on cpu"):
        kernels.paged_attention(*pages.arguments, out=out, backend="interpreter")


@pytest.mark.parametrize(
    ("num_seqs", "num_kv_heads", "tokens", "window", "expected"),
    [
        (1, 8, 1024, None, 8),  # no split of less than 8 rounds of 16 tokens each
        (1, 8, 32768, None, 49),  # 392 of 396 places, all at once
        (8, 8, 32768, None, 6),
        (64, 8, 1024, None, 2),  # twice as many blocks as places, so that the end is not half empty
        (1024, 8, 1024, None, 1),
        (1024, 8, 32768, None, 5),  # more would not fit into the table that a split holds
        (1, 8, 32768, 100, 1),
    ],
)
def test_the_number_of_splits(
    num_seqs: int, num_kv_heads: int, tokens: int, window: int | None, expected: int
) -> None:
    tables = torch.zeros(num_seqs, tokens // 16, dtype=torch.int32)
    starts, seq_lens = torch.arange(num_seqs + 1), torch.full((num_seqs,), tokens)
    sequences = sequences_of(tables, starts, seq_lens, 16, window, 1)
    assert choose_splits(num_seqs * num_kv_heads, sequences, 16, H200) == expected


def test_a_split_never_needs_more_block_ids_than_it_holds() -> None:
    for block_size in (8, 16, 32):
        for columns in (1, 511, 512, 513, 5000):
            tables = torch.zeros(1, columns, dtype=torch.int32)
            sequences = sequences_of(tables, torch.arange(2), torch.zeros(1), block_size, None, 1)
            for step in (16, 64, 128):
                splits = choose_splits(10**6, sequences, step, H200)
                size = -(-sequences.room // (splits * step)) * step
                assert -(-(size + block_size - 1) // block_size) <= kernels.cuda.decode_split.TABLE_BLOCKS


def test_a_group_of_eight_takes_two_passes() -> None:
    tiling = tiling_for(ELEMENTS[torch.bfloat16], 128, 8, 16)
    assert tiling is not None and (tiling.group, tiling.passes) == (4, 2)
    assert tiling_for(ELEMENTS[torch.bfloat16], 128, 16, 16) is None


# Devices


def test_no_gpu_is_said_in_one_sentence() -> None:
    sentence = (
        r"backend 'cuda' needs tensors on a GPU, and these are on cpu: use backend='cpu', 'reference' or"
    )
    with pytest.raises(kernels.BackendError, match=sentence):
        kernels.backend_for("cpu", "cuda")
    with interpret():
        assert kernels.backend_for("cpu", "cuda") is kernels.cuda


def test_the_interpreter_does_not_read_a_gpu() -> None:
    with pytest.raises(
        kernels.BackendError, match="the interpreter reads CPU tensors, and these are on cuda:0"
    ):
        kernels.backend_for("cuda:0", "interpreter")


def test_the_backend_joins_an_interpreter_that_is_open() -> None:
    pages = make_pages([(1, 5)], 8, 1, 1, 64)
    with interpret() as report:
        kernels.paged_attention(*pages.arguments, backend="interpreter")
    assert report.launches == 2  # the split and the merge


# Number formats


def through_a_kernel(element: Element, numbers: torch.Tensor) -> torch.Tensor:
    """fp32 -> stored -> fp32, by `narrow` and `widen`."""
    widen, narrow = element.widen, element.narrow

    @numba_cuda.jit
    def there_and_back(stored: Any, wide: Any, x: Any) -> None:
        i = numba_cuda.grid(1)
        if i < len(x):
            stored[i] = narrow(x[i])
            wide[i] = widen(stored[i])

    stored, wide = torch.zeros(len(numbers), dtype=element.stored), torch.zeros(len(numbers))
    with interpret():
        there_and_back[-(-len(numbers) // 128), 128](stored, wide, numbers)
    return wide


@pytest.mark.parametrize("dtype", ELEMENTS)
def test_numbers_are_rounded_as_torch_does(dtype: torch.dtype) -> None:
    """Ties among them, numbers too large and too small for the format, infinity, both zeros, NaN."""
    special = [
        0.0,
        -0.0,
        math.inf,
        -math.inf,
        math.nan,
        65504.0,
        65520.0,
        1e30,
        -1e30,
        3e38,
        1e-7,
        6e-8,
        1e-40,
    ]
    ties = [1 + 2.0**-k * (1 + i) for k in (8, 9, 11, 12) for i in range(8)]
    numbers = torch.tensor(special + ties + (torch.randn(100) * 10).tolist())
    torch.testing.assert_close(
        through_a_kernel(ELEMENTS[dtype], numbers), numbers.to(dtype).float(), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_word_holds_two_16_bit_numbers(dtype: torch.dtype) -> None:
    """The one at the lower address is in the lower half."""
    unpack = ELEMENTS[dtype].unpack

    @numba_cuda.jit
    def both(out: Any, word: Any) -> None:
        out[0], out[1] = unpack(word, 0), unpack(word, 1)

    pair, out = torch.tensor([1.5, -2.25], dtype=dtype), torch.zeros(2)
    with interpret():
        both[1, 1](out, int(pair.view(torch.int32).numpy().view(np.uint32)[0]))
    assert out.tolist() == [1.5, -2.25]
