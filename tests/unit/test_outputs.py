"""From step outputs to text: what is certain, what is held back, where a stop text begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from refengine.outputs import CONTEXT_TOKENS, OutputProcessor, StepOutput, first_stop, held_back
from refengine.sampling import Logprob, SamplingParams


class Pieces:
    """A tokenizer whose token i is the i-th of these texts; the last one is half a character until `finish`."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces
        self.pushed: list[int] = []

    def stream(self) -> Pieces:
        return self

    def push(self, token_id: int) -> str:
        self.pushed.append(token_id)
        return self.pieces[token_id]

    def finish(self) -> str:
        return "~"


def make(pieces: Sequence[str], stop: Any = (), prompt: Sequence[int] = (), **params: Any) -> OutputProcessor:
    tokenizer: Any = Pieces(*pieces)
    return OutputProcessor("r", None, list(prompt), SamplingParams(stop=stop, **params), tokenizer)


def feed(processor: OutputProcessor, *tokens: int) -> list[tuple[str, bool]]:
    """One token per step. Returns: the text after each, and whether a stop text ended the request."""
    answers = []
    for token in tokens:
        stopped = processor.process(StepOutput("r", [token]))
        answers.append((processor.output.text, stopped))
    return answers


def test_text_grows_by_what_is_certain() -> None:
    processor = make(["a", "", "bc"])
    assert feed(processor, 0, 1, 2) == [("a", False), ("a", False), ("abc", False)]
    assert processor.output.token_ids == [0, 1, 2]
    assert not processor.output.finished


def test_a_stop_text_within_one_token() -> None:
    processor = make(["abSTOPcd"], stop="STOP")
    assert feed(processor, 0) == [("ab", True)]
    assert (processor.output.finish_reason, processor.output.stop_reason) == ("stop", "STOP")


def test_a_stop_text_across_three_tokens_is_never_shown() -> None:
    """Misconception: "a stop text is a token"."""
    processor = make(["abS", "TO", "Pcd"], stop="STOP")
    assert feed(processor, 0, 1, 2) == [("ab", False), ("ab", False), ("ab", True)]


def test_what_looked_like_a_stop_text_is_shown_when_it_is_none() -> None:
    processor = make(["abS", "TO", "Xcd"], stop="STOP")
    assert feed(processor, 0, 1, 2) == [("ab", False), ("ab", False), ("abSTOXcd", False)]


def test_what_was_held_back_is_shown_at_the_end() -> None:
    """A request that ends by length never learns whether it was a stop text; so it was text."""
    processor = make(["abS", "TO"], stop="STOP")
    feed(processor, 0)
    assert not processor.process(StepOutput("r", [1], finish_reason="length"))
    assert processor.output.text == "abSTO~"


def test_a_stop_text_in_the_last_step_cuts_but_the_engine_knows_already() -> None:
    processor = make(["ab", "STOP"], stop="STOP")
    feed(processor, 0)
    assert not processor.process(StepOutput("r", [1], finish_reason="length"))
    assert processor.output.text == "ab"
    assert (processor.output.finish_reason, processor.output.stop_reason) == ("stop", "STOP")


def test_the_token_that_stopped_the_request_is_no_text() -> None:
    processor = make(["ab", "<end>"])
    feed(processor, 0)
    processor.process(StepOutput("r", [1], finish_reason="stop", stop_reason=1))
    assert processor.output.text == "ab~"
    assert (processor.output.token_ids, processor.output.stop_reason) == ([0, 1], 1)


def test_the_last_token_of_a_length_stop_is_text() -> None:
    processor = make(["ab", "cd"])
    processor.process(StepOutput("r", [0, 1], finish_reason="length"))
    assert processor.output.text == "abcd~"


def test_the_decoder_sees_the_end_of_the_prompt_but_its_text_is_not_shown() -> None:
    """Some tokenizers drop the space before a text's first word; an answer is not a text of its own."""
    pieces = ["w"] * 10 + ["answer"]
    processor = make(pieces, stop="ww", prompt=range(10))
    stream: Any = processor._stream
    assert stream.pushed == list(range(10 - CONTEXT_TOKENS, 10))
    assert feed(processor, 10) == [("answer", False)]


def test_without_a_tokenizer_there_are_only_tokens() -> None:
    processor = OutputProcessor("r", None, [1], SamplingParams(), None)
    processor.process(StepOutput("r", [5], finish_reason="length"))
    assert (processor.output.token_ids, processor.output.text) == ([5], "")


def test_scores_are_kept_if_they_were_asked_for() -> None:
    score = {7: Logprob(-0.5, 1)}
    silent = make(["a"], prompt=[0, 0, 0])
    silent.process(StepOutput("r", [0], logprobs=[score], prompt_logprobs=(1, [score])))
    assert (silent.output.logprobs, silent.output.prompt_logprobs) == (None, None)
    asked = make(["a"], prompt=[0, 0, 0], logprobs=0, prompt_logprobs=0)
    asked.process(StepOutput("r", [], prompt_logprobs=(1, [score])))
    assert asked.output.prompt_logprobs == [None, score, None]
    asked.process(StepOutput("r", [0], logprobs=[score], prompt_logprobs=(2, [score])))
    assert asked.output.prompt_logprobs == [None, score, score]
    assert asked.output.logprobs == [score]


def test_scores_given_again_after_a_preemption_replace_the_old_ones() -> None:
    processor = make(["a"], prompt=[0, 0, 0], prompt_logprobs=0)
    for value in (-0.5, -0.25):
        processor.process(StepOutput("r", [], prompt_logprobs=(1, [{7: Logprob(value, 1)}] * 2)))
    assert processor.output.prompt_logprobs == [None, *[{7: Logprob(-0.25, 1)}] * 2]


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("abc", (), (3, None)),
        ("abc", ("x",), (3, None)),
        ("abcabc", ("c",), (2, "c")),
        ("abcabc", ("ca", "bc"), (1, "bc")),
        ("abcd", ("bc", "bcd"), (1, "bcd")),
        ("", ("x",), (0, None)),
    ],
)
def test_the_earliest_stop_text_wins_and_of_two_the_longer(text: str, stops: Any, expected: Any) -> None:
    assert first_stop(text, stops) == expected


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("abc", (), 0),
        ("abS", ("STOP",), 1),
        ("STO", ("STOP",), 3),
        ("aaa", ("aab",), 2),
        ("ab", ("bcd", "abc"), 2),
        ("xyz", ("STOP",), 0),
        ("S", ("S",), 0),
    ],
)
def test_as_much_is_held_back_as_could_begin_a_stop_text(text: str, stops: Any, expected: int) -> None:
    assert held_back(text, stops) == expected
