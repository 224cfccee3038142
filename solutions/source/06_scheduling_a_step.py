# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown]
# # 06 Scheduling a step
#
# Eight tasks to [chapter 06](../chapters/06_scheduling_a_step.ipynb). Write into the cells that say `...` or raise
# `NotImplementedError`, run them, and run the cell with `check` below each. A hint comes from the terminal:
# `refengine hint 06.1`. At the end the engine schedules with what you wrote.

# %% tags=["setup"]
from itertools import pairwise

from exercises import check
from exercises.tasks.ex06_scene import (
    Desk,
    SchedulerBase,
    StoryV0,
    TrackerBase,
    is_running,
    places,
    tight,
    workload,
)
from exercises.tasks.ex06_traces import PHASE_TRACES, SCHEDULER_TRACES, replay, replay_v0
from refengine import viz
from refengine.v0.block_manager import BlockManager
from refengine.v0.sequence import SequenceStatus

# %% [markdown]
# (task-1)=
# ## 06.1 Who is in the next step, before you run it
#
# **Why it matters.** "Why was my request preempted and not the other one?" has an exact answer, and it needs no profiler.
#
# Four moments of V1, all recorded from vLLM. Blocks hold four tokens. `tokens` counts what a request has, `computed` what
# is in its blocks.
#
# **a** (`sched_preempt_fcfs`, step 7). No block is free. Both were admitted in step 1, a before b.
#
# | running | tokens | computed | holds |
# |---|---|---|---|
# | a | 17 | 16 | 1, 2, 3, 7 |
# | b | 17 | 16 | 4, 5, 6, 8 |
#
# Blocks are given back last one first. Who loses its blocks? Which block does a get?
#
# **b** (`sched_preempt_priority`, step 4). No block is free. Admitted in the order of the table. A smaller number is more
# important.
#
# | running | priority | tokens | computed | blocks |
# |---|---|---|---|---|
# | mid | 3 | 14 | 13 | 4 |
# | low | 5 | 14 | 13 | 4 |
# | high | 0 | 13 | 12 | 3 |
#
# Who computes how many tokens? Leave out who computes none.
#
# **c** (`sched_no_gate`, step 3). 16 tokens per step, two blocks free. `small` has 3 tokens and waits.
#
# | running | tokens | computed | blocks |
# |---|---|---|---|
# | a | 21 | 20 | 5 |
# | big | 33 | 12 | 3 |
#
# a takes one of the two blocks. big may have 15 tokens, for which one block is not enough. Who computes how many tokens?
#
# **d** (`sched_long_prefill_threshold`). 32 tokens per step, threshold 8, prompts of 30 tokens. In step 1 a and b arrive
# together. Much later c arrives alone. How many tokens does each compute in its first step?

# %% task="06.1"
### BEGIN SOLUTION stub: loses, as_block = ..., ...
loses, as_block = "b", 8
### END SOLUTION
### BEGIN SOLUTION stub: shares_b = {"mid": ...}
shares_b = {"mid": 1, "high": 1}
### END SOLUTION
### BEGIN SOLUTION stub: shares_c = {"a": ...}
shares_c = {"a": 1}
### END SOLUTION
### BEGIN SOLUTION stub: first_d = {"a": ..., "b": ..., "c": ...}
first_d = {"a": 8, "b": 8, "c": 30}
### END SOLUTION

# %%
check("06.1", loses, as_block, shares_b, shares_c, first_d)

# %% [markdown]
# (task-2)=
# ## 06.2 Build V1's scheduler
#
# **Why it matters.** Prefill, chunked prefill, decode and resuming are one rule here. Whoever writes it as four cases gets
# the fifth one wrong.
#
# What you have: `self.running` (in order of admission), `self.waiting` (`peek()` is the next one; it is false when empty),
# `self.requests` (all unfinished ones), `self.config` with `long_prefill_token_threshold`, `enable_chunked_prefill`,
# `policy`. A request has `num_tokens`, `num_computed_tokens`, `priority`, `arrival`. `is_running(request)` is false once
# it has lost its blocks.
#
# The step: `budget`, `has_preempted`, `is_full`, and four calls. `grow(request, n)` and `admit(request, n)` say False,
# with nothing changed, when the blocks are not there. `find(request)` gives the tokens that a waiting request has in the
# cache. `take_from(victim)` takes a running request's blocks and gives a share it had back to the budget.
#
# About 4, 3 and 13 lines.


