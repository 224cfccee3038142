"""The bench for chapter and exercise 05: V0 without a model, one hop at a time; and a V0 with a hop replaced.

`Bench` holds V0's block manager, scheduler and model-input builder. A step is three calls, `schedule`, `build` and
`count`, or `step` for all of them. `with_skip`, `with_share` and `with_tracker` put a reader's hop into a running V0.
`crowded` and `late_question` are the story of a hit that goes stale while its request waits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from refengine.config import EngineConfig
from refengine.llm import LLM
from refengine.model.corpus import world
from refengine.sampling import SamplingParams
from refengine.trace.observer import PoolSnapshot
from refengine.trace.record import Record, Recorder
from refengine.trace.words import ranges
from refengine.v0.block_manager import BlockManager
from refengine.v0.model_input import ModelInput, ModelInputBuilder, PerSequence, SequenceInput
from refengine.v0.prefix_caching import PrefixCachingBlockAllocator
from refengine.v0.scheduler import Scheduler
from refengine.v0.scheduler_output import SchedulerOutputs
from refengine.v0.sequence import Sequence as V0Sequence
from refengine.v0.sequence import SequenceGroup, SequenceGroupMetadata, SequenceStatus
from refengine.v0.tracker import ComputedBlocksTracker
from refengine.viz import Table

SAMPLED = 9  # what the missing model "samples", unless a request says otherwise
Skip = Callable[..., None]  # (seq, block_size, sliding_window)
FirstShare = Callable[[int, int, int, int], tuple[int, int]]


class TrackerBase(ComputedBlocksTracker):
    """The engine's tracker, made to be derived from."""

    @property
    def answers(self) -> dict[int, int]:
        """Sequence id -> what it was told last, in tokens. Freeing a sequence takes its entry out."""
        return self._num_cached_tokens

    def look_up(self, seq: V0Sequence) -> int:
        """How many of its leading tokens are cached and computed at this moment. Nothing is remembered."""
        return self.allocator.find_cached_blocks_prefix(self.hashes(seq)) * self.block_size


class Bench:
    """V0 up to the model. `options` are those of `EngineConfig`; blocks of four tokens and no chunking by default.

    `skip`: a function to stand in for `compute_for_prefix_cache_hit`. `tracker`: a class to stand in for the tracker.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        skip: Skip | None = None,
        tracker: type[ComputedBlocksTracker] | None = None,
        **options: Any,
    ) -> None:
        usual: dict[str, Any] = {"engine": "v0", "block_size": 4, "enable_chunked_prefill": False}
        self.config = EngineConfig(**usual | options)
        self.recorder = Recorder(snapshots=True)
        faithful = self.config.mode == "faithful"
        self.manager = BlockManager(
            self.config.block_size, num_blocks, 0, watermark=0.0, enable_caching=True, faithful=faithful
        )
        if tracker is not None:
            self.manager.computed = make_tracker(tracker, self.manager)
        self.scheduler = Scheduler(self.config, self.manager, max_model_len=512, observer=self.recorder)
        self.skip = skip
        self.groups: dict[str, SequenceGroup] = {}
        self.outputs: dict[str, list[int]] = {}
        self.clock = 0
        self.out = SchedulerOutputs()
        self.recorder.attach("v0", num_blocks, self.config.block_size, self._snapshot)

    # -- requests -------------------------------------------------------------------------------------------

    def wait(self, name: str, token_ids: Iterable[int], outputs: Iterable[int] = (SAMPLED,)) -> V0Sequence:
        """A request enters the waiting queue. `outputs`: what will be sampled for it; with the last it ends."""
        seq = V0Sequence(len(self.groups), list(token_ids))
        self.groups[name] = SequenceGroup(name, [seq], arrival=float(len(self.groups)))
        self.outputs[name] = list(outputs)
        self.scheduler.add(self.groups[name])
        return seq

    def run(self, name: str, token_ids: Iterable[int], outputs: Iterable[int] = (SAMPLED,)) -> None:
        """A request comes, and steps are made until it has ended."""
        seq = self.wait(name, token_ids, outputs)
        while not seq.is_finished:
            self.step()

    # -- one step, hop by hop -------------------------------------------------------------------------------

    def schedule(self) -> list[SequenceGroupMetadata]:
        """Decides the next step. Returns: what the worker is told, one entry per request."""
        self.recorder.begin_step()
        self.clock += 1
        metadata, self.out = self.scheduler.schedule(float(self.clock))
        return metadata

    def build(self, metadata: Sequence[SequenceGroupMetadata]) -> ModelInput:
        """What the worker makes of it."""
        builder = self.builder()
        for each in metadata:
            builder.add_seq_group(each)
        for each, seq in zip(metadata, builder.seqs, strict=True):
            self.recorder.mark("run", each.request_id, start=seq.context_len, num_tokens=seq.query_len)
        return builder.build()

    def builder(self) -> ModelInputBuilder:
        """A fresh model-input builder, with the reader's `skip` in it if there is one."""
        size, chunked = self.config.block_size, self.config.enable_chunked_prefill
        own = None if self.skip is None else partial(self.skip, block_size=size, sliding_window=None)
        return ModelInputBuilder(size, chunked_prefill=chunked, prefix_cache_hit=own)

    def count(self, metadata: Sequence[SequenceGroupMetadata]) -> None:
        """What the engine does after the model: counts computed tokens, appends the sampled one, ends requests."""
        for each in metadata:
            seq, outputs = self.groups[each.request_id].first_seq, self.outputs[each.request_id]
            seq.update_num_computed_tokens(each.token_chunk_size)
            if each.do_sample:
                seq.token_ids.append(outputs.pop(0))
                if not outputs:
                    seq.status = SequenceStatus.FINISHED_STOPPED
                    self.manager.free(seq)
        self.scheduler.free_finished()
        self.recorder.end_step()

    def step(self) -> ModelInput:
        """One whole step. Returns: its model input."""
        metadata = self.schedule()
        model_input = self.build(metadata)
        self.count(metadata)
        return model_input

    # -- looking at it --------------------------------------------------------------------------------------

    @property
    def gpu(self) -> PrefixCachingBlockAllocator:
        """The allocator of the GPU's blocks."""
        allocator = self.manager.allocator.gpu
        assert isinstance(allocator, PrefixCachingBlockAllocator)  # caching is on
        return allocator

    def blocks(self, name: str) -> Table:
        """What the allocator knows of the blocks of a request that runs."""
        rows = [
            (block_id, block_id in self.gpu.cached.values(), self.gpu.is_computed(block_id))
            for block_id in self.manager.block_ids(self.groups[name].first_seq)
        ]
        return Table(("block", "cached", "computed"), rows)

    @property
    def record(self) -> Record:
        return self.recorder.record

    def _snapshot(self) -> PoolSnapshot:
        pool = self.manager.snapshot()
        names = {str(group.first_seq.seq_id): name for name, group in self.groups.items()}
        return PoolSnapshot(pool.free, pool.cached, {names[key]: table for key, table in pool.tables.items()})


