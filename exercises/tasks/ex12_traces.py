"""Replays vLLM's recorded decisions about windows and chunks, with a window manager of the reader's choice."""

from __future__ import annotations

from typing import Any

from exercises.tasks.ex03_traces import COMPARED, Replay, _Driver, _same, golden
from refengine.hashing import BlockHasher
from refengine.parts import Parts, load_parts
from refengine.v1.coordinator import MANAGERS
from refengine.v1.groups.spec import CHUNKED_LOCAL, FULL_ATTENTION, SLIDING_WINDOW, GroupSpec
from refengine.v1.kv_cache_manager import KVCacheManager

KINDS = {"full": FULL_ATTENTION, "sliding_window": SLIDING_WINDOW, "chunked_local": CHUNKED_LOCAL}
RELEASE_TRACES = ("script_swa_release", "kv_swa_nocache_04", "kv_swa_nocache_06", "rand_nocache_swa")
WINDOW_TRACES = (
    "script_swa_release",
    "script_swa_retention_zero",
    "rand_swa",
    "rand_swa_bs2",
    "rand_swa_retention0",
    "rand_swa_retention16",
    "kv_swa_20",
    "kv_swa_ret_10",
    "kv_swa_eagle_07",
)


def replay(name: str, parts: Any = None) -> Replay:
    """Replays a V1 trace whose layers have windows or chunks; no retention beside other groups. `parts`: as in `LLM`.

    Raises: PartError if the part fails under guard.
    """
    return replay_bare(name, load_parts(parts))


def replay_bare(name: str, parts: Parts) -> Replay:
    """The same with parts as they are: without guard, an error of the part reaches the caller."""
    trace = golden(name)
    driver = _WindowDriver(trace["config"], parts)
    for number, op in enumerate(trace["ops"]):
        answer = driver.apply(op)
        for key in COMPARED:
            if key in op["expect"] and not _same(op["expect"][key], answer[key]):
                where = f"operation {number}, {op['op']}{'(' + op['id'] + ')' if 'id' in op else ''}"
                said = f"{where}: {key} is {answer[key]}, vLLM says {op['expect'][key]}"
                return Replay(name, number + 1, said)
    return Replay(name, len(trace["ops"]))


class _WindowDriver(_Driver):
    """The driver of exercise 03 on groups of which some see only a part of the past."""

    def __init__(self, config: dict[str, Any], parts: Parts) -> None:
        self.manager = KVCacheManager(
            [
                GroupSpec(i, KINDS[g["kind"]], g["block_size"], g.get("window"), g.get("chunk"))
                for i, g in enumerate(config["groups"])
            ],
            config["num_blocks"],
            config["max_model_len"],
            enable_caching=config["enable_caching"],
            watermark=config["watermark"],
            drop_last=config["use_eagle"],
            retention_interval=config["retention_interval"],
            managers={**MANAGERS, SLIDING_WINDOW: parts.sliding_window},
        )
        self.hasher = BlockHasher("sha256_cbor", config["hash_block_size"], seed="0")
        self.requests = {}
        self.lookups = {}

    def take_copies(self, op: dict[str, Any]) -> None:
        """Only hits inside a block copy blocks."""
