"""The code map: complete, pointing at our symbols, and able to say when it is no longer true."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from refengine import viz
from refengine.trace import codemap
from refengine.trace.codemap import Place, Side, resolve

# What the chapters need; a topic may be added, none may get lost.
NEEDED = """
    engine_step who_decides who_skips kv_cache_tensor block_table null_block slot_mapping block block_hash
    extra_keys start_value hash_algorithm free_queue block_pool freeing_order duplicates lookup lookup_cap
    allocate_slots publish free reset_prefix_cache prefix_cache_stats scheduler budget chunked_prefill
    preemption watermark request_queue persistent_batch model_input attention_metadata
"""
SIDES = [
    pytest.param(side, id=f"{topic.id}-{name}")
    for topic in codemap.topics().values()
    for name, side in (("v1", topic.v1), ("v0", topic.v0))
]


def test_the_topics_of_the_book_are_there() -> None:
    assert set(codemap.topics()) >= set(NEEDED.split())
    assert all(topic.title and topic.id == key for key, topic in codemap.topics().items())


@pytest.mark.parametrize("side", SIDES)
def test_our_symbols_can_be_imported_and_say_what_they_are(side: Side) -> None:
    for path in side.ours:
        assert getattr(resolve(path), "__doc__", None), path


@pytest.mark.parametrize("side", SIDES)
def test_a_side_is_complete(side: Side) -> None:
    assert side.since
    assert (bool(side.ours) and bool(side.vllm)) or side.why, "an empty place needs a reason"
    assert len(set(side.ours)) == len(side.ours) and len(set(side.vllm)) == len(side.vllm)


@pytest.mark.parametrize("side", SIDES)
def test_since_names_only_releases_that_were_looked_at(side: Side) -> None:
    named = re.findall(r"\d+\.\d+\.\d+", side.since)
    assert set(named) <= set(codemap.examined())
    assert named or side.since.startswith("no release")


def test_every_range_is_a_range_in_a_file_of_vllm() -> None:
    for release in ("0.33.0", "0.7.3"):
        for place in codemap.places_in(release):
            assert 1 <= place.first_line <= place.last_line, place
            assert place.file.startswith("vllm/") and place.file.endswith(".py"), place


@pytest.mark.parametrize("name", codemap.PATHS)
def test_call_paths_are_whole(name: str) -> None:
    steps = codemap.call_path(name)
    assert len(steps) > 10
    for step in steps:
        assert step.role and step.decides
        inside = step.place.first_line <= (step.focus_line or step.place.first_line) <= step.place.last_line
        assert inside, step.place
    assert {step.answers for step in steps if step.answers} <= {
        "who_decides_which_blocks_are_computed",
        "who_skips_computing_those_tokens",
    }


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(ValueError, match="no topic 'free_que'; did you mean 'free_queue'"):
        codemap.topic("free_que")
    with pytest.raises(ValueError, match="there are engine_step, who_decides"):
        codemap.topic("zzz")
    with pytest.raises(ValueError, match=r"'v1_erly' is no call path.*did you mean 'v1_early'"):
        codemap.call_path("v1_erly")


# -- verify -------------------------------------------------------------------------------------------------

SOURCE = """\
import functools


class Pool:
    @property
    @functools.cache
    def usage(self):
        return 0

    def free(self):
        return 1
"""


@pytest.fixture()
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "pool.py").write_text(SOURCE, encoding="utf-8")
    return tmp_path


def check(package: Path, place: Place, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(codemap, "places_in", lambda release: [place])
    return codemap.verify(package, "any")


@pytest.mark.parametrize(
    ("symbol", "first", "last"), [("Pool", 4, 11), ("Pool.usage", 5, 8), ("Pool.free", 10, 11)]
)
def test_the_exact_range_is_right(
    package: Path, monkeypatch: pytest.MonkeyPatch, symbol: str, first: int, last: int
) -> None:
    assert check(package, Place(symbol, "vllm/pool.py", first, last), monkeypatch) == []


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (Place("Pool.free", "vllm/pool.py", 10, 12), "Pool.free, pool.py 10-12: it is at 10-11"),
        (Place("Pool.usage", "vllm/pool.py", 7, 8), "it is at 5-8"),
        (Place("Pool.touch", "vllm/pool.py", 10, 11), "there is no such definition in that file"),
        (Place("free", "vllm/pool.py", 10, 11), "there is no such definition in that file"),
        (Place("Pool", "vllm/lake.py", 4, 11), "there is no file vllm/lake.py"),
    ],
)
def test_a_wrong_range_is_named(
    package: Path, monkeypatch: pytest.MonkeyPatch, place: Place, words: str
) -> None:
    (problem,) = check(package, place, monkeypatch)
    assert words in problem


def test_verify_refuses_what_it_cannot_check(package: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing about release '0\.1'"):
        codemap.verify(package, "0.1")
    with pytest.raises(ValueError, match="holds no folder vllm"):
        codemap.verify(tmp_path / "vllm", "0.33.0")


# -- the box in a chapter -----------------------------------------------------------------------------------


def test_the_box_has_both_generations_and_the_lines() -> None:
    text = str(viz.where_in_vllm("free_queue"))
    assert text.startswith("The free queue and the order of eviction. Since: the first of 21 releases")
    assert "In V1 (0.33.0)" in text and "In V0 (0.7.3)" in text
    assert "v1/core/kv_cache_utils.py 258-519" in text and "refengine.v1.block" in text


def test_several_topics_are_one_table_and_html_holds_the_same() -> None:
    table = viz.where_in_vllm("lookup", "free")
    assert [row[0] for row in table.rows] == ["Looking up a prefix", " ", "When a request ends", " "]
    html = ElementTree.fromstring(table._repr_html_())
    cells = ["".join("".join(cell.itertext()).split()) for cell in html.iter("td")]
    assert cells == ["".join(cell.split()) for row in table.rows for cell in row]


def test_the_box_of_everything_is_narrow_enough_to_read() -> None:
    for name in codemap.topics():
        assert max(map(len, str(viz.where_in_vllm(name)).splitlines())) <= 200, name
    assert len(viz.where_in_vllm().rows) == 2 * len(codemap.topics())
    with pytest.raises(ValueError, match="did you mean"):
        viz.where_in_vllm("free_que")
