"""The scene for chapter and exercise 15: everybody's parts in one engine, and one workload on both generations.

`serve` runs waves of requests on either engine and records them; `totals` says what that cost, in counts. `all_parts`
puts the parts of several notebooks together. The workloads are functions, so that each run has lists of its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exercises.course import current
from refengine.errors import PartError
from refengine.llm import LLM
from refengine.parts import SLOTS, notebook_parts
from refengine.sampling import SamplingParams
from refengine.trace.codemap import topic
from refengine.trace.record import Record, Recorder
from refengine.viz import Table

Wave = Mapping[str, list[int]]  # request id -> prompt; all requests of a wave arrive together

# Exercises with a part for a model whose layers see everything, in the order in which a later one replaces an earlier.
EXERCISES = ("00", "01", "02", "03", "04", "06", "08")
WINDOWS = ("12", "13")  # with a part for models with windows, or with several kinds of layers


# -- parts --------------------------------------------------------------------------------------------------


def all_parts(folder: Path | None = None, exercises: Iterable[str] = EXERCISES) -> dict[str, Any]:
    """Slot -> part, out of the notebooks of these exercises in `folder`; the solved ones if it is None.

    A notebook in which no part is written yet gives nothing. Raises: PartError if a cell of one fails.
    """
    parts: dict[str, Any] = {}
    for notebook in _notebooks(folder, exercises):
        parts |= _parts_in(notebook)
    return parts


def _notebooks(folder: Path | None, exercises: Iterable[str]) -> list[Path]:
    folder = current().solutions if folder is None else folder
    return [path for number in exercises for path in sorted(folder.glob(f"{number}_*.ipynb"))]


def _parts_in(notebook: Path) -> dict[str, Any]:
    try:
        return notebook_parts(notebook)
    except PartError as error:
        if str(error).endswith("is written yet"):
            return {}
        raise


def slots_table(folder: Path | None = None) -> Table:
    """Every slot of the engine that one of `EXERCISES` fills, by which of them, and with what; the last one is used."""
    filled = [(path.stem[:2], _parts_in(path)) for path in _notebooks(folder, EXERCISES)]
    rows = [
        (slot, number, getattr(parts[slot], "__name__", str(parts[slot])))
        for slot in SLOTS
        for number, parts in filled
        if slot in parts
    ]
    return Table(("slot", "exercise", "part"), rows)


# -- runs ---------------------------------------------------------------------------------------------------


def serve(
    waves: Iterable[Wave],
    engine: str = "v1",
    *,
    num_blocks: int = 100,
    max_tokens: int = 12,
    parts: Any = None,
    **options: Any,
) -> tuple[dict[str, list[int]], Record]:
    """Runs the waves one after the other, on blocks of four tokens. Returns: tokens by request id, and the record.

    `parts` and `options` as in `LLM`. Raises: PartError.
    """
    recorder = Recorder()
    llm = LLM(
        "tiny", engine=engine, block_size=4, num_blocks=num_blocks, parts=parts, observer=recorder, **options
    )
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    tokens: dict[str, list[int]] = {}
    for wave in waves:
        for output in llm.generate(list(wave.values()), params, request_ids=list(wave)):
            tokens[output.request_id] = output.token_ids
    return tokens, recorder.record


@dataclass(frozen=True)
class Totals:
    """What a run cost, over all requests."""

    steps: int
    preemptions: int
    found: int  # tokens that admissions had not to compute
    computed: int  # tokens that the model ran on
    again: int  # of these, such as their request had computed before


def totals(record: Record) -> Totals:
    """Counts a record's marks."""
    found: dict[str, int] = {}
    done: dict[str, set[int]] = {}  # positions that the request has computed, ever
    sums = dict.fromkeys(("found", "computed", "again"), 0)
    for _, mark in record.marks():
        name, facts = mark.request_id, mark.facts
        if mark.kind == "lookup":
            found[name] = facts["hit_tokens"]
        elif mark.kind == "admit" and facts["admitted"]:
            sums["found"] += found[name]
        elif mark.kind == "run":
            positions = set(range(facts["start"], facts["start"] + facts["num_tokens"]))
            sums["computed"] += len(positions)
            sums["again"] += len(positions & done.setdefault(name, set()))
            done[name] |= positions
    return Totals(len(record.steps), record.num_preemptions, **sums)


# -- workloads ----------------------------------------------------------------------------------------------


def busy() -> list[Wave]:
    """Eight prompts over four beginnings, all at once; then the same eight again, in the other order."""
    rng = random.Random(0)
    beginnings = [[rng.randrange(100, 600) for _ in range(16)] for _ in range(4)]
    prompts = [
        rng.choice(beginnings)[: rng.randint(4, 16)]
        + [rng.randrange(100, 600) for _ in range(rng.randint(1, 9))]
        for _ in range(8)
    ]
    first = {f"r{i}": prompt for i, prompt in enumerate(prompts)}
    second = {f"r{8 + i}": prompt for i, prompt in enumerate(reversed(prompts))}
    return [first, second]


def crowd() -> list[Wave]:
    """Four prompts of twelve tokens, of which the first eight are the same."""
    return [{f"r{i}": [*range(100, 108), *range(200 + 20 * i, 204 + 20 * i)] for i in range(4)}]


def documents(count: int = 5, size: int = 32, rounds: int = 3) -> list[Wave]:
    """Questions about `count` documents of `size` tokens in turn, `rounds` times; one request at a time."""
    return [
        {f"d{i}q{turn}": [*range(100 + 40 * i, 100 + 40 * i + size), 500 + i, 510 + turn, 520]}
        for turn in range(rounds)
        for i in range(count)
    ]


def favourite(rounds: int = 6) -> list[Wave]:
    """A prefix of 16 tokens that comes back, twice in each of the first two rounds, and strangers in between."""
    prefix, waves, strangers = list(range(100, 116)), list[Wave](), 0
    for turn in range(rounds):
        waves.append({f"f{turn}": [*prefix, 300 + turn, 1, 2]})
        for _ in range(3):
            prompt = [400 + (17 * strangers + i) % 150 for i in range(14)]
            waves.append({f"s{strangers}": prompt})
            strangers += 1
        if turn < 2:
            waves.append({f"g{turn}": [*prefix, 350 + turn, 1, 2]})
    return waves


# -- the table of the mapping task ---------------------------------------------------------------------------

TOPICS = (
    "who_decides",
    "who_skips",
    "allocate_slots",
    "publish",
    "free_queue",
    "preemption",
    "duplicates",
    "swap",
)


def places() -> list[tuple[str, str, str]]:
    """Generation, symbol, file: what the code map says about six decisions, and places that sound as if they did."""
    rows = [
        (generation, place.symbol, place.where)
        for generation in ("V1", "V0")
        for name in TOPICS
        for place in getattr(topic(name), generation.lower()).vllm
    ]
    return list(dict.fromkeys(rows))