def make_tracker(tracker: type[ComputedBlocksTracker], manager: BlockManager) -> ComputedBlocksTracker:
    """A tracker of this class for a block manager."""
    return tracker(manager.allocator.gpu, manager.block_size, manager.enable_caching, manager.faithful)


# -- one sequence on its way through the builder ------------------------------------------------------------


def tell(
    num_tokens: int,
    hit: Sequence[int] | None = (),
    *,
    computed: int = 0,
    chunk: int | None = None,
    is_prompt: bool = True,
    name: str = "bob",
    first_new: int = 50,
    block_size: int = 4,
) -> SequenceGroupMetadata:
    """What the scheduler would tell the worker of a sequence 0, 1, ... in blocks of four.

    `hit`: the computed blocks at the head of its table, None if caching is off; behind them it has `first_new` and so
    on. `computed`: tokens that earlier chunks have computed; `chunk`: tokens of this one, None for all that are left.
    """
    found, num_blocks = list(hit or []), -(-num_tokens // block_size)
    return SequenceGroupMetadata(
        request_id=name,
        is_prompt=is_prompt,
        do_sample=True,
        token_chunk_size=num_tokens - computed if chunk is None else chunk,
        token_ids={0: list(range(num_tokens))},
        num_prompt_tokens=num_tokens,
        num_computed_tokens=computed,
        block_tables={0: [*found, *range(first_new, first_new + num_blocks - len(found))]},
        computed_block_nums=None if hit is None else found,
    )


def after_skip(
    metadata: SequenceGroupMetadata, skip: Skip | None = None, block_size: int = 4, **options: Any
) -> SequenceInput:
    """The sequence as the builder's functions leave it. `options`: sliding_window, chunked_prefill."""
    window = options.get("sliding_window")
    own = None if skip is None else partial(skip, block_size=block_size, sliding_window=window)
    builder = ModelInputBuilder(block_size, prefix_cache_hit=own, **options)
    builder.add_seq_group(metadata)
    return builder.seqs[0]


def stages(metadata: SequenceGroupMetadata, skip: Skip | None = None) -> Table:
    """The numbers of a sequence after `compute_lens` and after the skip, in blocks of four."""
    own = None if skip is None else partial(skip, block_size=4, sliding_window=None)
    builder, rows = ModelInputBuilder(4, prefix_cache_hit=own), list[tuple[Any, ...]]()

    def noted(name: str, compute: PerSequence) -> PerSequence:
        def computed(seq: SequenceInput) -> None:
            compute(seq)
            numbers = seq.context_len, seq.query_len, seq.seq_len
            rows.append((name, ranges(seq.input_positions), *numbers))

        return computed

    names = ("compute_lens", "compute_for_prefix_cache_hit" if skip is None else "your skip")
    for index, name in enumerate(names):
        builder.per_seq_compute_fns[index] = noted(name, builder.per_seq_compute_fns[index])
    builder.add_seq_group(metadata)
    return Table(("after", "positions", "context_len", "query_len", "seq_len"), rows)


# -- an engine with a hop replaced --------------------------------------------------------------------------


def with_skip(llm: LLM, skip: Skip) -> LLM:
    """Lets the workers of a V0 engine skip with this function. Mutates: the engine."""
    worker: Any = llm.engine.worker  # type: ignore[union-attr]
    own = partial(skip, block_size=llm.config.block_size, sliding_window=None)
    worker.builder = partial(ModelInputBuilder, prefix_cache_hit=own)
    return llm


def with_tracker(llm: LLM, tracker: type[ComputedBlocksTracker]) -> LLM:
    """Lets the block manager of a V0 engine ask this tracker. Mutates: the engine."""
    manager: BlockManager = llm.engine.block_manager  # type: ignore[union-attr]
    manager.computed = make_tracker(tracker, manager)
    return llm


def with_share(llm: LLM, first_share: FirstShare) -> LLM:
    """Lets the scheduler of a V0 engine skip: the worker gets positions, and never a computed block.

    Mutates: the engine.
    """
    scheduler: Any = llm.engine.scheduler
    metadata_of, block_size = scheduler._metadata, llm.config.block_size

    def told(scheduled: Any, now: float) -> SequenceGroupMetadata:
        each: SequenceGroupMetadata = metadata_of(scheduled, now)
        hit, (tokens,) = each.computed_block_nums or [], each.token_ids.values()
        if not each.is_prompt or each.num_computed_tokens:
            return replace(each, computed_block_nums=None)
        start, count = first_share(len(tokens), len(hit) * block_size, block_size, each.token_chunk_size)
        return replace(each, num_computed_tokens=start, token_chunk_size=count, computed_block_nums=None)

    scheduler._metadata = told
    return llm


# -- a hit that goes stale ----------------------------------------------------------------------------------


def crowded(**options: Any) -> tuple[Bench, V0Sequence]:
    """Bob waits with Ada's twelve tokens and one more, until Cleo, who has taken Ada's blocks, has ended.

    `options` of the bench. Returns: the bench before the step in which Bob is admitted, and his sequence.
    """
    bench = Bench(8, **options)
    bench.run("ada", range(12))
    cleo = bench.wait("cleo", range(30, 49), outputs=range(60, 71))
    bob = bench.wait("bob", range(13), outputs=(7, 8))
    while not cleo.is_finished:
        bench.step()
    return bench, bob


PLACE = world(random.Random(10), 4)  # four facts and what one can ask about them
ELSEWHERE = world(random.Random(110), 4)  # another text, for the request in between
PLACE_BLOCKS = 16


def late_question(
    number: int, tracker: type[ComputedBlocksTracker] | None = None, **options: Any
) -> tuple[str, Record]:
    """Ada reads a text. Cleo reads another and runs for long. Bob waits with a question about Ada's text.

    `number`: which of the questions. `options` of the engine, V0. Returns: Bob's answer, and the record.
    """
    recorder = Recorder(snapshots=True)
    llm = LLM("tiny", engine="v0", block_size=4, num_blocks=PLACE_BLOCKS, observer=recorder, **options)
    if tracker is not None:
        with_tracker(llm, tracker)
    llm.generate([PLACE.context], SamplingParams(max_tokens=1, ignore_eos=True), request_ids=["ada"])
    question = PLACE.prompt(PLACE.questions[number].question)
    _, bob = llm.generate(
        [ELSEWHERE.context, question],
        [SamplingParams(max_tokens=26, ignore_eos=True), SamplingParams(max_tokens=12, stop="\n")],
        request_ids=["cleo", "bob"],
    )
    return bob.text, recorder.record


def hops(**options: Any) -> dict[str, Any]:
    """What each hop says of Bob in the step that admits him; `options` of the bench."""
    bench, bob = crowded(**options)
    known = bench.manager.get_num_cached_tokens(bob)
    queries, hits = bench.gpu.queries, bench.gpu.hits
    (metadata,) = bench.schedule()
    model_input = bench.build([metadata])
    return {
        "tracker: cached tokens": known,
        "allocation: blocks looked for": bench.gpu.queries - queries,
        "allocation: blocks found": bench.gpu.hits - hits,
        "scheduler: block table": metadata.block_tables[bob.seq_id],
        "scheduler: computed_block_nums": metadata.computed_block_nums,
        "builder: tokens to compute": model_input.query_lens[0],
        "builder: positions": ranges(model_input.input_positions),
    }


# -- the workload of the measuring task ---------------------------------------------------------------------

TWELVE = list(range(40, 52))
REPEATED = [[TWELVE], [TWELVE] * 3]  # a prompt, and then three times the same, together
TOGETHER = [[TWELVE] * 3]  # three times the same at once, and nobody had it before
