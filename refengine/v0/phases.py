"""The three phases out of which V0 puts a step together: prompts, running sequences, swapped ones.

Each phase walks one queue from its head and stops at the first group that does not fit.
vLLM: V0 core/scheduler.py Scheduler._schedule_prefills, _schedule_running, _schedule_swapped, _preempt; V1 has
two loops, see refengine/v1/scheduler.py.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Literal

from refengine.config import EngineConfig
from refengine.trace.observer import MarkKind, Observer
from refengine.v0.block_manager import AllocStatus, BlockManager
from refengine.v0.budget import PartialPrefills, SchedulingBudget
from refengine.v0.scheduler_output import PhaseOutput, ScheduledGroup, SchedulerOutputs
from refengine.v0.sequence import SequenceGroup, SequenceStatus


class SchedulerPhases:
    """`waiting`, `running` and `swapped`, each served from its left end."""

    def __init__(
        self,
        config: EngineConfig,
        block_manager: BlockManager,
        max_model_len: int,
        observer: Observer | None = None,
    ) -> None:
        self.config = config
        self.block_manager = block_manager
        self.max_model_len = max_model_len
        self.observer = observer
        self.waiting: deque[SequenceGroup] = deque()
        self.running: deque[SequenceGroup] = deque()
        self.swapped: deque[SequenceGroup] = deque()

    # -- prompts --------------------------------------------------------------------------------------------

    def _schedule_prefills(
        self, budget: SchedulingBudget, out: SchedulerOutputs, partial: PartialPrefills | None = None
    ) -> PhaseOutput:
        """Admits prompts. `partial`: chunked prefill is on. Mutates: queues, blocks, budget, `out.ignored`."""
        phase, postponed = PhaseOutput(), deque[SequenceGroup]()
        if budget.remaining_tokens == 0:
            return phase
        while self.waiting:
            group = self.waiting[0]
            waiting = group.get_seqs(SequenceStatus.WAITING)
            assert len(waiting) == 1, "a group in the waiting queue has one waiting sequence"
            if partial is not None and not partial.can_schedule(group):
                postponed.appendleft(self.waiting.popleft())
                continue
            uncached, cached = self._num_new_tokens(group, SequenceStatus.WAITING, budget, partial)
            status = self.block_manager.can_allocate(group)
            self._mark_lookup(group, cached)
            if uncached + cached > self._prompt_limit or status is AllocStatus.NEVER:
                self._ignore(self.waiting.popleft(), out)
                continue
            seats = group.max_num_running_seqs
            if status is AllocStatus.LATER or uncached == 0 or not budget.can_schedule(uncached, seats):
                reason = (
                    "not enough free blocks"
                    if status is AllocStatus.LATER
                    else "not enough token budget or seats"
                )
                self._mark("admit", group, admitted=False, reason=reason)
                break
            self._admit(self.waiting.popleft(), cached)
            if partial is not None:
                partial.add(group)
            phase.prefills.append(ScheduledGroup(group, uncached + cached))
            budget.add_tokens(group.request_id, uncached, cached)
            budget.add_seqs(group.request_id, seats)
        self.waiting.extendleft(postponed)
        return phase

    def _admit(self, group: SequenceGroup, num_cached_tokens: int) -> None:
        """Takes blocks for the whole prompt, cached ones among them, and starts it."""
        group.num_cached_tokens = num_cached_tokens
        seen = self.block_manager.get_num_cached_tokens(group.first_seq) if group.reads_cache else 0
        found = seen // self.config.block_size
        self._mark("admit", group, admitted=True, reason="new")
        self.block_manager.allocate(group)
        for seq in group.get_seqs(SequenceStatus.WAITING):
            seq.status = SequenceStatus.RUNNING
        block_ids = self.block_manager.block_ids(group.first_seq)
        self._mark("allocate", group, num_tokens=len(group.first_seq), block_ids=[block_ids[found:]])

    def _ignore(self, group: SequenceGroup, out: SchedulerOutputs) -> None:
        for seq in group.seqs:
            self.block_manager.free(seq)
            seq.status = SequenceStatus.FINISHED_IGNORED
        out.ignored.append(group)
        self._mark("admit", group, admitted=False, reason="can never be served")

    # -- running --------------------------------------------------------------------------------------------

    def _schedule_running(
        self, budget: SchedulingBudget, out: SchedulerOutputs, partial: PartialPrefills | None = None
    ) -> PhaseOutput:
        """One more token, or chunk, for who runs; whoever finds no room takes it from the end of the queue.

        Mutates: `running` is emptied of who is scheduled or preempted; blocks, budget, `out`'s orders.
        """
        phase = PhaseOutput()
        while self.running:
            group = self.running[0]
            num_new_tokens, _ = self._num_new_tokens(group, SequenceStatus.RUNNING, budget, partial)
            if num_new_tokens == 0:
                break
            self.running.popleft()
            if not self._make_room(group, budget, phase, out):
                continue
            self._append_slots(group, out)
            if group.is_prefill:
                phase.prefills.append(ScheduledGroup(group, num_new_tokens))
            else:
                phase.decodes.append(ScheduledGroup(group, 1))
            budget.add_tokens(group.request_id, num_new_tokens)
            budget.add_seqs(group.request_id, group.max_num_running_seqs)
        return phase

    def _make_room(
        self, group: SequenceGroup, budget: SchedulingBudget, phase: PhaseOutput, out: SchedulerOutputs
    ) -> bool:
        """Preempts from the end of the queue until the group can grow. Returns: False if it was its own victim."""
        while not self.block_manager.can_append_slots(group):
            budget.give_back(group.request_id)
            victim = self.running.pop() if self.running else group
            mode = self._preempt(victim, out)
            (phase.recomputed if mode == "RECOMPUTE" else phase.swapped_out).append(victim)
            if victim is group:
                return False
        return True

    def _append_slots(self, group: SequenceGroup, out: SchedulerOutputs) -> None:
        """Room for the running sequences' newest tokens. Mutates: tables, `out.blocks_to_copy`."""
        before = len(self.block_manager.block_ids(group.first_seq))
        for seq in group.get_seqs(SequenceStatus.RUNNING):
            out.blocks_to_copy += self.block_manager.append_slots(seq)
        block_ids = self.block_manager.block_ids(group.first_seq)
        self._mark("allocate", group, num_tokens=1, block_ids=[block_ids[before:]])

    # -- swapped --------------------------------------------------------------------------------------------

    def _schedule_swapped(
        self, budget: SchedulingBudget, out: SchedulerOutputs, partial: PartialPrefills | None = None
    ) -> PhaseOutput:
        """Brings groups back from the CPU. Mutates: `swapped`, blocks, budget, `out`'s orders."""
        phase = PhaseOutput()
        while self.swapped:
            group = self.swapped[0]
            status = self.block_manager.can_swap_in(group)
            if status is AllocStatus.NEVER:
                self._ignore(self.swapped.popleft(), out)
                continue
            uncached, cached = self._num_new_tokens(group, SequenceStatus.SWAPPED, budget, partial)
            seats = group.max_num_running_seqs
            if status is AllocStatus.LATER or uncached == 0 or not budget.can_schedule(uncached, seats):
                break
            self.swapped.popleft()
            out.blocks_to_swap_in += self.block_manager.swap_in(group)
            for seq in group.get_seqs(SequenceStatus.SWAPPED):
                seq.status = SequenceStatus.RUNNING
            self._mark("admit", group, admitted=True, reason="swapped in")
            self._append_slots(group, out)
            if group.is_prefill:
                phase.prefills.append(ScheduledGroup(group, uncached + cached))
            else:
                phase.decodes.append(ScheduledGroup(group, 1))
            budget.add_tokens(group.request_id, uncached, cached)
            budget.add_seqs(group.request_id, seats)
        return phase

    # -- preemption -----------------------------------------------------------------------------------------

    def _preempt(
        self, group: SequenceGroup, out: SchedulerOutputs, may_swap: bool = True
    ) -> Literal["RECOMPUTE", "SWAP"]:
        """Takes the group's GPU blocks: by forgetting their contents, or by moving them to the CPU.

        Raises: RuntimeError (faithful mode) when there is no room on the CPU; repaired, it recomputes instead.
        """
        # Half a prompt is not worth moving; and on the CPU its unfilled blocks would pass for filled ones.
        is_half_done = self.config.mode == "fixed" and group.is_prefill
        wants_swap = (
            may_swap
            and not is_half_done
            and (
                self.config.preemption_mode == "swap"
                or (self.config.preemption_mode is None and group.max_num_running_seqs > 1)
            )
        )
        can_swap = wants_swap and self.block_manager.can_swap_out(group)
        if wants_swap and not can_swap and self.config.mode == "faithful":
            raise RuntimeError("no room in CPU memory to swap to")
        mode: Literal["RECOMPUTE", "SWAP"] = "SWAP" if can_swap else "RECOMPUTE"
        self._forget_unfinished_prompt(group)
        if mode == "SWAP":
            out.blocks_to_swap_out += self.block_manager.swap_out(group)
            for seq in group.get_seqs(SequenceStatus.RUNNING):
                seq.status = SequenceStatus.SWAPPED
        else:
            for seq in group.get_seqs(SequenceStatus.RUNNING):
                self.block_manager.free(seq)
                seq.reset_for_recompute()
        out.preempted.append((group, mode))
        self._mark("admit", group, admitted=False, reason=f"preempted: {mode.lower()}")
        return mode

    def _forget_unfinished_prompt(self, group: SequenceGroup) -> None:
        """Repaired mode: a prompt that is left half-way leaves no block behind that would count as computed."""
        if self.config.mode == "fixed" and group.is_prefill:
            for seq in group.get_seqs(SequenceStatus.RUNNING):
                self.block_manager.forget_uncomputed(seq)

    # -- counting -------------------------------------------------------------------------------------------

    def _num_new_tokens(
        self,
        group: SequenceGroup,
        status: SequenceStatus,
        budget: SchedulingBudget,
        partial: PartialPrefills | None,
    ) -> tuple[int, int]:
        """Tokens the group would compute in this step, and tokens it would find in the cache.

        Cached tokens are free of budget, but a prompt that is cached to its end still computes its last token.
        """
        uncached = cached = 0
        seqs = group.get_seqs(status)
        for seq in seqs:
            if not seq.is_prefill:
                uncached += 1
                continue
            reads = self.config.enable_prefix_caching and group.reads_cache
            found = self.block_manager.get_num_cached_tokens(seq) if reads else 0
            new_cached = max(found - seq.num_computed_tokens, 0)
            cached += new_cached
            uncached += seq.num_uncomputed_tokens - new_cached
        if uncached == 0 and cached > 0:
            uncached, cached = 1, cached - 1
        if self.config.enable_chunked_prefill and len(seqs) == 1:
            uncached = self._chunk(uncached, budget, partial)
        return uncached, cached

    def _chunk(self, num_new_tokens: int, budget: SchedulingBudget, partial: PartialPrefills | None) -> int:
        """Cuts to the budget; with caching at a block's end, so that every chunk but the last fills its blocks."""
        share = budget.remaining_tokens if partial is None else partial.token_share
        limit = min(budget.remaining_tokens, share)
        if self.config.enable_prefix_caching:
            limit = limit // self.config.block_size * self.config.block_size
        return min(num_new_tokens, limit)

    @property
    def _prompt_limit(self) -> int:
        """Longest prompt that can be served: without chunking it must also fit in one step."""
        if self.config.enable_chunked_prefill:
            return self.max_model_len
        return min(self.max_model_len, self.config.max_num_batched_tokens)

    # -- telling --------------------------------------------------------------------------------------------

    def _mark_lookup(self, group: SequenceGroup, cached: int) -> None:
        if self.observer is not None:
            seq = group.first_seq
            seen = self.block_manager.get_num_cached_tokens(seq) if group.reads_cache else 0
            found = self.block_manager.get_cached_block_ids(seq, seen)
            self._mark("lookup", group, num_tokens=len(seq), hit_tokens=cached, block_ids=[found])

    def _mark(self, kind: MarkKind, group: SequenceGroup, **facts: Any) -> None:
        if self.observer is not None:
            self.observer.mark(kind, group.request_id, **facts)
