# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown]
# # 00 Start here: one request, six marks
#
# Seven short tasks to [chapter 00](../chapters/00_start_here.ipynb). Write into the cells that say `...` or raise
# `NotImplementedError`, run them, and run the cell with `check` below each. A hint comes from the terminal:
# `refengine hint 00.1`.

# %% tags=["setup"]
from time import perf_counter

from exercises import check
from refengine import LLM, SamplingParams
from refengine.trace.record import Recorder

# %% [markdown]
# (task-1)=
# ## 00.1 How long is the hit?
#
# **Why it matters.** "Same prompt again, hit rate 0" is the most frequent question about prefix caching, and nearly
# every answer to it is a multiple of the block size.
#
# Blocks hold 4 tokens. A first request has come and gone and left all its full blocks in the cache. Now three others
# arrive. Each has 19 tokens; the first of them begins with the same 14 tokens as the old one and then differs, the
# second with the same 16, the third with the same 3. How many of their tokens does the lookup report as computed?

# %% task="00.1"
### BEGIN SOLUTION stub: hit_14 = ...
hit_14 = 12
### END SOLUTION
### BEGIN SOLUTION stub: hit_16 = ...
hit_16 = 16
### END SOLUTION
### BEGIN SOLUTION stub: hit_3 = ...
hit_3 = 0
### END SOLUTION

# %%
check("00.1", hit_14, hit_16, hit_3)

# %% [markdown]
# (task-2)=
# ## 00.2 Which marks, in which order?
#
# **Why it matters.** Most wrong ideas about an engine are about *when*. Whoever knows which marks a step leaves, and
# in which order, can answer "when is the cache asked?" without reading code.
#
# Blocks hold 4 tokens, the cache is empty, and a request of 10 tokens arrives. Write the names of the marks it leaves
# in its first step and in its second step, in order. The names are `"lookup"`, `"admit"`, `"allocate"`, `"publish"`,
# `"run"`, `"append"`.

# %% task="00.2"
### BEGIN SOLUTION stub: first_step = [...]
first_step = ["lookup", "admit", "allocate", "publish", "run", "append"]
### END SOLUTION
### BEGIN SOLUTION stub: second_step = [...]
second_step = ["allocate", "run", "append"]
### END SOLUTION

# %%
check("00.2", first_step, second_step)

# %% [markdown]
# (task-3)=
# ## 00.3 Who decides, who skips?
#
# **Why it matters.** This is the question the book is built around. Somebody who looks for the skipping in the wrong
# file of the wrong generation does not find it there, however long the search.
#
# Write the names of four functions of vLLM. One per question and generation, for example `"BlockPool.touch"` or only
# `"touch"`. Where several functions have a part in the decision, any of them is right. Your answer is compared with the
# [map of vLLM's code](../refengine/trace/codemap/v1.json) that this book uses.

# %% task="00.3"
### BEGIN SOLUTION stub: decides_in_v1 = ...
decides_in_v1 = "KVCacheManager.get_computed_blocks"
### END SOLUTION
### BEGIN SOLUTION stub: skips_in_v1 = ...
skips_in_v1 = "Scheduler.schedule"
### END SOLUTION
### BEGIN SOLUTION stub: decides_in_v0 = ...
decides_in_v0 = "ComputedBlocksTracker.get_num_cached_tokens"
### END SOLUTION
### BEGIN SOLUTION stub: skips_in_v0 = ...
skips_in_v0 = "ModelInputForGPUBuilder._compute_for_prefix_cache_hit"
### END SOLUTION

# %%
check("00.3", decides_in_v1, skips_in_v1, decides_in_v0, skips_in_v0)

# %% [markdown]
# (task-4)=
# ## 00.4 What is left to compute
#
# **Why it matters.** A prompt that is cached to its last token must still leave work to do, or there is nothing to
# sample from. Engines have crashed on this line, and one that gave back a single token broke its own blocks.
#
# Write V1's rule. `num_cached` is how many leading tokens of the request lie in cached blocks, always whole blocks, and
# perhaps all of the request. Return how many tokens the step has to compute.


# %% task="00.4"
def tokens_to_compute(num_tokens, num_cached, block_size):
    """Tokens that are left to compute: at least one, and the skipped ones are whole blocks."""
    ### BEGIN SOLUTION
    usable = min(num_cached, num_tokens - 1)
    hit = usable // block_size * block_size
    return num_tokens - hit
    ### END SOLUTION


# %%
check("00.4", tokens_to_compute)

# %% [markdown]
# (task-5)=
# ## 00.5 Find the bug: a hit rate that flatters
#
# **Why it matters.** A hit rate is the number on the dashboard. This one reports 50 % for an engine that found 2 % of
# what it was asked for.
#
# `hit_rate` gets one pair `(tokens of the request, tokens found)` per request and should say which share of *all tokens
# that were looked up* was found; 0.0 if nothing was looked up. Find out what it does instead, and repair it.