# %% task="06.2" part="scheduler" name="MyScheduler"
class MyScheduler(SchedulerBase):
    """One budget, who runs first, then the waiting queue from its head."""

    def num_new_tokens(self, request, num_computed_tokens, budget):
        """How many tokens the request may compute, if `num_computed_tokens` of it are there already; 0: not now.

        Cut at the threshold unless the request is alone, and at the budget. With chunked prefill off, a request that
        does not run yet is not cut at the budget: it gets all or nothing.
        """
        ### BEGIN SOLUTION
        wish = request.num_tokens - num_computed_tokens
        threshold = self.config.long_prefill_token_threshold
        if threshold and len(self.requests) > 1:
            wish = min(wish, threshold)
        if wish > budget and not is_running(request) and not self.config.enable_chunked_prefill:
            return 0
        return min(wish, budget)
        ### END SOLUTION

    def victim(self):
        """Who of the running requests loses its blocks: "priority": the least important; else the last admitted."""
        ### BEGIN SOLUTION
        if self.config.policy == "priority":
            return max(self.running, key=lambda request: (request.priority, request.arrival))
        return self.running[-1]
        ### END SOLUTION

    def plan(self, step):
        """Gives out the shares of one step. After a preemption nobody is admitted."""
        ### BEGIN SOLUTION
        for request in list(self.running):
            if not is_running(request):
                continue
            count = self.num_new_tokens(request, request.num_computed_tokens, step.budget)
            while count and is_running(request) and not step.grow(request, count):
                step.take_from(self.victim())
        while self.waiting and step.budget and not step.is_full and not step.has_preempted:
            request = self.waiting.peek()
            count = self.num_new_tokens(request, step.find(request), step.budget)
            if not count or not step.admit(request, count):
                break
        ### END SOLUTION


# %%
check("06.2", MyScheduler)

# %% [markdown]
# (task-3)=
# ## 06.3 Build V0's order of phases
#
# **Why it matters.** "vLLM does decodes first" and "vLLM does prompts first" are both in print, and both are right: for two
# dates, and for one switch.
#
# `step.prompts()` admits prompts and returns how many. `step.running()` serves who runs and returns how many lost their
# blocks. `step.swap_in()` brings requests back from CPU memory. `step.num_swapped` says how many are there. Each call does
# what it says with what is left of the budget. About six lines.


# %% task="06.3"
def phases(step, chunked):
    """One step of V0.

    Without chunked prefill: prompts come first, unless somebody is swapped out; if any was admitted, that is the step.
    With it: who runs comes first, prompts come last. Whoever is swapped out comes back after who runs, unless somebody
    has just lost blocks.
    """
    ### BEGIN SOLUTION
    if not chunked and not step.num_swapped and step.prompts():
        return
    if not step.running():
        step.swap_in()
    if chunked:
        step.prompts()
    ### END SOLUTION


# %%
check("06.3", phases)

# %% [markdown]
# (task-4)=
# ## 06.4 Find the bug: the answer of yesterday
#
# **Why it matters.** V0 skipped tokens whose keys and values had been evicted, and answered from other people's blocks
# (vLLM PR #18957; recorded: `sc_stale_cached_count`).
#
# `self.answers` remembers an answer by sequence id; `self.find(seq)` looks anew. A sequence that is being computed must
# keep its first answer, since its own blocks would soon be counted as hits. When may it not be kept? One
# line.


# %% task="06.4"
class Remembering(TrackerBase):
    """How many tokens of a sequence are cached. It has a bug."""

    def get_num_cached_tokens(self, seq):
        known = self.answers.get(seq.seq_id)
        ### BEGIN SOLUTION
        look_anew = known is None or not seq.is_prefill or seq.status is SequenceStatus.WAITING
        ### INSTEAD
        # look_anew = known is None or not seq.is_prefill
        ### END SOLUTION
        if look_anew:
            known = self.answers[seq.seq_id] = self.find(seq)
        return known


# %%
story = StoryV0(8, tracker=Remembering)
story.start("ada", range(12))
story.finish("ada")
story.wait("bob", range(13))
print("Bob waits;", story.found("bob"), "of his tokens are said to be cached")
story.start("cleo", range(100, 128))
print("Cleo has taken seven blocks of eight;", story.found("bob"), "are said to be cached")

