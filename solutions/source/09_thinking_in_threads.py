# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown]
# # 09 Thinking in threads
#
# Eleven puzzles to [chapter 09](../chapters/09_thinking_in_threads.ipynb). Write into the cells that say `...` or raise
# `NotImplementedError`, run them, and run the cell with `check` below each. A hint comes from the terminal:
# `refengine hint 09.1`.
#
# Kernels run in the interpreter, under three schedules. A check wants the right values and nothing else touched; no race,
# no wrong index, no barrier that only some threads reach; and for some puzzles a budget, which the result shows beside what
# you used and the least that is possible. Sizes are never a multiple of anything. Numbers are float32, and
# `float32(0)` begins a sum in float32. What no check looks at: whether it compiles for a GPU, and how fast it is there.

# %% tags=["setup"]
import math

import torch
from numba import cuda, float32

from exercises import check
from exercises.tasks.ex08_scene import make_pages
from exercises.tasks.ex09_scene import cost_table, measured, writing_with
from exercises.tasks.kernel_checks import distinct, unwritten
from kernels.interpreter import interpret
from refengine import LLM, SamplingParams

# %% [markdown]
# (task-1)=
# ## 09.1 Count before you run
#
# **Why it matters.** How many blocks, how many sectors, how many passes: these numbers are known before a kernel runs, and
# they decide most of what it costs.
#
# - 100 positions, one thread each, 32 threads per block: `blocks` that are launched, and `idle` threads without a position.
# - A warp reads float32 numbers of an array in global memory that starts at a sector. Lane t reads the number t; 31 - t; 2 t;
#   16 t; 0. `sectors` that each of the five requests touches.
# - The same five, with 33 t in place of 16 t, in shared memory: `passes` over the banks that each needs.
# - 64 threads halve their numbers in a tree, with a barrier after the numbers were put down and one after every step.
#   `barriers` of a block.

# %% task="09.1"
### BEGIN SOLUTION stub: blocks, idle = ..., ...
blocks, idle = 4, 28
### END SOLUTION
### BEGIN SOLUTION stub: sectors = [...]  # t, 31 - t, 2 t, 16 t, 0
sectors = [4, 4, 8, 32, 1]
### END SOLUTION
### BEGIN SOLUTION stub: passes = [...]  # t, 31 - t, 2 t, 33 t, 0
passes = [1, 1, 2, 1, 1]
### END SOLUTION
### BEGIN SOLUTION stub: barriers = ...
barriers = 7
### END SOLUTION

# %%
check("09.1", blocks, idle, sectors, passes, barriers)

# %% [markdown]
# (task-2)=
# ## 09.2 One thread, one position
#
# **Why it matters.** In V1 a kernel computes the slot mapping. In V0 it was a loop in Python.
#
# `slots[p]` is the slot of position p: chapter 01's `table[p // block_size] * block_size + p % block_size`. One thread per
# position, in as many blocks as it takes. `block_table` holds anything behind the end of the sequence.


