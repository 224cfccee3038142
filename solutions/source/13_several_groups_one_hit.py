# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown]
# # 13 Several groups, one hit
#
# Seven tasks to [chapter 13](../chapters/13_several_groups_one_hit.ipynb). Write into the cells that say `...` or raise
# `NotImplementedError`, run them, and run the cell with `check` below each. A hint comes from the terminal:
# `refengine hint 13.1`. At the end a model with three kinds of layers agrees on its hits with what you wrote.

# %% tags=["setup"]
from exercises import check
from exercises.tasks.ex13_scene import CoordinatorBase, GroupStage, full, places, states, window
from exercises.tasks.ex13_traces import GROUP_TRACES, replay
from refengine import LLM, SamplingParams, viz
from refengine.v1.kv_cache_manager import KVCacheBlocks, KVCacheManager

# %% [markdown]
# (task-1)=
# ## 13.1 What all of them can serve, before you run it
#
# **Why it matters.** "Why is my hit 0?" has another answer in a model with several kinds of layers: everything that one
# kind needs may be there, and the hit is 0 all the same. And the second number says whether the next one will do better.
#
# Full attention and a window of 4 tokens, blocks of two, thirty usable blocks. Ada had 12 tokens: blocks 1 to 6 for full
# attention, 7 to 12 for the window. She has ended, everything was published. Bob brings her 12 tokens and one of his own.
# What does his lookup say, as (hit, boundary) in tokens, 0 for no boundary, after these blocks were taken out of the index?
#
# | | taken out |
# |---|---|
# | a | nothing |
# | b | 12 |
# | c | 11 |
# | d | 12 and 3 |
# | e | 7 |
#
# Now full attention and layers with a state, blocks of two. Ada had 13 tokens and has ended. Bob shares her first k tokens
# and brings three of his own. (hit, boundary)?
#
# | | Ada's chunks | k |
# |---|---|---|
# | f | 4, 8, 1 | 4 |
# | g | 4, 8, 1 | 8 |
# | h | 12, 1 | 6 |
# | i | 12, 1 | 12 |
#
# And the blocks of Bob's hit in case b, a list per group:

# %% task="13.1"
### BEGIN SOLUTION stub: found = {"a": ..., "b": ..., "c": ..., "d": ..., "e": ..., "f": ..., "g": ..., "h": ..., "i": ...}
found = {
    "a": (12, 0),
    "b": (10, 12),
    "c": (8, 12),
    "d": (4, 0),
    "e": (12, 0),
    "f": (4, 0),
    "g": (4, 8),
    "h": (0, 6),
    "i": (12, 0),
}
### END SOLUTION
### BEGIN SOLUTION stub: blocks_of_b = [..., ...]
blocks_of_b = [[1, 2, 3, 4, 5], [0, 0, 0, 10, 11]]
### END SOLUTION

# %%
check("13.1", found, blocks_of_b)

# %% [markdown]
# (task-2)=
# ## 13.2 Build the agreement
#
# **Why it matters.** A request starts at one token, and every layer must have what it needs there. One group that was not
# asked about the final length, and its layers read blocks that nobody has computed.
#
# Here a group is a function. `group(length)` is the longest length, not above `length`, that it can serve. Every group can
# serve 0.


# %% task="13.2"
def common_length(groups, max_length):
    """The longest length, not above `max_length`, that every group can serve."""
    ### BEGIN SOLUTION
    length = max_length
    while True:
        agreed = length
        for group in groups:
            agreed = group(agreed)
        if agreed == length:
            return length
        length = agreed
    ### END SOLUTION


# %% tags=["raises-exception"]
def serves(*lengths):
    """A group that can serve these lengths, and 0."""
    return lambda length: max(n for n in (0, *lengths) if n <= length)


common_length([serves(2, 4, 6, 8, 10, 12), serves(2, 6, 10), serves(4, 6, 12)], 12)

# %%
check("13.2", common_length)

# %% [markdown]
# (task-3)=
# ## 13.3 Build the coordinator
#
# **Why it matters.** This method is what `get_computed_blocks` asks. Of its three answers the blocks and the length decide
# what this request skips, and the boundary decides what the *next* one will skip.
#
# - `self.groups`: all groups, in the order in which their blocks are returned.
# - `self.order`: the same, in the order in which they are asked. Full attention is first.
# - `self.serve(group, block_hashes, max_length)`: the blocks of the longest prefix, of at most `max_length` tokens, that
#   this group can serve.
# - `group.block_size`: tokens per block; groups may differ. `group.spec.group_id`: its number.


