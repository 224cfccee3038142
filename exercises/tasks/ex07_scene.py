"""The bench for chapter and exercise 07: the model runner of V1 with a window in it, and a reader's halves put in.

`Desk` is a running engine whose steps can be looked at: what the scheduler said, the tensors made of it, the rows that
were sampled and their logits. `share` makes what a scheduler would say, for a batch without an engine. `messages` are
what the scheduler of either generation sends in each step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exercises.tasks.ex03_traces import Replay, golden
from exercises.tasks.ex05_scene import tell
from refengine.attention import AttentionMetadata, causal_attention
from refengine.llm import LLM
from refengine.model.decoder import Decoder
from refengine.outputs import SampledTokens
from refengine.sampling import SamplingParams
from refengine.trace.codemap import call_path
from refengine.trace.record import Record, Recorder
from refengine.v0.model_input import ModelInputBuilder
from refengine.v1.engine import EngineCore
from refengine.v1.input_batch import InputBatch
from refengine.v1.model_runner import ModelInput, ModelRunner
from refengine.v1.scheduler_output import ScheduledRequest, SchedulerOutput
from refengine.viz import Table

Arrays = dict[str, np.ndarray]
Prepare = Callable[[InputBatch, np.ndarray, np.ndarray], Arrays]
WhoSamples = Callable[[InputBatch, np.ndarray, np.ndarray], Any]
MODEL_LEN = 64  # of a batch without an engine


def greedy(num: int) -> SamplingParams:
    """So many tokens, the best one each time."""
    return SamplingParams(max_tokens=num, ignore_eos=True)


# -- a batch without an engine -------------------------------------------------------------------------------


def share(
    name: str,
    token_ids: Iterable[int],
    table: Iterable[int] = (),
    *,
    start: int = 0,
    num_tokens: int | None = None,
    num_prompt_tokens: int | None = None,
) -> ScheduledRequest:
    """A new request as the scheduler announces it; `num_tokens` None: all that are left from `start` on."""
    tokens = tuple(token_ids)
    return ScheduledRequest(
        name,
        "new",
        len(tokens) - start if num_tokens is None else num_tokens,
        start,
        (list(table),),
        tokens,
        len(tokens) if num_prompt_tokens is None else num_prompt_tokens,
        greedy(16),
    )


def filled(
    shares: Sequence[ScheduledRequest], *, batch_class: type[InputBatch] = InputBatch, block_size: int = 4
) -> InputBatch:
    """A batch with these requests and their tables."""
    batch = batch_class(8, MODEL_LEN, block_size)
    for each in shares:
        batch.add(each)
        if each.block_ids:
            batch.add_blocks(each.request_id, each.block_ids[0])
    return batch


def rows_of(batch: InputBatch) -> dict[str, tuple[Any, ...]]:
    """Request id -> what its row says: known tokens, prompt tokens, computed tokens, block table, where it lies."""
    return {
        name: (
            batch.token_ids[row, : batch.num_tokens[row]].tolist(),
            int(batch.num_prompt_tokens[row]),
            int(batch.num_computed_tokens[row]),
            batch.block_table[row, : batch.num_blocks[row]].tolist(),
        )
        for name, row in batch.row_of.items()
    }


def batch_table(batch: InputBatch) -> Table:
    """The occupied rows."""
    return Table(
        ("row", "request", "known", "computed", "table"),
        [
            (row, name, int(batch.num_tokens[row]), *map(str, rows_of(batch)[name][2:]))
            for row, name in enumerate(batch.request_ids)
        ],
        right=("computed",),
    )


# -- an engine that shows its steps --------------------------------------------------------------------------


@dataclass
class Step:
    """One step of a `Desk`. `logits`: request id -> the row from which its token was sampled."""

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    model_input: ModelInput | None = None
    logits: dict[str, Tensor] = field(default_factory=dict)
    known: dict[str, list[int]] = field(default_factory=dict)  # tokens of whoever sampled, before that


class SeenRunner(ModelRunner):
    """The engine's runner; keeps what it made. A reader's `prepare` can stand in for its own."""

    prepare: Prepare | None = None
    seen: Step

    def execute(self, output: SchedulerOutput) -> SampledTokens:
        self.seen = Step(output.scheduled)
        sampler, logits = self.sampler, list[Tensor]()

        def keeping(rows: Tensor, *rest: Any) -> Tensor:
            logits.extend(rows)
            return sampler(rows, *rest)

        self.sampler = keeping
        try:
            sampled = super().execute(output)
        finally:
            self.sampler = sampler
        self.seen.logits = dict(zip(sampled.sampled, logits, strict=True))
        for name in sampled.sampled:
            row = self.batch.row_of[name]
            self.seen.known[name] = self.batch.token_ids[row, : self.batch.num_tokens[row] - 1].tolist()
        return sampled

    def _prepare_inputs(self, scheduled: list[ScheduledRequest]) -> ModelInput:
        if self.prepare is None:
            self.seen.model_input = super()._prepare_inputs(scheduled)
            return self.seen.model_input
        batch = self.batch
        rows = np.array([batch.row_of[each.request_id] for each in scheduled])
        counts = np.array([each.num_tokens for each in scheduled])
        made = self.prepare(batch, rows, counts)
        arrays = {name: torch.as_tensor(np.asarray(made[name], np.int64)) for name in made}
        metadata = AttentionMetadata(
            slot_mapping=arrays["slots"],
            block_tables=self._tensor(batch.block_table[rows, : batch.num_blocks[rows].max()]),
            query_start_loc=arrays["query_start_loc"],
            seq_lens=arrays["seq_lens"],
        )
        batch.num_computed_tokens[rows] += counts
        if self.observer is not None:
            for each in scheduled:
                self.observer.mark(
                    "run", each.request_id, start=each.num_computed_tokens, num_tokens=each.num_tokens
                )
        self.seen.model_input = ModelInput(arrays["token_ids"], arrays["positions"], metadata)
        return self.seen.model_input


class Desk:
    """V1 on blocks of four tokens, ten tokens a step; `options` of the engine change that.

    `batch` and `prepare`: a reader's class and function to stand in for the engine's.
    """

    def __init__(
        self, *, batch: type[InputBatch] = InputBatch, prepare: Prepare | None = None, **options: Any
    ) -> None:
        self.recorder = Recorder(snapshots=True)
        self.llm = LLM(
            "tiny",
            observer=self.recorder,
            **{"block_size": 4, "num_blocks": 24, "max_num_batched_tokens": 10, "max_num_seqs": 8} | options,
        )
        engine: Any = self.llm.engine
        self.engine: EngineCore = engine
        old = engine.model_runner
        self.runner = engine.model_runner = SeenRunner(
            old.model,
            old.kv_cache,
            batch(engine.config.max_num_seqs, engine.max_model_len, engine.config.block_size),
            backend=old.backend,
            sampler=old.sampler,
            observer=old.observer,
        )
        self.runner.prepare = prepare

    def add(self, name: str, token_ids: Iterable[int], max_tokens: int) -> None:
        """A request enters the waiting queue."""
        self.engine.add_request(name, list(token_ids), greedy(max_tokens))

    def step(self) -> Step:
        """One step of the engine. Returns: what was said, made and sampled."""
        self.engine.step()
        return self.runner.seen

    @property
    def record(self) -> Record:
        """What happened so far, for pictures."""
        return self.recorder.record

    @property
    def batch(self) -> InputBatch:
        return self.runner.batch

    @property
    def model(self) -> Decoder:
        return self.runner.model


ADA, BOB, CLEO = list(range(40, 46)), [*range(40, 44), 60, 61, 62], list(range(70, 82))


def mixed(**options: Any) -> Desk:
    """Ada has computed her prompt; Bob, with a hit, and Cleo, who is too long for the step, have just come."""
    desk = Desk(**options)
    desk.add("ada", ADA, 2)
    desk.step()
    desk.add("bob", BOB, 4)
    desk.add("cleo", CLEO, 3)
    return desk


@torch.inference_mode()
def plain_logits(model: Decoder, token_ids: Sequence[int]) -> Tensor:
    """All tokens at once, no cache, no batch: the logits behind the last one."""
    tokens = torch.tensor(token_ids)
    hidden = model(tokens, torch.arange(len(tokens)), causal_attention, None)
    return model.logits(hidden[-1:])[0]


def furthest(desk: Desk, step: Step) -> dict[str, float]:
    """Request id -> the largest difference between its logits in the step and those of a plain forward."""
    return {
        name: float((logits - plain_logits(desk.model, step.known[name])).abs().max())
        for name, logits in step.logits.items()
    }


def flat_table(step: Step) -> Table:
    """One line per token of the step: whose it is, its id, position and slot."""
    made = step.model_input
    assert made is not None
    owners = [each.request_id for each in step.scheduled for _ in range(each.num_tokens)]
    tensors = (made.token_ids, made.positions, made.metadata.slot_mapping)
    columns = [tensor.tolist() for tensor in tensors]
    rows = list(zip(range(len(owners)), owners, *columns, strict=True))
    return Table(("index", "request", "token id", "position", "slot"), rows)


# -- what it costs to begin anew -----------------------------------------------------------------------------


def median_seconds(work: Callable[[], object], repeats: int = 15) -> float:
    """Median of some calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def decode_costs(num_requests: int, length: int) -> tuple[float, float]:
    """A step of decodes: how many times longer than with a kept batch it takes to fill one anew, and to build V0's.

    Both in one run, without the model. Returns: (batch filled anew, V0's builder), each over the kept batch.
    """
    table = list(range(1, length // 16 + 2))
    shares = [share(str(i), range(length), table, start=length - 1) for i in range(num_requests)]
    rows, counts = np.arange(num_requests), np.ones(num_requests, np.int64)

    def fill() -> InputBatch:
        batch = InputBatch(num_requests, length + 16, 16)
        for each in shares:
            batch.add(each)
            batch.add_blocks(each.request_id, table)
        return batch

    told = [tell(length, computed=length - 1, is_prompt=False, block_size=16) for _ in range(num_requests)]

    def build() -> object:
        builder = ModelInputBuilder(16)
        for each in told:
            builder.add_seq_group(each)
        return builder.build()

    batch = fill()
    kept = median_seconds(lambda: arrays_of(batch, rows, counts))
    anew = median_seconds(lambda: arrays_of(fill(), rows, counts))
    return anew / kept, median_seconds(build) / kept


def arrays_of(batch: InputBatch, rows: np.ndarray, counts: np.ndarray) -> Arrays:
    """The engine's own preparation, on a batch alone. Changes nothing."""
    runner: Any = SeenRunner.__new__(SeenRunner)
    runner.batch, runner.observer, runner.device = batch, None, torch.device("cpu")
    runner.seen, runner.adapters = Step(), _NoAdapters()
    names = [batch.request_ids[row] for row in rows]
    told = [ScheduledRequest(n, "running", int(c), 0, None) for n, c in zip(names, counts, strict=True)]
    before = batch.num_computed_tokens.copy()
    made = ModelRunner._prepare_inputs(runner, told)
    batch.num_computed_tokens[:] = before
    return {
        "token_ids": made.token_ids.numpy(),
        "positions": made.positions.numpy(),
        "slots": made.metadata.slot_mapping.numpy(),
        "query_start_loc": made.metadata.query_start_loc.numpy(),
        "seq_lens": made.metadata.seq_lens.numpy(),
    }


class _NoAdapters:
    def for_requests(self, *_: object) -> None:
        return None


# -- what a step's message carries ---------------------------------------------------------------------------


def messages(
    engine: str, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[list[tuple[list[int], list[int]]]]:
    """For each step, one pair per request: the token ids and the block ids that its message holds."""
    llm = LLM("tiny", engine=engine, block_size=4, num_blocks=64)
    scheduler: Any = llm.engine.scheduler
    schedule, steps = scheduler.schedule, list[list[tuple[list[int], list[int]]]]()

    def noted(*arguments: Any) -> Any:
        said = schedule(*arguments)
        told = said.scheduled if engine == "v1" else said[0]
        steps.append([_carried(each) for each in told])
        return said

    scheduler.schedule = noted
    llm.generate([list(prompt) for prompt in prompts], greedy(max_tokens))
    return steps


def _carried(each: Any) -> tuple[list[int], list[int]]:
    if isinstance(each, ScheduledRequest):
        return list(each.token_ids), list(each.block_ids[0]) if each.block_ids else []
    return list(next(iter(each.token_ids.values()))), list(next(iter(each.block_tables.values())))


# -- randomness ----------------------------------------------------------------------------------------------


def drawn(num_neighbours: int = 0, num_blocks: int = 24, seed: int = 5) -> tuple[list[int], int]:
    """Ada's twelve tokens, drawn with a seed, beside some greedy neighbours. Returns: them, and how often she was
    preempted.
    """
    llm = LLM("tiny", block_size=4, num_blocks=num_blocks)
    drawing = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=seed)
    prompts = [*([90 + i] * 6 for i in range(num_neighbours)), ADA]
    scheduler: Any = llm.engine.scheduler
    preempted, schedule = list[str](), scheduler.schedule

    def noted() -> SchedulerOutput:
        output: SchedulerOutput = schedule()
        preempted.extend(output.preempted_ids & {"ada"})
        return output

    scheduler.schedule = noted
    names = [*(f"neighbour {i}" for i in range(num_neighbours)), "ada"]
    outputs = llm.generate(prompts, [*[greedy(12)] * num_neighbours, drawing], request_ids=names)
    return list(outputs[-1].token_ids), len(preempted)


def resumed_step() -> tuple[Desk, Step]:
    """Two requests in a pool too small for both; the step in which the one that was preempted comes back."""
    desk = Desk(num_blocks=6, enable_prefix_caching=False, max_num_batched_tokens=8)
    for name, prompt in (("ada", ADA), ("bob", BOB)):
        desk.add(name, prompt, 8)
    while True:
        step = desk.step()
        if any(each.kind == "resumed" for each in step.scheduled):
            return desk, step


# -- the tables of the exercise ------------------------------------------------------------------------------

SMALL = {
    "a": share("a", range(20, 29), [5, 2, 7], start=8, num_prompt_tokens=7),
    "b": share("b", range(30, 41), [3, 9, 4], start=4, num_tokens=5),
    "c": share("c", range(50, 56), [8, 1]),
}


def small_step() -> Table:
    """The step of the predicting task."""
    rows = [
        (
            row,
            name,
            f"{each.token_ids[0]} to {each.token_ids[-1]}",
            each.num_computed_tokens,
            str(each.block_ids[0]) if each.block_ids else "",
            each.num_tokens,
        )
        for row, (name, each) in enumerate(SMALL.items())
    ]
    return Table(
        ("row", "request", "known token ids", "computed", "block table", "tokens in this step"), rows
    )


def places() -> Table:
    """What lies between the scheduler's output and attention, in the three runners of the two releases."""
    parts = ("model_runner", "kernel", "attention")
    rows = [
        (version, step.place.symbol, step.place.file.removeprefix("vllm/"), step.role)
        for version, path in (("V0", "v0"), ("V1", "v1"))
        for step in call_path(path)
        if step.component in parts or step.place.symbol == "compute_slot_mapping"
    ]
    return Table(("", "symbol", "file", "role"), rows, wrap=48)


# -- vLLM's recorded slots -----------------------------------------------------------------------------------


def replay_slots(prepare: Prepare, name: str = "mi_slot_mapping") -> Replay:
    """Replays `compute_slot_mapping` of 0.7.3 on a reader's `prepare`: each operation is a batch of one request.

    Left out are sliding windows, which our V1 runner does not have, and profile runs, which have no table.
    """
    ops = [op for op in golden(name)["ops"] if op["sliding_window"] is None and not op["is_profile_run"]]
    for number, op in enumerate(ops):
        length, start = op["seq_len"], op["context_len"]
        batch = InputBatch(2, length + op["block_size"], op["block_size"])
        each = share("r", range(length), start=start)
        batch.add(each)
        batch.add_blocks("r", op["block_table"])
        got = np.asarray(prepare(batch, np.array([0]), np.array([each.num_tokens]))["slots"]).tolist()
        if got != op["expect"]["slot_mapping"]:
            said = f"operation {number}: slots are {got}, vLLM says {op['expect']['slot_mapping']}"
            return Replay(name, number + 1, said)
    return Replay(name, len(ops))
