# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown]
# # 05 Who skips the work in V0
#
# Seven tasks to [chapter 05](../chapters/05_who_skips_the_work_in_v0.ipynb), about 40 minutes. Write into the cells that say
# `...` or raise `NotImplementedError`, run them, and run the cell with `check` below each. A hint comes from the
# terminal: `refengine hint 05.1`. At the end V0 runs on your skip, then without any, and then on your tracker.

# %% tags=["setup"]
import textwrap

from exercises import check
from exercises.tasks.ex05_scene import (
    PLACE,
    REPEATED,
    TOGETHER,
    TrackerBase,
    crowded,
    late_question,
    stages,
    tell,
    with_share,
    with_skip,
)
from exercises.tasks.ex05_traces import (
    BLOCK_TRACES,
    INPUT_TRACES,
    STEP_TRACES,
    replay_blocks,
    replay_inputs,
    replay_steps,
)
from refengine import LLM, SamplingParams, viz
from refengine.trace.codemap import call_path
from refengine.trace.record import Recorder
from refengine.v0.sequence import SequenceStatus

# %% [markdown]
# (task-1)=
# ## 05.1 The cases, before you run them
#
# **Why it matters.** These few numbers decide which tokens the model sees and which slots are written. An error of one here is
# a wrong answer that nobody reports.
#
# V0, blocks of four tokens. The scheduler tells the worker about these sequences. *Computed* are the tokens that earlier steps
# have computed, *chunk* is `token_chunk_size`, *hit* is `computed_block_nums`.
#
# | | what | tokens | computed | chunk | block table | hit |
# |---|---|---|---|---|---|---|
# | a | prompt | 13 | 0 | 13 | 9, 4, 6, 2 | none |
# | b | prompt | 13 | 0 | 13 | 3, 1, 6, 2 | 3, 1 |
# | c | prompt | 16 | 0 | 16 | 7, 8, 2, 5 | 7, 8, 2, 5 |
# | d | prompt | 20 | 8 | 8 | 0, 1, 2, 3, 4 | 0 |
# | e | prompt | 20 | 4 | 8 | 0, 1, 2, 3, 4 | 0, 1 |
# | f | prompt | 20 | 4 | 8 | 0, 1, 2, 3, 4 | 0, 1, 2 |
# | g | decode | 17 | 16 | 1 | 0, 1, 2, 3, 4 | 0, 1, 2, 3 |
#
# Say for each: (`context_len`, `query_len`) after the skip. And for b and c the slots that are written.

# %% task="05.1"
### BEGIN SOLUTION stub: numbers = {"a": (..., ...), "b": ..., "c": ..., "d": ..., "e": ..., "f": ..., "g": ...}
numbers = {"a": (0, 13), "b": (8, 5), "c": (15, 1), "d": (8, 8), "e": (8, 4), "f": (11, 1), "g": (16, 1)}
### END SOLUTION
### BEGIN SOLUTION stub: slots = {"b": [...], "c": [...]}
slots = {"b": [24, 25, 26, 27, 8], "c": [23]}
### END SOLUTION

# %%
check("05.1", numbers, slots)

# %% [markdown]
# (task-2)=
# ## 05.2 Build the skip
#
# **Why it matters.** This is the function that was looked for in the question of this book. All of V0's prefix caching comes
# down to what it cuts off.
#
# It runs in the worker, once per sequence, right after `compute_lens`. What it finds in `seq`, and may change:
#
# - `input_tokens`, `input_positions`: what would be computed, the chunk after the computed tokens.
# - `context_len`: tokens before that. `seq_len`: where the chunk ends. `query_len`: how many tokens that is.
#
# What it finds and leaves alone: `is_prompt`, and `computed_block_nums` (a list, or None if caching is off).
#
# Four cases: no hit; already past the hit; a partial hit; a full hit. Mind where the chunk begins and ends: neither need be the
# beginning or the end of the prompt.

