"""Groups one by one: windows, chunks and states. Cases S07, S27, S28, S30, S32 of the shared set.

Where a behaviour of vLLM surprises, its recorded trace is named beside it.
"""

from __future__ import annotations

import pytest

from refengine.errors import IntegrityError
from refengine.v1.groups.spec import state_position
from tests.unit.group_cache import GroupCache, chunked, full, mamba, window
from tests.unit.helpers import numbers

A = numbers(1, 12)

# Sliding windows


def test_s27_a_window_is_looked_up_from_the_right() -> None:
    """S27. Misconceptions: "a hit ends at the first hole" and "the first hole from the right ends the search"."""
    cache = GroupCache(window(2, 4), usable=12)
    cache.start("A", A)
    cache.finish("A")
    longer = [*A, 100]
    assert cache.look(longer) == ([[0, 0, 0, 0, 5, 6]], 12, 0)
    cache.evict(4)
    assert cache.look(longer) == ([[0, 0, 0, 0, 5, 6]], 12, 0), "nobody looks at block 4 any more"
    cache.evict(6)
    assert cache.look(longer) == ([[0, 2, 3]], 6, 0)


def test_s27_a_leading_run_may_be_shorter_than_the_window() -> None:
    """S27. Misconception: "fewer blocks than the window needs are no hit". Before the first token there is nothing."""
    cache = GroupCache(window(2, 4), usable=12)
    cache.start("A", A)
    cache.evict(2, 4, 6)
    assert cache.look([*A, 100]) == ([[1]], 2, 0)


def test_a_hit_needs_one_token_less_than_the_window() -> None:
    """Misconception: "a hit needs the whole window". The next token is in its own window: 9 - 1 tokens are 4 blocks."""
    cache = GroupCache(window(2, 9), usable=12)
    cache.start("A", A)
    cache.evict(1, 2)
    assert cache.look([*A, 100]) == ([[0, 0, 3, 4, 5, 6]], 12, 0)
    cache.evict(3)
    assert cache.look([*A, 100])[1] == 0


def test_s28_blocks_behind_the_window_return_early() -> None:
    """S28. Misconceptions: "a table only grows" and "blocks return when the request ends". Trace script_swa_release."""
    cache = GroupCache(window(2, 4), usable=12)
    cache.add("A", numbers(1, 10))
    cache.resume("A", 6)
    assert cache.tables("A") == [[1, 2, 3]]
    cache.run("A", 3)
    assert cache.tables("A") == [[0, 2, 3, 4, 5]]
    assert cache.free == [6, 7, 8, 9, 10, 11, 12, 1]
    cache.run("A", 1)
    assert cache.tables("A") == [[0, 0, 0, 4, 5]]
    assert cache.counts(0) == [0], "nobody holds the null block"


def test_a_block_returns_only_when_its_last_token_has_left_the_window() -> None:
    """Misconception: "position n looks back n - window". With a window of 4, position 6 sees 3, 4, 5 and itself."""
    cache = GroupCache(window(2, 4), usable=12)
    cache.begin("A", numbers(1, 8), 6, 1)
    assert cache.tables("A") == [[0, 2, 3, 4]], "block 2 holds positions 2 and 3"
    cache.run("A", 1)
    assert cache.tables("A") == [[0, 0, 3, 4]]


def test_a_refused_request_has_returned_what_it_passed() -> None:
    """Surprise 5. Misconception: "a refusal changes nothing". Traces script_swa_release, rand_hybrid_tight."""
    cache = GroupCache(window(2, 4), usable=7)
    cache.begin("A", numbers(1, 40), 8)
    assert len(cache.free) == 3
    assert not cache.run("A", 32)
    assert cache.tables("A") == [[0, 0, 3, 4]]
    assert len(cache.free) == 5