# %%
check("06.4", Remembering)

# %% [markdown]
# (task-5)=
# ## 06.5 Find the bug: after a miss there are only misses
#
# **Why it matters.** Bisection looks at few blocks, and believes the rest. When a group was swapped out, its first block
# could be evicted before an older one's second, and V0 reported the missing one as cached (recorded:
# `bm_swap_breaks_prefix_order`).
#
# `is_found(block_hash)` says whether this block is cached. Return how many blocks at the head of the list are.
# About four lines.


# %% task="06.5"
def cached_prefix(block_hashes, is_found):
    """Blocks at the head of `block_hashes` that can be found. It has a bug."""
    ### BEGIN SOLUTION
    for number, block_hash in enumerate(block_hashes):
        if not is_found(block_hash):
            return number
    return len(block_hashes)
    ### INSTEAD
    # low, high = 0, len(block_hashes)
    # while low < high:
    #     middle = (low + high) // 2
    #     if is_found(block_hashes[middle]):
    #         low = middle + 1
    #     else:
    #         high = middle
    # return low
    ### END SOLUTION


# %%
cached = {"second"}
print(
    cached_prefix(["first", "second"], cached.__contains__),
    "blocks are said to be found; the first is missing",
)

# %%
check("06.5", cached_prefix)

# %% [markdown]
# (task-6)=
# ## 06.6 Find the bug: marked too early
#
# **Why it matters.** V0 takes blocks for the whole prompt when it admits it, and marked them all as computed after the
# first chunk. With two prompts in progress the second skipped what the first had not run (recorded:
# `sc_chunked_marked_early`).
#
# `self.allocator.gpu.mark_blocks_as_computed(block_ids)` marks these blocks, `self.block_ids(seq)` is the table,
# `seq.num_computed_tokens` counts the steps before this one. One or two lines.


# %% task="06.6"
class Marking(BlockManager):
    """A block manager that marks too much."""

    def mark_blocks_as_computed(self, seq, token_chunk_size):
        """This step computes `token_chunk_size` more tokens of the sequence. Marks the blocks that are full then."""
        ### BEGIN SOLUTION
        num_full = (seq.num_computed_tokens + token_chunk_size) // self.block_size
        return self.allocator.gpu.mark_blocks_as_computed(self.block_ids(seq)[:num_full])
        ### INSTEAD
        # return self.allocator.gpu.mark_blocks_as_computed()
        ### END SOLUTION


# %%
story = StoryV0(20, manager=Marking)
story.wait("ada", range(32))
story.admit("ada")
story.compute("ada", 16)
story.wait("bob", range(34))
print("Ada has computed 16 of 32 tokens; Bob may skip", story.found("bob"))

# %%
check("06.6", Marking)

# %% [markdown]
# (task-7)=
# ## 06.7 Measure what waiting costs
#
# **Why it matters.** Every setting of a scheduler moves waiting from one request to another. Count it in steps, and no
# clock is needed.
#
# `workload(...)` is the story of the chapter: Ada and Bob are being answered when Cleo brings 40 tokens and Dan 4.
# `record.marks()` gives every mark with its step; a mark of kind "append" is one sampled token; `mark.request_id` says
# whose. Write two functions, of two lines each.
#
# - `longest_gap(record, name)`: the largest number of steps from one token of this request to its next one. 1: a token in
#   every step.
# - `first_token(desk, name)`: steps until its first token, counted from its arrival (`desk.arrived[name]` is the number of
#   the first step it could be part of). 1: in the first step.


# %% task="06.7"
def longest_gap(record, name):
    """Steps between two tokens of a request, at most."""
    ### BEGIN SOLUTION
    when = [step for step, mark in record.marks() if mark.kind == "append" and mark.request_id == name]
    return max(after - before for before, after in pairwise(when))
    ### END SOLUTION


def first_token(desk, name):
    """Steps to the first token, from the arrival on."""
    ### BEGIN SOLUTION
    when = [step for step, mark in desk.record.marks() if mark.kind == "append" and mark.request_id == name]
    return when[0] - desk.arrived[name] + 1
    ### END SOLUTION


