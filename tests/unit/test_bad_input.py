"""Bad input gets one clear sentence and leaves the engine as it was: the list of the design, row by row.

Damaged and foreign checkpoints are in test_loader.py, options of the wrong kind in test_config.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from refengine import LLM, ConfigError, RefengineError, RequestError, SamplingParams
from refengine.v1.scheduler import Scheduler
from refengine.v1.scheduler_output import SchedulerOutput
from tests.unit.models import MAX_MODEL_LEN, VOCAB_SIZE, greedy, limit_steps, make_decoder, save_model

GOOD = [1, 2, 3, 4, 5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return greedy(make_decoder(), GOOD, 4)


def state(llm: LLM) -> tuple[Any, ...]:
    """All that a refused request could have changed."""
    scheduler, pool = llm.engine.scheduler, llm.engine.kv_cache_manager.block_pool
    return (
        sorted(scheduler.requests),
        [request.request_id for request in scheduler.waiting],
        [request.request_id for request in scheduler.running],
        [block.block_id for block in pool.free_queue],
        [block.ref_count for block in pool.blocks],
        sorted(llm._processors),
    )


def still_serves(llm: LLM, expected: list[int]) -> None:
    llm.engine.scheduler.check_integrity()
    (output,) = llm.generate(GOOD, SamplingParams(max_tokens=4))
    assert output.token_ids == expected
    llm.engine.scheduler.check_integrity()


def refused(llm: LLM, call: Callable[[], Any], error: type[RefengineError] = RequestError) -> str:
    """The one sentence of a refusal, after a look that nothing has changed."""
    before = state(llm)
    with pytest.raises(error) as caught:
        call()
    assert state(llm) == before
    text = str(caught.value)
    assert "\n" not in text
    return text


EMPTY = "the prompt is empty; at least one token is needed to predict the next"
WRONG_TOKEN = f"is not in the vocabulary (0 to {VOCAB_SIZE - 1})"
WRONG_PROMPT = "a prompt is text or a list of token ids, not"
TOO_LONG = f"the prompt has 128 tokens, but prompt and output together are limited to {MAX_MODEL_LEN}"
PROMPTS: dict[str, tuple[Any, str]] = {
    "an empty list in a batch": ([[]], EMPTY),
    "an empty text": ("", EMPTY),
    "longer than the model": ([1] * 128, TOO_LONG),
    "too large a token": ([1, VOCAB_SIZE], f"token id {VOCAB_SIZE} {WRONG_TOKEN}"),
    "a negative token": ([1, -1], f"token id -1 {WRONG_TOKEN}"),
    "a boolean": ([1, True], f"token id True {WRONG_TOKEN}"),
    "a broken number": ([1, 2.5], f"token id 2.5 {WRONG_TOKEN}"),
    "a text among tokens": ([1, "a"], f"token id 'a' {WRONG_TOKEN}"),
    "a number among prompts": (["", 5], f"{WRONG_PROMPT} int"),
    "nothing among prompts": ([None], f"{WRONG_PROMPT} NoneType"),
    "a set among prompts": ([{1, 2}], f"{WRONG_PROMPT} set"),
    "bytes among prompts": ([b"abc"], f"{WRONG_PROMPT} bytes"),
    "bytes": (b"abc", f"{WRONG_PROMPT} bytes"),
    "nothing": (None, f"{WRONG_PROMPT} NoneType"),
    "a number": (5, f"{WRONG_PROMPT} int"),
    "a dictionary": ({"prompt": "a"}, f"{WRONG_PROMPT} dict"),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_a_bad_prompt(llm: LLM, expected: list[int], name: str) -> None:
    """In a list of prompts it fails alone, otherwise it raises; the sentence is the same."""
    prompt, reason = PROMPTS[name]
    before = state(llm)
    try:
        error = llm.generate(prompt)[-1].error
    except RequestError as raised:
        error = raised
    assert error is not None and error.reason == reason
    assert str(error) == f"request {error.request_id!r}: {reason}"
    assert state(llm) == before
    still_serves(llm, expected)


def test_a_text_that_is_no_unicode(llm: LLM, expected: list[int]) -> None:
    """Half of a surrogate pair, as a badly cut text has it: nothing can encode it."""
    text = refused(llm, lambda: llm.generate("the \ud800 cat", request_ids=["t"]))
    assert text.startswith("request 't': ")
    still_serves(llm, expected)


def test_a_request_that_can_never_fit(model_dir: Path) -> None:
    llm = LLM(str(model_dir), block_size=4, num_blocks=4)
    text = refused(llm, lambda: llm.generate([1] * 10, SamplingParams(max_tokens=4), request_ids=["big"]))
    assert text == (
        "request 'big': it can never fit: 10 prompt tokens and up to 4 more need 4 blocks, and the whole cache has 3"
    )
    (output,) = llm.generate([1] * 10, SamplingParams(max_tokens=3))
    assert len(output.token_ids) == 3, "12 tokens have slots, and the last one sampled needs none"


def test_an_id_in_use(llm: LLM, expected: list[int]) -> None:
    stream = llm.stream(GOOD, SamplingParams(max_tokens=4), request_ids=["mine"])
    next(stream)
    text = refused(llm, lambda: llm.generate([1, 2], request_ids=["mine"]))
    assert text == "request 'mine': the id is in use by an unfinished request"
    assert list(stream)[-1].token_ids == expected
    (output,) = llm.generate(GOOD, SamplingParams(max_tokens=4), request_ids=["mine"])
    assert output.token_ids == expected, "a finished request's id may be used again"


def test_the_same_id_twice_in_a_batch(llm: LLM, expected: list[int]) -> None:
    first, second = llm.generate([GOOD, [1, 2]], SamplingParams(max_tokens=4), request_ids=["x", "x"])
    assert first.token_ids == expected
    assert str(second.error) == "request 'x': the id is in use by an unfinished request"


def test_a_bad_request_in_a_batch_fails_alone(llm: LLM, expected: list[int]) -> None:
    """It is named by its id, its neighbours are served, and its answer cannot be mistaken for an empty one."""
    names = ["good", "long", "alien", "text"]
    prompts = [GOOD, [1] * 200, [99], "the cat"]
    outputs = dict(
        zip(names, llm.generate(prompts, SamplingParams(max_tokens=4), request_ids=names), strict=True)
    )
    assert [name for name, output in outputs.items() if output.error is not None] == ["long", "alien"]
    assert outputs["good"].token_ids == expected
    assert len(outputs["text"].token_ids) == 4
    assert str(outputs["alien"].error) == "request 'alien': token id 99 is not in the vocabulary (0 to 35)"
    with pytest.raises(RequestError, match="request 'alien'"):
        _ = outputs["alien"].text
    assert outputs["alien"].token_ids == []
    still_serves(llm, expected)


def test_text_without_a_tokenizer(tmp_path: Path, expected: list[int]) -> None:
    llm = LLM(str(save_model(tmp_path / "bare", with_tokenizer=False)), num_blocks=65)
    text = refused(llm, lambda: llm.generate("hello", request_ids=["t"]))
    assert text == "request 't': the model came without a tokenizer, so a prompt must be token ids"
    still_serves(llm, expected)


def test_a_stop_text_without_a_tokenizer(tmp_path: Path, expected: list[int]) -> None:
    """There is no text to find it in: it must not be dropped silently."""
    llm = LLM(str(save_model(tmp_path / "bare", with_tokenizer=False)), num_blocks=65)
    text = refused(llm, lambda: llm.generate(GOOD, SamplingParams(stop="end"), request_ids=["t"]))
    assert text.startswith("request 't': ") and "stop" in text and "tokenizer" in text
    still_serves(llm, expected)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"params": [SamplingParams()]}, "1 params for 2 prompts; give one for each"),
        ({"params": []}, "0 params for 2 prompts; give one for each"),
        ({"request_ids": ["a"]}, "1 request_ids for 2 prompts; give one for each"),
        ({"request_ids": []}, "0 request_ids for 2 prompts; give one for each"),
    ],
    ids=str,
)
def test_lists_of_another_length(
    llm: LLM, expected: list[int], options: dict[str, Any], sentence: str
) -> None:
    assert refused(llm, lambda: llm.generate([[1], [2]], **options), ConfigError) == sentence
    still_serves(llm, expected)


def test_params_that_are_no_params(llm: LLM, expected: list[int]) -> None:
    for wrong in (5, "greedy", {"max_tokens": 5}):
        text = refused(llm, lambda wrong=wrong: llm.generate(GOOD, wrong), ConfigError)  # type: ignore[misc]
        assert "params" in text and "SamplingParams" in text
    still_serves(llm, expected)


def test_params_of_the_wrong_kind(llm: LLM, expected: list[int]) -> None:
    text = refused(llm, lambda: llm.generate([[1], [2]], [SamplingParams(), {"max_tokens": 5}]), ConfigError)
    assert "params" in text and "dict" in text
    still_serves(llm, expected)


def test_an_unknown_request_option(llm: LLM, expected: list[int]) -> None:
    text = refused(llm, lambda: llm.generate([[1], [2]], cache_slat="x"), ConfigError)
    assert "cache_slat" in text and "did you mean 'cache_salt'?" in text
    still_serves(llm, expected)


@pytest.mark.parametrize(
    "options", [{"priority": "high"}, {"priority": None}, {"cache_salt": 5}, {"adapter": "x"}]
)
def test_request_options_of_the_wrong_kind(llm: LLM, expected: list[int], options: dict[str, Any]) -> None:
    """Not by a TypeError out of the middle of a step, when others are running."""
    text = refused(llm, lambda: llm.generate(GOOD, **options), RefengineError)
    assert next(iter(options)) in text
    still_serves(llm, expected)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_blokcs": 8}, "EngineConfig has no option 'num_blokcs'; did you mean 'num_blocks'?"),
        ({"device": "gpu"}, "device 'gpu' is not one that torch knows; use 'cpu' or 'cuda'"),
        ({"max_model_len": 999}, "max_model_len 999 is beyond what the model was made for, 128 tokens"),
        ({"kv_cache_bytes": 9}, "kv_cache_bytes 9 has room for 0 blocks of 4096 bytes; 2 are the least"),
        (
            {"parts": {"free_queu": int}},
            "there is no slot 'free_queu' for a part; did you mean 'free_queue'?",
        ),
    ],
    ids=str,
)
def test_an_impossible_engine(model_dir: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(str(model_dir), **options)
    assert str(caught.value).startswith(sentence)


def test_an_unknown_backend_is_refused_before_the_first_step(model_dir: Path) -> None:
    with pytest.raises((ConfigError, ValueError), match="there is no kernel backend 'abacus'"):
        LLM(str(model_dir), backend="abacus")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, so it cannot be missing")
def test_a_missing_gpu(model_dir: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(str(model_dir), device="cuda")
    assert str(caught.value) == (
        "device 'cuda' was asked for, but torch sees no CUDA GPU here; `refengine doctor` tells more"
    )


@pytest.mark.parametrize("device", ["meta", "mps", "xpu"])
def test_a_device_that_cannot_serve_is_refused(model_dir: Path, device: str) -> None:
    """torch knows these names; this engine has no kernels for them."""
    if device == "mps" and torch.backends.mps.is_available():
        pytest.skip("there is an mps device here")
    with pytest.raises(ConfigError, match=f"device '{device}'"):
        LLM(str(model_dir), device=device)


class Lazy(Scheduler):
    """A reader's scheduler that never schedules anything."""

    def schedule(self) -> SchedulerOutput:
        return SchedulerOutput()


def test_a_part_that_never_gets_done_does_not_loop_for_ever(model_dir: Path) -> None:
    llm = limit_steps(LLM(str(model_dir), num_blocks=65, parts={"scheduler": Lazy}))
    with pytest.raises(RefengineError, match="scheduler"):
        llm.generate(GOOD)


def test_no_prompts_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []
