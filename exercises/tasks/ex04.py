"""Tasks of exercise 04: looking up a prefix, allocating slots, three bugs that were reported, and the hit rate."""

from __future__ import annotations

from collections.abc import Callable

from exercises.grader import Task, WrongAnswer
from exercises.tasks.ex04_checks import (
    check_drafting,
    check_found,
    check_hasty,
    check_hit_rate,
    check_lookup,
    check_manager,
    check_map,
    check_resume,
)

# -- other right answers, and wrong ones that need more than a line -----------------------------------------

RECURSIVE_LOOKUP = """
from itertools import takewhile

class Lookup(FullAttentionManager):
    def find_longest_cache_hit(self, block_hashes, max_length, drop_last):
        group = [self.spec.group_id]
        count = min(len(block_hashes), max_length // self.block_size)
        answers = (self.pool.get_cached_block(block_hashes[i], group) for i in range(count))
        hits = [blocks[0] for blocks in takewhile(lambda blocks: blocks is not None, answers)]
        if drop_last and hits:
            hits.pop()
        return hits
"""

BISECTED = """
class Lookup(FullAttentionManager):
    def find_longest_cache_hit(self, block_hashes, max_length, drop_last):
        hashes = block_hashes[: max_length // self.block_size]
        ask = lambda i: self.pool.get_cached_block(hashes[i], [self.spec.group_id])
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if ask(middle) else (low, middle)
        hits = [block for i in range(low) for block in ask(i) or []]
        return hits[:-1] if drop_last else hits
"""

OTHER_MANAGER = """
class Manager(ManagerBase):
    def allocate_slots(self, request, num_new_tokens, hits=None, num_hit_tokens=0, *, num_lookahead_tokens=0, **gates):
        name = request.request_id
        found = [] if not hits else hits.blocks[0]
        end = request.num_computed_tokens + num_hit_tokens + num_new_tokens
        num_slots = min(end + num_lookahead_tokens, self.max_model_len)
        must_fit, reserved = self.gates(request, num_slots, **gates)
        held = self.tables.get(name, [])
        needed = max(0, self.blocks_for(must_fit) - len(held) - len([b for b in found if b.ref_count > 0]))
        needed = max(needed, len([b for b in found if b.ref_count == 0]))
        if self.block_pool.num_free_blocks - reserved < needed:
            self.tell_admit(request, False)
            return None
        self.tell_admit(request, True)
        if found:
            self.tables[name] = held = [*found]
            self.num_published[name] = len(held)
            self.block_pool.touch(held)
        new = []
        while len(held) + len(new) < self.blocks_for(num_slots):
            new += self.block_pool.get_new_blocks(1)
        self.tables[name] = held + new
        self.tell_allocate(request, num_new_tokens, new)
        first = self.num_published.setdefault(name, 0)
        last = min(end, request.num_tokens) // self.block_size
        for position in range(first, last):
            self.publish(request, position, position + 1)
        return KVCacheBlocks((new,))
"""

OTHER_RESUME = """
def resume(manager, request, budget):
    hits, start, _ = manager.get_computed_blocks(request)
    end = min(request.num_tokens, start + budget)
    granted = manager.allocate_slots(request, end - start, hits, start)
    return None if granted is None else (start, end - start)
"""

GIVES_BACK = """\
        if hits:
            self.coordinator.add_computed_blocks(request.request_id, hits.blocks)
        required = self.coordinator.get_num_blocks_to_allocate(request.request_id, num_slots, self.empty.blocks)
        if required > self.block_pool.num_free_blocks:
            self.free(request)
            return None
"""
ASKS_FIRST = """\
        required = self.coordinator.get_num_blocks_to_allocate(request.request_id, num_slots, hits.blocks)
        if required > self.block_pool.num_free_blocks:
            return None
        if hits:
            self.coordinator.add_computed_blocks(request.request_id, hits.blocks)
"""

PER_REQUEST = """
def hit_rate(block_size, prompts):
    stage = Stage(num_blocks=1000, block_size=block_size)
    rates = []
    for number, tokens in enumerate(prompts):
        rates.append(block_size * len(stage.lookup(tokens)) / len(tokens))
        stage.start(str(number), tokens)
        stage.finish(str(number))
    return sum(rates) / len(rates)

never_found_at_16 = 2
zero_from = 64
"""
WITH_STATISTICS = """
def hit_rate(block_size, prompts):
    stage = Stage(1000, block_size)
    stats = stage.manager.stats
    for number, tokens in enumerate(prompts):
        request = stage.wait(str(number), tokens)
        _, hit, _ = stage.manager.get_computed_blocks(request)
        stats.record(request.num_tokens, hit, resumed=False)
        stage.schedule(str(number))
        stage.finish(str(number))
    return stats.hit_rate

never_found_at_16 = 50 % 16
zero_from = 2 ** 6
"""

