"""Desks at which requests arrive, and the frames in which the reader writes both schedulers' decisions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from refengine import LLM, SamplingParams, viz
from refengine.parts import Parts
from refengine.trace.record import Record, Recorder
from refengine.v0.block_manager import BlockManager
from refengine.v0.budget import PartialPrefills
from refengine.v0.phases import SchedulerPhases
from refengine.v0.scheduler import Scheduler as V0Scheduler
from refengine.v0.scheduler import _finishing_first
from refengine.v0.scheduler_output import PhaseOutput, ScheduledGroup, SchedulerOutputs
from refengine.v0.sequence import Sequence as V0Sequence
from refengine.v0.sequence import SequenceGroup, SequenceStatus
from refengine.v0.tracker import ComputedBlocksTracker
from refengine.v1.draft import Draft, Share
from refengine.v1.request import Request, RequestStatus
from refengine.v1.scheduler import Scheduler

NUM_TOKENS = 900  # of the shipped model's vocabulary, as many as the prompts here are made of
MAX_STEPS = 200


class Desk:
    """An engine to which requests come one by one. `usable`: blocks that requests can get, in either generation."""

    def __init__(
        self, usable: int = 100, parts: Parts | dict[str, Any] | None = None, **options: Any
    ) -> None:
        """`options` as in `LLM`; blocks hold four tokens unless they say otherwise."""
        options = {"engine": "v1", "block_size": 4} | options
        self.recorder = Recorder(snapshots=True)
        null = options["engine"] == "v1"
        self.llm = LLM("tiny", num_blocks=usable + null, observer=self.recorder, parts=parts, **options)
        self.engine = self.llm.engine
        self.arrived: dict[str, int] = {}  # name -> number of the next step when it came
        self.tokens: dict[str, list[int]] = {}  # name -> what it has been answered
        self._next = 40

    def add(
        self, name: str, prompt: int | Iterable[int], max_tokens: int = 8, priority: int = 0, **params: Any
    ) -> None:
        """A request arrives. `prompt`: its tokens, or how many that nobody else has."""
        if isinstance(prompt, int):
            first, self._next = self._next, self._next + prompt
            prompt = [position % NUM_TOKENS for position in range(first, self._next)]
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params)
        self.engine.add_request(name, list(prompt), sampling, priority=priority)
        self.arrived[name], self.tokens[name] = len(self.recorder.steps), []

    def step(self) -> dict[str, int]:
        """One step. Returns: who computed how many tokens, in the order of the batch."""
        for output in self.engine.step():
            self.tokens[output.request_id] += output.token_ids
        return {
            mark.request_id: mark.facts["num_tokens"]
            for mark in self.recorder.steps[-1].marks
            if mark.kind == "run"
        }

    def run(self, most: int = MAX_STEPS) -> Record:
        """Steps until nobody is left, but not more than `most`."""
        while self.engine.has_unfinished_requests and most > 0:
            self.step()
            most -= 1
        return self.record

    @property
    def record(self) -> Record:
        return self.recorder.record

    @property
    def running(self) -> list[str]:
        """Who runs, in order of admission."""
        return [request.request_id for request in self.engine.scheduler.running]

    @property
    def waiting(self) -> list[str]:
        """Who waits, in the order of service."""
        return [request.request_id for request in self.engine.scheduler.waiting]

    @property
    def queue(self) -> list[int]:
        """The free queue, front first."""
        return list(self.engine.snapshot().free)


def workload(usable: int = 40, budget: int = 16, **options: Any) -> Desk:
    """The story of the chapter's comparison: two short prompts, and a long one while they are being answered."""
    desk = Desk(usable, max_num_batched_tokens=budget, max_model_len=48, **options)
    desk.add("ada", 6, max_tokens=10)
    desk.add("bob", 5, max_tokens=10)
    desk.step()
    desk.step()
    desk.add("cleo", 40, max_tokens=4)
    desk.add("dan", 4, max_tokens=4)
    desk.run()
    return desk


def tight(**options: Any) -> Desk:
    """Ada grows; Bob brings a prompt that does not fit beside her. Ten blocks, eight tokens per step, no caching."""
    desk = Desk(10, max_num_batched_tokens=8, enable_prefix_caching=False, **options)
    desk.add("ada", 8, max_tokens=24)
    desk.step()
    desk.add("bob", 28, max_tokens=3)
    desk.run()
    return desk


# -- V1: the frame of the reader's scheduler -----------------------------------------------------------------


