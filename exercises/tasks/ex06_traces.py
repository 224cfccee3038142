"""Recorded steps of both schedulers: as tables, and replayed on what the reader wrote."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from exercises.tasks.ex03_traces import Replay, _same, golden
from exercises.tasks.ex06_scene import v0_scheduler
from refengine import viz
from refengine.config import EngineConfig
from refengine.hashing import BlockHasher
from refengine.parts import Parts, load_parts
from refengine.sampling import SamplingParams
from refengine.v0.block_manager import BlockManager
from refengine.v0.sequence import Sequence, SequenceGroup, SequenceStatus
from refengine.v1.groups.spec import FULL_ATTENTION, GroupSpec
from refengine.v1.request import Request, RequestStatus

V1_OPTIONS = (
    "num_blocks",
    "max_num_seqs",
    "max_num_batched_tokens",
    "long_prefill_token_threshold",
    "policy",
    "watermark",
    "enable_chunked_prefill",
    "reserve_full_sequence",
)
V0_OPTIONS = (
    "max_num_batched_tokens",
    "max_num_seqs",
    "enable_chunked_prefill",
    "preemption_mode",
    "policy",
    "max_num_partial_prefills",
    "max_long_partial_prefills",
    "long_prefill_token_threshold",
)
SCHEDULER_TRACES = (
    "sched_fcfs_basic",
    "sched_chunked_prefill",
    "sched_no_chunking",
    "sched_long_prefill_threshold",
    "sched_max_seqs",
    "sched_head_of_line",
    "sched_no_gate",
    "sched_watermark",
    "sched_prefix_hits",
    "sched_preempt_fcfs",
    "sched_preempt_priority",
    "sched_stop_reasons",
    "sched_rand_fcfs",
    "sched_rand_priority",
    "sched_rand_threshold",
    "sched_rand_tight",
)
PHASE_TRACES = (
    "sc_head_of_line",
    "sc_recompute_cache",
    "sc_swap_nocache",
    "sc_random_00_default_cache",
    "sc_random_03_pressure_nocache",
    "sc_random_05_chunked_nocache",
    "sc_random_06_chunked_pressure",
    "sc_random_07_swap_nocache",
    "sc_random_08_priority",
    "sc_random_11_partial_prefills",
)


# -- tables --------------------------------------------------------------------------------------------------


def steps(name: str) -> list[dict[str, Any]]:
    """What was recorded of each step of a scheduler trace, without idle steps at its end."""
    found = [op["expect"] for op in golden(name)["ops"] if op["op"] == "step"]
    while found and not found[-1].get("scheduled") and not found[-1].get("raises"):
        found.pop()
    return found


def steps_table(name: str, first: int = 1, last: int | None = None) -> viz.Table:
    """Steps `first` to `last` of a scheduler trace of either generation: shares, who lost blocks, who waits."""
    chosen = list(enumerate(steps(name), 1))[first - 1 : last]
    return viz.Table(
        ("step", "computes", "loses its blocks", "waits after it"),
        [(number, *_row(step)) for number, step in chosen],
    )


def _row(step: dict[str, Any]) -> tuple[str, str, str]:
    if "raises" in step:
        return f"{step['raises']}: {step['message']}", "", ""
    if "preempted_ids" in step:
        shares = [f"{each['id']} {each['num_scheduled']}" for each in step["scheduled"]]
        return ", ".join(shares), ", ".join(step["preempted_ids"]), ", ".join(step["waiting"])
    queries = step.get("model_input", {}).get("query_lens", [])
    names = [each["request_id"] for each in step["scheduled"]]
    shares = [f"{name} {count}" for name, count in zip(names, queries, strict=False)]
    lost = [f"{name} ({mode.lower()})" for name, mode in step["preempted"]]
    queues = step["queues_after_schedule"]
    waits = [*queues["waiting"], *(f"{name} (swapped)" for name in queues["swapped"])]
    return ", ".join(shares), ", ".join(lost), ", ".join(waits)


# -- V1 ------------------------------------------------------------------------------------------------------


def replay(name: str, parts: Any = None) -> Replay:
    """Replays a recorded run of V1's scheduler. `parts` as in `LLM(parts=...)`.

    Raises: PartError if one of the parts fails under guard.
    """
    return replay_bare(name, load_parts(parts))


def replay_bare(name: str, parts: Parts) -> Replay:
    """The same with parts as they are: without guard, an error of the part reaches the caller."""
    trace = golden(name)
    return _compare(name, trace, _V1(trace["config"], parts))


def _compare(name: str, trace: dict[str, Any], driver: _V1 | _V0) -> Replay:
    """Every operation, up to the first answer that is not the recorded one."""
    for number, op in enumerate(trace["ops"]):
        answer = getattr(driver, op["op"])(op) or {}
        for key, expected in op["expect"].items():
            if key in answer and not _same(expected, answer[key]):
                said = f"operation {number}, {op['op']}: {key} is {answer[key]}, vLLM says {expected}"
                return Replay(name, number + 1, said)
    return Replay(name, len(trace["ops"]))


class _V1:
    """A scheduler from parts, and the tokens that the trace says were sampled."""

    def __init__(self, config: dict[str, Any], parts: Parts) -> None:
        size = config["block_size"]
        manager = parts.kv_cache_manager(
            [GroupSpec(0, FULL_ATTENTION, size)],
            config["num_blocks"],
            config["max_model_len"],
            enable_caching=config["enable_caching"],
            watermark=config["watermark"],
            make_block_pool=partial(parts.block_pool, make_free_queue=parts.free_queue),
            managers={FULL_ATTENTION: parts.full_attention},
        )
        options = {name: config[name] for name in V1_OPTIONS}
        engine_config = EngineConfig(mode="faithful", block_size=size, **options)
        self.scheduler = parts.scheduler(
            engine_config, manager, config["max_model_len"], [config["eos_token_id"]]
        )
        self.hasher = BlockHasher("sha256_cbor", size, seed="0") if config["enable_caching"] else None

    def add_request(self, op: dict[str, Any]) -> dict[str, Any]:
        params = SamplingParams(
            max_tokens=op["max_tokens"], stop_token_ids=tuple(op.get("stop_token_ids", ()))
        )
        self.scheduler.add_request(
            Request(
                op["id"],
                op["prompt"],
                params,
                hasher=self.hasher,
                arrival=op["arrival"],
                priority=op["priority"],
                cache_salt=op.get("cache_salt"),
            )
        )
        return self._queues()

    def step(self, op: dict[str, Any]) -> dict[str, Any]:
        output = self.scheduler.schedule()
        self.scheduler.update(output, op["sampled"])
        shares = [
            {
                "id": share.request_id,
                "num_scheduled": share.num_tokens,
                "kind": share.kind,
                "num_computed": share.num_computed_tokens,
                "block_ids": share.block_ids,
            }
            for share in output.scheduled
        ]
        return {"scheduled": shares, "preempted_ids": sorted(output.preempted_ids)} | self._queues()

    def abort(self, op: dict[str, Any]) -> dict[str, Any]:
        self.scheduler.finish(op["id"], RequestStatus.FINISHED_ABORTED)
        return self._queues()

    def reset_prefix_cache(self, op: dict[str, Any]) -> dict[str, Any]:
        return {"ok": self.scheduler.kv_cache_manager.reset_prefix_cache()}

    def _queues(self) -> dict[str, Any]:
        pool = self.scheduler.kv_cache_manager.block_pool
        return {
            "running": [request.request_id for request in self.scheduler.running],
            "waiting": [request.request_id for request in self.scheduler.waiting],
            "free_queue": [block.block_id for block in pool.free_queue],
        }


# -- V0 ------------------------------------------------------------------------------------------------------


def replay_v0(name: str, phases: Callable[[Any, bool], object]) -> Replay:
    """Replays a recorded run of V0's scheduler, with the phases of a step in the order of `phases`."""
    trace = golden(name)
    return _compare(name, trace, _V0(trace["config"], phases))


