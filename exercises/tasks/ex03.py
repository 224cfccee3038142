"""Tasks of exercise 03: the free queue, the pool of blocks, three bugs that were reported, and V0 beside V1."""

from __future__ import annotations

from collections.abc import Callable

from exercises.grader import Task, WrongAnswer
from exercises.tasks.ex03_checks import (
    check_generations,
    check_map,
    check_measure,
    check_order,
    check_pool,
    check_queue,
    check_recycling,
    check_releasing,
    check_resetting,
)

# -- other right answers, and wrong ones that need more than a line -----------------------------------------

ORDERED_DICT = """
from collections import OrderedDict

class FreeQueue:
    def __init__(self, blocks):
        self.line = OrderedDict()
        self.append_n(blocks)

    @property
    def num_free_blocks(self):
        return len(self.line)

    def popleft_n(self, n):
        if n < 0 or n > len(self.line):
            raise ValueError("not that many")
        return [self.line.popitem(last=False)[1] for _ in range(n)]

    def remove(self, block):
        if block.block_id not in self.line:
            raise ValueError("it is not here")
        del self.line[block.block_id]

    def append_n(self, blocks):
        for block in blocks:
            if block.block_id in self.line:
                raise ValueError("it is here")
            self.line[block.block_id] = block

    def prepend_n(self, blocks):
        blocks = list(blocks)
        self.append_n(blocks)
        for block in blocks[::-1]:
            self.line.move_to_end(block.block_id, last=False)

    def __iter__(self):
        return iter(list(self.line.values()))
"""

PLAIN_LIST = """
class FreeQueue:
    def __init__(self, blocks):
        self.line = list(blocks)

    @property
    def num_free_blocks(self):
        return len(self.line)

    def popleft_n(self, n):
        if n < 0 or n > len(self.line):
            raise ValueError("not that many")
        taken, self.line = self.line[:n], self.line[n:]
        return taken

    def remove(self, block):
        self.line.remove(block)

    def _refuse(self, blocks):
        if any(block in self.line for block in blocks):
            raise ValueError("it is here")

    def append_n(self, blocks):
        blocks = list(blocks)
        self._refuse(blocks)
        self.line += blocks

    def prepend_n(self, blocks):
        self._refuse(blocks)
        self.line = [*blocks, *self.line]

    def __iter__(self):
        return iter(self.line)
"""

OTHER_POOL = """
class Pool(PoolBase):
    def get_new_blocks(self, n):
        taken = self.free_queue.popleft_n(n)
        for block in taken:
            block.ref_count += 1
        self.evict_blocks(block.block_id for block in taken)
        return taken

    def touch(self, blocks):
        for block in blocks:
            block.ref_count += 1
            if block.ref_count == 1 and block is not self.null_block:
                self.free_queue.remove(block)

    def free_blocks(self, blocks):
        front, back = [], []
        for block in blocks:
            if not block.ref_count:
                raise IntegrityError("nobody uses it")
            block.ref_count -= 1
            if block.ref_count or block.is_null:
                continue
            if block.block_hash:
                back.append(block)
            else:
                front.append(block)
        self.free_queue.append_n(back)
        self.free_queue.prepend_n(front)

    def get_cached_block(self, block_hash, group_ids):
        copies = [self.index.get(block_key(block_hash, group_id)) for group_id in group_ids]
        return [list(each.values())[0] for each in copies] if all(copies) else None
"""

