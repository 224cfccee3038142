"""Drives V0's model-input builder through the operations of FORMAT_V0.md, family `model_input`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from refengine.v0.model_input import (
    PAD_SLOT_ID,
    ModelInput,
    ModelInputBuilder,
    SequenceInput,
    compute_slot_mapping,
    slot_mapping_start,
)
from refengine.v0.sequence import SequenceGroupMetadata

SEQUENCE_KEYS = (
    "input_tokens",
    "input_positions",
    "seq_len",
    "orig_seq_len",
    "query_len",
    "context_len",
    "curr_sliding_window_block",
    "prefix_cache_hit",
)
STAGES = ("after_compute_lens", "after_prefix_cache_hit", "after_sliding_window")


def model_input_dict(model_input: ModelInput) -> dict[str, Any]:
    """The step's lists under the trace's names."""
    answer = asdict(model_input)
    del answer["lora_mapping"]
    return answer


class ModelInputDriver:
    """A fresh builder per operation, with a note taken after each of its functions."""

    def __init__(self, config: dict[str, Any]) -> None:
        """The trace has no configuration: every operation brings its own."""

    def apply(self, op: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = getattr(self, op["op"])(op)
        return answer

    def model_input(self, op: dict[str, Any]) -> dict[str, Any]:
        builder = ModelInputBuilder(
            op["block_size"], sliding_window=op["sliding_window"], chunked_prefill=op["chunked_prefill"]
        )
        notes: dict[str, dict[str, Any]] = {}
        for i, stage in enumerate(STAGES):
            builder.per_seq_compute_fns[i] = _noted(builder.per_seq_compute_fns[i], stage, notes)
        tokens = op["prompt"] + op["output"]
        builder.add_seq_group(
            SequenceGroupMetadata(
                request_id="r",
                is_prompt=op["is_prompt"],
                do_sample=True,
                token_chunk_size=op["token_chunk_size"],
                token_ids={0: tokens},
                num_prompt_tokens=len(op["prompt"]),
                num_computed_tokens=op["num_computed_tokens"],
                block_tables={0: op["block_table"]},
                computed_block_nums=op["computed_block_nums"],
            )
        )
        return notes | {
            "num_cached_tokens_reported": builder.seqs[0].num_cached_tokens,
            "model_input": model_input_dict(builder.build()),
        }

    def slot_mapping(self, op: dict[str, Any]) -> dict[str, Any]:
        start = slot_mapping_start(op["is_prompt"], op["query_len"], op["sliding_window"])
        slots = compute_slot_mapping(
            op["block_table"], op["block_size"], op["context_len"], op["seq_len"], start
        )
        if op["is_profile_run"]:
            slots = [PAD_SLOT_ID] * op["seq_len"]
        return {"start_idx": start, "slot_mapping": slots, "pad_slot_id": PAD_SLOT_ID}


def _noted(compute: Any, stage: str, notes: dict[str, dict[str, Any]]) -> Any:
    def computed(seq: SequenceInput) -> None:
        compute(seq)
        notes[stage] = {key: getattr(seq, key) for key in SEQUENCE_KEYS}

    return computed
