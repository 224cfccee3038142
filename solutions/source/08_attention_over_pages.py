# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown]
# # 08 Attention over pages
#
# Eight tasks to [chapter 08](../chapters/08_attention_over_pages.ipynb). Write into the cells that say `...` or raise
# `NotImplementedError`, run them, and run the cell with `check` below each. A hint comes from the terminal:
# `refengine hint 08.1`. At the end the engine runs on your attention.
#
# Queries are `[num_tokens, num_heads, head_dim]`, keys and values `[num_tokens, num_kv_heads, head_dim]`, caches
# `[num_blocks, block_size, num_kv_heads, head_dim]`.

# %% tags=["setup"]
import torch
import torch.nn.functional as F

from exercises import check
from exercises.tasks.ex08_scene import copy_share, in_chunks, make_pages, moved, qkv, small_batch, tiles_of
from refengine import LLM, SamplingParams, viz

# %% [markdown]
# (task-1)=
# ## 08.1 A batch by hand
#
# **Why it matters.** A query that sees a key too many reads the future, one that sees a key too few forgets. Neither
# raises an error.
#
# Blocks of four tokens, 6 query heads, 2 KV heads, `head_dim` 16, and this batch in one call:

# %%
small_batch()

# %% [markdown]
# Say for each row of the query how many keys it sees; which slots of the key cache `b` reads, in the order of its
# positions; and the shape of the result.

# %% task="08.1"
### BEGIN SOLUTION stub: visible = [...]
visible = [6, 7, 8, 9, 6, 1, 2, 3]
### END SOLUTION
### BEGIN SOLUTION stub: slots_of_b = [...]
slots_of_b = [28, 29, 30, 31, 8, 9]
### END SOLUTION
### BEGIN SOLUTION stub: out_shape = [...]
out_shape = [8, 6, 16]
### END SOLUTION

# %%
check("08.1", visible, slots_of_b, out_shape)

# %% [markdown]
# (task-2)=
# ## 08.2 Build attention with a cache
#
# **Why it matters.** Five public code bases got this mask wrong, each in a way that some runs do not show.
#
# One sequence, its keys one after another. `query` holds its tokens from position `start` on, `keys` and `values` all
# its tokens up to the last query. Query i sees keys 0 to `start + i`. The query heads of a group share a KV head. Use
# matrix products and no loop over tokens. The scores may be as large as 10,000.

# %% task="08.2"
def attend(query, keys, values, start, scale):
    """query [n, num_heads, head_dim]; keys, values [start + n, num_kv_heads, head_dim]. Returns query's shape."""
    ### BEGIN SOLUTION
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
    hidden = torch.arange(len(keys)) > start + torch.arange(len(query))[:, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values)
    ### END SOLUTION


# %% [markdown]
# Twelve tokens at once, as chunks of 5, 4 and 3, and one by one. Run it before you hand in.

# %% tags=["raises-exception"]
query, keys, values = qkv(12)
at_once = attend(query, keys, values, 0, scale=8**-0.5)
for sizes in ([5, 4, 3], [1] * 12):
    pieces = in_chunks(attend, sizes, query, keys, values, scale=8**-0.5)
    print(sizes, torch.allclose(pieces, at_once, atol=1e-5))

# %%
check("08.2", attend)

# %% [markdown]
# (task-3)=
# ## 08.3 Build the gather
#
# **Why it matters.** A wrong slot reads somebody else's keys, and they look like keys.
#
# `gather` takes the rows of one sequence out of the pages: positions 0 to `seq_len - 1`, in this order, and nothing
# else. `cache` is a key cache or a value cache; its shape says how large a block is. `table` is the block table, one
# integer tensor; behind the sequence's end it holds anything.

