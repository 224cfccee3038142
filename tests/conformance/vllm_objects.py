"""The objects of the real vLLM 0.33.0 that the configuration and the requests of a trace describe.

What is real: cache layout, requests, hashing, configuration. What is a stand-in: the model's description, a
namespace with the few facts that vLLM's scheduler reads of a model, so that none has to be downloaded.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, SchedulerConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from tests.conformance.replay import NotSupported


def group_spec(group: dict[str, Any]) -> KVCacheSpec:
    """One element of `config.groups` as vLLM describes a layer. The tensor shapes are never looked at."""
    heads = {"block_size": group["block_size"], "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    kind = group["kind"]
    if kind == "full":
        return FullAttentionSpec(**heads)
    if kind == "sliding_window":
        return SlidingWindowSpec(**heads, sliding_window=group["window"])
    if kind == "chunked_local":
        return ChunkedLocalAttentionSpec(**heads, attention_chunk_size=group["chunk"])
    if kind == "mamba":
        return MambaSpec(
            block_size=group["block_size"],
            shapes=((1,),),
            dtypes=(torch.float32,),
            mamba_cache_mode=group["mode"],
        )
    raise NotSupported(f"group kind {kind!r}")


def kv_cache_config(config: dict[str, Any]) -> KVCacheConfig:
    """The cache layout of a trace: one layer per group, no tensors."""
    groups = [KVCacheGroupSpec([f"layer{i}"], group_spec(g)) for i, g in enumerate(config["groups"])]
    return KVCacheConfig(
        num_blocks=config["num_blocks"],
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=config["retention_interval"],
    )


def new_request(op: dict[str, Any], hash_block_size: int, eos_token_id: int | None = None) -> Request:
    """The request of a `new_request` or `add_request` operation, its full blocks hashed."""
    params = SamplingParams(
        max_tokens=op.get("max_tokens", 1 << 20),
        stop_token_ids=op.get("stop_token_ids"),
        skip_reading_prefix_cache=op.get("skip_reading"),
        extra_args={"kv_cache_report_mode": op["report_mode"]} if "report_mode" in op else None,
    )
    params.update_from_generation_config({}, eos_token_id)
    lora = op.get("lora")
    return Request(
        op["id"],
        list(op["prompt"]),
        params,
        None,
        arrival_time=float(op.get("arrival", 0)),
        priority=op.get("priority", 0),
        cache_salt=op.get("cache_salt"),
        lora_request=LoRARequest(lora["name"], lora["id"], lora["path"]) if lora else None,
        block_hasher=get_request_block_hasher(hash_block_size, sha256_cbor),
    )


def scheduler_vllm_config(config: dict[str, Any]) -> VllmConfig:
    """A vLLM configuration whose model is a stand-in."""
    scheduling = SchedulerConfig(
        max_model_len=config["max_model_len"],
        is_encoder_decoder=False,
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"],
        long_prefill_token_threshold=config["long_prefill_token_threshold"],
        policy=config["policy"],
        watermark=config["watermark"],
        enable_chunked_prefill=config["enable_chunked_prefill"],
        scheduler_reserve_full_isl=config["reserve_full_sequence"],
        async_scheduling=False,
    )
    mamba = any(group["kind"] == "mamba" for group in config["groups"])
    cache = CacheConfig(
        block_size=config["block_size"],
        enable_prefix_caching=config["enable_caching"],
        mamba_cache_mode="align" if mamba else "none",
    )
    cache.num_gpu_blocks = config["num_blocks"]
    made = VllmConfig(scheduler_config=scheduling, cache_config=cache, device_config=DeviceConfig("cpu"))
    model = SimpleNamespace(
        max_model_len=config["max_model_len"],
        runner_type="generate",
        uses_mrope=False,
        is_diffusion=False,
        is_encoder_decoder=False,
        supports_multimodal_inputs=False,
        return_sampling_mask=False,
        multimodal_config=None,
    )
    object.__setattr__(made, "model_config", model)
    return made
