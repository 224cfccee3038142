# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown]
# # 03 Used, free, cached
#
# Nine tasks to [chapter 03](../chapters/03_used_free_cached.ipynb). Write into the cells that say `...` or raise
# `NotImplementedError`, run them, and run the cell with `check` below each. A hint comes from the terminal:
# `refengine hint 03.1`. At the end the engine runs on the queue and the pool that you built.

# %% tags=["setup"]
import time

from exercises import check
from exercises.tasks.ex03_scene import DequeQueue, PoolBase, Scene
from exercises.tasks.ex03_traces import POOL_TRACES, replay
from refengine import LLM, SamplingParams, viz
from refengine.errors import IntegrityError
from refengine.trace.codemap import call_path
from refengine.v1.block import FreeKVCacheBlockQueue, KVCacheBlock
from refengine.v1.block_pool import block_key

# %% [markdown]
# (task-1)=
# ## 03.1 The queue, before you run it
#
# **Why it matters.** Whether the next prompt with the same beginning is fast is decided by the order of this queue.
#
# V1, blocks of four tokens, six usable blocks (1 to 6). Then, in this order:
#
# 1. Ada starts with 10 tokens.
# 2. Bob starts with 6 tokens of his own.
# 3. Ada ends.
# 4. Bob ends.
# 5. Cleo starts with 13 tokens that nobody has seen.
#
# Say the free queue after event 4 (front first), Cleo's block table, and how many of Ada's 10 tokens a lookup finds
# after event 5.

# %% task="03.1"
### BEGIN SOLUTION stub: queue_after_4 = [...]
queue_after_4 = [5, 3, 6, 2, 1, 4]
### END SOLUTION
### BEGIN SOLUTION stub: cleos_table = [...]
cleos_table = [5, 3, 6, 2]
### END SOLUTION
### BEGIN SOLUTION stub: adas_tokens = ...
adas_tokens = 4
### END SOLUTION

# %%
check("03.1", queue_after_4, cleos_table, adas_tokens)

# %% [markdown]
# (task-2)=
# ## 03.2 Build the free queue
#
# **Why it matters.** Every block that any request gets comes out of this queue, and every hit takes one out of its
# middle. Its order is the order of eviction.
#
# The contract is in the docstrings. Below stands a linked queue with two extra blocks at its ends, as in the chapter.
# You may throw that inside away and build another: what is judged are the public calls, `num_free_blocks`, and that
# taking out a block does not look at the others. A call that is refused must leave the queue as it was.

# %% task="03.2" part="free_queue" name="FreeQueue"
class FreeQueue:
    """Blocks that nobody uses. The front is handed out next."""

    def __init__(self, blocks):
        """Starts with all of `blocks`, the first one at the front."""
        self.num_free_blocks = 0
        self.front, self.back = KVCacheBlock(-1), KVCacheBlock(-1)
        self.front.next, self.back.prev = self.back, self.front
        self.append_n(blocks)

    def popleft_n(self, n):
        """Takes `n` blocks from the front, in order, as a list. ValueError if `n` is negative or more than there are."""
        ### BEGIN SOLUTION
        if not 0 <= n <= self.num_free_blocks:
            raise ValueError(f"cannot take {n} of {self.num_free_blocks} blocks")
        taken = []
        for _ in range(n):
            block = self.front.next
            self.remove(block)
            taken.append(block)
        return taken
        ### END SOLUTION

    def remove(self, block):
        """Takes `block` out from wherever it stands. ValueError if it does not stand in the queue."""
        ### BEGIN SOLUTION
        if block.prev is None or block.next is None:
            raise ValueError(f"block {block.block_id} is not in the queue")
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = None
        self.num_free_blocks -= 1
        ### END SOLUTION

    def append_n(self, blocks):
        """Puts `blocks` at the back, in order. ValueError for one that stands in the queue already."""
        ### BEGIN SOLUTION
        for block in blocks:
            self._insert(self.back.prev, block, self.back)
        ### END SOLUTION

    def prepend_n(self, blocks):
        """Puts `blocks` at the front, the first of them foremost. ValueError as above."""
        ### BEGIN SOLUTION
        for block in reversed(blocks):
            self._insert(self.front, block, self.front.next)
        ### END SOLUTION

    def _insert(self, before, block, after):
        """Puts `block` between two neighbours, if you keep the links."""
        ### BEGIN SOLUTION
        if block.prev is not None or block.next is not None:
            raise ValueError(f"block {block.block_id} is in the queue already")
        block.prev, block.next = before, after
        before.next = after.prev = block
        self.num_free_blocks += 1
        ### END SOLUTION

    def __iter__(self):
        """All blocks, front to back."""
        ### BEGIN SOLUTION
        block = self.front.next
        while block is not self.back:
            yield block
            block = block.next
        ### END SOLUTION


