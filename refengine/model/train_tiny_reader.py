"""What a model reads in a training step: documents as token ids, and how much each token counts."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from refengine.model.corpus import EVENTS, World, pieces, with_events, with_glossary, world

PROMPT_WEIGHT = 0.05  # in the loss, of every token that is not part of an answer; those count 1
MAX_QUESTIONS = 8  # in a row; with 14 facts that makes about 350 tokens
GROWTH = ((0.0, 3), (0.15, 6), (0.3, 10), (0.45, 14))  # (from this share of the time, at most so many facts)
REPEATS = ((0.0, 0.5), (0.6, 0.1))  # (from this share of the time, this part of the hybrid's batches)
COUNTING = 0.4  # of the other batches
REACH = 8  # tokens that attention sees when only the state may count; see `HybridReader`


class Batch(NamedTuple):
    """One training step's text."""

    tokens: Tensor  # [rows, width] int64, padded at the end
    weights: Tensor  # [rows, width] float32: of predicting each token
    reach: int | None = None  # tokens that attention layers may look back; None: as far as they can


def most_facts(share: float) -> int:
    """How many facts a world may have when this share of the time is over."""
    return [facts for since, facts in GROWTH if since <= share][-1]


class Reader:
    """Draws documents and makes batches of them. Encoded sentences are kept: there are only so many."""

    def __init__(self, tokenizer: Tokenizer, seed: str, tokens_per_step: int) -> None:
        self.tokenizer, self.rng = tokenizer, random.Random(seed)
        self.tokens_per_step = tokens_per_step  # padding included
        self.known: dict[str, list[int]] = {}

    def batch(self, share: float) -> Batch:
        """As many documents about equally many facts as fit into one step. `share`: of the time that is over.

        Mutates: rng, known.
        """
        num_facts = self.rng.randint(1, most_facts(share))
        rows = [self.row(self.facts(num_facts))]
        while max(len(ids) for ids, _ in rows) * len(rows) <= self.tokens_per_step:
            rows.append(self.row(self.facts(num_facts)))
        return collate(rows[:-1] or rows)

    def facts(self, num_facts: int) -> World:
        """A world, now and then the glossary alone. Mutates: rng."""
        drawn = world(self.rng, num_facts)
        if self.rng.random() < 0.1:
            return with_glossary(self.rng, World((), ()), 4)
        if self.rng.random() < 0.5:
            return with_glossary(self.rng, drawn, self.rng.randint(1, 2))
        return drawn

    def row(self, drawn: World) -> tuple[list[int], list[float]]:
        """Token ids and loss weights of one document. Mutates: known."""
        ids: list[int] = []
        weights: list[float] = []
        for i, piece in enumerate(pieces(World(drawn.sentences, drawn.questions[:MAX_QUESTIONS]))):
            encoded = self.encode(piece)
            ids += encoded
            weights += [1.0 if i % 2 else PROMPT_WEIGHT] * len(encoded)
        return ids, weights

    def encode(self, text: str) -> list[int]:
        """Token ids, sentence by sentence. Mutates: known."""
        ids: list[int] = []
        for sentence in text.replace(". ", ".\0 ").replace("\n", "\0\n").split("\0"):
            if sentence not in self.known:
                self.known[sentence] = self.tokenizer.encode(sentence).ids
            ids += self.known[sentence]
        return ids


class HybridReader(Reader):
    """Facts, things to count, and, most of all in the beginning, random tokens that repeat themselves.

    Counting: attention could do it too. A linear-attention layer below it would number the events as they come, and
    the number would lie in the keys and values of the last one; then a lost state would go unnoticed. So for most
    of these batches attention sees only the last few tokens, and the number has to come through the state.

    Repeats: whoever looks for the same token further up and reads on there knows every second half by heart. In a
    document a few tokens teach that, here half of them.
    """

    def batch(self, share: float) -> Batch:
        """See Reader. Mutates: rng, known."""
        repeats = [part for since, part in REPEATS if since <= share][-1]
        draw = self.rng.random()
        if draw < repeats:
            return self.repeats()
        if draw < repeats + (1 - repeats) * COUNTING:
            return self.counting(most_facts(share))
        return super().batch(share)

    def repeats(self) -> Batch:
        """Rows of random tokens, each row twice. Mutates: rng."""
        length = self.rng.randint(8, 48)
        rows = [
            ([self.rng.randrange(self.tokenizer.get_vocab_size()) for _ in range(length)] * 2)
            for _ in range(self.tokens_per_step // (2 * length))
        ]
        weights = [0.0] * (length + 1) + [1.0] * (length - 1)  # the first repeated token is a surprise
        return collate([(row, weights) for row in rows])

    def counting(self, max_facts: int) -> Batch:
        """Things that are heard again and again, between up to half as many facts. Mutates: rng, known."""
        near = self.rng.random() < 0.7
        num_facts = self.rng.randint(0, max_facts // 2)
        num_keys = self.rng.randint(1, len(EVENTS))
        rows: list[tuple[list[int], list[float]]] = []
        while max((len(ids) for ids, _ in rows), default=0) * len(rows) <= self.tokens_per_step:
            drawn = with_events(self.rng, world(self.rng, num_facts), num_keys)
            asked = [q for q in drawn.questions if q.kind == "count" or not near]
            rows.append(self.row(World(drawn.sentences, tuple(asked))))
        return collate(rows[:-1] or rows, REACH if near else None)


def collate(rows: list[tuple[list[int], list[float]]], reach: int | None = None) -> Batch:
    """Rows of different lengths as one batch."""
    tokens = pad_sequence([torch.tensor(ids) for ids, _ in rows], batch_first=True)
    weights = pad_sequence([torch.tensor(importance) for _, importance in rows], batch_first=True)
    return Batch(tokens, weights, reach)
