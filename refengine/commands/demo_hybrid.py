"""`refengine demo` on a model with several cache groups: what each group finds, and what all of them find.

The requests come one after another and begin with the same text. The second is the first to share it: the
full-attention layers have kept all of it, the others only what lies before the end of the first prompt. So it
hits nothing. But now it is known where prompts part (the shared-prefix boundary): a window and a state are kept
there, and the third request hits. Nothing here depends on time: the same options print the same lines.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

from refengine.llm import LLM
from refengine.model.corpus import Question, World, with_events, world
from refengine.sampling import SamplingParams
from refengine.trace.record import Recorder
from refengine.v1.engine import EngineCore
from refengine.v1.groups.spec import FULL_ATTENTION, MAMBA, SLIDING_WINDOW
from refengine.v1.request import Request

if TYPE_CHECKING:
    from refengine.commands.demo import DemoOptions

NUM_BLOCKS = 512  # a request takes blocks in every group
NUM_KEYS = 2  # things that are heard again and again in the text
GROUP_NAMES = {FULL_ATTENTION: "full", SLIDING_WINDOW: "window", MAMBA: "state"}


@dataclass(frozen=True)
class Lookup:
    """What a prompt would find now. All lengths in tokens."""

    num_prompt_tokens: int
    by_group: list[int]  # the longest hit that each group alone could serve
    common: int  # the longest that all can serve
    boundary: int  # where prompts part, if this lookup finds that out; 0: it does not


@dataclass(frozen=True)
class Answer:
    """One request: what it found before it ran, and what came out."""

    request_id: str
    lookup: Lookup
    text: str
    question: Question

    @property
    def is_right(self) -> bool:
        return self.text.strip() == self.question.answer


def look_up(engine: EngineCore, token_ids: Sequence[int]) -> Lookup:
    """Asks each group alone, then all together. Changes nothing."""
    manager = engine.kv_cache_manager
    request = Request("a look", token_ids, SamplingParams(), hasher=engine.hasher)
    by_group = []
    for group in manager.coordinator.groups:
        hashes = group.spec.hashes(request.block_hashes)
        hits = group.find_longest_cache_hit(hashes, request.num_tokens - 1, drop_last=False)
        by_group.append(len(hits) * group.block_size)
    _, common, boundary = manager.get_computed_blocks(request)
    return Lookup(len(token_ids), by_group, common, boundary)


def run_hybrid_demo(options: DemoOptions, console: Console) -> None:
    """Runs the demo and prints its table. Raises: RefengineError."""
    recorder = Recorder()
    llm = LLM(
        options.model,
        engine="v0" if options.engine == "both" else options.engine,  # which refuses, and says why
        device=options.device,
        block_size=options.block_size,
        num_blocks=NUM_BLOCKS,
        observer=recorder,
        parts=options.parts,
    )
    engine = cast(EngineCore, llm.engine)  # V0 has refused such a model by now
    rng = random.Random(options.seed)
    drawn = with_events(rng, world(rng, options.facts), NUM_KEYS)
    console.print(f"[bold]The text[/bold] that all prompts begin with:\n{drawn.context}\n")
    answers = _answers(llm, engine, drawn, options)
    console.print(_table(engine, answers))
    _print_sums(engine, answers, options, console)
    if options.json_file is not None:
        recorder.record.save(options.json_file)
        console.print(f"The record of every step is in {options.json_file}.")


def _answers(llm: LLM, engine: EngineCore, drawn: World, options: DemoOptions) -> list[Answer]:
    """The questions one after another, and the first one again."""
    asked = [(f"q{i + 1}", q) for i, q in enumerate(_in_turn(drawn.questions)[: options.questions])]
    asked.append(("q1 again", asked[0][1]))
    params = SamplingParams(max_tokens=24, stop="\n")
    answers: list[Answer] = []
    for request_id, question in asked:
        if options.corrupt and len(answers) == 2:
            wipe_states(engine)
        prompt = drawn.prompt(question.question)
        lookup = look_up(engine, llm.tokenizer.encode(prompt) if llm.tokenizer else [])
        (output,) = llm.generate([prompt], params, request_ids=[request_id])
        answers.append(Answer(request_id, lookup, output.text, question))
    return answers


def _in_turn(questions: Sequence[Question]) -> list[Question]:
    """A fact, a count, a fact, a count, and then the facts that are left.

    The first two part in their first word, so what is kept for the third lies before all questions.
    """
    facts = [q for q in questions if q.kind != "count"]
    counts = [q for q in questions if q.kind == "count"]
    pairs = [q for pair in zip(facts, counts, strict=False) for q in pair]
    return pairs + facts[len(pairs) // 2 :]


def wipe_states(engine: EngineCore) -> None:
    """Sets every cached state to zero, as if nothing had been read before. Mutates: the cache."""
    cached = engine.snapshot().cached
    for group in engine.groups:
        if group.spec.kind == MAMBA:
            for layer in group.layers:
                for part in engine.kv_cache.layers[layer]:
                    part[cached] = 0.0


def _table(engine: EngineCore, answers: list[Answer]) -> Table:
    table = Table(title="Hit in tokens: of each group of layers alone, and of all", title_justify="left")
    table.add_column("request")
    table.add_column("prompt\ntokens", justify="right")
    for group in engine.groups:
        table.add_column(GROUP_NAMES[group.spec.kind], justify="right")
    table.add_column("all", justify="right")
    table.add_column("boundary", justify="right")
    table.add_column("answer")
    for answer in answers:
        found = answer.lookup
        table.add_row(
            answer.request_id,
            str(found.num_prompt_tokens),
            *map(str, found.by_group),
            str(found.common),
            str(found.boundary or ""),
            Text(answer.text.strip(), style="green" if answer.is_right else "red"),
        )
    return table


def _print_sums(engine: EngineCore, answers: list[Answer], options: DemoOptions, console: Console) -> None:
    interval = engine.config.prefix_cache_retention_interval
    kept = {None: "at every block", 0: "only where prompts are known to part or to end"}
    console.print(
        f"Alignment unit: {engine.kv_cache_manager.coordinator.alignment} tokens. Windows and states are kept "
        f"{kept.get(interval, f'every {interval} tokens')}.\n"
        f"Right answers: {sum(answer.is_right for answer in answers)} of {len(answers)}."
    )
    replaced = engine.parts.replaced()
    if replaced:
        parts = ", ".join(f"{slot} ({name})" for slot, name in replaced.items())
        console.print(f"Parts that are yours: {parts}.")
    if options.corrupt:
        console.print("Between q2 and the rest, all cached states were set to zero.")