# %%
check("03.2", FreeQueue)

# %% [markdown]
# (task-3)=
# ## 03.3 Measure it
#
# **Why it matters.** "A deque is fast" is true of three of the four operations. Which one is it not true of, and does
# the linked list pay for it somewhere else?
#
# Write `cost(queue_class, operation, num_blocks, n)`: the seconds that **one operation** takes on a queue of `num_blocks`
# blocks. `operation` is `"popleft_n"`, `"append_n"`, `"prepend_n"` (one call with `n` blocks), or `"remove"` (`n` calls,
# for `n` blocks in a row from the middle). Use `time.perf_counter()`. Building the queue is not part of the cost.
#
# Then run the table below it, and write down which operations take much longer when the pool is fifty times as large.

# %% task="03.3"
def cost(queue_class, operation, num_blocks, n=50):
    """The seconds that the operation takes."""
    ### BEGIN SOLUTION
    blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks + n)]
    queue, outside = queue_class(blocks[:num_blocks]), blocks[num_blocks:]
    first = (num_blocks - n) // 2
    middle = blocks[first : first + n]
    began = time.perf_counter()
    if operation == "remove":
        for block in middle:
            queue.remove(block)
    elif operation == "popleft_n":
        queue.popleft_n(n)
    else:
        getattr(queue, operation)(outside)
    return time.perf_counter() - began
    ### END SOLUTION


# %% tags=["volatile", "raises-exception"]
OPERATIONS = ("popleft_n", "remove", "append_n", "prepend_n")
small, large = 1_000, 50_000
for queue_class in (DequeQueue, FreeKVCacheBlockQueue):
    for operation in OPERATIONS:
        times = {size: min(cost(queue_class, operation, size) for _ in range(3)) for size in (small, large)}
        print(f"{queue_class.__name__:22} {operation:10} {times[large] / times[small]:6.1f} times as long")

# %% task="03.3"
### BEGIN SOLUTION stub: grows_in_the_deque = [...]
grows_in_the_deque = ["remove"]
### END SOLUTION
### BEGIN SOLUTION stub: grows_in_the_linked_list = ...  # a list too; it may be empty
grows_in_the_linked_list = []
### END SOLUTION

# %%
check("03.3", cost, grows_in_the_deque, grows_in_the_linked_list)

# %% [markdown]
# (task-4)=
# ## 03.4 Build the pool
#
# **Why it matters.** All blocks change hands in these four calls. Each moves two or three of the facts *used*, *free*,
# *cached*, and nearly every cache bug is a call that moved one too many or one too few.
#
# `PoolBase` is the engine's pool; you replace four of its methods. It gives you
#
# - `self.free_queue`, the queue of task 2;
# - `self.index`: `block_key(block_hash, group_id)` -> all blocks with that content, a dict by block id, in the order in
#   which they were published;
# - `self.forget(block)`: takes one block out of the index and its hash off the block. It does nothing to a block that
#   has none.
#
# A block has `ref_count` (its users), `block_hash` (None: not cached) and `is_null` (block 0).

