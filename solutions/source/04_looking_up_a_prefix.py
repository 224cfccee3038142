# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown]
# # 04 Looking up a prefix
#
# Eight tasks to [chapter 04](../chapters/04_looking_up_a_prefix.ipynb). Write into the cells that say `...` or raise
# `NotImplementedError`, run them, and run the cell with `check` below each. A hint comes from the terminal:
# `refengine hint 04.1`. At the end the engine looks up prefixes and allocates slots with what you wrote.

# %% tags=["setup"]
from exercises import check
from exercises.tasks.ex04_scene import ManagerBase, Stage, places, workload
from exercises.tasks.ex04_traces import LOOKUP_TRACES, MANAGER_TRACES, replay
from refengine import LLM, SamplingParams, viz
from refengine.v1.groups.full_attention import FullAttentionManager
from refengine.v1.kv_cache_manager import KVCacheBlocks, KVCacheManager

# %% [markdown]
# (task-1)=
# ## 04.1 What is found, before you run it
#
# **Why it matters.** "Same prompt, and the hit rate is 0" is the question that is asked most about prefix caching. Most
# of the answers are arithmetic.
#
# V1, blocks of four tokens, ten usable blocks. Ada came first, with the 14 tokens 0, 1, ..., 13 in blocks 1 to 4, and has
# ended. Say for each of these prompts how many tokens a lookup finds. They are only looked up, each for itself.
#
# | | prompt |
# |---|---|
# | a | 0 to 13, Ada's prompt again |
# | b | 0 to 11 |
# | c | 0 to 2 |
# | d | 0 to 6, then 99, then 8 to 13 |
# | e | 99, then 0 to 12 |
# | f | 0 to 19 |
#
# Then, in **one** step: Bob starts with prompt b, and after him Cleo with 0 to 12. Say both block tables.

# %% task="04.1"
### BEGIN SOLUTION stub: found = {"a": ..., "b": ..., "c": ..., "d": ..., "e": ..., "f": ...}
found = {"a": 12, "b": 8, "c": 0, "d": 4, "e": 0, "f": 12}
### END SOLUTION
### BEGIN SOLUTION stub: bobs_table = [...]
bobs_table = [1, 2, 4]
### END SOLUTION
### BEGIN SOLUTION stub: cleos_table = [...]
cleos_table = [1, 2, 3, 5]
### END SOLUTION

# %%
check("04.1", found, bobs_table, cleos_table)

# %% [markdown]
# (task-2)=
# ## 04.2 Build the lookup
#
# **Why it matters.** This answer decides how much of every prompt is computed. One block too many, and the request reads
# keys and values that belong to other tokens.
#
# `self.pool.get_cached_block(block_hash, [group_id])` gives a list with the one block that holds this prefix, or None.
# `self.spec.group_id` is the group, `self.block_size` the tokens per block.

