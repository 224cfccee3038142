"""Text to token ids and back, and back again one token at a time without breaking a character.

A thin layer over the `tokenizers` package. The one thing it adds is `TextStream`: a token may end in the
middle of a UTF-8 character, and what is shown to a reader must not.
vLLM: V0 transformers_utils/detokenizer.py, V1 v1/engine/detokenizer.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as HFTokenizer

from refengine.errors import CheckpointError
from refengine.model.checkpoint import read_json
from refengine.model.gguf_file import GGUFFile
from refengine.model.gguf_tokenizer import has_tokenizer, tokenizer_of
from refengine.model.loader import GGUF, find_model, read_config

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what bytes that are no character yet decode to


class Tokenizer:
    """The tokenizer of one model directory or GGUF file.

    Raises: CheckpointError if it is missing, damaged, or of a kind that is not supported.
    """

    def __init__(self, path: Path) -> None:
        self._tokenizer = tokenizer_of(GGUFFile(path)) if path.suffix == GGUF else _from_directory(path)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.eos_token_ids = self._eos_token_ids(path)

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included. The model's own vocabulary may be padded beyond it."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises: ValueError for a text with half of a surrogate pair, as one that was badly cut has it."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"character {error.start} of the text is half of a surrogate pair") from None
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a finished list of tokens; for a growing one see `stream`."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        """A decoder for tokens that come one at a time."""
        return TextStream(self, skip_special_tokens)

    def _eos_token_ids(self, path: Path) -> tuple[int, ...]:
        """Ids that end a text according to the model's configs and the tokenizer's own, in this order."""
        has_config = path.suffix == GGUF or (path / "config.json").exists()
        ids = read_config(path).eos_token_ids if has_config else ()
        file = path / "tokenizer_config.json"
        token = read_json(file).get("eos_token") if file.exists() else None
        if isinstance(token, dict):  # written with its flags
            token = token.get("content")
        own = self._tokenizer.token_to_id(token) if isinstance(token, str) else None
        return tuple(dict.fromkeys(ids if own is None else (*ids, own)))


def _from_directory(directory: Path) -> HFTokenizer:
    file = directory / "tokenizer.json"
    if not file.exists():
        raise CheckpointError(f"{directory} has no tokenizer.json")
    try:
        return HFTokenizer.from_file(str(file))
    except Exception as error:  # the package raises bare Exception
        raise CheckpointError(f"{file} is not a tokenizer: {error}") from None


class TextStream:
    """Decodes a growing list of tokens; the pieces add up to `decode` of the whole list.

    Decoding a token alone is not enough, since a piece may depend on the one before (a leading space, a
    character in several tokens). So a short window is decoded, from `start`, the last place where the text
    was whole, and what was already given out of it is cut off.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.window: list[
            int
        ] = []  # tokens since the last place where the text was whole, and those before it
        self.shown = 0  # tokens at the head of the window whose text was given out
        self.prefix = ""  # that text

    def push(self, token_id: int) -> str:
        """The text that is certain now, often "". Mutates: the window."""
        self.window.append(token_id)
        text = self._decode(self.window)
        if text.endswith(REPLACEMENT) or len(text) <= len(self.prefix):
            return ""
        piece = text[len(self.prefix) :]
        self.window = self.window[self.shown :]
        self.shown = len(self.window)
        self.prefix = self._decode(self.window)
        return piece

    def finish(self) -> str:
        """What is left when no token follows: a broken character comes out as the replacement character."""
        piece = self._decode(self.window)[len(self.prefix) :]
        self.window, self.shown, self.prefix = [], 0, ""
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, self.skip_special_tokens)


def load_tokenizer(path_or_name: str | Path) -> Tokenizer | None:
    """The tokenizer of a model, or None if it comes without one; requests must then be token ids.

    Raises: CheckpointError as `find_model` and `Tokenizer` do.
    """
    path = find_model(path_or_name)
    is_gguf = path.suffix == GGUF
    has_one = has_tokenizer(GGUFFile(path)) if is_gguf else (path / "tokenizer.json").exists()
    return Tokenizer(path) if has_one else None
