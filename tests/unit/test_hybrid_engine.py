"""Models with windows and states through the engine: whatever is cached, the tokens and logits stay the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from refengine.config import EngineConfig
from refengine.errors import ConfigError, RequestError
from refengine.hashing import Adapter
from refengine.model.config import FULL_ATTENTION, LINEAR_ATTENTION, SLIDING_ATTENTION
from refengine.model.decoder import Decoder
from refengine.parts import load_parts
from refengine.sampling import SamplingParams
from refengine.v0.engine import LLMEngine
from refengine.v1.engine import EngineCore
from tests.unit.helpers import numbers
from tests.unit.hybrid_models import HYBRID, VOCAB_SIZE, greedy, make_hybrid, uncached_logits
from tests.unit.models import make_engine, serve

STEP_LIMIT = 1000
MIXTURES = {
    "all kinds": HYBRID,
    "windows only": (SLIDING_ATTENTION, SLIDING_ATTENTION),
    "windows and full": (SLIDING_ATTENTION, FULL_ATTENTION),
    "states and full": (LINEAR_ATTENTION, FULL_ATTENTION),
    "states only": (LINEAR_ATTENTION, LINEAR_ATTENTION),
}


def random_options(rng: random.Random) -> dict[str, Any]:
    return {
        "num_blocks": rng.choice([29, 32, 60]),
        "max_num_seqs": rng.choice([2, 4, 8]),
        "max_num_batched_tokens": rng.choice([8, 16, 64]),
        "long_prefill_token_threshold": rng.choice([0, 0, 5]),
        "prefix_cache_retention_interval": rng.choice([None, 0, 4, 8]),
        "hash_seed": "0",
    }


def play(engine: EngineCore, rng: random.Random, count: int = 10) -> dict[str, tuple[list[int], list[int]]]:
    """Random requests with shared beginnings, arriving while others run. Returns: prompt and output of each."""
    beginnings = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, 30))] for _ in range(3)]
    prompts: dict[str, list[int]] = {}
    outputs: dict[str, list[int]] = {}
    for _ in range(STEP_LIMIT):
        if len(prompts) < count and rng.random() < 0.4:
            name = f"r{len(prompts)}"
            own = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 12))]
            prompts[name] = rng.choice(beginnings) + own
            engine.add_request(name, prompts[name], SamplingParams(max_tokens=rng.randint(1, 8)))
        for step in engine.step():
            outputs.setdefault(step.request_id, []).extend(step.token_ids)
        if len(prompts) == count and not engine.has_unfinished_requests:
            return {name: (prompt, outputs[name]) for name, prompt in prompts.items()}
    raise AssertionError(f"not done after {STEP_LIMIT} steps")


def check_workload(decoder: Decoder, seed: int) -> EngineCore:
    rng = random.Random(seed)
    engine = make_engine(decoder, **random_options(rng))
    for prompt, output in play(engine, rng).values():
        assert output == greedy(decoder, prompt, len(output))
    return engine


def test_cached_output_equals_uncached_output() -> None:
    """Chunks, hits, windows that move on, and requests that lose everything in the middle."""
    decoder, hits, resumed = make_hybrid(), 0, 0
    for seed in range(12):
        stats = check_workload(decoder, seed).kv_cache_manager.stats
        hits, resumed = hits + stats.hits, resumed + stats.resumed_requests
    assert hits > 200 and resumed > 5, "a workload that proves something"


@pytest.mark.parametrize("mixture", MIXTURES)
def test_every_mixture_of_layers(mixture: str) -> None:
    decoder = make_hybrid(layer_types=MIXTURES[mixture])
    assert sum(check_workload(decoder, seed).kv_cache_manager.stats.hits for seed in (100, 101, 102)) > 0


# -- logits -------------------------------------------------------------------------------------------------

SHARED = [(7 * i + 3) % VOCAB_SIZE for i in range(26)]  # six whole blocks and two tokens
Spoil = Callable[[EngineCore], None]


def after_a_hit(
    decoder: Decoder, interval: int | None, spoil: Spoil | None = None
) -> tuple[int, Tensor, Tensor]:
    """The third of three prompts that begin alike: its hit in tokens, its scores, and the uncached ones."""
    engine = make_engine(decoder, prefix_cache_retention_interval=interval)
    for name, end in (("A", [1]), ("B", [2, 5])):
        serve(engine, {name: [*SHARED, *end]}, max_tokens=2)
    if spoil is not None:
        spoil(engine)
    prompt = [*SHARED, 9, 4]
    params = SamplingParams(max_tokens=3, logprobs=VOCAB_SIZE)
    engine.add_request("C", prompt, params)
    tokens, scores, hit = list(prompt), [], 0
    while engine.has_unfinished_requests:
        for step in engine.step():
            hit = step.num_cached_tokens
            tokens += step.token_ids
            scores += [[each[token].logprob for token in range(VOCAB_SIZE)] for each in step.logprobs]
    expected = uncached_logits(decoder, tokens[:-1])[len(prompt) - 1 :].log_softmax(-1)
    return hit, torch.tensor(scores), expected


@pytest.mark.parametrize("interval", [None, 0, 4, 8])
def test_logits_after_a_hit_are_the_recomputed_ones(interval: int | None) -> None:
    hit, scores, expected = after_a_hit(make_hybrid(), interval)
    assert hit == 24
    torch.testing.assert_close(scores, expected, atol=1e-3, rtol=1e-3)


def wipe(layer: int, part: int) -> Spoil:
    """Sets what a layer keeps in the cached blocks to zero."""

    def spoil(engine: EngineCore) -> None:
        engine.kv_cache.layers[layer][part][engine.snapshot().cached] = 0.0

    return spoil


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("part", [0, 1])
def test_whatever_a_layer_keeps_is_used(layer: int, part: int) -> None:
    """Keys, values, states and tails: none of them may be wrong without a trace."""
    hit, scores, expected = after_a_hit(make_hybrid(), 0, wipe(layer, part))
    assert hit == 24 and (scores - expected).abs().max() > 0.02


def test_a_window_reads_nothing_that_lies_behind_it() -> None:
    """Misconception: "a window is what the cache keeps". It is what the layer reads: behind it the null block stands
    in the table, and freed blocks are others'. Whatever they hold must not matter."""

    def spoil(engine: EngineCore) -> None:
        (layer,), cached = engine.groups[1].layers, engine.snapshot().cached
        for tensor in engine.kv_cache.layers[layer]:
            kept = tensor[cached]
            tensor.fill_(torch.nan)
            tensor[cached] = kept

    hit, scores, expected = after_a_hit(make_hybrid(), 0, spoil)
    assert hit == 24
    torch.testing.assert_close(scores, expected, atol=1e-3, rtol=1e-3)