# %% task="04.2" part="full_attention" name="Lookup"
class Lookup(FullAttentionManager):
    """The lookup of layers that see every earlier token."""

    def find_longest_cache_hit(self, block_hashes, max_length, drop_last):
        """The blocks of the longest cached prefix, in token order, of at most `max_length` tokens.

        `block_hashes`: the chained hashes of the request's full blocks. `drop_last`: one block less than was found,
        because a draft head computes the tokens of the last one again. Nothing changes, however often it is asked.
        """
        ### BEGIN SOLUTION
        hits = []
        for block_hash in block_hashes[: max_length // self.block_size]:
            cached = self.pool.get_cached_block(block_hash, [self.spec.group_id])
            if cached is None:
                break
            hits += cached
        return hits[:-1] if drop_last else hits
        ### END SOLUTION


# %%
check("04.2", Lookup)

# %% [markdown]
# (task-3)=
# ## 04.3 Build `allocate_slots`
#
# **Why it matters.** Three of the six marks are made here: admit, allocate and publish. A count that is one too low here,
# and the scheduler promises blocks that are not there.
#
# The frame is given; the four parts are yours. What you have:
#
# - `found`: the blocks of the hit, `[]` if there is none. `table`: the blocks that the request holds already.
# - `self.blocks_for(num_tokens)`: blocks for so many tokens. `self.block_size`.
# - `self.block_pool`: the pool of chapter 03, with `num_free_blocks`, `touch(blocks)`, `get_new_blocks(n)`.
# - `self.tables[request_id]` and `self.num_published[request_id]`: yours to write. The second says how many blocks at
#   the head of the table can be found already. A hit can.
# - `self.publish(request, first, last)`: makes blocks `first` to `last - 1` of the table findable and writes
#   `num_published`. With nothing to publish it does nothing.

# %% task="04.3" part="kv_cache_manager" name="Manager"
class Manager(ManagerBase):
    """Decides, adopts, allocates and publishes."""

    def allocate_slots(
        self, request, num_new_tokens, hits=None, num_hit_tokens=0, *, num_lookahead_tokens=0, **gates
    ):
        """Slots for `num_new_tokens` tokens after the computed ones, or None if there are not enough free blocks.

        `num_lookahead_tokens` slots more are for drafts. Returns: the new blocks, without the hits.
        """
        request_id = request.request_id
        found = list(hits.blocks[0]) if hits else []
        table = self.tables.get(request_id, [])
        num_computed_tokens = request.num_computed_tokens + num_hit_tokens
        num_slots = min(num_computed_tokens + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        must_fit, reserved = self.gates(request, num_slots, **gates)  # tokens to have room for; blocks to leave

        # 1. Decide: how many blocks will leave the free queue for `must_fit` tokens? And are there so many, and
        #    `reserved` besides? Nothing may change before the answer is yes.
        ### BEGIN SOLUTION
        new = max(self.blocks_for(must_fit) - len(table) - len(found), 0)
        adopted = sum(block.ref_count == 0 for block in found)
        fits = new + adopted + reserved <= self.block_pool.num_free_blocks
        ### END SOLUTION
        self.tell_admit(request, fits)
        if not fits:
            return None

        # 2. Adopt the hit: it becomes the head of the table. A running request has no hit, and keeps its table.
        ### BEGIN SOLUTION
        if found:
            self.block_pool.touch(found)
            self.tables[request_id] = list(found)
            self.num_published[request_id] = len(found)
        ### END SOLUTION

        # 3. Allocate: `new_blocks` grow the table until there are `num_slots` slots. Drafts have slots too.
        ### BEGIN SOLUTION
        table = self.tables.setdefault(request_id, [])
        new_blocks = self.block_pool.get_new_blocks(max(self.blocks_for(num_slots) - len(table), 0))
        table += new_blocks
        ### END SOLUTION
        self.tell_allocate(request, num_new_tokens, new_blocks)

        # 4. Publish what this step fills: blocks whose last token is computed when the step is over. No drafts.
        ### BEGIN SOLUTION
        num_full = min(num_computed_tokens + num_new_tokens, request.num_tokens) // self.block_size
        self.publish(request, self.num_published.get(request_id, 0), num_full)
        ### END SOLUTION
        return KVCacheBlocks((new_blocks,))


# %%
check("04.3", Manager)

# %% [markdown]
# (task-4)=
# ## 04.4 Find the bug: past the end of the sequence
#
# **Why it matters.** A request that was preempted comes back with everything it had, generated tokens included, and finds
# most of it in the cache. Small engines crashed here under load, and only there (nano-vllm PR#207, PR#211, PR#233).
#
# `resume` gives a preempted request its share of a step: at most `budget` tokens. It returns where the share starts and
# how many tokens it has, or None. One of its numbers is taken too early.

# %% task="04.4"
def resume(manager, request, budget):
    """The share (start, number of tokens) of a request that comes back, or None."""
    ### BEGIN SOLUTION
    hits, num_hit_tokens, _ = manager.get_computed_blocks(request)
    num_new_tokens = min(request.num_tokens - num_hit_tokens, budget)
    ### INSTEAD
    # num_new_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
    # hits, num_hit_tokens, _ = manager.get_computed_blocks(request)
    ### END SOLUTION
    if manager.allocate_slots(request, num_new_tokens, hits, num_hit_tokens) is None:
        return None
    return num_hit_tokens, num_new_tokens


# %% tags=["raises-exception"]
stage = Stage(num_blocks=9)
stage.start("ada", range(8))
stage.append("ada", 8)
stage.preempt("ada")
start, count = resume(stage.manager, stage.requests["ada"], budget=100)
print(f"9 tokens; computes {count} from position {start} on; blocks {stage.table('ada')}")

# %%
check("04.4", resume)

# %% [markdown]
# (task-5)=
# ## 04.5 Find the bug: refused, and holding blocks
#
# **Why it matters.** A request that waits and holds blocks is seen by nobody: usage stays high, nothing runs, and the
# blocks never come back (nano-vllm PR#207, in review).
#
# This manager answers None when it should, and something stays behind. The repair must leave the free queue exactly as
# it was before the question.

# %% task="04.5"
class Hasty(KVCacheManager):
    """A manager whose refusal has a bug."""

    def allocate_slots(self, request, num_new_tokens, hits=None, num_hit_tokens=0, **options):
        hits = hits or self.empty
        num_slots = request.num_computed_tokens + num_hit_tokens + num_new_tokens
        ### BEGIN SOLUTION
        required = self.coordinator.get_num_blocks_to_allocate(request.request_id, num_slots, hits.blocks)
        if required > self.block_pool.num_free_blocks:
            return None
        if hits:
            self.coordinator.add_computed_blocks(request.request_id, hits.blocks)
        ### INSTEAD
        # if hits:
        #     self.coordinator.add_computed_blocks(request.request_id, hits.blocks)
        # required = self.coordinator.get_num_blocks_to_allocate(request.request_id, num_slots, self.empty.blocks)
        # if required > self.block_pool.num_free_blocks:
        #     return None
        ### END SOLUTION
        new_blocks = self.coordinator.allocate_new_blocks(request.request_id, num_slots)
        self.coordinator.cache_blocks(request, num_slots)
        return KVCacheBlocks(new_blocks)


# %%
stage = Stage(num_blocks=6, manager=Hasty)
stage.start("ada", range(8))
stage.finish("ada")
stage.start("rae", [50, 51, 52])
print("free queue before:", stage.queue)
print("Cleo, 20 tokens:  ", stage.reserve("cleo", range(20), 12))
print("free queue after: ", stage.queue, " Cleo holds", stage.table("cleo"))

# %%
check("04.5", Hasty)

# %% [markdown]
# (task-6)=
# ## 04.6 Find the bug: a guess in the index
#
# **Why it matters.** A draft is a guess at the next tokens. It gets slots, and if the model disagrees, other tokens take
# its place. If it could be found by its hash, others would read keys and values that were overwritten (vLLM PR#18668).
#
# In this story the drafts stand at the end of the request's tokens while they are checked. One line publishes too much.

# %% task="04.6"
class Drafting(KVCacheManager):
    """A manager whose publishing has a bug."""

    def allocate_slots(
        self, request, num_new_tokens, hits=None, num_hit_tokens=0, *, num_lookahead_tokens=0, **options
    ):
        hits = hits or self.empty
        num_computed_tokens = request.num_computed_tokens + num_hit_tokens
        num_slots = num_computed_tokens + num_new_tokens + num_lookahead_tokens
        required = self.coordinator.get_num_blocks_to_allocate(request.request_id, num_slots, hits.blocks)
        if required > self.block_pool.num_free_blocks:
            return None
        if hits:
            self.coordinator.add_computed_blocks(request.request_id, hits.blocks)
        new_blocks = self.coordinator.allocate_new_blocks(request.request_id, num_slots)
        ### BEGIN SOLUTION
        num_final = num_computed_tokens + num_new_tokens
        ### INSTEAD
        # num_final = min(num_slots, request.num_tokens)
        ### END SOLUTION
        self.coordinator.cache_blocks(request, num_final)
        return KVCacheBlocks(new_blocks)


# %%
stage = Stage(num_blocks=11, manager=Drafting)
stage.start("ada", range(5))
stage.append("ada", 5, 6, 7)  # 5 was sampled; 6 and 7 are guesses
stage.schedule("ada", num_new_tokens=1, drafts=2)
print("blocks found for 0 to 8:", stage.lookup(range(9)))

# %%
check("04.6", Drafting)

# %% [markdown]
# (task-7)=
# ## 04.7 Where is it in vLLM?
#
# **Why it matters.** The first question of this book was asked by somebody who had found the lookup in V1 and could not
# find it in V0. The answer came ten weeks later (vllm#13327).
#
# These are places on the path of a request, with what each one decides.

# %%
viz.Table(("", "symbol", "decides"), places())

# %% [markdown]
# Write a name as in the table. `decides`: says which blocks are computed (several names are right). `skips`: leaves those
# tokens out of the work. `publishes`: makes a block count as computed for others.

# %% task="04.7"
### BEGIN SOLUTION stub: decides = {"V1": ..., "V0": ...}
decides = {"V1": "KVCacheManager.get_computed_blocks", "V0": "ComputedBlocksTracker.get_num_cached_tokens"}
### END SOLUTION
### BEGIN SOLUTION stub: skips = {"V1": ..., "V0": ...}
skips = {"V1": "Scheduler.schedule", "V0": "ModelInputForGPUBuilder._compute_for_prefix_cache_hit"}
### END SOLUTION
### BEGIN SOLUTION stub: publishes = {"V1": ..., "V0": ...}
publishes = {
    "V1": "BlockPool.cache_full_blocks",
    "V0": "PrefixCachingBlockAllocator.mark_blocks_as_computed",
}
### END SOLUTION

# %%
check("04.7", decides, skips, publishes)

# %% [markdown]
# (task-8)=
# ## 04.8 Measure it
#
# **Why it matters.** A hit is a number of whole blocks. How large may a block be before a shared prefix of 50 tokens is
# worth nothing?
#
# Write `hit_rate(block_size, prompts)`: one prompt after the other on a fresh cache of enough blocks, each ended before
# the next one starts. Returns tokens found / tokens asked for, as vLLM counts it. `stage.lookup(tokens)` gives the blocks
# that are found; `stage.start(name, tokens)` and `stage.finish(name)` do the rest.
#
# Then run the table below it, and say: of the 50 shared tokens, how many can a block size of 16 never find? And which is
# the smallest block size in the table with a hit rate of 0?

# %% task="04.8"
def hit_rate(block_size, prompts):
    """Share of all prompt tokens that a lookup finds."""
    ### BEGIN SOLUTION
    stage = Stage(num_blocks=1000, block_size=block_size)
    found = asked = 0
    for number, tokens in enumerate(prompts):
        asked += len(tokens)
        found += block_size * len(stage.lookup(tokens))
        stage.start(str(number), tokens)
        stage.finish(str(number))
    return found / asked
    ### END SOLUTION


# %% tags=["raises-exception"]
prompts = workload(num_shared=50, num_requests=12)
rates = [(block_size, f"{hit_rate(block_size, prompts):.1%}") for block_size in (1, 2, 4, 8, 16, 32, 64)]
viz.Table(("block size", "hit rate"), rates, right=("hit rate",))

# %% task="04.8"
### BEGIN SOLUTION stub: never_found_at_16 = ...
never_found_at_16 = 2
### END SOLUTION
### BEGIN SOLUTION stub: zero_from = ...
zero_from = 64
### END SOLUTION

# %%
check("04.8", hit_rate, never_found_at_16, zero_from)

# %% [markdown]
# (your-engine)=
# ## The engine on your parts
#
# The reference beside an engine whose lookup and whose manager are yours: five requests on fourteen blocks, which is not
# enough for all of them at once. The same tokens, the same hits, the same free queue at the end.

# %% tags=["raises-exception"]
mine = {"full_attention": Lookup, "kv_cache_manager": Manager}
prompts = [[*range(40, 52), 60 + i] for i in range(5)]


def run(parts=None):
    llm = LLM("tiny", block_size=4, num_blocks=15, parts=parts)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=9, ignore_eos=True))
    queue = [block.block_id for block in llm.engine.kv_cache_manager.block_pool.free_queue]
    return [output.token_ids for output in outputs], [output.num_cached_tokens for output in outputs], queue


reference, own = run(), run(mine)
for what, theirs, yours in zip(("tokens", "hits", "free queue"), reference, own, strict=True):
    print(f"{what}: {'the same' if theirs == yours else f'{yours} instead of {theirs}'}")

# %% [markdown]
# And vLLM's recorded decisions, replayed on your parts:

# %% tags=["raises-exception"]
for name in dict.fromkeys((*LOOKUP_TRACES, *MANAGER_TRACES)):
    print(replay(name, mine))

# %% [markdown]
# In a terminal, `refengine demo --parts exercises/04_looking_up_a_prefix.ipynb` runs the demo on both. Let your lookup
# touch the blocks that it finds, or your manager forget to adopt them, save, and see which part it names. (The demo
# notices only what it comes across: its pool is large, and nothing in it is evicted. `refengine check 04` looks closer.)
