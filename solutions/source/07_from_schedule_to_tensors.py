# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown]
# # 07 From schedule to tensors
#
# Six tasks to [chapter 07](../chapters/07_from_schedule_to_tensors.ipynb). Write into the cells that say `...` or raise
# `NotImplementedError`, run them, and run the cell with `check` below each. A hint comes from the terminal:
# `refengine hint 07.1`. At the end the engine runs on your batch and your tensors.

# %% tags=["setup"]
import numpy as np

from exercises import check
from exercises.tasks.ex07_scene import (
    batch_table,
    filled,
    furthest,
    messages,
    mixed,
    places,
    replay_slots,
    share,
    small_step,
)
from refengine import viz
from refengine.v1.input_batch import InputBatch

# %% [markdown]
# (task-1)=
# ## 07.1 A step by hand, before you run one
#
# **Why it matters.** A wrong position or slot raises no error. The model answers, and the answer is about something else.
#
# Blocks of four tokens, and this batch:

# %%
small_step()

# %% [markdown]
# The step has a, b and c in this order. Say its tensors: the position and the slot of each token, one list for all
# three requests; `query_start_loc`; `seq_lens`. And say for which requests a token is sampled.

# %% task="07.1"
### BEGIN SOLUTION stub: positions = [...]
positions = [8, 4, 5, 6, 7, 8, 0, 1, 2, 3, 4, 5]
### END SOLUTION
### BEGIN SOLUTION stub: slots = [...]
slots = [28, 36, 37, 38, 39, 16, 32, 33, 34, 35, 4, 5]
### END SOLUTION
### BEGIN SOLUTION stub: query_start_loc = [...]
query_start_loc = [0, 1, 6, 12]
### END SOLUTION
### BEGIN SOLUTION stub: seq_lens = [...]
seq_lens = [9, 9, 6]
### END SOLUTION
### BEGIN SOLUTION stub: sampled = [...]
sampled = ["a", "c"]
### END SOLUTION

# %%
check("07.1", positions, slots, query_start_loc, seq_lens, sampled)

# %% [markdown]
# (task-2)=
# ## 07.2 Build the batch that outlives a step
#
# **Why it matters.** The runner keeps its own copy of every running request. A number that stays behind when a row moves
# belongs to somebody else from then on.
#
# `InputBatch` has made the columns; you fill them. Row `i` of each belongs to the same request.
#
# | column | holds |
# |---|---|
# | `request_ids`, `params`, `adapters` | lists with one entry per occupied row |
# | `row_of` | dict: request id -> row |
# | `token_ids[row]`, `num_tokens[row]` | the known tokens, and how many they are |
# | `num_prompt_tokens[row]`, `num_computed_tokens[row]` | how many of them are the prompt; are computed |
# | `block_table[row]`, `num_blocks[row]` | block ids, and how many they are |
#
# A `share` has `request_id`, `token_ids`, `num_prompt_tokens`, `num_computed_tokens`, `sampling_params` and `adapter`. The
# occupied rows are always 0 to n - 1.

# %% task="07.2" name="Batch"
class Batch(InputBatch):
    """The persistent batch."""

    def add(self, share):
        """Gives a new or resumed request the next row. Its table is empty; `add_blocks` comes afterwards."""
        ### BEGIN SOLUTION
        row, count = len(self.request_ids), len(share.token_ids)
        self.row_of[share.request_id] = row
        self.request_ids.append(share.request_id)
        self.params.append(share.sampling_params)
        self.adapters.append(share.adapter)
        self.token_ids[row, :count] = share.token_ids
        self.num_tokens[row] = count
        self.num_prompt_tokens[row] = share.num_prompt_tokens
        self.num_computed_tokens[row] = share.num_computed_tokens
        self.num_blocks[row] = 0
        ### END SOLUTION

    def remove(self, request_id):
        """Frees a row and moves the last one into it. A request without a row is fine."""
        ### BEGIN SOLUTION
        row = self.row_of.pop(request_id, None)
        if row is None:
            return
        last = len(self.request_ids) - 1
        if row != last:
            self.row_of[self.request_ids[last]] = row
            self.token_ids[row] = self.token_ids[last]
            self.num_tokens[row] = self.num_tokens[last]
            self.num_prompt_tokens[row] = self.num_prompt_tokens[last]
            self.num_computed_tokens[row] = self.num_computed_tokens[last]
            self.block_table[row] = self.block_table[last]
            self.num_blocks[row] = self.num_blocks[last]
        for column in (self.request_ids, self.params, self.adapters):
            column[row] = column[last]
            column.pop()
        ### END SOLUTION

    def add_blocks(self, request_id, block_ids):
        """Appends blocks to a request's table."""
        ### BEGIN SOLUTION
        row = self.row_of[request_id]
        first = self.num_blocks[row]
        self.block_table[row, first : first + len(block_ids)] = block_ids
        self.num_blocks[row] += len(block_ids)
        ### END SOLUTION


# %% tags=["raises-exception"]
shares = [share("a", range(9), [5, 2, 7]), share("b", range(30, 33), [3]), share("c", range(50, 56), [8, 1], start=4)]
batch = filled(shares, batch_class=Batch)
batch.remove("a")
batch_table(batch)

# %%
check("07.2", Batch)

# %% [markdown]
# (task-3)=
# ## 07.3 Build the tensors
#
# **Why it matters.** This runs in every step, before the model. A loop over tokens in Python costs more than the model
# does on a fast device, so there is none: `np.repeat`, `cumsum` and indexing do it.
#
# `rows[i]` is the row of the step's i-th request, `counts[i]` how many tokens it computes. Tokens of all requests lie one
# after another in the order of `rows`. The batch stays as it is.

