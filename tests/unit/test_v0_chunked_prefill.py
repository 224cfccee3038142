"""V0's scheduler with chunked prefill: decodes first, prompts in parts, and what a part has really computed."""

from __future__ import annotations

import pytest

from tests.unit.helpers import Marks, numbers
from tests.unit.v0_helpers import Manager, Steps


def make(gpu: int = 40, budget: int = 8, **options: object) -> Steps:
    return Steps(gpu, enable_chunked_prefill=True, max_num_batched_tokens=budget, **options)


def test_decodes_go_first_and_prompts_get_the_rest() -> None:
    """Misconception: "V0 never mixes". With chunked prefill it does, and prompts still stand first in the batch."""
    steps = make(enable_prefix_caching=False)
    steps.add("A", numbers(1, 3))
    steps.step()
    steps.add("B", numbers(11, 30))
    assert steps.step() == {"B": 7, "A": 1}
    assert (list(steps.metadata), steps.out.num_prefill_groups) == (["B", "A"], 1)
    assert steps.step() == {"B": 7, "A": 1}


def test_an_unfinished_prompt_samples_nothing() -> None:
    """Misconception: "every scheduled group samples". The end of a chunk predicts a token that is known."""
    steps = make(enable_prefix_caching=False)
    seq = steps.add("A", numbers(1, 11))
    assert steps.step() == {"A": 8}
    assert (steps.metadata["A"].do_sample, seq.output_token_ids, seq.num_computed_tokens) == (False, [], 8)
    assert steps.step() == {"A": 3}
    assert (steps.metadata["A"].do_sample, len(seq.output_token_ids)) == (True, 1)


def test_with_a_cache_chunks_end_at_block_ends() -> None:
    """Misconception: "a chunk takes what is left". It would leave a block half computed."""
    steps = make(budget=10)
    steps.add("A", numbers(1, 19))
    assert steps.step() == {"A": 8}
    assert steps.step() == {"A": 8}
    assert steps.step() == {"A": 3}, "the last chunk is as long as it is"


def test_a_prompt_takes_all_its_blocks_with_its_first_chunk() -> None:
    """Misconception: "a chunk takes blocks for its tokens". V1 does; V0 takes those of the whole prompt."""
    steps = make()
    steps.add("A", numbers(1, 20))
    steps.step()
    assert steps.table("A") == [0, 1, 2, 3, 4]


def test_cached_tokens_come_on_top_of_the_chunk() -> None:
    """Behaviour 14: the chunk counts cached tokens, and so does the computed count, though the worker ran fewer."""
    steps = make(budget=16)
    steps.add("A", numbers(1, 16), max_tokens=1)
    steps.step()
    seq = steps.add("B", numbers(1, 40))
    assert steps.step() == {"B": 32}
    assert (steps.skipped("B"), seq.num_computed_tokens) == ([0, 1, 2, 3], 32)
    assert steps.out.num_batched_tokens == 32
    assert steps.step() == {"B": 8}
    assert steps.metadata["B"].num_computed_tokens == 32


def test_prompts_share_the_budget_of_a_step() -> None:
    steps = make(budget=16, max_num_partial_prefills=2, max_long_partial_prefills=2)
    steps.add("A", numbers(1, 20))
    steps.add("B", numbers(101, 120))
    steps.add("C", numbers(201, 220))
    assert steps.step() == {"A": 8, "B": 8}
    assert steps.step() == {"A": 8, "B": 8}
    assert steps.step() == {"A": 4, "B": 4}, "both turns are taken, though there are tokens left"
    assert steps.step() == {"C": 12, "A": 1, "B": 1}


def test_a_short_prompt_overtakes_long_ones() -> None:
    steps = make(
        budget=16,
        max_num_partial_prefills=2,
        max_long_partial_prefills=1,
        long_prefill_token_threshold=10,
    )
    steps.add("long", numbers(1, 20))
    steps.add("longer", numbers(101, 130))
    steps.add("short", numbers(201, 206))
    assert steps.step() == {"long": 8, "short": 6}
    assert steps.queue("waiting") == ["longer"]


def test_who_finishes_its_prompt_stands_before_those_who_do_not() -> None:
    steps = make(budget=16, max_num_partial_prefills=2, max_long_partial_prefills=2)
    steps.add("A", numbers(1, 24))
    steps.add("B", numbers(101, 112))
    steps.step()
    steps.step()
    assert steps.queue("running") == ["B", "A"]


def early(mode: str) -> Steps:
    """sc_chunked_marked_early: two equal prompts of 32 tokens in parts; the first has run 8 when the second comes."""
    steps = make(mode=mode, budget=16, max_num_partial_prefills=2, max_long_partial_prefills=2)
    steps.add("A", numbers(1, 32))
    steps.step()
    steps.add("B", [*numbers(1, 32), 99])
    steps.step()
    return steps


def test_only_what_a_chunk_has_run_may_be_skipped() -> None:
    """Misconception: "an admitted prompt is computed". Only its chunks are, one after another."""
    steps = early("fixed")
    assert steps.skipped("B") == [0, 1, 2, 3]
    assert steps.groups["A"].first_seq.num_computed_tokens == 24


def test_vllm_skips_what_was_never_run() -> None:
    """The known defect that mode "faithful" keeps: B skips all 32 tokens of A, of which 16 have been run."""
    assert early("faithful").skipped("B") == numbers(0, 7)


def test_publishing_follows_the_chunks() -> None:
    marks = Marks()
    steps = make(observer=marks)
    steps.add("A", numbers(1, 19))
    for _ in range(3):
        steps.step()
    assert marks.of("publish", "A") == [{"block_ids": [0, 1]}, {"block_ids": [2, 3]}]


@pytest.mark.parametrize("end", ["abort", "preempt", "take back"])
def test_what_nobody_will_compute_is_forgotten(end: str) -> None:
    """Misconception: "a block without a user is computed". Its user left in the middle of its prompt."""
    steps = make(gpu=8, policy="fcfs")
    steps.add("A", numbers(1, 24))
    steps.step()
    if end == "abort":
        steps.finish("A")
    elif end == "preempt":
        steps.scheduler._preempt(steps.scheduler.running.pop(), steps.out)
    else:
        steps.schedule()
        steps.scheduler.take_back(steps.out)
    steps.scheduler.waiting.clear()
    steps.add("B", numbers(1, 24))
    assert steps.step() == {"B": 16}
    assert steps.skipped("B") == steps.table("B")[:2]


@pytest.mark.parametrize("mode", ["fixed", "faithful"])
def test_a_full_block_moves_only_to_one_that_is_computed(mode: str) -> None:
    """Misconception: "a known block holds its content". That of a prompt whose turn has not come holds nothing."""
    manager = Manager(10, mode=mode)
    manager.begin("long", numbers(1, 16))
    manager.run("long", 4)
    manager.start("short", numbers(1, 7))
    assert manager.table("short") == [0, 4]
    manager.append("short", 8)
    assert manager.table("short") == [0, 4 if mode == "fixed" else 1]


def test_a_prompt_with_nothing_to_append_needs_no_block() -> None:
    """Misconception: "every running group grows". In the middle of its prompt it has all the blocks it needs."""
    steps = make(gpu=2, enable_prefix_caching=False, budget=4)
    steps.add("A", numbers(1, 7))
    assert steps.step() == {"A": 4}
    assert steps.num_free == 0
    assert steps.step() == {"A": 3}
