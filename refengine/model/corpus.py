"""The text the tiny model learns from: small worlds of facts, and questions whose answers can be checked.

A language model of a million parameters knows nothing, but it can read. So a document here states a few
facts that were drawn at random ("The drum is in the tower."), then asks for them. The answer is nowhere but
in the context, hence nowhere but in the KV cache: an engine that hands a request the wrong block gives a
wrong answer that anybody can see. The one thing learned by heart is a glossary of the words of this book.

Everything is made from the lists below, so the corpus and the weights trained on it carry no other licence.

    python -m refengine.model.corpus --seed 0 --documents 5
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words("Ada Ben Cleo Dan Eva Finn Gus Hana Ivan Jo Kim Leo Mia Ned Olga Pia Quin Rosa Sam Tess")
JOBS = _words("baker pilot nurse farmer painter sailor teacher tailor miner singer doctor clerk")
THINGS = _words("kite lamp drum clock coin rope book ring bell map cup flute")
PLACES = _words("barn cave tower mill harbor garden cellar attic market bridge forest chapel")
ANIMALS = _words("cat dog horse goat owl fox duck bear hen mule lamb swan")
VEHICLES = _words("boat cart sled wagon truck canoe tram bus van raft bike plane")
COLOURS = _words("red blue green black white gold pink gray brown purple silver yellow")
DOORS = _words("vault safe gate locker chest shed hatch cabin booth stable studio depot")


@dataclass(frozen=True)
class FactKind:
    """One form of fact. A world uses a key of a kind at most once, so every question has one answer."""

    name: str
    keys: tuple[str, ...]
    values: tuple[str, ...]  # empty: a code of three digits
    sentence: str
    question: str


KINDS = (
    FactKind("place", THINGS, PLACES, "The {key} is in the {value}.", "Where is the {key}?"),
    FactKind("owner", ANIMALS, NAMES, "The {key} belongs to {value}.", "Who owns the {key}?"),
    FactKind("job", NAMES, JOBS, "{key} works as a {value}.", "What is the job of {key}?"),
    FactKind("home", NAMES, PLACES, "{key} lives by the {value}.", "Where does {key} live?"),
    FactKind("colour", VEHICLES, COLOURS, "The {key} is painted {value}.", "Which colour is the {key}?"),
    FactKind("code", DOORS, (), "The code of the {key} is {value}.", "What is the code of the {key}?"),
)

EVENTS = _words("gong horn siren whistle")  # what is counted
EVENT, HOW_OFTEN = "The {key} was heard.", "How often was the {key} heard?"
COUNT = "The {key} was heard {count} times."
MOST_EVENTS = 9  # of one kind: the answer is a single digit

FILLERS = (
    "The wind was cold that day.",
    "Nobody spoke for a while.",
    "It rained all night.",
    "A train went by.",
    "The sun came up slowly.",
    "Everyone had soup for lunch.",
    "Somewhere a door closed.",
    "They walked home together.",
    "The road was long and quiet.",
    "Snow fell on the hills.",
)

GLOSSARY = (
    ("What is a token?", "A token is a piece of text that the model reads as one number."),
    ("What is the KV cache?", "The KV cache keeps the keys and values of all tokens that were computed."),
    ("What is a KV block?", "A KV block is a fixed number of token slots in the KV cache."),
    ("What is a slot?", "A slot is the room for the key and value of one token."),
    ("What is a slot mapping?", "A slot mapping says into which slot each new key and value is written."),
    ("What is a block table?", "A block table lists the blocks of a request in the order of its tokens."),
    ("What is prefix caching?", "Prefix caching reuses the blocks of a prefix that was computed before."),
    ("What is a block hash?", "A block hash covers the tokens of a block and the hash of its parent."),
    ("What is a cache hit?", "A cache hit is a full block whose hash is found in the cache."),
    ("What is the free queue?", "The free queue keeps unused blocks in the order of their eviction."),
    ("What is eviction?", "Eviction takes the hash from a free block so that others can use the block."),
    ("What is a reference count?", "A reference count says how many requests use a block."),
    ("What is the null block?", "The null block is block zero and stands where no block is needed."),
    ("What is the scheduler?", "The scheduler decides how many tokens each request runs in a step."),
    ("What is a step?", "A step is one run of the model over the tokens of many requests."),
    ("What is a token budget?", "A token budget limits how many tokens run in one step."),
    ("What is prefill?", "Prefill computes the keys and values of the prompt."),
    ("What is decode?", "Decode computes one new token for each running request."),
    ("What is chunked prefill?", "Chunked prefill splits a long prompt over several steps."),
    ("What is preemption?", "Preemption takes the blocks of a running request and lets it wait."),
    ("What is paged attention?", "Paged attention reads keys and values through the block table."),
    ("What is a sliding window?", "A sliding window lets a layer see only the last few tokens."),
    ("What is a KV event?", "A KV event tells others which block was stored or removed."),
    ("What is a cache salt?", "A cache salt keeps the blocks of one user apart from all others."),
)


@dataclass(frozen=True)
class Question:
    """A question and the only right answer. `kind` is the name of the fact kind, "glossary" or "count"."""

    kind: str
    question: str
    answer: str


@dataclass(frozen=True)
class World:
    """Facts with some idle sentences between them, and one question for each fact, in random order."""

    sentences: tuple[str, ...]
    questions: tuple[Question, ...]

    @property
    def context(self) -> str:
        """The facts as one line of text: the prefix that all questions about this world share."""
        return " ".join(self.sentences)

    def prompt(self, question: str) -> str:
        """The exact text the model expects for a question about this world."""
        return prompt(question, self.context)


GLOSSARY_QUESTIONS = tuple(Question("glossary", question, answer) for question, answer in GLOSSARY)


def prompt(question: str, context: str = "") -> str:
    """Context on a line of its own (none for the glossary), the question, and the cue for the answer.

    The model continues with a space, the answer and a line end; the line end is its end-of-sequence token.
    """
    start = f"{context}\n" if context else ""
    return f"{start}Q: {question}\nA:"


def world(rng: random.Random, num_facts: int, filler: float = 0.5) -> World:
    """Draws `num_facts` facts and puts an idle sentence after a fact with probability `filler`.

    Mutates: rng. The same state of rng gives the same world.
    Raises: ValueError if there are not that many different keys.
    """
    pool = [(kind, key) for kind in KINDS for key in kind.keys]
    sentences: list[str] = []
    questions: list[Question] = []
    for kind, key in rng.sample(pool, num_facts):
        value = rng.choice(kind.values) if kind.values else f"{rng.randrange(1000):03d}"
        sentence = kind.sentence.format(key=key, value=value)
        sentences.append(sentence)
        questions.append(Question(kind.name, kind.question.format(key=key), sentence))
        if rng.random() < filler:
            sentences.append(rng.choice(FILLERS))
    rng.shuffle(questions)
    return World(tuple(sentences), tuple(questions))


def with_glossary(rng: random.Random, drawn: World, count: int) -> World:
    """The same world with `count` glossary questions mixed in: no context may make it forget those."""
    questions = [*drawn.questions, *rng.sample(GLOSSARY_QUESTIONS, count)]
    rng.shuffle(questions)
    return World(drawn.sentences, tuple(questions))


def with_events(rng: random.Random, drawn: World, num_keys: int) -> World:
    """The same world in which some things are heard again and again, with a question for each of them.

    Their sentences are strewn in at random. Mutates: rng. Raises: ValueError for more keys than there are.
    """
    sentences = list(drawn.sentences)
    questions = list(drawn.questions)
    for key in rng.sample(EVENTS, num_keys):
        count = rng.randint(2, MOST_EVENTS)
        for _ in range(count):
            sentences.insert(rng.randint(0, len(sentences)), EVENT.format(key=key))
        answer = COUNT.format(key=key, count=count)
        questions.append(Question("count", HOW_OFTEN.format(key=key), answer))
    rng.shuffle(questions)
    return World(tuple(sentences), tuple(questions))


def document(drawn: World) -> str:
    """What the model is trained on: the context, then every question with its answer, one line each."""
    return "".join(pieces(drawn))


def pieces(drawn: World) -> list[str]:
    """`document` cut so that every odd entry is an answer with its line end, and every even one is not.

    Each cut lies where the tokenizer splits anyway, so pieces may be encoded one by one.
    """
    start = f"{drawn.context}\n" if drawn.sentences else ""
    out: list[str] = []
    for question in drawn.questions:
        out += [f"{start}{prompt(question.question)}", f" {question.answer}\n"]
        start = ""
    return out


def main() -> None:
    """Prints sample documents."""
    parser = argparse.ArgumentParser(description="Print documents of the tiny model's corpus.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--documents", type=int, default=5)
    parser.add_argument("--facts", type=int, default=5)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    for _ in range(options.documents):
        print(document(with_glossary(rng, world(rng, options.facts), 1)))


if __name__ == "__main__":
    main()
