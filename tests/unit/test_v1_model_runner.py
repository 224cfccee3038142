"""The model runner: positions, slots and lengths as the kernels get them, and whose token is sampled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import kernels
from refengine.kv_cache import KVCache
from refengine.sampling import SamplingParams
from refengine.v1.input_batch import InputBatch
from refengine.v1.model_runner import ModelRunner
from refengine.v1.scheduler_output import ScheduledRequest, SchedulerOutput
from tests.unit.helpers import Marks, numbers
from tests.unit.models import greedy, make_decoder


@dataclass
class Spy:
    """A kernel backend that computes nothing new and keeps what it was asked, once per step (by layer 0)."""

    slots: list[int] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def reshape_and_cache(
        self, key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any
    ) -> None:
        self.slots = slot_mapping.tolist()
        kernels.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)

    def paged_attention(self, query: Any, *arguments: Any) -> torch.Tensor:
        _, _, tables, starts, lengths, *_ = arguments
        self.tables, self.starts, self.lengths = tables.tolist(), starts.tolist(), lengths.tolist()
        return kernels.paged_attention(query, *arguments)

    paged_attention_decode = staticmethod(kernels.paged_attention_decode)
    copy_blocks = staticmethod(kernels.copy_blocks)


def make(observer: Marks | None = None) -> tuple[ModelRunner, Spy]:
    decoder, spy = make_decoder(), Spy()
    cache = KVCache(decoder.config, num_blocks=12, block_size=4)
    batch = InputBatch(max_num_seqs=4, max_model_len=16, block_size=4)
    return ModelRunner(decoder, cache, batch, backend=spy, observer=observer), spy


def new(
    request_id: str,
    tokens: list[int],
    blocks: list[int],
    num_tokens: int | None = None,
    computed: int = 0,
    kind: Any = "new",
    **params: Any,
) -> ScheduledRequest:
    count = len(tokens) - computed if num_tokens is None else num_tokens
    sampling = SamplingParams(**params)
    return ScheduledRequest(
        request_id, kind, count, computed, (blocks,), tuple(tokens), len(tokens), sampling
    )


def goes_on(
    request_id: str, computed: int, num_tokens: int = 1, blocks: list[int] | None = None
) -> ScheduledRequest:
    return ScheduledRequest(
        request_id, "running", num_tokens, computed, None if blocks is None else (blocks,)
    )


def test_slots_come_from_the_block_table() -> None:
    """Misconception: "a request's slots lie one after another in its row". They lie where its blocks lie."""
    runner, spy = make()
    runner.execute(SchedulerOutput([new("A", numbers(1, 6), [5, 2]), new("B", [7], [9])]))
    assert spy.slots == [20, 21, 22, 23, 8, 9, 36]
    assert spy.tables == [[5, 2], [9, 0]]
    assert (spy.starts, spy.lengths) == ([0, 6, 7], [6, 1])


def test_a_prefix_hit_is_only_a_later_start() -> None:
    """Misconception: "the runner looks the hit up". It is told where to start; the rest follows from that."""
    marks = Marks()
    runner, spy = make(marks)
    runner.execute(SchedulerOutput([new("A", numbers(1, 6), [5, 2], computed=4)]))
    assert spy.slots == [8, 9]
    assert (spy.starts, spy.lengths) == ([0, 2], [6])
    assert marks.of("run") == [{"start": 4, "num_tokens": 2}]


def test_chunk_and_decode_in_one_step() -> None:
    runner, spy = make()
    runner.execute(SchedulerOutput([new("A", numbers(1, 3), [5])]))
    runner.execute(SchedulerOutput([goes_on("A", 3), new("B", numbers(1, 7), [2, 3], num_tokens=5)]))
    assert spy.slots == [23, 8, 9, 10, 11, 12]
    assert (spy.starts, spy.lengths) == ([0, 1, 6], [4, 5])
    runner.execute(SchedulerOutput([goes_on("A", 4, blocks=[7]), goes_on("B", 5, 2)]))
    assert spy.slots == [28, 13, 14]
    assert (spy.starts, spy.lengths) == ([0, 1, 3], [5, 7])


def test_the_order_of_the_step_is_not_the_order_of_the_rows() -> None:
    """Misconception: "row i is request i of the step". Priorities and preemption mix them."""
    runner, spy = make()
    runner.execute(SchedulerOutput([new("A", [1, 2], [5]), new("B", [3], [6])]))
    output = runner.execute(SchedulerOutput([goes_on("B", 1), goes_on("A", 2)]))
    assert spy.slots == [25, 22]
    assert list(output.sampled) == ["B", "A"]


def test_no_token_before_the_whole_prompt_is_computed() -> None:
    """Misconception: "every scheduled request samples". The end of a chunk predicts a token that is known."""
    runner, _ = make()
    prompt = numbers(1, 7)
    assert runner.execute(SchedulerOutput([new("A", prompt, [5, 2], num_tokens=5)])).sampled == {}
    output = runner.execute(SchedulerOutput([goes_on("A", 5, 2)]))
    assert output.sampled == {"A": greedy(runner.model, prompt, 1)}


def test_a_request_that_left_is_forgotten_before_others_arrive() -> None:
    runner, spy = make()
    runner.execute(SchedulerOutput([new("A", [1, 2], [5]), new("B", [3], [6])]))
    step = SchedulerOutput([new("A", [1, 2, 4], [7], kind="resumed")], frozenset("B"), frozenset("A"))
    runner.execute(step)
    assert runner.batch.request_ids == ["A"]
    assert spy.slots == [28, 29, 30]


def test_a_step_of_nothing_still_forgets() -> None:
    runner, _ = make()
    runner.execute(SchedulerOutput([new("A", [1, 2], [5])]))
    output = runner.execute(SchedulerOutput([], frozenset("A")))
    assert (output.sampled, runner.batch.request_ids) == ({}, [])


@pytest.mark.parametrize("chunks", [(7,), (4, 3), (1, 1, 5), (3, 3, 1), (6, 1)])
def test_prompt_scores_do_not_depend_on_chunks(chunks: tuple[int, ...]) -> None:
    """Misconception: "a chunk scores its own tokens". Its last row scores the first token of the next chunk."""
    prompt = numbers(1, 7)
    runner, _ = make()
    whole = runner.execute(SchedulerOutput([new("A", prompt, [5, 2], prompt_logprobs=2)])).prompt_logprobs[
        "A"
    ]
    assert whole[0] == 1 and len(whole[1]) == 6
    runner, _ = make()
    scores: dict[int, Any] = {}
    done = 0
    for chunk in chunks:
        share = new("A", prompt, [5, 2], chunk, prompt_logprobs=2) if done == 0 else goes_on("A", done, chunk)
        first, got = runner.execute(SchedulerOutput([share])).prompt_logprobs.get("A", (0, []))
        scores |= dict(enumerate(got, start=first))
        done += chunk
    assert sorted(scores) == list(range(1, 7))
    for position, expected in enumerate(whole[1], start=1):
        assert scores[position].keys() == expected.keys()
        for token, score in expected.items():
            assert scores[position][token].rank == score.rank
            assert scores[position][token].logprob == pytest.approx(score.logprob, abs=1e-4)
