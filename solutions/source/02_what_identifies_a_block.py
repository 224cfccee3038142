# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown]
# # 02 What identifies a block
#
# Seven tasks, 100 points. They follow [chapter 02](../chapters/02_what_identifies_a_block.ipynb): you build the hash
# of a block and the chain, say what shares with what, repair a key, and measure. At the end the engine runs on your
# hash.
#
# Answer in the cells with a `raise NotImplementedError` or a `...`, then run the cell below with `check`. In a
# terminal, `refengine hint 02.1` gives one of three hints at a time.

# %% tags=["setup"]
import hashlib
import json
import time
from pathlib import Path

import cbor2

from exercises import check
from refengine import LLM, SamplingParams, viz
from refengine.hashing import Adapter, BlockHasher, start_value
from refengine.trace.codemap import call_path, topic
from refengine.trace.record import Recorder
from refengine.v1.groups.spec import FULL_ATTENTION, GroupSpec
from refengine.v1.kv_cache_manager import KVCacheManager
from refengine.v1.request import Request

START = start_value("sha256_cbor", seed="0")  # the parent of every first block

# %% [markdown]
# (task-1)=
# ## 02.1 The hash of one block
#
# **Why it matters.** A lookup finds a block by its hash and by nothing else. What your function leaves out, the engine
# cannot tell apart. What it returns today must be what it returned yesterday, in another process.
#
# Make the hash as vLLM's `sha256_cbor` does: SHA-256 over the canonical CBOR of a list of three: parent, tokens, keys.
# Canonical: every number in as few bytes as will do, as in the chapter. `cbor2` and `hashlib` are imported. (15
# points)


# %% task="02.1" part="hash_block" name="hash_block"
def hash_block(parent, token_ids, extra):
    """The hash of one block.

    parent: the hash of the block before it, or the start value; bytes.
    token_ids: the tokens of the block. extra: its extra keys, a tuple of tuples, or None.
    Returns: a digest, 32 bytes.
    """
    ### BEGIN SOLUTION
    data = cbor2.dumps((parent, tuple(token_ids), extra), canonical=True)
    return hashlib.sha256(data).digest()
    ### END SOLUTION


# %%
check("02.1", hash_block)

# %% [markdown]
# (task-2)=
# ## 02.2 The chain
#
# **Why it matters.** The hash of one block is worth nothing if the wrong things go into it. Most public bug reports on
# this were made here: an adapter known by its number, a salt in the wrong blocks, a block hashed before it was full.
#
# Return the hashes of all full blocks of a prompt. `hash_block` is handed to you, so this task does not need your
# answer to the first one. (25 points)


# %% task="02.2"
def block_hashes(token_ids, block_size, start, hash_block, adapter=None, cache_salt=None):
    """The hashes of the full blocks, in order.

    start: the parent of the first block. hash_block(parent, token_ids, extra) makes one hash.
    adapter: an Adapter with name, path and adapter_id, or None. cache_salt: a text, or None.
    """
    ### BEGIN SOLUTION
    hashes, parent = [], start
    for begin in range(0, len(token_ids) - block_size + 1, block_size):
        keys = ()
        if adapter is not None:
            keys += (("lora", adapter.name, adapter.path),)
        if begin == 0 and cache_salt:
            keys += (("cache_salt", cache_salt),)
        parent = hash_block(parent, tuple(token_ids[begin : begin + block_size]), keys or None)
        hashes.append(parent)
    return hashes
    ### END SOLUTION


# %%
check("02.2", block_hashes)

# %% [markdown]
# (task-3)=
# ## 02.3 Who shares what
#
# **Why it matters.** Whoever wonders about a hit rate has to see in two prompts what they share.
#
# Block size 4. Ada's prompt is the tokens 1 to 12, without adapter and without salt. How many blocks has each of
# these requests in common with her?
#
# | | tokens | salt |
# |---|---|---|
# | 1 | 1 to 14 | |
# | 2 | 1 to 10 | |
# | 3 | 1 to 7, 99, 9 to 12 | |
# | 4 | 5 to 12 | |
# | 5 | 1 to 12 | `""` |
# | 6 | 1 to 12 | `"acme"` |
#
# Lea's prompt is the tokens 1 to 12 as well, with the adapter `legal` at `adapters/legal-v1`, number 7. How many
# blocks have these two in common with Lea, with the same tokens: (1) the same adapter, loaded again under the number
# 9; (2) `legal` at `adapters/legal-v2`, number 7? Say it before you run anything. (15 points)

# %% task="02.3"
### BEGIN SOLUTION stub: shared_with_ada = [..., ..., ..., ..., ..., ...]
shared_with_ada = [3, 2, 1, 0, 3, 0]
### END SOLUTION
### BEGIN SOLUTION stub: shared_with_legal = [..., ...]
shared_with_legal = [3, 0]
### END SOLUTION

# %%
check("02.3", shared_with_ada, shared_with_legal)

