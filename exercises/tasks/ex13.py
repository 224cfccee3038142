"""Tasks of exercise 13: the fixed point over groups, the shared-prefix boundary, two bugs, and three requests."""

from __future__ import annotations

from collections.abc import Callable

from exercises.grader import Task, WrongAnswer
from exercises.tasks.ex13_checks import (
    check_adoption,
    check_common_length,
    check_coordinator,
    check_cutting,
    check_found,
    check_three_hits,
    check_where,
)

# -- other right answers, and wrong ones that need more than a line -----------------------------------------

SEARCHED = """
def common_length(groups, max_length):
    def suits(length):
        return all(group(length) == length for group in groups)
    return next(length for length in range(max_length, -1, -1) if suits(length))
"""
ONE_ROUND = """
def common_length(groups, max_length):
    for group in groups:
        max_length = group(max_length)
    return max_length
"""
TWO_ROUNDS = """
def common_length(groups, max_length):
    for group in [*groups, *groups]:
        max_length = group(max_length)
    return max_length
"""
SHORTEST = """
def common_length(groups, max_length):
    return min(group(max_length) for group in groups)
"""

RECURSIVE = """
class Agree(CoordinatorBase):
    def find_longest_cache_hit(self, block_hashes, max_length):
        answers = []

        def narrow(length):
            hits, start = {}, length
            for group in self.order:
                blocks = self.serve(group, block_hashes, length)
                length = len(blocks) * group.block_size
                hits[group] = blocks
                answers.append(length)
            return (hits, length) if length == start else narrow(length)

        hits, length = narrow(max_length)
        blocks = tuple(hits[group][: length // group.block_size] for group in self.groups)
        further = [answer for answer in answers if answer > length]
        return blocks, length, max(further, default=0)
"""
NEXT_ROUND = """\
            if agreed == length:
                break
            length = agreed
"""
LAST_ROUND = """\
            length = agreed
            break
"""
UNCUT = "tuple(hits[group.spec.group_id] for group in self.groups)"
CUT = "tuple(hits[group.spec.group_id][: length // group.block_size] for group in self.groups)"
BEST_OF_ALL = """
        best = [len(self.serve(group, block_hashes, max_length)) * group.block_size for group in self.groups]
        longest = max(best)
        blocks = tuple("""

OTHER_CUT = """\
        for group in self.groups:
            del hits[group.spec.group_id][length // group.block_size :]
"""
RIGHT_CUT = """\
        for group in self.groups:
            name = group.spec.group_id
            hits[name] = hits[name][: length // group.block_size]
"""
SHORTEST_LIST = """\
        count = min(map(len, hits.values()))
        for name in hits:
            hits[name] = hits[name][:count]
"""

ADOPTED = """\
        if hits:
            for group, blocks in zip(groups, hits.blocks, strict=True):
                group.add_computed_blocks(name, blocks)
        new_blocks = [group.allocate_new_blocks(name, num_slots) for group in groups]
"""
NEW_FIRST = """\
        new_blocks = [group.allocate_new_blocks(name, num_slots) for group in groups]
        if hits:
            for group, blocks in zip(groups, hits.blocks, strict=True):
                group.add_computed_blocks(name, blocks)
"""
TOUCHED_TWICE = """\
        for blocks in hits.blocks:
            self.block_pool.touch(blocks)
        if hits:
            for group, blocks in zip(groups, hits.blocks, strict=True):
                group.add_computed_blocks(name, blocks)
        new_blocks = [group.allocate_new_blocks(name, num_slots) for group in groups]
"""
TAKES_FIRST = """\
        if hits:
            self.coordinator.add_computed_blocks(name, hits.blocks)
        required = self.coordinator.get_num_blocks_to_allocate(name, num_slots, self.empty.blocks)
        if required > self.block_pool.num_free_blocks:
            return None
        groups = self.coordinator.groups
        new_blocks = [group.allocate_new_blocks(name, num_slots) for group in groups]
"""
ASKED = """\
        required = self.coordinator.get_num_blocks_to_allocate(name, num_slots, hits.blocks)
        if required > self.block_pool.num_free_blocks:
            return None
        groups = self.coordinator.groups
"""

STAYS = """
def three_hits(group, retention, num_shared):
    stage = GroupStage(200, full(4), group, retention=retention)
    found = []
    for name in "xyz":
        tokens = list(range(num_shared)) + [ord(name) * 100 + i for i in range(13)]
        request = stage.wait(name, tokens)
        found += [stage.manager.get_computed_blocks(request)[1]]
        while request.num_computed_tokens < request.num_tokens:
            stage.schedule(name)
        stage.finish(name)
    return found

first_with_all_20 = {"state, dense": 3, "window, 16": 3, "window, 0": 3, "window, dense": 2}
states_left = {"12, 1": (12,), "6, 6, 1": (6, 12), "4, 4, 4, 1": range(4, 13, 4)}
"""

