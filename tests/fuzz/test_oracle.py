"""The oracle itself: hand-made steps, some right and some wrong, and what it says about them.

An oracle that never objects would pass every engine, so each kind of violation is provoked here once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from tests.fuzz.oracle import SequenceInput, ShadowKV, StepInput, Violation

BLOCK_SIZE = 2
Held = Mapping[str, Sequence[int]]


def chunk(shadow: ShadowKV, request_id: str, first: int, count: int, table: Sequence[int]) -> SequenceInput:
    """`count` tokens of a request from position `first` on, written where `table` says."""
    positions = range(first, first + count)
    return SequenceInput(
        request_id,
        [shadow.tokens(request_id)[position] for position in positions],
        list(positions),
        [table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE for position in positions],
        table,
        first + count,
    )


def run(shadow: ShadowKV, *sequences: SequenceInput, before: Held | None = None) -> list[Violation]:
    """A step in which each request holds its table; `before` None: nobody held anything yet."""
    held = {sequence.request_id: sequence.block_table for sequence in sequences}
    return shadow.run(StepInput(sequences, held, before or {}))


def kinds(violations: Sequence[Violation]) -> set[str]:
    return {violation.kind for violation in violations}


@pytest.fixture
def shadow() -> ShadowKV:
    """Request a has written its four tokens into blocks 1 and 2, b has the same first three, c other ones."""
    shadow = ShadowKV(num_blocks=8, block_size=BLOCK_SIZE)
    shadow.begin("a", None, [1, 2, 3, 4])
    shadow.begin("b", None, [1, 2, 3, 5])
    shadow.begin("c", None, [9, 2, 3, 4])
    assert run(shadow, chunk(shadow, "a", 0, 4, [1, 2])) == []
    return shadow


def test_a_request_may_go_on_and_another_may_share_its_prefix(shadow: ShadowKV) -> None:
    shadow.append("a", [6])
    sequences = chunk(shadow, "a", 4, 1, [1, 2, 3]), chunk(shadow, "b", 2, 2, [1, 4])
    assert run(shadow, *sequences, before={"a": [1, 2]}) == []
    assert not shadow.shared_in_step


def test_a_prefix_may_be_shared_in_the_step_that_computes_it() -> None:
    shadow = ShadowKV(8, BLOCK_SIZE)
    shadow.begin("a", None, [1, 2, 3])
    shadow.begin("b", None, [1, 2, 4])
    # The reader stands first: all writes of a step come before all reads.
    assert run(shadow, chunk(shadow, "b", 2, 1, [1, 3]), chunk(shadow, "a", 0, 3, [1, 2])) == []
    assert shadow.shared_in_step == {"b"}


def test_equal_tokens_behind_another_prefix_are_not_a_hit(shadow: ShadowKV) -> None:
    assert run(shadow, chunk(shadow, "c", 0, 2, [3])) == []
    # Block 2 holds the tokens 3, 4 as well, but those behind 1, 2.
    assert kinds(run(shadow, chunk(shadow, "c", 3, 1, [3, 2]))) == {"read"}


def test_equal_tokens_of_another_identity_are_not_a_hit(shadow: ShadowKV) -> None:
    shadow.begin("salted", "salt", [1, 2, 3])
    assert kinds(run(shadow, chunk(shadow, "salted", 2, 1, [1, 3]))) == {"read"}


def test_a_block_read_after_its_eviction(shadow: ShadowKV) -> None:
    assert run(shadow, chunk(shadow, "c", 0, 2, [2])) == []  # a is gone, its block 2 is taken
    assert kinds(run(shadow, chunk(shadow, "b", 3, 1, [1, 2]))) == {"read"}


def test_a_slot_that_nobody_wrote(shadow: ShadowKV) -> None:
    assert kinds(run(shadow, chunk(shadow, "b", 3, 1, [1, 5]))) == {"unwritten"}


def test_a_read_beyond_the_block_table(shadow: ShadowKV) -> None:
    short = SequenceInput("b", [3], [2], [8], [1], 3)
    assert kinds(shadow.run(StepInput([short], {"b": [1, 4]}, {}))) == {"read"}


def test_rows_of_no_request_must_not_write(shadow: ShadowKV) -> None:
    assert shadow.run(StepInput([], {}, {}, padding_slots=[-1])) == []
    assert kinds(shadow.run(StepInput([], {}, {}, padding_slots=[0, -1]))) == {"padding"}


def test_a_token_that_is_stored_nowhere_is_missed_when_it_is_read(shadow: ShadowKV) -> None:
    lost = SequenceInput("b", [3], [2], [-1], [1, 4], 3)
    assert kinds(run(shadow, lost)) == {"unwritten"}


def test_a_write_into_a_block_that_the_writer_does_not_hold(shadow: ShadowKV) -> None:
    step = StepInput([chunk(shadow, "b", 0, 2, [3])], {"b": [4]}, {})
    assert kinds(shadow.run(step)) == {"write"}


def test_two_writers_of_one_slot(shadow: ShadowKV) -> None:
    sequences = chunk(shadow, "b", 0, 2, [3]), chunk(shadow, "c", 0, 2, [3])
    assert "race" in kinds(run(shadow, *sequences))


def test_a_write_into_a_block_that_another_one_holds(shadow: ShadowKV) -> None:
    sequence, held = chunk(shadow, "b", 0, 2, [1]), {"a": [1, 2], "b": [1]}
    assert kinds(shadow.run(StepInput([sequence], held, {"a": [1, 2]}))) == {"overwrite"}
    # Whoever has lost the block in this very step (it was preempted) is no owner any more.
    assert shadow.run(StepInput([sequence], {"b": [1]}, {"a": [1, 2]})) == []


def test_an_engine_may_be_allowed_to_write_the_same_again() -> None:
    shadow = ShadowKV(8, BLOCK_SIZE, may_rewrite=True)
    for request_id, tokens in {"a": [1, 2], "same": [1, 2], "other": [1, 3]}.items():
        shadow.begin(request_id, None, tokens)
    run(shadow, chunk(shadow, "a", 0, 2, [1]))
    for request_id, expected in {"same": set(), "other": {"overwrite"}}.items():
        step = StepInput([chunk(shadow, request_id, 0, 2, [1])], {"a": [1], request_id: [1]}, {"a": [1]})
        assert kinds(shadow.run(step)) == expected


@pytest.mark.parametrize(
    ("token_ids", "positions", "seq_len"),
    [([7], [2], 3), ([3], [1], 2), ([3], [2], 4), ([6], [4], 5)],
    ids=["another token", "another position", "attention sees more", "beyond the end"],
)
def test_an_input_that_is_not_the_request(
    shadow: ShadowKV, token_ids: list[int], positions: list[int], seq_len: int
) -> None:
    wrong = SequenceInput("b", token_ids, positions, [3 * BLOCK_SIZE], [1, 3, 4], seq_len)
    assert "input" in kinds(run(shadow, wrong))


def test_one_hash_for_two_prefixes(shadow: ShadowKV) -> None:
    assert shadow.learn("a", ["12", "1234"]) == []
    assert shadow.learn("b", ["12"]) == []
    assert kinds(shadow.learn("c", ["12"])) == {"collision"}


def test_a_findable_block_keeps_its_promise(shadow: ShadowKV) -> None:
    shadow.learn("a", ["12", "1234"])
    shadow.learn("b", ["12", "1235"])
    assert shadow.check_findable({1: "12", 2: "1234"}) == []
    assert kinds(shadow.check_findable({2: "12"})) == {"promise"}  # holds another block of the same request
    assert kinds(shadow.check_findable({3: "1234"})) == {"promise"}  # holds nothing
    assert kinds(shadow.check_findable({1: "never heard of"})) == {"promise"}
    run(shadow, chunk(shadow, "b", 2, 1, [1, 4]))
    assert kinds(shadow.check_findable({4: "1235"})) == {"promise"}  # only half of it is there


def test_a_report_is_a_sentence(shadow: ShadowKV) -> None:
    (violation,) = run(shadow, chunk(shadow, "c", 1, 1, [1]))[:1]
    assert str(violation) == "read: c reads position 0 in slot 2, which holds [1] of None"