# %% [markdown]
# (task-4)=
# ## 02.4 Yesterday's adapter answers
#
# **Why it matters.** A key that is too small fails without a trace: every counter looks well.
#
# A bug report, after real ones. *On Monday we served the adapter `legal` from `adapters/legal-v1`. On Tuesday we
# trained it anew and pointed the same name at `adapters/legal-v2`, without a restart. Prompts that begin like
# Monday's are still answered as on Monday. New prompts are fine.* The engine made its keys with the function below.
# Find what is wrong, and repair it. (15 points)


# %% task="02.4"
def extra_keys(is_first_block, adapter, cache_salt):
    """What the hash of a block covers besides parent and tokens, or None for nothing."""
    ### BEGIN SOLUTION
    keys = ()
    if adapter is not None:
        keys += (("lora", adapter.name, adapter.path),)
    if is_first_block and cache_salt:
        keys += (("cache_salt", cache_salt),)
    return keys or None
    ### INSTEAD
    # keys = ()
    # if adapter is not None:
    #     keys += (("lora", adapter.name),)
    # if is_first_block and cache_salt:
    #     keys += (("cache_salt", cache_salt),)
    # return keys or None
    ### END SOLUTION


# %%
print("Monday: ", extra_keys(True, Adapter("legal", "adapters/legal-v1", adapter_id=7), None))
print("Tuesday:", extra_keys(True, Adapter("legal", "adapters/legal-v2", adapter_id=7), None))

# %%
check("02.4", extra_keys)

# %% [markdown]
# (task-5)=
# ## 02.5 Collisions, and two processes
#
# **Why it matters.** A hash that lies raises no error, so one has to know beforehand what would happen.
#
# - An engine gets a hash function with one value for everything. Block size 4. A request with the tokens 1 to 8 comes
#   and goes. Then 50 51 52 53 54 is looked up. How many tokens are a hit in an engine that believes the hash
#   (`trusting`)? And in one that keeps each block's tokens and compares them on a hit (`comparing`)?
# - Two fresh processes hash the same block, and `PYTHONHASHSEED` is not set. Do both get the same hash (`processes`,
#   three times True or False) with (a) Python's `hash()` and a text as start value, (b) SHA-256 from a fixed start
#   value, (c) SHA-256 from a random start value?
# - Hashes of 16 bits: after how many different blocks, on average, do two have the same one (`sixteen_bits`): 321,
#   32768 or 65536?
#
# (10 points)

# %% task="02.5"
### BEGIN SOLUTION stub: trusting, comparing = ..., ...
trusting, comparing = 4, 0
### END SOLUTION
### BEGIN SOLUTION stub: processes = [..., ..., ...]  # (a), (b), (c)
processes = [False, True, False]  # (a), (b), (c)
### END SOLUTION
### BEGIN SOLUTION stub: sixteen_bits = ...
sixteen_bits = 321
### END SOLUTION

# %%
check("02.5", trusting, comparing, processes, sixteen_bits)

# %% [markdown]
# (task-6)=
# ## 02.6 What a name costs
#
# **Why it matters.** Every prompt is hashed to its end before anything is looked up, hit or no hit. The block size
# decides how much work that is.
#
# 1. `bytes_hashed`: how many bytes go through SHA-256 for all full blocks of a prompt? A hash function that counts,
#    and `BlockHasher` or your `block_hashes` to call it, do most of the work.
# 2. Run the cell after it. At which of the block sizes 1, 4, 16 and 64 are the most bytes hashed (`dearest`, the most
#    expensive)?
# 3. Run the cell after that one, a few times. What takes longer for a prompt, making its hashes or looking its blocks
#    up (`dearer`: "hashing" or "lookup")?
#
# (10 points)


# %% task="02.6"
def bytes_hashed(token_ids, block_size):
    """Bytes that are digested for the full blocks of these tokens, without adapter and salt."""
    ### BEGIN SOLUTION
    counted = 0

    def counting(parent, token_ids, extra):
        nonlocal counted
        counted += len(cbor2.dumps((parent, token_ids, extra), canonical=True))
        return bytes(32)

    BlockHasher("sha256_cbor", block_size, hash_block=counting).extend([], token_ids)
    return counted
    ### END SOLUTION


