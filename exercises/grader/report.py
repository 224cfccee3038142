"""What a check writes while it runs: named cases, and what went wrong in the first one that did."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from exercises.grader import values

Row = tuple[str, str, str]  # what, expected, got
Known = tuple[Any, str, str]  # a wrong value, the misconception it shows, why it is wrong


@dataclass
class Case:
    """One named case. It passed only if it ran to its end without a failure."""

    title: str
    passed: bool = False
    sentence: str = ""  # why it failed, if a table does not say it
    rows: list[Row] = field(default_factory=list)  # as far as it got; the last one failed


class Mismatch(Exception):
    """Ends a case that failed; `Report.case` catches it."""


class StubError(Exception):
    """The answer is, or needs, something that is not written yet."""


class Report:
    """Collects cases. A check gets one, and does all its comparing through it.

    `with report.case("the tail goes first"): report.equal([2, 1], got, "order")`. A failure ends its case; the
    next case still runs. An exception inside a case fails it with one sentence.
    """

    def __init__(self, on_case: Callable[[str], None] | None = None) -> None:
        self.cases: list[Case] = []
        self.notes: list[str] = []  # what was not checked
        self.found: tuple[str, str] | None = None  # the misconception: name, why
        self.is_as_given = False
        self._open: Case | None = None
        self._on_case = on_case or (lambda title: None)

    @contextmanager
    def case(self, title: str) -> Iterator[None]:
        """Runs one case. Mutates: `cases`. Raises: StubError, which ends the whole check."""
        case = self._open = Case(title)
        self.cases.append(case)
        self._on_case(title)
        try:
            yield
            case.passed = True
        except Mismatch:
            pass  # the case holds what was expected
        except Exception as error:
            if stub := stub_message(error):
                raise StubError(stub) from None
            case.sentence = said(error)
        finally:
            self._open = None

    def equal(self, expected: Any, got: Any, what: str = "value", known: tuple[Known, ...] = ()) -> None:
        """Wants `got` to equal `expected` exactly. `known`: wrong values that show a misconception."""
        with self._in_case(what) as case:
            case.rows.append((what, values.show(expected), values.show(got)))
            if not values.equal(expected, got):
                for value, name, why in known:
                    if values.equal(value, got):
                        self.misconception(name, why)
                raise Mismatch

    def close(
        self,
        expected: Any,
        got: Any,
        what: str = "values",
        rtol: float | None = None,
        atol: float | None = None,
    ) -> None:
        """Wants numbers or tensors to agree within the tolerance of their dtype (see `values`)."""
        with self._in_case(what) as case:
            if sentence := values.difference(expected, got, rtol, atol):
                case.sentence = f"{what}: {sentence}."
                raise Mismatch

    def true(self, condition: object, sentence: str) -> None:
        """Wants `condition` to hold; `sentence` says what is wrong if it does not."""
        with self._in_case(sentence) as case:
            if not condition:
                case.sentence = sentence
                raise Mismatch

    def raises(self, kind: type[Exception], call: Callable[[], object], what: str) -> None:
        """Wants `call()` to raise `kind`; any other exception, or none, fails the case."""
        with self._in_case(what) as case:
            try:
                got = f"returned {values.show(call())}"
            except kind as error:
                if stub := stub_message(error):
                    raise StubError(stub) from None
                return
            except Exception as error:
                if stub := stub_message(error):
                    raise StubError(stub) from None
                got = f"raised {type(error).__name__}: {error}"
            case.rows.append((what, f"raises {kind.__name__}", got))
            raise Mismatch

    def misconception(self, name: str, why: str) -> None:
        """Names the wrong idea that the behaviour shows. Call it before the comparison that fails; first one stays.

        If an earlier case has failed already, the result shows that one, and the idea says where it was seen.
        """
        if self._open is not None and any(not case.passed for case in self.cases[:-1]):
            why += f" (Seen in another case: {self._open.title}.)"
        self.found = self.found or (name, why)

    def as_given(self) -> None:
        """For find-the-bug tasks: the part still behaves as it was handed out, so nothing was started."""
        self.is_as_given = True

    def not_checked(self, sentence: str) -> None:
        """What this run could not look at: "2 checks need a GPU"."""
        self.notes.append(sentence)

    @contextmanager
    def _in_case(self, title: str) -> Iterator[Case]:
        """The open case, or one of its own for a comparison that stands alone."""
        if self._open is not None:
            yield self._open
            return
        with self.case(title):
            assert self._open is not None  # `case` has just opened it
            yield self._open


def stub_message(error: BaseException) -> str | None:
    """The text of the stub behind `error`, also where the engine wrapped it; None if no stub is behind it.

    A NotImplementedError of another origin (an operation torch does not have) is a failure, not a stub.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, StubError):
            return str(seen)
        if isinstance(seen, NotImplementedError) and (
            not str(seen) or re.match(r"ex\d\d task \d+", str(seen))
        ):
            return str(seen) or "a part of it raises NotImplementedError"
        seen = seen.__cause__ or seen.__context__
    return None


def said(error: BaseException) -> str:
    """One sentence on an exception: its kind, its words, and the learner's own line if there is one."""
    words = re.sub(r"\s+", " ", str(error)).strip() or "no message"
    sentence = f"It raised {type(error).__name__}: {words.rstrip('.')}."
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if is_learners(frame.filename)]
    if not own:
        return sentence
    frame = own[-1]
    line = (linecache.getline(frame.filename, frame.lineno or 0) or frame.line or "").strip()
    return f"{sentence[:-1]}, in line {frame.lineno} of the cell: {line}"


def is_learners(filename: str) -> bool:
    """True for code of a notebook cell: in Jupyter, and in the process of `refengine check`."""
    return filename.startswith("<cell ") or "ipykernel_" in filename or filename.startswith("<ipython-input")