# %% task="07.3"
def prepare(batch, rows, counts):
    """Arrays of a step, by name: token_ids, positions, slots, query_start_loc, seq_lens."""
    ### BEGIN SOLUTION
    start = batch.num_computed_tokens[rows]
    query_start_loc = np.concatenate(([0], counts.cumsum()))
    row_of_token = np.repeat(rows, counts)
    positions = np.arange(query_start_loc[-1]) + np.repeat(start - query_start_loc[:-1], counts)
    blocks = batch.block_table[row_of_token, positions // batch.block_size]
    return {
        "token_ids": batch.token_ids[row_of_token, positions],
        "positions": positions,
        "slots": blocks * batch.block_size + positions % batch.block_size,
        "query_start_loc": query_start_loc,
        "seq_lens": start + counts,
    }
    ### END SOLUTION


# %%
check("07.3", prepare)

# %% [markdown]
# (task-4)=
# ## 07.4 Find the bug: who is sampled?
#
# **Why it matters.** "Has it no output yet? Then it is a prefill." Small engines asked like this, and a preempted request
# that came back with its outputs was taken for a decode (nano-vllm#144).
#
# `who_samples` is asked before the step's tokens are counted. It returns the indices, in the list of all tokens of the step,
# from which a token is sampled. It is right for every request that was never preempted.

# %% task="07.4"
def who_samples(batch, rows, counts):
    """Indices of the last tokens of those that have computed all they have when the step is over."""
    ends = counts.cumsum()
    computed = batch.num_computed_tokens[rows] + counts
    ### BEGIN SOLUTION
    done = computed == batch.num_tokens[rows]
    ### INSTEAD
    # done = computed >= batch.num_prompt_tokens[rows]
    ### END SOLUTION
    return [int(end) - 1 for end, is_done in zip(ends, done, strict=True) if is_done]


# %%
back = share("ada", range(11), [1, 2, 3], num_tokens=8, num_prompt_tokens=6)  # 6 of prompt, 5 of output; 8 fit
bob = share("bob", range(40, 46), [4, 5], start=5)
who_samples(filled([back, bob]), np.array([0, 1]), np.array([8, 1]))

# %%
check("07.4", who_samples)

# %% [markdown]
# (task-5)=
# ## 07.5 Measure it: what a step is told
#
# **Why it matters.** What a step is told must be read, and with several workers it must be sent. If it grows with the length of
# every request, so does the cost of each step.
#
# `messages(engine, prompts, max_tokens)` runs an engine and returns what its scheduler said: one list per step, in it one pair
# `(token ids, block ids)` per request. Write `carried(steps)`: for each step, how many ids its message holds, of both kinds.
#
# Then run the table, and say what the last step's message carries in V0 and in V1.

# %% task="07.5"
def carried(steps):
    """Ids in the message of each step, as a list."""
    ### BEGIN SOLUTION
    return [sum(len(tokens) + len(blocks) for tokens, blocks in step) for step in steps]
    ### END SOLUTION


# %% tags=["raises-exception"]
prompts = [range(10 * i, 10 * i + 20 + i) for i in range(4)]
rows = [(engine.upper(), str(carried(messages(engine, prompts, 6)))) for engine in ("v0", "v1")]
viz.Table(("", "ids in the message of each step"), rows)

# %% task="07.5"
### BEGIN SOLUTION stub: last_in_v0 = ...
last_in_v0 = 134
### END SOLUTION
### BEGIN SOLUTION stub: last_in_v1 = ...
last_in_v1 = 1
### END SOLUTION

# %%
check("07.5", carried, last_in_v0, last_in_v1)

# %% [markdown]
# (task-6)=
# ## 07.6 Where is it in vLLM?
#
# **Why it matters.** vLLM 0.33.0 holds two model runners, and both belong to V1. Whoever sets a breakpoint in the wrong one
# waits for ever.

# %%
places()

# %% [markdown]
# Who works out positions, and who slots? In V0; in V1's first runner, here "runner V1"; in its second one, "runner V2".
# Write a symbol as in the table. For some questions two are right.

# %% task="07.6"
### BEGIN SOLUTION stub: makes_positions = {"V0": ..., "runner V1": ..., "runner V2": ...}
makes_positions = {
    "V0": "ModelInputForGPUBuilder._compute_lens",
    "runner V1": "GPUModelRunner._prepare_inputs",
    "runner V2": "GPUModelRunner.prepare_inputs",
}
### END SOLUTION
### BEGIN SOLUTION stub: makes_slots = {"V0": ..., "runner V1": ..., "runner V2": ...}
makes_slots = {
    "V0": "compute_slot_mapping",
    "runner V1": "BlockTable.compute_slot_mapping",
    "runner V2": "BlockTables.compute_slot_mappings",
}
### END SOLUTION

# %%
check("07.6", makes_positions, makes_slots)

# %% [markdown]
# (your-engine)=
# ## The engine on your batch and your tensors
#
# The step of the chapter: a decode, a hit and a chunk, and the two steps behind it. With the engine's own runner, and with one that
# has your batch and your `prepare`. For each request that is sampled: does its best token agree with a plain forward over all
# its tokens, and are all logits within a thousandth?

# %% tags=["raises-exception"]
def run(**mine):
    desk, tokens, close = mixed(**mine), [], True
    for _ in range(3):
        step = desk.step()
        tokens.append({name: int(logits.argmax()) for name, logits in step.logits.items()})
        close &= max(furthest(desk, step).values()) < 1e-3
    return tokens, close


(reference, _), (tokens, close) = run(), run(batch=Batch, prepare=prepare)
print("the same tokens:", tokens == reference, " logits of a plain forward:", close)

# %% [markdown]
# And vLLM's recorded slots on your `prepare`:

# %% tags=["raises-exception"]
replay_slots(prepare)
