"""Replays vLLM 0.7.3's recorded decisions with a hop of the reader's choice: the skip, or the tracker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from exercises.course import CourseError
from exercises.tasks.ex03_traces import Replay, _same, golden
from exercises.tasks.ex05_scene import Bench, Skip, make_tracker
from refengine.v0.block_manager import BlockManager
from refengine.v0.model_input import ModelInput, ModelInputBuilder, SequenceInput
from refengine.v0.sequence import Sequence as V0Sequence
from refengine.v0.sequence import SequenceGroup, SequenceGroupMetadata, SequenceStatus
from refengine.v0.tracker import ComputedBlocksTracker

INPUT_TRACES = ("mi_table_bs4", "mi_table_bs2", "mi_table_bs16", "mi_random")
STEP_TRACES = ("sc_full_hit", "sc_same_batch", "sc_chunked_big_hit", "sc_head_of_line")
BLOCK_TRACES = (
    "bm_hit_ladder",
    "bm_same_batch_not_computed",
    "bm_can_allocate_ignores_hits",
    "bm_promote_replaces_block",
)
STALE_AT = 22  # the operation of bm_stale_cached_count at which vLLM 0.7.3 gives the old answer

SEQUENCE_KEYS = ("input_tokens", "input_positions", "seq_len", "query_len", "context_len", "prefix_cache_hit")
STEP_KEYS = ("scheduled", "model_input", "num_batched_tokens", "finished", "free_gpu", "hits", "queries")


# -- the model-input builder --------------------------------------------------------------------------------


def replay_inputs(name: str, skip: Skip | None = None) -> Replay:
    """Replays a trace of the family `model_input`. `skip` stands in for `compute_for_prefix_cache_hit`."""
    ops = [op for op in golden(name)["ops"] if op["op"] == "model_input"]
    for number, op in enumerate(ops):
        expect = op["expect"]
        got = build_input(op, skip)
        wanted = {key: expect["after_prefix_cache_hit"][key] for key in SEQUENCE_KEYS}
        wanted |= {"num_cached_tokens": expect["num_cached_tokens_reported"], **expect["model_input"]}
        for key, value in wanted.items():
            if not _same(value, got[key]):
                said = f"operation {number}, {op['branch']}: {key} is {got[key]}, vLLM says {value}"
                return Replay(name, number + 1, said)
    return Replay(name, len(ops))


def build_input(op: Mapping[str, Any], skip: Skip | None = None) -> dict[str, Any]:
    """One operation of such a trace: the sequence's numbers after the skip, and the model input."""
    size, window = op["block_size"], op["sliding_window"]
    own = None if skip is None else partial(skip, block_size=size, sliding_window=window)
    builder = ModelInputBuilder(
        size, sliding_window=window, chunked_prefill=op["chunked_prefill"], prefix_cache_hit=own
    )
    compute, notes = builder.per_seq_compute_fns[1], dict[str, Any]()

    def noted(seq: SequenceInput) -> None:
        compute(seq)
        notes.update({key: getattr(seq, key) for key in (*SEQUENCE_KEYS, "num_cached_tokens")})

    builder.per_seq_compute_fns[1] = noted
    builder.add_seq_group(
        SequenceGroupMetadata(
            request_id="r",
            is_prompt=op["is_prompt"],
            do_sample=True,
            token_chunk_size=op["token_chunk_size"],
            token_ids={0: op["prompt"] + op["output"]},
            num_prompt_tokens=len(op["prompt"]),
            num_computed_tokens=op["num_computed_tokens"],
            block_tables={0: op["block_table"]},
            computed_block_nums=op["computed_block_nums"],
        )
    )
    return input_dict(builder.build()) | notes


def input_dict(model_input: ModelInput) -> dict[str, Any]:
    """The step's lists under the trace's names."""
    answer = asdict(model_input)
    del answer["lora_mapping"]
    return answer


# -- whole steps --------------------------------------------------------------------------------------------


def replay_steps(
    name: str, *, skip: Skip | None = None, tracker: type[ComputedBlocksTracker] | None = None
) -> Replay:
    """Replays a trace of the family `scheduler`, without swapping and aborting, as 0.7.3 decides it."""
    trace = golden(name)
    cache, options = trace["config"]["cache"], dict(trace["config"]["scheduler"])
    bench = Bench(
        cache["num_gpu_blocks"],
        skip=skip,
        tracker=tracker,
        mode="faithful",
        **options | {"block_size": cache["block_size"]},
    )
    for number, op in enumerate(trace["ops"]):
        if op["op"] == "add_request":
            bench.wait(op["request_id"], op["prompt"], op["output_tokens"])
            continue
        if op["op"] != "step":
            raise CourseError(f"{name} has the operation {op['op']!r}, which is not replayed here")
        got = _step(bench)
        for key in STEP_KEYS:
            if key in op["expect"] and not _same(op["expect"][key], got[key]):
                said = f"operation {number}: {key} is {got[key]}, vLLM says {op['expect'][key]}"
                return Replay(name, number + 1, said)
    return Replay(name, len(trace["ops"]))


