"""The machine itself, on the small course in fixtures/: build, check, and everything a learner's code may do wrong."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import exercises.tasks as registry
from exercises.builder.build import Source, make, run_build, sources, stale
from exercises.builder.regions import solution_text, stubbed
from exercises.builder.rules import of_chapter
from exercises.builder.sources import read_source
from exercises.course import ROOT_VARIABLE, Course, CourseError
from exercises.grader import Task, progress
from exercises.grader.cli import register
from exercises.grader.hand_in import check
from exercises.grader.judge import judge
from exercises.grader.runner import Grading, grade
from exercises.notebook import Cell, Notebook, dumps, read
from tests.course.proof import Proof, faults, with_answer

FIXTURE = Course(Path(__file__).parent / "fixtures" / "course")
LIMIT = 1.5  # seconds per cell, for the answers that never end


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Course:
    """A copy with the untouched exercise in it, as a learner has it."""
    shutil.copytree(FIXTURE.root, tmp_path / "course", ignore=shutil.ignore_patterns("__pycache__"))
    copy = Course(tmp_path / "course")
    monkeypatch.setenv(ROOT_VARIABLE, str(copy.root))
    tasks = {task.id: task for task in registry.of_exercise("90", copy)}
    solved = read_source(copy.solutions / "source" / "90_sample.py")
    (copy.solutions / "90_sample.ipynb").write_text(dumps(solved))
    (copy.exercises / "90_sample.ipynb").write_text(dumps(stubbed(solved, tasks)))
    return copy


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Course, list[str]]]:
    """The fixture course, built once; and what the builder said."""
    root = tmp_path_factory.mktemp("built") / "course"
    shutil.copytree(FIXTURE.root, root, ignore=shutil.ignore_patterns("__pycache__"))
    said: list[str] = []
    assert run_build(Course(root), [], check=False, say=said.append) == 0, said
    yield Course(root), said


# --- the builder -----------------------------------------------------------------------------------------------


def test_a_second_build_gives_the_same_bytes(built: tuple[Course, list[str]]) -> None:
    """And --check names the notebook and the first difference if somebody edits one by hand."""
    course, _ = built
    first = {path: path.read_bytes() for path in course.root.glob("*/*.ipynb")}
    assert len(first) == 3
    exercise = course.exercises / "90_sample.ipynb"
    for source in sources(course):
        fresh = make(source, course)
        assert {
            path: dumps(notebook).encode() for path, notebook in fresh.notebooks.items()
        }.items() <= first.items()
        assert stale(fresh, course) == []
        if not source.is_chapter:
            exercise.write_bytes(first[exercise].replace(b"order = ...", b"order = [1]"))
            (found,) = stale(fresh, course)
            exercise.write_bytes(first[exercise])
            assert found.startswith("exercises/90_sample.ipynb is stale: cell 7 (task 90.2), source, line 1")


def test_outputs_are_kept_except_volatile_ones(built: tuple[Course, list[str]]) -> None:
    course, _ = built
    cells = [cell for cell in read(course.chapters / "90_sample.ipynb").cells if cell.is_code]
    assert [cell.execution_count for cell in cells] == [1, 2, 3, 4]
    assert cells[1].outputs[0]["text"] == "1\n"
    assert cells[2].outputs[-1]["metadata"] == {"image/png": {"alt": "a line that rises from 1 to 9"}}
    assert cells[3].outputs == ()


def test_the_exercise_has_stubs_and_no_outputs(built: tuple[Course, list[str]]) -> None:
    course, _ = built
    exercise = read(course.exercises / "90_sample.ipynb")
    text = "\n".join(cell.source for cell in exercise.cells)
    assert 'raise NotImplementedError("ex90 task 1: a line, take (about 3 lines)")' in text
    assert "order = ..." in text and "return [items[-2], items[-1]]" in text
    assert "SOLUTION" not in text and "INSTEAD" not in text
    assert all(cell.outputs == () and cell.execution_count is None for cell in exercise.cells)


CODE = "```{{code-cell}}\n{0}\n```\n"
HEAD = "# 90 T\n**Goals** **Prerequisites** **Reading time**\n**Points** 40\n**In V0** **In V1**\n\n"
REFUSED = {
    CODE.format("print(object())"): "the address of an object",
    CODE.format("import os\nprint(os.getcwd())"): "a path of one machine",
    CODE.format("print('took 12.5 ms')"): "a duration",
    CODE.format("import warnings\nwarnings.warn('x')"): "it writes to stderr",
    CODE.format("import matplotlib.pyplot as plt\nplt.plot([1]);"): "a picture without alternative text",
    CODE.format("from IPython.display import HTML\nHTML('<img src=\"data:,\">')"): "an <img> without",
    CODE.format("import ipywidgets\nipywidgets.IntSlider()"): "tag the cell volatile",
    CODE.format("print('x' * 210_000)"): "the most is 200,000",
    CODE.format("\n".join(["x = 1"] * 21)): "the 90th percentile of its code cells is 21 lines",
    "Let’s simply go.\n\n": "'Let’s'",
    "[gone](nowhere.ipynb)\n\n": "nowhere.ipynb leads to no file",
    "[lost](#lost)\n\n": "#lost names a place that is not there",
    ":::{note}\nx\n:::\n": "does not show MyST directives",
}


def test_the_builder_refuses(tmp_path: Path) -> None:
    problems = problems_of(tmp_path, HEAD + "".join(REFUSED) + CODE.format("\n".join(["x = 1"] * 21)))
    for sentence in REFUSED.values():
        assert any(sentence in problem for problem in problems), (sentence, problems)


def test_a_cell_that_fails_is_shown(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path, HEAD + CODE.format("1 / 0"))
    assert problem.startswith("chapters/90_bad: ") and "ZeroDivisionError" in problem


def problems_of(folder: Path, text: str) -> list[str]:
    path = folder / "chapters" / "source" / "90_bad.md"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return make(Source(path, (folder / "chapters" / "90_bad.ipynb",)), Course(folder)).problems


def test_a_chapter_must_open_and_compare(tmp_path: Path) -> None:
    notebook = Notebook("90_bad", (Cell("markdown", "# A title"), Cell("code", "x = 1\n" * 9)))
    said = " ".join(of_chapter(notebook, registry.of_exercise("90", FIXTURE)))
    for part in (
        'starts with "# 90"',
        "**Goals**",
        "**Points**",
        "**In V1**",
        "its median code cell has 9 lines",
    ):
        assert part in said


@pytest.mark.parametrize(
    ("cell", "sentence"),
    [
        (
            Cell("code", "### BEGIN SOLUTION\nx = 1\n### END SOLUTION", meta={"task": "90.1"}),
            "outside a function",
        ),
        (Cell("code", "### BEGIN SOLUTION\nx = 1", meta={"task": "90.1"}), "without END"),
        (Cell("code", "### BEGIN SOLUTION stub: x = ...\nx = 1\n### END SOLUTION"), "outside an answer cell"),
        (Cell("code", "x = 1\n### END SOLUTION", meta={"task": "90.1"}), "without BEGIN"),
    ],
)
def test_regions_that_are_refused(cell: Cell, sentence: str) -> None:
    tasks = {task.id: task for task in registry.of_exercise("90", FIXTURE)}
    with pytest.raises(CourseError, match=sentence):
        stubbed(Notebook("90_x", (cell,)), tasks)


def test_nothing_to_build_is_a_failure(tmp_path: Path) -> None:
    assert run_build(Course(tmp_path), [], check=True, say=lambda line: None) == 1


# --- the proof ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", registry.of_exercise("90", FIXTURE), ids=lambda task: task.id)
def test_the_sample_tasks_are_proven(task: Task) -> None:
    source = next(source for source in sources(FIXTURE) if not source.is_chapter)
    assert list(faults(Proof.of(source, FIXTURE), task)) == []


def test_the_proof_sees_what_is_missing() -> None:
    source = next(source for source in sources(FIXTURE) if not source.is_chapter)
    proof = Proof.of(source, FIXTURE)
    task = proof.tasks["90.1"]
    weak = replace(task, check=lambda line, report: report.equal(1, 1), wrong=task.wrong[:2])
    said = " ".join(faults(replace(proof, tasks={**proof.tasks, "90.1": weak}), weak))
    for part in ("should be not started", "needs 3 wrong answers", "'takes the last' should fail"):
        assert part in said


# --- judging one answer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "answers", "status", "words"),
    [
        ("90.2", (..., 3), "not started", "Fill in: order"),
        ("90.2", ([1, ...], 3), "not started", "Fill in"),
        ("90.2", ([], ...), "not started", "Fill in: count"),
        ("90.2", (None, 3), "not started", "Fill in: order"),
        ("90.2", ("231", 3), "failed", "order should be a list; it is text."),
        ("90.2", ([2, 3, 1], True), "failed", "count should be a whole number; it is True or False."),
        ("90.2", ([2, 3, 1],), "failed", "It takes 2 answer(s) and got 1"),
        ("90.2", ([2, 3, 1], 4), "failed", "count"),
        ("90.1", (object(),), "failed", "should be the class itself"),
        ("90.4", (lambda numbers: input(),), "failed", "It calls input()"),
        ("90.4", (lambda numbers: exit(),), "failed", "It ends the program"),
        ("90.4", (lambda numbers: numbers[9],), "failed", "It raised IndexError: list index out of range."),
        ("90.4", (lambda numbers: "1.5",), "failed", "expected numbers, got text"),
        ("90.4", (lambda numbers: 1.5,), "passed", "Not checked: 1 check needs a GPU"),
    ],
)
def test_verdicts(task: str, answers: tuple[object, ...], status: str, words: str) -> None:
    result = judge(registry.find(task, FIXTURE), answers)
    assert result.status == status
    assert words in str(result)


def test_a_failing_case_is_a_table_and_a_misconception() -> None:
    text = str(judge(registry.find("90.2", FIXTURE), ([1, 2, 3], 3)))
    assert re.search(r"expected +got\n +order +\[2, 3, 1\] +\[1, 2, 3\]", text)
    assert "This looks like: nothing moves. take() removes the 1" in text
    assert "refengine hint 90.2" in text


def test_html_has_the_same_words() -> None:
    result = judge(registry.find("90.2", FIXTURE), ([1, 2, 3], 3))
    shown = result._repr_mimebundle_()
    assert re.sub(r"<[^>]*>", " ", shown["text/html"]).split() == shown["text/plain"].split()


def test_an_endless_loop_in_the_notebook_is_ended() -> None:
    def forever(numbers: list[float]) -> float:
        while True:
            with contextlib.suppress(Exception):
                sum(numbers)

    text = str(judge(registry.find("90.4", FIXTURE), (forever,), seconds=0.3))
    assert (
        "The cell of task 90.4 did not end within 0.3 s (an endless loop?), in the case: a mean with" in text
    )


def test_check_in_a_notebook_remembers(course: Course) -> None:
    assert check("90.2", [2, 3, 1], 3).status == "passed"
    assert progress.load(course)["90.2"].points == 10
    with pytest.raises(CourseError, match=r"did you mean '90\.2'"):
        check("90.22", 1)


# --- the command line -------------------------------------------------------------------------------------------


def solve(course: Course, **answers: str) -> None:
    """Writes the learner's notebook: solved, with the cells of some tasks replaced (t1=... for task 90.1)."""
    notebook = read(course.solutions / "90_sample.ipynb")
    for name, answer in answers.items():
        notebook = with_answer(notebook, registry.find(f"90.{name[1:]}", course), answer)
    (course.exercises / "90_sample.ipynb").write_text(dumps(notebook))


