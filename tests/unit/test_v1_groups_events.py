"""What several groups tell others: masked and null positions, one event per group, report mode "full"."""

from __future__ import annotations

from refengine.v1.events import BlockRemoved, BlockStored
from tests.unit.group_cache import GroupCache, full, mamba, window
from tests.unit.helpers import numbers

A = numbers(1, 12)


def stored(cache: GroupCache) -> list[BlockStored]:
    """The stored events since the last call."""
    return [event for event in cache.manager.take_events() if isinstance(event, BlockStored)]


def test_each_group_tells_of_its_own_blocks() -> None:
    """Misconception: "one event says it for all groups". Trace script_hybrid_junction."""
    cache = GroupCache(full(2), window(4, 5), usable=30, enable_events=True)
    cache.start("A", A)
    both = stored(cache)
    told = [(e.group_id, e.kind, e.block_size, e.window, len(e.block_hashes)) for e in both]
    assert told == [(0, "full_attention", 2, None, 6), (1, "sliding_window", 4, 5, 3)]
    assert both[0].block_hashes[1::2] == both[1].block_hashes, "one chain of hashes for all"


def test_hashes_skip_what_is_not_published_and_tokens_do_not() -> None:
    """Surprise 7. Misconception: "hashes and tokens go in pairs". Trace rand_swa_retention0."""
    cache = GroupCache(window(2, 5), usable=23, enable_events=True, retention_interval=0)
    request = cache.add("A", numbers(1, 15))
    cache.resume("A", 8)
    cache.run("A", 7)
    events = stored(cache)
    assert len(events) == 2, "one without a hash is an event, too"
    first, second = events
    assert (first.block_hashes, first.extra_keys) == ((), ())
    assert first.token_ids == tuple(numbers(1, 8))
    assert second.block_hashes == tuple(request.block_hashes[5:7])
    assert second.token_ids == tuple(numbers(9, 14))
    assert second.parent_block_hash == request.block_hashes[3], (
        "of the first block, although it is not published"
    )


def test_null_blocks_are_not_announced_when_they_are_passed_over() -> None:
    """Misconception: "every full position of a table is stored". Trace script_mamba_junction."""
    cache = GroupCache(full(2), mamba(2), usable=30, enable_events=True)
    request = cache.add("A", numbers(1, 9))
    cache.resume("A", 8)
    _, states = stored(cache)
    assert states.block_hashes == (request.block_hashes[3],)
    assert len(states.extra_keys) == 1 and len(states.token_ids) == 8


def test_report_full_announces_what_is_not_cached() -> None:
    """Surprise 6. Misconception: "who is told of a block can fetch it". Traces rand_full_report, script_report_full."""
    cache = GroupCache(full(2), window(2, 4), usable=30, enable_events=True)
    cache.start("A", A)
    cache.finish("A")
    cache.evict(7, 8, 9, 10)
    stored(cache)
    request = cache.add("B", [*A, 100], report_full=True)
    for _ in range(2):
        hits, hit, _ = cache.manager.get_computed_blocks(request)
        assert (hits.ids()[1], hit) == ([0, 0, 0, 0, 11, 12], 12)
    told = stored(cache)
    assert [(event.group_id, len(event.block_hashes)) for event in told] == [(0, 6), (1, 6)] * 2
    assert all(event.parent_block_hash is None for event in told)


def test_report_full_says_nothing_without_a_common_hit() -> None:
    """Misconception: "a lookup in mode full always reports". One group's prefix is nobody's hit."""
    cache = GroupCache(full(2), mamba(2), usable=30, enable_events=True)
    cache.begin("A", A, 12)
    cache.finish("A")
    stored(cache)
    request = cache.add("B", [*numbers(1, 6), 100, 101], report_full=True)
    assert cache.manager.get_computed_blocks(request)[1:] == (0, 6)
    assert stored(cache) == []


def test_a_removed_event_names_the_group() -> None:
    """Misconception: "a hash is stored or it is not". Each group stores it for itself. Trace rand_hybrid_events."""
    cache = GroupCache(full(2), window(2, 4), usable=30, enable_events=True)
    request = cache.add("A", A)
    cache.resume("A")
    cache.manager.take_events()
    cache.evict(12)
    assert cache.manager.take_events() == [BlockRemoved((request.block_hashes[5],), 1)]


def test_the_end_of_a_prompt_inside_a_larger_block_is_announced() -> None:
    """A prompt of 15 tokens ends inside block 1 of a group with blocks of 8. Trace kv_hybrid_sizes_11.

    Misconception: "what is announced can be hit". Nobody looks for such a hash.
    """
    cache = GroupCache(full(8), window(4, 8), usable=30, enable_events=True)
    request = cache.add("A", numbers(1, 15))
    cache.resume("A")
    assert [event.block_hashes for event in stored(cache)] == [
        (request.block_hashes[1],),
        tuple(request.block_hashes[:2]),
    ]
    cache.decode("A", 100)
    block, tail, _ = stored(cache)
    assert (block.block_hashes, block.block_size) == ((request.block_hashes[3],), 8)
    assert (tail.block_hashes, tail.block_size) == ((request.block_hashes[2],), 4)
    assert (tail.parent_block_hash, tail.token_ids) == (request.block_hashes[1], tuple(numbers(9, 12)))
    assert cache.look(numbers(1, 14))[1] == 8
    cache.finish("A")
    cache.evict(2)
    removed = [event.block_hashes[0] for event in cache.manager.take_events()]
    assert removed == [request.block_hashes[3], request.block_hashes[2]]


def test_a_block_known_by_its_beginning_is_renamed_when_it_is_full() -> None:
    """With a draft head the whole tail is published, so the block has a name before it is full.

    Misconception: "a block gets one hash in its life".
    """
    cache = GroupCache(full(8), window(4, 8), usable=30, enable_events=True, drop_last=True)
    request = cache.add("A", numbers(1, 13))
    cache.resume("A")
    assert 2 in cache.hashed
    cache.manager.take_events()
    cache.decode("A", 100, 101, 102)
    events = [event for event in cache.manager.take_events() if getattr(event, "group_id", 0) == 0]
    kinds = [(type(event).__name__, event.block_hashes) for event in events if hasattr(event, "block_hashes")]
    assert kinds[:2] == [
        ("BlockRemoved", (request.block_hashes[2],)),
        ("BlockStored", (request.block_hashes[3],)),
    ]
    assert cache.manager.reset_prefix_cache() is False
    cache.finish("A")
    assert cache.manager.reset_prefix_cache() is True
    cache.verify()
