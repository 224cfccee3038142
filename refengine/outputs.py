"""What comes back from a request: tokens as they appear, text as far as it is certain, and why it ended.

Stop strings are found here, in the text, and not in the engine, which knows tokens only: a stop string may
begin in the middle of one token and end in the middle of another.
vLLM: V0 outputs.py and engine/output_processor/; V1 outputs.py, v1/engine/output_processor.py, detokenizer.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from refengine.errors import RequestError
from refengine.model.tokenizer import Tokenizer
from refengine.sampling import Logprob, SamplingParams

Scores = dict[int, Logprob]  # by token id

CONTEXT_TOKENS = (
    5  # of the prompt, shown to the decoder first: some tokenizers drop the space of a text's first word
)


@dataclass(frozen=True)
class SampledTokens:
    """What a model run gives back, by request id. A request that has not computed its last token has no entry."""

    sampled: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[Scores]] = field(default_factory=dict)
    prompt_logprobs: dict[str, tuple[int, list[Scores]]] = field(
        default_factory=dict
    )  # from this position on


@dataclass(frozen=True)
class StepOutput:
    """What one step added to one request; the common language of both engines."""

    request_id: str
    token_ids: list[int]
    finish_reason: str | None = None  # "stop", "length", "abort"; None: goes on
    stop_reason: int | str | None = None  # the stop token or string, if it was one
    num_cached_tokens: int = 0  # of the prompt, found in the cache
    logprobs: list[Scores] = field(default_factory=list)  # one per token, if asked for
    prompt_logprobs: tuple[int, list[Scores]] | None = None  # from this prompt position on


@dataclass
class RequestOutput:
    """A request and what it has produced so far. `new_text` is what `text` gained since a stream last showed it.

    A request that could not be served has `error` set, and reading its `text` raises it: a failure in a batch
    disturbs nobody else and cannot be mistaken for an empty answer.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    new_text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    logprobs: list[Scores] | None = None
    prompt_logprobs: list[Scores | None] | None = None
    error: RequestError | None = None
    _text: str = field(default="", repr=False)

    @property
    def text(self) -> str:
        if self.error is not None:
            raise self.error
        return self._text

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class OutputProcessor:
    """Turns step outputs of one request into its RequestOutput, and finds stop strings."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.output = RequestOutput(request_id, prompt, prompt_token_ids)
        if params.logprobs is not None:
            self.output.logprobs = []
        if params.prompt_logprobs is not None:
            self.output.prompt_logprobs = [None] * len(prompt_token_ids)
        self._stops = tuple(params.stop)
        self._stream = tokenizer.stream() if tokenizer is not None else None
        if self._stream is not None:
            for token_id in prompt_token_ids[-CONTEXT_TOKENS:]:
                self._stream.push(token_id)
        self._pending = ""  # decoded, but possibly the beginning of a stop string

    def process(self, step: StepOutput) -> bool:
        """Adds a step. Returns: whether a stop string ended the request, of which the engine must then be told.

        Mutates: the output.
        """
        output = self.output
        output.token_ids.extend(step.token_ids)
        output.num_cached_tokens = step.num_cached_tokens
        output.finish_reason, output.stop_reason = step.finish_reason, step.stop_reason
        if output.logprobs is not None:
            output.logprobs.extend(step.logprobs)
        if output.prompt_logprobs is not None and step.prompt_logprobs is not None:
            first, scores = step.prompt_logprobs
            output.prompt_logprobs[first : first + len(scores)] = scores
        stopped = self._add_text(step)
        if stopped is not None:
            output.finish_reason, output.stop_reason = "stop", stopped
        return stopped is not None and step.finish_reason is None

    def _add_text(self, step: StepOutput) -> str | None:
        """Adds the text that is certain. Returns: the stop string that was found, if one was."""
        if self._stream is None:
            return None
        # The token that ended the request is a signal, not text.
        is_signal = step.finish_reason == "stop" and bool(step.token_ids)
        tokens = step.token_ids[:-1] if is_signal else step.token_ids
        self._pending += "".join(self._stream.push(token) for token in tokens)
        if step.finish_reason is not None:
            self._pending += self._stream.finish()
        cut, stop = first_stop(self._pending, self._stops)
        if stop is None and step.finish_reason is None:
            cut = len(self._pending) - held_back(self._pending, self._stops)
        self.output._text += self._pending[:cut]
        self._pending = self._pending[cut:]
        return stop


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str | None]:
    """Where the earliest stop string begins and which it is; the end of the text and None if there is none."""
    found = [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]
    return (min(found)[0], min(found)[2]) if found else (len(text), None)


def held_back(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of `text` that could be the beginning of a stop string."""
    longest = max(map(len, stops), default=1) - 1
    for n in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-n:]) for stop in stops):
            return n
    return 0
