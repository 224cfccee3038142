"""From answers to a result.

The order matters. Something not filled in is "not started", whatever else is wrong; then the number and the type of
the answers; then the task's own check. A result is "passed" only if at least one case ran and every one of them
ran to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from exercises.grader import values
from exercises.grader.limits import CELL_SECONDS, AskedForInput, OutOfTime, Stopped, no_input, time_limit
from exercises.grader.report import Report, StubError, said, stub_message
from exercises.grader.result import Result
from exercises.grader.task import Task

INPUT = "It calls input(), and nobody is there to type: put the value into the cell."
ENDED = "It ends the program (exit or quit): let it return instead."


def judge(
    task: Task,
    answers: Sequence[object],
    seconds: float | None = CELL_SECONDS,
    on_case: Callable[[str], None] | None = None,
) -> Result:
    """Runs the check of `task` on `answers`. Raises: nothing but KeyboardInterrupt; whatever happens is the result.

    Args:
        seconds: time limit; None where somebody else watches the clock.
        on_case: told the title of each case before it runs.
    """
    blank = Result(task.id, task.title, "failed", task.points, slot=task.part)
    open_ones = [name for name, answer in zip(task.answers, answers, strict=False) if _is_open(task, answer)]
    if open_ones:
        return not_started(task, f"Fill in: {', '.join(open_ones)}")
    if sentence := _misfit(task, answers):
        return replace(blank, sentence=sentence)
    report = Report(on_case)
    given = [answer if isinstance(answer, type) else values.plain(answer) for answer in answers]
    try:
        with no_input() as asked, time_limit(seconds) as alarms:
            task.check(*given, report)
        if asked or alarms:  # the answer caught it, which does not make it right
            raise [*asked, *alarms][0]
    except StubError as error:
        return not_started(task, f"Still to write: {error}")
    except Stopped as error:
        return replace(
            _result(task, report), status="failed", sentence=_stop(task.id, error, seconds, report)
        )
    except SystemExit:
        return replace(_result(task, report), status="failed", sentence=ENDED)
    except Exception as error:
        if stub := stub_message(error):
            return not_started(task, f"Still to write: {stub}")
        return replace(_result(task, report), status="failed", sentence=said(error))
    return _result(task, report)


def _is_open(task: Task, answer: object) -> bool:
    """Whether nobody has filled in this answer."""
    return values.unanswered(answer) or (answer is None and not task.accepts_none)


def not_started(task: Task, sentence: str) -> Result:
    """The result of an answer that is not there yet."""
    return Result(task.id, task.title, "not started", task.points, sentence=sentence, slot=task.part)


def out_of_time(task_id: str, seconds: float, case: str = "") -> str:
    """One sentence for an endless loop. The command line, which kills the process, says the same."""
    where = f", in the case: {case}" if case else ""
    return f"The cell of task {task_id} did not end within {seconds:g} s (an endless loop?){where}."


def _misfit(task: Task, answers: Sequence[object]) -> str:
    """What is wrong with the number or the types of the answers, as one sentence, or nothing."""
    if len(answers) != len(task.answers):
        return f"It takes {len(task.answers)} answer(s) and got {len(answers)}: {task.call}"
    for (name, wanted), answer in zip(task.answers.items(), answers, strict=True):
        if sentence := values.wrong_type(wanted, answer):
            return f"{name} should be {sentence}; it is {values.kind_of(answer)}."
    return ""


def _result(task: Task, report: Report) -> Result:
    failed = [case for case in report.cases if not case.passed]
    first = failed[0] if failed else None
    is_right = bool(report.cases) and not failed
    if report.is_as_given and not is_right:
        return not_started(task, "It still behaves as it was given to you.")
    return Result(
        task=task.id,
        title=task.title,
        status="passed" if is_right else "failed",
        total=task.points,
        sentence=(first.sentence if first else "") if report.cases else "Nothing was checked.",
        cases=tuple((case.title, case.passed) for case in report.cases),
        failed_case=first.title if first else "",
        rows=tuple(first.rows[-4:]) if first else (),  # the last one differs; a few before it for orientation
        misconception=None if is_right else report.found,
        not_checked=tuple(report.notes),
        slot=task.part,
    )


def _stop(task_id: str, error: Stopped, seconds: float | None, report: Report) -> str:
    if isinstance(error, AskedForInput):
        return INPUT
    assert isinstance(error, OutOfTime) and seconds is not None  # the only other one, raised by the alarm
    last = report.cases[-1] if report.cases else None
    return out_of_time(task_id, seconds, last.title if last and not last.passed else "")
