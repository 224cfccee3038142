"""What a request may ask for, which tokens can be drawn and how often, and what is reported about them."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refengine.errors import ConfigError
from refengine.sampling import SamplingParams, probabilities, sample, token_logprobs

ODDS = torch.tensor([0.1, 0.5, 0.05, 0.3, 0.05])  # token 1 is the best, then 3, 0, and 2 ties with 4
DRAWS = 20_000


def can_be_drawn(odds: torch.Tensor = ODDS, **options: Any) -> set[int]:
    options.setdefault("temperature", 1.0)
    probs = probabilities(odds.log()[None], [SamplingParams(**options)])[0]
    assert probs.sum().item() == pytest.approx(1)
    return set(probs.nonzero().flatten().tolist())


def frequencies(seed: int = 0, **options: Any) -> list[float]:
    """How often each token comes out of DRAWS draws, in one batch with one generator."""
    params = SamplingParams(**options)
    rows = 1000
    generator = torch.Generator().manual_seed(seed)
    counts: Counter[int] = Counter()
    for _ in range(DRAWS // rows):
        counts.update(sample(ODDS.log().expand(rows, -1), [params] * rows, [generator] * rows).tolist())
    return [counts[token] / DRAWS for token in range(len(ODDS))]


# What a request may ask for


def test_defaults_are_greedy() -> None:
    params = SamplingParams()
    assert params.greedy
    assert (params.top_k, params.top_p, params.max_tokens) == (0, 1.0, 16)
    assert params.stop == () and params.logprobs is None


def test_a_single_stop_text_and_lists_become_tuples() -> None:
    params = SamplingParams(stop="\n", stop_token_ids=[3, 4])
    assert params.stop == ("\n",) and params.stop_token_ids == (3, 4)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    hash(params)  # frozen all the way down


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"temperature": -0.1}, "temperature must be a number of at least 0, not -0.1"),
        ({"temperature": math.nan}, "temperature must be a finite number"),
        ({"temperature": math.inf}, "temperature must be a finite number"),
        ({"temperature": None}, "temperature must be a finite number, not None"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"top_k": -1}, "top_k must be a number of at least 0"),
        ({"top_k": 1.5}, "top_k must be a whole number"),
        ({"top_p": 0}, "top_p must be above 0 and at most 1, not 0"),
        ({"top_p": 1.01}, "top_p must be above 0"),
        ({"top_p": math.nan}, "top_p must be a finite number"),
        ({"max_tokens": 0}, "max_tokens must be a number of at least 1"),
        ({"max_tokens": None}, "max_tokens must be a whole number, not None"),
        ({"max_tokens": True}, "max_tokens must be a number"),
        ({"seed": "lucky"}, "seed must be a whole number"),
        ({"stop": ""}, "stop must be texts of at least one character"),
        ({"stop": ["a", ""]}, "stop must be texts"),
        ({"stop": [1]}, "stop must be texts"),
        ({"stop": 5}, "stop must be texts"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be token ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids must be token ids"),
        ({"stop_token_ids": 7}, "stop_token_ids must be token ids, not 7"),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False"),
        ({"logprobs": -1}, "logprobs must be a number of at least 0"),
        ({"prompt_logprobs": 0.5}, "prompt_logprobs must be a whole number"),
        ({"temprature": 1}, "SamplingParams has no option 'temprature'; did you mean 'temperature'"),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        SamplingParams(**options)
    assert "\n" not in str(caught.value)


# Which tokens can come


def test_top_k_keeps_exactly_k() -> None:
    odds = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])
    best_first = [1, 3, 4, 0, 2]
    for k in range(1, 6):
        assert can_be_drawn(odds, top_k=k) == set(best_first[:k])
    assert can_be_drawn(odds, top_k=0) == can_be_drawn(odds, top_k=99) == set(range(5))


def test_top_k_keeps_all_that_tie_with_the_last() -> None:
    assert can_be_drawn(top_k=4) == {0, 1, 2, 3, 4}
    assert can_be_drawn(top_k=3) == {0, 1, 3}


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (0.01, {1}),  # the best one always stays
        (0.49, {1}),
        (0.51, {1, 3}),  # 0.5 is not enough; the token that crosses 0.51 stays
        (0.79, {1, 3}),
        (0.81, {0, 1, 3}),
        (0.89, {0, 1, 3}),
        (0.94, {0, 1, 2, 3}),  # of the two that tie, one is enough
        (0.99, {0, 1, 2, 3, 4}),
        (1.0, {0, 1, 2, 3, 4}),
    ],
)
def test_top_p_keeps_the_fewest_that_reach_p(top_p: float, kept: set[int]) -> None:
    assert can_be_drawn(top_p=top_p) == kept


def test_top_p_is_exact_where_the_sum_is() -> None:
    """With binary fractions the sums have no rounding: 0.5 reached is 0.5 reached."""
    odds = torch.tensor([0.25, 0.5, 0.25])
    assert can_be_drawn(odds, top_p=0.5) == {1}
    assert can_be_drawn(odds, top_p=0.75) == {0, 1}


def test_top_p_counts_what_top_k_left() -> None:
    """After top_k=2 the odds are 0.625 and 0.375, so 0.6 is reached by the best alone; before, it is not."""
    assert can_be_drawn(top_p=0.6) == {1, 3}
    assert can_be_drawn(top_p=0.6, top_k=2) == {1}


def test_temperature_comes_before_top_p() -> None:
    """At temperature 2 the best has 0.36: one token no longer reaches 0.5."""
    assert can_be_drawn(top_p=0.5) == {1}
    assert can_be_drawn(top_p=0.5, temperature=2.0) == {1, 3}


def test_rows_are_cut_each_by_its_own_rule() -> None:
    logits = ODDS.log().expand(4, -1)
    rules: list[dict[str, Any]] = [{"top_k": 1}, {"top_p": 0.6}, {}, {"top_k": 3, "top_p": 0.85}]
    params = [SamplingParams(temperature=1.0, **rule) for rule in rules]
    together = probabilities(logits, params)
    for i, p in enumerate(params):
        torch.testing.assert_close(together[i : i + 1], probabilities(logits[i : i + 1], [p]))
    assert (together > 0).sum(dim=1).tolist() == [1, 2, 5, 2]


@settings(max_examples=100, deadline=None)
@given(
    logits=st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=12),
    top_k=st.integers(0, 14),
    top_p=st.floats(0.01, 1.0),
    temperature=st.floats(0.1, 3.0),
)
def test_the_best_token_survives_and_order_is_kept(
    logits: list[float], top_k: int, top_p: float, temperature: float
) -> None:
    x = torch.tensor([logits])
    probs = probabilities(x, [SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)])[0]
    assert x[0][probs.argmax()] >= x[0].max() - 1e-4, "equal ones after rounding are equally good"
    assert probs.sum().item() == pytest.approx(1, abs=1e-5)
    kept, cut = x[0][probs > 0], x[0][probs == 0]
    assert not len(cut) or cut.max() <= kept.min() + 1e-4


# How often they come


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_temperature(temperature: float) -> None:
    expected = (ODDS.log() / temperature).softmax(0)
    for got, p in zip(frequencies(temperature=temperature), expected.tolist(), strict=True):
        assert got == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / DRAWS))


def test_frequencies_after_a_cut_are_renormalised() -> None:
    got = frequencies(temperature=1.0, top_k=2)
    assert got[0] == got[2] == got[4] == 0
    assert got[1] == pytest.approx(0.625, abs=0.014)


def test_the_global_generator_serves_requests_without_a_seed() -> None:
    rows = 2000
    params = [SamplingParams(temperature=1.0)] * rows
    torch.manual_seed(0)
    tokens = sample(ODDS.log().expand(rows, -1), params, [None] * rows)
    assert (tokens == 1).float().mean().item() == pytest.approx(0.5, abs=0.045)
    torch.manual_seed(0)
    assert torch.equal(sample(ODDS.log().expand(rows, -1), params, [None] * rows), tokens)


# Greedy, and independence of the batch


def test_greedy_rows_take_the_best_and_draw_nothing() -> None:
    logits = torch.randn(3, 50)
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    state = torch.get_rng_state()
    tokens = sample(logits, [SamplingParams(seed=1)] * 3, [generator, None, generator])
    assert torch.equal(tokens, logits.argmax(dim=1))
    assert torch.equal(generator.get_state(), before) and torch.equal(torch.get_rng_state(), state)


def test_a_temperature_near_zero_is_greedy() -> None:
    params = SamplingParams(temperature=1e-9)
    assert params.greedy
    logits = torch.tensor([[1e30, 3e30, 2e30]])  # divided by it, all three would be infinite
    assert sample(logits, [params], [None]).item() == 1


def test_a_seeded_request_draws_the_same_in_any_company() -> None:
    torch.manual_seed(0)
    logits = torch.randn(10, 6, 40)  # ten steps, up to six requests
    own = SamplingParams(temperature=1.0, top_p=0.9, seed=7)

    def text(row: int, company: list[SamplingParams]) -> list[int]:
        params = [*company[:row], own, *company[row:]]
        others = [torch.Generator().manual_seed(99 + i) if i % 2 else None for i in range(len(params))]
        others[row] = torch.Generator().manual_seed(7)
        tokens = []
        for step in logits:
            batch = step[1 : len(params) + 1].clone()
            batch[row] = step[0]
            tokens.append(int(sample(batch, params, others)[row]))
        return tokens

    hot, cold = SamplingParams(temperature=2.0), SamplingParams()
    alone = text(0, [])
    assert alone == text(0, [hot, cold, hot]) == text(2, [cold, hot, hot, cold]) == text(1, [cold])
    assert len(set(alone)) > 1


def test_seeded_requests_leave_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    sample(torch.zeros(1, 9), [SamplingParams(temperature=1.0)], [torch.Generator().manual_seed(1)])
    assert torch.equal(torch.get_rng_state(), state)


def test_seeds_differ() -> None:
    logits, params = torch.zeros(1, 1000), [SamplingParams(temperature=1.0)]
    drawn = {int(sample(logits, params, [torch.Generator().manual_seed(seed)])) for seed in range(20)}
    assert len(drawn) > 15


def test_mixed_batch() -> None:
    logits = torch.zeros(3, 4)
    logits[:, 2] = 1.0
    logits[1, 0] = 100.0  # so sure that drawing cannot miss it
    params = [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams()]
    assert sample(logits, params, [None] * 3).tolist() == [2, 0, 2]


# What is reported


def test_the_chosen_token_and_the_best_ones() -> None:
    logits = ODDS.log()[None] + 3.0  # a constant changes nothing
    (row,) = token_logprobs(logits, torch.tensor([0]), 2)
    assert list(row) == [0, 1, 3]  # the chosen one first
    assert [entry.rank for entry in row.values()] == [3, 1, 2]
    for token, entry in row.items():
        assert entry.logprob == pytest.approx(math.log(ODDS[token]), abs=1e-5)


def test_a_chosen_token_among_the_best_is_listed_once() -> None:
    (row,) = token_logprobs(ODDS.log()[None], torch.tensor([3]), 3)
    assert list(row) == [3, 1, 0]
    assert [entry.rank for entry in row.values()] == [2, 1, 3]


def test_none_besides_the_chosen() -> None:
    (row,) = token_logprobs(ODDS.log()[None], torch.tensor([1]), 0)
    assert list(row) == [1] and row[1].rank == 1
    assert row[1].logprob == pytest.approx(math.log(0.5), abs=1e-5)


def test_ties_do_not_push_the_best_from_rank_one() -> None:
    for num_best in (0, 4):
        (row,) = token_logprobs(torch.zeros(1, 4), torch.tensor([3]), num_best)
        assert row[3].rank == 1


def test_more_than_there_are() -> None:
    rows = token_logprobs(torch.randn(2, 3), torch.tensor([0, 1]), 20)
    assert [sorted(row) for row in rows] == [[0, 1, 2], [0, 1, 2]]


def test_half_precision_logits_are_scored_in_float32() -> None:
    logits = torch.zeros(1, 1000, dtype=torch.bfloat16)
    (row,) = token_logprobs(logits, torch.tensor([5]), 0)
    assert row[5].logprob == pytest.approx(-math.log(1000), abs=1e-4)
