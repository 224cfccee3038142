"""Text to tokens and back, whole and piece by piece."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as HFTokenizer

from refengine.errors import CheckpointError
from refengine.model.tokenizer import REPLACEMENT, Tokenizer, load_tokenizer

MERGES = [
    ("t", "h"),
    ("th", "e"),
    ("Ġ", "the"),
    ("Ã", "¤"),
    ("ð", "Ł"),
    ("ðŁ", "ĺ"),
]  # the last two cut an emoji
TEXTS = [
    "",
    "the the",
    " the",
    "Größe: 3 µm",
    "日本語",
    "a😀b😃",
    "😀" * 5,
    "e\u0301 नमस्ते 👩‍👩‍👧",
    "tab\tend\n\n",
]


def byte_level() -> HFTokenizer:
    """As GPT-2, Llama 3 and Qwen: every byte has a token, so a character may take up to four."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(symbols + ["".join(pair) for pair in MERGES])}
    tokenizer = HFTokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>"), AddedToken("<pad>")])
    return tokenizer


def byte_fallback() -> HFTokenizer:
    """As Llama 2: words begin with a mark for the space before them, unknown characters become bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdehtn", "▁the", "▁a"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("h", "e"), ("t", "he"), ("▁", "the"), ("▁", "a")]
    vocab |= {piece: len(vocab) + i for i, piece in enumerate(["he", "the"])}
    tokenizer = HFTokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<eos>")])
    return tokenizer


KINDS = {"byte level": byte_level, "byte fallback": byte_fallback}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    KINDS[request.param]().save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def pieces(tokenizer: Tokenizer, token_ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    stream = tokenizer.stream(skip_special_tokens)
    return [*(stream.push(token_id) for token_id in token_ids), stream.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_text_that_is_no_unicode(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"^character 4 of the text is half of a surrogate pair$"):
        tokenizer.encode("the \ud800 cat")


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_and_never_hold_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    got = pieces(tokenizer, tokenizer.encode(text))
    assert "".join(got) == text
    assert not any(REPLACEMENT in piece for piece in got)
    assert got[-1] == ""  # nothing was held back without need


def test_a_character_comes_with_its_last_token(directory: Path) -> None:
    tokenizer = Tokenizer(directory)
    ids = tokenizer.encode("a😀b")
    assert len(ids) == 4  # "a", three of the four bytes, the fourth, "b"
    assert pieces(tokenizer, ids) == ["a", "", "😀", "b", ""]


def test_text_comes_as_early_as_it_can(tokenizer: Tokenizer) -> None:
    assert "".join(pieces(tokenizer, tokenizer.encode("the the the"))[:2]).startswith("the")


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=12), kind=st.sampled_from(sorted(KINDS)))
def test_any_text(text: str, kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    tokenizer = shared(kind, tmp_path_factory)
    ids = tokenizer.encode(text)
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 263), max_size=15))
def test_any_tokens(ids: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    """A model may say anything: lone continuation bytes, half characters, special tokens in between."""
    tokenizer = shared("byte level", tmp_path_factory)
    for skip in (True, False):
        assert "".join(pieces(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


def test_a_broken_end_is_shown_at_last(directory: Path) -> None:
    tokenizer = Tokenizer(directory)
    ids = tokenizer.encode("a日")[:-1]
    assert pieces(tokenizer, ids) == ["a", "", "", REPLACEMENT]


def test_a_stream_can_be_used_again(directory: Path) -> None:
    tokenizer = Tokenizer(directory)
    stream = tokenizer.stream()
    for _ in range(2):
        assert stream.push(tokenizer.encode("日")[0]) == ""
        assert stream.finish() == REPLACEMENT
    assert stream.finish() == ""


def test_a_token_without_text_does_not_swallow_the_next_space(tokenizer: Tokenizer) -> None:
    """The space in front of a text's first word is dropped, so a window must not begin at a skipped token."""
    ids = [*tokenizer.encode("a"), *tokenizer.encode("<eos>")[-1:], *tokenizer.encode("a the")[1:]]
    assert tokenizer.decode(ids) == "".join(pieces(tokenizer, ids)) == "a the"


def test_a_long_stream_decodes_short_windows(directory: Path) -> None:
    """Decoding everything anew for every token would make long answers quadratic."""
    tokenizer = Tokenizer(directory)
    stream = tokenizer.stream()
    longest = 0
    for token_id in tokenizer.encode("the quick 😀 fox " * 30):
        stream.push(token_id)
        longest = max(longest, len(stream.window))
    assert longest <= 8


def test_special_tokens(directory: Path) -> None:
    tokenizer = Tokenizer(directory)
    ids = tokenizer.encode("the<eos>")
    assert tokenizer.decode(ids) == "the"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "the<eos>"
    assert tokenizer.vocab_size == 256 + len(MERGES) + 2


def test_saved_truncation_and_padding_do_not_apply(tmp_path: Path) -> None:
    """A file saved from training carries them; a prompt that is silently cut is the last thing one wants."""
    saved = byte_level()
    saved.enable_truncation(4)
    saved.enable_padding(length=6)
    saved.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer(tmp_path).encode("0123456789")) == 10
    assert len(Tokenizer(tmp_path).encode("0")) == 1


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ()),
        ({"tokenizer_config.json": {"eos_token": "<eos>"}}, ("<eos>",)),
        ({"tokenizer_config.json": {"eos_token": {"content": "<eos>", "lstrip": False}}}, ("<eos>",)),
        ({"tokenizer_config.json": {"eos_token": None}}, ()),
        ({"tokenizer_config.json": {"eos_token": "<unheard of>"}}, ()),
        ({"generation_config.json": {"eos_token_id": 5}}, (5,)),
        (
            {
                "generation_config.json": {"eos_token_id": [5, 6]},
                "tokenizer_config.json": {"eos_token": "<eos>"},
            },
            (5, 6, "<eos>"),
        ),
    ],
)
def test_end_of_text_ids(directory: Path, files: dict[str, object], expected: tuple[int | str, ...]) -> None:
    sizes = {"vocab_size": 300, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    network = {
        "model_type": "llama",
        "num_attention_heads": 1,
        "max_position_embeddings": 8,
        "rms_norm_eps": 1e-6,
    }
    for name, content in ({"config.json": sizes | network} | files).items():
        (directory / name).write_text(json.dumps(content))
    tokenizer = Tokenizer(directory)
    (eos,) = tokenizer.encode("<eos>")
    assert tokenizer.eos_token_ids == tuple(eos if item == "<eos>" else item for item in expected)


def test_a_tokenizer_needs_no_model(directory: Path) -> None:
    assert Tokenizer(directory).eos_token_ids == ()


def test_a_model_without_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    with pytest.raises(CheckpointError, match=r"has no tokenizer.json"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "{}", '{"model": {"type": "Abacus"}}'])
def test_a_damaged_tokenizer(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer.json is not a tokenizer: ") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


_shared: dict[str, Tokenizer] = {}


def shared(kind: str, factory: pytest.TempPathFactory) -> Tokenizer:
    """One tokenizer for all examples of a property."""
    if kind not in _shared:
        directory = factory.mktemp("shared")
        KINDS[kind]().save(str(directory / "tokenizer.json"))
        _shared[kind] = Tokenizer(directory)
    return _shared[kind]
