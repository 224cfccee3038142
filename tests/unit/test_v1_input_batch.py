"""The persistent batch: rows that stay, grow, fall free and are filled again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from refengine.errors import IntegrityError
from refengine.sampling import SamplingParams
from refengine.v1.input_batch import InputBatch
from refengine.v1.scheduler_output import ScheduledRequest
from tests.unit.helpers import numbers


def share(
    request_id: str, tokens: Sequence[int], computed: int = 0, params: SamplingParams | None = None
) -> ScheduledRequest:
    params = params or SamplingParams()
    return ScheduledRequest(request_id, "new", 1, computed, None, tuple(tokens), len(tokens), params)


def make(*requests: tuple[str, Sequence[int], Sequence[int]]) -> InputBatch:
    """A batch of blocks of 4 tokens, filled with (id, tokens, block ids)."""
    batch = InputBatch(max_num_seqs=4, max_model_len=12, block_size=4)
    for request_id, tokens, block_ids in requests:
        batch.add(share(request_id, tokens))
        batch.add_blocks(request_id, block_ids)
    return batch


def tokens_of(batch: InputBatch, request_id: str) -> list[int]:
    row = batch.row_of[request_id]
    return batch.token_ids[row, : batch.num_tokens[row]].tolist()


def table_of(batch: InputBatch, request_id: str) -> list[int]:
    row = batch.row_of[request_id]
    return batch.block_table[row, : batch.num_blocks[row]].tolist()


def test_a_request_keeps_its_row_and_grows_there() -> None:
    batch = make(("A", numbers(1, 3), [7]), ("B", [9], [5]))
    assert batch.row_of == {"A": 0, "B": 1}
    batch.add_token(0, 4)
    batch.add_token(0, 5)
    batch.add_blocks("A", [2])
    assert (tokens_of(batch, "A"), table_of(batch, "A")) == (numbers(1, 5), [7, 2])
    assert (tokens_of(batch, "B"), table_of(batch, "B")) == ([9], [5])


def test_blocks_are_appended_to_the_table() -> None:
    """Misconception: "new blocks replace the table". While a request runs, only what was added is sent."""
    batch = make(("A", numbers(1, 8), [7, 3]))
    batch.add_blocks("A", [])
    batch.add_blocks("A", [5])
    assert table_of(batch, "A") == [7, 3, 5]


def test_a_removed_row_is_filled_with_the_last_one_whole() -> None:
    """Misconception: "moving a row is moving its id". Tokens, counts, table and parameters have to move with it."""
    special = SamplingParams(max_tokens=3)
    batch = make(("A", [1, 2], [4]), ("B", [3], [5]))
    batch.add(share("C", numbers(21, 25), computed=4, params=special))
    batch.add_blocks("C", [8, 9])
    batch.remove("A")
    assert batch.request_ids == ["C", "B"]
    assert batch.row_of == {"C": 0, "B": 1}
    assert tokens_of(batch, "C") == numbers(21, 25)
    assert table_of(batch, "C") == [8, 9]
    assert batch.params[0] is special and len(batch.params) == 2
    assert (batch.num_computed_tokens[0], batch.num_prompt_tokens[0]) == (4, 5)
    assert (tokens_of(batch, "B"), table_of(batch, "B")) == ([3], [5])


def test_the_last_row_just_goes() -> None:
    batch = make(("A", [1, 2], [4]), ("B", [3], [5]))
    batch.remove("B")
    assert (batch.request_ids, batch.row_of) == (["A"], {"A": 0})
    assert table_of(batch, "A") == [4]


def test_removing_a_request_without_a_row_is_fine() -> None:
    """A request can end before it ever ran."""
    batch = make(("A", [1], [4]))
    batch.remove("never ran")
    assert batch.request_ids == ["A"]


def test_a_reused_row_starts_with_an_empty_table() -> None:
    """Misconception: "a row is overwritten anyway". Its count of blocks would point behind the old ones."""
    batch = make(("A", numbers(1, 8), [7, 3]))
    batch.remove("A")
    batch.add(share("B", [5, 6]))
    batch.add_blocks("B", [2])
    assert table_of(batch, "B") == [2]
    assert tokens_of(batch, "B") == [5, 6]


def test_a_request_has_one_row() -> None:
    batch = make(("A", [1], [4]))
    with pytest.raises(IntegrityError, match="request 'A' is not new to the batch"):
        batch.add(share("A", [1]))


def test_a_row_has_room_for_the_longest_request() -> None:
    batch = InputBatch(max_num_seqs=1, max_model_len=10, block_size=4)
    assert batch.block_table.shape == (1, 3)
    assert batch.token_ids.shape == (1, 10)
    assert batch.token_ids.dtype == np.int64
