"""Scenarios: what callers do to a running engine, as data that can be printed, shrunk and replayed.

Random prompts would never share a prefix, and a roomy pool would never evict. So prompts are cut from a few
stems, or go on where an earlier request ended, and the pool is drawn around the least that the longest request
needs. One stem repeats itself, so that equal blocks stand behind different prefixes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

MAX_MODEL_LEN = 96  # tokens; of the model that scenarios run on
MAX_FOLLOWED = 36  # tokens; a longer request is not continued, so that prompts stay below MAX_MODEL_LEN
EOS = 7
CROWD = 3  # requests that come first of all
PATIENCE = 6  # steps

STEMS = (
    (0, 1, 2, 3) * 5,
    (3, 3, 0, 2, 1, 1, 0, 3, 2, 2, 0, 1, 3, 0, 0, 2, 1, 3, 3, 1),
    (3, 3, 0, 2, 1, 1, 2, 0, 0, 1, 3, 2, 1, 0, 2, 3, 0, 1, 1, 2),
)


@dataclass(frozen=True)
class Add:
    """A request arrives. The n-th one is called `r<n>`, starting from 0."""

    prompt: tuple[int, ...]
    follows: int | None = None  # its prompt stands behind all that this earlier request says when left alone
    max_tokens: int = 4
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    priority: int = 0
    cache_salt: str | None = None
    adapter: str | None = None
    prompt_logprobs: bool = False
    report_full: bool = False


@dataclass(frozen=True)
class Step:
    """The engine takes some steps."""

    count: int = 1


@dataclass(frozen=True)
class Abort:
    """Request `r<target>` is aborted, wherever it stands.

    Or, if `target` is a state, the first one that stands in it, for which up to `PATIENCE` steps are taken.
    """

    target: int | str


@dataclass(frozen=True)
class Reset:
    """Somebody wants the prefix cache forgotten."""


@dataclass(frozen=True)
class Fail:
    """The engine takes a step in which the model breaks down half-way, if there is anything to compute."""


Operation = Add | Step | Abort | Reset | Fail


@dataclass(frozen=True)
class Scenario:
    """Options of the engine, and what is done to it. Afterwards it is stepped until it is done."""

    options: dict[str, Any]
    operations: tuple[Operation, ...]

    @property
    def requests(self) -> dict[str, Add]:
        """By request id, in order of arrival."""
        adds = (op for op in self.operations if isinstance(op, Add))
        return {f"r{i}": add for i, add in enumerate(adds)}


@st.composite
def scenarios(draw: st.DrawFn, max_operations: int = 18) -> Scenario:
    """Any scenario whose requests can all be served."""
    # Later and more urgent, again and again: who runs already loses its blocks, and its share of the step.
    escalates = draw(st.booleans())
    operations: list[Operation] = []
    longest: list[int] = []  # by request, the tokens that it can have in the end
    for i in range(draw(st.integers(6, max_operations))):
        kind = (
            "add"
            if i < CROWD
            else draw(st.sampled_from(["add"] * 4 + ["step"] * 4 + ["abort", "abort", "reset", "fail"]))
        )
        if kind == "add":
            add = draw(_add([r for r, tokens in enumerate(longest) if tokens <= MAX_FOLLOWED]))
            operations.append(replace(add, priority=-len(longest)) if escalates else add)
            longest.append(_upper_bound(add, longest))
            if escalates:
                operations.append(Step(draw(st.integers(1, 2))))
        elif kind == "step":
            operations.append(Step(draw(st.integers(1, 4))))
        elif kind == "abort":
            states = st.sampled_from(["preempted", "preempted", "prefill", "decode"])
            operations.append(Abort(draw(st.one_of(st.integers(0, len(longest) - 1), states))))
        elif kind == "reset":
            operations.append(Reset())
        elif kind == "fail":
            operations.append(Fail())
    adds = [op for op in operations if isinstance(op, Add)]
    prompts = [tokens - add.max_tokens for tokens, add in zip(longest, adds, strict=True)]
    policy = st.just("priority") if escalates else st.sampled_from(["fcfs", "fcfs", "priority"])
    options = {"policy": draw(policy), **draw(_options(max(longest), max(prompts)))}
    return Scenario(options, tuple(operations))


def _upper_bound(add: Add, longest: list[int]) -> int:
    return len(add.prompt) + add.max_tokens + (0 if add.follows is None else longest[add.follows])


@st.composite
def _add(draw: st.DrawFn, continuable: list[int]) -> Add:
    tail = tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)))
    follows = draw(st.sampled_from([None, None, None, None, *continuable[-2:]]))
    stem = draw(st.sampled_from(STEMS))[: draw(st.integers(4, 20))] if follows is None else ()
    rarely = st.sampled_from([False] * 7 + [True])
    return Add(
        prompt=stem + tail,
        follows=follows,
        max_tokens=draw(st.sampled_from([1, 4, 8, 12])),
        stop_token_ids=draw(st.sampled_from([(), (), (5, 11, 19, 26)])),
        ignore_eos=draw(st.booleans()),
        priority=draw(st.integers(0, 2)),
        cache_salt=draw(st.sampled_from([None, None, None, None, "", "salt", "pepper"])),
        adapter=draw(st.sampled_from([None, None, None, None, None, "poet", "lawyer"])),
        prompt_logprobs=draw(rarely),
        report_full=draw(rarely),
    )


@st.composite
def _options(draw: st.DrawFn, longest: int, longest_prompt: int) -> dict[str, Any]:
    """`longest`, `longest_prompt`: tokens that one request can have in all, and in its prompt."""
    block_size = draw(st.sampled_from([1, 2, 2, 3, 3, 4, 4, 16]))
    max_model_len = draw(st.sampled_from([MAX_MODEL_LEN, longest, longest_prompt + 1, longest_prompt + 3]))
    needed = -(-(min(longest, max_model_len) - 1) // block_size)  # the last token is sampled, never computed
    chunked = draw(st.sampled_from([True, True, False]))
    return {
        "block_size": block_size,
        "num_blocks": 1 + needed + draw(st.sampled_from([0, 0, 0, 1, 2, 4, 40])),
        "max_model_len": max_model_len,
        "max_num_seqs": draw(st.sampled_from([1, 3, 4, 5, 6])),
        "max_num_batched_tokens": draw(
            st.sampled_from([2, 4, 6, 6, 8, 16, 64]) if chunked else st.just(max_model_len)
        ),
        "enable_chunked_prefill": chunked,
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 1, 3, 3, 5])),
        "watermark": draw(st.sampled_from([0.0, 0.0, 0.0, 0.1, 0.3])),
        "reserve_full_sequence": draw(st.booleans()),
        "hash_algorithm": draw(st.sampled_from(["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])),
        "enable_kv_events": draw(st.booleans()),
    }
