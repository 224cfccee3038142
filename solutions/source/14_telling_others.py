# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown]
# # 14 Telling others
#
# Eight tasks to [chapter 14](../chapters/14_telling_others.ipynb). Write into the cells that say `...` or raise
# `NotImplementedError`, run them, and run the cell with `check` below each. A hint comes from the terminal:
# `refengine hint 14.2`. At the end your mirrors listen to a hybrid model, and to events that were recorded from vLLM.

# %% tags=["setup"]
from collections import Counter
from dataclasses import replace

from exercises import check
from exercises.tasks.ex14_scene import CALLS, POOLS, MirrorBase, NewsStage, compare, hybrid_news, routed
from exercises.tasks.ex14_traces import EVENT_TRACES, listen
from refengine import viz
from refengine.v1.events import AllBlocksCleared, BlockRemoved, BlockStored
from refengine.v1.groups.spec import FULL_ATTENTION, MAMBA

# %% [markdown]
# (task-1)=
# ## 14.1 The events of a small story, before you run it
#
# **Why it matters.** Whoever stands outside of an engine sees nothing of it but this.
#
# V1, full attention, blocks of four tokens, five usable blocks. `a`, `b`, `c` are the hashes of the first 4, 8 and 12 of
# the tokens 0, 1, 2, ...; `d` and `e` those of the first 4 and 8 of the tokens 20, 21, 22, ...
#
# | step | |
# |---|---|
# | 1 | Ada starts with the 9 tokens 0 to 8. |
# | 2 | Ada goes on with 9, 10, 11. |
# | 3 | Ada ends. |
# | 4 | Bob starts with the 8 tokens 0 to 7. |
# | 5 | Cleo starts with the 9 tokens 20 to 28, while Bob runs. |
#
# Say for each step which events come, in order, as `("stored", parent, hashes)` or `("removed", hash)`: for example
# `("stored", "x", "yz")`, with None for no parent. A removed event has one hash. No events: an empty list. Then say which
# letters can be found after step 5, as one text: `"ace"`.

# %% task="14.1"
### BEGIN SOLUTION stub: news = {1: [...], 2: [...], 3: [...], 4: [...], 5: [...]}
news = {
    1: [("stored", None, "ab")],
    2: [("stored", "b", "c")],
    3: [],
    4: [("stored", "a", "b")],
    5: [("removed", "c"), ("removed", "b"), ("stored", None, "de")],
}
### END SOLUTION
### BEGIN SOLUTION stub: found = ...
found = "abde"
### END SOLUTION

# %%
check("14.1", news, found)

# %% [markdown]
# (task-2)=
# ## 14.2 Build the mirror
#
# **Why it matters.** A router that believes in a prefix that is gone sends a request to an engine that computes all of it.
# One that forgets a prefix sends it elsewhere, and the prefix is computed twice.
#
# The mirror hears every event from the start. `prefixes()` gives what the engine can find now, as a set of
# `(group id, hash)`, and must be right after every event. What an event has: `block_hashes`, `group_id`, and a stored
# one `reused`, which says that the request found these blocks. How you keep it is yours.


# %% task="14.2"
class Mirror:
    """What one engine can find, from its events alone."""

    def __init__(self):
        ### BEGIN SOLUTION
        self.copies = Counter()
        ### END SOLUTION

    def apply(self, event):
        """Applies a `BlockStored`, `BlockRemoved` or `AllBlocksCleared`."""
        ### BEGIN SOLUTION
        if isinstance(event, AllBlocksCleared):
            self.copies.clear()
            return
        for block_hash in event.block_hashes:
            prefix = event.group_id, block_hash
            if isinstance(event, BlockRemoved):
                self.copies[prefix] -= 1
            elif isinstance(event, BlockStored) and not event.reused:
                self.copies[prefix] += 1
        ### END SOLUTION

    def prefixes(self):
        """The set of `(group id, hash)` that can be found."""
        ### BEGIN SOLUTION
        return {prefix for prefix, count in self.copies.items() if count > 0}
        ### END SOLUTION


# %% tags=["raises-exception"]
print("differs at:", compare(Mirror) or "nowhere")

# %%
check("14.2", Mirror)

# %% [markdown]
# (task-3)=
# ## 14.3 Find the bug: the gap
#
# **Why it matters.** A batch that was lost on its way is not in any later one. A mirror with a hole tells lies until the
# engine is started anew.
#
# A listener gets two functions: `replay(first)` gives all batches that the publisher still has, from number `first` on, and
# raises ConfigError if `first` is not kept any more; `apply(event)` is the mirror's. Each batch must be applied once and in
# order. If a gap cannot be filled, the ConfigError has to reach the caller with nothing applied. One name here is wrong.


