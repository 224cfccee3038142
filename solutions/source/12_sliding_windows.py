# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown]
# # 12 Sliding windows
#
# Eight tasks to [chapter 12](../chapters/12_sliding_windows.ipynb). Write into the cells that say `...` or raise
# `NotImplementedError`, run them, and run the cell with `check` below each. A hint comes from the terminal:
# `refengine hint 12.1`. At the end a model with windows runs on what you wrote.

# %% tags=["setup"]
from exercises import check
from exercises.tasks.ex12_scene import WindowStage, make_engine, num_held, places, serve, window_model
from exercises.tasks.ex12_traces import RELEASE_TRACES, WINDOW_TRACES, replay
from refengine import LLM, SamplingParams, viz
from refengine.v1.groups.base import num_blocks_for
from refengine.v1.groups.sliding_window import SlidingWindowManager
from refengine.v1.kv_cache_manager import KVCacheBlocks, KVCacheManager

# %% [markdown]
# (task-1)=
# ## 12.1 Tables, before you run it
#
# **Why it matters.** A block too many that is kept costs memory. A block too many that is given back is read by the next
# token, with somebody else's keys in it.
#
# V1, a window of **6** tokens, blocks of **4**, eight usable blocks. Every block is published when it is full. Ada computes
# 10 tokens in her first step, then 4, then 3, then 1. Say her block table after each of the four steps, nulls included, and
# the free queue at the end, front first.

# %% task="12.1"
### BEGIN SOLUTION stub: tables = [...]
tables = [[1, 2, 3], [0, 2, 3, 4], [0, 0, 3, 4, 5], [0, 0, 0, 4, 5]]
### END SOLUTION
### BEGIN SOLUTION stub: queue = [...]
queue = [6, 7, 8, 1, 2, 3]
### END SOLUTION

# %%
check("12.1", tables, queue)

# %% [markdown]
# (task-2)=
# ## 12.2 Build what goes back
#
# **Why it matters.** This is the half of the manager that saves the memory.
#
# What you have: `self.window` and `self.block_size`, both in tokens. `self.table(request_id)` is the request's block table,
# a list that you may write into. `self.pool.null_block`; a block knows whether it is that one: `block.is_null`.
# `self.pool.free_blocks(blocks)` gives blocks back in one call, in the order in which they should be evicted.


# %% task="12.2"
class Behind(SlidingWindowManager):
    """Gives back what the window has passed."""

    def num_skipped_tokens(self, num_computed_tokens):
        """How many tokens at the beginning are seen by no token from position `num_computed_tokens` on.

        A token sees `self.window` tokens, itself included. May be negative.
        """
        ### BEGIN SOLUTION
        return num_computed_tokens - (self.window - 1)
        ### END SOLUTION

    def remove_skipped_blocks(self, request_id, num_computed_tokens):
        """Every block that holds nothing but skipped tokens goes back, the last one first.

        The null block takes its place.
        The table may be shorter than that, and the call comes before every step: what is null stays null.
        """
        ### BEGIN SOLUTION
        table = self.table(request_id)
        num_nulls = max(self.num_skipped_tokens(num_computed_tokens), 0) // self.block_size
        gone = [block for block in table[:num_nulls] if not block.is_null]
        for i in range(min(num_nulls, len(table))):
            table[i] = self.pool.null_block
        self.pool.free_blocks(gone[::-1])
        ### END SOLUTION


# %%
check("12.2", Behind)

# %% [markdown]
# (task-3)=
# ## 12.3 Hits with holes, before you run it
#
# **Why it matters.** A window's hit is not a prefix of blocks. Whoever reads a log of hits with the rule of full attention in
# mind takes a right one for a bug, and a bug for a right one.
#
# One group, a window of **8** tokens, blocks of **4**. Ada had 24 tokens in blocks 1 to 6 and has ended. Somebody brings
# the same 24 and one more. Say which blocks the lookup gives, nulls included, each time on a fresh cache from which these
# blocks have been taken:
#
# | | not cached any more |
# |---|---|
# | a | none |
# | b | 5 |
# | c | 5 and 3 |
# | d | 5, 3 and 2 |
# | e | 5, 3 and 1 |
#
# And say how many adjacent blocks of four a hit needs with windows of 8, 9 and 10 tokens.

# %% task="12.3"
### BEGIN SOLUTION stub: hits = {"a": ..., "b": ..., "c": ..., "d": ..., "e": ...}
hits = {"a": [0, 0, 0, 0, 5, 6], "b": [0, 0, 3, 4], "c": [1, 2], "d": [1], "e": []}
### END SOLUTION
### BEGIN SOLUTION stub: needed = [...]
needed = [2, 2, 3]
### END SOLUTION

# %%
check("12.3", hits, needed)

