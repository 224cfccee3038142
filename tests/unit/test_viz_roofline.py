"""The roofline: its numbers, its words, and that a picture says what was measured."""

from __future__ import annotations

import pytest

from refengine.viz.roofline import Roof, Work, roofline, with_prefix

ROOF = Roof("a device", peak=1000.0, bandwidth=100.0)
READS = Work("reads", operations=200, num_bytes=100)
COMPUTES = Work("computes", operations=40_000, num_bytes=100, seconds=80.0)


def test_the_limit_is_memory_below_the_ridge_and_arithmetic_from_it_on() -> None:
    assert ROOF.ridge == 10
    assert [ROOF.limit(x) for x in (9.9, 10, 11)] == ["memory", "arithmetic", "arithmetic"]
    assert [ROOF.reachable(x) for x in (1, 10, 500)] == [100, 1000, 1000]


def test_the_floor_is_the_longer_of_the_two_times() -> None:
    assert ROOF.floor_seconds(READS.operations, READS.num_bytes) == 1.0
    assert ROOF.floor_seconds(COMPUTES.operations, COMPUTES.num_bytes) == 40.0


def test_a_share_needs_a_measured_time() -> None:
    assert READS.share(ROOF) is None
    assert COMPUTES.share(ROOF) == 0.5


def test_the_words_say_what_is_measured_and_what_is_not() -> None:
    first, reads, computes = roofline(ROOF, [READS, COMPUTES], title="Two").alt.splitlines()
    assert first.startswith("Two. The limit rises with 100 B/s up to 10 operations per byte")
    assert reads == "1  reads: 2 operations per byte, waits for memory, 1 s at best."
    assert computes.endswith("waits for arithmetic, 40 s at best; took 80 s, 50% of the limit.")


def test_all_points_lie_in_the_picture_and_the_same_data_gives_the_same_picture() -> None:
    works = [Work(str(n), 10.0**n, 1.0) for n in range(-2, 6)]
    picture = roofline(ROOF, works)
    assert picture.svg == roofline(ROOF, works).svg
    places = [float(piece.split('"')[0]) for piece in picture.svg.split(' x="')[1:]]
    assert min(places) >= 0 and max(places) <= picture.width


def test_nothing_and_less_than_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="some work"):
        roofline(ROOF, [])
    with pytest.raises(ValueError, match="more than 0"):
        Roof("none", 0, 1)
    with pytest.raises(ValueError, match="seconds"):
        Work("none", 1, 1, seconds=0)


def test_prefixes() -> None:
    assert [with_prefix(x) for x in (4.8e12, 67e9, 1e6, 2500.0, 12.0)] == [
        "4.8 T",
        "67 G",
        "1 M",
        "2.5 k",
        "12 ",
    ]
