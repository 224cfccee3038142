"""Tokenizers out of GGUF files: both families, against the ones they were written from and a definition."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from refengine import LLM
from refengine.errors import CheckpointError
from refengine.model.gguf_convert import convert
from refengine.model.gguf_file import GGUFFile
from refengine.model.gguf_tokenizer import tokenizer_of
from refengine.model.tokenizer import Tokenizer, load_tokenizer
from tests.unit.gguf_files import write_gguf
from tests.unit.networks import make_network

pytest.importorskip("gguf")
SPACE = "▁"
TEXT, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

# A small SentencePiece vocabulary, as Gemma's: control tokens, runs of spaces and newlines that are matched as they
# stand, bytes, and text tokens whose score falls with their number.
PIECES = [f"{SPACE}the", "the", f"{SPACE}t", "th", "he", "at", "hat", f"{SPACE}h", "ea", "aa", "aaa", "te"]
TOKENS: list[tuple[str, int]] = [
    ("<pad>", CONTROL),
    ("<eos>", CONTROL),
    ("<bos>", CONTROL),
    ("<unk>", UNKNOWN),
    ("\n\n", USER_DEFINED),
    (SPACE * 2, USER_DEFINED),
    (SPACE * 3, USER_DEFINED),
    *((f"<0x{byte:02X}>", BYTE) for byte in range(256)),
    *((piece, TEXT) for piece in (*PIECES, *"aeht", SPACE)),
]
NUMBERS = {token: i for i, (token, _) in enumerate(TOKENS)}
SCORES = [float(-i) if kind == TEXT else 0.0 for i, (_, kind) in enumerate(TOKENS)]


def sentence_piece(writer: Any) -> None:
    """Writes the vocabulary above as Gemma's files have it."""
    writer.add_tokenizer_model("llama")
    writer.add_token_list([token for token, _ in TOKENS])
    writer.add_token_scores(SCORES)
    writer.add_token_types([kind for _, kind in TOKENS])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_add_space_prefix(False)


def by_definition(text: str) -> list[int]:
    """What SentencePiece does: the longest user-defined token first, then the best neighbours, over and over."""
    fixed = sorted((t for t, kind in TOKENS if kind == USER_DEFINED), key=len, reverse=True)
    parts: list[list[str]] = [[]]  # symbols that may still be joined
    text, at = text.replace(" ", SPACE), 0
    while at < len(text):
        found = next((token for token in fixed if text.startswith(token, at)), None)
        if found is None:
            parts[-1].append(text[at])
        else:
            parts += [[found], []]
        at += len(found or "x")
    ids: list[int] = []
    for symbols in parts:
        while pairs := [
            (SCORES[NUMBERS[a + b]], -i)
            for i, (a, b) in enumerate(itertools.pairwise(symbols))
            if a + b in NUMBERS and TOKENS[NUMBERS[a + b]][1] == TEXT
        ]:
            i = -max(pairs)[1]
            symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
        for symbol in symbols:
            as_bytes = [NUMBERS[f"<0x{byte:02X}>"] for byte in symbol.encode()]
            ids += [NUMBERS[symbol]] if symbol in NUMBERS else as_bytes
    return ids


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_network(directory, "Llama", num_hidden_layers=1, vocab_size=300)
    return directory