# %% task="13.3" part="coordinator" name="Agree"
class Agree(CoordinatorBase):
    """Whoever cannot serve a prefix makes it shorter for all."""

    def find_longest_cache_hit(self, block_hashes, max_length):
        """The longest prefix of at most `max_length` tokens that every group can serve.

        Returns: a tuple with the blocks of each group, the length in tokens, and the boundary:
        the longest answer that a group gave on the way, if it is longer than the hit, else 0.
        """
        ### BEGIN SOLUTION
        hits = {}
        length, longest = max_length, 0
        while True:
            agreed = length
            for group in self.order:
                hits[group.spec.group_id] = self.serve(group, block_hashes, agreed)
                agreed = len(hits[group.spec.group_id]) * group.block_size
                longest = max(longest, agreed)
            if agreed == length:
                break
            length = agreed
        blocks = tuple(hits[group.spec.group_id] for group in self.groups)
        return blocks, length, longest if longest > length else 0
        ### END SOLUTION


# %%
check("13.3", Agree)

# %% [markdown]
# (task-4)=
# ## 13.4 Find the bug: one group keeps what the others gave up
#
# **Why it matters.** The request goes on at the end of the common hit and writes there. A group that keeps a block beyond
# it lets the request write into a block that others share (vllm PR#31707 and PR#17999 are about this cut).
#
# This coordinator asks full attention only once, since whoever has a long prefix has every shorter one too. That is right,
# and vLLM does it. Then the lists must be cut. Something is cut too little.


