# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown]
# # 11 Split the keys
#
# Eight tasks to [chapter 11](../chapters/11_split_the_keys.ipynb). Write into the cells that say `...` or raise
# `NotImplementedError`, run them, and run the cell with `check` below each. A hint comes from the terminal:
# `refengine hint 11.1`. At the end the engine decodes on your two kernels.
#
# Kernels run in the interpreter, under three schedules. What no check looks at: whether they compile for a GPU, and how fast
# they are there. `float32(0)` begins a sum in float32.

# %% tags=["setup"]
import math

import torch
from numba import cuda, float32

from exercises import check
from exercises.tasks.ex08_scene import make_pages
from exercises.tasks.ex11_scene import cpu_work, measured, on_split, this_cpu
from exercises.tasks.kernel_checks import unwritten
from kernels.interpreter import KernelError, interpret
from refengine import LLM, SamplingParams, viz
from refengine.commands.bench_kernels import Point

# %% [markdown]
# (task-1)=
# ## 11.1 Count before you cut
#
# **Why it matters.** Whether splitting helps is known before anything runs: it depends on the number of blocks of
# threads and on the number of places for them.
#
# A GPU with 132 processors, each with room for 3 blocks of threads. A model with 32 query heads and 8 KV heads, `head_dim` 128,
# 2 bytes a number. A block of threads serves one sequence, one KV head and one split. One sequence of 32,768 tokens decodes.
#
# - `blocks` of threads without splitting, and `splits`: the largest number with which all blocks still run at once.
# - `num_bytes` of keys and values that one layer reads.
# - `floor_us`: the shortest time for this, in whole microseconds, rounded down, at 4.8 TB/s (4.8e12 bytes per second).
# - `waiting`: at this bandwidth, and if a byte arrives 0.8 microseconds after it was asked for, how many bytes must each processor
#   have asked for, at any moment? In whole bytes, rounded down.
# - `empty`: for 1, 8, 49 and 64 sequences of this length, without splitting: how many places have no block when the kernel starts?

# %% task="11.1"
### BEGIN SOLUTION stub: blocks, splits = ..., ...
blocks, splits = 8, 132 * 3 // 8
### END SOLUTION
### BEGIN SOLUTION stub: num_bytes = ...
num_bytes = 2 * 32768 * 8 * 128 * 2
### END SOLUTION
### BEGIN SOLUTION stub: floor_us = ...
floor_us = int(num_bytes / 4.8e12 * 1e6)
### END SOLUTION
### BEGIN SOLUTION stub: waiting = ...
waiting = int(4.8e12 * 0.8e-6 / 132)
### END SOLUTION
### BEGIN SOLUTION stub: empty = [...]
empty = [388, 332, 4, 0]
### END SOLUTION

# %%
check("11.1", blocks, splits, num_bytes, floor_us, waiting, empty)

# %% [markdown]
# (task-2)=
# ## 11.2 Build the merge
#
# **Why it matters.** The keys were cut, and each part was attended to alone. If the merge is right, nobody can tell from the
# result where the cuts were.
#
# `results[i]` is the attention over the keys of part i alone, with weights that sum to 1. `log_sums[i]` is the logarithm of the
# sum of the exponentials of its scores. A part without keys has -inf there, and *anything* in its results. Log sums may be as
# large as 1000 and as small as -1000.
#
# Return the attention over all keys, and its own log sum, so that what was merged can be merged again. If there is no key
# at all, return zeros and -inf.

# %% task="11.2"
def merge(results, log_sums):
    """results [num_parts, num_heads, head_dim], log_sums [num_parts, num_heads] -> ([num_heads, head_dim], [num_heads])."""
    ### BEGIN SOLUTION
    top = log_sums.amax(0)
    top = torch.where(top == -math.inf, 0.0, top)
    weights = (log_sums - top).exp()
    total = weights.sum(0)
    kept = torch.where((weights > 0)[..., None], results, 0.0)
    mixed = (weights[..., None] * kept).sum(0)
    share = torch.where(total > 0, total, 1.0)[:, None]
    return mixed / share, top + total.log()
    ### END SOLUTION


# %% [markdown]
# Scores 1 to 6 in parts of four and two, and the whole. Run it before you hand in.

# %% tags=["raises-exception"]
scores, values = torch.arange(1.0, 7.0), torch.arange(6.0)
cut = [slice(0, 4), slice(4, 6)]
parts = torch.stack([scores[part].softmax(0) @ values[part] for part in cut]).view(2, 1, 1)
sums = torch.stack([scores[part].logsumexp(0) for part in cut]).view(2, 1)
merged, log_sum = merge(parts, sums)
print("merged", round(float(merged), 4), " whole", round(float(scores.softmax(0) @ values), 4))

