"""The shipped hybrid model: it finds facts as the first one does, and it counts, which only a state can."""

from __future__ import annotations

import json
import random
import re

import pytest
import torch
from safetensors import safe_open

from refengine import LLM, SamplingParams
from refengine.commands.demo_hybrid import wipe_states
from refengine.model.corpus import (
    EVENTS,
    MOST_EVENTS,
    Question,
    World,
    document,
    with_events,
    world,
)
from refengine.model.evaluate_tiny import MAX_TOKENS, evaluate, evaluate_counting, evaluate_glossary
from refengine.model.loader import TINY_HYBRID, load_model
from refengine.model.tokenizer import Tokenizer
from refengine.model.train_tiny import hf_tensors
from refengine.model.train_tiny_reader import REACH, HybridReader
from refengine.model.train_tiny_recipes import RECIPES, hf_config, train_tokenizer
from refengine.model.uncached import attend_rows, recur_rows
from tests.unit.hybrid_models import greedy, uncached_logits

WEIGHTS = TINY_HYBRID / "model.safetensors"
NUM_WORLDS = 20


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny-hybrid")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TINY_HYBRID)


def samples(count: int, num_facts: int = 4, num_keys: int = 2) -> list[World]:
    rng = random.Random(7)
    return [with_events(rng, world(rng, num_facts), num_keys) for _ in range(count)]


# -- what it reads ------------------------------------------------------------------------------------------


def test_the_count_is_the_number_of_its_sentences() -> None:
    for drawn in samples(50):
        counted = [q for q in drawn.questions if q.kind == "count"]
        assert len(counted) == 2
        for question in counted:
            key, count = re.fullmatch(r"The (\w+) was heard (\d) times\.", question.answer).groups()  # type: ignore[union-attr]
            assert key in EVENTS and 2 <= int(count) <= MOST_EVENTS
            assert drawn.sentences.count(f"The {key} was heard.") == int(count)


def test_facts_keep_their_order_and_their_questions() -> None:
    plain = world(random.Random(3), 6)
    drawn = with_events(random.Random(4), plain, 3)
    assert [s for s in drawn.sentences if "was heard" not in s] == list(plain.sentences)
    assert {q for q in drawn.questions if q.kind != "count"} == set(plain.questions)


def test_every_word_is_one_token_and_every_digit_too(tokenizer: Tokenizer) -> None:
    words = {word for drawn in samples(200, 12, 4) for word in re.findall(r" ?[A-Za-z]+", document(drawn))}
    assert [word for word in words if len(tokenizer.encode(word)) != 1] == []


def test_when_only_the_state_may_count_nothing_else_is_asked(tokenizer: Tokenizer) -> None:
    """Attention does not reach from the answer into the text, so a fact could only be guessed."""
    reader = HybridReader(tokenizer._tokenizer, "seed", 1024)
    batches = [reader.batch(0.6) for _ in range(60)]
    assert {batch.reach for batch in batches} == {None, REACH}
    assert all(batch.tokens.shape == batch.weights.shape for batch in batches)
    assert all(batch.tokens.numel() <= 1024 for batch in batches)
    for batch in batches:
        answers = tokenizer.decode(batch.tokens[batch.weights == 1.0].tolist())
        if batch.reach is not None:
            assert re.fullmatch(r"( The \w+ was heard \d times\.\n)+", answers)


# -- what was shipped ---------------------------------------------------------------------------------------


def test_the_file_is_small_and_holds_the_whole_network() -> None:
    assert WEIGHTS.stat().st_size <= 3_000_000
    decoder = load_model("tiny-hybrid", torch.bfloat16)
    expected = hf_tensors(decoder)
    with safe_open(WEIGHTS, framework="pt") as file:
        assert set(file.keys()) == set(expected)
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in expected.items())


def test_the_recipe_makes_the_shipped_tokenizer_and_config(tokenizer: Tokenizer) -> None:
    recipe = RECIPES["hybrid"]
    made = train_tokenizer(recipe)
    assert made.get_vocab() == tokenizer._tokenizer.get_vocab()
    assert hf_config(recipe, made) == json.loads((TINY_HYBRID / "config.json").read_text())


# -- what it can --------------------------------------------------------------------------------------------


def test_it_reads_worlds_it_has_never_seen(llm: LLM) -> None:
    assert evaluate(llm, worlds=10, num_facts=5).percent() >= 95.0
    assert evaluate(llm, worlds=10, num_facts=12).percent() >= 90.0


def test_it_counts(llm: LLM) -> None:
    assert evaluate_counting(llm, worlds=NUM_WORLDS, num_keys=1).percent() >= 95.0
    assert evaluate_counting(llm, worlds=NUM_WORLDS, num_keys=4).percent() >= 95.0


def test_it_knows_the_glossary_by_heart(llm: LLM) -> None:
    assert evaluate_glossary(llm).percent() == 100.0


# -- what it says through the cache -------------------------------------------------------------------------


