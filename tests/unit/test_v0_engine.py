"""The whole V0 engine on a random model: whatever it skips, shares, cuts, swaps or preempts, the tokens stay the same.

Cases S01 and S06 of the shared set, end to end.
"""

from __future__ import annotations

from typing import Any

import pytest

from refengine.config import EngineConfig
from refengine.errors import ConfigError, RequestError
from refengine.model.decoder import Decoder
from refengine.sampling import SamplingParams
from refengine.v0.engine import LLMEngine
from tests.unit import helpers
from tests.unit.helpers import Marks, numbers
from tests.unit.models import greedy, make_decoder
from tests.unit.test_v1_engine import PROMPTS, expected


def make(decoder: Decoder | None = None, observer: Any = None, **options: Any) -> LLMEngine:
    """Without chunked prefill, unless `options` say otherwise."""
    defaults = {
        "engine": "v0",
        "block_size": 4,
        "num_blocks": 64,
        "enable_chunked_prefill": False,
        "check_integrity": helpers.CHECK_INTEGRITY,
    }
    all_options: dict[str, Any] = defaults | options
    return LLMEngine(EngineConfig(**all_options), decoder or make_decoder(), (), observer)


def run(engine: LLMEngine, limit: int = 500) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for _ in range(limit):
        if not engine.has_unfinished_requests:
            return tokens
        for step in engine.step():
            tokens.setdefault(step.request_id, []).extend(step.token_ids)
    raise AssertionError(f"the engine did not come to an end within {limit} steps")


def serve(engine: LLMEngine, prompts: dict[str, list[int]], **params: Any) -> dict[str, list[int]]:
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, SamplingParams(**({"max_tokens": 6} | params)))
    return run(engine)


CHUNKED = {"enable_chunked_prefill": True}
SWAP = {"num_blocks": 12, "num_cpu_blocks": 40, "preemption_mode": "swap"}


@pytest.mark.parametrize("mode", ["fixed", "faithful"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_prefix_caching": False},
        {"max_num_seqs": 2},
        {"block_size": 1},
        {"block_size": 16, "num_blocks": 10},
        {"num_blocks": 12, "enable_prefix_caching": False},
        {**SWAP, "enable_prefix_caching": False},
        {"policy": "priority"},
        {**CHUNKED, "max_num_batched_tokens": 5, "enable_prefix_caching": False},
        {**CHUNKED, "watermark": 0.1},
    ],
    ids=str,
)
def test_options_never_change_the_tokens(options: dict[str, object], mode: str) -> None:
    engine = make(mode=mode, **options)
    assert serve(engine, PROMPTS) == expected()
    assert serve(engine, PROMPTS) == expected(), "a second time, with everything cached"
    assert engine.block_manager.tables == {}


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 12},
        SWAP,
        {**SWAP, "num_cpu_blocks": 3},
        {**CHUNKED, "max_num_batched_tokens": 5},
        {
            **CHUNKED,
            "max_num_batched_tokens": 8,
            "max_num_partial_prefills": 2,
            "max_long_partial_prefills": 2,
        },
        {**CHUNKED, "max_num_batched_tokens": 8, "num_blocks": 12},
        {**CHUNKED, **SWAP, "max_num_batched_tokens": 8},
    ],
    ids=str,
)
def test_options_that_faithful_does_not_survive(options: dict[str, object]) -> None:
    engine = make(**options)
    for _ in range(2):
        assert serve(engine, PROMPTS) == expected()


def test_s01_a_full_hit_runs_one_token_and_answers() -> None:
    """S01. Misconception: "nothing is left to run". Query length 1, context length 7."""
    marks = Marks()
    engine = make(observer=marks)
    prompt = {"A": numbers(1, 8)}
    first = serve(engine, prompt, max_tokens=1)
    assert serve(engine, {"B": prompt["A"]}, max_tokens=1) == {"B": first["A"]}
    assert marks.of("run", "B") == [{"start": 7, "num_tokens": 1}]


def test_s06_the_twin_of_a_step_computes_everything_once_more() -> None:
    """S06. Misconception: "shared is skipped". Only the step after may skip."""
    marks = Marks()
    engine = make(observer=marks)
    prompts = {"A": [*numbers(1, 8), 9], "B": [*numbers(1, 8), 10]}
    assert serve(engine, prompts, max_tokens=1) == {
        n: greedy(engine.worker.model, p, 1) for n, p in prompts.items()
    }
    assert [facts["num_tokens"] for facts in marks.of("run")] == [9, 9]
    assert marks.of("allocate", "B")[0]["block_ids"] == [[0, 1, 3]]