def test_the_null_block_is_no_block() -> None:
    """Misconception: "every entry of a table is a block that somebody holds"."""
    cache = GroupCache(full(2), window(2, 4), usable=20)
    cache.start("A", A)
    cache.finish("A")
    assert cache.start("B", [*A, 100]) == 12
    assert cache.tables("B") == [[1, 2, 3, 4, 5, 6, 13], [0, 0, 0, 0, 11, 12, 14]]
    assert cache.counts(0) == [0]
    assert cache.manager.usage == pytest.approx(10 / 20)
    cache.finish("B")
    assert cache.counts(0) == [0] and 0 not in cache.free


def test_the_null_block_costs_no_capacity() -> None:
    """Misconception: "a hit of six blocks takes six blocks out of the queue"."""
    cache = GroupCache(window(2, 4), usable=6)
    cache.start("A", A)
    cache.finish("A")
    hits, hit, _ = cache.manager.get_computed_blocks(cache.add("B", [*A, 100]))
    assert (hits.ids(), hit) == (([0, 0, 0, 0, 5, 6],), 12)
    assert cache.manager.coordinator.get_num_blocks_to_allocate("B", 13, hits.blocks) == 1 + 2


def test_a_long_prompt_is_admitted_by_what_it_holds_at_once() -> None:
    """Misconception: "a window group needs blocks for the whole prompt". It returns them on the way."""
    cache = GroupCache(window(2, 4), usable=6, max_tokens_per_step=4)
    cache.add("A", numbers(1, 100))
    # 3 tokens of the window and 4 of a step are 4 blocks, and one more, since the window begins anywhere.
    assert cache.resume("A", 4, full_sequence_must_fit=True) == 0
    other = GroupCache(window(2, 4), usable=4, max_tokens_per_step=4)
    other.add("A", numbers(1, 100))
    assert other.resume("A", 4, full_sequence_must_fit=True) is None


# Chunks


def test_a_finished_chunk_is_a_hit_in_an_empty_cache() -> None:
    """Surprise 8. Misconception: "an empty cache has no hits". Trace script_chunked_local."""
    cache = GroupCache(chunked(4, 8), usable=8)
    assert cache.look(numbers(1, 17)) == ([[0, 0, 0, 0]], 16, 0)
    assert cache.look(numbers(1, 8)) == ([[]], 0, 0)


def test_of_an_unfinished_chunk_every_block_is_needed() -> None:
    """Misconception: "a chunk is a window". Position 14 sees 8 to 14 in chunks of 8, whatever came before them."""
    cache = GroupCache(chunked(4, 8), usable=8)
    cache.start("A", numbers(1, 15))
    assert cache.tables("A") == [[0, 0, 1, 2]], "and it never computed the first chunk"
    assert cache.look(numbers(1, 15)) == ([[0, 0, 1]], 12, 0)
    cache.evict(1)
    assert cache.look(numbers(1, 15)) == ([[0, 0]], 8, 0)


# States


def test_s07_a_state_is_not_used_in_the_step_that_writes_it() -> None:
    """S07. Misconception: "what is published can be used". Trace script_mamba_same_step."""
    cache = GroupCache(full(2), mamba(2), usable=40)
    cache.begin("A", numbers(1, 13), 6)
    counts = cache.counts(*range(41))
    assert cache.start("B", [*numbers(1, 6), 100, 101, 102]) is None
    assert cache.counts(*range(41)) == counts and cache.tables("B") == [[], []]
    assert cache.look([*numbers(1, 6), 100, 101, 102])[1] == 6, "it can be found; it is not there yet"
    cache.manager.begin_step()
    assert cache.resume("B") == 6


def test_s07_keys_and_values_are_used_in_the_step_that_writes_them() -> None:
    """S07, control. Misconception: "a step sees only what was computed before it"."""
    cache = GroupCache(full(2), usable=40)
    cache.begin("A", numbers(1, 13), 6)
    assert cache.start("B", [*numbers(1, 6), 100, 101, 102]) == 6


def test_s30_states_exist_only_where_a_chunk_ended() -> None:
    """S30. Misconception: "whatever was computed can be resumed anywhere"."""
    cache = GroupCache(full(2), mamba(2), usable=40)
    cache.begin("A", numbers(1, 13), 6, 6, 1)
    cache.finish("A")
    found = {k: cache.look([*numbers(1, k), 100, 101, 102])[1:] for k in (4, 6, 8, 10, 12)}
    assert found == {4: (0, 4), 6: (6, 0), 8: (6, 8), 10: (6, 10), 12: (12, 0)}


