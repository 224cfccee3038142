"""`refengine follow`: one request through V0 and V1, call by call, beside each other where there is room.

Each call takes three lines: our function and where it stands, what it decided, vLLM's function and where it
stands. The calls that answer one of the two questions carry its number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from refengine.trace.codemap import our_place
from refengine.trace.follow import QUESTIONS, Call, CallPath, Followed, follow, rows
from refengine.trace.words import MARKS, STEPS, count

WIDE = 132  # columns of a terminal from which on both paths stand beside each other
TITLES = {"v0": "V0", "v1": "V1"}


@dataclass(frozen=True)
class FollowOptions:
    """What the command line says; see `refengine follow --help`."""

    prompt: str | None = None
    engine: str = "both"
    model: str = "tiny"
    warm: str | None = None
    json_file: Path | None = None
    engine_options: dict[str, Any] = field(default_factory=dict)  # fields of EngineConfig


def run_follow(options: FollowOptions, console: Console) -> None:
    """Follows a request and prints its path. Raises: RefengineError."""
    if options.model == "tiny":
        torch.set_num_threads(1)  # its products are too small to be worth sharing
    with console.status("the model is being loaded") as status:
        followed = follow(
            options.prompt,
            warm=options.warm,
            engine=options.engine,
            model=options.model,
            progress=lambda engine: status.update(f"{TITLES[engine]} runs"),
            **options.engine_options,
        )
    show(followed, console)
    if options.json_file is not None:
        followed.save(options.json_file)
        console.print(f"\nThe paths are in {options.json_file}.", soft_wrap=True)


def show(followed: Followed, console: Console) -> None:
    """Prints what was asked, the two answers, and the paths: as columns if the console is wide enough."""
    console.print(_head(followed))
    console.print(_answers(followed))
    columns = [followed.paths] if console.width >= WIDE else [(path,) for path in followed.paths]
    for paths in columns:
        _show_paths(followed, paths, console)


def _head(followed: Followed) -> Group:
    warm = followed.warm or "nothing: the cache is cold"
    lines: list[RenderableType] = [
        Text.assemble(
            ("The request ", "bold"),
            f"({count(followed.num_tokens, 'token')}, blocks of {followed.block_size})",
        ),
        _under(followed.prompt, 2, ""),
        Text("Before it ran", "bold"),
        _under(warm, 2, ""),
        Text("It was answered", "bold"),
        *(_under(f"{TITLES[path.engine]}: {path.answer.strip()}", 2, "") for path in followed.paths),
    ]
    return Group(*lines, Text())


def _answers(followed: Followed) -> Group:
    """The two questions, each with the calls that answer it."""
    lines: list[RenderableType] = []
    for number, (question, words) in enumerate(QUESTIONS.items(), 1):
        lines.append(Text.assemble((f"[{number}] ", "bold reverse"), (f" {words}", "bold")))
        for path in followed.paths:
            calls = path.answering(question)
            who = (
                f"{TITLES[path.engine]}: the {calls[0].component}: {calls[0].decided}" if calls else "nobody"
            )
            lines.append(_under(who, 4, ""))
            lines.append(_under(", ".join(call.name for call in calls), 8, "dim"))
    return Group(*lines, Text())


def _show_paths(followed: Followed, paths: Sequence[CallPath], console: Console) -> None:
    """One column per path. A heading goes over all of them, and so beside each other stands what belongs together."""
    console.rule(f"[bold]{'  |  '.join(f'{TITLES[p.engine]} (vLLM {p.release})' for p in paths)}")
    seen: set[str] = set()
    step = -1
    for row in rows(followed):
        calls = [row.calls[path.engine] for path in paths]
        if not any(calls):
            continue
        if row.step != step:
            step = row.step
            console.print(Text(f"\n{STEPS[step]}", "bold underline"))
        if row.mark is not None:
            console.print(Text.assemble((f"{row.mark}", "bold cyan"), (f": {MARKS[row.mark]}", "cyan")))
        table = Table.grid(padding=(0, 2), expand=True)
        for _ in paths:
            table.add_column(ratio=1)
        table.add_row(*(Group(*(_call(call, seen) for call in column)) for column in calls))
        console.print(table)
        seen |= {call.ours for column in calls for call in column}


def _call(call: Call, seen: set[str]) -> Padding:
    """A call in lines. Where it stands is said once: the decode step passes most places again."""
    ours = our_place(call.ours)
    number = [*QUESTIONS].index(call.answers) + 1 if call.answers else 0
    times = f" (called {len(call.facts)} times)" if len(call.facts) > 1 else ""
    name = Text.assemble(
        (f"[{number}]", "bold reverse") if number else "",
        " " if number else "",
        (call.name, "bold"),
        (times, "dim"),
    )
    lines: list[RenderableType] = [name, _under(call.decided, 2, "green" if number else "")]
    if call.ours not in seen:
        lines.append(_under(f"ours {ours.file} {ours.first_line}-{ours.last_line}", 2, "dim"))
        lines += [_under(f"vLLM {place}", 2, "dim") for place in _places(call)]
    return Padding(Group(*lines), (0, 0, 0, min(call.depth, 6)))


def _places(call: Call) -> list[str]:
    """vLLM's functions; of the first also the line to look at."""
    first, *others = map(str, call.vllm)
    return [first if call.focus_line is None else f"{first}, line {call.focus_line}", *others]


def _under(words: str, indent: int, style: str) -> Padding:
    return Padding(Text(words, style), (0, 0, 0, indent))
