"""The block pool: what is used, what is free, what is cached, and who goes first. Cases S03, S09, S10, S12, S17,
S22 and S25 of the shared set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from refengine.errors import IntegrityError
from refengine.hashing import Adapter, BlockHash, BlockHasher
from refengine.v1.events import AllBlocksCleared, BlockRemoved, BlockStored
from tests.unit.helpers import Cache, numbers


def test_s03_a_reused_block_forgets_its_old_identity() -> None:
    """S03. Misconception: "the index cleans itself up". Then a lookup serves the old prefix from new contents."""
    cache = Cache(usable=2)
    cache.start("A", numbers(1, 8))
    cache.finish("A")
    assert cache.free == [2, 1]
    cache.start("X", numbers(51, 55))
    assert cache.table("X") == [2, 1]
    cache.finish("X")
    assert cache.hit(numbers(1, 9)) == 0


def test_s03_a_block_in_use_is_not_found_under_its_old_hash() -> None:
    """S03 while X still runs. Misconception: "publishing replaces the old hash". X does not fill its block."""
    cache = Cache(usable=2)
    cache.start("A", numbers(1, 8))
    cache.finish("A")
    cache.start("X", numbers(51, 53))
    assert cache.table("X") == [2]
    assert cache.hit(numbers(1, 9)) == 4


def test_s03_only_the_reused_blocks_are_forgotten() -> None:
    """S03, second half: block 1 was not reused, so the first four tokens can still be found, and no more."""
    cache = Cache(usable=3)
    cache.start("A", numbers(1, 8))
    cache.finish("A")
    assert cache.free == [3, 2, 1]
    cache.start("X", numbers(51, 55))
    assert cache.table("X") == [3, 2]
    assert cache.hit([*numbers(1, 8), 50]) == 4


def test_s09_the_tail_is_evicted_before_the_head() -> None:
    """S09. Misconception: "all blocks of a request are equally old". Losing the head makes the tail unreachable."""
    for _ in range(200):
        cache = Cache(usable=3)
        cache.start("A", numbers(1, 12))
        cache.finish("A")
        assert cache.free == [3, 2, 1]
        cache.start("X", numbers(51, 53))
        assert cache.table("X") == [3]
        assert cache.hit(numbers(1, 13)) == 8


def test_s10_blocks_without_a_hash_are_reused_before_cached_ones() -> None:
    """S10. Misconception: "free is free, so everything joins the end". That was vLLM until 2026, and evicts hits."""
    cache = Cache(usable=3)
    cache.start("A", numbers(1, 8))
    cache.finish("A")
    cache.start("X", [51, 52])
    assert cache.table("X") == [3]
    cache.finish("X")
    assert cache.free == [3, 2, 1]
    cache.start("Y", [61, 62, 63])
    assert cache.table("Y") == [3]
    assert cache.hit(numbers(1, 9)) == 8


def test_s10_cached_blocks_join_the_end() -> None:
    """S10. Misconception: "what was used last is evicted first". Of two prefixes the older one must go."""
    cache = Cache(usable=4)
    cache.start("old", numbers(1, 8))
    cache.start("new", numbers(21, 28))
    cache.finish("old")
    cache.finish("new")
    assert cache.free == [2, 1, 4, 3]
    cache.start("X", numbers(51, 58))
    assert cache.hit(numbers(1, 9)) == 0
    assert cache.hit(numbers(21, 29)) == 8


def fill_twice() -> Cache:
    """P owns a full block [1,2,3,4]; Q builds the same four tokens one at a time in a block of its own."""
    cache = Cache(usable=6)
    cache.start("P", numbers(1, 4))
    cache.start("Q", [1])
    cache.decode("Q", 2, 3, 4)
    return cache


def test_s12_equal_blocks_are_both_kept_and_tables_never_change() -> None:
    """S12, V1. Misconception: "the second copy is merged away" (V0 did). V1's block tables are append-only."""
    cache = fill_twice()
    assert (cache.table("P"), cache.table("Q")) == ([1], [2])
    first, second = cache.pool.blocks[1], cache.pool.blocks[2]
    assert first.block_hash == second.block_hash is not None
    assert cache.counts(1, 2) == [1, 1]


