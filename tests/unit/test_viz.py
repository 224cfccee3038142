"""Pictures and tables: the same bytes each time, true in words, legible at every size, and blind to engines."""

from __future__ import annotations

import ast
import base64
import re
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from refengine import viz
from refengine.trace.observer import PoolSnapshot
from refengine.trace.record import Mark, Record, Recorder, Step
from refengine.viz import svg
from refengine.viz.state import ordinal, ranges
from tests.unit.helpers import numbers
from tests.unit.models import make_engine, serve

SIZES = [5, 8, 16, 17, 24, 33, 64]


def _marks(request_id: str, *, found: list[int], new: list[int], start: int, count: int) -> list[Mark]:
    """What an admitted request leaves in its first step."""
    return [
        Mark("lookup", request_id, {"num_tokens": start + count, "hit_tokens": start, "block_ids": [found]}),
        Mark("admit", request_id, {"admitted": True, "reason": "new"}),
        Mark("allocate", request_id, {"num_tokens": count, "block_ids": [new]}),
        Mark("publish", request_id, {"block_ids": new[:-1], "hashes": [f"{i:08x}" for i in new[:-1]]}),
        Mark("run", request_id, {"start": start, "num_tokens": count}),
        Mark("append", request_id, {"token_id": 7, "finish_reason": None}),
    ]


def _decode(request_id: str, start: int, finish_reason: str | None = None) -> list[Mark]:
    return [
        Mark("allocate", request_id, {"num_tokens": 1, "block_ids": [[]]}),
        Mark("run", request_id, {"start": start, "num_tokens": 1}),
        Mark("append", request_id, {"token_id": 8, "finish_reason": finish_reason}),
    ]


@pytest.fixture()
def record() -> Record:
    """Ada fills 1 and 2 and holds 3; Bob shares 1 and 2; Ada ends; Cy is refused, Bob preempted, Cy admitted."""
    preempted = Mark("admit", "bob", {"admitted": False, "reason": "preempted in favour of ada"})
    refused = [
        Mark("lookup", "cy", {"num_tokens": 30, "hit_tokens": 8, "block_ids": [[1, 2]]}),
        Mark("admit", "cy", {"admitted": False, "reason": "not enough free blocks"}),
    ]
    ada, bob, cy = [[1, 2, 3]], [[1, 2, 4]], [[1, 4, 3]]
    steps = [
        Step(
            _marks("ada", found=[], new=[1, 2, 3], start=0, count=10),
            PoolSnapshot([4, 5, 6], [1, 2], {"ada": ada}),
        ),
        Step(
            _decode("ada", 10) + _marks("bob", found=[1, 2], new=[4], start=8, count=3),
            PoolSnapshot([5, 6], [1, 2], {"ada": ada, "bob": bob}),
        ),
        Step(
            _decode("ada", 11, "length") + _decode("bob", 11) + refused,
            PoolSnapshot([3, 5, 6], [1, 2], {"bob": bob}),
        ),
        Step([preempted], PoolSnapshot([4, 3, 5, 6, 2, 1], [1, 2], {})),
        Step(
            _marks("cy", found=[1], new=[4, 3], start=4, count=8),
            PoolSnapshot([5, 6, 2], [1, 2, 4], {"cy": cy}),
        ),
    ]
    return Record(steps, "v1", 7, 4, PoolSnapshot([1, 2, 3, 4, 5, 6], [], {}))


def _recorded(snapshots: bool = True) -> Record:
    """Two requests with a common prefix of two blocks, the second after the first has ended, on a real engine."""
    recorder = Recorder(snapshots)
    engine = make_engine(num_blocks=9, observer=recorder)
    serve(engine, {"ada": numbers(1, 11)}, max_tokens=3)
    serve(engine, {"bob": [*numbers(1, 9), 30, 31]}, max_tokens=2)
    return recorder.record


