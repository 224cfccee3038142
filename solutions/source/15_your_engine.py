# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown]
# # 15 Your engine
#
# Six tasks to [chapter 15](../chapters/15_your_engine.ipynb). Write into the cells that say `...` or raise
# `NotImplementedError`, run them, and run the cell with `check` below each. A hint comes from the terminal:
# `refengine hint 15.1`. At the end the engine runs on everything that you have written, here and before.

# %% tags=["setup"]
from collections import OrderedDict
from pathlib import Path

from exercises import check
from exercises.tasks.ex06_traces import SCHEDULER_TRACES, replay
from exercises.tasks.ex15_scene import (
    all_parts,
    busy,
    crowd,
    documents,
    favourite,
    places,
    serve,
    totals,
)
from refengine import viz
from refengine.v1.kv_cache_manager import KVCacheBlocks, KVCacheManager

# %% [markdown]
# (task-1)=
# ## 15.1 Two engines, before you run them
#
# **Why it matters.** Whoever can say this without running anything has the model of both engines that the book is about.
#
# Blocks of **4** tokens, 16 usable ones in V1, nothing cached. Every request samples one token, and ends with it. First comes
# Ada alone, with 12 tokens, and ends. Then three come in the same moment and are admitted in one step, in this order:
#
# | | its tokens |
# |---|---|
# | bob | Ada's 12 |
# | cay | Ada's first 8, and 6 others |
# | dan | the same 14 as cay |
#
# Say how many tokens the model runs on for each of the three, in V0 and in V1, and their block tables in V1. The free queue
# hands out 1, 2, 3, ... at first.

# %% task="15.1"
### BEGIN SOLUTION stub: computed_v0 = {"bob": ..., "cay": ..., "dan": ...}
computed_v0 = {"bob": 1, "cay": 6, "dan": 6}
### END SOLUTION
### BEGIN SOLUTION stub: computed_v1 = {"bob": ..., "cay": ..., "dan": ...}
computed_v1 = {"bob": 4, "cay": 6, "dan": 2}
### END SOLUTION
### BEGIN SOLUTION stub: tables = {"bob": ..., "cay": ..., "dan": ...}
tables = {"bob": [1, 2, 4], "cay": [1, 2, 5, 6], "dan": [1, 2, 5, 7]}
### END SOLUTION

# %%
check("15.1", computed_v0, computed_v1, tables)

# %% [markdown]
# (task-2)=
# ## 15.2 Who does it in vLLM?
#
# **Why it matters.** This is the question the book began with, six times. With these twelve names you can open either release
# and know where you are.

# %%
viz.Table(("", "symbol", "where"), places())

# %% [markdown]
# Write a symbol as in the table, for each generation. What `finds` how many tokens of a prompt are cached; what `skips` those tokens;
# what says whether there is `room` for a waiting request; what makes blocks `findable` as
# computed; what keeps the `order` in which cached
# blocks are overwritten; what `preempts` a request, whichever way it is done.

# %% task="15.2"
### BEGIN SOLUTION stub: v1 = {"finds": ..., "skips": ..., "room": ..., "findable": ..., "order": ..., "preempts": ...}
v1 = {
    "finds": "KVCacheManager.get_computed_blocks",
    "skips": "Scheduler.schedule",
    "room": "KVCacheManager.allocate_slots",
    "findable": "BlockPool.cache_full_blocks",
    "order": "FreeKVCacheBlockQueue",
    "preempts": "Scheduler._preempt_request",
}
### END SOLUTION
### BEGIN SOLUTION stub: v0 = {"finds": ..., "skips": ..., "room": ..., "findable": ..., "order": ..., "preempts": ...}
v0 = {
    "finds": "ComputedBlocksTracker.get_num_cached_tokens",
    "skips": "ModelInputForGPUBuilder._compute_for_prefix_cache_hit",
    "room": "SelfAttnBlockSpaceManager.can_allocate",
    "findable": "PrefixCachingBlockAllocator.mark_blocks_as_computed",
    "order": "LRUEvictor",
    "preempts": "Scheduler._preempt",
}
### END SOLUTION

# %%
check("15.2", v1, v0)

# %% [markdown]
# (task-3)=
# ## 15.3 Build the account
#
# **Why it matters.** Tokens per second say that something costs too much. They do not say what. A record does, and it is
# the same on every machine.
#
# `record.marks()` gives pairs of the number of a step and a mark, in order. A mark has `kind`, `request_id` and `facts`:
#
# | kind | facts |
# |---|---|
# | `lookup` | `hit_tokens`: found now. Comes before every attempt to admit, and again if the attempt fails |
# | `admit` | `admitted`: True, or False for "not now" and for "preempted" |
# | `run` | `start`, `num_tokens`: the model runs on so many positions of the request, from `start` on |