def test_s12_of_equal_blocks_the_first_one_is_found() -> None:
    """S12, V1. Misconception: "the copy registered last replaces the first in the index"."""
    cache = fill_twice()
    assert cache.start("R", numbers(1, 5)) == 4
    assert cache.table("R") == [1, 3]


def test_s12_when_one_copy_goes_the_other_is_found() -> None:
    """S12, V1. Misconception: "evicting a block removes its hash"; it removes one of the hash's blocks."""
    cache = fill_twice()
    cache.pool.evict_blocks([1])
    assert cache.start("R", numbers(1, 5)) == 4
    assert cache.table("R") == [2, 3]


def test_s17_a_block_with_two_users_enters_the_queue_once() -> None:
    """S17 (a). Misconception: "used is yes or no". Its two users release it in one call, and it is listed once."""
    cache = Cache(usable=4)
    (block,) = cache.pool.get_new_blocks(1)
    cache.pool.touch([block])
    assert (block.ref_count, cache.pool.num_free_blocks) == (2, 3)
    cache.pool.free_blocks([block, block])
    assert (block.ref_count, cache.pool.num_free_blocks) == (0, 4)
    assert sorted(cache.free) == [1, 2, 3, 4]


def test_s17_releasing_a_block_that_nobody_uses_is_noticed() -> None:
    """S17. Misconception: "a double release is harmless". The block would be handed out twice later."""
    cache = Cache(usable=4)
    (block,) = cache.pool.get_new_blocks(1)
    cache.pool.free_blocks([block])
    with pytest.raises(IntegrityError, match="block 1 is released, but nobody uses it"):
        cache.pool.free_blocks([block])
    assert block.ref_count == 0
    cache.pool.check_integrity()


def test_s06_a_hit_leaves_the_free_queue_and_counts_its_users() -> None:
    """S06. Misconception: "sharing is only a table entry". Without a count the block is handed out again."""
    cache = Cache(usable=10)
    cache.start("A", numbers(1, 8))
    cache.finish("A")
    cache.start("B", numbers(1, 9))
    cache.start("C", numbers(1, 9))
    assert cache.table("B")[:2] == cache.table("C")[:2] == [1, 2]
    assert cache.counts(1, 2) == [2, 2]
    assert not {1, 2} & set(cache.free)
    cache.finish("B")
    assert cache.counts(1, 2) == [1, 1]
    assert not {1, 2} & set(cache.free)


def test_s22_the_prefix_cache_is_reset_only_when_idle() -> None:
    """S22. Misconception: "forgetting hashes hurts nobody". A running request's next block would chain to nothing."""
    cache = Cache(usable=10)
    cache.start("A", numbers(1, 8))
    assert cache.manager.reset_prefix_cache() is False
    assert cache.hit(numbers(1, 9)) == 8
    cache.finish("A")
    assert cache.manager.reset_prefix_cache() is True
    assert cache.hit(numbers(1, 9)) == 0
    assert cache.hashed == []


def test_s22_the_null_block_is_not_in_use() -> None:
    """S22. Misconception: "a block outside the free queue is used". A fresh cache would then never be idle."""
    cache = Cache(usable=3)
    assert cache.manager.reset_prefix_cache() is True
    assert cache.manager.usage == 0.0
    assert 0 not in cache.free


class OneHash(BlockHasher):
    """The weakest hash there is: everything collides."""

    def hash_block(self, parent: BlockHash | None, token_ids: Sequence[int], extra: Any = None) -> BlockHash:
        return b"same"


def test_s25_the_engine_trusts_the_hash() -> None:
    """S25. Misconception: "a hit compares tokens". vLLM and this engine do not, so the hash must be strong."""
    cache = Cache(usable=10, hasher=OneHash("sha256", 4, "0"))
    cache.start("A", numbers(1, 8))
    cache.finish("A")
    assert cache.hit(numbers(50, 54)) == 4