class _V0:
    """V0's scheduler over its block manager, and the tokens that each request will sample."""

    def __init__(self, config: dict[str, Any], phases: Callable[[Any, bool], object]) -> None:
        cache, options = config["cache"], config["scheduler"]
        engine_config = EngineConfig(
            mode="faithful",
            block_size=cache["block_size"],
            num_blocks=cache["num_gpu_blocks"],
            num_cpu_blocks=cache["num_cpu_blocks"],
            enable_prefix_caching=cache["enable_prefix_caching"],
            sliding_window=cache["sliding_window"],
            **{name: options[name] for name in V0_OPTIONS},
        )
        self.manager = BlockManager(
            cache["block_size"],
            cache["num_gpu_blocks"],
            cache["num_cpu_blocks"],
            watermark=config["watermark"],
            sliding_window=cache["sliding_window"],
            enable_caching=cache["enable_prefix_caching"],
            faithful=True,
        )
        self.scheduler = v0_scheduler(phases)(engine_config, self.manager, options["max_model_len"])
        self.outputs: dict[str, list[int]] = {}

    def add_request(self, op: dict[str, Any]) -> None:
        self.outputs[op["request_id"]] = list(op["output_tokens"])
        seq = Sequence(op["seq_id"], op["prompt"])
        self.scheduler.add(
            SequenceGroup(op["request_id"], [seq], arrival=op["arrival_time"], priority=op["priority"])
        )

    def abort(self, op: dict[str, Any]) -> None:
        self.scheduler.abort(op["request_id"])

    def step(self, op: dict[str, Any]) -> dict[str, Any]:
        metadata, out = self.scheduler.schedule(op["now"])
        queues = {
            name: [group.request_id for group in getattr(self.scheduler, name)]
            for name in ("waiting", "running", "swapped")
        }
        shares = [
            {
                "request_id": each.request_id,
                "is_prompt": each.is_prompt,
                "do_sample": each.do_sample,
                "token_chunk_size": each.token_chunk_size,
                "num_computed_tokens": each.num_computed_tokens,
                "block_table": next(iter(each.block_tables.values())),
                "computed_block_nums": each.computed_block_nums,
            }
            for each in metadata
        ]
        for each, share in zip(metadata, out.scheduled, strict=True):
            seq = share.group.first_seq
            seq.update_num_computed_tokens(each.token_chunk_size)
            if each.do_sample:
                left = self.outputs[each.request_id]
                seq.token_ids.append(left.pop(0))
                if not left:
                    seq.status = SequenceStatus.FINISHED_STOPPED
                    self.manager.free(seq)
        self.scheduler.free_finished()
        lost = [[group.request_id, mode] for group, mode in out.preempted]
        return {"scheduled": shares, "preempted": lost, "queues_after_schedule": queues}
