"""`refengine demo`: questions about one long text, and who did not have to read it again.

Wave 1 is one request: it reads the text and fills the cache. Wave 2 asks other questions about the same text
and finds it there. The same two waves run once more with the cache off, to see what it was worth. The answers
can be checked, since the text is a small world of facts: with wrong K/V in the cache they come out wrong, and
`--corrupt` shows it by shifting the cached values by one block between the waves.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from refengine.commands.demo_hybrid import run_hybrid_demo
from refengine.llm import LLM
from refengine.model.config import FULL_ATTENTION
from refengine.model.corpus import World, world
from refengine.model.loader import SHIPPED, find_model, read_config
from refengine.sampling import SamplingParams
from refengine.trace.record import Recorder, RequestSummary

ENGINES = ("v0", "v1")  # what "both" means
NUM_BLOCKS = 256  # enough for the demo, and few enough for its pictures and for parts under guard


@dataclass(frozen=True)
class DemoOptions:
    """What the command line says; see `refengine demo --help`."""

    model: str = "tiny"
    engine: str = "v1"
    facts: int = 10
    questions: int = 6
    seed: int = 0
    block_size: int = 16
    corrupt: bool = False
    json_file: Path | None = None
    parts: str | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class Answer:
    """One request's result beside what was to be found in the text."""

    question: str
    text: str
    expected: str
    summary: RequestSummary
    seconds: float | None  # from the arrival of its wave to its first token

    @property
    def is_right(self) -> bool:
        return self.text.strip() == self.expected


@dataclass(frozen=True)
class Run:
    """Both waves of one engine."""

    answers: list[Answer]
    recorder: Recorder
    parts: dict[str, str]  # slot -> name, of parts that are not ours

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens that were found in the cache."""
        summaries = [answer.summary for answer in self.answers]
        return sum(s.hit_tokens for s in summaries) / sum(s.num_prompt_tokens for s in summaries)

    @property
    def second_wave_seconds(self) -> float:
        """Mean time to the first token over wave 2."""
        times = [answer.seconds for answer in self.answers[1:] if answer.seconds is not None]
        return sum(times) / len(times)


def run_demo(options: DemoOptions, console: Console) -> None:
    """Runs the demo and prints its tables. Raises: RefengineError."""
    path = find_model(options.model)
    if path in SHIPPED.values():
        torch.set_num_threads(1)  # their products are too small to be worth sharing
    if set(read_config(path).kinds) != {FULL_ATTENTION}:
        run_hybrid_demo(options, console)
        return
    drawn = world(random.Random(options.seed), options.facts)
    engines = ENGINES if options.engine == "both" else (options.engine,)
    runs: dict[str, tuple[Run, Run]] = {}  # by engine: cache on, cache off
    with Progress(console=console, transient=True) as progress:
        total = 2 * len(engines) * min(options.questions, len(drawn.questions))
        task = progress.add_task("answering", total=total)
        LLM(options.model, device=options.device, num_blocks=NUM_BLOCKS).generate(
            [drawn.context], SamplingParams(max_tokens=2)
        )  # first calls are slow: not timed
        for engine in engines:
            chosen = replace(options, engine=engine)
            off = _run(chosen, drawn, caching=False, advance=lambda: progress.advance(task))
            on = _run(chosen, drawn, caching=True, advance=lambda: progress.advance(task))
            runs[engine] = on, off
    console.print(f"[bold]The text[/bold] that all prompts begin with:\n{drawn.context}\n")
    console.print(_table({engine: on for engine, (on, _) in runs.items()}))
    for engine, (on, off) in runs.items():
        if len(runs) > 1:
            console.print(f"[bold]{engine.upper()}[/bold]")
        if on.parts:
            parts = ", ".join(f"{slot} ({name})" for slot, name in on.parts.items())
            console.print(f"Parts that are yours: {parts}.")
        _print_sums(on, off, options, console)
    if options.json_file is not None:
        for engine, (on, _) in runs.items():
            file = options.json_file
            file = file.with_stem(f"{file.stem}-{engine}") if len(runs) > 1 else file
            on.recorder.record.save(file)
            console.print(f"The record of every step is in {file}.")


def _run(options: DemoOptions, drawn: World, caching: bool, advance: Callable[[], None]) -> Run:
    """One request, then all others at once, on a fresh engine."""
    recorder = Recorder()
    llm = LLM(
        options.model,
        engine=options.engine,
        device=options.device,
        block_size=options.block_size,
        enable_prefix_caching=caching,
        observer=recorder,
        parts=options.parts,
        num_blocks=NUM_BLOCKS,
    )
    questions = drawn.questions[: options.questions]
    params = SamplingParams(max_tokens=24, stop="\n")
    answers: list[Answer] = []
    for wave in (questions[:1], questions[1:]):
        first_step = len(recorder.steps)
        ids = [f"q{len(answers) + i + 1}" for i in range(len(wave))]
        finished = {}
        for output in llm.stream([drawn.prompt(q.question) for q in wave], params, request_ids=ids):
            if output.finished:
                finished[output.request_id] = output.text
                advance()
        began = recorder.steps[first_step].began if wave else 0.0
        summaries = {s.request_id: s for s in recorder.record.requests()}
        for request_id, question in zip(ids, wave, strict=True):
            summary = summaries[request_id]
            ended = (
                recorder.steps[summary.first_token_step].ended
                if summary.first_token_step is not None
                else None
            )
            answers.append(
                Answer(
                    question.question, finished[request_id], question.answer, summary, ended and ended - began
                )
            )
        if options.corrupt and caching:
            _shift_cached_values(llm)
    return Run(answers, recorder, llm.engine.parts.replaced())


def _shift_cached_values(llm: LLM) -> None:
    """Every cached block gets its neighbour's values, in all layers. Mutates: the KV cache."""
    cached = llm.engine.snapshot().cached
    for _, values in llm.engine.kv_cache.layers:
        values[cached] = values[cached[1:] + cached[:1]].clone()