# %% task="08.3"
def gather(cache, table, seq_len):
    """The rows of positions 0 to seq_len - 1, [seq_len, num_kv_heads, head_dim]."""
    ### BEGIN SOLUTION
    positions = torch.arange(seq_len)
    block_size = cache.shape[1]
    return cache[table[positions // block_size], positions % block_size]
    ### END SOLUTION


# %%
check("08.3", gather)

# %% [markdown]
# (task-4)=
# ## 08.4 Build attention over pages
#
# **Why it matters.** This is the whole operation: prompts, chunks and decodes in one call, as V1 makes it. What you
# write here becomes the attention of the engine.
#
# Sequence i owns the rows `query_start_loc[i]` to `query_start_loc[i + 1] - 1` of the query, its block table is row i of
# `block_tables`, and it has `seq_lens[i]` tokens, the new ones included. A sequence may have no new token. Query rows
# behind the last entry of `query_start_loc` belong to nobody: their result is zero. A loop over sequences is fine, and so
# are your functions from above. `scale` is given; do not assume the usual one. Where `out` is given, write into it and
# return it.

# %% task="08.4" part="attention" name="paged_attention"
def paged_attention(
    query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, scale, sliding_window=None, out=None
):
    """Causal attention of the new tokens of a batch over its pages, [num_tokens, num_heads, head_dim]."""
    if sliding_window is not None:
        raise ValueError("this attention knows no sliding window; chapter 12 is about them")
    ### BEGIN SOLUTION
    result = torch.zeros_like(query)
    starts = query_start_loc.tolist()
    for i, total in enumerate(seq_lens.tolist()):
        first, stop = starts[i], starts[i + 1]
        keys = gather(key_cache, block_tables[i], total)
        values = gather(value_cache, block_tables[i], total)
        result[first:stop] = attend(query[first:stop], keys, values, total - (stop - first), scale)
    return result if out is None else out.copy_(result)
    ### END SOLUTION


# %% [markdown]
# A chunk, a decode and a prompt, and two rows of padding. Every slot that holds no token is NaN.

# %% tags=["raises-exception"]
pages = make_pages([(3, 9), (1, 7), (6, 6)], padding=2)
difference = paged_attention(*pages.arguments) - pages.exactly()
print("within 1e-5 of float64:", bool(difference.abs().max() < 1e-5))

# %%
check("08.4", paged_attention)

# %% [markdown]
# (task-5)=
# ## 08.5 Find the bug: the mask of a chunk
#
# **Why it matters.** Whole prompts are right here, and so is every single step. It was written, tried with a prompt and
# some decodes, and shipped.
#
# `CachedAttention` keeps the keys and values of one sequence and uses torch's own attention. Below it gets twelve tokens in
# three chunks, beside the same tokens at once. Find out which keys its queries see, and repair it.

# %% task="08.5"
class CachedAttention:
    """Attention of one sequence that keeps its keys and values. Call it with the next tokens."""

    def __init__(self):
        self.keys, self.values = None, None

    def __call__(self, query, key, value, scale):
        """query [n, num_heads, head_dim]; key, value [n, num_kv_heads, head_dim]. Mutates: the cache."""
        self.keys = key if self.keys is None else torch.cat((self.keys, key))
        self.values = value if self.values is None else torch.cat((self.values, value))
        q, k, v = (x.transpose(0, 1) for x in (query, self.keys, self.values))  # [heads, tokens, head_dim]
        n, total = len(query), len(self.keys)
        ### BEGIN SOLUTION
        mask = torch.ones(n, total, dtype=torch.bool).tril(total - n)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        ### INSTEAD
        # out = F.scaled_dot_product_attention(q, k, v, is_causal=n > 1, scale=scale, enable_gqa=True)
        ### END SOLUTION
        return out.transpose(0, 1)


# %%
query, keys, values = qkv(12)
at_once, cached = CachedAttention()(query, keys, values, 8**-0.5), CachedAttention()
for new in (slice(0, 5), slice(5, 9), slice(9, 12)):
    piece = cached(query[new], keys[new], values[new], 8**-0.5)
    print("positions", new.start, "to", new.stop - 1, torch.allclose(piece, at_once[new], atol=1e-5))

# %%
check("08.5", CachedAttention)

# %% [markdown]
# (task-6)=
# ## 08.6 Where is it in vLLM?
#
# **Why it matters.** In V0 the answer depends on the phase and on the step's other prompts; in V1 it does not.

# %%
viz.where_in_vllm("kv_write", "attention_metadata", "attention", "kernel_per_phase")

# %% [markdown]
# Write a symbol of vLLM's column for each:
#
# - `writes`: who puts the new keys and values into their slots. For 0.33.0, the method of the attention backend; for
#   0.7.3, the operation that FlashAttention's backend calls.
# - `table_in_v0`: who decides in V0, one sequence at a time, whether a prompt gets its block table.
# - `chunk` and `decode`: which of V0's two kernels outside of FlashAttention takes a chunk of a prompt whose step has tables,
#   and which one takes a decode; and who takes both in V1.

# %% task="08.6"
### BEGIN SOLUTION stub: writes = {"V0": ..., "V1": ...}
writes = {"V0": "reshape_and_cache_flash", "V1": "FlashAttentionImpl.do_kv_cache_update"}
### END SOLUTION
### BEGIN SOLUTION stub: table_in_v0 = ...
table_in_v0 = "FlashAttentionMetadataBuilder._add_seq_group"
### END SOLUTION
### BEGIN SOLUTION stub: chunk = {"V0": ..., "V1": ...}
chunk = {"V0": "PagedAttention.forward_prefix", "V1": "FlashAttentionImpl.forward"}
### END SOLUTION
### BEGIN SOLUTION stub: decode = {"V0": ..., "V1": ...}
decode = {"V0": "PagedAttention.forward_decode", "V1": "FlashAttentionImpl.forward"}
### END SOLUTION

# %%
check("08.6", writes, table_in_v0, chunk, decode)

# %% [markdown]
# (task-7)=
# ## 08.7 Build the softmax that never sees all its scores
#
# **Why it matters.** A kernel has room for a tile of keys and not for all of them. This loop is the heart of chapters 10
# and 11.
#
# One query, `[head_dim]`. `tiles` is an iterator that gives pairs `(keys, values)`, each `[n, head_dim]`; there may be many, of
# different lengths, and each comes once. Go through it once, keep no tile, and return softmax(scores) @ values over all
# of them, `[head_dim]`. Scores may be as large as 10,000 and as small as -10,000.

# %% task="08.7"
def online_attention(query, tiles, scale):
    """softmax(keys @ query * scale) @ values, over all tiles, in one pass."""
    ### BEGIN SOLUTION
    largest = query.new_tensor(-torch.inf)
    total, mixed = query.new_tensor(0.0), torch.zeros_like(query)
    for keys, values in tiles:
        scores = keys @ query * scale
        above = torch.maximum(largest, scores.max())
        shrink, weights = (largest - above).exp(), (scores - above).exp()
        total = total * shrink + weights.sum()
        mixed = mixed * shrink + weights @ values
        largest = above
    return mixed / total
    ### END SOLUTION


# %% tags=["raises-exception"]
query, keys, values = (x[:, 0] for x in qkv(23))
whole = (keys @ query[0] * 40.0).softmax(0) @ values
torch.allclose(online_attention(query[0], tiles_of(keys, values, [8, 8, 7]), 40.0), whole, atol=1e-5)

# %%
check("08.7", online_attention)

# %% [markdown]
# (task-8)=
# ## 08.8 Measure it: bytes
#
# **Why it matters.** A decode does little arithmetic with much memory. Before one asks how fast it is, one counts what it
# has to move. Chapter 11 begins with this number.
#
# Write `read_bytes`: bytes of keys and values that one layer of one decode step has to read, with one query token per
# sequence. `itemsize` is the number of bytes of one number. Count the tokens, not the unused ends of blocks.

# %% task="08.8"
def read_bytes(seq_lens, num_kv_heads, head_dim, itemsize):
    """Bytes of K and V that one layer reads for a decode of all these sequences."""
    ### BEGIN SOLUTION
    return 2 * sum(seq_lens) * num_kv_heads * head_dim * itemsize
    ### END SOLUTION


# %% [markdown]
# A model of 32 layers, 32 query heads, 8 KV heads and `head_dim` 128, in numbers of 2 bytes. 16 requests with 2000 tokens each
# decode. How many bytes does a whole step read, over all layers?
#
# Then the price of gathering. `moved(seq_lens)` runs a gather and an attention over what was gathered, and counts the
# bytes that each reads and writes, K and V alone. How many times as much is moved as has to be read?

# %%
moved([100, 57])

# %% task="08.8"
### BEGIN SOLUTION stub: step_bytes = ...
step_bytes = 32 * read_bytes([2000] * 16, 8, 128, 2)
### END SOLUTION
### BEGIN SOLUTION stub: times_moved = ...
times_moved = 3
### END SOLUTION

# %%
check("08.8", read_bytes, step_bytes, times_moved)

# %% [markdown]
# And in time, on this machine: which share of a decode does the copying take?

# %% tags=["volatile"]
for num_seqs, length in ((1, 512), (8, 1024), (16, 4096)):
    print(f"{num_seqs:2} sequences of {length} tokens: {copy_share(num_seqs, length):.0%} of the time is copying")

# %% [markdown]
# (your-engine)=
# ## The engine on your attention
#
# Three prompts of which two share a prefix, ten tokens per step, so that decodes, hits and chunks meet. On the engine's own
# attention, and on yours.

# %% tags=["raises-exception"]
prompts = [[*range(40, 46)], [*range(40, 44), 60, 61, 62], [*range(70, 92)]]
params = SamplingParams(max_tokens=8, ignore_eos=True)
options = {"block_size": 4, "num_blocks": 40, "max_num_batched_tokens": 10}
expected = [out.token_ids for out in LLM("tiny", **options).generate(prompts, params)]
mine = LLM("tiny", parts={"attention": paged_attention}, **options).generate(prompts, params)
print("the same tokens:", [out.token_ids for out in mine] == expected)

# %% [markdown]
# And in words:

# %% tags=["raises-exception"]
for parts in ({}, {"attention": paged_attention}):
    llm = LLM("tiny", parts=parts)
    print(llm.generate(["Q: What is a block table?\nA:"], SamplingParams(max_tokens=40, stop="\n"))[0].text)
