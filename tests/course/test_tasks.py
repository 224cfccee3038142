"""Every task of the course: stub, solution, known-wrong answers, and a right answer in another style."""

from __future__ import annotations

import functools

import pytest

import exercises.tasks as registry
from exercises.builder.build import sources
from exercises.builder.rules import WORDS
from exercises.course import current
from exercises.grader import Task
from tests.course.proof import Proof, faults

COURSE = current()
TASKS = [task for tasks in registry.exercises(COURSE).values() for task in tasks]


@functools.cache
def proof_of(number: str) -> Proof:
    found = [source for source in sources(COURSE) if not source.is_chapter and source.path.stem[:2] == number]
    assert len(found) == 1, f"exercise {number} has {len(found)} sources"
    return Proof.of(found[0], COURSE)


def test_there_are_tasks() -> None:
    assert TASKS


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)
def test_task(task: Task) -> None:
    assert list(faults(proof_of(task.exercise), task)) == []


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)
def test_words(task: Task) -> None:
    texts = [task.title, *task.hints, *(wrong.misconception for wrong in task.wrong)]
    assert WORDS.findall(" ".join(texts)) == []


@pytest.mark.parametrize("number", registry.numbers(COURSE))
def test_exercise_mixes_its_kinds(number: str) -> None:
    tasks = registry.of_exercise(number, COURSE)
    assert len(tasks) >= 5
    assert len({task.kind for task in tasks}) >= 4
