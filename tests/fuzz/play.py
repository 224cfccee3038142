"""Plays a scenario on an engine and holds the result against the truth.

`verify` is the whole test of one scenario: once with caching, once without, both watched by the oracle, and both
token for token what a recompute without any engine gives. So neither caching nor scheduling changes an answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from refengine.config import EngineConfig
from refengine.hashing import Adapter
from refengine.model.decoder import Decoder
from refengine.outputs import StepOutput
from refengine.sampling import SamplingParams
from tests.fuzz import recompute
from tests.fuzz.scenarios import EOS, PATIENCE, Abort, Add, Fail, Operation, Scenario, Step
from tests.fuzz.shadowed import ShadowedEngine
from tests.fuzz.shadowed_v1 import ShadowedV1

MakeEngine = Callable[[EngineConfig, Decoder, Sequence[int]], ShadowedEngine]


class Wrong(AssertionError):
    """The engine did something that must not happen. `kinds`: of the oracle's violations, or what else it was."""

    def __init__(self, kinds: Sequence[str], text: str) -> None:
        super().__init__(text)
        self.kinds = frozenset(kinds)


@dataclass
class Played:
    """What came out of a scenario, by request id."""

    token_ids: dict[str, list[int]] = field(default_factory=dict)
    finish_reason: dict[str, str] = field(default_factory=dict)
    prompt_scores: dict[str, dict[int, float]] = field(default_factory=dict)  # by position
    aborted: set[str] = field(default_factory=set)
    events: Counter[str] = field(default_factory=Counter)


def verify(scenario: Scenario, make_engine: MakeEngine = ShadowedV1, **options: Any) -> Counter[str]:
    """Raises Wrong, or an engine's own error, unless everything about the scenario is right.

    `options`: of the engine, over those of the scenario. Returns: what happened, with caching on.
    """
    truth = recompute.prompts(scenario.requests)
    plain = Player(scenario, truth, make_engine, enable_prefix_caching=False, **options).play()
    cached = Player(scenario, truth, make_engine, **options).play()
    for played in (plain, cached):
        compare(scenario, truth, played)
    return cached.events


def compare(scenario: Scenario, truth: dict[str, recompute.Tokens], played: Played) -> None:
    """Raises Wrong unless every request said what a recompute says, an aborted one the beginning of it."""
    for request_id, add in scenario.requests.items():
        prompt, got = truth[request_id], tuple(played.token_ids[request_id])
        said, reason = recompute.answer(prompt, add, scenario.options["max_model_len"])
        is_aborted = request_id in played.aborted
        if is_aborted:
            said, reason = said[: len(got)], "abort"
        if got != said or played.finish_reason[request_id] != reason:
            how = f"{got}, {played.finish_reason[request_id]}"
            raise Wrong(["output"], f"{request_id} says {how}, but a recompute {said}, {reason}")
        if add.prompt_logprobs and not is_aborted:
            scores = pytest.approx(
                recompute.prompt_scores(prompt, add.adapter), abs=1e-5
            )  # they are reported in float32
            if played.prompt_scores[request_id] != scores:
                raise Wrong(["scores"], f"{request_id} scores its prompt {played.prompt_scores[request_id]}")


class Player:
    """One scenario on one engine."""

    def __init__(
        self, scenario: Scenario, truth: dict[str, recompute.Tokens], make_engine: MakeEngine, **options: Any
    ) -> None:
        """`truth`: the whole prompts. `options`: over those of the scenario."""
        self.scenario, self.truth = scenario, truth
        self.config = EngineConfig(**{"check_integrity": True, **scenario.options, **options})
        self.engine = make_engine(self.config, recompute.model(), [EOS])
        self.played = Played(events=self.engine.tally.events)
        self._arrivals = iter(scenario.requests.items())

    def play(self) -> Played:
        """All operations, then steps until the engine is done. Raises Wrong at the first thing that is."""
        for operation in self.scenario.operations:
            self._apply(operation)
            if self.config.check_integrity:
                self.engine.check_integrity()
        for _ in range(self._most_steps()):
            if not self.engine.has_unfinished_requests:
                break
            self._step()
        else:
            raise Wrong(["endless"], f"not done after {self._most_steps()} steps with nothing added")
        self._step()  # tells the runner who finished last; there is nothing else in it
        if left := self.engine.leftovers():
            raise Wrong(["leftovers"], f"nothing is left to do, but there are {'; '.join(left)}")
        return self.played

    def _apply(self, operation: Operation) -> None:
        if isinstance(operation, Add):
            self._add(*next(self._arrivals))
        elif isinstance(operation, Step):
            for _ in range(operation.count):
                self._step()
        elif isinstance(operation, Abort):
            self._abort(operation.target)
        elif isinstance(operation, Fail):
            self.engine.fails = True
            self._step()
            self.engine.fails = False
        else:
            done = self.engine.reset_prefix_cache()
            self.played.events["reset" if done else "reset refused"] += 1

    def _add(self, request_id: str, add: Add) -> None:
        params = SamplingParams(
            max_tokens=add.max_tokens,
            stop_token_ids=add.stop_token_ids,
            ignore_eos=add.ignore_eos,
            prompt_logprobs=0 if add.prompt_logprobs else None,
        )
        self.engine.add(
            request_id,
            list(self.truth[request_id]),
            params,
            priority=add.priority,
            cache_salt=add.cache_salt,
            adapter=Adapter(add.adapter, recompute.adapter_path(add.adapter), len(self.played.token_ids))
            if add.adapter
            else None,
            report_full=add.report_full,
        )
        self.played.token_ids[request_id], self.played.prompt_scores[request_id] = [], {}

    def _step(self) -> None:
        for output in self.engine.step():
            self._receive(output)
        if self.engine.violations:
            kinds = [violation.kind for violation in self.engine.violations]
            raise Wrong(kinds, "\n".join(map(str, self.engine.violations)))

    def _receive(self, output: StepOutput) -> None:
        played, request_id = self.played, output.request_id
        played.token_ids[request_id] += output.token_ids
        if output.finish_reason is not None:
            played.finish_reason[request_id] = output.finish_reason
            played.events[f"finished: {output.finish_reason}"] += 1
        if output.prompt_logprobs is not None:
            first, scores = output.prompt_logprobs
            for position, score in enumerate(scores, start=first):
                token_id = self.truth[request_id][position]
                played.prompt_scores[request_id][position] = score[token_id].logprob

    def _abort(self, target: int | str) -> None:
        for patience in range(PATIENCE, -1, -1):
            states = {request_id: self.engine.state(request_id) for request_id in self.played.token_ids}
            chosen = [
                request_id for request_id, state in states.items() if target in (state, int(request_id[1:]))
            ]
            if chosen or not patience or not self.engine.has_unfinished_requests:
                break
            self._step()
        if not chosen:
            return
        request_id, state = chosen[0], states[chosen[0]]
        self.engine.abort(request_id)
        self.played.events[f"aborted: {state}"] += 1
        if state != "finished":
            self.played.aborted.add(request_id)
            self.played.finish_reason[request_id] = "abort"

    def _most_steps(self) -> int:
        """Steps in which any schedule is done, if it never loses sight of the most important request.

        Whoever is most important among the running requests loses no token. At worst each of the others in
        front of it uses up the budget until it ends or is preempted and falls behind, so after as many steps
        as there are tokens in all, it is first, and after as many again, done. That many steps for each
        request, and again whenever one arrives that is more important.
        """
        adds = self.scenario.requests
        total = sum(len(self.truth[request_id]) + add.max_tokens for request_id, add in adds.items())
        return 2 * total * 2 * len(adds) + 1