# %% [markdown]
# (task-4)=
# ## 12.4 Build the lookup
#
# **Why it matters.** The other half. One block too few in a hit, and the model reads keys that nobody wrote; one too many,
# and hits are missed.
#
# `self.cached_block(block_hash)` gives the block that holds this prefix, or None. `self.window`, `self.block_size` and
# `self.pool.null_block` are as before.


# %% task="12.4" part="sliding_window" name="Lookup"
class Lookup(SlidingWindowManager):
    """The lookup of layers that see the last `self.window` tokens."""

    def find_longest_cache_hit(self, block_hashes, max_length, drop_last):
        """A list: the blocks of the longest prefix, after which a token has all that it sees.

        Of at most `max_length` tokens, in token order, with the null block wherever no block is needed.
        `drop_last`: a draft head computes the tokens of the last block again, so find one block more and
        give the last one back. Nothing changes, however often it is asked.
        """
        ### BEGIN SOLUTION
        need = -(-(self.window - 1) // self.block_size) + drop_last
        run = []
        for i in reversed(range(max_length // self.block_size)):
            block = self.cached_block(block_hashes[i])
            if block is None:
                run = []
                continue
            run.insert(0, block)
            if len(run) >= need:
                run = [self.pool.null_block] * i + run
                break
        return run[:-1] if drop_last else run
        ### END SOLUTION


# %%
check("12.4", Lookup)

# %% [markdown]
# (task-5)=
# ## 12.5 Find the bug: a short hit fits and a long one does not
#
# **Why it matters.** The longer the hit, the less there is to compute and to allocate. With this group it is the other way
# round: on a busy pool a request with a long hit waits, and nobody knows what for.
#
# `get_num_blocks_to_allocate` says how many free blocks it takes until a request has slots for `num_tokens` tokens. One line
# counts something that costs nothing.


# %% task="12.5"
class Counting(SlidingWindowManager):
    """A group whose count has a bug."""

    def get_num_blocks_to_allocate(self, request_id, num_tokens, hits, num_tokens_per_step=None):
        held = len(self.table(request_id)) + len(hits)
        new = max(num_blocks_for(num_tokens, self.block_size) - held, 0)
        ### BEGIN SOLUTION
        adopted = sum(block.ref_count == 0 and not block.is_null for block in hits)
        ### INSTEAD
        # adopted = sum(block.ref_count == 0 for block in hits)
        ### END SOLUTION
        return new + adopted


# %%
stage = WindowStage(num_blocks=11, window=4, group=Counting)
stage.start("ada", range(12))
stage.finish("ada")
stage.start("rae", range(500, 510))
print("free:", stage.queue, " found:", stage.lookup(range(13)))
print("Bob's table:", stage.start("bob", range(13)))

# %%
check("12.5", Counting)

# %% [markdown]
# (task-6)=
# ## 12.6 Find the bug: gone too soon
#
# **Why it matters.** Nothing raises, and no count is wrong. A block of the window has been given to somebody else, and the
# first tokens of the step look at it.
#
# This manager gives blocks back, and one of its numbers belongs to another moment. The repair must give back no block too
# many and none too few, and a request that fits only because of what it gives back must be admitted.


# %% task="12.6"
class Hurried(KVCacheManager):
    """A manager that gives back too much."""

    def allocate_slots(self, request, num_new_tokens, hits=None, num_hit_tokens=0, **options):
        hits = hits or self.empty
        num_computed_tokens = request.num_computed_tokens + num_hit_tokens
        num_tokens = num_computed_tokens + num_new_tokens
        ### BEGIN SOLUTION
        self.coordinator.remove_skipped_blocks(request.request_id, num_computed_tokens)
        ### INSTEAD
        # self.coordinator.remove_skipped_blocks(request.request_id, num_tokens)
        ### END SOLUTION
        required = self.coordinator.get_num_blocks_to_allocate(request.request_id, num_tokens, hits.blocks)
        if required > self.block_pool.num_free_blocks:
            return None
        if hits:
            self.coordinator.add_computed_blocks(request.request_id, hits.blocks)
        new_blocks = self.coordinator.allocate_new_blocks(request.request_id, num_tokens)
        self.coordinator.cache_blocks(request, num_tokens)
        return KVCacheBlocks(new_blocks)


# %%
stage = WindowStage(num_blocks=13, window=4, manager=Hurried)
stage.start("ada", range(6))
print("tokens 6, 7 and 8 are computed with", stage.grow("ada", 3))
print("token 6 sees tokens 3 to 6; token 3 is in block number 1 of the table")

# %%
check("12.6", Hurried)

# %% [markdown]
# (task-7)=
# ## 12.7 Where is it in vLLM?
#
# **Why it matters.** Windows touch the cache in six places, and reports name only the one that was noticed.
#
# These are places that deal with windows, chunks and null blocks.

# %%
viz.Table(("", "symbol", "where"), places())

# %% [markdown]
# Write a symbol as in the table. In V1, what `looks up` a prefix for a window; what `gives back` blocks behind it; what
# chooses the blocks that are `published`. In V0, what `refuses` a window together with prefix caching; what cuts down the
# blocks that a decode `reads`; what makes the block that stands for `nothing`.

# %% task="12.7"
### BEGIN SOLUTION stub: v1 = {"looks up": ..., "gives back": ..., "published": ...}
v1 = {
    "looks up": "SlidingWindowManager.find_longest_cache_hit",
    "gives back": "SingleTypeKVCacheManager.remove_skipped_blocks",
    "published": "SlidingWindowManager.reachable_block_mask",
}
### END SOLUTION
### BEGIN SOLUTION stub: v0 = {"refuses": ..., "reads": ..., "nothing": ...}
v0 = {
    "refuses": "CacheConfig._verify_prefix_caching",
    "reads": "ModelInputForGPUBuilder._compute_for_sliding_window",
    "nothing": "CpuGpuBlockAllocator.allocate_or_get_null_block",
}
### END SOLUTION

# %%
check("12.7", v1, v0)

# %% [markdown]
# (task-8)=
# ## 12.8 Measure it
#
# **Why it matters.** How many blocks must a pool have, so that a hundred requests with a window can run for as long as they
# like? The window divided by the block size is not the answer.
#
# Write `most_held(window, num_tokens, block_size)`: the largest number of blocks that one request holds *at any moment* while
# it grows from 1 token to `num_tokens`, one token a step. `window` None: it sees everything.
#
# `WindowStage(num_blocks, block_size, window=window, snapshots=False)`, `stage.start("ada", [0])`, `stage.grow("ada", 1)` is one
# step more and gives the table. `num_held(table)` counts the blocks of a table that are not null.
#
# Then say: how many blocks of 16 tokens does a request of 1,000 tokens hold at most with a window of 128? And without a window?


# %% task="12.8"
def most_held(window, num_tokens, block_size):
    """Blocks held at the worst moment."""
    ### BEGIN SOLUTION
    stage = WindowStage(1000, block_size, window=window, snapshots=False)
    most = num_held(stage.start("ada", [0]))
    for _ in range(num_tokens - 1):
        most = max(most, num_held(stage.grow("ada", 1)))
    return most
    ### END SOLUTION


# %% tags=["raises-exception"]
rows = [(window, *(most_held(window, 300, size) for size in (1, 4, 16))) for window in (8, 16, 17, 64, None)]
viz.Table(("window", "blocks of 1", "blocks of 4", "blocks of 16"), rows)

# %% task="12.8"
### BEGIN SOLUTION stub: with_window = ...
with_window = 9
### END SOLUTION
### BEGIN SOLUTION stub: without = ...
without = 63
### END SOLUTION

# %%
check("12.8", most_held, with_window, without)

# %% [markdown]
# (your-engine)=
# ## The engine on your parts
#
# Both halves in one class, in an engine with a small random model whose layers have a window of 8. Four prompts that share a
# beginning, twice, on eight blocks: too few for all four, so that some are preempted. Beside it the reference: the same
# tokens, the same hits, the same free queue at the end.


# %% tags=["raises-exception"]
class Mine(Lookup, Behind):
    """The window's manager, all of it yours."""


prompts = [[*range(18), 40 + i, 50] for i in range(4)]


def run(parts=None):
    core, record = make_engine(window_model(window=8), num_blocks=9, parts=parts)
    tokens = [serve(core, prompts, 10, first=first) for first in (0, 4)]
    hits = [summary.hit_tokens for summary in record.requests()]
    return tokens, hits, [block.block_id for block in core.kv_cache_manager.block_pool.free_queue]


reference, own = run(), run({"sliding_window": Mine})
for what, theirs, yours in zip(("tokens", "hits", "free queue"), reference, own, strict=True):
    print(f"{what}: {'the same' if theirs == yours else f'{yours} instead of {theirs}'}")
print("hits:", own[1])

# %% [markdown]
# The shipped model `tiny-hybrid` has one layer with a window, of 32 tokens. It runs on your part, too:

# %% tags=["raises-exception"]
def ask(parts=None):
    llm = LLM("tiny-hybrid", block_size=8, num_blocks=60, parts=parts)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    return [llm.generate(list(range(40, 130)), params)[0] for _ in range(2)]


for theirs, yours in zip(ask(), ask({"sliding_window": Mine}), strict=True):
    print("the same tokens:", theirs.token_ids == yours.token_ids, end="  ")
    print("found:", yours.num_cached_tokens, "of 90")

# %% [markdown]
# And vLLM's recorded decisions, replayed on it:

# %% tags=["raises-exception"]
for name in dict.fromkeys((*RELEASE_TRACES, *WINDOW_TRACES)):
    print(replay(name, {"sliding_window": Mine}))
