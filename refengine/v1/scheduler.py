"""Which requests compute how many tokens in the next step?

One rule covers prefill, chunked prefill, decode and resuming: a request has `num_tokens` tokens, of which
`num_computed_tokens` are in the cache, and a step gives it some of the difference out of one token budget.
Running requests are served first, then waiting ones are admitted. A running request that finds no free block
takes the blocks of the least important one, which starts over later (preemption by recompute).

The computed tokens that a prefix hit brings are subtracted *here*: that is how V1 skips work. The model runner
is told where to start and never learns why.
vLLM: V0 core/scheduler.py Scheduler (two phases, and the skip happens in the worker); V1
v1/core/sched/scheduler.py Scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from refengine.config import EngineConfig
from refengine.errors import IntegrityError, PartError
from refengine.trace.observer import MarkKind, Observer
from refengine.v1.draft import Draft, Share
from refengine.v1.kv_cache_manager import KVCacheBlocks, KVCacheManager
from refengine.v1.request import Request, RequestStatus
from refengine.v1.request_queue import make_queue
from refengine.v1.scheduler_output import SchedulerOutput
from refengine.v1.state_chunks import state_chunks_for


class Scheduler:
    """`running` in order of admission, `waiting` in service order, and every unfinished request by id."""

    def __init__(
        self,
        config: EngineConfig,
        kv_cache_manager: KVCacheManager,
        max_model_len: int,
        eos_token_ids: Sequence[int] = (),
        observer: Observer | None = None,
    ) -> None:
        self.config = config
        self.kv_cache_manager = kv_cache_manager
        self.max_model_len = max_model_len
        self.state_chunks = state_chunks_for(config, kv_cache_manager)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.observer = observer
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting = make_queue(config.policy)
        self._finished_ids: set[str] = set()
        self._preempted_ids: set[str] = set()

    def add_request(self, request: Request) -> None:
        """Enters a request. Mutates: the waiting queue. Raises: ValueError for an id that is in use."""
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is in use")
        self.requests[request.request_id] = request
        self.waiting.add(request)

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    # -- one step: decide -----------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Decides the next step. Mutates: queues, blocks, and each scheduled request's computed tokens."""
        computed = {request.request_id: request.num_computed_tokens for request in self.running}
        try:
            self.kv_cache_manager.begin_step()
            draft = Draft(self.config.max_num_batched_tokens)
            self._schedule_running(draft)
            if not draft.has_preempted:  # somebody just lost blocks: they must not go to a newcomer
                self._schedule_waiting(draft)
            return self._commit(draft)
        except BaseException:  # Ctrl-C included: nobody will compute what was published so far
            with suppress(PartError, IntegrityError):  # a broken part: its first error counts
                self._start_over(computed)
            raise

    def _schedule_running(self, draft: Draft) -> None:
        index = 0
        while index < len(self.running) and draft.budget > 0:
            request = self.running[index]
            num_new_tokens = self._chunk(request.num_tokens - request.num_computed_tokens)
            num_new_tokens = min(num_new_tokens, draft.budget)
            # The last position of the model is never computed: nothing could follow it.
            num_new_tokens = min(num_new_tokens, self.max_model_len - 1 - request.num_computed_tokens)
            num_new_tokens = self.state_chunks.cut(request, request.num_computed_tokens, num_new_tokens)
            if num_new_tokens == 0:
                index += 1
                continue
            new_blocks = self.kv_cache_manager.allocate_slots(request, num_new_tokens)
            while new_blocks is None and request.status is RequestStatus.RUNNING:
                victim = self._choose_victim()
                if self.running.index(victim) < index:
                    index -= 1  # the victim stands before this request, which moves up
                if draft.withdraw(victim) and self.config.mode == "fixed":
                    # Its blocks were published when it got its share, and now nobody will compute them. vLLM
                    # 0.33.0 leaves them in the index, where the victim itself finds them when it resumes.
                    self.kv_cache_manager.unpublish_uncomputed(victim)
                self._preempt(victim, f"{request.request_id} needs blocks")
                draft.has_preempted = True
                if victim is not request:
                    new_blocks = self.kv_cache_manager.allocate_slots(request, num_new_tokens)
            if new_blocks is not None:
                draft.add(Share(request, "running", num_new_tokens, new_blocks))
                index += 1  # else it was its own victim, and the next one stands at this index now

    def _schedule_waiting(self, draft: Draft) -> None:
        """Admits from the head until one does not fit. Nobody overtakes: that one would wait for ever."""
        while self.waiting and draft.budget > 0:
            request = self.waiting.peek()
            if len(self.running) == self.config.max_num_seqs:
                self._mark("admit", request, admitted=False, reason="max_num_seqs requests are running")
                return
            hits, num_hit_tokens, boundary = self.kv_cache_manager.get_computed_blocks(request)
            request.shared_prefix_boundary = boundary
            self._mark_lookup(request, hits, num_hit_tokens)
            num_new_tokens = self._chunk(request.num_tokens - num_hit_tokens)
            if num_new_tokens > draft.budget and not self.config.enable_chunked_prefill:
                self._mark(
                    "admit", request, admitted=False, reason="not enough token budget for the whole prompt"
                )
                return
            num_new_tokens = min(num_new_tokens, draft.budget)
            num_new_tokens = self.state_chunks.cut(request, num_hit_tokens, num_new_tokens)
            if num_new_tokens == 0:
                self._mark(
                    "admit", request, admitted=False, reason="not enough token budget for a whole block"
                )
                return
            new_blocks = self.kv_cache_manager.allocate_slots(
                request,
                num_new_tokens,
                hits,
                num_hit_tokens,
                shared_prefix_boundary=boundary,
                full_sequence_must_fit=self.config.reserve_full_sequence,
                keep_watermark=bool(self.running),  # with nobody to protect, it would only stop the engine
            )
            if new_blocks is None:
                return
            self._admit(self.waiting.pop(), num_hit_tokens)
            kind: Literal["new", "resumed"] = "resumed" if request.num_preemptions else "new"
            draft.add(Share(request, kind, num_new_tokens, new_blocks))

    def _chunk(self, num_new_tokens: int) -> int:
        """Cuts a request's wish to the long-prefill threshold, unless it is alone and nobody could go hungry."""
        threshold = self.config.long_prefill_token_threshold
        return min(num_new_tokens, threshold) if threshold and len(self.requests) > 1 else num_new_tokens

    def _admit(self, request: Request, num_hit_tokens: int) -> None:
        resumed = request.num_preemptions > 0
        self.kv_cache_manager.stats.record(request.num_tokens, num_hit_tokens, resumed)
        request.num_computed_tokens = num_hit_tokens
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        if not resumed:
            request.num_cached_tokens = num_hit_tokens

    def _choose_victim(self) -> Request:
        """FCFS: whoever was admitted last. Priority: the least important, of these the latest arrival."""
        if self.config.policy == "priority":
            return max(self.running, key=lambda request: (request.priority, request.arrival))
        return self.running[-1]

    def _preempt(self, victim: Request, reason: str) -> None:
        """Takes everything from a running request but its tokens and hashes, and puts it back in the queue."""
        self.running.remove(victim)
        self.kv_cache_manager.free(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.waiting.put_back(victim)
        self._preempted_ids.add(victim.request_id)
        self._mark("admit", victim, admitted=False, reason=f"preempted: {reason}")

    def _commit(self, draft: Draft) -> SchedulerOutput:
        """Turns the draft into what the runner gets, and counts its tokens as computed from here on."""
        scheduled = []
        for share in draft.shares.values():
            scheduled.append(share.to_runner(self.kv_cache_manager))
            share.request.num_computed_tokens += share.num_tokens
        output = SchedulerOutput(scheduled, frozenset(self._finished_ids), frozenset(self._preempted_ids))
        self._finished_ids.clear()
        self._preempted_ids.clear()
        return output

    def take_back(self, output: SchedulerOutput) -> None:
        """Undoes a step that did not run to its end: the model failed, or somebody pressed Ctrl-C.

        Its tokens were counted as computed and its blocks published when it was decided, and neither is true now.
        Its requests are preempted and start over, from what earlier steps have computed.
        Mutates: queues, blocks, requests.
        """
        self._finished_ids |= output.finished_ids
        self._preempted_ids |= output.preempted_ids
        for share in reversed(output.scheduled):
            request = self.requests.get(share.request_id)
            if request is not None:
                request.num_computed_tokens -= share.num_tokens
                self.kv_cache_manager.unpublish_uncomputed(request)
                self._preempt(request, "its step failed")

    def _start_over(self, computed: Mapping[str, int]) -> None:
        """After a plan that broke off: everybody gives back what they hold, and only computed blocks stay findable.

        `computed`: tokens that each running request had before the plan. Mutates: queues, blocks, requests.
        """
        for request in self.running[::-1]:
            request.num_computed_tokens = computed.get(request.request_id, 0)
            self.kv_cache_manager.unpublish_uncomputed(request)
            self._preempt(request, "a plan broke off")
        for request in self.waiting:
            self.kv_cache_manager.unpublish_uncomputed(request)
            self.kv_cache_manager.free(request)

    # -- one step: learn what came out ----------------------------------------------------------------------

    def update(self, output: SchedulerOutput, sampled: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
        """Appends the sampled tokens, ends requests that are done and frees their blocks.

        `sampled` has no entry for a request that has not computed its last token yet.
        Returns: the tokens that joined each request; a stop in the middle drops the rest.
        Mutates: requests, `running`, blocks.
        """
        appended: dict[str, list[int]] = {}
        for share in output.scheduled:
            request = self.requests.get(share.request_id)
            tokens = sampled.get(share.request_id)
            if request is None or not tokens:  # None: aborted while the model ran
                continue
            appended[request.request_id] = []
            for token_id in tokens:
                request.append([token_id])
                appended[request.request_id].append(token_id)
                status = request.stop_status(self.eos_token_ids, self.max_model_len)
                if status is not None:
                    self.finish(request.request_id, status)
                self._mark(
                    "append", request, token_id=token_id, finish_reason=status.value if status else None
                )
                if status is not None:
                    break
        return appended

    def finish(self, request_id: str, status: RequestStatus) -> Request | None:
        """Ends a request wherever it stands: done, aborted, or stopped by its text.

        Returns: the request, or None if there is none by that id (any more). Mutates: queues, blocks.
        """
        request = self.requests.pop(request_id, None)
        if request is None:
            return None
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        request.status = status
        self.kv_cache_manager.free(request)
        self._finished_ids.add(request_id)
        return request

    # -- looking at it --------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every request stands in exactly one queue and holds blocks iff it runs."""
        self.kv_cache_manager.check_integrity()
        standing = sorted(r.request_id for r in (*self.running, *self.waiting))
        if standing != sorted(self.requests):
            raise IntegrityError(
                f"queues hold {standing}, but the unfinished requests are {sorted(self.requests)}"
            )
        for request in self.requests.values():
            is_running = request.status is RequestStatus.RUNNING
            if is_running != (request in self.running):
                raise IntegrityError(
                    f"request {request.request_id!r} is {request.status.value} but in the other queue"
                )
            holds = any(self.kv_cache_manager.block_ids(request.request_id))
            if holds != is_running:
                raise IntegrityError(
                    f"request {request.request_id!r} is {request.status.value}, holds blocks: {holds}"
                )

    def _mark_lookup(self, request: Request, hits: KVCacheBlocks, num_hit_tokens: int) -> None:
        block_ids = list(hits.ids())
        self._mark(
            "lookup", request, num_tokens=request.num_tokens, hit_tokens=num_hit_tokens, block_ids=block_ids
        )

    def _mark(self, kind: MarkKind, request: Request, **facts: Any) -> None:
        if self.observer is not None:
            self.observer.mark(kind, request.request_id, **facts)
