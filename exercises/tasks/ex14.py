"""Tasks of exercise 14: KV events, a mirror from the start, one that came late, gaps, and a router's rule."""

from __future__ import annotations

from collections.abc import Callable

from exercises.grader import Task, WrongAnswer
from exercises.tasks.ex14_checks import (
    check_answer,
    check_late,
    check_listener,
    check_mirror,
    check_news,
    check_places,
    check_policy,
    check_rates,
)

# -- other right answers, and wrong ones that need more than a line -----------------------------------------

OTHER_NEWS = """
news = dict(enumerate([
    [["stored", None, "ab"]],
    [["stored", "b", "c"]],
    [],
    [["stored", "a", "b"]],
    [["removed", "c"], ["removed", "b"], ["stored", None, "de"]],
], start=1))
found = "edba"
"""

LIST_MIRROR = """
class Mirror:
    def __init__(self):
        self.groups = {}
    def apply(self, event):
        if type(event).__name__ == "AllBlocksCleared":
            self.groups = {}
            return
        held = self.groups.setdefault(event.group_id, [])
        if hasattr(event, "token_ids"):
            if not event.reused:
                held.extend(event.block_hashes)
        else:
            for block_hash in event.block_hashes:
                held.remove(block_hash)
    def prefixes(self):
        return {(group, block_hash) for group, held in self.groups.items() for block_hash in held}
"""
SET_MIRROR = """
class Mirror:
    def __init__(self):
        self.known = set()
    def apply(self, event):
        if isinstance(event, AllBlocksCleared):
            self.known.clear()
            return
        named = {(event.group_id, block_hash) for block_hash in event.block_hashes}
        if isinstance(event, BlockRemoved):
            self.known -= named
        else:
            self.known |= named
    def prefixes(self):
        return set(self.known)
"""
GROUPLESS_MIRROR = """
class Mirror:
    def __init__(self):
        self.copies = Counter()
    def apply(self, event):
        if isinstance(event, AllBlocksCleared):
            self.copies.clear()
            return
        for block_hash in event.block_hashes:
            if isinstance(event, BlockRemoved):
                for prefix in self.copies:
                    if prefix[1] == block_hash:
                        self.copies[prefix] -= 1
            elif not event.reused:
                self.copies[event.group_id, block_hash] += 1
    def prefixes(self):
        return {prefix for prefix, count in self.copies.items() if count > 0}
"""
KEEPS_COUNTS = """
class Mirror:
    def __init__(self):
        self.copies = Counter()
        self.known = set()
    def apply(self, event):
        if isinstance(event, AllBlocksCleared):
            self.known = set()
            return
        for block_hash in event.block_hashes:
            prefix = event.group_id, block_hash
            if isinstance(event, BlockRemoved):
                self.copies[prefix] -= 1
                if not self.copies[prefix]:
                    self.known.discard(prefix)
            elif not event.reused:
                self.copies[prefix] += 1
                self.known.add(prefix)
    def prefixes(self):
        return set(self.known)
"""
SHARED_MIRROR = """
class Mirror:
    copies = Counter()
    def __init__(self):
        pass
    def apply(self, event):
        if isinstance(event, AllBlocksCleared):
            self.copies.clear()
            return
        for block_hash in event.block_hashes:
            prefix = event.group_id, block_hash
            if isinstance(event, BlockRemoved):
                self.copies[prefix] = max(self.copies[prefix] - 1, 0)
            elif not event.reused:
                self.copies[prefix] += 1
    def prefixes(self):
        return {prefix for prefix, count in self.copies.items() if count > 0}
"""

FLAT_LISTENER = """
class Listener:
    def __init__(self, replay, apply):
        self.replay, self.apply = replay, apply
        self.done = -1
    def receive(self, batch):
        expected = self.done + 1
        waiting = self.replay(expected) if batch.sequence != expected else (batch,)
        if batch.sequence < expected:
            waiting = ()
        for each in waiting:
            [self.apply(event) for event in each.events]
            self.done = each.sequence
"""

ONE_BY_ONE = """
class Answer(MirrorBase):
    def get_cached_block(self, block_hash, group_ids):
        blocks = []
        for group_id in group_ids:
            if (group_id, block_hash) not in self.mirror.prefixes():
                return None
            blocks.append(self.some_block)
        return blocks
    def expected_hit(self, token_ids, cache_salt=None):
        chain = []
        self.hasher.extend(chain, list(token_ids), cache_salt=cache_salt)
        return self.coordinator.find_longest_cache_hit(chain, max_length=len(token_ids) - 1)[1]
"""