def verdicts(grading: Grading) -> list[str]:
    return [result.status for result in grading.results]


def test_the_untouched_exercise_is_not_started(course: Course) -> None:
    assert verdicts(grade(course, "90")) == ["not started"] * 4


MEAN = "def mean(numbers):\n    {0}\n"


def test_what_ends_a_process_costs_one_task_only(course: Course) -> None:
    """A compiled loop, a loop that catches everything, and a process that ends itself, all in one notebook."""
    swallow = "class Line:\n    def __init__(self, items):\n        while True:\n            try:\n"
    swallow += "                sum(range(10**4))\n            except:\n                pass\n"
    leave = "import os\nos._exit(0)\norder, count = [2, 3, 1], 3"
    solve(course, t1=swallow, t2=leave, t4=MEAN.format("return sum(range(10**12))"))
    grading = grade(course, "90", seconds=LIMIT)
    assert verdicts(grading) == ["failed", "failed", "passed", "failed"]
    said = [result.sentence for result in grading.results]
    first = "the items come out in the order they went in"
    assert (
        said[0] == f"The cell of task 90.1 did not end within 1.5 s (an endless loop?), in the case: {first}."
    )
    assert said[1] == "The process ended (exit status 0) in the cell of task 90.2."
    assert "The cell of task 90.4 did not end within 1.5 s" in said[3]