TASKS = [
    Task(
        id="13.1",
        kind="predict",
        title="what all of them can serve",
        points=15,
        answers={"found": dict, "blocks_of_b": list},
        check=check_found,
        hints=(
            "Ask full attention first: up to its first hole. Then the other group about that length, and so on.",
            "A window of 4 needs the two blocks before the end of the hit. A state must end exactly there.",
            "Row d: full attention ends at 4, so the window is asked about 4 and never about 10: no boundary. Rows g "
            "and h: the states end at 4 and 12, or only at 12; full attention has all k tokens, so k is the boundary.",
        ),
        wrong=(
            WrongAnswer(
                "as one group", "full attention decides alone", edits=(('"b": (10, 12)', '"b": (12, 0)'),)
            ),
            WrongAnswer("one block", "one block is enough", edits=(('"c": (8, 12)', '"c": (10, 12)'),)),
            WrongAnswer("best of all", "the best of any group", edits=(('"d": (4, 0)', '"d": (4, 10)'),)),
            WrongAnswer("states are cut", "a state can be cut", edits=(('"h": (0, 6)', '"h": (6, 0)'),)),
            WrongAnswer(
                "uncut", "only one group is cut", edits=(("[[1, 2, 3, 4, 5],", "[[1, 2, 3, 4, 5, 6],"),)
            ),
        ),
        other=(
            "found = dict(a=[12, 0], b=(10, 12), c=(8, 12), d=(4, 0), e=(12, 0), f=(4, 0), g=[4, 8], h=(0, 6), "
            "i=(12, 0))\nblocks_of_b = [[*range(1, 6)], [0] * 3 + [10, 11]]"
        ),
    ),
    Task(
        id="13.2",
        kind="build",
        title="the agreement",
        points=15,
        answers={"common_length": Callable},
        check=check_common_length,
        hints=(
            "Each group is asked about what the one before it has left.",
            "A shorter length is another question: whoever said yes to the longer one must be asked again.",
            "Remember the length at the beginning of a round. If it is the same at the end, everybody agreed to it.",
        ),
        wrong=(
            WrongAnswer("one round", "one round is enough", source=ONE_ROUND),
            WrongAnswer("two rounds", "two rounds are enough", source=TWO_ROUNDS),
            WrongAnswer("each alone", "the shortest answer", source=SHORTEST),
        ),
        other=SEARCHED,
    ),
    Task(
        id="13.3",
        kind="build",
        title="the coordinator",
        points=25,
        answers={"Agree": type},
        check=check_coordinator,
        hints=(
            "It is 13.2 with blocks: keep the last answer of each group, and the longest answer of all.",
            "A group's answer in tokens is len(blocks) * group.block_size. Go through self.order, return in the order "
            "of self.groups.",
            "After the last round all lists have the same length in tokens. The boundary is the longest answer on the "
            "way if it is longer than that, and 0 if not.",
        ),
        wrong=(
            WrongAnswer("one round", "one round is enough", edits=((NEXT_ROUND, LAST_ROUND), (UNCUT, CUT))),
            WrongAnswer("one round, uncut", "only one group is cut", edits=((NEXT_ROUND, LAST_ROUND),)),
            WrongAnswer(
                "uncapped",
                "the whole prompt may be found",
                edits=(("length, longest = max_length, 0", "length, longest = max_length + 1, 0"),),
            ),
            WrongAnswer(
                "best of all", "the best of any group", edits=(("\n        blocks = tuple(", BEST_OF_ALL),)
            ),
            WrongAnswer(
                "no boundary",
                "no boundary",
                edits=(("longest if longest > length else 0", "0"),),
            ),
            WrongAnswer(
                "always a boundary",
                "a boundary where the hit ends",
                edits=(("longest if longest > length else 0", "longest"),),
            ),
            WrongAnswer(
                "a difference",
                "the boundary is a difference",
                edits=(("longest if longest > length else 0", "longest - length"),),
            ),
            WrongAnswer(
                "shortest",
                "the boundary is the hit",
                edits=(("longest if longest > length else 0", "length"),),
            ),
            WrongAnswer(
                "as listed",
                "asked in the order of the groups",
                edits=(("for group in self.order:", "for group in self.groups:"),),
            ),
            WrongAnswer(
                "as asked",
                "blocks in the order of asking",
                edits=(
                    ("tuple(hits[group.spec.group_id] for group in self.groups)", "tuple(hits.values())"),
                ),
            ),
        ),
        other=RECURSIVE,
        part="coordinator",
    ),
    Task(
        id="13.4",
        kind="bug",
        title="one group keeps what the others gave up",
        points=10,
        answers={"Cutting": type},
        check=check_cutting,
        hints=(
            "The hit is 12 tokens. How many tokens are the blocks of each group?",
            "There are two groups with full attention, and only one of them is cut.",
            "Cut the list of every group to length // group.block_size blocks.",
        ),
        wrong=(
            WrongAnswer(
                "one size",
                "blocks are of one size",
                edits=(("[: length // group.block_size]", "[: length // self.alignment]"),),
            ),
            WrongAnswer("shortest list", "the shortest list", edits=((RIGHT_CUT, SHORTEST_LIST),)),
            WrongAnswer(
                "longest",
                "longer than the hit",
                edits=(("[: length // group.block_size]", "[: longest // group.block_size]"),),
            ),
        ),
        other=((RIGHT_CUT, OTHER_CUT),),
    ),
    Task(
        id="13.5",
        kind="bug",
        title="one group takes another one's hit",
        points=10,
        answers={"OneByOne": type},
        check=check_adoption,
        hints=(
            "Which block stands in both of Bob's tables? Where was it before?",
            "The first group takes a new block from the front of the queue. Whose hit stands there?",
            "Two loops: first every group adopts its hit, then every group takes new blocks.",
        ),
        wrong=(
            WrongAnswer("new first", "new blocks come before the hits", edits=((ADOPTED, NEW_FIRST),)),
            WrongAnswer("twice", "hits are counted twice", edits=((ADOPTED, TOUCHED_TWICE),)),
            WrongAnswer(
                "takes first", "a refusal leaves something behind", edits=((ASKED + ADOPTED, TAKES_FIRST),)
            ),
        ),
        other=(
            (
                ADOPTED,
                "        if hits:\n            self.coordinator.add_computed_blocks(name, hits.blocks)\n"
                "        new_blocks = self.coordinator.allocate_new_blocks(name, num_slots)\n",
            ),
        ),
    ),
    Task(
        id="13.6",
        kind="map",
        title="where it is in vLLM",
        points=10,
        answers={"where": dict},
        check=check_where,
        hints=(
            "Coordinator, manager, scheduler, one kind of group: each of them is named once or twice.",
            "The scheduler asks the manager, the manager its coordinator, the coordinator the groups.",
            "Chunks are cut by the scheduler; the walk to a single block is MambaManager's; the sum is the base "
            "coordinator's.",
        ),
        wrong=(
            WrongAnswer(
                "manager",
                "the manager agrees",
                edits=(
                    (
                        '"agrees": "HybridKVCacheCoordinator.find_longest_cache_hit"',
                        '"agrees": "KVCacheManager.get_computed_blocks"',
                    ),
                ),
            ),
            WrongAnswer(
                "one group",
                "one group's look",
                edits=(
                    (
                        '"KVCacheCoordinator.get_num_blocks_to_allocate"',
                        '"MambaManager.get_num_blocks_to_allocate"',
                    ),
                ),
            ),
        ),
        other=(("where = {\n", 'where = {\n    **dict.fromkeys(["agrees", "hands_on"], ""),\n'),),
    ),
    Task(
        id="13.7",
        kind="measure",
        title="the first, the second, the third",
        points=15,
        answers={"three_hits": Callable, "first_with_all_20": dict, "states_left": dict},
        check=check_three_hits,
        hints=(
            "Ask before a prompt starts; after that it finds itself.",
            "stage.found(prompt)[0] is the hit; then start and finish. The prompts share range(num_shared).",
            "A state exists where a chunk ended. The first prompt is computed in one chunk up to its last block, and "
            "the second one stops at the boundary.",
        ),
        wrong=(
            WrongAnswer(
                "too late",
                "looked up after it ran",
                edits=(
                    ("        hits.append(stage.found(prompt)[0])\n", ""),
                    (
                        "        stage.finish(str(number))\n",
                        "        stage.finish(str(number))\n        hits.append(stage.found(prompt)[0])\n",
                    ),
                ),
            ),
            WrongAnswer(
                "boundary",
                "the boundary is found, too",
                edits=(("stage.found(prompt)[0]", "max(stage.found(prompt))"),),
            ),
            WrongAnswer(
                "nothing shared",
                "nothing is shared",
                edits=(("*range(num_shared)", "*range(50 * number, 50 * number + num_shared)"),),
            ),
            WrongAnswer(
                "dense states",
                "dense keeps every state",
                edits=(('"state, dense": 3', '"state, dense": 2'),),
            ),
            WrongAnswer(
                "everywhere",
                "a state at every block",
                edits=(('"12, 1": [12]', '"12, 1": [2, 4, 6, 8, 10, 12]'),),
            ),
        ),
        other=STAYS,
    ),
]
