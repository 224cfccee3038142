"""The memory of the cache and its arithmetic."""

from __future__ import annotations

import pytest
import torch

from refengine.errors import ConfigError
from refengine.kv_cache import KVCache, block_bytes, blocks_that_fit
from refengine.model.config import ModelConfig

CONFIG = ModelConfig(
    vocab_size=10,
    hidden_size=48,
    intermediate_size=80,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=12,
    max_model_len=64,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cache_arithmetic(dtype: torch.dtype) -> None:
    cache = KVCache(CONFIG, num_blocks=7, block_size=5, dtype=dtype)
    assert cache.bytes_per_block == block_bytes(CONFIG, 5, dtype) == 3 * 2 * (2 * 12) * 5 * dtype.itemsize
    tensors = [tensor for pair in cache.layers for tensor in pair]
    assert len(tensors) == 6
    assert all(t.shape == (7, 5, 2, 12) and t.dtype == dtype and not t.any() for t in tensors)
    assert len({t.data_ptr() for t in tensors}) == 6
    assert cache.num_bytes == sum(t.nbytes for t in tensors)
    assert blocks_that_fit(cache.num_bytes, CONFIG, 5, dtype) == 7
    assert blocks_that_fit(cache.num_bytes - 1, CONFIG, 5, dtype) == 6


def test_no_room_for_a_cache() -> None:
    with pytest.raises(ConfigError, match="kv_cache_bytes 3000 has room for 1 blocks of 2880 bytes"):
        blocks_that_fit(3000, CONFIG, 5, torch.float32)