def test_a_signal_and_input_and_a_fault_of_the_cell(course: Course) -> None:
    crash = MEAN.format("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    raises = "order, count = [2, 3, 1], 1 // 0"
    solve(course, t1="class Line(list:\n    pass", t2=raises, t3="name = input('who? ')", t4=crash)
    said = [result.sentence for result in grade(course, "90", seconds=20).results]
    assert said[0].startswith("Python cannot read it: ")
    assert said[1].startswith("It raised ZeroDivisionError: ") and said[1].endswith(
        "order, count = [2, 3, 1], 1 // 0"
    )
    assert said[2].startswith("It calls input()")
    assert (
        said[3]
        == "The process ended (signal 11) in the cell of task 90.4, in the case: a mean with a fraction."
    )


def test_a_check_that_was_deleted_is_not_run(course: Course) -> None:
    solve(course)
    path = course.exercises / "90_sample.ipynb"
    path.write_text(path.read_text().replace('check(\\"90.2\\", order, count)', "order"))
    grading = grade(course, "90")
    assert verdicts(grading) == ["passed", "not run", "passed", "passed"]
    assert 'No cell that ran calls check("90.2", order, count)' in str(grading.results[1])


def test_an_answer_that_raises_is_not_saved_by_a_later_cell(course: Course) -> None:
    solve(course)
    notebook = read(course.exercises / "90_sample.ipynb")
    cells = list(notebook.cells)
    place = next(i for i, cell in enumerate(cells) if cell.task == "90.4")
    cells[place] = replace(cells[place], source="def mean(numbers): return 1 / 0\nmean([1])")
    cells.insert(
        place + 1, Cell("code", "%time x = 1\ndef mean(numbers): return sum(numbers) / len(numbers)")
    )
    (course.exercises / "90_sample.ipynb").write_text(dumps(notebook.with_cells(cells)))
    result = grade(course, "90", only=["90.4"]).results[0]
    assert result.status == "failed" and "ZeroDivisionError" in result.sentence


@pytest.fixture
def cli(course: Course) -> CliRunner:
    return CliRunner()


def app() -> typer.Typer:
    made = typer.Typer()
    register(made)
    return made


def test_the_commands(course: Course, cli: CliRunner) -> None:
    solve(course, t2="order = [1, 2, 3]\ncount = 3")
    got = cli.invoke(app(), ["check", "90", "--json"])
    data = json.loads(got.stdout)
    assert got.exit_code == 1 and (data["points"], data["total"]) == (30, 40)
    in_notebook = str(judge(registry.find("90.2", course), ([1, 2, 3], 3)))
    assert in_notebook in cli.invoke(app(), ["check", "90.2"]).stdout
    saved = json.loads(course.progress_file.read_text())
    part = {"slot": "line", "notebook": "exercises/90_sample.ipynb"}
    assert saved["tasks"]["90.1"] == {"status": "passed", "points": 10, "hints": 0, "part": part}
    for number in (1, 2, 3):
        assert f"Hint {number} of 3" in cli.invoke(app(), ["hint", "90.2"]).stdout
    assert "There are no more" in cli.invoke(app(), ["hint", "90.2"]).stdout
    table = cli.invoke(app(), ["progress"]).stdout
    assert "3 of 4" in table and "30 of 40" in table
    assert cli.invoke(app(), ["show", "90.4"], input="n\n").exit_code == 1
    assert "return sum(numbers) / len(numbers)" in cli.invoke(app(), ["show", "90.4", "--yes"]).stdout


def test_reset_keeps_a_copy(course: Course, cli: CliRunner) -> None:
    path = course.exercises / "90_sample.ipynb"
    untouched = path.read_text()
    solve(course)
    mine = path.read_text()
    progress.record(course, grade(course, "90", only=["90.1"]).results)
    assert "exercises/backup/90_sample.1.ipynb" in cli.invoke(app(), ["reset", "90"]).stdout
    assert path.read_text() == untouched
    assert (course.backups / "90_sample.1.ipynb").read_text() == mine
    assert progress.load(course)["90.1"].status == "not started"


def test_a_damaged_progress_file_is_put_aside(course: Course, capsys: pytest.CaptureFixture[str]) -> None:
    course.progress_file.write_text('{"schema": 1, "tasks": {"90.1"')
    assert progress.load(course) == {}
    assert "kept as .progress.json.damaged-1" in capsys.readouterr().err
    assert (course.exercises / ".progress.json.damaged-1").exists()


def test_solution_text_has_no_markers() -> None:
    source = "def f():\n    ### BEGIN SOLUTION\n    return 1\n    ### INSTEAD\n    # return 2\n    ### END SOLUTION"
    assert solution_text(source) == "def f():\n    return 1"
