"""V0's scheduler: two policies over the same three phases, and the metadata the worker gets.

Without chunked prefill a step is either prompts or decodes: prompts first, and everybody who decodes waits.
With it, decodes go first and prompts fill up what is left of the token budget. V0 is where "prefill" and
"decode" are different kinds of work; V1 has one rule for both.

The scheduler asks which blocks are already computed and passes the answer on as `computed_block_nums`. It does
not skip anything itself.
vLLM: V0 core/scheduler.py Scheduler; V1 v1/core/sched/scheduler.py Scheduler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf
from contextlib import suppress

from refengine.v0.block_manager import AllocStatus
from refengine.v0.budget import PartialPrefills, SchedulingBudget
from refengine.v0.phases import SchedulerPhases
from refengine.v0.scheduler_output import PhaseOutput, ScheduledGroup, SchedulerOutputs
from refengine.v0.sequence import SequenceGroup, SequenceGroupMetadata, SequenceStatus


class Scheduler(SchedulerPhases):
    """See the module. Times are the caller's: `now` orders uses of blocks and means nothing else."""

    def add(self, group: SequenceGroup) -> None:
        """Enters a request. Mutates: `waiting`."""
        self.waiting.append(group)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running or self.swapped)

    def schedule(self, now: float) -> tuple[list[SequenceGroupMetadata], SchedulerOutputs]:
        """Decides the next step. Mutates: queues, blocks, and what the block manager remembers."""
        groups = [*self.running, *self.swapped, *self.waiting]
        try:
            return self._schedule(now)
        except (
            BaseException
        ):  # Ctrl-C included: groups are between queues, blocks wait for a step that never comes
            with suppress(Exception):  # faithful mode may be past mending; the first error counts
                self._start_over(groups)
            raise

    def _schedule(self, now: float) -> tuple[list[SequenceGroupMetadata], SchedulerOutputs]:
        out = (
            self._schedule_chunked_prefill()
            if self.config.enable_chunked_prefill
            else self._schedule_default()
        )
        metadata = [self._metadata(scheduled, now) for scheduled in out.scheduled]
        # From here on the step is certain to run before the next one is scheduled.
        for scheduled in out.scheduled:
            for seq in scheduled.group.get_seqs(SequenceStatus.RUNNING):
                block_ids = self.block_manager.mark_blocks_as_computed(seq, scheduled.token_chunk_size)
                if block_ids:
                    self._mark("publish", scheduled.group, block_ids=block_ids)
        return metadata, out

    # -- policies -------------------------------------------------------------------------------------------

    def _schedule_default(self) -> SchedulerOutputs:
        """Prompts if there are any that fit, and no decode beside them; else decodes, then swapped groups."""
        out, budget = SchedulerOutputs(), self._new_budget()
        for group in self.running:
            budget.add_seqs(group.request_id, group.max_num_running_seqs)
        prefills = running = swapped = PhaseOutput()
        if not self.swapped:
            prefills = self._schedule_prefills(budget, out)
        if not prefills.prefills and self.config.policy == "priority":
            self._force_out_for_priority(budget, out)
        if not prefills.prefills:
            running = self._schedule_running(budget, out)
            if not running.num_preempted:  # whoever lost blocks would lose them to somebody coming back
                swapped = self._schedule_swapped(budget, out)
        self._requeue_preempted(running)
        for scheduled in (prefills.prefills, running.decodes, swapped.decodes):
            self.running.extend(each.group for each in scheduled)
        out.scheduled = [*prefills.prefills, *running.decodes, *swapped.decodes]
        return self._finish(out, budget, len(prefills.prefills), running)

    def _schedule_chunked_prefill(self) -> SchedulerOutputs:
        """Who runs goes first, then swapped groups, then new prompts with what is left."""
        out, budget = SchedulerOutputs(), self._new_budget()
        partial = PartialPrefills.count(self.running, self.waiting, self.config)
        running = self._schedule_running(budget, out, partial)
        swapped = PhaseOutput() if running.num_preempted else self._schedule_swapped(budget, out, partial)
        new = self._schedule_prefills(budget, out, partial)
        self._requeue_preempted(running)
        for scheduled in (
            swapped.decodes,
            swapped.prefills,
            running.decodes,
            _finishing_first(running.prefills),
            new.prefills,
        ):
            self.running.extend(each.group for each in scheduled)
        prefills = [
            *new.prefills,
            *running.prefills,
            *swapped.prefills,
        ]  # the attention kernels want prompts first
        out.scheduled = [*prefills, *running.decodes, *swapped.decodes]
        return self._finish(out, budget, len(prefills), running)

    def _new_budget(self) -> SchedulingBudget:
        return SchedulingBudget(self.config.max_num_batched_tokens, self.config.max_num_seqs)

    def _requeue_preempted(self, running: PhaseOutput) -> None:
        self.waiting.extendleft(running.recomputed)
        self.swapped.extend(running.swapped_out)

    def _finish(
        self, out: SchedulerOutputs, budget: SchedulingBudget, num_prefill_groups: int, running: PhaseOutput
    ) -> SchedulerOutputs:
        out.num_prefill_groups = num_prefill_groups
        out.num_batched_tokens = budget.num_batched_tokens + budget.num_cached_tokens
        out.num_preempted = running.num_preempted
        return out

    def _force_out_for_priority(self, budget: SchedulingBudget, out: SchedulerOutputs) -> None:
        """Preempts less important groups until the head of the waiting queue would fit. Mutates: queues, blocks.

        vLLM 0.7.3 may swap the victim out here, puts it into the *waiting* queue all the same and drops the copy
        orders. Repaired, a victim of priority recomputes: in the swapped queue it would keep all prompts out.
        """
        running = deque(sorted(self.running, key=_priority))
        if self.waiting:
            head = self.waiting.popleft()
            seats = head.max_num_running_seqs
            uncached, _ = self._num_new_tokens(head, SequenceStatus.WAITING, budget, None)
            while running and _priority(running[-1]) > _priority(head):
                fits = self.block_manager.can_allocate(head) is AllocStatus.OK
                if uncached > 0 and fits and budget.can_schedule(uncached, seats):
                    break
                victim = running.pop()
                budget.give_back(victim.request_id)
                orders = len(out.blocks_to_swap_out)
                self._preempt(victim, out, may_swap=self.config.mode == "faithful")
                del out.blocks_to_swap_out[orders:]
                self.waiting.appendleft(victim)
            self.waiting.appendleft(head)
        self.waiting = deque(sorted(self.waiting, key=_priority))
        self.running = running

    # -- what the worker gets -------------------------------------------------------------------------------

    def _metadata(self, scheduled: ScheduledGroup, now: float) -> SequenceGroupMetadata:
        """One group's share of the step. Mutates: notes that its sequences run now."""
        group, manager = scheduled.group, self.block_manager
        seqs = group.get_seqs(SequenceStatus.RUNNING)
        for seq in seqs:
            manager.access_all_blocks_in_seq(seq, now)
        first = group.first_seq
        return SequenceGroupMetadata(
            request_id=group.request_id,
            is_prompt=group.is_prefill,
            do_sample=not group.is_prefill
            or first.num_computed_tokens + scheduled.token_chunk_size >= len(first),
            token_chunk_size=scheduled.token_chunk_size,
            token_ids={seq.seq_id: list(seq.token_ids) for seq in seqs},
            num_prompt_tokens=first.num_prompt_tokens,
            num_computed_tokens=first.num_computed_tokens,
            block_tables={seq.seq_id: manager.block_ids(seq) for seq in seqs},
            computed_block_nums=manager.get_common_computed_block_ids(seqs) if group.reads_cache else [],
            params=group.params,
            adapter=first.adapter,
        )

    def take_back(self, out: SchedulerOutputs) -> None:
        """Undoes a step that did not run to its end. Its groups start over, from what earlier steps have computed.

        So do the groups it swapped out, whose blocks may not have been copied.
        Mutates: queues, blocks, sequences.
        """
        swapped_out = [group for group, mode in out.preempted if mode == "SWAP"]
        for group in reversed([*(each.group for each in out.scheduled), *swapped_out]):
            for queue in (self.running, self.waiting, self.swapped):
                if group in queue:
                    queue.remove(group)
            if not group.is_finished:
                self._restart(group, "its step failed")

    def _start_over(self, groups: SequenceOf[SequenceGroup]) -> None:
        """After a plan that broke off: every group gives back what it holds and waits, in this order.

        Mutates: queues, blocks, sequences.
        """
        for queue in (self.running, self.swapped, self.waiting):
            queue.clear()
        for group in reversed(groups):
            if not group.is_finished:
                self._restart(group, "a plan broke off")

    def _restart(self, group: SequenceGroup, reason: str) -> None:
        for seq in group.seqs:
            self.block_manager.forget_uncomputed(seq)
            self.block_manager.free(seq)
            seq.reset_for_recompute()
        self.waiting.appendleft(group)
        self._mark("admit", group, admitted=False, reason=f"preempted: {reason}")

    # -- the end --------------------------------------------------------------------------------------------

    def abort(self, request_id: str) -> SequenceGroup | None:
        """Ends a request wherever it stands. Returns: its group, or None if there is none. Mutates: queues, blocks."""
        for queue in (self.waiting, self.running, self.swapped):
            for group in queue:
                if group.request_id == request_id:
                    queue.remove(group)
                    self._forget_unfinished_prompt(group)
                    for seq in group.seqs:
                        if not seq.is_finished:
                            seq.status = SequenceStatus.FINISHED_ABORTED
                            self.block_manager.free(seq)
                    return group
        return None

    def free_finished(self) -> None:
        """Drops groups all of whose sequences have ended. Mutates: `running`."""
        self.running = deque(group for group in self.running if not group.is_finished)


def _priority(group: SequenceGroup) -> tuple[int, float]:
    return group.priority, group.arrival


def _finishing_first(prefills: list[ScheduledGroup]) -> list[ScheduledGroup]:
    """Prompts whose last chunk this is go ahead: next time they decode, and decodes go first."""
    return sorted(
        prefills, key=lambda each: each.group.first_seq.num_uncomputed_tokens != each.token_chunk_size
    )