# %% task="03.4" part="block_pool" name="Pool"
class Pool(PoolBase):
    """Takes blocks, returns them, finds them."""

    def get_new_blocks(self, n):
        """Takes `n` blocks from the front of the queue for one user each. None of them can be found any more."""
        ### BEGIN SOLUTION
        taken = self.free_queue.popleft_n(n)
        for block in taken:
            self.forget(block)
            block.ref_count = 1
        return taken
        ### END SOLUTION

    def touch(self, blocks):
        """One more user for each of `blocks`. A free one leaves the queue; its hash stays. The null block is in no queue."""
        ### BEGIN SOLUTION
        for block in blocks:
            if block.ref_count == 0 and not block.is_null:
                self.free_queue.remove(block)
            block.ref_count += 1
        ### END SOLUTION

    def free_blocks(self, blocks):
        """One user less for each of `blocks`, which come in the order in which they should be evicted.

        A block without a user joins the queue: at the back if it is cached, else at the front, in the given order. The
        null block never does. IntegrityError for a block that nobody uses.
        """
        ### BEGIN SOLUTION
        cached, worthless = [], []
        for block in blocks:
            if block.ref_count == 0:
                raise IntegrityError(f"block {block.block_id} is released, but nobody uses it")
            block.ref_count -= 1
            if block.ref_count == 0 and not block.is_null:
                (worthless if block.block_hash is None else cached).append(block)
        self.free_queue.prepend_n(worthless)
        self.free_queue.append_n(cached)
        ### END SOLUTION

    def get_cached_block(self, block_hash, group_ids):
        """A list with one block per group, of several copies the one published first. None unless all groups have one."""
        ### BEGIN SOLUTION
        found = []
        for group_id in group_ids:
            copies = self.index.get(block_key(block_hash, group_id))
            if not copies:
                return None
            found.append(next(iter(copies.values())))
        return found
        ### END SOLUTION


# %%
check("03.4", Pool)

# %% [markdown]
# (task-5)=
# ## 03.5 Find the bug: somebody else's words
#
# **Why it matters.** An engine with this bug runs, counts right, raises nothing, and answers from the wrong text. It
# was reported of a small engine (nano-vllm#163).
#
# One line of this pool is wrong. Look first at what happens below it, then repair it.

# %% task="03.5"
class Recycling(PoolBase):
    """A pool whose `get_new_blocks` has a bug."""

    def get_new_blocks(self, n):
        taken = self.free_queue.popleft_n(n)
        for block in taken:
            ### BEGIN SOLUTION
            self.forget(block)
            ### INSTEAD
            # block.block_hash = None
            ### END SOLUTION
            block.ref_count = 1
        return taken


# %%
scene = Scene(num_blocks=3, pool=Recycling)
scene.start("ada", range(8))
scene.finish("ada")
print("Xena's blocks:          ", scene.start("xena", [50, 51, 52]))
print("found for Ada's prompt: ", scene.lookup(range(9)))

# %%
check("03.5", Recycling)

# %% [markdown]
# (task-6)=
# ## 03.6 Find the bug: given back twice
#
# **Why it matters.** A table may name a block twice (vllm#1556, under a sliding window), and then one call gives the same
# block back twice. If it enters the queue twice, two requests get it.
#
# This pool counts users rightly and puts blocks at the right ends. Something goes wrong all the same, for one block
# with two users. Repair it without losing a release.

# %% task="03.6"
class Releasing(PoolBase):
    """A pool whose `free_blocks` has a bug."""

    def free_blocks(self, blocks):
        ### BEGIN SOLUTION
        unused = []
        for block in blocks:
            block.ref_count -= 1
            if block.ref_count == 0 and not block.is_null:
                unused.append(block)
        ### INSTEAD
        # blocks = list(blocks)
        # for block in blocks:
        #     block.ref_count -= 1
        # unused = [block for block in blocks if block.ref_count == 0 and not block.is_null]
        ### END SOLUTION
        self.free_queue.prepend_n([block for block in unused if block.block_hash is None])
        self.free_queue.append_n([block for block in unused if block.block_hash is not None])


# %% tags=["raises-exception"]
pool = Releasing(num_blocks=5)
(block,) = pool.get_new_blocks(1)
pool.touch([block])
pool.free_blocks([block, block])
print("queue:", [block.block_id for block in pool.free_queue])

# %%
check("03.6", Releasing)

# %% [markdown]
# (task-7)=
# ## 03.7 Find the bug: the reset that never happens
#
# **Why it matters.** After new weights are loaded, everything in the cache is wrong. A reset that says no for ever is
# found out late; one that says yes too early breaks the requests that run (asked about as vllm#9744).

# %% task="03.7"
class Resetting(PoolBase):
    """A pool whose `reset_prefix_cache` has a bug."""

    def reset_prefix_cache(self):
        """Forgets all hashes if no block is in use. Says whether it did; on a no nothing has changed."""
        ### BEGIN SOLUTION
        if self.num_free_blocks != self.num_blocks - 1:
            return False
        ### INSTEAD
        # if self.num_free_blocks != self.num_blocks:
        #     return False
        ### END SOLUTION
        for block in self.blocks:
            self.forget(block)
        return True