def _pool(num_blocks: int) -> viz.PoolState:
    """A pool of `num_blocks` usable blocks where every combination of the three facts occurs."""
    ids = list(range(1, num_blocks + 1))
    half = num_blocks // 2
    used, free = ids[:half], ids[half:][::-1]
    tables = {"ada": used[: half // 2 + 1], "bob": used[:1] + used[half // 2 + 1 :]}
    return viz.PoolState.of(num_blocks + 1, free, cached=ids[::2], tables=tables)


def _words(picture: viz.Picture) -> list[str]:
    """All words that stand in the picture."""
    texts = ElementTree.fromstring(picture.svg).iter("{http://www.w3.org/2000/svg}text")
    return [text.text or "" for text in texts]


def _pictures(record: Record) -> dict[str, Callable[[], viz.Picture]]:
    chains = {"ada": viz.hashed_blocks(range(8), [b"\x01" * 32, b"\x02" * 32], 4)}
    after = viz.states(record)
    return {
        "pool": lambda: viz.pool_picture(_pool(24)),
        "pair": lambda: viz.pool_pair(after[0], after[1]),
        "timeline": lambda: viz.timeline(record),
        "marks": lambda: viz.marks_picture(record, 1),
        "layout": lambda: viz.layout_picture("abcdefg", [3, 1], 4, chosen=6),
        "chain": lambda: viz.chain_picture(chains),
    }


# -- every picture ------------------------------------------------------------------------------------------

NAMES = ["pool", "pair", "timeline", "marks", "layout", "chain"]


@pytest.mark.parametrize("name", NAMES)
def test_two_renders_are_equal_byte_for_byte_and_well_formed(record: Record, name: str) -> None:
    draw = _pictures(record)[name]
    first, second = draw(), draw()
    assert first.svg == second.svg and first.alt == second.alt
    root = ElementTree.fromstring(first.svg)
    assert (root.attrib["width"], root.attrib["height"]) == ("800", str(first.height))


@pytest.mark.parametrize("name", NAMES)
def test_notebook_gets_an_image_with_the_alternative_text_and_a_terminal_the_text(
    record: Record, name: str
) -> None:
    picture = _pictures(record)[name]()
    bundle = picture._repr_mimebundle_()
    image = ElementTree.fromstring(bundle["text/html"].replace(">", "/>"))
    assert image.attrib["alt"].split() == picture.alt.split()
    head, data = image.attrib["src"].split(",")
    assert head == "data:image/svg+xml;base64" and base64.b64decode(data).decode() == picture.svg
    assert bundle["text/plain"] == repr(picture) == picture.alt


@pytest.mark.parametrize("name", NAMES)
def test_words_stay_on_the_sheet_and_are_never_tiny(record: Record, name: str) -> None:
    _check_legible(_pictures(record)[name]())


def _check_legible(picture: viz.Picture) -> None:
    root = ElementTree.fromstring(picture.svg)
    style = root.find("{http://www.w3.org/2000/svg}style")
    assert style is not None
    looks = dict(re.findall(r"\.(l\d+)\{([^}]*)\}", style.text or ""))
    sizes = {
        name: float(found[1])
        for name, look in looks.items()
        if (found := re.search(r"font-size:([\d.]+)", look))
    }
    assert min([*sizes.values(), svg.SMALL]) >= svg.SMALL
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        look = looks.get(text.attrib.get("class", ""), "")
        size = sizes.get(text.attrib.get("class", ""), svg.NORMAL)
        wide = svg.text_width(text.text or "", size, "bold" in look)
        x = float(text.attrib["x"]) - (wide / 2 if "middle" in look else 0)
        assert x >= 0 and x + wide <= 800, text.text
        assert float(text.attrib["y"]) < float(root.attrib["height"])


def test_a_picture_without_alternative_text_is_refused() -> None:
    with pytest.raises(ValueError, match="alternative text"):
        viz.Picture("<svg/>", " ", 800, 100)


def test_save_writes_what_the_suffix_says(tmp_path: Path) -> None:
    picture = viz.pool_picture(_pool(5))
    for suffix, content in ((".svg", picture.svg), (".html", picture.html()), (".txt", picture.alt)):
        path = tmp_path / f"pool{suffix}"
        picture.save(path)
        assert path.read_text(encoding="utf-8") == content + "\n"


# -- the pool -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", SIZES)
def test_three_facts_of_each_block_stand_in_the_picture(num_blocks: int) -> None:
    state = _pool(num_blocks)
    picture = viz.pool_picture(state)
    words = _words(picture)
    first = words.index("block 1")
    for number, facts in enumerate(state):
        cell = words[first + 3 * number : first + 3 * number + 3]
        assert cell == [
            f"block {facts.block_id}",
            facts.used_words if facts.used else facts.free_words,
            facts.cached_words,
        ]
    _check_legible(picture)
    assert len(picture.html()) < 45_000


@pytest.mark.parametrize("num_blocks", SIZES)
def test_a_pair_is_legible_at_every_size(num_blocks: int) -> None:
    before = viz.PoolState.of(num_blocks + 1, range(1, num_blocks + 1))
    _check_legible(viz.pool_pair(before, _pool(num_blocks), titles=("Before", "After")))


def test_alternative_text_of_a_small_pool_says_every_fact() -> None:
    state = viz.PoolState.of(
        5, [3, 2], cached=[1, 2], tables={"ada": [1, 4], "bob": [1]}, when="after step 2"
    )
    assert viz.pool_picture(state).alt.splitlines() == [
        "Block pool after step 2: 4 blocks, 2 free, 2 cached.",
        "Block 1: used by 2; cached.",
        "Block 2: free, 2nd in the queue; cached.",
        "Block 3: free, 1st in the queue; not cached.",
        "Block 4: used by 1; not cached.",
        "Free queue, next out first: 3, 2.",
        "Block table of ada: 1, 4.",
        "Block table of bob: 1.",
    ]


def test_ring_is_for_another_fact_and_not_for_a_step_forward_in_the_queue() -> None:
    before = viz.PoolState.of(5, [1, 2, 3, 4])
    after = viz.PoolState.of(5, [2, 3, 4], cached=[3], tables={"ada": [1]})
    assert viz.changed_blocks(before, after) == [1, 3]
    assert "Changed blocks: 1, 3." in viz.pool_picture(after, before=before).alt


def test_an_empty_queue_is_said_in_words() -> None:
    picture = viz.pool_picture(viz.PoolState.of(3, [], tables={"ada": [1, 2]}))
    assert "empty: the next allocation is refused" in _words(picture)
    assert "next out first: empty" in picture.alt


def test_pictures_of_a_series_are_equally_high(record: Record) -> None:
    shown = viz.stepper(record)
    assert len({shown.picture(i).height for i in range(len(record.steps))}) == 1


def test_a_queue_with_a_strange_block_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot have the free queue"):
        viz.PoolState.of(5, [5])
    with pytest.raises(ValueError, match="cannot have the free queue"):
        viz.PoolState.of(5, [2, 2])


# -- from a record ------------------------------------------------------------------------------------------


def test_states_are_what_was_recorded_after_each_step(record: Record) -> None:
    after = viz.states(record)
    assert [dict(state.tables) for state in after] == [
        {"ada": (1, 2, 3)},
        {"ada": (1, 2, 3), "bob": (1, 2, 4)},
        {"bob": (1, 2, 4)},
        {},
        {"cy": (1, 4, 3)},
    ]
    assert after[0].block_ids == (1, 2, 3, 4, 5, 6) and after[2].free == (3, 5, 6)
    assert [after[1].facts(block_id).used for block_id in (1, 2, 3, 4, 5)] == [2, 2, 1, 1, 0]


def test_block_0_is_a_block_like_any_other_in_v0() -> None:
    step = Step([], PoolSnapshot([2, 1], [], {"ada": [[0]]}))
    assert viz.states(Record([step], "v0", 3, 4))[0].block_ids == (0, 1, 2)
    assert viz.states(Record([step], "v1", 3, 4))[0].block_ids == (1, 2)


def test_groups_have_a_table_each() -> None:
    step = Step([], PoolSnapshot([4], [1], {"ada": [[1, 2], [0, 3]]}))
    state = viz.states(Record([step], "v1", 5, 4))[0]
    assert dict(state.tables) == {"ada, group 0": (1, 2), "ada, group 1": (0, 3)}
    assert state.block_ids == (1, 2, 3, 4)


def test_a_step_that_broke_off_leaves_the_pool_as_it_was(record: Record) -> None:
    broken = Record([*record.steps[:2], Step(record.steps[2].marks)], "v1", 7, 4, record.start)
    assert viz.states(broken)[2].free == viz.states(broken)[1].free == (5, 6)


def test_a_record_without_an_engine_has_no_pool() -> None:
    with pytest.raises(ValueError, match="made by an engine"):
        viz.states(Record([Step()]))


def test_moments_follow_the_marks() -> None:
    record = _recorded()
    start, *found = viz.moments(record)
    assert start.when == "before the first step" and start.free == (1, 2, 3, 4, 5, 6, 7, 8)
    marks = [mark for _, mark in record.marks()]
    assert [moment.mark for moment in found if moment.mark] == marks
    ends = [moment.step for moment in found if moment.mark is None]
    assert ends == [], "the last append is marked after the request has given its blocks back"
    assert found[-1].free == viz.states(record)[-1].free


def test_around_shows_what_one_mark_did() -> None:
    record = _recorded()
    before, after = viz.around(record, "lookup", "bob")
    assert "changed: nothing" in _words(viz.pool_pair(before, after))
    assert before.free == after.free and viz.changed_blocks(before, after) == []
    before, after = viz.around(record, "allocate", "bob")
    assert before.free == (4, 5, 6, 7, 8, 3, 2, 1) and after.free == (5, 6, 7, 8, 3), (
        "1, 2 out of the queue, 4 new"
    )
    assert viz.changed_blocks(before, after) == [1, 2, 4]
    assert viz.left_queue(before, after) == [(4, 1), (2, 7), (1, 8)] and viz.joined_queue(before, after) == []
    assert "taken out: 4 (1st), 2 (7th), 1 (8th)" in _words(viz.pool_picture(after, before=before))
    assert "Out of the queue: 4 (was 1st), 2 (was 7th), 1 (was 8th)." in viz.pool_pair(before, after).alt
    before, after = viz.around(record, "publish", "ada")
    assert after.cached - before.cached == {1, 2}


def test_around_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match="no snapshots"):
        viz.around(_recorded(snapshots=False), "lookup", "bob")
    with pytest.raises(ValueError, match="left 1 marks 'lookup', so there is no number 1"):
        viz.around(_recorded(), "lookup", "bob", 1)


def test_without_snapshots_the_moments_are_the_ends_of_the_steps() -> None:
    record = _recorded(snapshots=False)
    assert [moment.when for moment in viz.moments(record)[1:]] == [state.when for state in viz.states(record)]


def test_the_null_block_is_shared_by_nobody() -> None:
    """Two tables that begin with nulls: no tie between them, and no count of users."""
    tables = {"ada": [0, 0, 1], "bob": [0, 0, 1]}
    words = _words(viz.pool_picture(viz.PoolState.of(4, [2, 3], [1], tables)))
    assert words.count("by 2") == 2, "block 1, once in each table"
    assert "Block table of bob: 0, 0, 1." in viz.pool_picture(viz.PoolState.of(4, [2, 3], [1], tables)).alt


def test_timeline_says_who_computed_found_waited_and_ended(record: Record) -> None:
    assert viz.timeline(record).alt.splitlines()[1:] == [
        "ada: step 0 computed 10; step 1 computed 1; step 2 computed 1, ended (length).",
        "bob: step 1 8 from the cache, computed 3; step 2 computed 1; step 3 was preempted.",
        "cy: step 2 had to wait; step 4 4 from the cache, computed 8.",
    ]


def test_a_long_timeline_goes_on_below(record: Record) -> None:
    steps = record.steps[:1] + [Step(_decode("ada", 10 + i)) for i in range(49)]
    picture = viz.timeline(Record(steps))
    assert {str(i) for i in range(50)} <= set(_words(picture))
    _check_legible(picture)


def test_a_long_reason_makes_its_row_higher_and_is_not_cut(record: Record) -> None:
    reason = "preempted: ada needs a block for its next token and none is left"
    marks = [Mark("admit", "bob", {"admitted": False, "reason": reason}), *_decode("ada", 10)]
    high = viz.marks_picture(Record([Step(marks)]), 0)
    assert reason in " ".join(_words(high)) and "…" not in " ".join(_words(high))
    _check_legible(high)


def test_marks_stand_in_their_order(record: Record) -> None:
    assert viz.marks_picture(record, 2).alt.splitlines()[1:3] == [
        "1. ada: allocate, no new block for 1 token.",
        "2. ada: run, position 11.",
    ]
    table = viz.marks_table(record, 2)
    assert [(row[1], row[2]) for row in table.rows][-2:] == [("lookup", "cy"), ("admit", "cy")]
    assert table.rows[-1][3] == "not now: not enough free blocks"


# -- tables -------------------------------------------------------------------------------------------------


def test_block_table_reads_as_in_the_book() -> None:
    state = viz.PoolState.of(5, [3, 4, 2], cached=[1, 2], tables={"ada": [1]})
    assert str(viz.block_table(state)) == (
        "block  used  free  cached\n"
        "    1     1     -     yes\n"
        "    2     0   3rd     yes\n"
        "    3     0   1st      no\n"
        "    4     0   2nd      no"
    )


def test_html_of_a_table_holds_the_same_cells_and_escapes_them() -> None:
    table = viz.Table(("name", "n"), [("<ada>", 3), ("bob & cy", None)], title="who")
    html = table._repr_html_()
    assert [cell.text for cell in ElementTree.fromstring(html).iter("td")] == ["<ada>", "3", "bob & cy", "-"]
    assert repr(table).splitlines() == ["who", "name      n", "<ada>     3", "bob & cy  -"]


def test_a_row_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="2 columns, but a row of 1"):
        viz.Table(("a", "b"), [(1,)])


