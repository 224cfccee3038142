"""Watches functions while they run, without touching them.

Python tells a profile function whenever a function is entered or left (`sys.setprofile`). `Watch` listens for
those on a list, and reads what they decided off their own variables at the moment they return. So the engine
holds no hook for it, and pays nothing when nobody watches; a part that stops existing or being called is missing
in the result, instead of being told from memory.

It hears the thread it was started in and no other.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType, FrameType, TracebackType
from typing import Any

from refengine.trace.codemap import Stop, resolve

Facts = dict[str, Any]  # plain JSON values
Variables = Mapping[str, Any]  # a function's own, as they are when it returns


@dataclass(frozen=True)
class Teller:
    """How to tell of one function what it decided.

    `see`: its variables and its result -> facts, or None for a call that decided nothing. `tell`: the facts of all
    its calls of one engine step -> words. `at_end`: it decides after what it calls, and is told after it.
    """

    see: Callable[[Variables, Any], Facts | None]
    tell: Callable[[list[Facts]], str]
    at_end: bool = False


def returned(name: str) -> Callable[[Variables, Any], Facts | None]:
    """A `see` for a function whose result says it all: that result, as the fact `name`."""
    return lambda variables, result: {name: result}


@dataclass
class Sighting:
    """All calls of one function in one engine step, at the place of the first."""

    stop: Stop
    step: int  # 0: before the first engine step
    depth: int  # how many other watched functions were open around it
    facts: list[Facts] = field(default_factory=list)


class Watch:
    """Watches while it is entered as a context. Mutates: `sightings`, in the order in which they are to be told."""

    def __init__(self, stops: tuple[Stop, ...], tellers: Mapping[str, Teller], step: str) -> None:
        """`tellers` by our dotted path. `step`: the path of the function each call of which is an engine step."""
        self.sightings: list[Sighting] = []
        self._watched = {_code(stop.ours): (stop, tellers[stop.ours]) for stop in stops}
        self._step_code = _code(step)
        self._step = 0
        self._open: list[Sighting] = []

    def __enter__(self) -> Watch:
        self._before = sys.getprofile()
        sys.setprofile(self._event)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.setprofile(self._before)
        self.sightings = [sighting for sighting in self.sightings if sighting.facts]

    def _event(self, frame: FrameType, event: str, result: Any) -> None:
        watched = self._watched.get(frame.f_code)
        if watched is None:
            return
        stop, teller = watched
        if event == "call":
            self._step += frame.f_code is self._step_code
            if not teller.at_end:
                self._open.append(self._sighting(stop))
        elif event == "return":
            sighting = self._sighting(stop) if teller.at_end else self._open.pop()
            try:
                facts = teller.see(frame.f_locals, result)
            except (LookupError, AttributeError, TypeError):
                if result is not None:
                    raise
                facts = None  # it was left by an exception, its variables not whole: it decided nothing
            if facts is not None:
                sighting.facts.append(facts)

    def _sighting(self, stop: Stop) -> Sighting:
        """The place for a call: with the earlier calls of this step, if there were any that decided something."""
        for sighting in self.sightings:
            if sighting.stop is stop and sighting.step == self._step:
                return sighting
        self.sightings.append(Sighting(stop, self._step, len(self._open)))
        return self.sightings[-1]


def _code(path: str) -> CodeType:
    """The code of a function. Decorators around it (`torch.inference_mode`) have code of their own."""
    code = inspect.unwrap(resolve(path)).__code__
    assert isinstance(code, CodeType)
    return code