# %% task="05.2"
def skip(seq, block_size, sliding_window=None):
    """Cuts what the hit has computed off the input of one sequence.

    `seq.prefix_cache_hit` says afterwards whether there was a hit: of a prompt, and without a sliding window.
    `seq.num_cached_tokens` says how many tokens it had.
    """
    ### BEGIN SOLUTION
    hit = seq.computed_block_nums
    seq.prefix_cache_hit = bool(hit) and seq.is_prompt and sliding_window is None
    if not seq.prefix_cache_hit:
        return
    seq.num_cached_tokens = len(hit) * block_size
    if seq.num_cached_tokens <= seq.context_len:
        return
    start = min(seq.num_cached_tokens, seq.seq_len - 1)
    cut = start - seq.context_len
    seq.input_tokens = seq.input_tokens[cut:]
    seq.input_positions = seq.input_positions[cut:]
    seq.context_len = start
    seq.query_len = seq.seq_len - start
    ### END SOLUTION


# %% tags=["raises-exception"]
stages(tell(13, [0, 1]), skip)

# %%
check("05.2", skip)

# %% [markdown]
# (task-3)=
# ## 05.3 Move the skip into the scheduler
#
# **Why it matters.** V1 answers the same question in one place and two lines. Whoever adds a feature to the worker need not
# know that prefix caching exists.
#
# Write V1's rule for a request that is admitted: at which position does it start, and how many tokens does it compute in this
# step? `num_cached_tokens` is what is cached of it, a multiple of the block size, possibly all of it. V1's cap applies: one token
# must run, and a hit is whole blocks. The budget is for tokens that are computed.

# %% task="05.3"
def first_share(num_tokens, num_cached_tokens, block_size, budget):
    """(start, num_new_tokens) of a request in the step that admits it."""
    ### BEGIN SOLUTION
    cap = (num_tokens - 1) // block_size * block_size
    start = min(num_cached_tokens, cap)
    return start, min(num_tokens - start, budget)
    ### END SOLUTION


