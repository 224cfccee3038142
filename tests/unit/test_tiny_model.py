"""The shipped tiny model and the corpus behind it: reproducible, whole, small, and right about what it reads."""

from __future__ import annotations

import json
import random
import re

import pytest
import torch
from safetensors import safe_open

from refengine import LLM, SamplingParams
from refengine.model.corpus import (
    GLOSSARY_QUESTIONS,
    KINDS,
    World,
    document,
    pieces,
    prompt,
    with_glossary,
    world,
)
from refengine.model.evaluate_tiny import MAX_TOKENS, evaluate, evaluate_glossary
from refengine.model.loader import TINY, load_model
from refengine.model.tokenizer import Tokenizer
from refengine.model.train_tiny import hf_tensors
from refengine.model.train_tiny_reader import Reader
from refengine.model.train_tiny_recipes import RECIPES, hf_config, train_tokenizer
from refengine.model.uncached import attend_rows

WEIGHTS = TINY / "model.safetensors"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TINY)


def samples(count: int, num_facts: int) -> list[World]:
    rng = random.Random(7)
    return [with_glossary(rng, world(rng, num_facts), 1) for _ in range(count)]


def test_the_same_seed_gives_the_same_worlds() -> None:
    assert samples(20, 6) == samples(20, 6)
    assert world(random.Random(1), 5) != world(random.Random(2), 5)


def test_every_answer_stands_in_its_context_and_every_question_has_one_answer() -> None:
    for drawn in samples(50, 14):
        of_facts = [q for q in drawn.questions if q.kind != "glossary"]
        assert len(of_facts) == len({q.question for q in of_facts}) == 14
        assert all(drawn.sentences.count(q.answer) == 1 for q in of_facts)


def test_a_world_of_more_facts_than_there_are_keys_is_refused() -> None:
    with pytest.raises(ValueError):
        world(random.Random(0), 1 + sum(len(kind.keys) for kind in KINDS))


def test_a_document_is_its_prompts_and_answers() -> None:
    drawn = samples(1, 4)[0]
    first = drawn.questions[0]
    assert document(drawn).startswith(f"{drawn.prompt(first.question)} {first.answer}\nQ: ")
    assert pieces(drawn)[1::2] == [f" {q.answer}\n" for q in drawn.questions]


def test_text_survives_the_tokenizer(tokenizer: Tokenizer) -> None:
    for text in [document(w) for w in samples(10, 8)] + ["ß € 漢字 \t\n", "123 unknown-words"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_word_is_one_token_and_every_digit_too(tokenizer: Tokenizer) -> None:
    texts = [document(w) for w in samples(200, 12)] + [f" {q.answer}" for q in GLOSSARY_QUESTIONS]
    words = {word for text in texts for word in re.findall(r" ?[A-Za-z]+", text)}
    assert [word for word in words if len(tokenizer.encode(word)) != 1] == []
    assert len(tokenizer.encode("472")) == 3


def test_training_reads_a_document_as_the_tokenizer_does(tokenizer: Tokenizer) -> None:
    reader = Reader(tokenizer._tokenizer, "seed", 2048)
    for drawn in samples(20, 8):
        ids = [token for piece in pieces(drawn) for token in reader.encode(piece)]
        assert ids == tokenizer.encode(document(drawn))


def test_the_file_is_small_and_in_hugging_face_names() -> None:
    assert WEIGHTS.stat().st_size <= 6_000_000
    decoder = load_model("tiny", torch.bfloat16)
    assert 1_000_000 <= sum(p.numel() for p in decoder.parameters()) <= 3_000_000
    expected = hf_tensors(decoder)
    with safe_open(WEIGHTS, framework="pt") as file:
        assert set(file.keys()) == set(expected)
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in expected.items())


def test_the_recipe_makes_the_shipped_tokenizer_and_config(tokenizer: Tokenizer) -> None:
    recipe = RECIPES["tiny"]
    made = train_tokenizer(recipe)
    assert made.get_vocab() == tokenizer._tokenizer.get_vocab()
    assert hf_config(recipe, made) == json.loads((TINY / "config.json").read_text())


def test_it_ends_an_answer_with_the_line(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_ids == tuple(tokenizer.encode("\n"))


def test_training_attention_and_the_paged_engine_give_the_same_answer(llm: LLM, tokenizer: Tokenizer) -> None:
    drawn = samples(1, 8)[0]
    token_ids = torch.tensor(tokenizer.encode(drawn.prompt(drawn.questions[0].question)))
    decoder = load_model("tiny")
    hidden = decoder(token_ids, torch.arange(len(token_ids)), attend_rows(decoder.config))
    first = int(decoder.logits(hidden[-1:]).argmax())
    output = llm.generate(token_ids.tolist(), SamplingParams(max_tokens=1))[0]
    assert output.token_ids == [first]


def test_transformers_reads_the_directory_and_computes_the_same(tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(TINY).float()
    ours = load_model("tiny")
    token_ids = torch.tensor(tokenizer.encode(document(samples(1, 5)[0])))
    with torch.no_grad():
        expected = theirs(token_ids[None]).logits[0]
    hidden = ours(token_ids, torch.arange(len(token_ids)), attend_rows(ours.config))
    torch.testing.assert_close(ours.logits(hidden), expected, rtol=0, atol=1e-3)


def test_it_reads_worlds_it_has_never_seen(llm: LLM) -> None:
    assert evaluate(llm, worlds=10, num_facts=5).percent() >= 95.0
    assert evaluate(llm, worlds=6, num_facts=12).percent() >= 90.0


def test_it_knows_the_glossary_by_heart(llm: LLM) -> None:
    score = evaluate_glossary(llm)
    assert score.percent() == 100.0
    assert json.loads(json.dumps(score.counts()))["asked"] == {"glossary": len(GLOSSARY_QUESTIONS)}


def test_the_answer_comes_from_the_context(llm: LLM) -> None:
    """Change the fact and the answer changes with it: nothing else in the model could know."""
    params = SamplingParams(max_tokens=MAX_TOKENS)
    for place in ("tower", "garden", "mill"):
        context = f"Mia works as a nurse. The drum is in the {place}. The fox belongs to Sam."
        output = llm.generate(prompt("Where is the drum?", context), params)[0]
        assert output.text.strip() == f"The drum is in the {place}."
