"""Leaving early: a loop that is left, Ctrl-C at any moment. Nothing stays behind, and nobody else is hurt."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest

from refengine import LLM, SamplingParams
from tests.unit.helpers import numbers
from tests.unit.models import greedy, idle, make_decoder
from tests.unit.test_llm import PROMPTS


def test_leaving_a_stream_early_aborts(llm: LLM) -> None:
    for _ in llm.stream(PROMPTS):
        break
    gc.collect()
    assert idle(llm)
    assert llm.generate([1, 2, 3])[0].token_ids == greedy(make_decoder(), [1, 2, 3], 16)


def test_leaving_a_stream_at_a_bad_prompt_aborts_the_others(llm: LLM) -> None:
    """The error is the first thing the stream yields; the good requests have been entered by then."""
    stream = llm.stream(["the cat", [99]])
    assert next(stream).error is not None
    stream.close()  # type: ignore[attr-defined]
    assert idle(llm)


def test_a_stream_that_was_never_started_enters_nothing(llm: LLM) -> None:
    llm.stream(PROMPTS)
    assert idle(llm)


@contextmanager
def interrupted(target: object, name: str, after: int) -> Iterator[None]:
    """The user presses Ctrl-C in the `after`-th call of a method."""
    original: Callable[..., object] = getattr(target, name)
    calls = iter(range(1, 1000))

    def call(*args: object, **kwargs: object) -> object:
        if next(calls) == after:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    with mock.patch.object(target, name, call), pytest.raises(KeyboardInterrupt):
        yield


@pytest.mark.parametrize("after", [1, 2, 5])
@pytest.mark.parametrize("where", ["schedule", "execute", "logits", "update"])
def test_an_interrupted_generate_leaves_the_engine_usable(llm: LLM, where: str, after: int) -> None:
    """Its requests are gone, and nothing that it promised to compute is found by the next ones."""
    engine = llm.engine
    targets = {
        "schedule": engine.scheduler,
        "execute": engine.model_runner,
        "logits": engine.model_runner.model,
        "update": engine.scheduler,
    }
    with interrupted(targets[where], where, after):
        llm.generate(PROMPTS)
    assert idle(llm)
    outputs = llm.generate([*PROMPTS, PROMPTS[0]])
    for output in outputs:
        assert output.token_ids == greedy(make_decoder(), output.prompt_token_ids, 16)


def test_an_interrupted_generate_does_not_hurt_a_stream(llm: LLM) -> None:
    stream = llm.stream([1, 2, 3])
    next(stream)
    with interrupted(llm.engine.model_runner, "execute", 2):
        llm.generate("the cat")
    assert list(stream)[-1].token_ids == greedy(make_decoder(), [1, 2, 3], 16)


def test_an_interrupt_while_requests_are_entered_leaves_none_behind(llm: LLM) -> None:
    with interrupted(llm.engine, "add_request", 3):
        llm.generate(PROMPTS)
    assert idle(llm)


def test_an_interrupt_while_requests_are_entered_does_not_end_somebody_elses(llm: LLM) -> None:
    """The first one was refused because its id is a running stream's; that stream has done nothing wrong."""
    stream = llm.stream([1, 2, 3], request_ids=["mine"])
    next(stream)
    with interrupted(llm.engine, "add_request", 2):
        llm.generate([[4], [5]], request_ids=["mine", "other"])
    assert list(stream)[-1].token_ids == greedy(make_decoder(), [1, 2, 3], 16)


def test_an_interrupt_while_a_step_is_planned_leaves_no_false_promises(llm: LLM) -> None:
    """By then the first request's blocks are published, and its step will never run."""
    prompts = [numbers(1, 9), [1, 2, 3]]
    with interrupted(llm.engine.kv_cache_manager, "allocate_slots", 2):
        llm.generate(prompts)
    assert idle(llm)
    assert llm.generate(prompts[0])[0].token_ids == greedy(make_decoder(), prompts[0], 16)


@pytest.mark.parametrize("max_tokens", [2, 6])
def test_an_interrupt_after_a_step_loses_no_token(llm: LLM, max_tokens: int) -> None:
    """Ctrl-C in `end_step`, where a recorder takes its snapshot: the step's tokens are in the requests already."""
    stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=max_tokens))
    next(stream)
    observer = llm.engine.observer = mock.Mock()
    observer.end_step.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate([4, 5])
    llm.engine.observer = None
    assert list(stream)[-1].token_ids == greedy(make_decoder(), [1, 2, 3], max_tokens)