# %% task="14.3"
class Listener:
    """Stands between a publisher and a mirror, and notices what is missing."""

    def __init__(self, replay, apply):
        self.replay, self.apply = replay, apply
        self.next_sequence = 0

    def receive(self, batch):
        """One batch has arrived. Batches before it may be missing, and it may have come before."""
        if batch.sequence < self.next_sequence:
            return
        batches = [batch]
        if batch.sequence > self.next_sequence:
            ### BEGIN SOLUTION
            batches = self.replay(self.next_sequence)
            ### INSTEAD
            # batches = self.replay(batch.sequence)
            ### END SOLUTION
        for each in batches:
            for event in each.events:
                self.apply(event)
            self.next_sequence = each.sequence + 1


# %% tags=["raises-exception"]
stage, heard = NewsStage(20), []
for number in range(4):
    stage.start(str(number), range(100 * number, 100 * number + 4))
    stage.take()
listener = Listener(stage.publisher.replay, lambda event: heard.append(event.token_ids[0]))
for number in (0, 3):
    listener.receive(stage.publisher.replay()[number])
print("first tokens heard:", heard, " published: [0, 100, 200, 300]")

# %%
check("14.3", Listener)

# %% [markdown]
# (task-4)=
# ## 14.4 Build the question
#
# **Why it matters.** "How much of this prompt would that engine find?" With several groups the answer is a fixed point
# (chapter 13). It is not written twice: the engine's own coordinator asks, and a mirror stands in for the pool.
#
# `self.mirror` has `prefixes()`. `self.coordinator.find_longest_cache_hit(hashes, max_length)` is the engine's, and returns
# blocks, tokens and a boundary. It asks `get_cached_block`. For "there is such a block" use `self.some_block`.
# `self.hasher.extend(hashes, token_ids, cache_salt=...)` appends the chained hashes of the full blocks to a list.


# %% task="14.4"
class Answer(MirrorBase):
    """A mirror that is asked as an engine is."""

    def get_cached_block(self, block_hash, group_ids):
        """A list with a block for each of the groups, or None unless all of them hold this prefix."""
        ### BEGIN SOLUTION
        known = self.mirror.prefixes()
        if all((group_id, block_hash) in known for group_id in group_ids):
            return [self.some_block] * len(group_ids)
        return None
        ### END SOLUTION

    def expected_hit(self, token_ids, cache_salt=None):
        """Tokens of this prompt that the engine would find now."""
        ### BEGIN SOLUTION
        hashes = []
        self.hasher.extend(hashes, token_ids, cache_salt=cache_salt)
        _, num_tokens, _ = self.coordinator.find_longest_cache_hit(hashes, len(token_ids) - 1)
        return num_tokens
        ### END SOLUTION


# %%
check("14.4", Answer)

# %% [markdown]
# (task-5)=
# ## 14.5 Build the mirror that came late
#
# **Why it matters.** A router is restarted, and the batches of the last hour are not kept. It can wait until everything has
# been evicted, or it can listen to requests that have what they reuse announced.
#
# `LateMirror` has missed an unknown number of events. It may know less than the engine. It must never know more. So:
#
# - what is stored from now on is known; what is removed is not, unless you can be sure of another copy;
# - what is removed and was never heard of is no mistake;
# - of what is announced (`event.reused`), believe what the group must hold to serve a hit. `event.kind` is one of
#   `FULL_ATTENTION`, `MAMBA`, ... ; a group with a window has `event.window` tokens of it, else None; `event.block_size`.
#   A window of w tokens includes the token that looks back; chapter 12 has the number of blocks. Of states only the last
#   one is needed. Of any other kind believe nothing.


