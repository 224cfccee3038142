"""The tensors of the KV cache: two per layer, in blocks.

An attention layer keeps a key and a value for each token of a block. A linear-attention layer keeps one state
per block, whatever the number of its tokens: a matrix for each head, and the tail of its convolution.
Which block belongs to whom is decided elsewhere and never visible here; this is memory and its arithmetic.

Every block has room in every layer, though it only ever holds what one group of layers put there. vLLM lets
layers of different groups share the same bytes, for which it pads all of them to one size per block.
vLLM: V0 worker/cache_engine.py (CacheEngine), V1 v1/kv_cache_interface.py (FullAttentionSpec, MambaSpec) and
`get_kv_cache_config_from_groups` in v1/core/kv_cache_planning.py.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from refengine.errors import ConfigError
from refengine.model.config import LINEAR_ATTENTION, ModelConfig
from refengine.model.linear_attention import state_shapes

MOST_BYTES = 2**40  # a terabyte: beyond it, a number was mistyped


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: keys and values of `block_size` tokens, or one state, in all layers."""
    layers = block_layout(config, block_size, dtype)
    return sum(first.nbytes + second.nbytes for first, second in layers)


def block_layout(config: ModelConfig, block_size: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """What one block holds in each layer, as tensors without memory; see KVCache. States are float32."""
    slots = torch.empty(block_size, config.num_kv_heads, config.head_dim, dtype=dtype, device="meta")
    return [state_shapes(config) if kind == LINEAR_ATTENTION else (slots, slots) for kind in config.kinds]


def blocks_that_fit(num_bytes: int, config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """How many whole blocks `num_bytes` hold, the null block included.

    Raises: ConfigError if there is no room for the null block and one more.
    vLLM: V0 `Worker.determine_num_available_blocks`, V1 `get_kv_cache_config_from_groups` in
    v1/core/kv_cache_planning.py.
    """
    one = block_bytes(config, block_size, dtype)
    num_blocks = num_bytes // one
    if num_blocks < 2:
        raise ConfigError(
            f"kv_cache_bytes {num_bytes} has room for {num_blocks} blocks of {one} bytes; 2 are the least"
        )
    return num_blocks


class KVCache:
    """`layers[i]` is the pair of tensors of layer i; block 0 is the null block in V1.

    Attention: keys and values, each `[num_blocks, block_size, num_kv_heads, head_dim]`. Linear attention: states
    `[num_blocks, num_heads, head_dim, head_dim]` and tails `[num_blocks, conv_width - 1, 3 * num_heads * head_dim]`.
    Raises: ConfigError for a size that can only be a slip.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size  # tokens
        self.dtype = dtype
        self.bytes_per_block = block_bytes(config, block_size, dtype)
        if self.num_bytes > MOST_BYTES:
            raise ConfigError(
                f"num_blocks {num_blocks} needs {self.num_bytes / 2**30:.0f} GiB for the KV cache, "
                f"more than any machine this is meant for"
            )
        self.layers = [
            (_zeros(num_blocks, first, device), _zeros(num_blocks, second, device))
            for first, second in block_layout(config, block_size, dtype)
        ]

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block


def _zeros(num_blocks: int, block: Tensor, device: torch.device | str) -> Tensor:
    """Zeros that cost no memory until they are written, on a CPU: numpy asks the system for fresh pages,
    torch would touch every one. A laptop that gives the cache 256 MB then pays for the blocks it uses."""
    shape, dtype = (num_blocks, *block.shape), block.dtype
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)
