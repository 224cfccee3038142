"""How well the shipped models answer, measured through the engine itself.

    python -m refengine.model.evaluate_tiny --worlds 200 --json recall.json
    python -m refengine.model.evaluate_tiny --model tiny-hybrid

Every prompt goes through `LLM`, in batches, with prefix caching on and several questions about each world, so
a fault of the engine shows here as wrong answers just as a fault of the weights does. An answer is right only
if its text is exactly the expected one under greedy decoding. Training never used the seed of these worlds.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from refengine.llm import LLM
from refengine.model.config import LINEAR_ATTENTION
from refengine.model.corpus import (
    EVENTS,
    GLOSSARY_QUESTIONS,
    KINDS,
    Question,
    prompt,
    with_events,
    world,
)
from refengine.model.loader import find_model, read_config
from refengine.sampling import SamplingParams

SEED = 20_000  # train_tiny draws from 1
FACTS = (3, 5, 8, 10, 12)
FACTS_WHILE_COUNTING = 5
QUESTIONS_PER_WORLD = 3
BATCH = 100  # worlds in one call of generate
MAX_TOKENS = 32  # the longest answer of the glossary has fewer


@dataclass
class Score:
    """Right answers out of all that were asked, in total and by the kind of the question."""

    right: Counter[str]
    asked: Counter[str]

    def percent(self, kind: str | None = None) -> float:
        """Share of right answers, of one kind or of all, in percent; 0 if none was asked."""
        right = self.right.total() if kind is None else self.right[kind]
        asked = self.asked.total() if kind is None else self.asked[kind]
        return 100.0 * right / max(asked, 1)

    def counts(self) -> dict[str, dict[str, int]]:
        """Right answers and questions by kind, for JSON."""
        return {"right": dict(self.right), "asked": dict(self.asked)}


@dataclass(frozen=True)
class Asked:
    """A question with its whole prompt."""

    prompt: str
    question: Question


def evaluate(llm: LLM, worlds: int, num_facts: int, seed: int = SEED) -> Score:
    """Recall on `worlds` unseen worlds of `num_facts` facts, QUESTIONS_PER_WORLD questions each."""
    rng = random.Random(f"{seed}, {num_facts} facts")
    drawn = [world(rng, num_facts) for _ in range(worlds)]
    asked = [Asked(w.prompt(q.question), q) for w in drawn for q in w.questions[:QUESTIONS_PER_WORLD]]
    return ask(llm, asked)


def evaluate_counting(llm: LLM, worlds: int, num_keys: int, seed: int = SEED) -> Score:
    """How often each of `num_keys` things was heard, in `worlds` unseen worlds of a few facts."""
    rng = random.Random(f"{seed}, {num_keys} keys")
    drawn = [with_events(rng, world(rng, FACTS_WHILE_COUNTING), num_keys) for _ in range(worlds)]
    return ask(llm, [Asked(w.prompt(q.question), q) for w in drawn for q in w.questions if q.kind == "count"])


def evaluate_glossary(llm: LLM) -> Score:
    """The glossary, each question asked with no context."""
    return ask(llm, [Asked(prompt(q.question), q) for q in GLOSSARY_QUESTIONS])


def ask(llm: LLM, asked: list[Asked]) -> Score:
    """Greedy answers to all questions, compared as text. A request that failed counts as a wrong answer."""
    score = Score(Counter(), Counter())
    params = SamplingParams(max_tokens=MAX_TOKENS)
    for start in range(0, len(asked), BATCH):
        batch = asked[start : start + BATCH]
        outputs = llm.generate([a.prompt for a in batch], params)
        for each, output in zip(batch, outputs, strict=True):
            score.asked[each.question.kind] += 1
            score.right[each.question.kind] += output.text.strip() == each.question.answer
    return score


def print_table(scores: dict[int, Score], glossary: Score) -> None:
    """One line for each number of facts, one column for each kind of fact, in percent of exact answers."""
    names = [kind.name for kind in KINDS]
    print("facts    all " + "".join(f"{name:>9}" for name in names) + "    asked")
    for num_facts, score in scores.items():
        columns = "".join(
            f"{score.percent(name):9.1f}" if score.asked[name] else f"{'-':>9}" for name in names
        )
        print(f"{num_facts:5}{score.percent():7.1f} {columns}{score.asked.total():9}")
    print(f"glossary: {glossary.right.total()} of {glossary.asked.total()} exact")


def print_counting(scores: dict[int, Score]) -> None:
    """One line for each number of things to be counted side by side."""
    print(f"things counted, between {FACTS_WHILE_COUNTING} facts    right    asked")
    for num_keys, score in scores.items():
        print(f"{num_keys:31}{score.percent():9.1f}{score.asked.total():9}")


def main() -> None:
    """Prints the table from the command line."""
    parser = argparse.ArgumentParser(description="Measure a tiny model's recall on unseen worlds.")
    parser.add_argument(
        "--model", default="tiny", help="or tiny-hybrid, or a directory, such as train_tiny's"
    )
    parser.add_argument("--worlds", type=int, default=200)
    parser.add_argument("--json", type=Path, help="also write the counts to this file")
    options = parser.parse_args()
    llm = LLM(options.model)
    scores = {num_facts: evaluate(llm, options.worlds, num_facts) for num_facts in FACTS}
    glossary = evaluate_glossary(llm)
    print_table(scores, glossary)
    counting: dict[int, Score] = {}
    if LINEAR_ATTENTION in read_config(find_model(options.model)).kinds:
        keys = range(1, len(EVENTS) + 1)
        counting = {num_keys: evaluate_counting(llm, options.worlds, num_keys) for num_keys in keys}
        print_counting(counting)
    if options.json is not None:
        facts = {num_facts: score.counts() for num_facts, score in scores.items()}
        events = {num_keys: score.counts() for num_keys, score in counting.items()}
        counts = {"facts": facts, "glossary": glossary.counts(), "counting": events}
        options.json.write_text(json.dumps(counts, indent=2) + "\n")


if __name__ == "__main__":
    main()