# %%
check("11.2", merge)

# %% [markdown]
# (task-3)=
# ## 11.3 Find the bug: who gets which keys
#
# **Why it matters.** It passed with 4096 tokens in 8 splits and with 1024 tokens in 4. At other lengths some answers are a little
# off, and nobody sees why.
#
# `shares` cuts a sequence for the splits of a decode: for each the position of its first key and the number of its keys. Every key
# belongs to exactly one split. A split begins a multiple of `step` keys after the first visible key, for a block of threads
# takes `step` keys in a round. With a `window` only the last `window` keys are visible. Several splits may have no keys: then
# their number is 0. And the longest split is as short as all this allows, since all the others wait for it. Find out which keys
# get lost, and repair it.

# %% task="11.3"
def shares(seq_len, num_splits, step, window):
    """[(position of the first key, number of keys)], one for each split."""
    visible = min(seq_len, window)
    ### BEGIN SOLUTION
    rounds = math.ceil(visible / step)
    size = math.ceil(rounds / num_splits) * step
    ### INSTEAD
    # size = visible // (num_splits * step) * step
    ### END SOLUTION
    found = []
    for split in range(num_splits):
        first = split * size
        found.append((seq_len - visible + first, max(0, min(size, visible - first))))
    return found


# %%
for seq_len, num_splits in ((4096, 8), (1024, 4), (1100, 4)):
    counts = [count for _, count in shares(seq_len, num_splits, 32, window=10**6)]
    print(f"{seq_len} tokens in {num_splits} splits:", counts, "together", sum(counts))

# %%
check("11.3", shares)

# %% [markdown]
# (task-4)=
# ## 11.4 Decode a split
#
# **Why it matters.** This is what fills the processors when the batch is small.
#
# Launched as `[(num_seqs, num_heads, num_splits), 32]`: one warp for a sequence, a query head and a split. With
# `size = ceil(seq_len / num_splits)`, split s has the positions `s * size` to `(s + 1) * size - 1`, as far as there are any.
# Write the attention over these keys alone, divided by the sum of its own weights, to `partial`, and the natural logarithm of the
# sum of the exponentials of the scores to `log_sums`. A split without keys writes zeros and -inf. `head_dim` is 64, so lane l has the
# numbers l and l + 32. Scores may be as large as 10,000. Read each key and each value once. `warp_sum` is given.

# %% tags=["setup"]
@cuda.jit(device=True)
def warp_sum(x):
    """The sum of x over the 32 lanes; each of them gets it. All must call it."""
    for distance in (16, 8, 4, 2, 1):
        x += cuda.shfl_xor_sync(0xFFFFFFFF, x, distance)
    return x