COUNTING_LATE = """
class LateMirror:
    def __init__(self):
        self.least = {}
    def apply(self, event):
        if isinstance(event, AllBlocksCleared):
            self.least.clear()
        elif isinstance(event, BlockRemoved):
            for block_hash in event.block_hashes:
                left = self.least.pop((event.group_id, block_hash), 0) - 1
                if left > 0:
                    self.least[event.group_id, block_hash] = left
        else:
            certain = event.block_hashes
            if event.reused and event.window is not None:
                reach = event.window - 1
                number = reach // event.block_size + (reach % event.block_size > 0)
                certain = certain[max(0, len(certain) - number):]
            elif event.reused and event.kind == MAMBA:
                certain = certain[-1:]
            elif event.reused and event.kind != FULL_ATTENTION:
                certain = ()
            for block_hash in certain:
                prefix = event.group_id, block_hash
                count = self.least.get(prefix, 0)
                self.least[prefix] = max(count, 1) if event.reused else count + 1
    def prefixes(self):
        return {*self.least}
"""
COUNTS_ALL = """
class LateMirror:
    def __init__(self):
        self.copies = Counter()
    def apply(self, event):
        if isinstance(event, AllBlocksCleared):
            self.copies.clear()
            return
        names = event.block_hashes
        if isinstance(event, BlockStored) and event.reused and event.kind != FULL_ATTENTION:
            number = -(-(event.window - 1) // event.block_size) if event.window else int(event.kind == MAMBA)
            names = names[max(len(names) - number, 0):]
        for block_hash in names:
            self.copies[event.group_id, block_hash] += -1 if isinstance(event, BlockRemoved) else 1
    def prefixes(self):
        return {prefix for prefix, count in self.copies.items() if count > 0}
"""

SORTED_RULE = """
class Rule:
    def __call__(self, members, costs):
        def loss(place):
            seat = members[place]
            return seat.num_queued_tokens + costs[place] + costs[place], len(seat.mirror.prefixes()), place
        return sorted(range(len(costs)), key=loss)[0]
"""

LOOPED_RATES = """
def hit_rates(prefixes_per_engine):
    return [
        routed(replace(POOLS, prefixes_per_engine=prefixes_per_engine), policy).hit_rate
        for policy in ("cache_aware", "round_robin")
    ]

enough = 2 ** 2
worth = 3
"""