class Step:
    """The step that is being put together: what the scheduler may ask and do."""

    def __init__(self, scheduler: Scheduler, draft: Draft) -> None:
        self._scheduler, self._draft = scheduler, draft
        self._found: dict[str, Any] = {}

    @property
    def budget(self) -> int:
        """Tokens left in this step."""
        return self._draft.budget

    @property
    def has_preempted(self) -> bool:
        """Whether somebody lost blocks in this step."""
        return self._draft.has_preempted

    @property
    def is_full(self) -> bool:
        """Whether as many requests run as may."""
        return len(self._scheduler.running) >= self._scheduler.config.max_num_seqs

    def grow(self, request: Request, num_tokens: int) -> bool:
        """A share for a running request. Returns: False, with nothing changed, if there are not enough free blocks."""
        blocks = self._scheduler.kv_cache_manager.allocate_slots(request, num_tokens)
        if blocks is not None:
            self._draft.add(Share(request, "running", num_tokens, blocks))
        return blocks is not None

    def take_from(self, victim: Request) -> None:
        """A running request loses its blocks and goes back to the queue; a share it had in this step is withdrawn."""
        scheduler = self._scheduler
        if self._draft.withdraw(victim) and scheduler.config.mode == "fixed":
            scheduler.kv_cache_manager.unpublish_uncomputed(victim)
        scheduler._preempt(victim, "somebody needs blocks")
        self._draft.has_preempted = True

    def find(self, request: Request) -> int:
        """Tokens of a waiting request that are in the cache now."""
        hits, num_hit_tokens, boundary = self._scheduler.kv_cache_manager.get_computed_blocks(request)
        self._scheduler._mark_lookup(request, hits, num_hit_tokens)
        self._found[request.request_id] = hits, num_hit_tokens, boundary
        return num_hit_tokens

    def admit(self, request: Request, num_tokens: int) -> bool:
        """A share for a waiting request, which runs from now on. Call `find` before.

        Returns: False, with nothing changed, if it is not let in: too few free blocks, or one of the two gates.
        """
        scheduler = self._scheduler
        hits, num_hit_tokens, boundary = self._found[request.request_id]
        blocks = scheduler.kv_cache_manager.allocate_slots(
            request,
            num_tokens,
            hits,
            num_hit_tokens,
            shared_prefix_boundary=boundary,
            full_sequence_must_fit=scheduler.config.reserve_full_sequence,
            keep_watermark=bool(scheduler.running),
        )
        if blocks is None:
            return False
        scheduler.waiting.remove(request)
        scheduler._admit(request, num_hit_tokens)
        kind: Any = "resumed" if request.num_preemptions else "new"
        self._draft.add(Share(request, kind, num_tokens, blocks))
        return True


class SchedulerBase(Scheduler):
    """The engine's scheduler without its decisions: `plan` makes them.

    `running` in order of admission, `waiting` with the next one first (`waiting.peek()`), `requests` by id, `config`.
    """

    def plan(self, step: Step) -> None:
        """Gives out the shares of one step."""
        raise NotImplementedError

    def _schedule_running(self, draft: Draft) -> None:
        self.plan(Step(self, draft))

    def _schedule_waiting(self, draft: Draft) -> None:
        """`plan` has done it."""


def is_running(request: Request) -> bool:
    """Whether the request runs, and has not lost its blocks."""
    return request.status is RequestStatus.RUNNING


# -- V0: phases in the reader's order ------------------------------------------------------------------------


class PhasesV0:
    """The three phases of one step of V0, to be called in some order, each at most once."""

    def __init__(self, scheduler: V0Scheduler, chunked: bool) -> None:
        self.scheduler, self.chunked = scheduler, chunked
        self.budget, self.out = scheduler._new_budget(), SchedulerOutputs()
        self.partial: PartialPrefills | None = None
        self.new = self.grown = self.back = PhaseOutput()
        if chunked:
            self.partial = PartialPrefills.count(scheduler.running, scheduler.waiting, scheduler.config)
        else:
            for group in scheduler.running:
                self.budget.add_seqs(group.request_id, group.max_num_running_seqs)

    @property
    def num_swapped(self) -> int:
        """Requests whose blocks are in CPU memory."""
        return len(self.scheduler.swapped)

    def prompts(self) -> int:
        """Admits prompts from the waiting queue, with what is left of the budget. Returns: how many."""
        self.new = self.scheduler._schedule_prefills(self.budget, self.out, self.partial)
        return len(self.new.prefills)

    def running(self) -> int:
        """Who runs gets its next token, or chunk. Returns: how many lost their blocks."""
        if not self.chunked and self.scheduler.config.policy == "priority":
            self.scheduler._force_out_for_priority(self.budget, self.out)
        self.grown = self.scheduler._schedule_running(self.budget, self.out, self.partial)
        return self.grown.num_preempted

    def swap_in(self) -> int:
        """Brings requests back from CPU memory. Returns: how many."""
        self.back = self.scheduler._schedule_swapped(self.budget, self.out, self.partial)
        return len(self.back.decodes) + len(self.back.prefills)

    def finish(self) -> SchedulerOutputs:
        """The step, put together as V0 does."""
        scheduler, new, grown, back = self.scheduler, self.new, self.grown, self.back
        scheduler._requeue_preempted(grown)
        order: tuple[list[ScheduledGroup], ...]
        if self.chunked:
            order = (
                back.decodes,
                back.prefills,
                grown.decodes,
                _finishing_first(grown.prefills),
                new.prefills,
            )
        else:
            order = (new.prefills, grown.decodes, back.decodes)
        for scheduled in order:
            scheduler.running.extend(each.group for each in scheduled)
        prefills = [*new.prefills, *grown.prefills, *back.prefills]
        self.out.scheduled = [*prefills, *grown.decodes, *back.decodes]
        return scheduler._finish(self.out, self.budget, len(prefills), grown)


