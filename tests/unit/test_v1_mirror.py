"""A mirror has the events and nothing else. What it must not do: forget a copy, or count one twice."""

from __future__ import annotations

import pytest

from refengine.errors import ConfigError, IntegrityError
from refengine.sampling import SamplingParams
from refengine.v1.block import KVCacheBlock
from refengine.v1.engine import EngineCore
from refengine.v1.groups.spec import GroupSpec
from refengine.v1.mirror import PrefixMirror
from refengine.v1.publisher import EventBatch
from tests.unit.helpers import numbers
from tests.unit.models import make_engine, serve

A = numbers(1, 9)  # two full blocks of 4 and a bit


def groups_of(engine: EngineCore) -> list[GroupSpec]:
    return [group.spec for group in engine.kv_cache_manager.coordinator.groups]


def mirror_of(engine: EngineCore, report: str = "incremental") -> PrefixMirror:
    mirror = PrefixMirror(groups_of(engine), report)
    engine.publisher.subscribe(mirror.receive)
    return mirror


def index_of(engine: EngineCore) -> set[tuple[int, bytes]]:
    """What the engine itself can find."""
    return engine.kv_cache_manager.block_pool.prefixes()


def two_copies(engine: EngineCore) -> None:
    """An aligned prompt twice: its last block is computed again, and there are two blocks with one hash."""
    serve(engine, {"A": numbers(1, 8)}, max_tokens=1)
    serve(engine, {"B": numbers(1, 8)}, max_tokens=1)


def test_a_mirror_answers_as_the_engine_does() -> None:
    engine = make_engine(enable_kv_events=True)
    mirror = mirror_of(engine)
    serve(engine, {"A": A}, max_tokens=1)
    hashes: list[bytes] = []
    engine.hasher.extend(hashes, [*A, *numbers(20, 24)])
    assert mirror.find_longest_cache_hit(hashes, 13) == 8
    assert mirror.find_longest_cache_hit(hashes, 7) == 4, "a hit never goes beyond the given length"
    assert mirror.prefixes() == index_of(engine)


def test_one_of_two_copies_goes_and_the_prefix_stays() -> None:
    """A mirror that keeps a set forgets the prefix here, although the engine still finds it."""
    engine = make_engine(enable_kv_events=True)
    mirror = mirror_of(engine)
    two_copies(engine)
    pool = engine.kv_cache_manager.block_pool
    hashed = [block for block in pool.blocks if block.block_hash is not None]
    last = [block.block_id for block in hashed if block.block_hash == hashed[-1].block_hash]
    assert len(last) == 2
    pool.evict_blocks(last[:1])
    engine.publisher.publish(engine.kv_cache_manager.take_events())
    assert mirror.prefixes() == index_of(engine) and len(mirror.prefixes()) == 2
    pool.evict_blocks(last[1:])
    engine.publisher.publish(engine.kv_cache_manager.take_events())
    assert mirror.prefixes() == index_of(engine) and len(mirror.prefixes()) == 1


def test_what_is_announced_again_is_not_one_more_copy() -> None:
    """A mirror that counts announcements keeps the prefix for ever."""
    engine = make_engine(enable_kv_events=True)
    mirror = mirror_of(engine)
    serve(engine, {"A": A}, max_tokens=1)
    for name in "BC":
        engine.add_request(name, A, _greedy(1), report_full=True)
        while engine.has_unfinished_requests:
            engine.step()
    pool = engine.kv_cache_manager.block_pool
    pool.evict_blocks([block.block_id for block in pool.blocks if block.block_hash is not None])
    engine.publisher.publish(engine.kv_cache_manager.take_events())
    assert mirror.prefixes() == set()