# -- the third request --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interval", "budget", "second"),
    [(0, 4, 0), (None, 4, 24), (8, 8, 24), (12, 4, 24), (None, 64, 0)],
    ids=["as vLLM does", "every block", "every 8 tokens", "every 12 tokens", "every block, one long chunk"],
)
def test_the_third_request_hits_where_the_second_could_not(
    interval: int | None, budget: int, second: int
) -> None:
    """Misconception: "what one request computed, the next one finds". Of a window or state that nobody was known to
    need there, it finds nothing; but its lookup tells where prompts part, and the third finds what it keeps there.
    And a state that no chunk ended at cannot be kept, however many are wanted."""
    options = {"prefix_cache_retention_interval": interval, "max_num_batched_tokens": budget}
    engine = make_engine(make_hybrid(), **options)
    found: dict[str, int] = {}
    for name, end in (("A", numbers(1, 9)), ("B", numbers(11, 17)), ("C", numbers(21, 23))):
        engine.add_request(name, [*SHARED, *end], SamplingParams(max_tokens=1))
        while engine.has_unfinished_requests:
            found |= {step.request_id: step.num_cached_tokens for step in engine.step()}
    assert found == {"A": 0, "B": second, "C": 24}


# -- what is refused ----------------------------------------------------------------------------------------


def test_v0_refuses_windows_and_states() -> None:
    sentence = (
        "one block table for all layers, and this model has linear_attention and sliding_attention layers"
    )
    with pytest.raises(ConfigError, match=sentence):
        LLMEngine(EngineConfig(engine="v0"), make_hybrid())


def test_adapters_are_refused_beside_states(tmp_path: Path) -> None:
    engine = make_engine(make_hybrid())
    with pytest.raises(RequestError, match="linear-attention layers are not supported"):
        engine.add_request("A", [1], SamplingParams(), adapter=Adapter("a", str(tmp_path)))
    assert not engine.has_unfinished_requests


def test_a_reader_may_bring_the_attention() -> None:
    calls: list[int | None] = []

    def paged_attention(*arguments: Any) -> Tensor:
        calls.append(arguments[7])
        return kernels.backend_for("cpu", "reference").paged_attention(*arguments)

    decoder = make_hybrid()
    config = EngineConfig(block_size=4, num_blocks=40)
    engine = EngineCore(config, decoder, parts=load_parts({"attention": paged_attention}))
    assert serve(engine, {"A": SHARED}, 4) == {"A": greedy(decoder, SHARED, 4)}
    assert set(calls) == {None, 6}


def test_a_long_request_needs_only_what_windows_and_states_hold_at_once() -> None:
    """Misconception: "so many tokens, so many blocks, in every group". 40 tokens are 10 blocks for the full-attention
    layers, 5 for a window of 6 with a chunk of 8, and 2 states."""
    decoder = make_hybrid()
    prompt = [(5 * i + 1) % VOCAB_SIZE for i in range(38)]
    engine = make_engine(decoder, num_blocks=1 + 10 + 5 + 2, max_num_batched_tokens=8)
    needs = engine.limits.num_blocks_at_peak
    assert needs is not None and needs(40) == 10 + 5 + 2
    assert serve(engine, {"A": prompt}, 3) == {"A": greedy(decoder, prompt, 3)}
    tight = make_engine(decoder, num_blocks=1 + 10 + 2, max_num_batched_tokens=8)
    with pytest.raises(RequestError, match="it can never fit"):
        tight.add_request("A", prompt, SamplingParams(max_tokens=3))
