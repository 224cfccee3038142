"""Writing and copying in the interpreter, and the arithmetic of addresses."""

from __future__ import annotations

import pytest
import torch

import kernels.cuda
from kernels.cuda.addressing import kernel_blocks
from kernels.cuda.launch import in_widest_unit
from kernels.interpreter import interpret


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(2, 64), (1, 6), (3, 1)])
def test_tokens_land_in_their_slots(dtype: torch.dtype, num_kv_heads: int, head_dim: int) -> None:
    """Key and value cut out of one projection, as the decoder has them; a slot of -1 among them."""
    wide = torch.randn(5, 3 * num_kv_heads, head_dim).to(dtype)
    key, value = wide[:, num_kv_heads : 2 * num_kv_heads], wide[:, 2 * num_kv_heads :]
    caches = torch.zeros(2, 6, 4, num_kv_heads, head_dim, dtype=dtype)
    slots = torch.tensor([23, 0, -1, 7, 9])
    with interpret():
        kernels.cuda.reshape_and_cache(key, value, caches[0], caches[1], slots)
    expected = torch.zeros_like(caches)
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[0, slot // 4, slot % 4], expected[1, slot // 4, slot % 4] = key[i], value[i]
    assert torch.equal(caches, expected)


def test_slot_minus_one_writes_nothing() -> None:
    """Case S33: plain indexing by -1 would hit the last slot of the last block."""
    key_cache, value_cache = torch.zeros(2, 3, 4, 1, 1)
    new = torch.tensor([10.0, 99.0]).view(2, 1, 1)
    with interpret():
        kernels.cuda.reshape_and_cache(new, new, key_cache, value_cache, torch.tensor([5, -1]))
    expected = torch.zeros(12)
    expected[5] = 10
    assert torch.equal(key_cache.flatten(), expected) and torch.equal(value_cache.flatten(), expected)


def test_a_write_moves_every_sector_once() -> None:
    key, value = torch.randn(2, 3, 2, 64)
    key_cache, value_cache = torch.zeros(2, 2, 4, 2, 64)
    with interpret() as report:
        kernels.cuda.reshape_and_cache(key, value, key_cache, value_cache, torch.tensor([1, 6, 3]))
    for kind, array in (("read", "key"), ("write", "key_cache"), ("write", "value_cache")):
        assert report.total(space="global", kind=kind, array=array).sectors == 3 * 2 * 64 * 4 // 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_copied_in_order_in_every_layer(dtype: torch.dtype) -> None:
    layers = [tuple(torch.randn(2, 6, 8, 2, 64).to(dtype)) for _ in range(2)]
    before = [(key.clone(), value.clone()) for key, value in layers]
    with interpret():
        kernels.cuda.copy_blocks(layers, [(1, 4), (1, 0), (3, 5), (2, 3), (3, 1)])
    sources = [1, 2, 2, 2, 1, 3]  # 3 was copied away before 2 came to it, and went on to 1
    for after, old in zip(layers, before, strict=True):
        for cache, was in zip(after, old, strict=True):
            assert torch.equal(cache, was[sources])


def test_a_copy_takes_the_widest_unit_that_fits() -> None:
    def unit(dtype: torch.dtype, width: int, first: int = 0) -> torch.dtype:
        return in_widest_unit(torch.zeros(3, width + first, dtype=dtype)[:, first:])[0].dtype

    assert unit(torch.bfloat16, 8) == unit(torch.float32, 4) == torch.int64
    assert unit(torch.bfloat16, 6) == unit(torch.float32, 3) == torch.int32  # rows of 12 bytes
    assert unit(torch.bfloat16, 8, first=2) == torch.int32  # which begin 4 bytes in
    assert unit(torch.bfloat16, 3) == torch.int16
    with pytest.raises(ValueError, match="no whole 16-bit words"):
        unit(torch.int8, 3)


def test_blocks_of_a_manager_and_of_a_kernel() -> None:
    """Case S35: manager block 3 of 8 tokens is kernel blocks 6 and 7 of 4; the token at offset 5 keeps slot 29."""
    tables = kernel_blocks(torch.tensor([[3, 0], [1, 7]], dtype=torch.int32), 8, 4)
    assert tables.tolist() == [[6, 7, 0, 1], [2, 3, 14, 15]]
    position = 5
    block, offset = tables[0, position // 4].item(), position % 4
    assert (block, offset) == (7, 1)
    assert block * 4 + offset == 3 * 8 + position == 29
    assert kernel_blocks(tables, 8, 8) is tables