TASKS = [
    Task(
        id="14.1",
        kind="predict",
        title="the events of a small story",
        points=12,
        answers={"news": dict, "found": str},
        check=check_news,
        hints=(
            "Ask at each step: which block is put into the index now, and which block is taken out of it?",
            "Taken out is a block when somebody gets it who will write it over. Ending is not that.",
            "Bob finds a and computes a second block with the hash b. Cleo takes blocks 5, 3 and 2 from the queue; "
            "3 and 2 were Ada's c and b, and Bob's b is still there.",
        ),
        wrong=(
            WrongAnswer(
                "ends, gone",
                "ending removes",
                edits=(("3: []", '3: [("removed", "c"), ("removed", "b"), ("removed", "a")]'),),
            ),
            WrongAnswer("merged", "equal blocks are merged", edits=(('4: [("stored", "a", "b")]', "4: []"),)),
            WrongAnswer(
                "tells the hit",
                "what is found is told",
                edits=(('4: [("stored", "a", "b")]', '4: [("stored", None, "ab")]'),),
            ),
            WrongAnswer(
                "orphan",
                "every event begins a new chain",
                edits=(('("stored", "b", "c")', '("stored", None, "c")'),),
            ),
            WrongAnswer("a set", "one copy is all", edits=(('found = "abde"', 'found = "ade"'),)),
        ),
        other=OTHER_NEWS,
    ),
    Task(
        id="14.2",
        kind="build",
        title="the mirror",
        points=20,
        answers={"Mirror": type},
        check=check_mirror,
        hints=(
            "How many blocks of the engine have this hash in this group? That number is all you need.",
            "A Counter with the key (group id, hash): stored adds one, removed takes one, cleared empties it.",
            "A stored event with `reused` adds nothing. `prefixes()` gives the keys whose number is above 0.",
        ),
        wrong=(
            WrongAnswer("a set", "a set forgets a copy", source=SET_MIRROR),
            WrongAnswer("no groups", "removed in every group", source=GROUPLESS_MIRROR),
            WrongAnswer(
                "counts what is found",
                "an announcement is counted as a copy",
                edits=(
                    (
                        "elif isinstance(event, BlockStored) and not event.reused:",
                        "elif isinstance(event, BlockStored):",
                    ),
                ),
            ),
            WrongAnswer("counts stay", "counts outlive a clear", source=KEEPS_COUNTS),
            WrongAnswer("one for all", "one count for all mirrors", source=SHARED_MIRROR),
        ),
        other=LIST_MIRROR,
    ),
    Task(
        id="14.3",
        kind="bug",
        title="the gap",
        points=14,
        answers={"Listener": type},
        check=check_listener,
        hints=(
            "Batch 3 arrives, and 0 was the last one. Which batches does the mirror need, and which does it get?",
            "`replay(first)` gives the batches from `first` on. Which number is the first that is missing?",
            "The first missing batch is `self.next_sequence`. The batch that came is among the replayed ones.",
        ),
        wrong=(
            WrongAnswer(
                "goes on",
                "the gap is passed over",
                edits=(("batches = self.replay(self.next_sequence)", "batches = [batch]"),),
            ),
            WrongAnswer(
                "and once more",
                "the batch that came is applied twice",
                edits=(
                    (
                        "batches = self.replay(self.next_sequence)",
                        "batches = [*self.replay(self.next_sequence), batch]",
                    ),
                ),
            ),
            WrongAnswer(
                "gives up",
                "what comes after a gap is thrown away",
                edits=(("batches = self.replay(self.next_sequence)", "return"),),
            ),
            WrongAnswer(
                "from the start",
                "replayed from too early",
                edits=(("self.replay(self.next_sequence)", "self.replay(0)"),),
            ),
            WrongAnswer(
                "takes all that comes",
                "a batch that comes again is applied again",
                edits=(
                    (
                        "        if batch.sequence < self.next_sequence:\n            return\n",
                        "        if batch.sequence < self.next_sequence:\n"
                        "            self.next_sequence = batch.sequence\n",
                    ),
                ),
            ),
        ),
        other=FLAT_LISTENER,
    ),
    Task(
        id="14.4",
        kind="build",
        title="the question",
        points=12,
        answers={"Answer": type},
        check=check_answer,
        hints=(
            "The coordinator does the work. It wants to know of one hash: do all these groups hold it?",
            "One block for each group id, or None. The length that may be found is one less than the prompt has.",
            "Hash with self.hasher.extend(hashes, token_ids, cache_salt=cache_salt), then ask "
            "self.coordinator.find_longest_cache_hit(hashes, len(token_ids) - 1) and return the second value.",
        ),
        wrong=(
            WrongAnswer("any group", "one group is enough", edits=(("if all(", "if any("),)),
            WrongAnswer(
                "no cap",
                "the whole prompt may be found",
                edits=(("len(token_ids) - 1", "len(token_ids)"),),
            ),
            WrongAnswer("no salt", "the salt is forgotten", edits=((", cache_salt=cache_salt)", ")"),)),
        ),
        other=ONE_BY_ONE,
    ),
    Task(
        id="14.5",
        kind="build",
        title="the mirror that came late",
        points=16,
        answers={"LateMirror": type},
        check=check_late,
        hints=(
            "An announcement says: a hit of this length was served. Which blocks must have been there for it?",
            "Full attention: all. A window of w tokens: those that the next token looks back on, w - 1 tokens. "
            "States: the last.",
            "min(len(hashes), ceil((window - 1) / block_size)) blocks from the end; take them by their first index, "
            "as hashes[-0:] is everything. Announcing twice is not two copies: keep a set.",
        ),
        wrong=(
            WrongAnswer(
                "believes everything",
                "every announced block is held",
                edits=(("len(event.block_hashes) - self.num_certain(event)", "0"),),
            ),
            WrongAnswer(
                "the whole window",
                "the window counts without the token itself",
                edits=(
                    ("-(-(event.window - 1) // event.block_size)", "-(-event.window // event.block_size)"),
                ),
            ),
            WrongAnswer(
                "minus zero",
                "the last none are all",
                edits=(
                    (
                        "first = max(len(event.block_hashes) - self.num_certain(event), 0)",
                        "first = -self.num_certain(event)",
                    ),
                ),
            ),
            WrongAnswer("counts", "an announcement is counted as a copy", source=COUNTS_ALL),
            WrongAnswer(
                "does not listen",
                "announcements are ignored",
                edits=(
                    (
                        "first = max(len(event.block_hashes) - self.num_certain(event), 0)",
                        "first = len(event.block_hashes)",
                    ),
                ),
            ),
        ),
        other=COUNTING_LATE,
    ),
    Task(
        id="14.6",
        kind="map",
        title="where they come from",
        points=6,
        answers={"calls": dict, "marks": dict},
        check=check_places,
        hints=(
            "Which of these calls changes what can be found? The other ones have nothing to say, but for one.",
            "A block that is given back can be found. It loses its hash when somebody takes it from the queue.",
            'cache_full_blocks at publish, get_new_blocks at allocate; and report mode "full" speaks in the lookup.',
        ),
        wrong=(
            WrongAnswer(
                "at the end",
                "ending removes",
                edits=(('"removed": "BlockPool.get_new_blocks"', '"removed": "BlockPool.free_blocks"'),),
            ),
            WrongAnswer(
                "on adoption",
                "told when it is taken",
                edits=(('"reused": "KVCacheManager.get_computed_blocks"', '"reused": "BlockPool.touch"'),),
            ),
            WrongAnswer(
                "when computed",
                "told when the K/V are there",
                edits=(('"stored": "publish"', '"stored": "run"'),),
            ),
        ),
        other=(
            "calls = dict(reused='KVCacheManager.get_computed_blocks', removed='BlockPool.get_new_blocks', "
            "stored='BlockPool.cache_full_blocks')\n"
            "marks = dict(reused='lookup', removed='allocate', stored='publish')"
        ),
    ),
    Task(
        id="14.7",
        kind="build",
        title="the router's rule",
        points=12,
        answers={"Rule": type},
        check=check_policy,
        hints=(
            "Write down the loss of each engine as a number, and look for the smallest.",
            "Two numbers for each engine, compared one after the other: the loss, then how many prefixes it holds.",
            "A list of (queued + 2 * cost, len(member.mirror.prefixes())); return losses.index(min(losses)).",
        ),
        wrong=(
            WrongAnswer(
                "hits only", "the hit alone decides", edits=(("member.num_queued_tokens + 2 * cost", "cost"),)
            ),
            WrongAnswer(
                "queues only",
                "only the queue counts",
                edits=(("member.num_queued_tokens + 2 * cost", "member.num_queued_tokens"),),
            ),
            WrongAnswer("once", "its own tokens count once", edits=(("2 * cost", "cost"),)),
            WrongAnswer(
                "the first of equals",
                "always the first",
                edits=((", len(member.mirror.prefixes()))", ", 0)"),),
            ),
            WrongAnswer(
                "the fullest",
                "to the engine that holds most",
                edits=((", len(member.mirror.prefixes()))", ", -len(member.mirror.prefixes()))"),),
            ),
        ),
        other=SORTED_RULE,
    ),
    Task(
        id="14.8",
        kind="measure",
        title="what mirrors buy",
        points=8,
        answers={"hit_rates": Callable, "enough": int, "worth": int},
        check=check_rates,
        hints=(
            "routed(replace(POOLS, prefixes_per_engine=...), policy).hit_rate, once for each policy.",
            "For `enough` compare each rate in the middle column with the last one of it.",
            "For `worth` take round robin's rate in the last line, and look from above for the first rate with mirrors "
            "that is not below it.",
        ),
        wrong=(
            WrongAnswer(
                "swapped",
                "in the other order",
                edits=(
                    (
                        'routed(workload, "cache_aware").hit_rate, routed(workload, "round_robin").hit_rate',
                        'routed(workload, "round_robin").hit_rate, routed(workload, "cache_aware").hit_rate',
                    ),
                ),
            ),
            WrongAnswer(
                "one size",
                "the pool stays as it is",
                edits=(("replace(POOLS, prefixes_per_engine=prefixes_per_engine)", "POOLS"),),
            ),
            WrongAnswer(
                "all twelve", "every engine needs every prefix", edits=(("enough = 4", "enough = 12"),)
            ),
            WrongAnswer("same size", "pools of one size are compared", edits=(("worth = 3", "worth = 12"),)),
        ),
        other=LOOPED_RATES,
    ),
]
