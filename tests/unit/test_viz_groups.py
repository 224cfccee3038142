"""The picture of the fixed point: true in words, with every question in it, and the same each time."""

from __future__ import annotations

import pytest

from refengine.viz.groups import Answer, GroupRow, fixed_point_picture, rounds

FULL = GroupRow("full", 2, frozenset(range(6)), frozenset(range(5)))
WINDOW = GroupRow("window 4", 2, frozenset(range(5)), frozenset({3, 4}))
ANSWERS = [Answer(0, 12, 12), Answer(1, 12, 10), Answer(1, 10, 10)]


def test_a_round_begins_when_a_group_is_asked_again() -> None:
    assert rounds(ANSWERS) == [1, 1, 2]
    assert rounds([]) == []
    assert rounds([Answer(i, 4, 4) for i in (0, 1, 2, 1, 2, 1)]) == [1, 1, 1, 2, 2, 3]


def test_it_says_the_same_in_words() -> None:
    words = fixed_point_picture([FULL, WINDOW], ANSWERS, 13, 10, 12).alt.splitlines()
    assert words == [
        "Until nobody wants it shorter: a lookup of 13 tokens in 2 groups.",
        "full, blocks of 2: positions that are cached: 0-5.",
        "window 4, blocks of 2: positions that are cached: 0-4.",
        "Round 1: full is asked for at most 12 tokens and can serve 12.",
        "Round 1: window 4 is asked for at most 12 tokens and can serve 10.",
        "Round 2: window 4 is asked for at most 10 tokens and can serve 10.",
        "Common hit: 10 tokens. Boundary: 12 tokens.",
    ]


def test_every_question_and_both_ends_are_drawn() -> None:
    picture = fixed_point_picture([FULL, WINDOW], ANSWERS, 13, 10, 12)
    for answer in ANSWERS:
        assert f"asked for {answer.asked}, serves {answer.served}" in picture.svg
    assert "hit 10" in picture.svg and "boundary 12" in picture.svg
    assert picture.svg.count("round ") == 2
    assert picture == fixed_point_picture([FULL, WINDOW], ANSWERS, 13, 10, 12)


@pytest.mark.parametrize("hit", [0, 8])
def test_without_a_boundary_none_is_drawn(hit: int) -> None:
    empty = GroupRow("state", 8, frozenset(), frozenset())
    picture = fixed_point_picture([FULL, empty], [Answer(0, 16, 12), Answer(1, 12, hit)], 17, hit)
    assert "boundary" not in (picture.svg + picture.alt).lower()
    assert f"Common hit: {hit} tokens." in picture.alt
    assert "positions that are cached: none" in picture.alt
