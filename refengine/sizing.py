"""How many blocks an engine gets: as told, as many as so many bytes hold, or what a GPU has left.

On a GPU the share `gpu_memory_utilization` of all its memory is the engine's. From it go what is in use already,
the weights above all, and what the largest step needs for its intermediate results; the rest is the cache's.
The share that is left out is for what nobody counts here: attention's scratch memory, sampling, CUDA graphs.
vLLM: V0 worker/worker.py `Worker.determine_num_available_blocks`, V1 v1/worker/gpu_worker.py
`determine_available_memory` and `get_kv_cache_config_from_groups` in v1/core/kv_cache_planning.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from refengine.config import EngineConfig
from refengine.errors import ConfigError
from refengine.gpu import free_bytes, peak_bytes
from refengine.kv_cache import block_bytes, blocks_that_fit
from refengine.model.decoder import Decoder

CPU_BYTES = 256 * 2**20
MOST_BLOCKS = (
    2**17
)  # on a GPU, unless told: each block is also a Python object, and small models have small blocks


def choose_num_blocks(config: EngineConfig, model: Decoder) -> int:
    """Blocks of the KV cache, V1's null block included. The model is already where it will run.

    Raises: ConfigError if there is no room for two.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    weight = model.embed_tokens.weight
    if config.kv_cache_bytes is not None or weight.device.type == "cpu":
        num_bytes = config.kv_cache_bytes or CPU_BYTES
        return blocks_that_fit(num_bytes, model.config, config.block_size, weight.dtype)
    return _blocks_on_gpu(config, model)


def _blocks_on_gpu(config: EngineConfig, model: Decoder) -> int:
    weight, share = model.embed_tokens.weight, config.gpu_memory_utilization
    peak = peak_bytes(lambda: largest_step(config, model), weight.device)
    free, total = free_bytes(weight.device)
    used = total - free
    left = int(share * total) - used - peak
    one = block_bytes(model.config, config.block_size, weight.dtype)
    if left < 2 * one:
        raise ConfigError(
            f"gpu_memory_utilization {share} leaves no room for a KV cache: of {_gib(share * total)} there are "
            f"{_gib(used)} in use, a step needs {_gib(peak)}, and two blocks {_gib(2 * one)}"
        )
    return min(left // one, MOST_BLOCKS)


@torch.inference_mode()
def largest_step(config: EngineConfig, model: Decoder) -> Tensor:
    """The network over as many tokens as a step may have, without a cache. Returns: scores that mean nothing."""
    device = model.embed_tokens.weight.device
    tokens = torch.zeros(config.max_num_batched_tokens, dtype=torch.int64, device=device)

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.zeros_like(query)

    def recur(layer: int, mixed: Tensor, log_decay: Tensor, conv_weight: Tensor) -> Tensor:
        return mixed.new_zeros(len(mixed), mixed.shape[1] // 3)

    hidden = model(tokens, tokens, attend, recur=recur)
    return model.logits(hidden[: config.max_num_seqs])


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