def test_s30_another_chunking_leaves_other_states() -> None:
    """S30. Misconception: "equal prompts leave equal caches"."""
    cache = GroupCache(full(2), mamba(2), usable=40)
    cache.begin("A", numbers(1, 13), 12, 1)
    cache.finish("A")
    assert cache.look([*numbers(1, 6), 100, 101, 102])[1:] == (0, 6)
    assert cache.look([*A, 100, 101, 102])[1:] == (12, 0)


def test_a_chunk_leaves_one_state_and_null_blocks_before_it() -> None:
    """Misconception: "a Mamba group needs as many blocks as an attention group"."""
    cache = GroupCache(full(2), mamba(2), usable=12)
    cache.begin("A", numbers(1, 13), 8)
    assert cache.tables("A") == [[1, 2, 3, 4], [0, 0, 0, 5]]
    assert state_position(8, block_size=2) == 3
    cache.run("A", 5)
    # The state after 8 tokens stays until the step that starts from it has run.
    assert cache.tables("A") == [[1, 2, 3, 4, 6, 7, 8], [0, 0, 0, 5, 0, 0, 9]]
    cache.decode("A", 100)
    assert cache.tables("A") == [[1, 2, 3, 4, 6, 7, 8], [0, 0, 0, 0, 0, 0, 9]]


def test_a_state_takes_no_place_for_drafts() -> None:
    """Misconception: "lookahead slots are reserved in every group". One state stands for all tokens of a step."""
    cache = GroupCache(full(2), mamba(2), usable=12)
    cache.add("A", numbers(1, 4))
    cache.resume("A", 4, num_lookahead_tokens=3)
    assert cache.tables("A") == [[1, 2, 3, 4], [0, 5]]


# All of them


def test_s32_each_group_returns_its_own_tail_first() -> None:
    """S32. Misconception: "one list of all blocks, reversed once, is the order of release"."""
    cache = GroupCache(full(2), window(2, 64), usable=6)
    cache.start("A", numbers(1, 6))
    assert cache.tables("A") == [[1, 2, 3], [4, 5, 6]]
    cache.finish("A")
    assert cache.free == [3, 2, 1, 6, 5, 4]


def test_larger_blocks_are_called_by_their_last_hash() -> None:
    """Misconception: "blocks of other sizes cannot share hashes". Trace rand_hybrid_sizes."""
    cache = GroupCache(full(4), window(2, 4), usable=30)
    request = cache.add("A", [*A, 100])
    cache.resume("A")
    assert len(request.block_hashes) == 6
    assert [cache.pool.get_cached_block(request.block_hashes[i], [0]) is not None for i in range(6)] == [
        i % 2 == 1 for i in range(6)
    ]
    assert cache.look([*A, 100]) == ([[1, 2, 3], [0, 0, 0, 0, 9, 10]], 12, 0)
    assert cache.look(A)[1] == 8, "the alignment unit is the larger block"


def test_a_wrong_count_is_noticed() -> None:
    cache = GroupCache(full(2), window(2, 4), usable=20)
    cache.start("A", A)
    windows = cache.manager.coordinator.groups[1]
    windows.num_passed["A"] = 1
    with pytest.raises(IntegrityError, match="has passed"):
        cache.verify()
    windows.num_passed["A"] = 7
    with pytest.raises(IntegrityError, match="counts 7 blocks"):
        cache.verify()


def test_a_block_of_another_group_is_noticed() -> None:
    cache = GroupCache(full(2), window(2, 64), usable=20)
    cache.start("A", A)
    first, second = cache.manager.coordinator.groups
    first.tables["A"][0], second.tables["A"][0] = second.tables["A"][0], first.tables["A"][0]
    with pytest.raises(IntegrityError, match="is known as a block of group 1"):
        cache.verify()