# %% tags=["raises-exception"]
for num_tokens in (11, 12, 13):
    print(num_tokens, "tokens, all full blocks cached:", first_share(num_tokens, num_tokens // 4 * 4, 4, 100))

# %%
check("05.3", first_share)

# %% [markdown]
# (task-4)=
# ## 05.4 What need not be said any more
#
# **Why it matters.** A message between two parts shows who knows what. When the scheduler skips, some of V0's fields have
# nothing left to say.
#
# V0's `SequenceGroupMetadata` has these fields:
#
# `request_id`, `is_prompt`, `do_sample`, `token_chunk_size`, `token_ids`, `num_prompt_tokens`, `num_computed_tokens`,
# `block_tables`, `computed_block_nums`, `params`, `adapter`
#
# Three of them have no successor in our V1's `ScheduledRequest`, under any name. Which? (The worker of V1 knows all tokens of each
# request, and has one kind of attention for all.)
#
# Then translate. V0's worker is told the following, in blocks of four. What would V1 tell its runner, as
# (`num_computed_tokens`, `num_tokens`)?
#
# | | what | tokens | `num_computed_tokens` | `token_chunk_size` | `computed_block_nums` |
# |---|---|---|---|---|---|
# | p | prompt | 13 | 0 | 13 | 0, 1 |
# | q | prompt | 20 | 8 | 8 | 0 |
# | r | decode | 17 | 16 | 1 | 0, 1, 2, 3 |
# | s | prompt | 12 | 0 | 12 | 0, 1, 2 |

# %% task="05.4"
### BEGIN SOLUTION stub: unnecessary = [..., ..., ...]
unnecessary = ["computed_block_nums", "is_prompt", "do_sample"]
### END SOLUTION
### BEGIN SOLUTION stub: shares = {"p": (..., ...), "q": ..., "r": ..., "s": ...}
shares = {"p": (8, 5), "q": (8, 8), "r": (16, 1), "s": (8, 4)}
### END SOLUTION

# %%
check("05.4", unnecessary, shares)

# %% [markdown]
# (task-5)=
# ## 05.5 Where is it in vLLM?
#
# **Why it matters.** With five names one can read V0's whole path, and with two V1's.
#
# These are the names on the path of a request in vLLM, in alphabetical order.

# %%
for title, path in (("V0 (0.7.3)", "v0"), ("V1 as of 0.7.3", "v1_early"), ("V1 (0.33.0)", "v1")):
    names = sorted({step.place.symbol for step in call_path(path)})
    print(textwrap.fill(f"{title}: {', '.join(names)}", 116), end="\n\n")

# %% [markdown]
# Write one name for each. `knows`: says which blocks, or how many tokens, are computed. `passes on`: puts it into what the worker
# gets. `skips`: leaves those tokens out. `writes`: says which slots are written. `counts`: adds to the computed tokens after
# the model has run. `starts`: works out the positions, from the computed tokens on. (Where several names are right, each of
# them is.)

# %% task="05.5"
### BEGIN SOLUTION stub: in_v0 = {"knows": ..., "passes on": ..., "skips": ..., "writes": ..., "counts": ...}
in_v0 = {
    "knows": "ComputedBlocksTracker.get_num_cached_tokens",
    "passes on": "Scheduler.schedule",
    "skips": "ModelInputForGPUBuilder._compute_for_prefix_cache_hit",
    "writes": "compute_slot_mapping",
    "counts": "LLMEngine._process_model_outputs",
}
### END SOLUTION
### BEGIN SOLUTION stub: in_early_v1 = {"knows": ..., "skips": ..., "starts": ...}
in_early_v1 = {
    "knows": "KVCacheManager.get_computed_blocks",
    "skips": "Scheduler.schedule",
    "starts": "GPUModelRunner._prepare_inputs",
}
### END SOLUTION
### BEGIN SOLUTION stub: in_v1 = {"knows": ..., "skips": ..., "starts": ...}
in_v1 = {
    "knows": "KVCacheManager.get_computed_blocks",
    "skips": "Scheduler.schedule",
    "starts": "GPUModelRunner._prepare_inputs",
}
### END SOLUTION

# %%
check("05.5", in_v0, in_early_v1, in_v1)

# %% [markdown]
# (task-6)=
# ## 05.6 Find the bug: an answer out of the past
#
# **Why it matters.** With this bug vLLM 0.7.3 skipped tokens whose keys and values belonged to somebody else. No error, no
# warning, and fluent answers (vLLM PR #18957 describes it).
#
# The tracker remembers what it told a sequence, in `self.answers`, by sequence id; freeing a sequence takes its entry out.
# `self.look_up(seq)` asks anew and remembers nothing. A sequence has a `status` (`SequenceStatus.WAITING`, `RUNNING`, ...), and
# `is_prefill` is true until its prompt is computed.
#
# One line decides when the old answer will do. Forgetting everything is no repair: while a prompt is computed in chunks,
# its own blocks are in the cache too, and V0 calls them computed before they are.

# %% task="05.6"
class Tracker(TrackerBase):
    """A tracker whose memory is too long."""

    def get_num_cached_tokens(self, seq):
        """Leading tokens of the sequence that are cached and computed."""
        answer = self.answers.get(seq.seq_id)
        ### BEGIN SOLUTION
        if answer is None or not seq.is_prefill or seq.status is SequenceStatus.WAITING:
            answer = self.answers[seq.seq_id] = self.look_up(seq)
        ### INSTEAD
        # if answer is None or not seq.is_prefill:
        #     answer = self.answers[seq.seq_id] = self.look_up(seq)
        ### END SOLUTION
        return answer


# %%
bench, bob = crowded(mode="faithful", tracker=Tracker)
print("the tracker says", bench.manager.get_num_cached_tokens(bob), "tokens")
print("Bob is asked about:", late_question(0, Tracker, mode="faithful")[0])

# %%
check("05.6", Tracker)

# %% [markdown]
# (task-7)=
# ## 05.7 Measure it
#
# **Why it matters.** "V1 is always better at this" is not so. Which of the two computes fewer tokens depends on who comes
# when.
#
# Write `computed_per_step(engine, batches, block_size)`: each batch is a list of prompts that come together, and the next one
# comes when all have ended. Returns a list: for each step, how many tokens were computed in it. A `Recorder` as `observer=`
# sees everything; the mark `run` has the fact `num_tokens`. Every request samples one token, as in `one_token`.
#
# Then run the table below it. The last question is about a prompt of 64 tokens in blocks of 16, which comes again when it is
# cached to its end: how many tokens more does V1 compute for it than V0?

# %% task="05.7"
one_token = SamplingParams(max_tokens=1, ignore_eos=True)


def computed_per_step(engine, batches, block_size=4):
    """Tokens computed in each step, as a list."""
    ### BEGIN SOLUTION
    recorder = Recorder()
    llm = LLM("tiny", engine=engine, block_size=block_size, num_blocks=64, observer=recorder)
    for prompts in batches:
        llm.generate(prompts, one_token)
    runs = [[mark.facts["num_tokens"] for mark in step.marks if mark.kind == "run"] for step in recorder.steps]
    return [sum(tokens) for tokens in runs]
    ### END SOLUTION


# %% tags=["raises-exception"]
rows = [
    (name, *(str(computed_per_step(engine, batches)) for engine in ("v0", "v1")))
    for name, batches in (("a prompt, then three times the same", REPEATED), ("three times at once", TOGETHER))
]
viz.Table(("tokens computed in each step", "V0", "V1"), rows)

# %% task="05.7"
### BEGIN SOLUTION stub: fewer = {"repeated": ..., "together": ...}  # "v0" or "v1"
fewer = {"repeated": "v0", "together": "v1"}
### END SOLUTION
### BEGIN SOLUTION stub: more_in_v1_at_16 = ...
more_in_v1_at_16 = 15
### END SOLUTION

# %%
check("05.7", computed_per_step, fewer, more_in_v1_at_16)

# %% [markdown]
# (your-engine)=
# ## The engine on your parts
#
# V0 as it is; V0 with your skip in its worker; and V0 with your `first_share` in its scheduler, where the worker never hears of
# a computed block. Three prompts, the second and the third with a hit. The same tokens each time.

# %% tags=["raises-exception"]
prompts = [list(range(40, 54)), [*range(40, 48), *range(60, 65)], list(range(40, 52))]


def run(change=lambda llm: llm):
    recorder = Recorder()
    llm = change(LLM("tiny", engine="v0", block_size=4, num_blocks=16, observer=recorder))
    tokens = [llm.generate(prompt, SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids for prompt in prompts]
    first = [mark.facts for _, mark in recorder.record.marks() if mark.kind == "run" and mark.facts["num_tokens"] > 1]
    return tokens, [(facts["start"], facts["num_tokens"]) for facts in first]


reference = run()
for name, change in (("skip", lambda llm: with_skip(llm, skip)), ("share", lambda llm: with_share(llm, first_share))):
    tokens, starts = run(change)
    print(f"{name:5} the same tokens: {tokens == reference[0]}, (start, tokens) of chunks: {starts}")

# %% [markdown]
# With the share, the third prompt computes four tokens from position 8 on, as in V1; with the skip it computes one, which is
# why it is not in the list. (It takes one more thing: chunked prefill is on here, so every prompt gets its block table. Without
# it, V0 leaves the table empty where no hit is reported, and attention would not find the keys and values of the first tokens.)
#
# And vLLM's recorded decisions, replayed on your skip and your tracker:

# %% tags=["raises-exception"]
for name in INPUT_TRACES:
    print(replay_inputs(name, skip))
for name in STEP_TRACES:
    print(replay_steps(name, skip=skip, tracker=Tracker))
for name in BLOCK_TRACES:
    print(replay_blocks(name, Tracker))

# %% [markdown]
# Four questions about Ada's text, after Cleo has taken her blocks, with your tracker in a V0 that has all its other defects:

# %% tags=["raises-exception"]
answers = [(q.question, late_question(n, Tracker, mode="faithful")[0]) for n, q in enumerate(PLACE.questions)]
viz.Table(("Bob asks", "with your tracker"), answers)
