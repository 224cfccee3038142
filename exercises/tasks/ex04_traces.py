"""Replays vLLM's recorded decisions on a manager and a lookup of the reader's choice."""

from __future__ import annotations

from functools import partial
from typing import Any

from exercises.tasks.ex03_traces import COMPARED, Replay, _Driver, _same, golden
from refengine.hashing import BlockHasher
from refengine.parts import Parts, load_parts
from refengine.v1.groups.spec import FULL_ATTENTION, GroupSpec

LOOKUP_TRACES = (
    "script_full_hit_aligned",
    "script_full_hit_unaligned",
    "script_block_size_one",
    "script_eagle_full",
    "script_cache_salt",
    "rand_full_bs4_tight",
)
MANAGER_TRACES = (
    "script_full_hit_aligned",
    "script_hit_needs_capacity",
    "script_out_of_blocks",
    "script_lookahead",
    "script_decode_publishes",
    "script_chunked_prefill",
    "script_preempt_relookup",
    "script_admission_gate",
    "script_watermark",
    "rand_full_lookahead",
    "rand_full_gate_watermark",
)


def replay(name: str, parts: Any = None) -> Replay:
    """Replays a V1 trace with one full-attention group. `parts` as in `LLM(parts=...)`.

    Raises: PartError if one of the parts fails under guard.
    """
    return replay_bare(name, load_parts(parts))


def replay_bare(name: str, parts: Parts) -> Replay:
    """The same with parts as they are: without guard, an error of the part reaches the caller."""
    trace = golden(name)
    driver = _ManagerDriver(trace["config"], parts)
    for number, op in enumerate(trace["ops"]):
        answer = driver.apply(op)
        for key in COMPARED:
            if key in op["expect"] and not _same(op["expect"][key], answer[key]):
                where = f"operation {number}, {op['op']}{'(' + op['id'] + ')' if 'id' in op else ''}"
                return Replay(
                    name, number + 1, f"{where}: {key} is {answer[key]}, vLLM says {op['expect'][key]}"
                )
    return Replay(name, len(trace["ops"]))


class _ManagerDriver(_Driver):
    """The driver of exercise 03 on a manager that is built from parts."""

    def __init__(self, config: dict[str, Any], parts: Parts) -> None:
        super().__init__(config, parts.block_pool, parts.free_queue)
        (group,) = config["groups"]
        self.manager = parts.kv_cache_manager(
            [GroupSpec(0, FULL_ATTENTION, group["block_size"])],
            config["num_blocks"],
            config["max_model_len"],
            enable_caching=config["enable_caching"],
            watermark=config["watermark"],
            drop_last=config["use_eagle"],
            make_block_pool=partial(parts.block_pool, make_free_queue=parts.free_queue),
            managers={FULL_ATTENTION: parts.full_attention},
        )
        self.hasher = BlockHasher("sha256_cbor", group["block_size"], seed="0")