# %% tags=["raises-exception"]
prompt = [i % 20 for i in range(1024)]  # ids below 24 take one byte each
totals = {size: bytes_hashed(prompt, size) for size in (1, 4, 16, 64)}
rows = [(size, len(prompt) // size, total, f"{total / len(prompt):.1f}") for size, total in totals.items()]
viz.Table(("block size", "blocks", "bytes hashed", "bytes per token"), rows, right=("bytes per token",))


# %% tags=["volatile"]
def fastest(call):
    """Seconds of the fastest of nine calls: the one that was disturbed least."""
    times = []
    for _ in range(9):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


def hashing_to_lookup(size):
    """How many times as long as the lookup of a prompt its hashing takes."""
    hasher = BlockHasher("sha256_cbor", size)
    manager = KVCacheManager([GroupSpec(0, FULL_ATTENTION, size)], num_blocks=300, max_model_len=2048)
    request = Request("ada", prompt, SamplingParams(), hasher=hasher)
    manager.allocate_slots(request, len(prompt))
    hashing = fastest(lambda: hasher.extend([], prompt))
    return hashing / fastest(lambda: manager.get_computed_blocks(request))


{f"block size {size}": round(hashing_to_lookup(size), 1) for size in (4, 16, 64)}

# %% task="02.6"
### BEGIN SOLUTION stub: dearest = ...
dearest = 1
### END SOLUTION
### BEGIN SOLUTION stub: dearer = ...
dearer = "hashing"
### END SOLUTION

# %%
check("02.6", bytes_hashed, dearest, dearer)

# %% [markdown]
# (task-7)=
# ## 02.7 Where it is in vLLM
#
# **Why it matters.** Half of the public answers about vLLM are right for one generation. Whoever reads its source has
# to know which one a function belongs to. Functions of V0 (0.7.3) and V1 (0.33.0), from the code map, in the order of
# the alphabet:

# %%
sides = [side for name in ("block_hash", "extra_keys") for side in (topic(name).v0, topic(name).v1)]
names = {place.symbol for side in sides for place in side.vllm}
for step in (*call_path("v0"), *call_path("v1")):
    if step.component == "request" or "cache" in step.place.symbol.lower():
        names.add(step.place.symbol)
print(*sorted(names), sep="\n")

# %% [markdown]
# Which of them
#
# - hashes parent, tokens and keys of one block (`v1_one_block`, `v0_one_block`)?
# - is called when a request has got more tokens, and hashes the blocks that became full (`v1_more_tokens`)?
# - makes a number of the adapter, to be hashed with the tokens (`v0_adapter`)?
# - gives the block behind one hash (`v1_find`)?
# - looks for the longest cached prefix in a list of hashes, by bisection (`v0_find`)?
#
# (10 points)

# %% task="02.7"
### BEGIN SOLUTION stub: v1_one_block = ...
v1_one_block = "hash_block_tokens"
### END SOLUTION
### BEGIN SOLUTION stub: v0_one_block = ...
v0_one_block = "PrefixCachingBlock.hash_block_tokens"
### END SOLUTION
### BEGIN SOLUTION stub: v1_more_tokens = ...
v1_more_tokens = "Request.update_block_hashes"
### END SOLUTION
### BEGIN SOLUTION stub: v0_adapter = ...
v0_adapter = "Sequence.extra_hash"
### END SOLUTION
### BEGIN SOLUTION stub: v1_find = ...
v1_find = "BlockPool.get_cached_block"
### END SOLUTION
### BEGIN SOLUTION stub: v0_find = ...
v0_find = "PrefixCachingBlockAllocator.find_cached_blocks_prefix"
### END SOLUTION

# %%
check("02.7", v1_one_block, v0_one_block, v1_more_tokens, v0_adapter, v1_find, v0_find)

# %% [markdown]
# ## The engine on your hash
#
# First a recording, on your chain. vLLM 0.33.0 was given four requests with the same tokens and different salts
# (`script_cache_salt`). Hashes are named by numbers, in the order in which they first appear.

# %% tags=["raises-exception"]
trace = json.loads(Path("../tests/conformance/traces/v1/script_cache_salt.json").read_text())
numbers, rows = {}, []
for op in trace["ops"]:
    if op["op"] == "new_request":
        hashes = block_hashes(op["prompt"], 4, START, hash_block, cache_salt=op.get("cache_salt"))
        mine = [numbers.setdefault(block_hash, len(numbers)) for block_hash in hashes]
        rows.append((op["id"], op.get("cache_salt"), op["expect"]["hashes"], mine))
viz.Table(("request", "salt", "hashes in vLLM", "your hashes"), rows)

# %% [markdown]
# Then the engine, once with its own hash and once with yours. Two prompts, of which the second begins like the first.
# Hits, answers, and the hashes under which blocks were published should be the same both times.


# %% tags=["raises-exception"]
def run(parts=None):
    """Hits and answers of two prompts, and all hashes that were published."""
    recorder = Recorder()
    llm = LLM(
        "tiny", block_size=4, num_blocks=64, hash_algorithm="sha256_cbor", observer=recorder, parts=parts
    )
    found = []
    for thing in ("drum", "lamp"):
        prompt = f"The drum is in the tower. The lamp is in the barn.\nQ: Where is the {thing}?\nA:"
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=12, stop="\n"))
        found += [output.num_cached_tokens, output.text]
    marks = [mark for _, mark in recorder.record.marks() if mark.kind == "publish"]
    return found, [block_hash for mark in marks for block_hash in mark.facts["hashes"]]


reference, mine = run(), run(parts={"hash_block": hash_block})
print(f"{len(mine[1])} hashes were published, the same ones: {reference[1] == mine[1]}")
columns = ("hash", "cached tokens", "first answer", "cached tokens ", "second answer")
viz.Table(columns, [("the engine's", *reference[0]), ("yours", *mine[0])])

# %% [markdown]
# `LLM(parts={"hash_block": hash_block})` puts it there. `refengine demo --parts mine` runs the demo on all parts of
# yours that have passed. [Chapter 03](../chapters/03_used_free_cached.ipynb) is next.
