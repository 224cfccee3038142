"""The oracle itself: hand-made steps, some right and some wrong, and what it says about them.

An oracle that never objects would pass every engine, so each kind of violation is provoked here once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from tests.fuzz.oracle import SequenceInput, ShadowKV, ShadowStates, StepInput, Violation

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


# Windows, chunks and states

A = [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("sees", "first_needed"), [({"window": 3}, 4), ({"window": 5}, 2), ({"chunk": 4}, 4), ({}, 0)]
)
def test_a_layer_may_read_only_what_it_sees(sees: dict[str, int], first_needed: int) -> None:
    """Position 6 in blocks of 2: whatever it does not see may be the null block, and nothing that it sees."""
    table = [1, 2, 3, 4]
    for hidden in range(4):
        shadow = ShadowKV(8, BLOCK_SIZE, **sees)
        shadow.begin("a", None, A)
        assert run(shadow, chunk(shadow, "a", 0, 6, table[:3])) == []
        with_null = [*([0] * hidden), *table[hidden:]]
        found = kinds(run(shadow, chunk(shadow, "a", 6, 1, with_null), before={"a": table[:3]}))
        assert found == (set() if hidden * BLOCK_SIZE <= first_needed else {"unwritten"}), hidden


def test_a_window_holds_exactly_the_readers_prefix() -> None:
    shadow = ShadowKV(8, BLOCK_SIZE, window=3)
    shadow.begin("a", None, A)
    shadow.begin("b", None, [9, *A[1:]])
    run(shadow, chunk(shadow, "a", 0, 6, [1, 2, 3]))
    # The tokens 5 and 6 are the same, and they were computed behind another prefix.
    assert kinds(run(shadow, chunk(shadow, "b", 6, 1, [0, 0, 3, 4]))) == {"read"}


def state(shadow: ShadowKV, request_id: str, first: int, count: int, start: int, end: int) -> SequenceInput:
    """`count` tokens from position `first` on: from the state in block `start` to one in block `end`."""
    tokens = shadow.tokens(request_id)[first : first + count]
    held = [block for block in (start, end) if block > 0]
    positions = list(range(first, first + count))
    return SequenceInput(request_id, tokens, positions, [start, end], held, first + count)


@pytest.fixture
def states() -> ShadowStates:
    """Request a has left the state after 4 tokens in block 1; b has the same first four tokens, c other ones."""
    states = ShadowStates(8, BLOCK_SIZE)
    for request_id, tokens in {"a": A, "b": [1, 2, 3, 4, 9], "c": [9, 2, 3, 4, 5]}.items():
        states.begin(request_id, None, tokens)
    assert run(states, state(states, "a", 0, 4, -1, 1)) == []
    return states


def test_a_state_is_gone_on_from(states: ShadowStates) -> None:
    sequences = state(states, "a", 4, 2, 1, 2), state(states, "b", 4, 1, 1, 3)
    assert run(states, *sequences, before={"a": [1]}) == []


@pytest.mark.parametrize(
    ("request_id", "first", "start", "kind"),
    [("c", 4, 1, "read"), ("b", 3, 1, "read"), ("b", 4, 5, "unwritten"), ("b", 4, -1, "unwritten")],
    ids=["of another prefix", "after another token", "never written", "from nothing"],
)
def test_a_state_is_of_exactly_that_prefix(
    states: ShadowStates, request_id: str, first: int, start: int, kind: str
) -> None:
    assert kind in kinds(run(states, state(states, request_id, first, 1, start, 6)))


def test_a_state_is_not_read_in_the_step_that_writes_it(states: ShadowStates) -> None:
    states.begin("d", None, [*A[:6], 9])
    sequences = state(states, "a", 4, 2, 1, 2), state(states, "d", 6, 1, 2, 3)
    assert kinds(run(states, *sequences, before={"a": [1]})) == {"unwritten"}


def test_a_state_that_others_hold_is_not_written_over(states: ShadowStates) -> None:
    sequence = state(states, "b", 4, 1, 1, 1)
    assert kinds(states.run(StepInput([sequence], {"a": [1], "b": [1]}, {"a": [1]}))) == {"overwrite"}


def test_a_state_is_held_while_it_is_read_and_written(states: ShadowStates) -> None:
    sequence = state(states, "b", 4, 1, 1, 2)
    assert kinds(states.run(StepInput([sequence], {"b": [2]}, {}))) == {"read"}
    assert kinds(states.run(StepInput([sequence], {"b": [1]}, {}))) == {"write"}


def test_a_findable_state_keeps_its_promise(states: ShadowStates) -> None:
    states.learn("a", ["12", "1234", "123456"])
    assert states.check_findable({1: "1234"}) == []
    assert kinds(states.check_findable({1: "12"})) == {"promise"}
    assert kinds(states.check_findable({2: "1234"})) == {"promise"}
    states.spoil([1])
    assert kinds(states.check_findable({1: "1234"})) == {"promise"}
