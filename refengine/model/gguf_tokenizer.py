"""The tokenizer that a GGUF file carries, built anew for the package `tokenizers`.

There are two families. "gpt2" merges bytes, in the order of a list of merges, after a regular expression has cut
the text. "llama" is SentencePiece: it has no merges but a score for every token, and joins those neighbours
whose token has the highest one. Listing all pairs that make a token, best token first, says the same.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from refengine.errors import CheckpointError
from refengine.model.gguf_file import GGUFFile

NONE = "no_vocab"
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # kinds of tokens; 1 is text, 5 unused, 6 a byte
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a space

# How a text is cut before its bytes are merged, by the name that the file gives it. No merge crosses a cut.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CUTS = {
    "default": None,  # GPT-2's own, which the package knows
    "gpt-2": None,
    "llama-bpe": _WORDS + r"\p{N}{1,3}" + _REST,
    "qwen2": _WORDS + r"\p{N}" + _REST,
}


def has_tokenizer(file: GGUFFile) -> bool:
    """Whether there is one at all."""
    return bool(_get(file, "model", NONE) != NONE)


def tokenizer_of(file: GGUFFile) -> Tokenizer:
    """Raises: CheckpointError if there is none, or it is damaged or of a kind that is not supported."""
    kind = _get(file, "model", NONE)
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(f"{file.path} has a {kind!r} tokenizer; only 'gpt2' and 'llama' are read")
    tokens = _get(file, "tokens", [])
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens) or not tokens:
        raise CheckpointError(f"{file.path} has a tokenizer with the same token twice, or without any")
    try:
        tokenizer = _byte_level(file, vocab) if kind == "gpt2" else _sentence_piece(file, vocab)
        _add_tokens(tokenizer, tokens, _get(file, "token_type", []), normalized=kind == "llama")
        _add_begin(tokenizer, file, tokens, default=kind == "llama" or _get(file, "pre") == "llama-bpe")
    except (IndexError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file.path} has a damaged tokenizer: {error}") from None
    return tokenizer


def _get(file: GGUFFile, key: str, default: Any = None) -> Any:
    return file.metadata.get(f"tokenizer.ggml.{key}", default)


def _byte_level(file: GGUFFile, vocab: dict[str, int]) -> Tokenizer:
    """Bytes, written as characters that can be seen, merged in the order of the file's list."""
    name = _get(file, "pre", "default")
    if name not in CUTS:
        raise CheckpointError(
            f"{file.path} cuts its text in a way named {name!r}; only {', '.join(CUTS)} are known"
        )
    merges = [tuple(merge.split(" ")) for merge in _get(file, "merges", [])]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=name == "llama-bpe"))
    cut = CUTS[name]
    if cut is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(cut), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(file: GGUFFile, vocab: dict[str, int]) -> Tokenizer:
    """Characters merged by the scores of what they make; what has no token falls apart into its bytes."""
    tokens, scores, kinds = list(vocab), _get(file, "scores", []), _get(file, "token_type", [])
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None)
    if unknown is None:
        number = _get(file, "unknown_token_id")
        unknown = None if number is None else tokens[number]
    model = models.BPE(
        vocab=vocab,
        merges=_merges(vocab, scores, kinds),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = _get(file, "add_space_prefix", True)
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges(vocab: dict[str, int], scores: list[float], kinds: list[int]) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a text token, those of the highest score first."""
    ranked = []
    for (token, i), score, kind in zip(vocab.items(), scores, kinds, strict=True):
        if kind not in (CONTROL, USER_DEFINED, UNKNOWN):
            cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
            ranked += [(-score, i, pair) for pair in cuts if pair[0] in vocab and pair[1] in vocab]
    ranked.sort(key=lambda entry: entry[:2])
    return [pair for _, _, pair in ranked]


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int], normalized: bool) -> None:
    """Tokens that are found in a text as they stand, before anything is merged. Mutates: the tokenizer.

    `normalized`: a user-defined one is looked for after spaces became `SPACE`, since it is written that way.
    """
    by_kind: dict[int, list[str]] = {CONTROL: [], USER_DEFINED: []}
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in by_kind:
            by_kind[kind].append(token)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in by_kind[CONTROL]])
    tokenizer.add_tokens([AddedToken(t, normalized=normalized) for t in by_kind[USER_DEFINED]])


def _add_begin(tokenizer: Tokenizer, file: GGUFFile, tokens: list[str], default: bool) -> None:
    """The token that begins every text, if the model was trained with one. Mutates: the tokenizer."""
    number = _get(file, "bos_token_id")
    if number is None or not _get(file, "add_bos_token", default):
        return
    begin = tokens[number]
    template = processors.TemplateProcessing(
        single=[begin, "$A"], pair=[begin, "$A", "$B"], special_tokens=[(begin, number)]
    )
    tokenizer.post_processor = template