def _table(runs: dict[str, Run]) -> Table:
    """A line per request; of several engines a line each, with the same request's lines together."""
    table = Table(title="Cache on: who computed what", title_justify="left")
    table.add_column("request")
    if len(runs) > 1:
        table.add_column("in")
    table.add_column("prompt\ntokens", justify="right")
    table.add_column("from\ncache", justify="right")
    table.add_column("tokens computed\nin each step")
    table.add_column("blocks\nfound | own")
    table.add_column("answer")
    for answers in zip(*(run.answers for run in runs.values()), strict=True):
        for engine, answer in zip(runs, answers, strict=True):
            summary = answer.summary
            found = summary.num_shared_blocks
            table.add_row(
                summary.request_id if answer is answers[0] else "",
                *([engine.upper()] if len(runs) > 1 else []),
                str(summary.num_prompt_tokens),
                str(summary.hit_tokens),
                _steps(summary.scheduled),
                f"{_ranges(summary.block_ids[:found])} | {_ranges(summary.block_ids[found:])}",
                Text(answer.text.strip(), style="green" if answer.is_right else "red"),
                end_section=len(runs) > 1 and answer is answers[-1],
            )
    return table


def _print_sums(on: Run, off: Run, options: DemoOptions, console: Console) -> None:
    right = sum(answer.is_right for answer in on.answers)
    console.print(
        f"Hit rate: {on.hit_rate:.0%} of all prompt tokens were found in the cache.\n"
        f"Right answers: {right} of {len(on.answers)}; with the cache off: "
        f"{sum(answer.is_right for answer in off.answers)} of {len(off.answers)}."
    )
    if len(on.answers) > 1:
        on_ms, off_ms = 1e3 * on.second_wave_seconds, 1e3 * off.second_wave_seconds
        console.print(
            f"Time to first token of q2 and later: {on_ms:.1f} ms with the cache, {off_ms:.1f} ms without "
            f"({off_ms / on_ms:.1f}x)."
        )
    if options.corrupt:
        console.print("Between q1 and the rest, the values of all cached blocks were shifted by one block.")


def _steps(scheduled: list[tuple[int, int]]) -> str:
    """`7: 17, 8-13: 1`: chunks of a prompt one by one, decode steps as a range."""
    chunks = [f"{step}: {n}" for step, n in scheduled if n > 1]
    decodes = [step for step, n in scheduled if n == 1]
    if decodes:
        span = f"{decodes[0]}-{decodes[-1]}" if len(decodes) > 1 else f"{decodes[0]}"
        chunks.append(f"{span}: 1")
    return ", ".join(chunks)


def _ranges(ids: list[int]) -> str:
    """Block ids with runs folded: `1-9 12`."""
    runs: list[list[int]] = []
    for block_id in ids:
        if runs and runs[-1][-1] == block_id - 1:
            runs[-1] = [runs[-1][0], block_id]
        else:
            runs.append([block_id])
    return " ".join("-".join(map(str, run)) for run in runs) or "none"
