"""V0's scheduler without chunked prefill: prompts or decodes, what a hit costs, and what the worker is told.

Cases S01, S05, S06 of the shared set. Preemption is in test_v0_preemption, chunks in test_v0_chunked_prefill.
"""

from __future__ import annotations

import pytest

from refengine.v0.sequence import SequenceStage, SequenceStatus
from tests.unit.helpers import Marks, numbers
from tests.unit.v0_helpers import Steps

# Prompts or decodes


def test_prompts_go_first_and_decodes_wait() -> None:
    """Misconception: "who runs goes first". That is chunked prefill, and V1; by default V0 lets everybody wait."""
    steps = Steps(20)
    steps.add("A", numbers(1, 6))
    assert steps.step() == {"A": 6}
    assert steps.step() == {"A": 1}
    steps.add("B", numbers(11, 15))
    assert steps.step() == {"B": 5}
    assert steps.step() == {"A": 1, "B": 1}
    assert list(steps.metadata) == steps.queue("running") == ["A", "B"]


def test_all_decodes_run_together() -> None:
    steps = Steps(20)
    for name in "ABC":
        steps.add(name, [ord(name)])
    assert steps.step() == {"A": 1, "B": 1, "C": 1}
    assert steps.out.num_prefill_groups == 3
    assert steps.step() == {"A": 1, "B": 1, "C": 1}
    assert steps.out.num_prefill_groups == 0


def test_stages_follow_the_computed_tokens() -> None:
    steps = Steps(20)
    seq = steps.add("A", numbers(1, 6))
    assert (seq.stage, seq.num_new_tokens) == (SequenceStage.PREFILL, 6)
    steps.step()
    assert (seq.stage, seq.num_new_tokens, seq.num_computed_tokens) == (SequenceStage.DECODE, 1, 6)
    assert seq.output_token_ids == [10_001]


def test_the_head_of_the_queue_holds_up_the_rest() -> None:
    """Misconception: "whoever fits runs". A small prompt behind a large one waits with it."""
    steps = Steps(6)
    steps.add("A", numbers(1, 12))
    steps.step()
    steps.add("large", numbers(101, 116))
    steps.add("small", [99])
    assert steps.step() == {"A": 1}
    assert steps.queue("waiting") == ["large", "small"]


def test_s05_a_prompt_without_room_in_the_step_holds_no_blocks() -> None:
    """S05. Misconception: "blocks first, then the budget". Whoever waits would hold blocks."""
    steps = Steps(8, max_num_batched_tokens=8, max_model_len=8)
    steps.add("A", numbers(1, 5))
    steps.add("B", numbers(11, 15))
    assert steps.step() == {"A": 5}
    assert (steps.table("B"), steps.num_free) == ([], 6)
    assert steps.step() == {"B": 5}


def test_seats_are_counted_with_those_who_run() -> None:
    """Misconception: "the limit is on the groups of a step". Whoever runs has a seat, also in a step of prompts."""
    steps = Steps(20, max_num_seqs=2)
    for name in "ABC":
        steps.add(name, [ord(name)], max_tokens=2)
    assert steps.step() == {"A": 1, "B": 1}
    assert steps.step() == {"A": 1, "B": 1}
    assert steps.step() == {"C": 1}


def test_what_can_never_be_served_is_ignored() -> None:
    steps = Steps(4, max_num_batched_tokens=16, max_model_len=16)
    too_long = steps.add("too long", numbers(1, 17))
    steps.add("fits", [5])
    assert steps.step() == {"fits": 1}
    assert [group.request_id for group in steps.out.ignored] == ["too long"]
    assert too_long.status is SequenceStatus.FINISHED_IGNORED and too_long.is_finished
    assert steps.queue("waiting") == []
    assert list(steps.manager.computed._hashes) == [1], "nothing is remembered of who never ran"


def test_what_needs_more_blocks_than_there_are_is_ignored() -> None:
    steps = Steps(3)
    steps.add("A", numbers(1, 13))
    assert steps.step() == {}
    assert [group.request_id for group in steps.out.ignored] == ["A"]


# Hits


def warm(prompt: list[int], **options: object) -> Steps:
    """Somebody has computed this prompt, and left."""
    steps = Steps(20, **options)
    steps.add("first", prompt, max_tokens=1)
    steps.step()
    return steps


