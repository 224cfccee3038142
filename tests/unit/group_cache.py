"""Small engines with several cache groups for directed tests, in the words of `helpers`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from refengine.config import EngineConfig
from refengine.sampling import SamplingParams
from refengine.v1.groups.spec import (
    CHUNKED_LOCAL,
    FULL_ATTENTION,
    MAMBA,
    SLIDING_WINDOW,
    GroupSpec,
    hash_block_size,
)
from refengine.v1.kv_cache_manager import KVCacheManager
from refengine.v1.request import Request
from refengine.v1.scheduler import Scheduler
from tests.unit.helpers import ENDLESS, Cache, Steps, make_hasher

Tables = list[list[int]]


def full(block_size: int) -> dict[str, Any]:
    """A full-attention group."""
    return {"kind": FULL_ATTENTION, "block_size": block_size}


def window(block_size: int, size: int) -> dict[str, Any]:
    """A sliding-window group whose tokens see `size` tokens, themselves included."""
    return {"kind": SLIDING_WINDOW, "block_size": block_size, "window": size}


def chunked(block_size: int, chunk: int) -> dict[str, Any]:
    """A chunked-local group."""
    return {"kind": CHUNKED_LOCAL, "block_size": block_size, "chunk": chunk}


def mamba(block_size: int) -> dict[str, Any]:
    """A group of recurrent states."""
    return {"kind": MAMBA, "block_size": block_size}


def specs(groups: Sequence[dict[str, Any]]) -> list[GroupSpec]:
    """The groups, numbered."""
    return [GroupSpec(i, **group) for i, group in enumerate(groups)]


class GroupCache(Cache):
    """A KV cache manager with these groups and the usable blocks 1..`usable`."""

    def __init__(self, *groups: dict[str, Any], usable: int, **options: Any) -> None:
        self.manager = KVCacheManager(specs(groups), usable + 1, ENDLESS, **options)
        self.pool = self.manager.block_pool
        self.hasher = make_hasher(hash_block_size(specs(groups)))
        self.requests = {}

    def look(self, tokens: Sequence[int]) -> tuple[Tables, int, int]:
        """Block ids per group, hit and boundary that a request with these tokens would find."""
        request = Request("looks", tokens, SamplingParams(), hasher=self.hasher)
        blocks, hit, boundary = self.manager.get_computed_blocks(request)
        return list(blocks.ids()), hit, boundary

    def begin(self, request_id: str, tokens: Sequence[int], *chunks: int) -> None:
        """A request whose prompt runs in these chunks, each in a step of its own."""
        self.add(request_id, tokens)
        for i, chunk in enumerate(chunks):
            self.manager.begin_step()
            done = self.resume(request_id, chunk) if i == 0 else self.run(request_id, chunk)
            assert done is not None and done is not False, f"chunk {i} of {request_id} is refused"

    def tables(self, request_id: str) -> Tables:
        """The whole block table per group."""
        return list(self.manager.block_ids(request_id))

    def evict(self, *block_ids: int) -> None:
        """Makes blocks unfindable."""
        self.pool.evict_blocks(block_ids)
        self.verify()


class GroupSteps(Steps):
    """A scheduler without a model over these groups."""

    def __init__(self, *groups: dict[str, Any], usable: int, **options: Any) -> None:
        config = EngineConfig(num_blocks=usable + 1, **options)
        self.manager = KVCacheManager(
            specs(groups),
            usable + 1,
            ENDLESS,
            enable_caching=config.enable_prefix_caching,
            watermark=config.watermark,
            retention_interval=config.prefix_cache_retention_interval,
            max_tokens_per_step=config.max_num_batched_tokens,
        )
        self.scheduler = Scheduler(config, self.manager, ENDLESS, ())
        self.hasher = make_hasher(hash_block_size(specs(groups))) if config.enable_prefix_caching else None
        self.fresh = 10_000
        self.num_added = 0