def test_a_gap_is_refused_and_can_be_filled() -> None:
    engine = make_engine(enable_kv_events=True)
    serve(engine, {"A": A}, max_tokens=1)
    late = PrefixMirror(groups_of(engine))
    serve(engine, {"B": numbers(11, 19)}, max_tokens=1)
    newest = engine.publisher.replay()[-1]
    with pytest.raises(IntegrityError, match="event batch 0 is missing, 1 came: replay from 0"):
        late.receive(newest)
    assert late.prefixes() == set()
    for batch in engine.publisher.replay(late.next_sequence):
        late.receive(batch)
    assert late.prefixes() == index_of(engine)


def test_a_batch_that_comes_twice_is_refused() -> None:
    mirror = PrefixMirror(groups_of(make_engine()))
    mirror.receive(EventBatch(0, ()))
    with pytest.raises(IntegrityError, match="event batch 1 is missing, 0 came"):
        mirror.receive(EventBatch(0, ()))


def test_a_late_mirror_learns_from_what_is_announced_again() -> None:
    engine = make_engine(enable_kv_events=True)
    serve(engine, {"A": A}, max_tokens=1)
    late = mirror_of(engine, "full")
    engine.add_request("B", A, _greedy(1))
    while engine.has_unfinished_requests:
        engine.step()
    assert late.prefixes() == set(), "an ordinary request says nothing about what it reuses"
    engine.add_request("C", A, _greedy(1), report_full=True)
    while engine.has_unfinished_requests:
        engine.step()
    assert late.prefixes() == index_of(engine)


def test_a_late_mirror_would_rather_know_too_little() -> None:
    """It came after the first copy was stored, so it takes that one's removal for the second's."""
    engine = make_engine(enable_kv_events=True)
    serve(engine, {"A": numbers(1, 8)}, max_tokens=1)
    late = mirror_of(engine, "full")
    serve(engine, {"B": numbers(1, 8)}, max_tokens=1)
    pool = engine.kv_cache_manager.block_pool
    first_copy = next(
        block for block in pool.blocks if block.block_hash and late.prefixes() == {_prefix(block)}
    )
    pool.evict_blocks([first_copy.block_id])
    engine.publisher.publish(engine.kv_cache_manager.take_events())
    assert late.prefixes() == set() < index_of(engine)


def test_a_late_mirror_starts_over_after_a_gap() -> None:
    """What it did not hear may have been that something was removed."""
    engine = make_engine(enable_kv_events=True)
    late = PrefixMirror(groups_of(engine), "full")
    serve(engine, {"A": A}, max_tokens=1)
    late.receive(engine.publisher.replay()[0])
    assert late.prefixes() == index_of(engine)
    pool = engine.kv_cache_manager.block_pool
    pool.evict_blocks([block.block_id for block in pool.blocks if block.block_hash is not None])
    engine.publisher.publish(engine.kv_cache_manager.take_events())  # lost on its way
    serve(engine, {"B": numbers(11, 19)}, max_tokens=1)
    late.receive(engine.publisher.replay()[-1])
    assert late.prefixes() == index_of(engine)


def test_a_removal_that_nothing_preceded_is_a_broken_stream() -> None:
    engine = make_engine(enable_kv_events=True, num_blocks=5)
    serve(engine, {"A": A}, max_tokens=1)
    serve(engine, {"B": numbers(11, 20)}, max_tokens=1)
    removed = [batch for batch in engine.publisher.replay() if batch.sequence > 0]
    mirror = PrefixMirror(groups_of(engine))
    with pytest.raises(IntegrityError, match="removed that was never stored"):
        for sequence, batch in enumerate(removed):
            mirror.receive(EventBatch(sequence, batch.events))


def test_only_two_ways_to_keep_a_mirror() -> None:
    with pytest.raises(ConfigError, match="report"):
        PrefixMirror(groups_of(make_engine()), "sometimes")


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def _prefix(block: KVCacheBlock) -> tuple[int, bytes]:
    assert block.block_hash is not None
    return int.from_bytes(block.block_hash[-4:], "big"), block.block_hash[:-4]