def test_the_six_marks_of_a_step_come_in_order() -> None:
    marks = Marks()
    serve(make(observer=marks), {"A": numbers(1, 8)}, max_tokens=1)
    assert [kind for kind, _, _ in marks.all] == ["lookup", "admit", "allocate", "publish", "run", "append"]
    assert marks.pool.tables == {}


def test_cached_tokens_are_reported_as_at_the_first_admission() -> None:
    engine = make()
    serve(engine, {"A": numbers(1, 8)}, max_tokens=1)
    engine.add_request("B", numbers(1, 9), SamplingParams(max_tokens=2))
    assert [step.num_cached_tokens for _ in range(2) for step in engine.step()] == [8, 8]


@pytest.mark.parametrize("options", [{}, CHUNKED, {"enable_prefix_caching": False}], ids=str)
def test_prompt_scores_do_not_depend_on_a_hit(options: dict[str, object]) -> None:
    """Misconception: "a hit has its scores too". Whoever wants them has to compute the whole prompt."""
    engine, scores = make(**options), []
    for name in ("cold", "warm"):
        engine.add_request(name, numbers(1, 11), SamplingParams(max_tokens=1, prompt_logprobs=0))
        (step,) = engine.step()
        assert step.prompt_logprobs is not None
        first, found = step.prompt_logprobs
        assert (first, len(found)) == (1, 10), name
        scores.append([score[token].logprob for score, token in zip(found, numbers(2, 11), strict=True)])
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


def test_an_aborted_request_leaves_the_others_alone() -> None:
    engine = make()
    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt, SamplingParams(max_tokens=6))
    engine.step()
    engine.finish("long")
    engine.finish("never there")
    told = run(engine)
    assert "long" not in told
    assert told["again"] == expected()["again"][1:]


def test_a_request_that_could_never_be_served_changes_nothing() -> None:
    engine = make(num_blocks=4)
    for prompt, reason in (([], "empty"), ([999], "vocabulary"), (numbers(1, 20), "can never fit")):
        with pytest.raises(RequestError, match=reason):
            engine.add_request("A", prompt, SamplingParams(max_tokens=6))
    with pytest.raises(RequestError, match="neither cache salts nor KV events"):
        engine.add_request("A", [1], SamplingParams(), cache_salt="X")
    assert not engine.has_unfinished_requests
    engine.add_request("A", [1], SamplingParams())
    with pytest.raises(RequestError, match="in use"):
        engine.add_request("A", [1], SamplingParams())


def test_what_can_never_be_admitted_is_told_as_ignored() -> None:
    """The watermark keeps blocks that this prompt would need: V0 finds out when it is its turn."""
    engine = make(num_blocks=10, watermark=0.5)
    engine.add_request("A", numbers(1, 28), SamplingParams(max_tokens=1))
    (step,) = engine.step()
    assert (step.request_id, step.token_ids, step.finish_reason) == ("A", [], "ignored")
    assert not engine.has_unfinished_requests


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"sliding_window": 8}, "no sliding-window layers"),
        ({"enable_kv_events": True}, "no KV events"),
        ({**CHUNKED, "max_num_batched_tokens": 3}, "below block_size 4"),
        ({"max_num_batched_tokens": 100}, "must fit in one step"),
    ],
)
def test_what_v0_cannot_do_is_refused(options: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make(**options)


def test_a_share_of_the_budget_below_a_block_is_refused() -> None:
    """Two prompts would get 4 tokens each, cut to whole blocks of 8: none, in every step, for ever."""
    with pytest.raises(ConfigError, match="max_num_partial_prefills"):
        make(
            **CHUNKED,
            block_size=8,
            max_num_batched_tokens=8,
            max_num_partial_prefills=2,
            max_long_partial_prefills=2,
        )


def test_a_reset_waits_until_nobody_runs() -> None:
    engine = make()
    engine.add_request("A", numbers(1, 8), SamplingParams(max_tokens=2))
    engine.step()
    assert not engine.reset_prefix_cache()
    run(engine)
    assert engine.reset_prefix_cache()
    engine.add_request("B", numbers(1, 8), SamplingParams(max_tokens=1))
    assert [step.num_cached_tokens for step in engine.step()] == [0]
