# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown]
# # 10 The paged decode kernel
#
# Eight tasks to [chapter 10](../chapters/10_the_paged_decode_kernel.ipynb). Write into the cells that say `...` or raise
# `NotImplementedError`, run them, and run the cell with `check` below each. A hint comes from the terminal:
# `refengine hint 10.1`. Kernels run in the interpreter, so no GPU is needed. At the end the engine runs on yours.
#
# Caches are `[num_blocks, block_size, num_kv_heads, head_dim]`, queries `[num_seqs, num_heads, head_dim]`. Kernels are judged
# on what they write, under three orders of threads, with guard cells around every array and NaN in every slot without a
# token; then on what they touched.

# %% tags=["setup"]
import math

import numba
import torch
from numba import cuda, float32

from exercises import check
from exercises.tasks.ex08_scene import make_pages
from exercises.tasks.ex10_layouts import count, reading_table
from exercises.tasks.ex10_scene import THREADS, on_kernels
from kernels.cuda.softmax import block_max, block_sum, lanes_sum
from kernels.interpreter import interpret
from refengine import LLM, SamplingParams, viz

# %% [markdown]
# (task-1)=
# ## 10.1 Numbers before a kernel runs
#
# **Why it matters.** Most wrong kernels are wrong in an address. Each of these went wrong in a public code base.
#
# - `written`: a cache of 3 blocks with 4 slots, all zero. Two tokens bring the values 10 and 99, for the slots 5 and -1. Which
#   places hold something afterwards? A list of `[block, offset, value]`.
# - `lands`: a kernel without a check computes `slot // 4` and `slot % 4`, as Python does, and writes there. `[block, offset]` of
#   the 99.
# - `first_element`: a block is 16 tokens, keys and values of 8 heads of 128 numbers. Which element of the flat cache is the
#   first of block 65537? And `in_32_bits`: the same number if it is kept as a signed integer of 32 bits.
# - `kernel_place`: the manager's blocks have 8 tokens and the kernel's have 4, in the same memory. `[block, offset]`, as the kernel
#   counts, of the token at offset 5 of the manager's block 3. And `slot`: its slot.

# %% task="10.1"
### BEGIN SOLUTION stub: written = [...]
written = [[1, 1, 10]]
### END SOLUTION
### BEGIN SOLUTION stub: lands = [...]
lands = [2, 3]
### END SOLUTION
### BEGIN SOLUTION stub: first_element = ...
first_element = 65537 * 16 * 2 * 8 * 128
### END SOLUTION
### BEGIN SOLUTION stub: in_32_bits = ...
in_32_bits = first_element - 2**32
### END SOLUTION
### BEGIN SOLUTION stub: kernel_place = [...]
kernel_place = [7, 1]
### END SOLUTION
### BEGIN SOLUTION stub: slot = ...
slot = 29
### END SOLUTION

# %%
check("10.1", written, lands, first_element, in_32_bits, kernel_place, slot)

# %% [markdown]
# (task-2)=
# ## 10.2 The cache write
#
# **Why it matters.** It runs in every layer of every step, before anything is read. What it misplaces, nobody finds again.
#
# `key` and `value` are `[num_tokens, num_kv_heads, head_dim]`. The kernel is launched with a block of 32 threads per token:
# `write[num_tokens, 32]`. A row may have more numbers than the block has threads. Slot -1 writes nothing. The budget is what
# a copy needs: each sector written once.

# %% task="10.2"
@cuda.jit
def write(key, value, key_cache, value_cache, slot_mapping):
    """Puts the key and the value of each token into its slot."""
    ### BEGIN SOLUTION
    token = cuda.blockIdx.x
    slot = slot_mapping[token]
    if slot < 0:
        return
    block_size, head_dim = key_cache.shape[1], key.shape[2]
    block, offset = slot // block_size, slot % block_size
    i = cuda.threadIdx.x
    while i < key.shape[1] * head_dim:
        head, d = i // head_dim, i % head_dim
        key_cache[block, offset, head, d] = key[token, head, d]
        value_cache[block, offset, head, d] = value[token, head, d]
        i += cuda.blockDim.x
    ### END SOLUTION