# %% task="14.5"
class LateMirror:
    """What one engine can find at least, heard from somewhere in the middle."""

    def __init__(self):
        ### BEGIN SOLUTION
        self.known = set()
        ### END SOLUTION

    def apply(self, event):
        """Applies a `BlockStored`, `BlockRemoved` or `AllBlocksCleared`."""
        ### BEGIN SOLUTION
        if isinstance(event, AllBlocksCleared):
            self.known.clear()
            return
        named = {(event.group_id, block_hash) for block_hash in event.block_hashes}
        if isinstance(event, BlockRemoved):
            self.known -= named
        elif not event.reused:
            self.known |= named
        else:
            first = max(len(event.block_hashes) - self.num_certain(event), 0)
            self.known |= {(event.group_id, block_hash) for block_hash in event.block_hashes[first:]}
        ### END SOLUTION

    def num_certain(self, event):
        """How many of the blocks that are announced, counted from the last, the group must hold."""
        ### BEGIN SOLUTION
        if event.kind == FULL_ATTENTION:
            return len(event.block_hashes)
        if event.window is not None:
            return -(-(event.window - 1) // event.block_size)
        return 1 if event.kind == MAMBA else 0
        ### END SOLUTION

    def prefixes(self):
        """The set of `(group id, hash)` that can be found for certain."""
        ### BEGIN SOLUTION
        return set(self.known)
        ### END SOLUTION


# %%
check("14.5", LateMirror)

# %% [markdown]
# (task-6)=
# ## 14.6 Where do they come from?
#
# **Why it matters.** "The router says it is cached, and the engine computes it." To find out who is right, one has to know
# which line speaks.
#
# These calls have the same names in vLLM 0.33.0 and here. Not all of them say something.

# %%
viz.Table(("call", "what it does"), CALLS)

# %% [markdown]
# `calls`: in which of them the event begins its way, for a block that is stored, one that is removed when the pool is full,
# and what report mode "full" announces. `marks`: at which of the six marks (lookup, admit, allocate, publish, run, append).

# %% task="14.6"
### BEGIN SOLUTION stub: calls = {"stored": ..., "removed": ..., "reused": ...}
calls = {
    "stored": "BlockPool.cache_full_blocks",
    "removed": "BlockPool.get_new_blocks",
    "reused": "KVCacheManager.get_computed_blocks",
}
### END SOLUTION
### BEGIN SOLUTION stub: marks = {"stored": ..., "removed": ..., "reused": ...}
marks = {"stored": "publish", "removed": "allocate", "reused": "lookup"}
### END SOLUTION

# %%
check("14.6", calls, marks)

# %% [markdown]
# (task-7)=
# ## 14.7 Build the router's rule
#
# **Why it matters.** By hits alone, everybody who shares a system prompt stands in one queue. By queues alone, every engine
# computes every prefix.
#
# `costs[i]` is how many prompt tokens engine i would have to compute; `members[i].num_queued_tokens` is how many wait there
# already. A request waits for the queue and for its own tokens, and those are waited for once more by whoever comes next:
# the loss is `queued + 2 * cost`. Take the engine with the smallest. Among equals take the one whose mirror,
# `members[i].mirror`, holds the fewest prefixes; among those the first.


# %% task="14.7"
class Rule:
    """Where a request should run."""

    def __call__(self, members, costs):
        """The place in the list."""
        ### BEGIN SOLUTION
        losses = [
            (member.num_queued_tokens + 2 * cost, len(member.mirror.prefixes()))
            for member, cost in zip(members, costs, strict=True)
        ]
        return losses.index(min(losses))
        ### END SOLUTION


# %%
check("14.7", Rule)

# %% [markdown]
# (task-8)=
# ## 14.8 Measure it
#
# **Why it matters.** Mirrors are one more thing that can break. What do they buy, and with which pools?
#
# `routed(workload, policy)` sends a workload to three engines; the policy is `"cache_aware"` or `"round_robin"`, and the result
# has a `hit_rate`. `POOLS` has 120 requests over 12 prefixes, and its field `prefixes_per_engine` says how many prefixes fit
# into one pool. Write `hit_rates(prefixes_per_engine)`; `replace(POOLS, ...)` gives the workload with another size.
#
# Then run the table. `enough`: the smallest pools with which the router with mirrors is less than two points (0.02) below
# its own rate with the largest. `worth`: the smallest with which it is at least as good as round robin with the largest.


# %% task="14.8"
def hit_rates(prefixes_per_engine):
    """The hit rates (with mirrors, round robin) of pools of this size."""
    ### BEGIN SOLUTION
    workload = replace(POOLS, prefixes_per_engine=prefixes_per_engine)
    return routed(workload, "cache_aware").hit_rate, routed(workload, "round_robin").hit_rate
    ### END SOLUTION


# %% tags=["raises-exception"]
columns = ("prefixes per pool", "with mirrors", "round robin")
rows = [(size, *(f"{rate:.1%}" for rate in hit_rates(size))) for size in (1, 2, 3, 4, 6, 8, 12)]
viz.Table(columns, rows, right=columns[1:])

# %% task="14.8"
### BEGIN SOLUTION stub: enough = ...
enough = 4
### END SOLUTION
### BEGIN SOLUTION stub: worth = ...
worth = 3
### END SOLUTION

# %%
check("14.8", hit_rates, enough, worth)

# %% [markdown]
# ## Your mirrors on engines
#
# The tiny hybrid model has full attention, a window and recurrent states, and a small pool. Your mirror hears it from the
# start, your late one from the middle. After each step both are compared with its index.

# %% tags=["raises-exception"]
hybrid_news(Mirror, LateMirror)

# %% [markdown]
# And these are events of vLLM itself, as they were recorded. The index belongs to our cache manager, which decides in these
# traces as vLLM did.

# %% tags=["raises-exception"]
for name in EVENT_TRACES:
    print(listen(name, Mirror))
