"""Digests of the real vLLM 0.33.0, compared with those of a `hashes` file.

Only `against_vllm.py` imports this module, in an environment of its own that has vLLM installed.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from tests.conformance.replay import Difference, Trace, same

SEED = "PYTHONHASHSEED"  # vLLM reads this variable when it derives the start value of a chain


def check_hashes(trace: Trace) -> Difference | None:
    """Compare every digest of a `hashes` file. An item's position in the file stands for the op index."""
    before = os.environ.get(SEED)
    try:
        for name, recorded in trace.document["algorithms"].items():
            difference = _check_algorithm(name, recorded, str(trace.document["seed"]))
            if difference is not None:
                return difference
        return None
    finally:
        os.environ.pop(SEED, None)
        if before is not None:
            os.environ[SEED] = before


def _check_algorithm(name: str, recorded: dict[str, Any], seed: str) -> Difference | None:
    function = get_hash_fn_by_name(name)
    os.environ.pop(SEED, None)
    kv_cache_utils.init_none_hash(function)
    default = None if name.startswith("xxhash") else kv_cache_utils.NONE_HASH.hex()  # random, not recorded
    os.environ[SEED] = seed
    kv_cache_utils.init_none_hash(function)
    start = {"none_hash_hex": kv_cache_utils.NONE_HASH.hex(), "none_hash_default_seed_hex": default}
    got = [("start", recorded, start)]
    got += [("block", block, _block(function, block)) for block in recorded["blocks"]]
    got += [("request", request, _chain(function, request)) for request in recorded["requests"]]
    for index, (what, expected, answer) in enumerate(got):
        for key, value in answer.items():
            if not same(expected[key], value):
                return Difference(index, f"{name} {what}", key, expected[key], value)
    return None


def _block(function: Any, block: dict[str, Any]) -> dict[str, Any]:
    parent = None if block["parent_hex"] is None else bytes.fromhex(block["parent_hex"])
    keys = block["extra_keys"]
    extra = None if keys is None else tuple(tuple(key) for key in keys)
    digest = kv_cache_utils.hash_block_tokens(function, parent, block["token_ids"], extra)
    return {"digest_hex": digest.hex(), "event_int64": kv_cache_utils.maybe_convert_block_hash(digest)}


def _chain(function: Any, item: dict[str, Any]) -> dict[str, Any]:
    lora = item["lora"]
    request = Request(
        "r",
        item["token_ids"],
        SamplingParams(max_tokens=1),
        None,
        cache_salt=item["cache_salt"],
        lora_request=LoRARequest(lora["name"], 1, lora["path"]) if lora else None,
        block_hasher=kv_cache_utils.get_request_block_hasher(
            item["block_size"], function, item["hash_lookahead_tokens"]
        ),
    )
    return {"digests_hex": [digest.hex() for digest in request.block_hashes]}