# %%
check("10.2", write)

# %% [markdown]
# (task-3)=
# ## 10.3 Scores of one query
#
# **Why it matters.** This loop reads most of what a decode reads. With a thread per key it fetches eight times the
# bytes that it uses, here with numbers of 4 bytes.
#
# One sequence: `query` is `[num_heads, head_dim]`, `block_table` `[max_blocks]`. `out[head, position]` becomes the product of the
# head's query with the key at that position, times `scale`, for positions 0 to `seq_len - 1`; the rest of `out` stays as it
# is. Launched with a block per query head, two warps each: `scores[num_heads, 64]`. Let the 32 lanes of a warp share a key.
# `lanes_sum(x, 32)` adds up `x` over the lanes of a warp; all of them must call it.

# %% task="10.3"
@cuda.jit
def scores(out, query, key_cache, block_table, seq_len, scale):
    """Scores of all heads of one query, [num_heads, at least seq_len]."""
    ### BEGIN SOLUTION
    head, lane = cuda.blockIdx.x, cuda.threadIdx.x % 32
    block_size, head_dim = key_cache.shape[1], query.shape[1]
    kv_head = head // (query.shape[0] // key_cache.shape[2])
    position = cuda.threadIdx.x // 32  # of the warp
    while position < seq_len:
        block, offset = block_table[position // block_size], position % block_size
        score, d = float32(0), lane
        while d < head_dim:
            score += query[head, d] * key_cache[block, offset, kv_head, d]
            d += 32
        score = lanes_sum(score, 32)
        if lane == 0:
            out[head, position] = score * scale
        position += cuda.blockDim.x // 32
    ### END SOLUTION


# %%
check("10.3", scores)

# %% [markdown]
# (task-4)=
# ## 10.4 Find the bug: a cache of more than 4 GiB
#
# **Why it matters.** It passes every test with a small cache. On a large GPU it reads other people's keys, or memory that
# belongs to nobody (vllm#50427).
#
# `row_starts` says where the row of each position begins in the flat cache, in elements: `out[position]`. Blocks are
# `block_stride` elements apart, rows of a block `row_size`. It was brought over from CUDA C++, where these were `int`.

# %% task="10.4"
@cuda.jit
def row_starts(out, block_table, seq_len, block_size, block_stride, row_size):
    """out [seq_len] int64: the first element of each position's row."""
    position = cuda.grid(1)
    if position < seq_len:
        block, offset = block_table[position // block_size], position % block_size
        ### BEGIN SOLUTION
        out[position] = numba.int64(block) * block_stride + offset * row_size
        ### INSTEAD
        # start = numba.int32(block * block_stride)
        # out[position] = numba.int32(start + offset * row_size)
        ### END SOLUTION


# %%
for table in ([3, 70], [3, 70_000]):
    out = torch.zeros(20, dtype=torch.int64)
    with interpret():
        row_starts[1, 32](out, torch.tensor(table), 20, 16, 32768, 1024)
    print("blocks", table, "first rows", out[[0, 16]].tolist())

# %%
check("10.4", row_starts)

# %% [markdown]
# (task-5)=
# ## 10.5 The decode
#
# **Why it matters.** This is the kernel. It reads the pages where they lie, goes over the keys once, and never has all scores at
# once. It becomes the attention of the engine.
#
# Launched as `decode[(num_seqs, num_heads), THREADS]`, so `cuda.blockIdx.x` is the sequence and `cuda.blockIdx.y` the query head.
# `THREADS` is 64, `head_dim` at most that. Every sequence has a token or more. Take the keys in tiles of `THREADS`: in a tile, first let each
# thread own a key, then a dimension of the result. `block_max(x, scratch)` and `block_sum(x, scratch)` give the largest `x`
# and the sum over the block; `scratch` is a shared array of `THREADS` numbers, all threads must call them, and both contain
# barriers. Each key may be read once per query head.

# %% task="10.5" part="attention" name="attention"
@cuda.jit
def decode(out, query, key_cache, value_cache, block_tables, seq_lens, scale):
    """Attention of one new token per sequence, [num_seqs, num_heads, head_dim]."""
    ### BEGIN SOLUTION
    seq, head, thread = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    seq_len, block_size, head_dim = seq_lens[seq], key_cache.shape[1], query.shape[2]
    kv_head = head // (query.shape[1] // key_cache.shape[2])
    weights = cuda.shared.array(THREADS, float32)
    scratch = cuda.shared.array(THREADS, float32)
    largest, total, mixed = float32(-3e38), float32(0), float32(0)
    start = 0
    while start < seq_len:
        position, score = start + thread, float32(-3e38)
        if position < seq_len:
            block, offset = block_tables[seq, position // block_size], position % block_size
            score = float32(0)
            for d in range(head_dim):
                score += query[seq, head, d] * key_cache[block, offset, kv_head, d]
            score *= scale
        before = largest
        largest = max(largest, block_max(score, scratch))
        weight = math.exp(score - largest) if position < seq_len else float32(0)
        weights[thread] = weight
        shrink = math.exp(before - largest)
        total = total * shrink + block_sum(weight, scratch)
        mixed = mixed * shrink
        if thread < head_dim:
            for i in range(min(THREADS, seq_len - start)):
                block, offset = block_tables[seq, (start + i) // block_size], (start + i) % block_size
                mixed += weights[i] * value_cache[block, offset, kv_head, thread]
        start += THREADS
    if thread < head_dim:
        out[seq, head, thread] = mixed / total
    ### END SOLUTION


attention = on_kernels(decode)  # the engine's: decodes on yours, everything else on the reference

# %% [markdown]
# A short sequence and one of three tiles:

# %% tags=["raises-exception"]
pages = make_pages([(1, 5), (1, 130)], head_dim=9)
tensors = (pages.query, pages.key_cache, pages.value_cache, pages.block_tables, pages.seq_lens)
difference = attention.paged_attention_decode(*tensors, pages.scale) - pages.exactly()
print("within 1e-5 of float64:", bool(difference.abs().max() < 1e-5))

# %%
check("10.5", decode)

# %% [markdown]
# (task-6)=
# ## 10.6 Each key once
#
# **Why it matters.** Four query heads that share a KV head read the same keys, and in 10.3 and 10.5 each reads them for
# itself. Read once, a decode moves a quarter of the bytes.
#
# As in 10.3, but with a block per *KV head*: `group_scores[num_kv_heads, 64]`. The group has 1, 2 or 4 query heads. A number of a
# key is loaded once and used for all of them. `cuda.local.array(4, float32)` gives a thread four numbers of its own.

# %% task="10.6"
@cuda.jit
def group_scores(out, query, key_cache, block_table, seq_len, scale):
    """Scores of all heads of one query, [num_heads, at least seq_len]; a block serves a whole group."""
    ### BEGIN SOLUTION
    kv_head, lane = cuda.blockIdx.x, cuda.threadIdx.x % 32
    block_size, head_dim = key_cache.shape[1], query.shape[1]
    group = query.shape[0] // key_cache.shape[2]
    sums = cuda.local.array(4, float32)
    position = cuda.threadIdx.x // 32
    while position < seq_len:
        block, offset = block_table[position // block_size], position % block_size
        for g in range(group):
            sums[g] = 0
        d = lane
        while d < head_dim:
            number = key_cache[block, offset, kv_head, d]
            for g in range(group):
                sums[g] += query[kv_head * group + g, d] * number
            d += 32
        for g in range(group):
            score = lanes_sum(sums[g], 32)
            if lane == 0:
                out[kv_head * group + g, position] = score * scale
        position += cuda.blockDim.x // 32
    ### END SOLUTION


# %%
check("10.6", group_scores)

# %% [markdown]
# (task-7)=
# ## 10.7 Where is it in vLLM?
#
# **Why it matters.** A layout and a kernel belong together. Who changes one of them has to know where the other is.

# %%
viz.where_in_vllm("decode_kernel", "cache_layout", "kernel_blocks")

# %% [markdown]
# Write a symbol of vLLM's column for each:
#
# - `decodes`: what computes the attention of a decode; for 0.7.3, the operation that backends without FlashAttention call.
# - `splits_keys`: who, in 0.7.3, gives the key cache the shape with pieces of 16 bytes.
# - `tokens_first`: who, in 0.7.3, says that a block holds tokens, then heads, then numbers.
# - `chooses_size`: who, in 0.33.0, chooses how many tokens a block has for the kernel.

# %% task="10.7"
### BEGIN SOLUTION stub: decodes = {"V0": ..., "V1": ...}
decodes = {"V0": "paged_attention_v1", "V1": "FlashAttentionImpl.forward"}
### END SOLUTION
### BEGIN SOLUTION stub: splits_keys = ...
splits_keys = "PagedAttention.split_kv_cache"
### END SOLUTION
### BEGIN SOLUTION stub: tokens_first = ...
tokens_first = "FlashAttentionBackend.get_kv_cache_shape"
### END SOLUTION
### BEGIN SOLUTION stub: chooses_size = ...
chooses_size = "prepare_kernel_block_sizes"
### END SOLUTION

# %%
check("10.7", decodes, splits_keys, tokens_first, chooses_size)

# %% [markdown]
# (task-8)=
# ## 10.8 Measure it: sectors by layout
#
# **Why it matters.** V0 had a layout of its own for keys, and V1 has not. The question is what was lost.
#
# `count(way, head_dim, dtype)` runs one of the chapter's five ways to read 32 keys, and gives (requests, sectors of keys,
# sectors of the table). With `head_dim` 64 and float32:

# %%
reading_table(64, torch.float32)

# %% [markdown]
# Write `least_sectors`: sectors that hold the keys of `num_tokens` tokens of one head, a whole number of them per row. Then,
# for `head_dim` 128 and float16: which ways touch no sector of keys twice (`best`, letters in order), and how many times
# the least does the worst way touch (`worst_times`)?

# %% task="10.8"
def least_sectors(num_tokens, head_dim, itemsize):
    """Sectors of 32 bytes that hold these keys."""
    ### BEGIN SOLUTION
    return num_tokens * head_dim * itemsize // 32
    ### END SOLUTION


# %% task="10.8"
### BEGIN SOLUTION stub: best = [...]
best = [way for way in "abcde" if count(way, 128, torch.float16)[1] == least_sectors(32, 128, 2)]
### END SOLUTION
### BEGIN SOLUTION stub: worst_times = ...
worst_times = max(count(way, 128, torch.float16)[1] for way in "abcde") // least_sectors(32, 128, 2)
### END SOLUTION

# %%
check("10.8", least_sectors, best, worst_times)

# %% [markdown]
# (your-engine)=
# ## The engine on your kernels
#
# V0 and V1, on your write and your decode, in the interpreter. Prompts go through the reference.

# %% tags=["raises-exception"]
prompt, params = "Q: What is a block table?\nA:", SamplingParams(max_tokens=5)
for engine in ("v0", "v1"):
    mine = LLM("tiny", engine=engine, parts={"attention": on_kernels(decode, write)})
    theirs = LLM("tiny", engine=engine, backend="reference")
    both = [llm.generate([prompt], params)[0].text for llm in (mine, theirs)]
    print(engine, repr(both[0]), "the same:", both[0] == both[1])
