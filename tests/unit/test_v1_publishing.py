"""What becomes findable, and when. Case S19 of the shared set and its neighbours."""

from __future__ import annotations

from tests.unit.helpers import Cache, numbers

# Publishing


def test_s19_drafts_are_not_published() -> None:
    """S19. Misconception: "what has a slot is cached". A draft may be rejected, and another token take its place."""
    cache = Cache(usable=10)
    cache.start("A", numbers(1, 5))
    cache.requests["A"].append([6])
    assert cache.run("A", 1, num_lookahead_tokens=3)
    assert cache.hashed == [1]
    assert cache.hit([*numbers(1, 8), 99]) == 4


def test_s19_lookahead_slots_of_a_chunk_are_not_published() -> None:
    """S19 in a chunked prefill. Misconception: "a known token with a slot is computed". Not in this step."""
    cache = Cache(usable=10)
    cache.add("A", numbers(1, 12))
    cache.resume("A", 5, num_lookahead_tokens=3)
    assert len(cache.table("A")) == 2
    assert cache.hashed == [1]


def test_s19_a_draft_counted_as_a_new_token_is_not_published() -> None:
    """S19 as vLLM's scheduler asks: 4 new tokens, of which the request knows one."""
    cache = Cache(usable=10)
    cache.start("A", numbers(1, 5))
    cache.requests["A"].append([6])
    assert cache.run("A", 4)
    assert len(cache.table("A")) == 3
    assert cache.hashed == [1]


def test_a_partial_block_is_not_published() -> None:
    """Misconception: "a chunk publishes every block it touches". Its last one still lacks tokens."""
    cache = Cache(usable=10)
    cache.add("A", numbers(1, 12))
    cache.resume("A", 6)
    assert cache.hashed == [1]
    cache.run("A", 2)
    assert cache.hashed == [1, 2]


def test_published_at_allocation() -> None:
    """Misconception: "a block is cached once its K/V are written". In V1 it is findable when the step is planned."""
    cache = Cache(usable=10)
    request = cache.add("A", numbers(1, 8))
    cache.manager.allocate_slots(request, 8)
    assert request.num_computed_tokens == 0
    assert cache.hit(numbers(1, 9)) == 8


def test_a_request_that_starts_over_publishes_anew() -> None:
    """Misconception: "its first two blocks were published already". Those were other blocks, and they are gone."""
    cache = Cache(usable=10)
    cache.start("A", numbers(1, 8))
    cache.preempt("A")
    cache.pool.evict_blocks([1, 2])
    assert cache.resume("A") == 0
    assert cache.hashed == sorted(cache.table("A"))


def test_unpublishing_forgets_only_what_is_not_computed() -> None:
    cache = Cache(usable=10)
    cache.add("A", numbers(1, 12))
    cache.resume("A", 4)
    cache.run("A", 8)
    cache.requests["A"].num_computed_tokens = 6  # the step did not happen after all
    cache.manager.unpublish_uncomputed(cache.requests["A"])
    assert cache.hashed == [1]