# %%
scene = Scene(num_blocks=6, pool=Resetting)
scene.start("ada", range(10))
print("while Ada runs:", scene.manager.reset_prefix_cache())
scene.finish("ada")
print("afterwards:    ", scene.manager.reset_prefix_cache())

# %%
check("03.7", Resetting)

# %% [markdown]
# (task-8)=
# ## 03.8 The same story in both generations
#
# **Why it matters.** Half of what is written about eviction in vLLM is right for the other engine.
#
# Seven usable blocks of four tokens: 1 to 7 in V1, 0 to 6 in V0. In this order: Ada starts with 6 tokens, Bob starts
# with 6 tokens, Bob ends, Ada ends, Cleo starts with 24 new tokens. Say Cleo's block table in V1 and in V0. (In V0 a
# request gives its blocks back first one first, and each block remembers when its request last ran.)

# %% task="03.8"
### BEGIN SOLUTION stub: cleo_in_v1 = [...]
cleo_in_v1 = [2, 4, 5, 6, 7, 3]
### END SOLUTION
### BEGIN SOLUTION stub: cleo_in_v0 = [...]
cleo_in_v0 = [1, 3, 4, 5, 6, 0]
### END SOLUTION

# %%
check("03.8", cleo_in_v1, cleo_in_v0)

# %% [markdown]
# (task-9)=
# ## 03.9 Where is it in vLLM?
#
# **Why it matters.** With the name you can read the real thing, set a breakpoint in it, or find its last change.
#
# Six places of vLLM, three in each generation. These are the names on the path of a request, with what each one decides.

# %%
rows = [
    (generation.upper(), step.place.symbol, step.decides)
    for generation in ("v1", "v0")
    for step in call_path(generation)
    if step.component == "block_pool" or "block/" in step.place.file or "evictor" in step.place.file
]
viz.Table(("", "symbol", "decides"), rows)

# %% [markdown]
# Write a name as in the table. `hands_out`: takes a free block and evicts what it held. `adopts_hit`: gives a cached
# block one user more. `order`: where it is decided which cached block is lost next.

# %% task="03.9"
### BEGIN SOLUTION stub: hands_out = {"V1": ..., "V0": ...}
hands_out = {"V1": "BlockPool.get_new_blocks", "V0": "PrefixCachingBlockAllocator._allocate_block_id"}
### END SOLUTION
### BEGIN SOLUTION stub: adopts_hit = {"V1": ..., "V0": ...}
adopts_hit = {"V1": "BlockPool.touch", "V0": "PrefixCachingBlockAllocator.allocate_immutable_block"}
### END SOLUTION
### BEGIN SOLUTION stub: order = {"V1": ..., "V0": ...}
order = {"V1": "BlockPool.free_blocks", "V0": "LRUEvictor.evict"}
### END SOLUTION

# %%
check("03.9", hands_out, adopts_hit, order)

# %% [markdown]
# (your-engine)=
# ## The engine on your parts
#
# The reference beside an engine whose free queue and pool are yours: the same prompts, the same tokens, the same blocks.
# Your parts run under guard. If one of them breaks a rule, the error names the part, the call and the broken rule.

# %% tags=["raises-exception"]
mine = {"free_queue": FreeQueue, "block_pool": Pool}
prompts = [[*range(40, 52), 60 + i] for i in range(3)]


def run(parts=None):
    llm = LLM("tiny", block_size=4, num_blocks=12, parts=parts)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True))
    queue = [block.block_id for block in llm.engine.kv_cache_manager.block_pool.free_queue]
    return [output.token_ids for output in outputs], queue


(tokens, queue), (my_tokens, my_queue) = run(), run(mine)
print("same tokens:", my_tokens == tokens, " same free queue:", my_queue == queue, my_queue)

# %% [markdown]
# And vLLM's recorded decisions, replayed on your parts:

# %% tags=["raises-exception"]
for name in POOL_TRACES:
    print(replay(name, mine))

# %% [markdown]
# In a terminal, `refengine demo --parts exercises/03_used_free_cached.ipynb` runs the demo on this notebook's parts, and
# `refengine demo --parts mine` on every part that has passed so far. Break a line of your pool on purpose and see what
# it says.
