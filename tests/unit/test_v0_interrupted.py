"""V0 and Ctrl-C at any moment of a step: the engine stays usable, and nothing it promised to compute is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from refengine import LLM, SamplingParams
from refengine.v0.engine import LLMEngine
from tests.unit.helpers import numbers
from tests.unit.models import greedy, limit_steps, make_decoder
from tests.unit.test_llm import PROMPTS
from tests.unit.test_llm_interrupted import interrupted
from tests.unit.test_v0_engine import make, run

CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "chunked": {"enable_chunked_prefill": True, "max_num_batched_tokens": 8},
    "swap": {"num_blocks": 10, "num_cpu_blocks": 40, "preemption_mode": "swap"},
}


@pytest.fixture(params=CONFIGS)
def v0(model_dir: Path, request: pytest.FixtureRequest) -> LLM:
    options = {"enable_chunked_prefill": False, "num_blocks": 64} | CONFIGS[request.param]
    return limit_steps(LLM(str(model_dir), engine="v0", block_size=4, check_integrity=True, **options))


def engine_of(llm: LLM) -> LLMEngine:
    assert isinstance(llm.engine, LLMEngine)
    return llm.engine


def idle(llm: LLM) -> bool:
    """Nothing is left of any request."""
    engine = engine_of(llm)
    manager, allocator = engine.block_manager, engine.block_manager.allocator
    manager.check_integrity()
    all_free = all(on.num_free_blocks == on.num_blocks for on in (allocator.gpu, allocator.cpu))
    return all_free and not (
        engine.has_unfinished_requests or engine.scheduler.has_unfinished or manager.tables
    )


@pytest.mark.parametrize("after", [1, 2, 5])
@pytest.mark.parametrize("where", ["schedule", "execute", "_move_blocks", "logits", "_update", "_stop"])
def test_an_interrupted_generate_leaves_the_engine_usable(v0: LLM, where: str, after: int) -> None:
    """Its requests are gone, and nothing that it promised to compute is found by the next ones."""
    engine = engine_of(v0)
    targets = {
        "schedule": engine.scheduler,
        "execute": engine.worker,
        "_move_blocks": engine.worker,
        "logits": engine.worker.model,
        "_update": engine,
        "_stop": engine,
    }
    with interrupted(targets[where], where, after):
        v0.generate(PROMPTS)
    assert idle(v0)
    for output in v0.generate([*PROMPTS, PROMPTS[0]]):
        assert output.token_ids == greedy(make_decoder(), output.prompt_token_ids, 16)


@pytest.mark.parametrize("where", ["execute", "_update", "_stop"])
def test_an_interrupted_generate_does_not_hurt_a_stream(v0: LLM, where: str) -> None:
    """Misconception: "a step that failed has told nobody". A token that has joined must be told, or be taken back."""
    stream = v0.stream([1, 2, 3])
    next(stream)
    engine = engine_of(v0)
    with interrupted(engine.worker if where == "execute" else engine, where, 2):
        v0.generate("the cat")
    assert list(stream)[-1].token_ids == greedy(make_decoder(), [1, 2, 3], 16)


@pytest.mark.parametrize(
    ("where", "after"),
    [("allocate", 2), ("can_allocate", 2), ("append_slots", 2), ("mark_blocks_as_computed", 2)],
)
def test_an_interrupt_while_a_step_is_planned_loses_nobody(v0: LLM, where: str, after: int) -> None:
    """By then the first request has its blocks, and stands in no queue."""
    prompts = [numbers(1, 9), [1, 2, 3]]
    with interrupted(engine_of(v0).block_manager, where, after):
        v0.generate(prompts)
    assert idle(v0)
    assert v0.generate(prompts[0])[0].token_ids == greedy(make_decoder(), prompts[0], 16)


@pytest.mark.parametrize("where", ["allocate", "append_slots", "mark_blocks_as_computed"])
def test_an_interrupt_while_a_step_is_planned_does_not_hurt_a_stream(v0: LLM, where: str) -> None:
    stream = v0.stream([1, 2, 3])
    next(stream)
    with interrupted(engine_of(v0).block_manager, where, 1):
        v0.generate("the cat")
    assert list(stream)[-1].token_ids == greedy(make_decoder(), [1, 2, 3], 16)


@pytest.mark.parametrize("max_tokens", [2, 6])
def test_an_interrupt_after_a_step_loses_no_token(v0: LLM, max_tokens: int) -> None:
    """Ctrl-C in `end_step`, where a recorder takes its snapshot: the step's tokens are in the requests already."""
    stream = v0.stream([1, 2, 3], SamplingParams(max_tokens=max_tokens))
    next(stream)
    observer = v0.engine.observer = mock.Mock()
    observer.end_step.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        v0.generate([4, 5])
    v0.engine.observer = None
    assert list(stream)[-1].token_ids == greedy(make_decoder(), [1, 2, 3], max_tokens)


def test_leaving_a_stream_early_aborts(v0: LLM) -> None:
    stream = v0.stream(PROMPTS)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert idle(v0)


def failing_step(engine: LLMEngine, name: str = "logits") -> None:
    target = engine.worker.model if name == "logits" else engine.worker
    with interrupted(target, name, 1):
        engine.step()


def test_what_a_failed_step_was_to_compute_is_computed_again() -> None:
    """Misconception: "a step that broke down is over". Its blocks are taken, and count as computed."""
    engine = make()
    prompts = {"A": numbers(1, 9), "B": [*numbers(1, 8), 30]}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, SamplingParams(max_tokens=4))
    failing_step(engine)
    assert engine.block_manager.tables == {}
    assert run(engine) == {name: greedy(engine.worker.model, prompt, 4) for name, prompt in prompts.items()}


def test_swaps_of_a_failed_step_are_not_trusted() -> None:
    """Misconception: "swapped out is safe". The step failed before its copies were made."""
    engine = make(num_blocks=6, num_cpu_blocks=12, preemption_mode="swap")
    prompts = {"A": numbers(1, 9), "B": numbers(11, 19)}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, SamplingParams(max_tokens=8))
    told: dict[str, list[int]] = {"A": [], "B": []}
    failed = False
    for _ in range(100):
        swap_out = mock.Mock(side_effect=KeyboardInterrupt)
        plan = engine.scheduler.schedule

        def schedule(now: float, plan: Any = plan, swap_out: Any = swap_out) -> Any:
            metadata, out = plan(now)
            if out.blocks_to_swap_out:
                engine.worker._move_blocks = swap_out  # type: ignore[method-assign]
            return metadata, out

        with mock.patch.object(engine.scheduler, "schedule", schedule):
            try:
                for step in engine.step():
                    told[step.request_id] += step.token_ids
            except KeyboardInterrupt:
                failed = True
                del engine.worker._move_blocks
        if not engine.has_unfinished_requests or failed:
            break
    assert failed
    for request_id, token_ids in run(engine).items():
        told[request_id] += token_ids
    assert told == {name: greedy(engine.worker.model, prompt, 8) for name, prompt in prompts.items()}


def test_who_was_ignored_in_a_failed_step_is_still_told() -> None:
    """Misconception: "an ignored request needs no step". Its caller waits for the word."""
    engine = make(num_blocks=10, watermark=0.5)
    engine.add_request("never", numbers(1, 28), SamplingParams(max_tokens=1))
    engine.add_request("A", [1, 2, 3], SamplingParams(max_tokens=2))
    failing_step(engine)
    told = {step.request_id: step.finish_reason for _ in range(3) for step in engine.step()}
    assert told == {"never": "ignored", "A": "length"}
    assert not engine.has_unfinished_requests