def test_the_scheduler_passes_the_hit_on_and_skips_nothing() -> None:
    """Misconception: "the scheduler subtracts the hit". In V0 it hands over block ids; the worker skips."""
    steps = warm(numbers(1, 8))
    steps.add("B", [*numbers(1, 8), 99])
    assert steps.step() == {"B": 9}
    metadata = steps.metadata["B"]
    assert (metadata.computed_block_nums, metadata.num_computed_tokens) == ([0, 1], 0)
    assert metadata.block_tables == {1: steps.table("B")}


def test_cached_tokens_cost_no_budget() -> None:
    """Misconception: "the budget counts all tokens". Three repeats of 12 tokens run under a budget of 14."""
    steps = warm(numbers(1, 12), max_num_batched_tokens=14, max_model_len=14)
    for name in "BCD":
        steps.add(name, numbers(1, 12))
    assert steps.step() == {"B": 12, "C": 12, "D": 12}
    assert steps.out.num_batched_tokens == 36


def test_s01_a_prompt_that_is_cached_to_its_end_costs_one_token() -> None:
    """S01. Misconception: "a full hit is free". Its last token is computed, for nobody else can tell what follows."""
    steps = warm(numbers(1, 12), max_num_batched_tokens=14, max_model_len=14)
    marks = Marks()
    steps.scheduler.observer = marks
    steps.add("B", numbers(1, 12))
    steps.add("C", numbers(101, 114))
    assert steps.step() == {"B": 12}
    assert marks.of("lookup", "B") == [{"num_tokens": 12, "hit_tokens": 11, "block_ids": [[0, 1, 2]]}]
    assert marks.of("admit", "C") == [{"admitted": False, "reason": "not enough token budget or seats"}]


def test_s06_equal_prompts_of_one_step_share_memory_but_not_work() -> None:
    """S06. Misconception: "cached is computed". Both compute everything, and write it to the same blocks."""
    steps = Steps(10)
    steps.add("A", [*numbers(1, 8), 9])
    steps.add("B", [*numbers(1, 8), 10])
    assert steps.step() == {"A": 9, "B": 9}
    assert (steps.table("A"), steps.table("B")) == ([0, 1, 2], [0, 1, 3])
    assert (steps.skipped("A"), steps.skipped("B")) == ([], [])
    assert steps.step() == {"A": 1, "B": 1}
    assert (steps.skipped("A"), steps.skipped("B")) == ([0, 1], [0, 1])


def test_without_a_cache_there_is_nothing_to_skip() -> None:
    steps = warm(numbers(1, 8), enable_prefix_caching=False)
    steps.add("B", numbers(1, 8))
    assert steps.step() == {"B": 8}
    assert steps.skipped("B") == []


def test_a_hit_does_not_help_to_be_admitted() -> None:
    """Behaviour 6: the prompt is asked for as if nothing of it were cached."""
    steps = Steps(4)
    steps.add("A", numbers(1, 12))
    steps.step()
    steps.add("B", numbers(1, 12), max_tokens=1)
    assert steps.step() == {"A": 1}
    assert steps.num_free == 0


def test_marks_come_in_the_order_of_the_decisions() -> None:
    marks = Marks()
    steps = Steps(10, observer=marks)
    steps.add("A", numbers(1, 9))
    steps.step()
    assert [kind for kind, _, _ in marks.all] == ["lookup", "admit", "allocate", "publish"]
    assert marks.of("allocate") == [{"num_tokens": 9, "block_ids": [[0, 1, 2]]}]
    assert marks.of("publish") == [{"block_ids": [0, 1]}]


# The end


@pytest.mark.parametrize("when", [0, 1, 2])
def test_an_aborted_request_leaves_nothing(when: int) -> None:
    steps = Steps(10)
    seq = steps.add("A", numbers(1, 9))
    for _ in range(when):
        steps.step()
    steps.finish("A")
    assert seq.status is SequenceStatus.FINISHED_ABORTED
    assert (steps.num_free, steps.scheduler.has_unfinished) == (10, False)
    assert steps.scheduler.abort("A") is None


def test_what_has_finished_leaves_the_queue() -> None:
    steps = Steps(10)
    steps.add("A", numbers(1, 4), max_tokens=2)
    steps.step()
    assert steps.queue("running") == ["A"]
    steps.step()
    assert (steps.queue("running"), steps.num_free) == ([], 10)