# %% task="00.5"
def hit_rate(lookups):
    """Share of all tokens looked up that were found, 0 to 1."""
    ### BEGIN SOLUTION
    looked_up = sum(num_tokens for num_tokens, _ in lookups)
    found = sum(num_found for _, num_found in lookups)
    return found / looked_up if looked_up else 0.0
    ### INSTEAD
    # if not lookups:
    #     return 0.0
    # rates = [num_found / num_tokens for num_tokens, num_found in lookups]
    # return sum(rates) / len(rates)
    ### END SOLUTION


# %%
hit_rate([(1000, 0), (20, 20)])

# %%
check("00.5", hit_rate)

# %% [markdown]
# (task-6)=
# ## 00.6 Measure what the cache saves
#
# **Why it matters.** "I switched it on and it is not faster" has an answer in tokens, and tokens can be counted on any
# machine.
#
# Four requests begin with the same 44 tokens and go on with 6 of their own. `computed_tokens` runs them one after the
# other, lets each sample one token, and should return how many tokens the model computed in all. The record has a mark
# for it. Complete the function, run it in the three set-ups below, and write down what it returns. Before you run:
# which of the last two numbers is smaller, and by how much per request?

# %% tags=["setup"]
shared = list(range(100, 144))
prompts = [shared + [200 + 10 * i + j for j in range(6)] for i in range(4)]


# %% task="00.6"
def computed_tokens(block_size, caching):
    """Runs all prompts on a fresh engine. Returns: tokens that the model computed, all steps together."""
    recorder = Recorder()
    llm = LLM("tiny", block_size=block_size, num_blocks=80, enable_prefix_caching=caching, observer=recorder)
    for prompt in prompts:
        llm.generate([prompt], SamplingParams(max_tokens=1))
    ### BEGIN SOLUTION
    runs = [mark for _, mark in recorder.record.marks() if mark.kind == "run"]
    return sum(mark.facts["num_tokens"] for mark in runs)
    ### END SOLUTION


### BEGIN SOLUTION stub: without_cache = ...  # computed_tokens(block_size=4, caching=False)
without_cache = computed_tokens(block_size=4, caching=False)
### END SOLUTION
### BEGIN SOLUTION stub: blocks_of_4 = ...  # computed_tokens(block_size=4, caching=True)
blocks_of_4 = computed_tokens(block_size=4, caching=True)
### END SOLUTION
### BEGIN SOLUTION stub: blocks_of_16 = ...  # computed_tokens(block_size=16, caching=True)
blocks_of_16 = computed_tokens(block_size=16, caching=True)
### END SOLUTION

# %%
check("00.6", without_cache, blocks_of_4, blocks_of_16)

# %% [markdown]
# The time to the first token follows the count, less what every step costs anyway. This cell shows it on your machine;
# it is not graded.

# %% tags=["volatile"]
for caching in (False, True):
    llm = LLM("tiny", block_size=4, num_blocks=80, enable_prefix_caching=caching)
    llm.generate([prompts[0]], SamplingParams(max_tokens=1))
    began = perf_counter()
    llm.generate(prompts[1:], SamplingParams(max_tokens=1))
    print(f"caching {caching}: {1000 * (perf_counter() - began):.1f} ms for three first tokens")

# %% [markdown]
# (task-7)=
# ## 00.7 Your first part: the token that joins
#
# **Why it matters.** The last mark of a step needs a token. The slot `sampler` decides which one, and from here on the
# engine can run on yours.
#
# `logits` is a tensor `[n, vocab_size]`, one row per request that is ready; `params` and `generators` have one entry
# per row and are not needed here. Return the index of the largest number of each row, as a tensor `[n]`.


# %% task="00.7" part="sampler" name="greedy"
def greedy(logits, params, generators):
    """The best token of each row."""
    ### BEGIN SOLUTION
    return logits.argmax(dim=-1)
    ### END SOLUTION


# %%
check("00.7", greedy)

# %% [markdown]
# The engine on your part, beside the engine on its own. If the two lines differ, or the second one is an error that
# names your part, 00.7 is not done yet.

# %% tags=["raises-exception"]
for parts in ({}, {"sampler": greedy}):
    llm = LLM("tiny", parts=parts)
    print(llm.generate(["Q: What is a KV block?\nA:"], SamplingParams(max_tokens=32, stop="\n"))[0].text)

# %% [markdown]
# Save this notebook and try it in a terminal: `refengine check 00`, then `refengine progress`, then
# `refengine demo --parts mine`. [Chapter 01](../chapters/01_blocks_tables_slots.ipynb) goes on.
