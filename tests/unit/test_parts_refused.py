"""What is no part at all, and results of parts whose functions have names of their own: named on the spot."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from refengine import LLM, SamplingParams
from refengine.errors import PartError
from refengine.sampling import sample

TWO = SamplingParams(max_tokens=2, ignore_eos=True)


def run(**parts: Any) -> list[int]:
    llm = LLM("tiny", num_blocks=9, parts=parts)
    return llm.generate([[5, 6, 7]], TWO)[0].token_ids


@pytest.mark.parametrize(
    ("slot", "part", "sentence"),
    [
        ("attention", object(), "the part for 'attention' is <object .* neither a backend nor a function"),
        ("free_queue", lambda *_: None, "the part for 'free_queue' .* a class like FreeKVCacheBlockQueue"),
        ("block_pool", lambda *_: None, "the part for 'block_pool' .* a class like BlockPool"),
        ("attention", lambda *_: None, "returned None instead of a tensor shaped like the query"),
        ("sampler", lambda *_: None, "returned None instead of int64 token ids"),
    ],
)
def test_it_is_named(slot: str, part: Any, sentence: str) -> None:
    with pytest.raises(PartError, match=sentence):
        run(**{slot: part})


def test_a_callable_without_a_name_is_a_function_too() -> None:
    assert run(sampler=partial(sample)) == run()