# %% tags=["raises-exception"]
v0_default = workload(engine="v0", enable_chunked_prefill=False, budget=48)
rows = []
for title, desk in (("V0", v0_default), ("V0 chunked", workload(engine="v0")), ("V1", workload())):
    counts = [first_token(desk, name) for name in ("cleo", "dan")]
    rows.append((title, *counts, longest_gap(desk.record, "ada")))
viz.Table(("", "Cleo's first token", "Dan's first token", "Ada's longest gap"), rows)

# %% [markdown]
# Then `tight(...)`: Ada grows, and Bob's prompt of 28 tokens does not fit beside her. How often is Bob preempted with the
# gate (`reserve_full_sequence=True`) and without it? Let the cell below count, and write both numbers down.

# %%
for gate in (True, False):
    marks = [mark for _, mark in tight(reserve_full_sequence=gate).record.marks() if mark.kind == "admit"]
    print(
        gate, sum(mark.facts["reason"].startswith("preempted") for mark in marks if mark.request_id == "bob")
    )

# %% task="06.7"
### BEGIN SOLUTION stub: with_gate, without_gate = ..., ...
with_gate, without_gate = 1, 8
### END SOLUTION

# %%
check("06.7", longest_gap, first_token, with_gate, without_gate)

# %% [markdown]
# (task-8)=
# ## 06.8 Where is it in vLLM?
#
# **Why it matters.** Readers of the scheduler find a function, and describe the other generation with it.
#
# These places are in the code map:

# %%
viz.Table(("topic", "", "symbol", "file"), places())

# %% [markdown]
# Write a symbol as in the table, or None if there is no such place.
#
# - `prompts_first`: puts prompts before decodes, in a step of their own.
# - `chooses_how`: decides between recompute and swap for a victim.
# - `keeps_watermark`: says no to an admission that would leave too few blocks.
# - `forces_out`: takes blocks from running requests because somebody more important waits.

# %% task="06.8"
### BEGIN SOLUTION stub: prompts_first = {"V0": ..., "V1": ...}
prompts_first = {"V0": "Scheduler._schedule_default", "V1": None}
### END SOLUTION
### BEGIN SOLUTION stub: chooses_how = {"V0": ..., "V1": ...}
chooses_how = {"V0": "Scheduler._preempt", "V1": None}
### END SOLUTION
### BEGIN SOLUTION stub: keeps_watermark = {"V0": ..., "V1": ...}
keeps_watermark = {"V0": "SelfAttnBlockSpaceManager.can_allocate", "V1": "KVCacheManager.allocate_slots"}
### END SOLUTION
### BEGIN SOLUTION stub: forces_out = {"V0": ..., "V1": ...}
forces_out = {"V0": "Scheduler._schedule_priority_preemption", "V1": None}
### END SOLUTION

# %%
check("06.8", prompts_first, chooses_how, keeps_watermark, forces_out)

# %% [markdown]
# (your-engine)=
# ## The engine on your scheduler
#
# Five requests on eleven blocks, with 12 tokens per step: too many for the blocks and for the budget. The reference
# beside your scheduler, under both policies.

# %% tags=["raises-exception"]
mine = {"scheduler": MyScheduler}


def run(parts, policy):
    desk = Desk(11, parts, policy=policy, max_num_batched_tokens=12, long_prefill_token_threshold=8)
    for number, name in enumerate(("ada", "bob", "cleo", "dan", "eve")):
        desk.add(name, 9 + number, max_tokens=9, priority=(2, 1, 3, 0, 2)[number])
        desk.step()
    desk.run()
    return desk


for policy in ("fcfs", "priority"):
    reference, own = run(None, policy), run(mine, policy)
    preempted = sum(summary.num_preemptions for summary in own.record.requests())
    print(
        f"{policy}: the same tokens {own.tokens == reference.tokens}, the same queue {own.queue == reference.queue},"
    )
    print(f"  {len(own.record.steps)} steps against {len(reference.record.steps)}, {preempted} preemptions")

# %% [markdown]
# And vLLM's recorded decisions, replayed on your scheduler and on your phases:

# %% tags=["raises-exception"]
for name in SCHEDULER_TRACES:
    print(replay(name, mine))
for name in PHASE_TRACES:
    print(replay_v0(name, phases))

# %% [markdown]
# In a terminal, `refengine demo --parts exercises/06_scheduling_a_step.ipynb` runs the demo on it. Let `victim` return the
# first of the running requests, save, and run the two cells above again: the tokens stay the same, and the
# recorded steps do not.
