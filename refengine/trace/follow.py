"""One request, followed through both generations: each call that mattered, in order, with what it decided.

    path = follow()                        # the tiny model, a text and a question about it
    path.v0.answering(WHO_SKIPS)           # the call that leaves the computed tokens out

The engines run, and `Watch` looks at them; nothing here is written down beforehand but which functions matter
(the code map's `followed.json`) and how to put what they decided into words. First another request warms the
cache with the same text, or there would be nothing to find and nothing to skip.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refengine.config import one_of
from refengine.errors import ConfigError
from refengine.trace import follow_v0, follow_v1
from refengine.trace.codemap import WHO_DECIDES, WHO_SKIPS, Generation, Place, followed, version
from refengine.trace.observer import MarkKind
from refengine.trace.watch import Facts, Sighting, Teller, Watch

if TYPE_CHECKING:
    from refengine.model.tokenizer import Tokenizer

SCHEMA = 1
BLOCK_SIZE, FEWEST_BLOCKS = 16, 4  # a prompt of fewer full blocks gets smaller ones
FACTS = 5  # in the text of the prompt that is taken if none is given
ENGINES: tuple[Generation, ...] = ("v0", "v1")
QUESTIONS = {WHO_DECIDES: "Who decides which blocks are computed?", WHO_SKIPS: "Who skips the work?"}


@dataclass(frozen=True)
class Call:
    """One function, with all its calls in one engine step."""

    ours: str  # dotted path
    component: str
    vllm: tuple[Place, ...]  # its counterparts, the nearest one first
    focus_line: int | None
    step: int  # 0: before the first engine step of this request
    mark: MarkKind | None  # which of the six marks is made here or below; None: between marks
    depth: int  # how many calls of this path it stands in
    decided: str
    facts: tuple[Facts, ...]  # one per call: the same as numbers and lists
    answers: str | None  # which of the two questions, by its id; asked in the step that admits

    @property
    def name(self) -> str:
        """Class and function, or the function alone."""
        *_, owner, name = self.ours.split(".")
        return f"{owner}.{name}" if owner[0].isupper() else name


@dataclass(frozen=True)
class CallPath:
    """The path through one generation, in the step that admits the request and in its first decode step."""

    engine: Generation
    release: str  # of vLLM, to which the line ranges belong
    calls: tuple[Call, ...]
    answer: str  # what the model said

    def answering(self, question: str) -> list[Call]:
        """The calls that answer one of `QUESTIONS`."""
        return [call for call in self.calls if call.answers == question]

    def find(self, name: str, step: int = 1) -> Call:
        """The call of a function, by the end of its path. Raises: ValueError if it was not called in that step."""
        for call in self.calls:
            if call.step == step and f".{call.ours}".endswith(f".{name}"):
                return call
        raise ValueError(f"{name} was not called in step {step} of {self.engine}")


@dataclass(frozen=True)
class Followed:
    """The same request through one generation or both."""

    prompt: str  # as text, or the token ids
    warm: str  # what ran before it; empty: nothing did
    num_tokens: int
    block_size: int
    model: str
    paths: tuple[CallPath, ...]

    def __getitem__(self, engine: str) -> CallPath:
        """The path through an engine. Raises: KeyError if it was not followed."""
        for path in self.paths:
            if path.engine == engine:
                return path
        raise KeyError(engine)

    @property
    def v0(self) -> CallPath:
        return self["v0"]

    @property
    def v1(self) -> CallPath:
        return self["v1"]

    def save(self, path: str | Path) -> None:
        """Writes everything as JSON. Mutates: the file."""
        document = {"schema": SCHEMA, "questions": QUESTIONS} | asdict(self)
        Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Followed:
        """Reads what `save` wrote. Raises: ValueError if it is something else."""
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        if (
            not isinstance(document, dict)
            or document.pop("schema", None) != SCHEMA
            or "paths" not in document
        ):
            raise ValueError(f"{path} is not a followed request of schema {SCHEMA}")
        del document["questions"]
        document["paths"] = tuple(_path(raw) for raw in document["paths"])
        return cls(**document)


def follow(
    prompt: str | Sequence[int] | None = None,
    *,
    warm: str | Sequence[int] | None = None,
    engine: str = "both",
    model: str = "tiny",
    max_tokens: int = 24,
    progress: Callable[[str], None] = lambda what: None,
    **options: Any,
) -> Followed:
    """Runs one request, and tells which functions decided what about it, in order.

    `prompt` None: a small text and a question about it. `warm` runs before it, on the same engine, so that there is
    something to find; None: the same text with another question, "" or []: nothing. `engine`: "v0", "v1" or
    "both". `options` are fields of `EngineConfig`; without a block size, a short prompt gets small blocks.
    Raises: RefengineError.
    """
    from refengine.model.tokenizer import load_tokenizer

    one_of("engine", engine, (*ENGINES, "both"))
    tokenizer = load_tokenizer(model)
    if prompt is None:
        prompt, warm = _example(warm)
    token_ids = _encode(tokenizer, prompt)
    warm = _other_question(prompt, token_ids) if warm is None else warm
    options.setdefault("block_size", _block_size(len(token_ids)))
    options.setdefault("num_blocks", 64 + 2 * (len(token_ids) + max_tokens) // options["block_size"])
    paths = []
    for generation in ENGINES:
        if engine in (generation, "both"):
            progress(generation)
            paths.append(_follow(generation, model, prompt, warm, max_tokens, options))
    before = _shown(tokenizer, warm) if warm else ""
    size = options["block_size"]
    return Followed(_shown(tokenizer, prompt), before, len(token_ids), size, model, tuple(paths))


def _follow(
    engine: Generation,
    model: str,
    prompt: str | Sequence[int],
    warm: str | Sequence[int],
    max_tokens: int,
    options: dict[str, Any],
) -> CallPath:
    """One generation. Only the request itself is watched, not the one that warms the cache."""
    from refengine.llm import LLM
    from refengine.sampling import SamplingParams

    teller = follow_v0 if engine == "v0" else follow_v1
    llm = LLM(model, engine=engine, **options)
    if warm:
        llm.generate(warm, SamplingParams(max_tokens=2), request_ids=["warm"])
    with Watch(followed(engine), teller.TELLERS, teller.STEP) as watch:
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=max_tokens), request_ids=["followed"])
    if output.error is not None:
        raise output.error
    calls = tuple(_call(each, teller.TELLERS[each.stop.ours]) for each in _kept(watch.sightings))
    return CallPath(engine, version(engine), calls, output.text if llm.tokenizer else str(output.token_ids))


def _kept(sightings: list[Sighting]) -> list[Sighting]:
    """What comes before the first step, the step that admits, and the one after the first sampled token."""
    sampled = (s.step for s in sightings if any(facts.get("token_ids") for facts in s.facts))
    steps = {0, 1, next(sampled) + 1}
    return [sighting for sighting in sightings if sighting.step in steps]


def _call(sighting: Sighting, teller: Teller) -> Call:
    stop, facts = sighting.stop, sighting.facts
    return Call(
        stop.ours,
        stop.component,
        stop.vllm,
        stop.focus_line,
        sighting.step,
        stop.mark,
        sighting.depth,
        teller.tell(facts),
        tuple(facts),
        stop.answers if sighting.step == 1 else None,
    )


def _path(raw: dict[str, Any]) -> CallPath:
    calls = (
        Call(
            **(call | {"vllm": tuple(Place(**p) for p in call["vllm"]), "facts": tuple(call["facts"])}),
        )
        for call in raw["calls"]
    )
    return CallPath(**(raw | {"calls": tuple(calls)}))


# -- what is asked ------------------------------------------------------------------------------------------


def _example(warm: str | Sequence[int] | None) -> tuple[str, str | Sequence[int]]:
    """A prompt the tiny model can answer, and the same text with another question."""
    from refengine.model.corpus import world

    drawn = world(random.Random(0), FACTS)
    first, second = (drawn.prompt(question.question) for question in drawn.questions[:2])
    return first, second if warm is None else warm


def _other_question(prompt: str | Sequence[int], token_ids: list[int]) -> str | list[int]:
    """The same text with another question, if there is a question to be seen; else the first three quarters."""
    if isinstance(prompt, str) and "\nQ: " in prompt:
        text, _, asked = prompt.rpartition("\nQ: ")
        return f"{text}\nQ: {'What is a token?' if 'What is a step?' in asked else 'What is a step?'}\nA:"
    return token_ids[: max(1, 3 * len(token_ids) // 4)]


def _encode(tokenizer: Tokenizer | None, prompt: str | Sequence[int]) -> list[int]:
    """The prompt's tokens. What is no prompt at all is left to the engine to refuse."""
    if not isinstance(prompt, str):
        return list(prompt)
    if tokenizer is None:
        raise ConfigError("the model came without a tokenizer, so a prompt must be token ids")
    try:
        return tokenizer.encode(prompt)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _shown(tokenizer: Tokenizer | None, prompt: str | Sequence[int]) -> str:
    """A prompt for people."""
    if isinstance(prompt, str):
        return prompt
    return tokenizer.decode(prompt) if tokenizer is not None else str(list(prompt))


def _block_size(num_tokens: int) -> int:
    """The usual one; of a short prompt the largest power of two that leaves it some full blocks."""
    size = BLOCK_SIZE
    while size > 1 and num_tokens < FEWEST_BLOCKS * size:
        size //= 2
    return size


# -- side by side -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """Calls of both engines that belong beside each other: those of one mark, with what follows it."""

    step: int  # 0: arrival, 1: admission, 2: decode
    mark: MarkKind | None  # None: what comes before the first mark
    calls: dict[str, list[Call]]  # by engine


def rows(followed: Followed) -> list[Row]:
    """The paths cut at the marks, for two columns. Within a step, a call stays in the row of the latest mark so far."""
    order: tuple[MarkKind | None, ...] = (None, "lookup", "admit", "allocate", "publish", "run", "append")
    cells: dict[tuple[int, int], dict[str, list[Call]]] = {}
    for path in followed.paths:
        row = (0, 0)
        for call in path.calls:
            step = min(call.step, 2)
            row = max(row, (step, order.index(call.mark)))
            cells.setdefault(row, {each.engine: [] for each in followed.paths})[path.engine].append(call)
    return [Row(step, order[mark], calls) for (step, mark), calls in sorted(cells.items())]