def v0_scheduler(phases: Callable[[Any, bool], object]) -> type[V0Scheduler]:
    """V0's scheduler with its phases in the order of `phases(step, chunked)`."""

    class Ordered(V0Scheduler):
        def _schedule_default(self) -> SchedulerOutputs:
            return self._in_order(False)

        def _schedule_chunked_prefill(self) -> SchedulerOutputs:
            return self._in_order(True)

        def _in_order(self, chunked: bool) -> SchedulerOutputs:
            step = PhasesV0(self, chunked)
            phases(step, chunked)
            return step.finish()

    assert issubclass(Ordered, SchedulerPhases)
    return Ordered


# -- V0: the three small parts with a defect -----------------------------------------------------------------


class TrackerBase(ComputedBlocksTracker):
    """V0's memory of how much of a sequence is cached: `answers` by sequence id, and `find`, which looks anew."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.answers = self._num_cached_tokens

    def find(self, seq: V0Sequence) -> int:
        """Tokens at the head of the sequence that are cached and computed now."""
        return self.allocator.find_cached_blocks_prefix(self.hashes(seq)) * self.block_size


class StoryV0:
    """V0's block manager and some requests, without a scheduler. The clock ticks with every call."""

    def __init__(
        self,
        num_blocks: int,
        *,
        manager: type[BlockManager] = BlockManager,
        tracker: type[ComputedBlocksTracker] = ComputedBlocksTracker,
    ) -> None:
        self.manager = manager(4, num_blocks, 0, watermark=0.0, enable_caching=True)
        self.manager.computed = tracker(self.manager.allocator.gpu, 4, True, False)
        self.seqs: dict[str, V0Sequence] = {}
        self.clock = 0.0

    def wait(self, name: str, token_ids: Iterable[int]) -> V0Sequence:
        """A request enters the waiting queue."""
        self.seqs[name] = V0Sequence(len(self.seqs), list(token_ids))
        return self.seqs[name]

    def found(self, name: str) -> int:
        """Tokens that are said to be cached."""
        return self.manager.get_num_cached_tokens(self.seqs[name])

    def admit(self, name: str) -> list[int]:
        """Takes blocks for the whole prompt. Returns: the table."""
        seq = self.seqs[name]
        self.found(name)
        self.manager.allocate(SequenceGroup(name, [seq]))
        seq.status = SequenceStatus.RUNNING
        return self.manager.block_ids(seq)

    def compute(self, name: str, num_tokens: int) -> None:
        """One step of the request: this many tokens, of which it marks the blocks."""
        seq = self.seqs[name]
        self.clock += 1
        self.manager.access_all_blocks_in_seq(seq, self.clock)
        self.manager.mark_blocks_as_computed(seq, num_tokens)
        seq.update_num_computed_tokens(num_tokens)

    def start(self, name: str, token_ids: Iterable[int]) -> list[int]:
        """Waits, is admitted and computes everything in one step."""
        seq = self.wait(name, token_ids)
        table = self.admit(name)
        self.compute(name, len(seq))
        return table

    def finish(self, name: str) -> None:
        """Gives its blocks back."""
        self.manager.free(self.seqs[name])


# -- tables --------------------------------------------------------------------------------------------------

TOPICS = ("scheduler", "budget", "chunked_prefill", "preemption", "watermark", "request_queue", "swap")


def places() -> list[tuple[str, str, str, str]]:
    """Topic, generation, symbol in vLLM, file: what the code map says about scheduling."""
    source = Path(viz.__file__).parents[1] / "trace" / "codemap" / "topics.json"
    topics = {topic["id"]: topic for topic in json.loads(source.read_text(encoding="utf-8"))["topics"]}
    return [
        (topics[name]["title"], generation.upper(), place["symbol"], place["file"])
        for name in TOPICS
        for generation in ("v0", "v1")
        for place in topics[name][generation]["vllm"]
    ]