@pytest.mark.parametrize("interval", [None, 0, 16])
def test_logits_through_cache_and_chunks_are_the_recomputed_ones(
    tokenizer: Tokenizer, interval: int | None
) -> None:
    """Windows of 32 tokens, states at block ends, hits: the same scores as with nothing cached at all."""
    llm = LLM(
        "tiny-hybrid", max_num_batched_tokens=48, prefix_cache_retention_interval=interval, num_blocks=200
    )
    vocab_size = llm.engine.limits.vocab_size
    params = SamplingParams(max_tokens=3, logprobs=vocab_size, ignore_eos=True)
    drawn = samples(1, 8)[0]
    hits = []
    for question in drawn.questions[:3]:
        prompt = tokenizer.encode(drawn.prompt(question.question))
        (output,) = llm.generate([prompt], params)
        hits.append(output.num_cached_tokens)
        scores = torch.tensor([[each[t].logprob for t in range(vocab_size)] for each in output.logprobs])
        tokens = [*prompt, *output.token_ids[:-1]]
        expected = uncached_logits(load_model("tiny-hybrid"), tokens)[len(prompt) - 1 :].log_softmax(-1)
        torch.testing.assert_close(scores, expected, atol=2e-3, rtol=1e-3)
    assert hits[0] == 0 and hits[2] > 64


@pytest.mark.parametrize(("budget", "num_blocks", "interval"), [(2048, 200, None), (32, 44, 0), (64, 60, 16)])
def test_cached_output_equals_uncached_output_token_for_token(
    tokenizer: Tokenizer, budget: int, num_blocks: int, interval: int | None
) -> None:
    """Texts that are shared, in one batch, twice; with so few blocks that requests lose theirs."""
    llm = LLM(
        "tiny-hybrid",
        max_num_batched_tokens=budget,
        num_blocks=num_blocks,
        prefix_cache_retention_interval=interval,
        check_integrity=True,
    )
    decoder = load_model("tiny-hybrid")
    prompts = [drawn.prompt(q.question) for drawn in samples(2, 3, 1) for q in drawn.questions]
    outputs = llm.generate(prompts * 2, SamplingParams(max_tokens=8))
    assert sum(output.num_cached_tokens for output in outputs) > 0
    expected = {prompt: greedy(decoder, tokenizer.encode(prompt), 8) for prompt in prompts}
    for prompt, output in zip(prompts * 2, outputs, strict=True):
        assert output.token_ids == expected[prompt][: len(output.token_ids)] and len(output.token_ids) > 0


def test_training_and_the_engine_compute_the_same(llm: LLM, tokenizer: Tokenizer) -> None:
    drawn = samples(1, 8)[0]
    prompt = tokenizer.encode(drawn.prompt(drawn.questions[0].question))
    decoder = load_model("tiny-hybrid")
    attend, recur = attend_rows(decoder.config), recur_rows(decoder.config)
    hidden = decoder(torch.tensor(prompt), torch.arange(len(prompt)), attend, recur=recur)
    output = llm.generate(prompt, SamplingParams(max_tokens=1))[0]
    assert output.token_ids == [int(decoder.logits(hidden[-1:]).argmax())]


def ask_the_third(wiped: bool) -> dict[str, list[bool]]:
    """Whether the answers to the third and later questions about a text are right, by kind.

    The first two questions bring the text, and what is needed to go on behind it, into the cache. They part in their
    first word, as do all the others: had both begun "Where is the", what is kept would lie behind that.
    """
    right: dict[str, list[bool]] = {"count": [], "fact": []}
    params = SamplingParams(max_tokens=MAX_TOKENS)
    for drawn in samples(NUM_WORLDS, 4):
        llm = LLM("tiny-hybrid", num_blocks=100)
        counts = [q for q in drawn.questions if q.kind == "count"]
        facts = [q for q in drawn.questions if q.kind != "count"]
        for question in (facts[0], counts[0]):
            llm.generate(drawn.prompt(question.question), params)
        if wiped:
            wipe_states(llm.engine)
        for question in (*counts, *facts[1:]):
            (output,) = llm.generate([drawn.prompt(question.question)], params)
            assert output.num_cached_tokens > 0
            right["count" if question.kind == "count" else "fact"].append(is_right(output.text, question))
    return right


def is_right(text: str, question: Question) -> bool:
    return text.strip() == question.answer


def test_the_number_is_in_the_state_and_nowhere_else() -> None:
    """Misconception: "whatever was in the prompt is in the keys and values". With every cached state set to zero the
    model still finds facts, which attention reads, and no longer knows any number."""
    whole, wiped = ask_the_third(False), ask_the_third(True)
    assert sum(whole["count"]) >= 0.95 * len(whole["count"])
    assert sum(wiped["count"]) <= 0.25 * len(wiped["count"]), "guessing one of eight numbers"
    assert sum(wiped["fact"]) >= 0.6 * len(wiped["fact"])
