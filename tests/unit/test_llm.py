"""The front door: generate and stream, stop texts, scores, seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from refengine import LLM, RequestOutput, SamplingParams
from refengine.errors import RequestError
from refengine.sampling import Logprob
from tests.unit.helpers import Marks, numbers
from tests.unit.models import greedy, idle, make_decoder, make_tokenizer

PROMPTS = ["the cat sat on the mat. ", "where is the cat? ", "on", [1, 2, 3, 4, 5]]


# generate and stream


def test_text_is_the_decoded_tokens(llm: LLM) -> None:
    tokenizer, decoder = make_tokenizer(), make_decoder()
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS), strict=True):
        token_ids = tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt
        assert output.prompt_token_ids == token_ids
        assert output.token_ids == greedy(decoder, token_ids, 16)
        assert output.text == tokenizer.decode(output.token_ids)
        assert (output.finish_reason, output.finished, output.error) == ("length", True, None)
    assert idle(llm)


def test_stream_and_generate_are_equal(llm: LLM, model_dir: Path) -> None:
    params = [SamplingParams(max_tokens=n) for n in (1, 5, 16, 7)]
    expected = LLM(str(model_dir), block_size=4, num_blocks=65).generate(PROMPTS, params)
    pieces: dict[str, str] = {}
    final: dict[str, RequestOutput] = {}
    for output in llm.stream(PROMPTS, params):
        pieces[output.request_id] = pieces.get(output.request_id, "") + output.new_text
        final[output.request_id] = output
    assert {i: o.text for i, o in final.items()} == pieces
    for output in expected:
        streamed = final[output.request_id]
        assert (streamed.text, streamed.token_ids) == (output.text, output.token_ids)
        assert streamed.finish_reason == output.finish_reason
    assert idle(llm)


def test_a_single_prompt_gives_one_output(llm: LLM) -> None:
    for prompt in ("the cat", [1, 2, 3]):
        assert len(llm.generate(prompt)) == 1


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    """Not in the order in which requests end."""
    names = ["slow", "fast"]
    params = [SamplingParams(max_tokens=9), SamplingParams(max_tokens=1)]
    outputs = llm.generate(["a", "b"], params, request_ids=names)
    assert [(o.request_id, len(o.token_ids)) for o in outputs] == [("slow", 9), ("fast", 1)]


def test_cached_tokens_are_reported(llm: LLM) -> None:
    prompt = numbers(1, 13)
    assert [llm.generate(prompt)[0].num_cached_tokens for _ in range(2)] == [0, 12]
    assert llm.reset_prefix_cache()
    assert llm.generate(prompt)[0].num_cached_tokens == 0


def test_a_stream_inside_a_generate_inside_a_stream(llm: LLM) -> None:
    """Each sees all of its own tokens, whoever takes the steps."""
    alone = {prompt: llm.generate(prompt)[0].text for prompt in ("the", "cat", "mat")}
    texts = {"the": "", "cat": ""}
    outer = llm.stream("the")
    texts["the"] += next(outer).new_text
    inner = llm.stream("cat")
    texts["cat"] += next(inner).new_text
    assert llm.generate("mat")[0].text == alone["mat"]
    texts["the"] += "".join(output.new_text for output in outer)
    texts["cat"] += "".join(output.new_text for output in inner)
    assert texts == {"the": alone["the"], "cat": alone["cat"]}
    assert idle(llm)


# Stop texts


def test_stop_texts_across_token_borders(llm: LLM) -> None:
    """Every text of three characters in an answer stops it where it first begins, wherever the tokens end."""
    prompt = "the cat sat on the mat. "
    whole = llm.generate(prompt, SamplingParams(max_tokens=24))[0]
    assert len(whole.text) > 20
    for start in range(len(whole.text) - 3):
        stop = whole.text[start : start + 3]
        (output,) = llm.generate(prompt, SamplingParams(max_tokens=24, stop=stop))
        assert output.text == whole.text[: whole.text.index(stop)]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert output.token_ids == whole.token_ids[: len(output.token_ids)]
    assert idle(llm)


def test_a_stream_never_shows_a_part_of_a_stop_text(llm: LLM) -> None:
    prompt = "the cat sat on the mat. "
    whole = llm.generate(prompt, SamplingParams(max_tokens=24))[0].text
    stop = whole[9:14]
    shown = ""
    for output in llm.stream(prompt, SamplingParams(max_tokens=24, stop=["nothing like it", stop])):
        shown += output.new_text
        assert whole[: whole.index(stop)].startswith(shown)
    assert shown == whole[: whole.index(stop)]


def test_a_stop_text_in_the_prompt_stops_nothing(llm: LLM) -> None:
    (output,) = llm.generate("the cat sat", SamplingParams(stop="cat sat", max_tokens=5))
    assert len(output.token_ids) == 5


# Scores


def test_prompt_scores_never_read_the_cache_but_fill_it(llm: LLM) -> None:
    prompt = numbers(1, 13)
    llm.generate(prompt)
    (output,) = llm.generate(prompt, SamplingParams(prompt_logprobs=0))
    assert output.num_cached_tokens == 0
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert all(scores is not None for scores in output.prompt_logprobs[1:])
    assert llm.reset_prefix_cache()
    llm.generate(prompt, SamplingParams(prompt_logprobs=0))
    assert llm.generate(prompt)[0].num_cached_tokens == 12


def close(a: dict[int, Logprob] | None, b: dict[int, Logprob] | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.keys() == b.keys() and all(abs(a[t].logprob - b[t].logprob) < 1e-4 for t in a)


@pytest.mark.parametrize("budget", [1, 3, 5, 13])
def test_prompt_scores_in_chunks_equal_unchunked(llm: LLM, model_dir: Path, budget: int) -> None:
    prompts, params = [numbers(1, 13), numbers(3, 9)], SamplingParams(prompt_logprobs=3)
    expected = llm.generate(prompts, params)
    chunked = LLM(str(model_dir), block_size=4, num_blocks=65, max_num_batched_tokens=budget).generate(
        prompts, params
    )
    for a, b in zip(expected, chunked, strict=True):
        assert a.prompt_logprobs is not None and b.prompt_logprobs is not None
        assert len(a.prompt_logprobs) == len(b.prompt_logprobs) == len(a.prompt_token_ids)
        assert all(map(close, a.prompt_logprobs, b.prompt_logprobs))
        assert a.token_ids == b.token_ids


def test_scores_of_sampled_tokens(llm: LLM) -> None:
    for output in llm.generate(["the cat", "on", "a mat"], SamplingParams(max_tokens=5, logprobs=2)):
        assert output.logprobs is not None and len(output.logprobs) == 5
        for token, scores in zip(output.token_ids, output.logprobs, strict=True):
            assert scores[token].rank == 1
            assert len(scores) == 2
    (output,) = llm.generate("the cat", SamplingParams(max_tokens=5))
    assert output.logprobs is None and output.prompt_logprobs is None


# Seeds and priorities

SEEDED = SamplingParams(max_tokens=12, temperature=1.0, seed=7)


def test_a_seed_does_not_depend_on_the_batch(llm: LLM) -> None:
    """Misconception: "one generator draws for the whole batch"."""
    alone = llm.generate([1, 2, 3], SEEDED)[0].token_ids
    others = [SamplingParams(max_tokens=n, temperature=2.0) for n in (3, 9)]
    outputs = llm.generate([[4], [1, 2, 3], [5, 6]], [others[0], SEEDED, others[1]])
    assert outputs[1].token_ids == alone
    assert alone != greedy(make_decoder(), [1, 2, 3], 12)


def test_a_seed_does_not_depend_on_preemption(model_dir: Path) -> None:
    """Misconception: "a resumed request goes on drawing"; its generator has been forgotten with its row."""
    prompts = [numbers(1, 15), numbers(11, 25)]
    calm = LLM(str(model_dir), block_size=4, num_blocks=65).generate(prompts, SEEDED)
    marks = Marks()
    tight = LLM(str(model_dir), block_size=4, num_blocks=12, observer=marks).generate(prompts, SEEDED)
    assert any("preempted" in facts["reason"] for facts in marks.of("admit"))
    assert [o.token_ids for o in tight] == [o.token_ids for o in calm]


def test_without_a_seed_the_engines_seed_makes_it_reproducible(model_dir: Path) -> None:
    def ask(seed: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=12, temperature=1.0)
        outputs = LLM(str(model_dir), block_size=4, num_blocks=65, seed=seed).generate(
            [[1, 2, 3]] * 2, params
        )
        return [output.token_ids for output in outputs]

    first, second = ask(0)
    assert [first, second] == ask(0)
    assert first != second, "two requests with equal prompts draw differently"
    assert ask(0) != ask(1)


def test_request_options_reach_the_engine(llm: LLM) -> None:
    stream = llm.stream([1, 2], priority=3, cache_salt="me", request_ids=["x"])
    next(stream)
    request = llm.engine.scheduler.requests["x"]
    assert (request.priority, request.cache_salt) == (3, "me")
    stream.close()  # type: ignore[attr-defined]


def test_a_failed_request_has_no_text() -> None:
    output = RequestOutput("x", None, [], error=RequestError("x", "reason"))
    with pytest.raises(RequestError, match="request 'x': reason"):
        _ = output.text
