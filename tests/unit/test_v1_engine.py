"""The whole V1 engine on a random model: whatever it skips, shares, cuts or preempts, the tokens stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from refengine.config import EngineConfig
from refengine.errors import ConfigError
from refengine.sampling import SamplingParams
from refengine.v1.engine import EngineCore
from tests.unit.helpers import Marks, numbers
from tests.unit.models import greedy, make_decoder, make_engine, run, serve

PROMPTS = {
    "short": [3],
    "block": numbers(1, 4),
    "long": [*numbers(5, 30), *numbers(1, 7)],
    "shared": [*numbers(5, 30), 2, 9],
    "again": [*numbers(5, 30), 2, 9],
}


def expected(max_tokens: int = 6) -> dict[str, list[int]]:
    decoder = make_decoder()
    return {name: greedy(decoder, prompt, max_tokens) for name, prompt in PROMPTS.items()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 5},
        {"max_num_seqs": 2},
        {"block_size": 1},
        {"block_size": 16, "num_blocks": 10},
        {"num_blocks": 11},
        {"num_blocks": 11, "reserve_full_sequence": False, "max_num_batched_tokens": 7},
        {"num_blocks": 11, "policy": "priority"},
        {"long_prefill_token_threshold": 3, "watermark": 0.1},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 128},
        {"hash_algorithm": "xxhash_cbor", "hash_seed": None},
    ],
    ids=str,
)
def test_options_never_change_the_tokens(options: dict[str, object]) -> None:
    engine = make_engine(**options)
    assert serve(engine, PROMPTS) == expected()
    assert serve(engine, PROMPTS) == expected(), "a second time, with everything cached"
    assert engine.kv_cache_manager.usage == 0.0


def test_preemption_happens_in_the_tight_configuration() -> None:
    """Otherwise the test above would not test what it says."""
    marks = Marks()
    engine = make_engine(num_blocks=11, observer=marks)
    for name in ("A", "B"):
        engine.add_request(name, [ord(name) % 20, *numbers(1, 15)], SamplingParams(max_tokens=16))
    tokens = run(engine)
    assert any(facts["reason"].startswith("preempted") for facts in marks.of("admit"))
    for name in ("A", "B"):
        assert tokens[name] == greedy(make_decoder(), [ord(name) % 20, *numbers(1, 15)], 16)


def test_s06_sharing_in_the_same_step_gives_right_tokens() -> None:
    """S06, V1. It is safe since within a layer the whole step is written before anything is read."""
    engine = make_engine()
    prompts = {"A": [*numbers(1, 8), 9], "B": [*numbers(1, 8), 10]}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, SamplingParams(max_tokens=6))
    first = {step.request_id: step for step in engine.step()}
    assert (first["A"].num_cached_tokens, first["B"].num_cached_tokens) == (0, 8)
    rest = run(engine)
    for name, prompt in prompts.items():
        assert first[name].token_ids + rest[name] == greedy(make_decoder(), prompt)


def test_s01_a_cached_prompt_gives_the_same_tokens() -> None:
    engine = make_engine()
    prompt = numbers(1, 8)
    assert serve(engine, {"A": prompt}) == {"A": greedy(make_decoder(), prompt)}
    engine.add_request("B", prompt, SamplingParams(max_tokens=6))
    (step,) = engine.step()
    assert step.num_cached_tokens == 4
    assert step.token_ids + run(engine)["B"] == greedy(make_decoder(), prompt)


def test_the_end_token_and_its_absence() -> None:
    tokens = greedy(make_decoder(), [3], 6)
    engine = make_engine(eos=[tokens[2]])
    stop = tokens.index(tokens[2]) + 1
    engine.add_request("A", [3], SamplingParams(max_tokens=6))
    engine.add_request("B", [3], SamplingParams(max_tokens=6, ignore_eos=True))
    assert run(engine) == {"A": tokens[:stop], "B": tokens}


def test_a_request_ends_with_its_reason() -> None:
    engine = make_engine()
    engine.add_request("A", [3], SamplingParams(max_tokens=1))
    (step,) = engine.step()
    assert (step.finish_reason, step.stop_reason, len(step.token_ids)) == ("length", None, 1)
    engine.add_request("B", [3], SamplingParams(stop_token_ids=(step.token_ids[0],)))
    (step,) = engine.step()
    assert (step.finish_reason, step.stop_reason) == ("stop", step.token_ids[0])


def test_the_six_marks_of_a_step() -> None:
    marks = Marks()
    engine = make_engine(observer=marks)
    engine.add_request("A", numbers(1, 5), SamplingParams(max_tokens=1))
    engine.step()
    kinds = [kind for kind, _, _ in marks.all]
    assert kinds == ["lookup", "admit", "allocate", "publish", "run", "append"]
    assert marks.num_steps == 1
    assert marks.pool.cached == [1]
    assert sorted(marks.pool.free) == numbers(1, 64)


def test_the_more_important_request_is_served_first() -> None:
    engine = make_engine(policy="priority", max_num_seqs=1)
    engine.add_request("low", [1, 2], SamplingParams(max_tokens=2), priority=9)
    engine.add_request("high", [3, 4], SamplingParams(max_tokens=2), priority=1)
    served = [step.request_id for _ in range(4) for step in engine.step()]
    assert served == ["high", "high", "low", "low"]


def test_reset_waits_for_the_last_request() -> None:
    engine = make_engine()
    engine.add_request("A", numbers(1, 8), SamplingParams())
    engine.step()
    assert engine.reset_prefix_cache() is False
    engine.finish("A")
    assert engine.reset_prefix_cache() is True


def test_aborting_at_any_moment_frees_everything() -> None:
    engine = make_engine()
    engine.finish("nobody")
    engine.add_request("A", numbers(1, 8), SamplingParams())
    engine.finish("A")
    assert not engine.has_unfinished_requests
    engine.add_request("A", numbers(1, 8), SamplingParams())
    engine.step()
    engine.finish("A")
    assert engine.step() == []
    assert engine.kv_cache_manager.usage == 0.0
    assert serve(engine, {"A": numbers(1, 8)}) == {"A": greedy(make_decoder(), numbers(1, 8))}


def test_a_seed_does_not_depend_on_the_row() -> None:
    """Misconception: "the generator belongs to the row"."""
    params = {"temperature": 1.0, "seed": 7, "max_tokens": 9}
    alone = serve(make_engine(), {"A": [1, 2, 3]}, **params)
    assert serve(make_engine(), {"B": [4], "A": [1, 2, 3]}, **params)["A"] == alone["A"]


# When the model does not come back


@contextmanager
def interrupted(engine: EngineCore, error: type[BaseException] = KeyboardInterrupt) -> Iterator[None]:
    """The second layer raises: by then the step is planned, and nothing after the first layer is written."""
    layer = engine.model_runner.model.layers[1]
    with mock.patch.object(type(layer), "forward", side_effect=error), pytest.raises(error):
        yield


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_step_leaves_no_false_promises(error: type[BaseException]) -> None:
    """Misconception: "published is computed". The step's blocks were published when it was planned.

    Whoever asks for the same prefix later must not find K/V that were never written.
    """
    engine = make_engine()
    engine.add_request("A", numbers(1, 9), SamplingParams(max_tokens=6))
    with interrupted(engine, error):
        engine.step()
    engine.finish("A")
    engine.scheduler.check_integrity()
    assert serve(engine, {"B": numbers(1, 9)}) == {"B": greedy(make_decoder(), numbers(1, 9))}


def test_an_interrupted_step_can_be_repeated() -> None:
    """Whoever was running and is not to blame goes on as if nothing had happened."""
    engine = make_engine()
    engine.add_request("A", numbers(1, 9), SamplingParams(max_tokens=6))
    first = [step.token_ids for step in engine.step()]
    engine.add_request("B", numbers(1, 12), SamplingParams(max_tokens=6))
    with interrupted(engine):
        engine.step()
    engine.scheduler.check_integrity()
    tokens = run(engine)
    assert first[0] + tokens["A"] == greedy(make_decoder(), numbers(1, 9))
    assert tokens["B"] == greedy(make_decoder(), numbers(1, 12))


# Options that do not fit the model


def test_a_model_is_not_stretched() -> None:
    with pytest.raises(ConfigError) as caught:
        make_engine(max_model_len=129)
    assert str(caught.value) == "max_model_len 129 is beyond what the model was made for, 128 tokens"


def test_without_chunking_a_step_must_hold_the_longest_prompt() -> None:
    with pytest.raises(ConfigError) as caught:
        make_engine(enable_chunked_prefill=False, max_num_batched_tokens=127)
    assert str(caught.value) == (
        "without chunked prefill a prompt must fit in one step: max_num_batched_tokens 127 is below "
        "max_model_len 128"
    )


def test_a_cache_without_room_is_refused() -> None:
    config = EngineConfig(kv_cache_bytes=1000)
    with pytest.raises(
        ConfigError, match="kv_cache_bytes 1000 has room for 0 blocks of 4096 bytes; 2 are the least"
    ):
        EngineCore(config, make_decoder())


def test_the_cache_takes_as_many_blocks_as_fit() -> None:
    engine = EngineCore(EngineConfig(kv_cache_bytes=10 * 4096 + 1), make_decoder())
    assert engine.num_blocks == 10
    assert engine.model_runner.kv_cache.layers[0][0].shape == torch.Size((10, 16, 2, 8))