COST = """
def cost(queue_class, operation, num_blocks, n=50):
    blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks + n)]
{body}

grows_in_the_deque = ["remove"]
grows_in_the_linked_list = []
"""
BUILDING_TIMED = COST.format(
    body="""    began = time.perf_counter()
    queue = queue_class(blocks[:num_blocks])
    if operation == "remove":
        for block in blocks[num_blocks // 2 :][:n]:
            queue.remove(block)
    else:
        getattr(queue, operation)(n if operation == "popleft_n" else blocks[num_blocks:])
    return time.perf_counter() - began"""
)
FROM_THE_FRONT = COST.format(
    body="""    queue = queue_class(blocks[:num_blocks])
    began = time.perf_counter()
    if operation == "remove":
        for block in blocks[:n]:
            queue.remove(block)
    else:
        getattr(queue, operation)(n if operation == "popleft_n" else blocks[num_blocks:])
    return time.perf_counter() - began"""
)
WITH_A_DICT = COST.format(
    body="""    queue = queue_class(blocks[:num_blocks])
    half = num_blocks // 2
    calls = {
        "popleft_n": lambda: queue.popleft_n(n),
        "append_n": lambda: queue.append_n(blocks[num_blocks:]),
        "prepend_n": lambda: queue.prepend_n(blocks[num_blocks:]),
        "remove": lambda: [queue.remove(block) for block in blocks[half : half + n]],
    }
    began = time.perf_counter()
    calls[operation]()
    return time.perf_counter() - began"""
)

RELEASING = """
class Releasing(PoolBase):
    def free_blocks(self, blocks):
        blocks = list(blocks)
        for block in {each}:
            block.ref_count -= 1
        unused = {unused}
        self.free_queue.prepend_n([block for block in unused if block.block_hash is None])
        self.free_queue.append_n([block for block in unused if block.block_hash is not None])
"""
EMPTY = "block.ref_count == 0 and not block.is_null"
SORTED_RELEASE = RELEASING.format(
    each="blocks",
    unused=f"sorted({{block for block in blocks if {EMPTY}}}, key=lambda block: block.block_id)",
)
ONE_RELEASE = RELEASING.format(
    each="dict.fromkeys(blocks)", unused=f"[block for block in dict.fromkeys(blocks) if {EMPTY}]"
)
EARLY_RELEASE = RELEASING.format(
    each="blocks", unused="list(dict.fromkeys(block for block in blocks if not block.is_null))"
)
ORDERED_RELEASE = RELEASING.format(
    each="blocks", unused=f"list(dict.fromkeys(block for block in blocks if {EMPTY}))"
)
SWALLOWED = """
class Releasing(PoolBase):
    def free_blocks(self, blocks):
        blocks = list(blocks)
        for block in blocks:
            block.ref_count -= 1
        unused = [block for block in blocks if block.ref_count == 0 and not block.is_null]
        try:
            self.free_queue.append_n([block for block in unused if block.block_hash is not None])
            self.free_queue.prepend_n([block for block in unused if block.block_hash is None])
        except ValueError:
            pass
"""