# %% task="11.4"
@cuda.jit
def decode_split(partial, log_sums, query, key_cache, value_cache, block_tables, seq_lens, scale):
    """partial [num_seqs, num_heads, num_splits, 64], log_sums [num_seqs, num_heads, num_splits]: written.

    query [num_seqs, num_heads, 64]; caches [num_blocks, block_size, num_kv_heads, 64]; seq_lens [num_seqs].
    """
    ### BEGIN SOLUTION
    lane, block_size = cuda.threadIdx.x, key_cache.shape[1]
    seq, head, split = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
    kv_head = head // (query.shape[1] // key_cache.shape[2])
    size = (seq_lens[seq] + cuda.gridDim.z - 1) // cuda.gridDim.z
    largest, total = float32(-math.inf), float32(0)
    low, high = float32(0), float32(0)
    for position in range(split * size, min((split + 1) * size, seq_lens[seq])):
        block, offset = block_tables[seq, position // block_size], position % block_size
        product = query[seq, head, lane] * key_cache[block, offset, kv_head, lane]
        product += query[seq, head, lane + 32] * key_cache[block, offset, kv_head, lane + 32]
        score = warp_sum(product) * scale
        above = max(largest, score)
        shrink, weight = math.exp(largest - above), math.exp(score - above)
        total = total * shrink + weight
        low = low * shrink + weight * value_cache[block, offset, kv_head, lane]
        high = high * shrink + weight * value_cache[block, offset, kv_head, lane + 32]
        largest = above
    if total > 0:
        low, high, largest = low / total, high / total, largest + math.log(total)
    partial[seq, head, split, lane], partial[seq, head, split, lane + 32] = low, high
    if lane == 0:
        log_sums[seq, head, split] = largest
    ### END SOLUTION


# %% [markdown]
# Nineteen tokens in three splits, and two tokens in three splits. Merged with your function from 11.2.

# %% tags=["raises-exception"]
pages = make_pages([(1, 19), (1, 2)], head_dim=64)
partial, log_sums = unwritten(2, 4, 3, 64), unwritten(2, 4, 3)
tensors = (pages.query, pages.key_cache, pages.value_cache, pages.block_tables, pages.seq_lens)
try:
    with interpret():
        decode_split[(2, 4, 3), 32](partial, log_sums, *tensors, pages.scale)
except KernelError as error:
    print(error)
for i in range(2):
    merged, _ = merge(partial[i].transpose(0, 1), log_sums[i].T)
    print("within 1e-5 of float64:", bool((merged - pages.exactly()[i]).abs().max() < 1e-5))

# %%
check("11.4", decode_split)

# %% [markdown]
# (task-5)=
# ## 11.5 Merge the splits
#
# **Why it matters.** The second launch. It reads little, and a NaN in it is a NaN in the answer.
#
# Launched as `[(num_seqs, num_heads), 64]`, one thread for each number of the result. `partial` and `log_sums` are as 11.4 writes them,
# with one difference: the row of a part without keys holds anything, NaN included. That is how our kernel leaves it, since what
# nobody needs need not be written. A sequence that has no keys in any part gets zeros. No shared memory is needed.

# %% task="11.5"
@cuda.jit
def merge_parts(out, partial, log_sums):
    """out [num_seqs, num_heads, 64]: written. partial [num_seqs, num_heads, num_splits, 64], log_sums without the 64."""
    ### BEGIN SOLUTION
    seq, head, d = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    top = float32(-math.inf)
    for part in range(log_sums.shape[2]):
        top = max(top, log_sums[seq, head, part])
    total, mixed = float32(0), float32(0)
    for part in range(log_sums.shape[2]):
        if log_sums[seq, head, part] != -math.inf:
            weight = math.exp(log_sums[seq, head, part] - top)
            total += weight
            mixed += weight * partial[seq, head, part, d]
    out[seq, head, d] = mixed / total if total > 0 else float32(0)
    ### END SOLUTION


# %%
check("11.5", merge_parts)

# %% [markdown]
# (task-6)=
# ## 11.6 Where is it in vLLM?
#
# **Why it matters.** V0's kernels are called v1 and v2, and they have nothing to do with the engines V0 and V1.

# %%
viz.where_in_vllm("split_decode", "merge_states", "chunk_kernel")

# %% [markdown]
# Write a symbol of vLLM's column for each:
#
# - `splits_in_v0`: the operation in V0 (0.7.3) that splits and merges.
# - `decides`: the method in V0 that chooses between it and `paged_attention_v1`.
# - `merges`: the function of V1 (0.33.0) that puts two parts together, each with its log sum.
# - `chunks`: in V0 and outside of FlashAttention, the function for several queries of a sequence and keys in pages.
#
# Then V0's rule. It splits, unless no sequence is longer than 8192 tokens and one of these holds: all sequences fit into one
# partition of 512 tokens, or `num_seqs * num_heads` is above 512. Say for each whether V0 takes `"v1"` or `"v2"`: 1 sequence of
# 300 tokens, 1 of 3000, 32 of 3000, 32 of 9000. The model has 32 query heads.

# %% task="11.6"
### BEGIN SOLUTION stub: splits_in_v0, decides, merges, chunks = ..., ..., ..., ...
splits_in_v0, decides = "paged_attention_v2", "PagedAttention.forward_decode"
merges, chunks = "merge_attn_states", "context_attention_fwd"
### END SOLUTION
### BEGIN SOLUTION stub: takes = [...]
takes = ["v1", "v2", "v1", "v2"]
### END SOLUTION

# %%
check("11.6", splits_in_v0, decides, merges, chunks, takes)

# %% [markdown]
# (task-7)=
# ## 11.7 Measure it: what is the limit?
#
# **Why it matters.** "Twice as fast as before" says nothing about what is left. A share of the limit does.
#
# `peak` is in operations per second, `bandwidth` in bytes per second. Write `limit`: the shortest time in seconds that the work can
# take, and `"memory"` or `"arithmetic"`, whichever it waits for. Where both take equally long, say `"arithmetic"`.

# %% task="11.7"
def limit(operations, num_bytes, peak, bandwidth):
    """(shortest time in seconds, what it waits for)."""
    ### BEGIN SOLUTION
    computing, moving = operations / peak, num_bytes / bandwidth
    return max(computing, moving), "memory" if moving > computing else "arithmetic"
    ### END SOLUTION


# %% [markdown]
# Attention of one layer with 32 query heads and `head_dim` 128, in numbers of 2 bytes. A number of a key or value that was read
# takes part in a multiplication and an addition for each query head of its group.
#
# - `per_byte`: operations per byte of a decode with 8 KV heads, and with 1.
# - `queries`: a device does 67e12 operations and reads 4.8e12 bytes a second. With a group of 4, how many queries of a chunk must
#   share a reading of the keys at least, until arithmetic is the limit?

# %% task="11.7"
### BEGIN SOLUTION stub: per_byte = [...]
per_byte = [4.0, 32.0]
### END SOLUTION
### BEGIN SOLUTION stub: queries = ...
queries = math.ceil(67e12 / 4.8e12 / 4)
### END SOLUTION

# %%
check("11.7", limit, per_byte, queries)

# %% [markdown]
# And on the machine that runs this page: our CPU kernel under the limit of one core. How near is it, and what does it
# wait for? More than 100% says that the keys were still in the processor's cache.

# %% tags=["volatile", "raises-exception"]
roof = this_cpu()
for point in (Point(8, 64, 512), Point(8, 128, 2048)):
    work = cpu_work(measured(point))
    seconds, waits_for = limit(work.operations, work.num_bytes, roof.peak, roof.bandwidth)
    print(f"{work.name}: {seconds / work.seconds:.0%} of the limit, waits for {waits_for}")

# %% [markdown]
# (task-8)=
# ## 11.8 A tile of queries
#
# **Why it matters.** A chunk has many queries, and they read the same keys. Whoever lets each of them fetch its own reads
# everything as often as there are queries.
#
# One sequence. `query` holds its last tokens, and `table` is its block table. Launched as
# `[(ceil(num_queries / 4), num_heads), (32, 4)]`: `cuda.threadIdx.y` is a warp, and each has one query. Query i stands at
# position `seq_len - num_queries + i` and sees the keys up to itself. `head_dim` is 64. Write the attention of every query to
# `out`.
#
# The four warps of a block read a key **once**: bring keys into shared memory, let all use them, go on. The given tiles hold 8 keys and 8
# values. Mind that all threads reach each barrier, those of a warp without a query too. The budget: a block reads no key twice
# and none that its last query does not see.

# %% task="11.8"
@cuda.jit
def attend_tile(out, query, key_cache, value_cache, table, seq_len, scale):
    """query, out [num_queries, num_heads, 64]; caches [num_blocks, block_size, num_kv_heads, 64]; table [max_blocks]."""
    keys, values = cuda.shared.array((8, 64), float32), cuda.shared.array((8, 64), float32)
    ### BEGIN SOLUTION
    lane, warp, head = cuda.threadIdx.x, cuda.threadIdx.y, cuda.blockIdx.y
    num_queries, block_size = query.shape[0], key_cache.shape[1]
    kv_head = head // (query.shape[1] // key_cache.shape[2])
    first = cuda.blockIdx.x * 4
    row = min(first + warp, num_queries - 1)
    seen = seq_len - num_queries + row + 1
    stop = seq_len - num_queries + min(first + 4, num_queries)
    largest, total, low, high = float32(-math.inf), float32(0), float32(0), float32(0)
    for start in range(0, stop, 8):
        for i in range(warp, min(8, stop - start), 4):
            block, offset = table[(start + i) // block_size], (start + i) % block_size
            for d in (lane, lane + 32):
                keys[i, d] = key_cache[block, offset, kv_head, d]
                values[i, d] = value_cache[block, offset, kv_head, d]
        cuda.syncthreads()
        for i in range(min(8, seen - start)):
            product = query[row, head, lane] * keys[i, lane] + query[row, head, lane + 32] * keys[i, lane + 32]
            score = warp_sum(product) * scale
            above = max(largest, score)
            shrink, weight = math.exp(largest - above), math.exp(score - above)
            total = total * shrink + weight
            low = low * shrink + weight * values[i, lane]
            high = high * shrink + weight * values[i, lane + 32]
            largest = above
        cuda.syncthreads()
    if first + warp < num_queries:
        out[row, head, lane], out[row, head, lane + 32] = low / total, high / total
    ### END SOLUTION


# %%
check("11.8", attend_tile)

# %% [markdown]
# (your-engine)=
# ## The engine on your kernels
#
# Two prompts, six tokens each. Prompts run on the reference, every decode on your two kernels, in three splits.

# %% tags=["raises-exception"]
prompts, params = [[*range(40, 49)], [*range(40, 44), 60]], SamplingParams(max_tokens=6, ignore_eos=True)
expected = [out.token_ids for out in LLM("tiny").generate(prompts, params)]
mine = LLM("tiny", parts={"attention": on_split(decode_split, merge_parts)}).generate(prompts, params)
print("the same tokens:", [out.token_ids for out in mine] == expected)