def _step(bench: Bench) -> dict[str, Any]:
    metadata = bench.schedule()
    answer = {
        "scheduled": [
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
        ],
        "model_input": input_dict(bench.build(metadata)),
        "num_batched_tokens": bench.out.num_batched_tokens,
    }
    bench.count(metadata)
    gpu, groups = bench.gpu, bench.groups
    ended = [each.request_id for each in metadata if groups[each.request_id].first_seq.is_finished]
    counts = {"free_gpu": gpu.num_free_blocks, "hits": gpu.hits, "queries": gpu.queries}
    return answer | {"finished": ended} | counts


# -- the block manager --------------------------------------------------------------------------------------


def replay_blocks(
    name: str, tracker: type[ComputedBlocksTracker] | None = None, until: int | None = None
) -> Replay:
    """Replays a trace of the family `block_manager`, up to operation `until`, with one sequence per group."""
    ops = golden(name)["ops"][:until]
    driver = BlockDriver(golden(name)["config"], tracker)
    for number, op in enumerate(ops):
        answer = driver.apply(op)
        for key, value in op["expect"].items():
            if key in answer and not _same(value, answer[key]):
                said = f"operation {number}, {op['op']}: {key} is {answer[key]}, vLLM says {value}"
                return Replay(name, number + 1, said)
    return Replay(name, len(ops))


class BlockDriver:
    """A block manager as 0.7.3 had it, but for the tracker, and one method per operation of a trace."""

    def __init__(self, config: Mapping[str, Any], tracker: type[ComputedBlocksTracker] | None) -> None:
        self.manager = BlockManager(
            config["block_size"],
            config["num_gpu_blocks"],
            config["num_cpu_blocks"],
            watermark=config["watermark"],
            enable_caching=config["enable_caching"],
            faithful=True,
        )
        if tracker is not None:
            self.manager.computed = make_tracker(tracker, self.manager)
        self.seqs: dict[int, V0Sequence] = {}
        self.groups: dict[str, SequenceGroup] = {}

    def apply(self, op: Mapping[str, Any]) -> dict[str, Any]:
        """One operation. Returns: what it answers, under the trace's names."""
        method = getattr(self, f"_{op['op']}", None)
        if method is None:
            raise CourseError(f"the operation {op['op']!r} is not replayed here")
        answer: dict[str, Any] = method(op) or {}
        return answer

    def _add_group(self, op: Mapping[str, Any]) -> None:
        (seq_id,) = op["seq_ids"]
        self.seqs[seq_id] = V0Sequence(seq_id, op["tokens"])
        self.groups[op["group"]] = SequenceGroup(op["group"], [self.seqs[seq_id]])

    def _append_tokens(self, op: Mapping[str, Any]) -> None:
        self.seqs[op["seq_id"]].token_ids.extend(op["tokens"])

    def _update_num_computed_tokens(self, op: Mapping[str, Any]) -> None:
        self.seqs[op["seq_id"]].update_num_computed_tokens(op["n"])

    def _get_num_cached_tokens(self, op: Mapping[str, Any]) -> dict[str, Any]:
        return {"num_cached_tokens": self.manager.get_num_cached_tokens(self.seqs[op["seq_id"]])}

    def _can_allocate(self, op: Mapping[str, Any]) -> dict[str, Any]:
        return {"status": self.manager.can_allocate(self.groups[op["group"]]).value}

    def _allocate(self, op: Mapping[str, Any]) -> dict[str, Any]:
        group = self.groups[op["group"]]
        self.manager.allocate(group)
        group.first_seq.status = SequenceStatus.RUNNING
        table = self.manager.block_ids(group.first_seq)
        return {"block_tables": {str(group.first_seq.seq_id): table}}

    def _access_all_blocks_in_seq(self, op: Mapping[str, Any]) -> None:
        self.manager.access_all_blocks_in_seq(self.seqs[op["seq_id"]], op["now"])

    def _get_common_computed_block_ids(self, op: Mapping[str, Any]) -> dict[str, Any]:
        seqs = [self.seqs[seq_id] for seq_id in op["seq_ids"]]
        return {"block_ids": self.manager.get_common_computed_block_ids(seqs)}

    def _mark_blocks_as_computed(self, op: Mapping[str, Any]) -> None:
        self.manager.mark_blocks_as_computed(self.groups[op["group"]].first_seq, op["token_chunk_size"])

    def _can_append_slots(self, op: Mapping[str, Any]) -> dict[str, Any]:
        return {"result": self.manager.can_append_slots(self.groups[op["group"]])}

    def _append_slots(self, op: Mapping[str, Any]) -> dict[str, Any]:
        seq = self.seqs[op["seq_id"]]
        copies = self.manager.append_slots(seq)
        return {"copy_on_write": copies, "block_table": self.manager.block_ids(seq)}

    def _free(self, op: Mapping[str, Any]) -> None:
        self.manager.free(self.seqs[op["seq_id"]])

    def _get_prefix_cache_hit_rate(self, op: Mapping[str, Any]) -> dict[str, Any]:
        return {"hit_rate": self.manager.allocator.gpu.hit_rate}

    def _snapshot(self, op: Mapping[str, Any]) -> None:
        """A look inside, which is not compared here."""