# %% task="13.4"
class Cutting(CoordinatorBase):
    """A coordinator whose answer has a bug."""

    def find_longest_cache_hit(self, block_hashes, max_length):
        hits = {}
        length, longest = max_length, 0
        while True:
            agreed = length
            for group in self.order:
                name = group.spec.group_id
                if not (group.is_downward_closed and name in hits):
                    hits[name] = self.serve(group, block_hashes, agreed)
                    longest = max(longest, len(hits[name]) * group.block_size)
                agreed = min(agreed, len(hits[name]) * group.block_size)
            if agreed == length:
                break
            length = agreed
        ### BEGIN SOLUTION
        for group in self.groups:
            name = group.spec.group_id
            hits[name] = hits[name][: length // group.block_size]
        ### INSTEAD
        # first = self.order[0]
        # hits[first.spec.group_id] = hits[first.spec.group_id][: length // first.block_size]
        ### END SOLUTION
        blocks = tuple(hits[group.spec.group_id] for group in self.groups)
        return blocks, length, longest if longest > length else 0


# %%
stage = GroupStage(60, full(2), full(4), window(2, 4), coordinator=Cutting)
stage.start("ada", range(17))
print("Ada's window blocks:", stage.tables("ada")[2])
stage.finish("ada")
stage.evict(21)  # one of the two that a hit of 16 tokens needs
print("hit and boundary:", stage.found(range(17)))
print("blocks:", stage.hits(range(17)))

# %%
check("13.4", Cutting)

# %% [markdown]
# (task-5)=
# ## 13.5 Find the bug: one group takes another one's hit
#
# **Why it matters.** All groups draw on one free queue. The hit of a group that nobody uses stands in that queue too, until
# it is adopted (vllm#33775).
#
# The question whether there is room is asked for all groups at once, and that is right. What comes after it is not.


# %% task="13.5"
class OneByOne(KVCacheManager):
    """A manager whose allocation has a bug."""

    def allocate_slots(self, request, num_new_tokens, hits=None, num_hit_tokens=0, **options):
        hits = hits or self.empty
        name = request.request_id
        num_slots = request.num_computed_tokens + num_hit_tokens + num_new_tokens
        required = self.coordinator.get_num_blocks_to_allocate(name, num_slots, hits.blocks)
        if required > self.block_pool.num_free_blocks:
            return None
        groups = self.coordinator.groups
        ### BEGIN SOLUTION
        if hits:
            for group, blocks in zip(groups, hits.blocks, strict=True):
                group.add_computed_blocks(name, blocks)
        new_blocks = [group.allocate_new_blocks(name, num_slots) for group in groups]
        ### INSTEAD
        # new_blocks = []
        # for group, blocks in zip(groups, hits.blocks, strict=True):
        #     if hits:
        #         group.add_computed_blocks(name, blocks)
        #     new_blocks.append(group.allocate_new_blocks(name, num_slots))
        ### END SOLUTION
        self.coordinator.cache_blocks(request, num_slots)
        return KVCacheBlocks(tuple(new_blocks))


# %%
stage = GroupStage(9, full(2), window(2, 4), manager=OneByOne)
for name, first in (("ada", 0), ("cy", 50)):
    stage.start(name, range(first, first + 4))
    stage.finish(name)
print("free queue:", stage.queue)
print("Bob finds: ", stage.hits(range(5)))
print("Bob holds: ", stage.start("bob", range(5)))

# %%
check("13.5", OneByOne)

# %% [markdown]
# (task-6)=
# ## 13.6 Where is it in vLLM?
#
# **Why it matters.** The path of one lookup through vLLM now has four files. These places of 0.33.0 deal with several
# groups:

# %%
viz.Table(("symbol", "where"), places())

# %% [markdown]
# Write a name as in the table. `agrees`: asks group after group until nobody wants it shorter. `hands_on`: gives the
# boundary to the scheduler. `ends_chunk`: makes a chunk end where a state is to be kept. `one_look`: adds up what all
# groups need. `finds_state`: walks right to left and needs a single block.

# %% task="13.6"
### BEGIN SOLUTION stub: where = {"agrees": ..., "hands_on": ..., "ends_chunk": ..., "one_look": ..., "finds_state": ...}
where = {
    "agrees": "HybridKVCacheCoordinator.find_longest_cache_hit",
    "hands_on": "KVCacheManager.get_computed_blocks",
    "ends_chunk": "Scheduler._mamba_block_aligned_split",
    "one_look": "KVCacheCoordinator.get_num_blocks_to_allocate",
    "finds_state": "MambaManager.find_longest_cache_hit",
}
### END SOLUTION

# %%
check("13.6", where)

# %% [markdown]
# (task-7)=
# ## 13.7 Measure it: the first, the second, the third
#
# **Why it matters.** vLLM's default keeps so little of a window or a state that the second prompt with a shared beginning
# finds nothing. That looks like a bug in a dashboard, and is a decision. What does it save, and what does it cost?
#
# Write `three_hits(group, retention, num_shared)`: three prompts on a fresh cache of full attention and `group`, one after
# another, each ended before the next one starts. They share their first `num_shared` tokens and have 13 of their own.
# Returns: how many tokens each of the three finds. `stage.found(tokens)` gives (hit, boundary); `stage.start(name, tokens)`
# and `stage.finish(name)` do the rest. Chunks end where V1's scheduler ends them.
#
# Then read from the table: which is the first request (1, 2 or 3) that finds all 20 shared tokens? And which states can be
# found after a prompt of 13 tokens that was computed in these chunks, blocks of two? (A list of lengths in tokens.)


# %% task="13.7"
def three_hits(group, retention, num_shared):
    """How many tokens each of three prompts with a shared beginning finds."""
    stage = GroupStage(200, full(4), group, retention=retention, snapshots=False)
    ### BEGIN SOLUTION
    hits = []
    for number in (1, 2, 3):
        prompt = [*range(num_shared), *range(1000 * number, 1000 * number + 13)]
        hits.append(stage.found(prompt)[0])
        stage.start(str(number), prompt)
        stage.finish(str(number))
    return hits
    ### END SOLUTION


# %% tags=["raises-exception"]
rows = [
    (name, kept, three_hits(group, retention, 20))
    for name, group in (("window of 8", window(4, 8)), ("state", states(4)))
    for kept, retention in (("dense", None), ("0", 0), ("16", 16))
]
viz.Table(("beside full attention", "retention", "hits"), rows)

# %% task="13.7"
### BEGIN SOLUTION stub: first_with_all_20 = {"window, dense": ..., "window, 0": ..., "window, 16": ..., "state, dense": ...}
first_with_all_20 = {"window, dense": 2, "window, 0": 3, "window, 16": 3, "state, dense": 3}
### END SOLUTION
### BEGIN SOLUTION stub: states_left = {"6, 6, 1": ..., "12, 1": ..., "4, 4, 4, 1": ...}
states_left = {"6, 6, 1": [6, 12], "12, 1": [12], "4, 4, 4, 1": [4, 8, 12]}
### END SOLUTION

# %%
check("13.7", three_hits, first_with_all_20, states_left)

# %% [markdown]
# (your-engine)=
# ## The engine on your part
#
# The shipped hybrid model has full attention, a window of 32 tokens and layers with a state. Six prompts that share their
# first 64 tokens, one after another, on the reference and on your coordinator: the same tokens, the same hits.

# %% tags=["raises-exception"]
prompts = [[*range(300, 364), *range(100 + 30 * i, 130 + 30 * i)] for i in range(6)]


def run(parts=None):
    llm = LLM("tiny-hybrid", block_size=16, num_blocks=200, parts=parts)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    outputs = [llm.generate(prompt, params)[0] for prompt in prompts]
    return [output.token_ids for output in outputs], [output.num_cached_tokens for output in outputs]


reference, own = run(), run({"coordinator": Agree})
for what, theirs, yours in zip(("tokens", "hits"), reference, own, strict=True):
    print(f"{what}: {'the same' if theirs == yours else f'{yours} instead of {theirs}'}")
print(reference[1])

# %% [markdown]
# And vLLM's recorded decisions, replayed on it. Every answer of every lookup is compared, the boundary included:

# %% tags=["raises-exception"]
for name in GROUP_TRACES:
    print(replay(name, {"coordinator": Agree}))

# %% [markdown]
# In a terminal, `refengine demo --model tiny-hybrid --parts exercises/13_several_groups_one_hit.ipynb` runs the demo on
# your coordinator. Return 0 as the boundary, save, and see what the third question finds.