# %% task="15.3"
def account(record):
    """What each request cost. Returns: request id -> (found, computed, again), all in tokens.

    `found`: what its admissions spared it, the first one and those after a preemption.
    `computed`: what the model ran on, decodes included.
    `again`: of these, positions that this request had computed before.
    """
    ### BEGIN SOLUTION
    hit, done, rows = {}, {}, {}
    for _, mark in record.marks():
        name, facts = mark.request_id, mark.facts
        if mark.kind == "lookup":
            hit[name] = facts["hit_tokens"]
        elif mark.kind == "admit" and facts["admitted"]:
            rows.setdefault(name, [0, 0, 0])[0] += hit[name]
        elif mark.kind == "run":
            positions = set(range(facts["start"], facts["start"] + facts["num_tokens"]))
            rows[name][1] += len(positions)
            rows[name][2] += len(positions & done.setdefault(name, set()))
            done[name] |= positions
    return {name: tuple(row) for name, row in rows.items()}
    ### END SOLUTION


# %%
check("15.3", account)

# %% [markdown]
# (task-4)=
# ## 15.4 Build a queue that no chapter has
#
# **Why it matters.** A prefix that everybody uses and a prompt that nobody will bring again leave blocks behind that look the same
# to a queue. Whoever comes with many strangers pushes the favourite out.
#
# The queue of chapter 03 has one order. Yours has two: blocks that were **found** at least once since they were written, and all
# others. Whatever was never found goes first. Within each of the two, who has been there longest goes first.
#
# The engine calls `remove` when a free block is found by somebody, and `popleft_n` when blocks are handed out to be
# overwritten. A block knows its `block_id`. Nobody measures here what a call costs, as exercise 03 did; with `OrderedDict`,
# which has `popitem(last=False)` and `move_to_end(key, last=False)`, all but the walk cost the same in any pool.


# %% task="15.4" part="free_queue" name="TwoOrders"
class TwoOrders:
    """A free queue in which blocks that were found stay longer."""

    def __init__(self, blocks):
        """Starts with `blocks`, the first one at the front. None of them was ever found."""
        ### BEGIN SOLUTION
        self.others, self.favourites = OrderedDict(), OrderedDict()  # by block id
        self.found = set()
        self.append_n(blocks)
        ### END SOLUTION

    @property
    def num_free_blocks(self):
        """How many blocks stand in the queue."""
        ### BEGIN SOLUTION
        return len(self.others) + len(self.favourites)
        ### END SOLUTION

    def popleft_n(self, n):
        """Takes `n` blocks from the front, in order.

        They are overwritten: what was found in them is gone.
        Raises ValueError, with nothing changed, if `n` is negative or more than there are.
        """
        ### BEGIN SOLUTION
        if not 0 <= n <= self.num_free_blocks:
            raise ValueError(f"cannot take {n} blocks of {self.num_free_blocks}")
        taken = []
        for _ in range(n):
            block_id, block = (self.others or self.favourites).popitem(last=False)
            self.found.discard(block_id)
            taken.append(block)
        return taken
        ### END SOLUTION

    def remove(self, block):
        """Somebody has found `block`: takes it out from wherever it stands.

        Raises ValueError if it stands nowhere.
        """
        ### BEGIN SOLUTION
        order = self.favourites if block.block_id in self.favourites else self.others
        if block.block_id not in order:
            raise ValueError(f"block {block.block_id} is not in the free queue")
        del order[block.block_id]
        self.found.add(block.block_id)
        ### END SOLUTION

    def append_n(self, blocks):
        """Blocks whose contents can still be found come back.

        Each goes to the back of its order, one after the other.
        """
        ### BEGIN SOLUTION
        for block in blocks:
            order = self.favourites if block.block_id in self.found else self.others
            order[block.block_id] = block
        ### END SOLUTION

    def prepend_n(self, blocks):
        """Blocks whose contents are worth nothing come back.

        They go to the very front, the first of them foremost.
        """
        ### BEGIN SOLUTION
        for block in reversed(list(blocks)):
            self.others[block.block_id] = block
            self.others.move_to_end(block.block_id, last=False)
        ### END SOLUTION

    def __iter__(self):
        """All blocks, front to back."""
        ### BEGIN SOLUTION
        yield from [*self.others.values(), *self.favourites.values()]
        ### END SOLUTION


# %%
check("15.4", TwoOrders)

# %% [markdown]
# Ten usable blocks, a favourite prefix of four blocks, and three strangers between two visits:

# %% tags=["raises-exception"]
for name, parts in (("one order ", None), ("two orders", {"free_queue": TwoOrders})):
    tokens, record = serve(favourite(), num_blocks=11, max_tokens=2, parts=parts)
    visits = [each.hit_tokens for each in record.requests() if each.request_id[0] in "fg"]
    print(name, "the favourite finds", visits, " computed in all:", totals(record).computed)

# %% [markdown]
# (task-5)=
# ## 15.5 Find the bug: right, and too much work
#
# **Why it matters.** The tokens are right, every invariant holds, and no report names a line. This kind of bug lives for years.
#
# This manager cuts what a lookup has found to what the request may use. One line is wrong, and only some requests notice.
# `request` has `num_tokens`, `num_prompt_tokens`, `num_cached_tokens` (what its first admission found) and
# `num_preemptions`. Repair it so that no token is computed that need not be.


# %% task="15.5"
class Cutting(KVCacheManager):
    """A manager with a bug."""

    def get_computed_blocks(self, request):
        hits, num_tokens, boundary = super().get_computed_blocks(request)
        size = self.coordinator.groups[0].block_size
        ### BEGIN SOLUTION
        usable = request.num_tokens - 1
        ### INSTEAD
        # usable = request.num_prompt_tokens - 1
        ### END SOLUTION
        num_blocks = min(num_tokens, usable) // size
        return (
            KVCacheBlocks(tuple(blocks[:num_blocks] for blocks in hits.blocks)),
            num_blocks * size,
            boundary,
        )


# %%
tokens, record = serve(crowd(), num_blocks=18)
own_tokens, own_record = serve(crowd(), num_blocks=18, parts={"kv_cache_manager": Cutting})
print("the same tokens:", own_tokens == tokens)
print("ours:", totals(record))
print("this:", totals(own_record))

# %%
check("15.5", Cutting)

# %% [markdown]
# (task-6)=
# ## 15.6 Measure it
#
# **Why it matters.** "The hit rate is low, so the cache needs a bit more room." How much more is a number, and the hit rate does not
# tell it.
#
# `documents(count, size, rounds)`: questions about `count` texts of `size` tokens, in turn. Write `measure(num_blocks, engine)` for
# `documents()`, which is five texts of 32 tokens in three rounds, with **one** sampled token a request. It returns how
# many tokens all requests together found, and how many they computed.
#
# `serve(waves, engine, num_blocks=..., max_tokens=...)` gives the tokens and the record; `totals(record)` or your own account
# counts.
#
# Then say, for each engine: the smallest `num_blocks` with which everything is found that can be. And how many tokens V1 finds if its
# pool has room for one text less than that, eight blocks fewer.


# %% task="15.6"
def measure(num_blocks, engine="v1"):
    """Tokens found and tokens computed, over all requests."""
    ### BEGIN SOLUTION
    _, record = serve(documents(), engine, num_blocks=num_blocks, max_tokens=1)
    sums = totals(record)
    return sums.found, sums.computed
    ### END SOLUTION


# %% tags=["raises-exception"]
rows = [(n, *measure(n, "v0"), *measure(n, "v1")) for n in (60, 48, 40, 36)]
viz.Table(("blocks", "V0 finds", "computes", "V1 finds", "computes"), rows)

# %% task="15.6"
### BEGIN SOLUTION stub: enough = {"v0": ..., "v1": ...}
enough = {"v0": 41, "v1": 42}
### END SOLUTION
### BEGIN SOLUTION stub: one_text_less = ...
one_text_less = 0
### END SOLUTION

# %%
check("15.6", measure, enough, one_text_less)

# %% [markdown]
# (your-engine)=
# ## Your engine
#
# Every part that is written in the notebooks beside this one, and the queue from above. Whatever you have not written is ours.

# %% tags=["raises-exception"]
mine = all_parts(Path()) | {"free_queue": TwoOrders}
tokens, record = serve(busy(), num_blocks=24)
own_tokens, own_record = serve(busy(), num_blocks=24, parts=mine)
print("parts of yours:", *mine, sep="\n  ")
print("the same tokens:", own_tokens == tokens)
print("ours: ", totals(record))
print("yours:", totals(own_record))

# %% [markdown]
# Two orders are another decision than vLLM's, so the recorded decisions are for the queue of exercise 03. With that one, or ours:

# %% tags=["raises-exception"]
slots = ("free_queue", "block_pool", "full_attention", "kv_cache_manager", "scheduler")
mine = {slot: part for slot, part in all_parts(Path()).items() if slot in slots}
for name in SCHEDULER_TRACES:
    print(replay(name, mine))

# %% [markdown]
# That is an engine. From here on, [the real one](../chapters/15_your_engine.ipynb#reading).