@pytest.fixture(scope="module")
def write(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a file with a tokenizer, and other metadata where given."""

    def write(tokenizer: Callable[[Any], None], **metadata: Any) -> Path:
        file = tmp_path_factory.mktemp("file") / "x.gguf"
        changes = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
        return write_gguf(file, source, tokenizer=tokenizer, metadata=changes)

    return write


# SentencePiece


def test_scores_are_obeyed(write: Callable[..., Path]) -> None:
    tokenizer, dice = Tokenizer(write(sentence_piece)), random.Random(0)
    for _ in range(500):
        text = "".join(dice.choice("aaehttt   \nxé😀") for _ in range(dice.randint(0, 25)))
        ids = tokenizer.encode(text)
        assert ids == [NUMBERS["<bos>"], *by_definition(text)], text
        assert tokenizer.decode(ids) == text


def test_its_control_tokens_begin_and_end(write: Callable[..., Path]) -> None:
    tokenizer = Tokenizer(write(sentence_piece, eot_token_id=0))
    assert tokenizer.eos_token_ids == (1, 0)
    assert tokenizer.encode("the", add_special_tokens=False) == [NUMBERS["the"]]
    assert tokenizer.decode([2, NUMBERS["the"], 1]) == "the"
    assert tokenizer.encode("a<eos>")[-1] == 1


def test_the_first_word_may_get_a_space(write: Callable[..., Path]) -> None:
    """As in Llama 2, where the file does not say otherwise: put before it, and taken away again."""

    def llama2(writer: Any) -> None:
        sentence_piece(writer)
        del writer.kv_data[0]["tokenizer.ggml.add_space_prefix"]

    tokenizer = Tokenizer(write(llama2))
    assert tokenizer.encode("the hat") == [2, *by_definition(" the hat")]
    assert tokenizer.decode(tokenizer.encode("the hat")) == "the hat"


# Bytes


def byte_level(name: str, **options: Any) -> tuple[HFTokenizer, Callable[[Any], None]]:
    """A tokenizer trained on a few words, and what writes it to a file."""
    tokenizer = HFTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    words = ["the theory of the hat", "there is a hat here", "1234 hats, 12 hats!", "né né\n\n\n  x"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        words * 9, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    tokenizer.add_special_tokens(["<|end|>"])

    def write_it(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(name)
        writer.add_token_list([*tokens, "<|end|>"])
        writer.add_token_types([TEXT] * len(tokens) + [CONTROL])
        writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
        writer.add_eos_token_id(len(tokens))

    return tokenizer, write_it


def test_merges_are_obeyed(write: Callable[..., Path]) -> None:
    theirs, write_it = byte_level("gpt-2")
    ours, dice = Tokenizer(write(write_it)), random.Random(0)
    for _ in range(300):
        text = "".join(
            dice.choice(["the", "hat", " ", "  ", "12", "é", "\n", "!", "😀", "<|end|>"]) for _ in range(9)
        )
        assert ours.encode(text) == theirs.encode(text).ids
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == text
    assert ours.eos_token_ids == (theirs.token_to_id("<|end|>"),)


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("gpt-2", ["hats", "'", "S", " ", " 1234", "\n", "\n", "x"]),
        ("qwen2", ["hats", "'S", " ", " ", "1", "2", "3", "4", "\n\n", "x"]),
        ("llama-bpe", ["hats", "'S", " ", " ", "123", "4", "\n\n", "x"]),
    ],
)
def test_the_text_is_cut_as_the_file_says(write: Callable[..., Path], name: str, pieces: list[str]) -> None:
    """Looked at before anything is merged, since the tokens of a piece may be smaller."""
    _, write_it = byte_level(name)
    text = "hats'S  1234\n\nx"
    parts = tokenizer_of(GGUFFile(write(write_it))).pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in parts] == pieces


# With the model


def test_it_comes_with_the_model(write: Callable[..., Path]) -> None:
    llm = LLM(str(write(sentence_piece)), num_blocks=20)
    (output,) = llm.generate(["the hat"])
    assert output.prompt_token_ids == [2, *by_definition("the hat")]


def test_it_is_converted_with_the_model(write: Callable[..., Path], tmp_path: Path) -> None:
    file = write(sentence_piece)
    convert(GGUFFile(file), tmp_path, torch.float32)
    ours, converted = Tokenizer(file), Tokenizer(tmp_path)
    assert converted.encode("the  hat é\n\n") == ours.encode("the  hat é\n\n")
    assert converted.eos_token_ids == ours.eos_token_ids == (1,)


def test_there_may_be_none(source: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "x.gguf", source)
    assert load_tokenizer(file) is None


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ({"model": "t5"}, "has a 't5' tokenizer; only 'gpt2' and 'llama' are read"),
        ({"model": "gpt2", "pre": "tekken"}, "cuts its text in a way named 'tekken'; only default, "),
        ({"tokens": ["a", "a"]}, "the same token twice"),
        ({"tokens": ["a", "b"]}, "has a damaged tokenizer"),
        ({"scores": [0.0]}, "has a damaged tokenizer"),
        ({"bos_token_id": 100_000}, "has a damaged tokenizer"),
    ],
)
def test_what_cannot_be_read_is_refused(
    write: Callable[..., Path], metadata: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        Tokenizer(write(sentence_piece, **metadata))
