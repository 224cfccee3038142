"""Replays hashes.json: start values, single blocks and whole chains, digest by digest, for all four algorithms."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

from refengine.hashing import Adapter, BlockHasher, start_value
from tests.conformance.replay import Difference, Trace


def check(trace: Trace) -> Difference | None:
    """The first digest that differs, or None. The index counts digests in the order of the file."""
    for index, (what, expected, got) in enumerate(_digests(trace.document)):
        if expected != got:
            return Difference(index, "hash", what, expected, got)
    return None


def _digests(raw: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for algorithm, expected in raw["algorithms"].items():
        yield f"{algorithm} start", expected["none_hash_hex"], start_value(algorithm, raw["seed"]).hex()
        if expected["none_hash_default_seed_hex"]:  # none for xxHash: random per process
            with mock.patch.dict(os.environ):
                os.environ.pop("PYTHONHASHSEED", None)
                default = start_value(algorithm).hex()
            yield f"{algorithm} default start", expected["none_hash_default_seed_hex"], default
        yield from _blocks(algorithm, raw["seed"], expected["blocks"])
        yield from _requests(algorithm, raw["seed"], expected["requests"])


def _blocks(algorithm: str, seed: str, blocks: list[dict[str, Any]]) -> Iterator[tuple[str, Any, Any]]:
    hasher = BlockHasher(algorithm, block_size=1, seed=seed)
    for block in blocks:
        parent = bytes.fromhex(block["parent_hex"]) if block["parent_hex"] else None
        extra = block["extra_keys"] and tuple(tuple(key) for key in block["extra_keys"])
        digest = hasher.hash_block(parent, block["token_ids"], extra)
        yield f"{algorithm} {block['note']}", block["digest_hex"], digest.hex()
        low_bits = int.from_bytes(digest[-8:], "big")
        yield f"{algorithm} {block['note']} as event", block["event_int64"], low_bits


def _requests(algorithm: str, seed: str, requests: list[dict[str, Any]]) -> Iterator[tuple[str, Any, Any]]:
    for request in requests:
        hasher = BlockHasher(algorithm, request["block_size"], seed, request["hash_lookahead_tokens"])
        adapter = Adapter(**request["lora"]) if request["lora"] else None
        hashes: list[bytes] = []
        hasher.extend(hashes, request["token_ids"], adapter, request["cache_salt"])
        got = [digest.hex() for digest in hashes]
        yield f"{algorithm} chain of {len(got)}", request["digests_hex"], got