def test_request_table_sums_a_record_up(record: Record) -> None:
    rows = {row[0]: row for row in viz.request_table(record).rows}
    assert rows["bob"][:5] == ("bob", 11, 8, "1: 3, 2: 1", "1-2 | 4")
    assert rows["bob"][6] == 1 and rows["ada"][7] == "length"


# -- layout and chain ---------------------------------------------------------------------------------------


def test_layout_follows_the_chosen_position_to_its_slot() -> None:
    words = _words(viz.layout_picture("abcdefg", [3, 1], 4, chosen=6))
    assert words[-3:] == [
        "position 6: block index 6 // 4 = 1, offset 6 % 4 = 2",
        "block table: table[1] = block 1",
        "slot = 1 × 4 + 2 = 6",
    ]


@pytest.mark.parametrize(("size", "count"), [(1, 9), (2, 9), (4, 18), (8, 20), (16, 30)])
def test_layout_is_legible_for_usual_block_sizes(size: int, count: int) -> None:
    blocks = [7 + 3 * i for i in range(-(-count // size))]
    _check_legible(viz.layout_picture(range(100, 100 + count), blocks, size, chosen=count - 1))


def test_layout_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="9 tokens do not fit into 2 blocks of 4"):
        viz.layout_picture(range(9), [1, 2], 4)
    with pytest.raises(ValueError, match="too many for one line"):
        viz.layout_picture(range(100), range(1, 26), 4)
    with pytest.raises(ValueError, match="position 4 is not one of the 4 tokens"):
        viz.layout_picture(range(4), [1], 4, chosen=4)


def test_a_shared_prefix_is_drawn_once_and_told_as_shared() -> None:
    ada = viz.hashed_blocks(range(8), ["aaaa", "bbbb"], 4)
    bob = viz.hashed_blocks([0, 1, 2, 3, 9, 9, 9, 9], ["aaaa", "cccc"], 4, [None, [("cache_salt", "acme")]])
    picture = viz.chain_picture({"ada": ada, "bob": bob})
    words = _words(picture)
    assert words.count("hash aaaa…") == 1 and "ada + bob" in words and "cache_salt acme" in words
    assert (
        "bob, block 0: hash aaaa over the start value, tokens 0 1 2 3; the same block as in ada."
        in picture.alt
    )
    _check_legible(picture)


# -- the stepper --------------------------------------------------------------------------------------------


def test_stepper_is_whole_without_a_kernel(record: Record) -> None:
    bundle = viz.stepper(record, start=-1)._repr_mimebundle_()
    assert bundle["text/html"].startswith("<img alt=") and "after step 4" in bundle["text/html"]
    assert "lookup" in bundle["text/html"] and "after step 4" in bundle["text/plain"]


def test_slider_and_buttons_redraw(record: Record) -> None:
    pytest.importorskip(
        "ipywidgets", reason="ipywidgets is not installed: the stepper's controls were not checked"
    )
    shown = viz.stepper(record)
    assert shown.widget is not None
    controls, view = shown.widget.children
    _, back, forward, slider = controls.children
    assert view.value == shown.html(0)
    forward.click()
    assert slider.value == 1 and view.value == shown.html(1)
    slider.value = 4
    assert view.value == shown.html(4)
    forward.click()
    assert slider.value == 4
    back.click()
    assert view.value == shown.html(3)


def test_a_record_with_snapshots_can_be_walked_mark_by_mark() -> None:
    pytest.importorskip(
        "ipywidgets", reason="ipywidgets is not installed: the stepper's controls were not checked"
    )
    shown = viz.stepper(_recorded(), start=1)
    assert shown.widget is not None
    controls, view = shown.widget.children
    *_, forward, slider, fine = controls.children
    fine.value = True
    index = shown.index_of(1, marks=True)
    assert (slider.description, slider.value, slider.max) == ("moment", index, shown.last(marks=True))
    assert view.value == shown.html(index, marks=True) and "→ " in view.value
    forward.click()
    assert view.value == shown.html(index + 1, marks=True)
    fine.value = False
    assert (slider.description, slider.value, slider.max) == ("step", 2, shown.last(marks=False))
    assert view.value == shown.html(2)


def test_moments_of_the_stepper_start_before_the_first_step() -> None:
    shown = viz.stepper(_recorded(), marks=True)
    assert "before the first step" in repr(shown) and shown.table(0, marks=True) is None
    table = shown.table(3, marks=True)
    assert table is not None and [row[0] for row in table.rows][:4] == ["1", "2", "→ 3", "4"]
    assert len({shown.picture(i, marks=True).height for i in range(shown.last(marks=True) + 1)}) == 1
    assert shown.index_of(shown.last(marks=True), marks=False) == shown.last(marks=False)


def test_every_mark_needs_snapshots(record: Record) -> None:
    assert not viz.stepper(record).has_marks
    with pytest.raises(ValueError, match="no snapshots"):
        viz.stepper(record, marks=True)


def test_without_ipywidgets_a_sentence_stands_below_the_picture(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    bundle = viz.stepper(record)._repr_mimebundle_()
    assert list(bundle) == ["text/html", "text/plain"] and "pip install ipywidgets" in bundle["text/html"]


def test_a_step_that_is_not_there_is_refused(record: Record) -> None:
    with pytest.raises(ValueError, match="no step 5"):
        viz.stepper(record, start=5)


# -- the house ----------------------------------------------------------------------------------------------


def test_viz_knows_the_trace_and_no_engine() -> None:
    for path in Path(viz.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in modules:
                own = module.startswith(("refengine.viz", "refengine.trace"))
                assert own or not module.startswith(("refengine", "kernels", "torch")), (
                    f"{path.name}: {module}"
                )


def test_small_words() -> None:
    assert [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 112)] == (
        ["1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "112th"]
    )
    assert ranges([1, 2, 3, 7, 9, 8]) == "1-3, 7, 9, 8" and ranges([]) == "none"
    assert svg.shorten("a long name", 40).endswith("…")