# %% task="09.2"
@cuda.jit
def slots_of(slots, block_table, block_size):
    """slots [num_tokens]; block_table [max_blocks]. Mutates: slots."""
    ### BEGIN SOLUTION
    position = cuda.grid(1)
    if position < slots.shape[0]:
        block = block_table[position // block_size]
        slots[position] = block * block_size + position % block_size
    ### END SOLUTION


# %% [markdown]
# Ten positions, blocks of four, three blocks of threads.

# %% tags=["raises-exception"]
slots = unwritten(10, dtype=torch.int64)
with interpret():
    slots_of[3, 4](slots, torch.tensor([7, 2, 5]), 4)
slots.tolist()

# %%
check("09.2", slots_of)

# %% [markdown]
# (task-3)=
# ## 09.3 Write into slots, and not for -1
#
# **Why it matters.** -1 marks a row that belongs to nobody. Used as an index it is the last slot of the last block, which
# is somebody's.
#
# Row t of `new` goes to slot `slot_mapping[t]` of `cache`, unless that is -1. Every other number of the cache stays as it is.
# The launch has two dimensions: x for the numbers of a row, y for the tokens, both with threads to spare.


# %% task="09.3"
@cuda.jit
def write_slots(cache, new, slot_mapping):
    """cache [num_slots, row]; new [num_tokens, row]; slot_mapping [num_tokens]. Mutates: cache."""
    ### BEGIN SOLUTION
    i, token = cuda.grid(2)
    if token < new.shape[0] and i < new.shape[1]:
        slot = slot_mapping[token]
        if slot >= 0:
            cache[slot, i] = new[token, i]
    ### END SOLUTION


# %% [markdown]
# Three blocks of four slots, two tokens.

# %% tags=["raises-exception"]
cache = torch.zeros(12, 1)
with interpret():
    write_slots[(1, 1), (32, 4)](cache, torch.tensor([[10.0], [99.0]]), torch.tensor([5, -1]))
cache.flatten().tolist()

# %%
check("09.3", write_slots)

# %% [markdown]
# (task-4)=
# ## 09.4 Which thread reads what
#
# **Why it matters.** This kernel is right, and moves eight times the memory that it uses.
#
# `gather_rows` copies `out[t] = cache[slots[t]]` for all tokens. It gives each thread a token. Run it, look at the column
# `sectors`, and hand out the work in another way, so that neighbouring threads read neighbouring numbers. The launch is
# `[3, 32]` in any case: 96 threads, 70 tokens of 40 numbers.


# %% task="09.4"
@cuda.jit
def gather_rows(out, cache, slots):
    """out [num_tokens, row]; cache [num_slots, row]; slots [num_tokens]. Mutates: out."""
    ### BEGIN SOLUTION
    warp, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    for token in range(warp, out.shape[0], cuda.gridsize(1) // 32):
        for i in range(lane, out.shape[1], 32):
            out[token, i] = cache[slots[token], i]
    ### INSTEAD
    # token = cuda.grid(1)
    # if token < out.shape[0]:
    #     for i in range(out.shape[1]):
    #         out[token, i] = cache[slots[token], i]
    ### END SOLUTION


# %%
with interpret() as report:
    gather_rows[3, 32](unwritten(70, 40), distinct(100, 40), torch.arange(70) + 30)
cost_table(report)

# %%
check("09.4", gather_rows)

# %% [markdown]
# (task-5)=
# ## 09.5 Measure it: sectors
#
# **Why it matters.** A formula that agrees with the counter is one you can use at a design table, before there is a kernel.
#
# Lane t of a warp reads the number at `first + step * t` of an array that starts at a sector. Write how many sectors that
# is, for numbers of `itemsize` bytes. `measured` asks the interpreter. Then: from which step on does every lane have a
# sector of its own, for numbers of 4 bytes and of 2?


# %% task="09.5"
def sectors_of(first, step, itemsize):
    """32-byte sectors that a warp touches."""
    ### BEGIN SOLUTION
    return len({(first + step * lane) * itemsize // 32 for lane in range(32)})
    ### END SOLUTION


# %%
tried = ((0, 1), (1, 1), (0, 3), (5, 7))  # first, step
[(first, step, measured(first, step, torch.float32)) for first, step in tried]

# %% task="09.5"
### BEGIN SOLUTION stub: alone_4, alone_2 = ..., ...
alone_4, alone_2 = 8, 16
### END SOLUTION

# %%
check("09.5", sectors_of, alone_4, alone_2)

# %% [markdown]
# (task-6)=
# ## 09.6 A tile in between
#
# **Why it matters.** V0 kept its keys in a layout of their own. Whoever turns one layout into the other reads along rows and writes
# along columns, and one of the two is scattered, unless a tile of shared memory stands in between.
#
# `out[d, t] = keys[t, d]`, in blocks of 32 x 32 threads; x of the grid goes over the numbers of a key, y over the tokens. Both arrays
# in the fewest sectors, and no bank conflict. The guards of the reading and of the writing differ.


# %% task="09.6"
@cuda.jit
def transpose(out, keys):
    """out [head_dim, num_tokens]; keys [num_tokens, head_dim]. Mutates: out."""
    ### BEGIN SOLUTION
    tile = cuda.shared.array((32, 33), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    first_dim, first_token = cuda.blockIdx.x * 32, cuda.blockIdx.y * 32
    if first_token + y < keys.shape[0] and first_dim + x < keys.shape[1]:
        tile[y, x] = keys[first_token + y, first_dim + x]
    cuda.syncthreads()
    if first_dim + y < out.shape[0] and first_token + x < out.shape[1]:
        out[first_dim + y, first_token + x] = tile[x, y]
    ### END SOLUTION


# %% tags=["raises-exception"]
with interpret() as report:
    transpose[(2, 2), (32, 32)](unwritten(40, 40), distinct(40, 40))
cost_table(report)

# %%
check("09.6", transpose)

# %% [markdown]
# (task-7)=
# ## 09.7 Find the bug: a softmax that is sometimes right
#
# **Why it matters.** Below it gives the right weights, with rows of 64 scores and this order of threads. It has two faults, and
# whether they show on a GPU depends on the day.
#
# One block of 64 threads per row; a row has at most 64 scores. Make it right for every order of threads, and for every row.


# %% task="09.7"
@cuda.jit
def softmax_rows(weights, scores):
    """weights, scores [num_rows, n], n <= 64. Mutates: weights."""
    scratch = cuda.shared.array(64, float32)
    row, thread, n = cuda.blockIdx.x, cuda.threadIdx.x, scores.shape[1]
    ### BEGIN SOLUTION
    score = scores[row, thread] if thread < n else float32(-math.inf)
    ### INSTEAD
    # if thread >= n:
    #     return
    # score = scores[row, thread]
    ### END SOLUTION
    scratch[thread] = score
    cuda.syncthreads()
    half = 32
    while half > 0:
        if thread < half:
            scratch[thread] = max(scratch[thread], scratch[thread + half])
        cuda.syncthreads()
        half //= 2
    ### BEGIN SOLUTION
    largest = scratch[0]
    cuda.syncthreads()
    weight = math.exp(score - largest)
    ### INSTEAD
    # weight = math.exp(score - scratch[0])
    ### END SOLUTION
    scratch[thread] = weight
    cuda.syncthreads()
    half = 32
    while half > 0:
        if thread < half:
            scratch[thread] += scratch[thread + half]
        cuda.syncthreads()
        half //= 2
    ### BEGIN SOLUTION
    if thread < n:
        weights[row, thread] = weight / scratch[0]
    ### INSTEAD
    # weights[row, thread] = weight / scratch[0]
    ### END SOLUTION


# %% tags=["raises-exception"]
scores, weights = distinct(3, 64) / 20, unwritten(3, 64)
with interpret("reverse", races=False):
    softmax_rows[3, 64](weights, scores)
torch.allclose(weights, scores.softmax(1))

# %%
check("09.7", softmax_rows)

# %% [markdown]
# (task-8)=
# ## 09.8 A block agrees on two numbers
#
# **Why it matters.** A softmax needs the largest score of a row and a sum over it. A row is longer than a block has threads.
#
# One block of 64 threads per row, rows of any length. Put the largest number of a row into `largest[row]` and the sum of the row into
# `total[row]`. Budgets: at most log2(64) + 1 barriers per block, no bank conflict, and `scores` in the fewest sectors.


# %% task="09.8"
@cuda.jit
def row_stats(largest, total, scores):
    """largest, total [num_rows]; scores [num_rows, n]. Mutates: largest, total."""
    ### BEGIN SOLUTION
    tops = cuda.shared.array(64, float32)
    sums = cuda.shared.array(64, float32)
    row, thread = cuda.blockIdx.x, cuda.threadIdx.x
    top, sum_ = float32(-math.inf), float32(0)
    for i in range(thread, scores.shape[1], 64):
        score = scores[row, i]
        top, sum_ = max(top, score), sum_ + score
    tops[thread], sums[thread] = top, sum_
    cuda.syncthreads()
    half = 32
    while half > 0:
        if thread < half:
            tops[thread] = max(tops[thread], tops[thread + half])
            sums[thread] += sums[thread + half]
        cuda.syncthreads()
        half //= 2
    if thread == 0:
        largest[row], total[row] = tops[0], sums[0]
    ### END SOLUTION


# %% tags=["raises-exception"]
largest, total = unwritten(2), unwritten(2)
with interpret() as report:
    row_stats[2, 64](largest, total, -distinct(2, 100))
print(largest.tolist(), total.tolist(), report.barriers, "barriers in 2 blocks")

# %%
check("09.8", row_stats)

# %% [markdown]
# (task-9)=
# ## 09.9 A warp agrees without memory
#
# **Why it matters.** The product of a query with a key is what attention does most. A warp can do one with no shared memory and no
# barrier.
#
# `scores[k]` is the product of `query` with row k of `keys`. One warp per key: warp w of the whole grid has key w, and the last ones have
# none. A row has more numbers than a warp has lanes. The lanes add up by `cuda.shfl_xor_sync(0xFFFFFFFF, x, distance)`.


# %% task="09.9"
@cuda.jit
def dot_products(scores, query, keys):
    """scores [num_keys]; query [head_dim]; keys [num_keys, head_dim]. Mutates: scores."""
    ### BEGIN SOLUTION
    key, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if key < keys.shape[0]:
        x = float32(0)
        for d in range(lane, keys.shape[1], 32):
            x += query[d] * keys[key, d]
        distance = 16
        while distance > 0:
            x += cuda.shfl_xor_sync(0xFFFFFFFF, x, distance)
            distance //= 2
        if lane == 0:
            scores[key] = x
    ### END SOLUTION


# %% tags=["raises-exception"]
scores, query, keys = unwritten(10), distinct(40) / 10, distinct(10, 40) / 100
with interpret() as report:
    dot_products[3, 128](scores, query, keys)
print(torch.allclose(scores, keys @ query), report.shuffles, "shuffles")

# %%
check("09.9", dot_products)

# %% [markdown]
# (task-10)=
# ## 09.10 A softmax in one pass
#
# **Why it matters.** Two passes read everything twice. Chapter 08 folded scores tile by tile; here each lane folds its own, and at the
# end the lanes fold each other.
#
# One warp per row, as in 09.9. `largest[row]` is the largest score, `total[row]` the sum of `exp(score - largest)`. Read every score
# once, in the fewest sectors, and use no shared memory. Scores may be as large as 10,000 and as small as -10,000, and a row may have fewer scores than a warp has
# lanes. `LOWEST` lies below every score, and LOWEST - LOWEST is 0.

# %% tags=["setup"]
LOWEST = float32(-3.0e38)


# %% task="09.10"
@cuda.jit
def online_softmax(largest, total, scores):
    """largest, total [num_rows]; scores [num_rows, n]. Mutates: largest, total."""
    ### BEGIN SOLUTION
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < scores.shape[0]:
        top, sum_ = LOWEST, float32(0)
        for i in range(lane, scores.shape[1], 32):
            score = scores[row, i]
            above = max(top, score)
            sum_ = sum_ * math.exp(top - above) + math.exp(score - above)
            top = above
        distance = 16
        while distance > 0:
            other_top = cuda.shfl_xor_sync(0xFFFFFFFF, top, distance)
            other_sum = cuda.shfl_xor_sync(0xFFFFFFFF, sum_, distance)
            above = max(top, other_top)
            sum_ = sum_ * math.exp(top - above) + other_sum * math.exp(other_top - above)
            top = above
            distance //= 2
        if lane == 0:
            largest[row], total[row] = top, sum_
    ### END SOLUTION


# %% tags=["raises-exception"]
scores = torch.tensor([[10_000.0, 9_999.0, 9_000.0], [-10_000.0, -10_001.0, -9_999.5]])
largest, total = unwritten(2), unwritten(2)
with interpret():
    online_softmax[1, 64](largest, total, scores)
torch.allclose(largest + total.log(), scores.logsumexp(1))

# %%
check("09.10", online_softmax)

# %% [markdown]
# (task-11)=
# ## 09.11 Scores over pages
#
# **Why it matters.** It is the first half of a decode, and everything above is in it: slots, a guard, warps, sectors, shuffles.
#
# `scores[head, p]` is the product of the query of this head with the key at position p, times `scale`. The key lies in the pages;
# its KV head is that of the head's group (chapter 08). One warp per head and position: x of the grid goes over the positions, four
# in a block of 128 threads, and `cuda.blockIdx.y` is the head. The keys in the fewest sectors that one reading per head allows.


# %% task="09.11"
@cuda.jit
def paged_scores(scores, query, key_cache, block_table, scale):
    """scores [num_heads, seq_len]; query [num_heads, head_dim]; block_table [max_blocks].

    key_cache [num_blocks, block_size, num_kv_heads, head_dim]. Mutates: scores.
    """
    ### BEGIN SOLUTION
    position, head, lane = cuda.grid(1) // 32, cuda.blockIdx.y, cuda.threadIdx.x % 32
    if position < scores.shape[1]:
        block_size = key_cache.shape[1]
        block, offset = block_table[position // block_size], position % block_size
        kv_head = head // (query.shape[0] // key_cache.shape[2])
        x = float32(0)
        for d in range(lane, query.shape[1], 32):
            x += query[head, d] * key_cache[block, offset, kv_head, d]
        distance = 16
        while distance > 0:
            x += cuda.shfl_xor_sync(0xFFFFFFFF, x, distance)
            distance //= 2
        if lane == 0:
            scores[head, position] = x * scale
    ### END SOLUTION


# %% tags=["raises-exception"]
pages, scores = make_pages([(1, 10)], head_dim=40), unwritten(4, 10)
query, keys = pages.query[0], pages.keys[0].repeat_interleave(2, dim=1)
with interpret():
    paged_scores[(3, 4), 128](scores, query, pages.key_cache, pages.block_tables[0], pages.scale)
torch.allclose(scores, torch.einsum("hd,thd->ht", query, keys) * pages.scale, atol=1e-5)

# %%
check("09.11", paged_scores)

# %% [markdown]
# The budget is the least times the size of a group: its heads read the same keys, each for itself. Chapter 10 reads them once.

# %% [markdown]
# (your-engine)=
# ## The engine writes with your kernel
#
# `writing_with` is our reference, with its writing replaced: every layer of every step launches your `write_slots` in the
# interpreter. Two prompts that share a block, and the same tokens as ever.

# %% tags=["raises-exception"]
prompts = [[40, 41, 42, 43, 44], [40, 41, 42, 43, 60, 61]]
params = SamplingParams(max_tokens=3, ignore_eos=True)
options = {"block_size": 4, "num_blocks": 20}
expected = [out.token_ids for out in LLM("tiny", **options).generate(prompts, params)]
with interpret("random", seed=1) as report:
    mine = LLM("tiny", parts={"attention": writing_with(write_slots)}, **options)
    got = [out.token_ids for out in mine.generate(prompts, params)]
print("the same tokens:", got == expected, " launches:", report.launches)