TASKS = [
    Task(
        id="03.1",
        kind="predict",
        title="the queue, before you run it",
        points=10,
        answers={"queue_after_4": list, "cleos_table": list, "adas_tokens": int},
        check=check_order,
        hints=(
            "Write the two tables first: which blocks are full?",
            "Blocks come back last one first. A full block goes to the back of the queue, any other to the front.",
            "After event 3 the queue is 3, 6, 2, 1. Bob has blocks 4 (full) and 5 (not full).",
        ),
        wrong=(
            WrongAnswer(
                "all to the back",
                "everything goes to the back",
                source="queue_after_4 = [6, 3, 2, 1, 5, 4]\ncleos_table = [6, 3, 2, 1]\nadas_tokens = 0",
            ),
            WrongAnswer(
                "head first",
                "the head goes first",
                source="queue_after_4 = [5, 3, 6, 1, 2, 4]\ncleos_table = [5, 3, 6, 1]\nadas_tokens = 0",
            ),
            WrongAnswer(
                "free is erased",
                "free means forgotten",
                edits=(("adas_tokens = 4", "adas_tokens = 0"),),
            ),
            WrongAnswer(
                "all still there", "nothing is lost", edits=(("adas_tokens = 4", "adas_tokens = 8"),)
            ),
        ),
        other="queue_after_4 = (5, 3, 6, 2, 1, 4)\ncleos_table = list((5, 3, 6, 2))\nadas_tokens = len(range(4))",
    ),
    Task(
        id="03.2",
        kind="build",
        title="the free queue",
        points=20,
        answers={"FreeQueue": type},
        check=check_queue,
        hints=(
            "Begin with _insert and remove; everything else is made of these two.",
            "A block that is in no queue has prev and next None. That tells who may enter and who may leave.",
            "prepend_n goes through the blocks from the last to the first and puts each between front and front.next; "
            "popleft_n looks at its number before it takes anything.",
        ),
        wrong=(
            WrongAnswer("a plain list", "a walk per hit", source=PLAIN_LIST),
            WrongAnswer(
                "prepends in order",
                "put in front one after another",
                edits=(("for block in reversed(blocks):", "for block in blocks:"),),
            ),
            WrongAnswer(
                "no test for negative numbers",
                "nobody asks for -2 blocks",
                edits=(("if not 0 <= n <= self.num_free_blocks:", "if n > self.num_free_blocks:"),),
            ),
            WrongAnswer(
                "stops when it is empty",
                "takes what there is",
                edits=(
                    (
                        "        if not 0 <= n <= self.num_free_blocks:\n"
                        '            raise ValueError(f"cannot take {n} of {self.num_free_blocks} blocks")\n'
                        "        taken = []",
                        '        if n < 0:\n            raise ValueError("negative")\n        taken = []',
                    ),
                ),
            ),
            WrongAnswer(
                "enters twice",
                "a block may stand there twice",
                edits=(("if block.prev is not None or block.next is not None:", "if False:"),),
            ),
            WrongAnswer(
                "links kept",
                "a block keeps its links when it leaves",
                edits=(
                    ("        block.prev = block.next = None\n", ""),
                    (
                        "if block.prev is not None or block.next is not None:",
                        "if block.prev and block.prev.next is block:",
                    ),
                ),
            ),
            WrongAnswer(
                "counter forgotten",
                "the counter stands still",
                edits=(("        self.num_free_blocks -= 1\n", ""),),
            ),
        ),
        other=ORDERED_DICT,
        part="free_queue",
    ),
    Task(
        id="03.3",
        kind="measure",
        title="what grows with the pool",
        points=10,
        answers={"cost": Callable, "grows_in_the_deque": list, "grows_in_the_linked_list": list},
        check=check_measure,
        hints=(
            "Make everything ready first: the queue, and a list of the blocks that the operation needs.",
            "The blocks of the middle stand at num_blocks // 2 in your own list of blocks; no need to walk the queue.",
            "began = time.perf_counter(), then only the operation, then return time.perf_counter() - began.",
        ),
        wrong=(
            WrongAnswer("building timed", "the building is in the time", source=BUILDING_TIMED),
            WrongAnswer("from the front", "taken from the front", source=FROM_THE_FRONT),
            WrongAnswer(
                "the clock stands",
                "the operation is not in the time",
                edits=(("return time.perf_counter() - began", "return began - began"),),
            ),
            WrongAnswer(
                "all grow",
                "everything grows",
                edits=(
                    (
                        'grows_in_the_deque = ["remove"]',
                        'grows_in_the_deque = ["popleft_n", "remove", "append_n", "prepend_n"]',
                    ),
                ),
            ),
        ),
        other=WITH_A_DICT,
    ),
    Task(
        id="03.4",
        kind="build",
        title="the block pool",
        points=20,
        answers={"Pool": type},
        check=check_pool,
        hints=(
            "For each call, say first what becomes of used, of free and of cached.",
            "Only get_new_blocks forgets a hash. A count that becomes 0 puts a block into the queue, "
            "one that was 0 takes it out.",
            "In free_blocks collect two lists while you count down; then prepend_n the blocks without a hash, and "
            "append_n the others.",
        ),
        wrong=(
            WrongAnswer(
                "keeps the hash",
                "a reused block keeps its identity",
                edits=(("            self.forget(block)\n", ""),),
            ),
            WrongAnswer(
                "hit not taken out",
                "a hit stays in the free queue",
                edits=(("                self.free_queue.remove(block)", "                pass"),),
            ),
            WrongAnswer(
                "one user at most",
                "the second user is not counted",
                edits=(("block.ref_count += 1", "block.ref_count = 1"),),
            ),
            WrongAnswer(
                "erases at the end",
                "free means forgotten",
                edits=(
                    (
                        "            block.ref_count -= 1\n",
                        "            block.ref_count -= 1\n            self.forget(block)\n",
                    ),
                ),
            ),
            WrongAnswer(
                "the rule of 2024",
                "everything goes to the back",
                edits=(("self.free_queue.prepend_n(worthless)", "self.free_queue.append_n(worthless)"),),
            ),
            WrongAnswer(
                "cached to the front",
                "cached blocks go first",
                edits=(("self.free_queue.append_n(cached)", "self.free_queue.prepend_n(cached)"),),
            ),
            WrongAnswer(
                "frees at once",
                "the first release frees",
                edits=(
                    (
                        "            block.ref_count -= 1\n            if block.ref_count == 0 and not block.is_null:",
                        "            block.ref_count -= 1\n            if not block.is_null:",
                    ),
                ),
            ),
            WrongAnswer(
                "below zero",
                "a double release does no harm",
                edits=(
                    (
                        "            if block.ref_count == 0:\n"
                        "                raise IntegrityError("
                        'f"block {block.block_id} is released, but nobody uses it")\n',
                        "",
                    ),
                ),
            ),
            WrongAnswer(
                "newest copy",
                "the last copy wins",
                edits=(("next(iter(copies.values()))", "list(copies.values())[-1]"),),
            ),
            WrongAnswer(
                "skips missing groups",
                "one group is enough",
                edits=(
                    (
                        "            if not copies:\n                return None\n            found.append",
                        "            if copies:\n                found.append",
                    ),
                    ("        return found", "        return found or None"),
                ),
            ),
        ),
        other=OTHER_POOL,
        part="block_pool",
    ),
    Task(
        id="03.5",
        kind="bug",
        title="somebody else's words",
        points=10,
        answers={"Recycling": type},
        check=check_recycling,
        hints=(
            "Two places know that block 2 was Ada's.",
            "The line forgets it on the block. What about the index?",
            "PoolBase has a method that does both: forget.",
        ),
        wrong=(
            WrongAnswer(
                "clears the index",
                "everything is forgotten",
                edits=(("self.forget(block)", "self.index.clear()\n            block.block_hash = None"),),
            ),
            WrongAnswer(
                "drops all copies",
                "all copies are forgotten",
                edits=(
                    (
                        "self.forget(block)",
                        "self.index.pop(block.block_hash, None)\n            block.block_hash = None",
                    ),
                ),
            ),
            WrongAnswer(
                "index only",
                "the block keeps its hash",
                edits=(
                    ("self.forget(block)", "self.index.get(block.block_hash, {}).pop(block.block_id, None)"),
                ),
            ),
        ),
        other=(("self.forget(block)", "self.evict_blocks([block.block_id])"),),
    ),
    Task(
        id="03.6",
        kind="bug",
        title="given back twice",
        points=10,
        answers={"Releasing": type},
        check=check_releasing,
        hints=(
            "Follow one block with two users through the three lines: when does its count become 0?",
            "All counting is done before anybody looks whether a count is 0, and then it is 0 for both entries.",
            "Look at the moment of counting: put a block into `unused` right after the release that made its count 0.",
        ),
        wrong=(
            WrongAnswer("each block once", "two releases count as one", source=ONE_RELEASE),
            WrongAnswer("a sorted set", "the order is lost", source=SORTED_RELEASE),
            WrongAnswer("at the first release", "the first release frees", source=EARLY_RELEASE),
            WrongAnswer("catches the error", "the error is swallowed", source=SWALLOWED),
        ),
        other=ORDERED_RELEASE,
    ),
    Task(
        id="03.7",
        kind="bug",
        title="the reset that never happens",
        points=10,
        answers={"Resetting": type},
        check=check_resetting,
        hints=(
            "How many blocks are free when nobody uses any?",
            "One block of the pool is never in the queue.",
            "The null block: all but one are free when the pool is idle.",
        ),
        wrong=(
            WrongAnswer(
                "never refuses",
                "a reset under a running request",
                edits=(("if self.num_free_blocks != self.num_blocks - 1:", "if False:"),),
            ),
            WrongAnswer(
                "refuses a full pool only",
                "a reset under a running request",
                edits=(("if self.num_free_blocks != self.num_blocks - 1:", "if self.num_free_blocks == 0:"),),
            ),
            WrongAnswer(
                "index only",
                "the blocks keep their hashes",
                edits=(
                    (
                        "        for block in self.blocks:\n            self.forget(block)",
                        "        self.index.clear()",
                    ),
                ),
            ),
            WrongAnswer(
                "queue rebuilt",
                "the queue starts over",
                edits=(
                    (
                        "        return True",
                        "        self.free_queue.append_n(sorted(self.free_queue.popleft_n(self.num_free_blocks), "
                        "key=lambda block: block.block_id))\n        return True",
                    ),
                ),
            ),
        ),
        other=(
            (
                "if self.num_free_blocks != self.num_blocks - 1:",
                "if any(block.ref_count for block in self.blocks if not block.is_null):",
            ),
        ),
    ),
    Task(
        id="03.8",
        kind="predict",
        title="one story, two generations",
        points=5,
        answers={"cleo_in_v1": list, "cleo_in_v0": list},
        check=check_generations,
        hints=(
            "In V0 a block without a hash goes to the front of the free list, and the list is used up first.",
            "Cleo needs six blocks. The sixth is the only one about which the two generations differ.",
            "V1: whose full block was given back first? V0: who ran last, and who before?",
        ),
        wrong=(
            WrongAnswer(
                "as in V1",
                "V0 goes by the release",
                edits=(("cleo_in_v0 = [1, 3, 4, 5, 6, 0]", "cleo_in_v0 = [1, 3, 4, 5, 6, 2]"),),
            ),
            WrongAnswer(
                "as in V0",
                "V1 goes by the last use",
                edits=(("cleo_in_v1 = [2, 4, 5, 6, 7, 3]", "cleo_in_v1 = [2, 4, 5, 6, 7, 1]"),),
            ),
            WrongAnswer(
                "from one", "V0 has a null block", edits=(("[1, 3, 4, 5, 6, 0]", "[2, 4, 5, 6, 7, 1]"),)
            ),
        ),
        other="cleo_in_v1 = (2, 4, 5, 6, 7, 3)\ncleo_in_v0 = [1, *range(3, 7), 0]",
    ),
    Task(
        id="03.9",
        kind="map",
        title="where it is in vLLM",
        points=5,
        answers={"hands_out": dict, "adopts_hit": dict, "order": dict},
        check=check_map,
        hints=(
            "The last column of the table says what each place decides.",
            "V1 decides the order when blocks come back, V0 when it needs one.",
            "In V0 a full block is allocated with its tokens; if they are known, the known block gets a user more.",
        ),
        wrong=(
            WrongAnswer(
                "names of V1 twice",
                "the other generation",
                edits=(('"V0": "LRUEvictor.evict"', '"V0": "BlockPool.free_blocks"'),),
            ),
            WrongAnswer(
                "the front decides",
                "the order is decided when a block is taken",
                edits=(('"V1": "BlockPool.free_blocks"', '"V1": "BlockPool.get_new_blocks"'),),
            ),
        ),
        other=(("hands_out = {", "hands_out = dict({"), ('_allocate_block_id"}', '_allocate_block_id"})')),
    ),
]
