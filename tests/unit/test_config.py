"""Options: an unknown one names its near match, an impossible one says what would be possible."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from refengine.config import EngineConfig
from refengine.errors import ConfigError, RefengineError
from refengine.sampling import SamplingParams


def sentence(make: Any, *arguments: Any, **options: Any) -> str:
    """What the refusal says, in one line."""
    with pytest.raises(ConfigError) as caught:
        make(*arguments, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"block_siez": 8}, "EngineConfig has no option 'block_siez'; did you mean 'block_size'?"),
        ({"zzz": 8}, "EngineConfig has no option 'zzz'"),
        ({"mode": "fix"}, "mode 'fix' is not one of fixed, faithful; did you mean 'fixed'?"),
        (
            {"dtype": "float61"},
            "dtype 'float61' is not one of float32, bfloat16, float16; did you mean 'float16'?",
        ),
        ({"policy": "prio"}, "policy 'prio' is not one of fcfs, priority; did you mean 'priority'?"),
        ({"block_size": 0}, "block_size must be a number of at least 1, not 0"),
        ({"block_size": "16"}, "block_size must be a number of at least 1, not '16'"),
        ({"block_size": True}, "block_size must be a number of at least 1, not True"),
        ({"num_blocks": 1}, "num_blocks must be a number of at least 2, not 1"),
        ({"kv_cache_bytes": -5}, "kv_cache_bytes must be a number of at least 1, not -5"),
        ({"max_model_len": 0}, "max_model_len must be a number of at least 1, not 0"),
        ({"max_num_seqs": 0}, "max_num_seqs must be a number of at least 1, not 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be a number of at least 1, not 0"),
        (
            {"long_prefill_token_threshold": -1},
            "long_prefill_token_threshold must be a number of at least 0, not -1",
        ),
        ({"watermark": -0.1}, "watermark must be a number of at least 0, not -0.1"),
        ({"watermark": 1.0}, "watermark 1.0 would keep every block free; it must be below 1"),
    ],
    ids=str,
)
def test_engine_options(options: dict[str, Any], expected: str) -> None:
    assert sentence(EngineConfig, **options) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 1.5},
        {"num_blocks": 2.5},
        {"max_num_seqs": 2.5},
        {"max_num_batched_tokens": float("inf")},
        {"max_model_len": 10.0},
        {"block_size": None},
        {"max_num_seqs": None},
        {"max_num_batched_tokens": None},
        {"kv_cache_bytes": "1"},
        {"gpu_memory_utilization": None},
        {"cuda_graphs": 1},
        {"long_prefill_token_threshold": None},
        {"watermark": None},
        {"watermark": float("nan")},
        {"enable_prefix_caching": "no"},
        {"enable_chunked_prefill": None},
        {"seed": "0"},
        {"hash_seed": 7},
        {"engine": ["v1"]},
        {"policy": None},
    ],
    ids=str,
)
def test_options_of_the_wrong_kind_are_refused_at_once(options: dict[str, Any]) -> None:
    """Not silently, and not by a TypeError in the middle of the first step."""
    assert next(iter(options)) in sentence(EngineConfig, **options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temprature": 1.0}, "SamplingParams has no option 'temprature'; did you mean 'temperature'?"),
        ({"temperature": -1}, "temperature must be a number of at least 0, not -1"),
        ({"temperature": float("inf")}, "temperature must be a finite number, not inf"),
        ({"top_k": -1}, "top_k must be a number of at least 0, not -1"),
        ({"top_k": 1.5}, "top_k must be a whole number, not 1.5"),
        ({"top_p": 0}, "top_p must be above 0 and at most 1, not 0"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1, not 1.1"),
        ({"max_tokens": 0}, "max_tokens must be a number of at least 1, not 0"),
        ({"seed": 1.0}, "seed must be a whole number, not 1.0"),
        ({"stop": ""}, "stop must be texts of at least one character, not ''"),
        ({"stop": ["a", 5]}, "stop must be texts of at least one character, not ['a', 5]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be token ids, not [-1]"),
        ({"logprobs": -1}, "logprobs must be a number of at least 0, not -1"),
    ],
    ids=str,
)
def test_sampling_options(options: dict[str, Any], expected: str) -> None:
    assert sentence(SamplingParams, **options) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": None},
        {"temperature": None},
        {"top_k": None},
        {"top_p": None},
        {"temperature": float("nan")},
        {"stop": None},
        {"stop_token_ids": None},
        {"stop_token_ids": 5},
        {"ignore_eos": "yes"},
    ],
    ids=str,
)
def test_sampling_options_of_the_wrong_kind_are_refused_at_once(options: dict[str, Any]) -> None:
    assert next(iter(options)) in sentence(SamplingParams, **options)


def test_an_unknown_engine_is_refused() -> None:
    assert sentence(EngineConfig, engine="v2").startswith("engine 'v2' is not one of ")


def test_options_do_not_change_after_construction() -> None:
    for options in (EngineConfig(), SamplingParams()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            options.seed = 1  # type: ignore[misc]


def test_stop_texts_become_tuples() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[1, 2]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)


def test_a_config_error_is_a_value_error_of_this_package() -> None:
    """So that callers may catch it as either."""
    assert issubclass(ConfigError, RefengineError) and issubclass(ConfigError, ValueError)


def test_a_window_is_v0s_option() -> None:
    EngineConfig(engine="v0", sliding_window=4)
    with pytest.raises(ConfigError, match="sliding_window is V0's option"):
        EngineConfig(sliding_window=4)
