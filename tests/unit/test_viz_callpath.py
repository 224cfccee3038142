"""The picture of a followed request and its widget: true in words, legible, whole without a kernel."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from refengine import viz
from refengine.trace.follow import QUESTIONS, Followed, follow, rows
from refengine.viz.svg import SMALL, text_width
from tests.unit.helpers import numbers
from tests.unit.test_viz import _check_legible, _words


@pytest.fixture(scope="module")
def path() -> Followed:
    return follow()


@pytest.fixture(scope="module")
def long_path(model_dir: Path) -> Followed:
    """Many blocks with gaps between them, so that lists of ids are long."""
    prompt = numbers(0, 30) + numbers(0, 30) + numbers(0, 30)
    return follow(prompt, model=str(model_dir), block_size=1, max_tokens=3, mode="faithful")


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_picture_is_the_same_each_time_and_legible(path: Followed, long_path: Followed, step: int) -> None:
    for followed in (path, long_path):
        first, second = (viz.callpath_picture(followed, step=step) for _ in range(2))
        assert first.svg == second.svg and first.alt == second.alt
        _check_legible(first)
        assert len(first.html()) < 45_000


@pytest.mark.parametrize("step", [0, 1, 2])
def test_every_call_stands_in_picture_and_words(path: Followed, step: int) -> None:
    picture = viz.callpath_picture(path, step=step)
    words = " ".join(_words(picture))
    for row in rows(path):
        for engine, calls in row.calls.items():
            for call in calls if row.step == step else []:
                assert call.name.rpartition(".")[2] in words and call.decided in words
                mark = f"{row.mark}, " if row.mark else ""
                assert f"{engine.upper()}, {mark}{call.name}: {call.decided}." in picture.alt.splitlines()


def test_both_answers_are_marked_by_a_word_and_not_by_colour_alone(path: Followed) -> None:
    words = _words(viz.callpath_picture(path))
    alt = viz.callpath_picture(path).alt
    for tag, question in zip(("1 who decides", "2 who skips"), QUESTIONS, strict=True):
        assert words.count(tag) == sum(len(one.answering(question)) for one in path.paths)
        assert alt.count(QUESTIONS[question]) == 2


def test_no_line_of_a_box_leaves_it(path: Followed, long_path: Followed) -> None:
    for followed in (path, long_path):
        root = ElementTree.fromstring(viz.callpath_picture(followed).svg)
        for text in root.iter("{http://www.w3.org/2000/svg}text"):
            x = float(text.attrib["x"])
            if x < 400 and float(text.attrib["y"]) > 110 and text.text:
                assert x + text_width(text.text, SMALL) <= 392, text.text


def test_one_engine_takes_the_whole_width_and_a_missing_step_is_refused(model_dir: Path) -> None:
    followed = follow([1, 2, 3, 4], engine="v1", model=str(model_dir), max_tokens=1)
    picture = viz.callpath_picture(followed)
    assert "V1 (vLLM 0.33.0)" in _words(picture) and "V0" not in picture.alt
    with pytest.raises(ValueError, match="no step 2"):
        viz.callpath_picture(followed, step=2)


# -- the widget ---------------------------------------------------------------------------------------------


def test_widget_goes_through_all_calls_of_both_steps(path: Followed) -> None:
    shown = viz.callpath_widget(path)
    calls = [place[2] for place in shown.places if place]
    assert len(calls) == sum(call.step > 0 for one in path.paths for call in one.calls)
    for number, call in enumerate(calls, 1):
        assert f"Pointed at: {call.name}." in shown.picture(number).alt
        table = str(shown.table(number))
        assert call.ours in table and call.vllm[0].symbol in table
        ElementTree.fromstring(shown.table(number)._repr_html_())


def test_still_picture_is_whole_without_the_widget(path: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    bundle = viz.callpath_widget(path)._repr_mimebundle_()
    assert set(bundle) == {"text/html", "text/plain"}
    assert "pip install ipywidgets" in bundle["text/html"] and "<img alt=" in bundle["text/html"]
    for words in QUESTIONS.values():
        assert words in bundle["text/html"] and words in bundle["text/plain"]


def test_controls_move_the_ring(path: Followed) -> None:
    pytest.importorskip("ipywidgets")
    shown = viz.callpath_widget(path)
    controls, view = shown.widget.children
    slider = next(child for child in controls.children if type(child).__name__ == "IntSlider")
    assert slider.description == "call" and slider.max == len(shown.places) - 1
    assert not any(type(child).__name__ == "ToggleButton" for child in controls.children)
    slider.value = 3
    assert view.value == shown.html(3)


def test_a_call_that_is_not_there_is_refused(path: Followed) -> None:
    with pytest.raises(ValueError, match="no call 999"):
        viz.callpath_widget(path, start=999)
