"""The front door: generate and stream, stop texts, interruption, scores, seeds and priorities."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from refengine import LLM, RequestOutput, SamplingParams
from refengine.errors import RequestError
from refengine.sampling import Logprob
from tests.unit.helpers import Marks, numbers
from tests.unit.models import greedy, make_decoder, make_tokenizer

PROMPTS = ["the cat sat on the mat. ", "where is the cat? ", "on", [1, 2, 3, 4, 5]]


def idle(llm: LLM) -> bool:
    """Nothing is left of any request."""
    llm.engine.scheduler.check_integrity()
    return (
        not llm.engine.has_unfinished_requests
        and not llm._processors
        and llm.engine.kv_cache_manager.usage == 0
    )


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


# Leaving early


def test_leaving_a_stream_early_aborts(llm: LLM) -> None:
    for _ in llm.stream(PROMPTS):
        break
    gc.collect()
    assert idle(llm)
    assert llm.generate([1, 2, 3])[0].token_ids == greedy(make_decoder(), [1, 2, 3], 16)


def test_leaving_a_stream_at_a_bad_prompt_aborts_the_others(llm: LLM) -> None:
    """The error is the first thing the stream yields; the good requests have been entered by then."""
    stream = llm.stream(["the cat", [99]])
    assert next(stream).error is not None
    stream.close()  # type: ignore[attr-defined]
    assert idle(llm)


def test_a_stream_that_was_never_started_enters_nothing(llm: LLM) -> None:
    llm.stream(PROMPTS)
    assert idle(llm)


@contextmanager
def interrupted(target: object, name: str, after: int) -> Iterator[None]:
    """The user presses Ctrl-C in the `after`-th call of a method."""
    original: Callable[..., object] = getattr(target, name)
    calls = iter(range(1, 1000))

    def call(*args: object, **kwargs: object) -> object:
        if next(calls) == after:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    with mock.patch.object(target, name, call), pytest.raises(KeyboardInterrupt):
        yield


@pytest.mark.parametrize("after", [1, 2, 5])
@pytest.mark.parametrize("where", ["schedule", "execute", "logits", "update"])
def test_an_interrupted_generate_leaves_the_engine_usable(llm: LLM, where: str, after: int) -> None:
    """Its requests are gone, and nothing that it promised to compute is found by the next ones."""
    engine = llm.engine
    targets = {
        "schedule": engine.scheduler,
        "execute": engine.model_runner,
        "logits": engine.model_runner.model,
        "update": engine.scheduler,
    }
    with interrupted(targets[where], where, after):
        llm.generate(PROMPTS)
    assert idle(llm)
    outputs = llm.generate([*PROMPTS, PROMPTS[0]])
    for output in outputs:
        assert output.token_ids == greedy(make_decoder(), output.prompt_token_ids, 16)


def test_an_interrupted_generate_does_not_hurt_a_stream(llm: LLM) -> None:
    stream = llm.stream([1, 2, 3])
    next(stream)
    with interrupted(llm.engine.model_runner, "execute", 2):
        llm.generate("the cat")
    assert list(stream)[-1].token_ids == greedy(make_decoder(), [1, 2, 3], 16)


def test_an_interrupt_while_requests_are_entered_leaves_none_behind(llm: LLM) -> None:
    with interrupted(llm.engine, "add_request", 3):
        llm.generate(PROMPTS)
    assert idle(llm)


def test_an_interrupt_while_requests_are_entered_does_not_end_somebody_elses(llm: LLM) -> None:
    """The first one was refused because its id is a running stream's; that stream has done nothing wrong."""
    stream = llm.stream([1, 2, 3], request_ids=["mine"])
    next(stream)
    with interrupted(llm.engine, "add_request", 2):
        llm.generate([[4], [5]], request_ids=["mine", "other"])
    assert list(stream)[-1].token_ids == greedy(make_decoder(), [1, 2, 3], 16)


def test_an_interrupt_while_a_step_is_planned_leaves_no_false_promises(llm: LLM) -> None:
    """By then the first request's blocks are published, and its step will never run."""
    prompts = [numbers(1, 9), [1, 2, 3]]
    with interrupted(llm.engine.kv_cache_manager, "allocate_slots", 2):
        llm.generate(prompts)
    assert idle(llm)
    assert llm.generate(prompts[0])[0].token_ids == greedy(make_decoder(), prompts[0], 16)


@pytest.mark.parametrize("max_tokens", [2, 6])
def test_an_interrupt_after_a_step_loses_no_token(llm: LLM, max_tokens: int) -> None:
    """Ctrl-C in `end_step`, where a recorder takes its snapshot: the step's tokens are in the requests already."""
    stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=max_tokens))
    next(stream)
    observer = llm.engine.observer = mock.Mock()
    observer.end_step.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate([4, 5])
    llm.engine.observer = None
    assert list(stream)[-1].token_ids == greedy(make_decoder(), [1, 2, 3], max_tokens)


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
