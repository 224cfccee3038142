# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown]
# # 01 Blocks, tables, slots
#
# Eight tasks to [chapter 01](../chapters/01_blocks_tables_slots.ipynb). The fifth one goes into the engine. A hint
# comes from the terminal: `refengine hint 01.1`.

# %% tags=["setup"]
from types import SimpleNamespace

from exercises import check
from refengine import LLM, SamplingParams, viz
from refengine.trace.record import Recorder

# %% [markdown]
# (task-1)=
# ## 01.1 The slot mapping of a step
#
# **Why it matters.** This is the list by which every new key and value finds its place. One wrong entry, and a request
# writes into the cache of another one.
#
# A step computes `num_tokens` tokens of a request, beginning at position `start`. Return their slots, in order.


# %% task="01.1"
def slot_mapping(block_table, start, num_tokens, block_size):
    """One slot for each of the positions start, start + 1, ..."""
    ### BEGIN SOLUTION
    slots = []
    for position in range(start, start + num_tokens):
        block = block_table[position // block_size]
        slots.append(block * block_size + position % block_size)
    return slots
    ### END SOLUTION


# %%
check("01.1", slot_mapping)

# %% [markdown]
# (task-2)=
# ## 01.2 How many requests fit
#
# **Why it matters.** Whoever buys the machine asks this first, and the usual formulas are wrong by a factor.
#
# `bytes_per_block`: keys and values of all layers for one block of tokens. `blocks_for`: blocks that a request of
# `num_tokens` tokens takes. `requests_that_fit`: how many such requests hold their blocks at the same time, sharing
# nothing, in a pool of `num_blocks` blocks as V1 counts them, the null block included.


# %% task="01.2"
def bytes_per_block(block_size, num_layers, num_heads, num_kv_heads, head_dim, bytes_per_number):
    """Not every argument is needed."""
    ### BEGIN SOLUTION
    return 2 * block_size * num_layers * num_kv_heads * head_dim * bytes_per_number
    ### END SOLUTION


def blocks_for(num_tokens, block_size):
    ### BEGIN SOLUTION
    return (num_tokens + block_size - 1) // block_size
    ### END SOLUTION


def requests_that_fit(num_blocks, num_tokens, block_size):
    ### BEGIN SOLUTION
    return (num_blocks - 1) // blocks_for(num_tokens, block_size)
    ### END SOLUTION


# %%
check("01.2", bytes_per_block, blocks_for, requests_that_fit)

# %% [markdown]
# (task-3)=
# ## 01.3 Say the tables before you see them
#
# **Why it matters.** A block table in a log or a debugger is readable only to those who know why its numbers jump.
#
# V1, blocks of 4 tokens, an empty pool whose free queue is 1, 2, 3, ... Two requests arrive together, A with 6 tokens
# and then B with 9. Both run in every step: in step 0 their prompts, in steps 1 to 4 one token each, A always before B.
# Nothing is shared and nobody ends.
#
# After step 4: what are the two block tables? In which slot lie the K/V of A's position 9, and in which those of B's
# position 12?

# %% task="01.3"
### BEGIN SOLUTION stub: table_a = [...]
table_a = [1, 2, 6]
### END SOLUTION
### BEGIN SOLUTION stub: table_b = [...]
table_b = [3, 4, 5, 7]
### END SOLUTION
### BEGIN SOLUTION stub: slot_a = ...
slot_a = 25
### END SOLUTION
### BEGIN SOLUTION stub: slot_b = ...
slot_b = 28
### END SOLUTION

# %%
check("01.3", table_a, table_b, slot_a, slot_b)

# %% [markdown]
# Now look:

# %%
recorder = Recorder(snapshots=True)
llm = LLM("tiny", block_size=4, num_blocks=12, observer=recorder)
two = [list(range(10, 16)), list(range(40, 49))]
llm.generate(two, SamplingParams(max_tokens=6, ignore_eos=True), request_ids=["A", "B"])
viz.pool_picture(viz.states(recorder.record)[4])

# %% [markdown]
# (task-4)=
# ## 01.4 Find the bug: may this request take its next step?
#
# **Why it matters.** Ten public threads ask about this one line. Wrong in one direction it stops a request for nothing,
# wrong in the other it writes into a block that belongs to somebody else.
#
# `num_tokens` is the length of the request as the scheduler sees it: the token sampled in the last step is counted
# already, and its K/V are what the coming step writes. The request holds `num_held` blocks, `num_free` are free.


# %% task="01.4"
def may_decode(num_tokens, num_held, num_free, block_size):
    """Whether there is a slot for the request's next step."""
    ### BEGIN SOLUTION
    num_needed = (num_tokens + block_size - 1) // block_size
    return num_needed - num_held <= num_free
    ### INSTEAD
    # needs_block = num_tokens % block_size == 0
    # return num_free >= 1 if needs_block else True
    ### END SOLUTION


# %%
for num_tokens, num_held in ((8, 2), (9, 2), (10, 3)):
    print(num_tokens, "tokens,", num_held, "blocks held, none free:", may_decode(num_tokens, num_held, 0, 4))

# %%
check("01.4", may_decode)

# %% [markdown]
# (task-5)=
# ## 01.5 Find the bug: padding that hits somebody
#
# **Why it matters.** A stray write into the cache raises nothing. Some other request reads it, answers nonsense, and
# the search begins at the wrong end.
#
# `write_kv` is the operation `reshape_and_cache` in PyTorch. `key` and `value` are
# `[num_tokens, num_kv_heads, head_dim]`, the caches `[num_blocks, block_size, num_kv_heads, head_dim]`, and
# `slot_mapping` is int64 `[num_tokens]`. It writes in place and returns nothing. For a token whose slot is -1 it should
# write nothing at all. Find out where it writes instead, and repair it. Padding may stand anywhere in the list.
#
# `writer` makes the function a part of the engine; leave it as it is.


# %% task="01.5" part="attention" name="writer"
def write_kv(key, value, key_cache, value_cache, slot_mapping):
    """Writes each token's key and value into its slot; a slot of -1 writes nothing."""
    block_size = key_cache.shape[1]
    ### BEGIN SOLUTION
    kept = slot_mapping >= 0
    key, value, slots = key[kept], value[kept], slot_mapping[kept]
    blocks, offsets = slots // block_size, slots % block_size
    ### INSTEAD
    # blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    ### END SOLUTION
    key_cache[blocks, offsets] = key
    value_cache[blocks, offsets] = value


writer = SimpleNamespace(__name__="writer", reshape_and_cache=write_kv)

# %%
check("01.5", write_kv)

# %% [markdown]
# The engine on its own, then on your writer: every key and value of the second answer went through your function.

# %%
for parts in ({}, {"attention": writer}):
    llm = LLM("tiny", parts=parts)
    print(llm.generate(["Q: What is a slot?\nA:"], SamplingParams(max_tokens=32, stop="\n"))[0].text)

# %% [markdown]
# (task-6)=
# ## 01.6 Measure what block size costs
#
# **Why it matters.** "Why not larger blocks?" has a price in slots, and it can be read off the record of a run.
#
# Eight requests of the lengths below run at once. `wasted_slots` should return how many slots their blocks have after
# step 0 that hold no token. Complete it, run it for three block sizes, and compute from your last number which share of
# the slots held is wasted with blocks of 64, between 0 and 1. Guess first: about how many slots per request?

# %% tags=["setup"]
lengths = [5, 17, 30, 64, 100, 3, 41, 8]
eight = [[i + 1] * length for i, length in enumerate(lengths)]


# %% task="01.6"
def wasted_slots(block_size):
    """Slots in the tables of all requests after step 0 that hold no token."""
    recorder = Recorder()
    llm = LLM("tiny", block_size=block_size, num_blocks=400, observer=recorder)
    llm.generate(eight, SamplingParams(max_tokens=2, ignore_eos=True))
    tables = recorder.record.steps[0].pool.tables  # request -> [its block table]
    ### BEGIN SOLUTION
    num_blocks = sum(len(table) for (table,) in tables.values())
    return num_blocks * block_size - sum(lengths)
    ### END SOLUTION


### BEGIN SOLUTION stub: wasted_4 = ...  # wasted_slots(4)
wasted_4 = wasted_slots(4)
### END SOLUTION
### BEGIN SOLUTION stub: wasted_16 = ...  # wasted_slots(16)
wasted_16 = wasted_slots(16)
### END SOLUTION
### BEGIN SOLUTION stub: wasted_64 = ...  # wasted_slots(64)
wasted_64 = wasted_slots(64)
### END SOLUTION
### BEGIN SOLUTION stub: share_64 = ...
share_64 = wasted_64 / (wasted_64 + sum(lengths))
### END SOLUTION

# %%
check("01.6", wasted_4, wasted_16, wasted_64, share_64)

# %% [markdown]
# (task-7)=
# ## 01.7 Where is it, and which index is which?
#
# **Why it matters.** Reading the first index of the cache as a position is a classic, and so is looking for V0's code
# in a file of V1.
#
# Put the words `"block"`, `"element"` (one number of a key), `"KV head"`, `"offset in block"` into the order of the four
# indices of `key_cache`. Then write the name of the class that is V0's block table, and of the functions that turn
# positions into slots, one per generation. And the id of the very first block that vLLM hands out to a request, in V0
# (0.7.3) and in V1 (0.33.0).

# %% task="01.7"
### BEGIN SOLUTION stub: indices = [..., ..., ..., ...]
indices = ["block", "offset in block", "KV head", "element"]
### END SOLUTION
### BEGIN SOLUTION stub: table_in_v0 = ...
table_in_v0 = "BlockTable"
### END SOLUTION
### BEGIN SOLUTION stub: slots_in_v0 = ...
slots_in_v0 = "compute_slot_mapping"
### END SOLUTION
### BEGIN SOLUTION stub: slots_in_v1 = ...
slots_in_v1 = "BlockTables.compute_slot_mappings"
### END SOLUTION
### BEGIN SOLUTION stub: first_id_v0 = ...
first_id_v0 = 0
### END SOLUTION
### BEGIN SOLUTION stub: first_id_v1 = ...
first_id_v1 = 1
### END SOLUTION

# %%
check("01.7", indices, table_in_v0, slots_in_v0, slots_in_v1, first_id_v0, first_id_v1)

# %% [markdown]
# (task-8)=
# ## 01.8 Find the bug: two block sizes
#
# **Why it matters.** A manager may count in large blocks while the kernel counts in small ones. Both name the same
# memory, and whoever divides by the wrong size reads a neighbour. This one was found in public.
#
# The manager's blocks hold `manager_size` tokens, a multiple of the kernel's `kernel_size`. Manager block 3 of 8 tokens
# is the kernel's blocks 6 and 7 of 4 tokens. Return the kernel's block and the offset in it for the token at `offset`
# of `manager_block`.


# %% task="01.8"
def kernel_place(manager_block, offset, manager_size, kernel_size):
    """(kernel block, offset in it) of a token that the manager has in `manager_block` at `offset`."""
    slot = manager_block * manager_size + offset
    ### BEGIN SOLUTION
    return slot // kernel_size, slot % kernel_size
    ### INSTEAD
    # return slot // manager_size, slot % manager_size
    ### END SOLUTION


# %%
check("01.8", kernel_place)

# %% [markdown]
# Save the notebook and run `refengine check 01`. Then `refengine demo --parts mine`: the cache of the demo is written
# by you. [Chapter 02](../chapters/02_what_identifies_a_block.ipynb) goes on.