TASKS = [
    Task(
        id="04.1",
        kind="predict",
        title="what is found",
        points=10,
        answers={"found": dict, "bobs_table": list, "cleos_table": list},
        check=check_found,
        hints=(
            "For each prompt ask twice: up to where is it Ada's? And how many whole blocks is that?",
            "One token must always be left to run: of n tokens at most n - 1 can be found, in whole blocks.",
            "Ada's block 4 holds two tokens and has no hash. Bob finds two blocks and computes a copy of block 3; "
            "Cleo finds the older of the two copies.",
        ),
        wrong=(
            WrongAnswer("no cap", "the whole prompt may be found", edits=(('"b": 8', '"b": 12'),)),
            WrongAnswer("V0's cap", "only the last token is computed again", edits=(('"b": 8', '"b": 11'),)),
            WrongAnswer("part of a block", "a part of a block is found", edits=(('"a": 12', '"a": 14'),)),
            WrongAnswer(
                "goes on", "later blocks are found after a difference", edits=(('"d": 4', '"d": 8'),)
            ),
            WrongAnswer("anywhere", "any common piece is found", edits=(('"e": 0', '"e": 12'),)),
            WrongAnswer("newest copy", "the last copy is found", edits=(("[1, 2, 3, 5]", "[1, 2, 4, 5]"),)),
        ),
        other="found = dict(f=12, e=0, d=4, c=0, b=8, a=12)\nbobs_table = (1, 2, 4)\ncleos_table = [*range(1, 4), 5]",
    ),
    Task(
        id="04.2",
        kind="build",
        title="the lookup",
        points=15,
        answers={"Lookup": type},
        check=check_lookup,
        hints=(
            "Walk over the hashes from left to right. What ends the walk?",
            "Three things end it: a miss, no more hashes, and max_length // block_size blocks.",
            "for block_hash in block_hashes[: max_length // self.block_size]: ask the pool; None ends the loop, else "
            "add the block. At the end drop_last takes the last one off.",
        ),
        wrong=(
            WrongAnswer("goes on", "a hole does not end the prefix", edits=(("break", "continue"),)),
            WrongAnswer(
                "no cap",
                "the whole prompt may be found",
                edits=(("block_hashes[: max_length // self.block_size]", "block_hashes"),),
            ),
            WrongAnswer(
                "rounds up",
                "the cap is rounded up",
                edits=(("max_length // self.block_size", "-(-max_length // self.block_size)"),),
            ),
            WrongAnswer(
                "takes them",
                "a lookup takes the blocks",
                edits=(
                    (
                        "            hits += cached\n",
                        "            hits += cached\n            self.pool.touch(cached)\n",
                    ),
                ),
            ),
            WrongAnswer("V0's bisection", "after a hit everything before it is there", source=BISECTED),
            WrongAnswer(
                "keeps the last",
                "drop_last is for somebody else",
                edits=(("return hits[:-1] if drop_last else hits", "return hits"),),
            ),
        ),
        other=RECURSIVE_LOOKUP,
        part="full_attention",
    ),
    Task(
        id="04.3",
        kind="build",
        title="slots for a step",
        points=25,
        answers={"Manager": type},
        check=check_manager,
        hints=(
            "Write down for one request: blocks in all, blocks it holds, blocks that were found, free blocks.",
            "A found block that nobody uses stands in the free queue. Adopting it takes it from there, like a new one.",
            "Decide with blocks_for(must_fit) - len(table) - len(found) new ones, and one for each found block with "
            "ref_count 0. Publish up to min(num_computed_tokens + num_new_tokens, request.num_tokens) // block_size.",
        ),
        wrong=(
            WrongAnswer(
                "hits for nothing",
                "a hit costs nothing",
                edits=(("fits = new + adopted + reserved", "fits = new + reserved"),),
            ),
            WrongAnswer(
                "as V0",
                "hits are not subtracted",
                edits=(
                    (
                        "self.blocks_for(must_fit) - len(table) - len(found), 0)",
                        "self.blocks_for(must_fit) - len(table), 0)",
                    ),
                    ("fits = new + adopted + reserved", "fits = new + reserved"),
                ),
            ),
            WrongAnswer(
                "not touched",
                "a hit stays in the free queue",
                edits=(("            self.block_pool.touch(found)\n", ""),),
            ),
            WrongAnswer(
                "takes before it asks",
                "a refusal leaves something behind",
                edits=(
                    ("            self.block_pool.touch(found)\n", ""),
                    (
                        "        fits = new + adopted + reserved <= self.block_pool.num_free_blocks\n",
                        "        fits = new + adopted + reserved <= self.block_pool.num_free_blocks\n"
                        "        self.block_pool.touch(found)\n",
                    ),
                ),
            ),
            WrongAnswer(
                "hits published",
                "a hit is published again",
                edits=(("            self.num_published[request_id] = len(found)\n", ""),),
            ),
            WrongAnswer(
                "drafts published",
                "drafts are published",
                edits=(
                    (
                        "min(num_computed_tokens + num_new_tokens, request.num_tokens)",
                        "min(num_slots, request.num_tokens)",
                    ),
                ),
            ),
            WrongAnswer(
                "the whole prompt",
                "the block that is begun is published",
                edits=(
                    (
                        "num_full = min(num_computed_tokens + num_new_tokens, request.num_tokens) // self.block_size",
                        "num_full = min(len(table), request.num_tokens // self.block_size)",
                    ),
                ),
            ),
            WrongAnswer(
                "when computed",
                "published one step too late",
                edits=(
                    (
                        "min(num_computed_tokens + num_new_tokens, request.num_tokens)",
                        "min(num_computed_tokens, request.num_tokens)",
                    ),
                ),
            ),
        ),
        other=OTHER_MANAGER,
        part="kv_cache_manager",
    ),
    Task(
        id="04.4",
        kind="bug",
        title="past the end of the sequence",
        points=10,
        answers={"resume": Callable},
        check=check_resume,
        hints=(
            "Add the two numbers it returns. How long is the sequence?",
            "request.num_computed_tokens is 0 for whoever was preempted. What has been found is known one line later.",
            "Look up first; then num_new_tokens = min(request.num_tokens - num_hit_tokens, budget).",
        ),
        wrong=(
            WrongAnswer(
                "sets the counter",
                "the hit is counted twice",
                edits=(
                    (
                        "    num_new_tokens = min(",
                        "    request.num_computed_tokens = num_hit_tokens\n    num_new_tokens = min(",
                    ),
                ),
            ),
            WrongAnswer(
                "no lookup",
                "everything is computed again",
                edits=(("manager.get_computed_blocks(request)", "manager.empty, 0, 0"),),
            ),
            WrongAnswer(
                "always one",
                "one token is left",
                edits=(("min(request.num_tokens - num_hit_tokens, budget)", "min(1, budget)"),),
            ),
            WrongAnswer(
                "prompt",
                "only the prompt comes back",
                edits=(
                    ("request.num_tokens - num_hit_tokens", "request.num_prompt_tokens - num_hit_tokens"),
                ),
            ),
            WrongAnswer(
                "no budget",
                "the budget is forgotten",
                edits=(
                    (
                        "min(request.num_tokens - num_hit_tokens, budget)",
                        "request.num_tokens - num_hit_tokens",
                    ),
                ),
            ),
        ),
        other=OTHER_RESUME,
    ),
    Task(
        id="04.5",
        kind="bug",
        title="refused, and holding blocks",
        points=10,
        answers={"Hasty": type},
        check=check_hasty,
        hints=(
            "What has been done already when it says no?",
            "Giving the blocks back is no repair: they would stand at another place in the queue.",
            "Ask for the number of blocks first, with the hits in it (hits.blocks), and adopt them after the test.",
        ),
        wrong=(
            WrongAnswer("gives them back", "a refusal reorders the queue", edits=((ASKS_FIRST, GIVES_BACK),)),
            WrongAnswer(
                "without the hits",
                "hits are not subtracted",
                edits=(("num_slots, hits.blocks)", "num_slots, self.empty.blocks)"),),
            ),
            WrongAnswer(
                "only new ones",
                "a hit costs nothing",
                edits=(
                    (
                        "if required > self.block_pool.num_free_blocks:",
                        "unused = [block for block in hits.blocks[0] if not block.ref_count]\n"
                        "        if required - len(unused) > self.block_pool.num_free_blocks:",
                    ),
                ),
            ),
        ),
        other=(
            (
                "if required > self.block_pool.num_free_blocks:",
                "enough = self.block_pool.num_free_blocks >= required\n        if not enough:",
            ),
        ),
    ),
    Task(
        id="04.6",
        kind="bug",
        title="a guess in the index",
        points=10,
        answers={"Drafting": type},
        check=check_drafting,
        hints=(
            "Which of the tokens 5, 6 and 7 is certain when the step is over?",
            "num_slots has the drafts in it: they need slots. Publishing needs another number.",
            "Publish up to num_computed_tokens + num_new_tokens.",
        ),
        wrong=(
            WrongAnswer(
                "not beside drafts",
                "no publishing beside drafts",
                edits=(
                    (
                        "num_final = num_computed_tokens + num_new_tokens",
                        "num_final = 0 if num_lookahead_tokens else num_computed_tokens + num_new_tokens",
                    ),
                ),
            ),
            WrongAnswer(
                "taken off twice",
                "drafts are taken off twice",
                edits=(
                    (
                        "num_final = num_computed_tokens + num_new_tokens",
                        "num_final = num_computed_tokens + num_new_tokens - num_lookahead_tokens",
                    ),
                ),
            ),
            WrongAnswer(
                "prompts only",
                "only prompts are published",
                edits=(
                    (
                        "num_final = num_computed_tokens + num_new_tokens",
                        "num_final = min(num_computed_tokens + num_new_tokens, request.num_prompt_tokens)",
                    ),
                ),
            ),
        ),
        other=(
            (
                "num_final = num_computed_tokens + num_new_tokens",
                "num_final = min(num_slots - num_lookahead_tokens, request.num_tokens)",
            ),
        ),
    ),
    Task(
        id="04.7",
        kind="map",
        title="where it is in vLLM",
        points=10,
        answers={"decides": dict, "skips": dict, "publishes": dict},
        check=check_map,
        hints=(
            "The last column of the table says what each place decides.",
            "In V1 the scheduler never schedules those tokens. In V0 it does, and somebody else cuts them off.",
            "V0 skips in the model-input builder, and marks blocks as computed at the end of scheduling.",
        ),
        wrong=(
            WrongAnswer(
                "in the scheduler",
                "V0's scheduler skips",
                edits=(
                    (
                        '"ModelInputForGPUBuilder._compute_for_prefix_cache_hit"',
                        '"Scheduler._get_num_new_uncached_and_cached_tokens"',
                    ),
                ),
            ),
            WrongAnswer(
                "in the runner",
                "V1's runner skips",
                edits=(('"V1": "Scheduler.schedule"', '"V1": "GPUModelRunner._prepare_inputs"'),),
            ),
            WrongAnswer(
                "at the end",
                "published at the end",
                edits=(('"BlockPool.cache_full_blocks"', '"BlockPool.free_blocks"'),),
            ),
            WrongAnswer(
                "who skips, decides",
                "deciding is skipping",
                edits=(('"V1": "KVCacheManager.get_computed_blocks"', '"V1": "Scheduler.schedule"'),),
            ),
        ),
        other=(
            ('"KVCacheManager.get_computed_blocks"', '"FullAttentionManager.find_longest_cache_hit"'),
            (
                '"ComputedBlocksTracker.get_num_cached_tokens"',
                '"PrefixCachingBlockAllocator.find_cached_blocks_prefix"',
            ),
        ),
    ),
    Task(
        id="04.8",
        kind="measure",
        title="hit rate and block size",
        points=10,
        answers={"hit_rate": Callable, "never_found_at_16": int, "zero_from": int},
        check=check_hit_rate,
        hints=(
            "Two sums, tokens found and tokens asked for, and one division at the very end.",
            "Look up before the request starts; after that it would find itself.",
            "found += block_size * len(stage.lookup(tokens)), asked += len(tokens), then start and finish.",
        ),
        wrong=(
            WrongAnswer("mean of rates", "every request weighs the same", source=PER_REQUEST),
            WrongAnswer(
                "in blocks",
                "blocks divided by tokens",
                edits=(("found += block_size * len", "found += len"),),
            ),
            WrongAnswer(
                "without the first",
                "the first request is left out",
                edits=(("asked += len(tokens)", "asked += len(tokens) if number else 0"),),
            ),
            WrongAnswer(
                "what is found",
                "found, not lost",
                edits=(("never_found_at_16 = 2", "never_found_at_16 = 48"),),
            ),
            WrongAnswer("too early", "less is nothing", edits=(("zero_from = 64", "zero_from = 32"),)),
        ),
        other=WITH_STATISTICS,
    ),
]