def test_a_published_block_is_not_published_again() -> None:
    cache = Cache(usable=4)
    cache.start("A", numbers(1, 8))
    group = cache.manager.coordinator.groups[0]
    with pytest.raises(IntegrityError, match="block 1 is published twice, by 'A' now"):
        cache.pool.cache_full_blocks(cache.requests["A"], group.table("A"), 0, 1, group.spec)


def test_evicting_by_id_keeps_users_and_refuses_foreign_ids() -> None:
    cache = Cache(usable=4)
    cache.start("A", numbers(1, 8))
    cache.pool.evict_blocks([1])
    assert (cache.hashed, cache.counts(1)) == ([2], [1])
    for foreign in (0, 5, -1):
        with pytest.raises(ValueError, match=rf"block {foreign} is not in the pool \(1 to 4\)"):
            cache.pool.evict_blocks([foreign])


def test_events_tell_a_mirror_everything() -> None:
    """A router that only hears the events must know parent, tokens and extra keys of every stored block."""
    cache = Cache(usable=2, enable_events=True)
    adapter = Adapter("sql", "/adapters/sql", 7)
    cache.start("A", numbers(1, 8), adapter=adapter, cache_salt="me")
    hashes = tuple(cache.requests["A"].block_hashes)
    (stored,) = cache.manager.take_events()
    assert stored == BlockStored(
        block_hashes=hashes,
        parent_block_hash=None,
        token_ids=tuple(numbers(1, 8)),
        block_size=4,
        group_id=0,
        kind="full_attention",
        window=None,
        extra_keys=(("sql", "me"), ("sql",)),
        lora_name="sql",
        lora_id=7,
    )
    cache.finish("A")
    cache.start("X", numbers(51, 55))
    removed, again, x = cache.manager.take_events()
    assert (removed, again) == (BlockRemoved((hashes[1],), 0), BlockRemoved((hashes[0],), 0))
    assert isinstance(x, BlockStored) and x.extra_keys == (None,) and x.lora_name is None
    cache.finish("X")
    cache.manager.reset_prefix_cache()
    assert cache.manager.take_events() == [AllBlocksCleared()]
    assert cache.manager.take_events() == []


def test_a_later_stored_event_names_its_parent() -> None:
    """Misconception: "a hash says where it belongs". It covers its parent's, but nobody can read that from it."""
    cache = Cache(usable=4, enable_events=True)
    cache.start("A", numbers(1, 4))
    cache.decode("A", 5, 6, 7, 8)
    first, second = cache.manager.take_events()
    assert isinstance(first, BlockStored) and isinstance(second, BlockStored)
    assert second.parent_block_hash == first.block_hashes[0]
    assert second.token_ids == (5, 6, 7, 8)


def test_integrity_knows_every_copy_of_a_block() -> None:
    """Another block of the same hash is found, but this one cannot be evicted from an index that lacks it."""
    cache = fill_twice()
    first, second = cache.pool.blocks[1], cache.pool.blocks[2]
    assert first.block_hash is not None
    del cache.pool._index[first.block_hash][second.block_id]
    with pytest.raises(IntegrityError, match="block 2 carries a hash under which it cannot be found"):
        cache.pool.check_integrity()


def test_integrity_of_queue_counts_and_index() -> None:
    """Each of the three kinds of contradiction is found."""
    cache = Cache(usable=4)
    cache.start("A", numbers(1, 5))
    block = cache.pool.blocks[1]
    block.ref_count = 0
    with pytest.raises(IntegrityError, match="block 1 has 0 users and is not in the free queue"):
        cache.pool.check_integrity()
    block.ref_count, block.block_hash = 1, b"other"
    with pytest.raises(IntegrityError, match="block 1 carries a hash under which it cannot be found"):
        cache.pool.check_integrity()
    block.block_hash = None
    with pytest.raises(IntegrityError, match="the index leads to block 1, which carries another hash"):
        cache.pool.check_integrity()
