"""How the answers to exercise 03 are judged: by their behaviour, through public calls, on fresh objects."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

from exercises.grader import Report
from exercises.grader.report import Known
from exercises.tasks.ex03_scene import Scene, SceneV0
from exercises.tasks.ex03_traces import POOL_TRACES, replay, replay_bare
from refengine.errors import IntegrityError
from refengine.hashing import BlockHasher
from refengine.sampling import SamplingParams
from refengine.trace.codemap import call_path
from refengine.v1.block import FreeKVCacheBlockQueue, KVCacheBlock
from refengine.v1.groups.spec import FULL_ATTENTION, GroupSpec
from refengine.v1.request import Request

NEW = range(500, 600)  # tokens that no other request of a story has


def ids(blocks: Iterable[KVCacheBlock]) -> list[int]:
    """Block ids, in order."""
    return [block.block_id for block in blocks]


# -- 03.1 ---------------------------------------------------------------------------------------------------

FREE_IS_NOT_FORGOTTEN = (
    "free means forgotten",
    "A block keeps its hash while it waits in the queue. It loses it when somebody else takes the block.",
)


def check_order(queue_after_4: list[int], cleos_table: list[int], adas_tokens: int, report: Report) -> None:
    scene = Scene(num_blocks=7)
    scene.start("ada", range(10))
    scene.start("bob", range(100, 106))
    scene.finish("ada")
    scene.finish("bob")
    queue = scene.queue
    table = scene.start("cleo", NEW[:13])
    with report.case("the free queue after event 4"):
        report.equal(
            queue,
            queue_after_4,
            "free queue",
            known=(
                (
                    [6, 3, 2, 1, 5, 4],
                    "everything goes to the back",
                    "Blocks 3 and 5 are not full, so they carry no hash and go to the front of the queue.",
                ),
                (
                    [5, 3, 6, 1, 2, 4],
                    "the head goes first",
                    "A request gives its last block back first, so block 2 stands before block 1.",
                ),
                (
                    [3, 5, 6, 2, 1, 4],
                    "the front is a queue of its own",
                    "Bob's block 5 is put to the very front, before Ada's block 3, which was put there earlier.",
                ),
            ),
        )
    with report.case("Cleo's block table"):
        report.equal(table, cleos_table, "Cleo's table")
    with report.case("what a lookup finds of Ada's tokens"):
        report.equal(
            4 * len(scene.lookup(range(10))),
            adas_tokens,
            "tokens found",
            known=(
                (0, *FREE_IS_NOT_FORGOTTEN),
                (
                    8,
                    "nothing is lost",
                    "Cleo took block 2, and with it went its hash: only block 1 is left of Ada's prefix.",
                ),
                (10, "a part of a block is found", "Block 3 was never full, so it never had a hash."),
            ),
        )


# -- 03.2 ---------------------------------------------------------------------------------------------------


class WatchedBlock(KVCacheBlock):
    """A block that counts how often blocks of its kind are looked at: by a link, by its id, or by comparing."""

    looks = 0

    def __getattribute__(self, name: str) -> Any:
        if name in ("prev", "next", "block_id"):
            WatchedBlock.looks += 1
        return super().__getattribute__(name)

    def __eq__(self, other: object) -> bool:
        WatchedBlock.looks += 1
        return self is other

    __hash__ = object.__hash__


def make(queue_class: Any, count: int) -> tuple[Any, list[KVCacheBlock]]:
    """A queue of `count` new blocks, and the blocks."""
    blocks = [KVCacheBlock(block_id) for block_id in range(count)]
    return queue_class(blocks), blocks


def holds(report: Report, expected: list[int], queue: Any, what: str) -> None:
    """Wants the queue to hold these blocks, by its walk and by its counter."""
    report.equal(expected, ids(queue), what)
    if queue.num_free_blocks != len(expected):
        report.misconception(
            "the counter stands still",
            "num_free_blocks must follow every block that comes or goes: the pool asks it before each admission.",
        )
    report.equal(len(expected), queue.num_free_blocks, f"num_free_blocks, {what}")


def check_queue(queue_class: Any, report: Report) -> None:
    _check_order_of_queue(queue_class, report)
    _check_removal(queue_class, report)
    _check_refusals(queue_class, report)
    with report.case("vLLM's recorded orders"):
        for name in POOL_TRACES:
            result = replay_bare(name, queue_class=queue_class)
            report.true(result.difference is None, f"{name}: {result.difference}")
    with report.case("the engine runs on it, under guard"):
        report.equal("all equal", _guarded(POOL_TRACES[0], {"free_queue": queue_class}), POOL_TRACES[0])


def _check_order_of_queue(queue_class: Any, report: Report) -> None:
    with report.case("blocks leave at the front, in the order in which they came"):
        queue, _ = make(queue_class, 5)
        stack = (
            [4, 3],
            "last in, first out",
            "The block that was put in last is the last to go: take from the front.",
        )
        report.equal([0, 1], ids(queue.popleft_n(2)), "popleft_n(2)", known=(stack,))
        report.equal([], ids(queue.popleft_n(0)), "popleft_n(0)")
        holds(report, [2, 3, 4], queue, "after popleft_n(2)")
    with report.case("returned blocks join the back in the given order"):
        queue, blocks = make(queue_class, 4)
        queue.popleft_n(3)
        queue.append_n([blocks[2], blocks[0]])
        holds(report, [3, 2, 0], queue, "after append_n of 2 and 0")
    with report.case("worthless blocks join the front in the given order"):
        queue, blocks = make(queue_class, 5)
        queue.popleft_n(4)
        queue.prepend_n([blocks[1], blocks[2], blocks[3]])
        if ids(queue) == [3, 2, 1, 4]:
            report.misconception(
                "put in front one after another",
                "Each block passes the one before it, so the order is turned round. The first must be foremost.",
            )
        holds(report, [1, 2, 3, 4], queue, "after prepend_n of 1, 2, 3")
    with report.case("an empty queue works"):
        queue, blocks = make(queue_class, 2)
        queue.popleft_n(2)
        holds(report, [], queue, "with everything taken")
        queue.prepend_n([])
        queue.append_n([blocks[1]])
        queue.prepend_n([blocks[0]])
        holds(report, [0, 1], queue, "with both back")


def _check_removal(queue_class: Any, report: Report) -> None:
    with report.case("a hit takes blocks from the middle and from both ends"):
        queue, blocks = make(queue_class, 5)
        for block_id in (2, 4, 0):
            queue.remove(blocks[block_id])
        holds(report, [1, 3], queue, "without 2, 4 and 0")
        report.equal([1, 3], ids(queue.popleft_n(2)), "the rest")
    with report.case("taking out a block does not look at the others"):
        for count in (50, 400):
            watched = [WatchedBlock(block_id) for block_id in range(count)]
            queue = queue_class(watched)
            before = WatchedBlock.looks
            queue.remove(watched[count // 2])
            looks = WatchedBlock.looks - before
            if looks > 25:
                report.misconception(
                    "a walk per hit",
                    f"It looked {looks} times at blocks to take out one of {count}. A hit must cost the same in a "
                    "large pool: let each block know its neighbours.",
                )
            report.true(looks <= 25, f"remove() looked {looks} times at blocks of a queue of {count}.")
    with report.case("a block that left can come back"):
        queue, blocks = make(queue_class, 3)
        queue.remove(blocks[1])
        queue.append_n([blocks[1]])
        holds(report, [0, 2, 1], queue, "with 1 at the back")


def _check_refusals(queue_class: Any, report: Report) -> None:
    with report.case("a negative number is refused"):
        _refuses(
            report,
            lambda queue, blocks: queue.popleft_n(-2),
            queue_class,
            "popleft_n(-2)",
            "nobody asks for -2 blocks",
            "A wrong count upstream does. vLLM 0.33.0 lets it pass, and its counter then says more than there are.",
        )
    with report.case("more than there are is refused, and none is taken"):
        _refuses(
            report,
            lambda queue, blocks: queue.popleft_n(5),
            queue_class,
            "popleft_n(5) of 4",
            "takes what there is",
            "Whoever asked gets an error and no blocks, so those already taken would belong to nobody.",
        )
    for name in ("append_n", "prepend_n"):
        with report.case(f"{name} refuses a block that stands there"):
            _refuses(
                report,
                partial(_return_one_that_is_there, name),
                queue_class,
                f"{name} of a block that is free",
                "a block may stand there twice",
                "Then two requests are given the same block, and each overwrites what the other wrote.",
            )
    with report.case("a block that is not there cannot leave"):

        def remove_twice(queue: Any, blocks: list[KVCacheBlock]) -> None:
            queue.append_n([blocks[0]])
            queue.remove(blocks[2])

        def taken(blocks: list[KVCacheBlock]) -> Any:
            queue = queue_class(blocks)
            queue.remove(blocks[2])
            queue.remove(blocks[0])
            return queue

        _refuses(
            report,
            remove_twice,
            taken,
            "remove() of a block that left before",
            "a block keeps its links when it leaves",
            "It still points at its old neighbours, so it can be taken out once more, and the counter is wrong.",
            [1, 3, 0],
        )


def _return_one_that_is_there(name: str, queue: Any, blocks: list[KVCacheBlock]) -> None:
    getattr(queue, name)([blocks[1]])


def _refuses(
    report: Report,
    call: Callable[[Any, list[KVCacheBlock]], object],
    make_queue: Callable[[list[KVCacheBlock]], Any],
    what: str,
    misconception: str,
    why: str,
    left: Sequence[int] = (0, 1, 2, 3),
) -> None:
    """Wants a ValueError and an unchanged queue, else names the misconception."""
    blocks = [KVCacheBlock(block_id) for block_id in range(4)]
    queue = make_queue(blocks)
    try:
        call(queue, blocks)
        refused = False
    except ValueError:
        refused = True
    except NotImplementedError:
        raise
    except Exception as error:
        report.true(False, f"{what} should raise ValueError; it raised {type(error).__name__}: {error}.")
    walked = _walk(queue, 2 * len(blocks))
    if not refused or walked != list(left) or queue.num_free_blocks != len(left):
        report.misconception(misconception, why)
    report.true(refused, f"{what} should raise ValueError, and was accepted.")
    report.equal(list(left), walked, f"queue after {what}")
    report.equal(len(left), queue.num_free_blocks, f"num_free_blocks after {what}")


def _walk(queue: Any, most: int) -> list[Any]:
    """Ids front to back; torn links may lead round in a circle, so it ends somewhere."""
    found = []
    for block, _ in zip(queue, range(most), strict=False):
        found.append(block.block_id if block is not None else None)
    return found


def _guarded(name: str, parts: dict[str, Any]) -> str:
    """What came of a replay with the part under guard, in words."""
    result = replay(name, parts)
    return "all equal" if result.difference is None else result.difference


# -- 03.3 ---------------------------------------------------------------------------------------------------

NAP = 0.03  # seconds: far above what a call takes, far below what a person notices


class FakeQueue(FreeKVCacheBlockQueue):
    """A queue that remembers which blocks were asked for, and naps where it is told to."""

    slow = ""  # the name of the method that naps
    calls: ClassVar[list[tuple[str, list[int]]]] = []

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        FakeQueue.calls = []
        super().__init__(blocks)
        self._note("__init__", [])
        FakeQueue.calls = []

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        self._note("popleft_n", list(range(n)))
        return super().popleft_n(n)

    def remove(self, block: KVCacheBlock) -> None:
        self._note("remove", [block.block_id])
        super().remove(block)

    def append_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        blocks = list(blocks)
        self._note("append_n", ids(blocks))
        super().append_n(blocks)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._note("prepend_n", ids(blocks))
        super().prepend_n(blocks)

    def _note(self, name: str, block_ids: list[int]) -> None:
        FakeQueue.calls.append((name, block_ids))
        if self.slow == name and (name != "remove" or len(FakeQueue.calls) == 1):
            time.sleep(NAP)


def _fake(name: str) -> type[FakeQueue]:
    return type("FakeQueue", (FakeQueue,), {"slow": name})


def check_measure(
    cost: Callable[..., float],
    grows_in_the_deque: list[str],
    grows_in_the_linked_list: list[str],
    report: Report,
) -> None:
    operations = ("popleft_n", "remove", "append_n", "prepend_n")
    for operation in operations:
        with report.case(f"{operation}: the operation is timed, and nothing else"):
            cost(_fake(""), operation, 400, 20)
            seen = [name for name, _ in FakeQueue.calls if name == operation]
            report.equal([operation] * (20 if operation == "remove" else 1), seen, "calls")
            if operation == "remove":
                middle = [block_id for _, (block_id,) in FakeQueue.calls]
                if max(middle) < 100:
                    report.misconception(
                        "taken from the front",
                        "At the front a deque finds its block at once. A hit stands anywhere: take from the middle.",
                    )
                report.true(
                    min(middle) >= 100 and max(middle) < 300,
                    f"blocks {middle} are not from the middle of 400.",
                )
            building = min(cost(_fake("__init__"), operation, 400, 20) for _ in range(3))
            if building >= NAP:
                report.misconception(
                    "the building is in the time",
                    "Building grows with the pool for every queue. Look at the clock after the queue is there.",
                )
            report.true(building < NAP, "It counts the time that building the queue takes.")
            spent = cost(_fake(operation), operation, 400, 20)
            if spent < NAP:
                report.misconception(
                    "the operation is not in the time",
                    "Look at the clock before the first call and after the last.",
                )
            report.true(spent >= NAP, f"It does not count the time that {operation} takes.")
    with report.case("what grows with the pool"):
        everything = (
            sorted(operations),
            "everything grows",
            "At its ends a deque costs the same in any pool; only the search for a block grows.",
        )
        report.equal(["remove"], sorted(grows_in_the_deque), "in the deque", known=(everything,))
        report.equal([], grows_in_the_linked_list, "in the linked list")


# -- 03.4 ---------------------------------------------------------------------------------------------------

KEEPS_IDENTITY = (
    "a reused block keeps its identity",
    "The index still leads to it, so a lookup of the old prompt finds somebody else's tokens, and nothing raises.",
)


def check_pool(pool_class: Any, report: Report) -> None:
    _check_taking(pool_class, report)
    _check_sharing(pool_class, report)
    _check_returning(pool_class, report)
    _check_finding(pool_class, report)
    with report.case("vLLM's recorded decisions"):
        for name in POOL_TRACES:
            result = replay_bare(name, pool_class)
            report.true(result.difference is None, f"{name}: {result.difference}")
    with report.case("the engine runs on it, under guard"):
        report.equal("all equal", _guarded(POOL_TRACES[-1], {"block_pool": pool_class}), POOL_TRACES[-1])


def _check_taking(pool_class: Any, report: Report) -> None:
    with report.case("new blocks come from the front, with one user each"):
        pool = pool_class(num_blocks=6)
        taken = pool.get_new_blocks(3)
        report.equal([1, 2, 3], ids(taken), "get_new_blocks(3)")
        report.equal([1, 1, 1], [block.ref_count for block in taken], "their users")
        report.equal([4, 5], ids(pool.free_queue), "free queue")
    with report.case("a taken block cannot be found any more"):
        for num_blocks, expected in ((3, [1]), (4, [1, 2])):
            scene = Scene(num_blocks, pool=pool_class)
            scene.start("ada", range(8))
            scene.finish("ada")
            scene.start("xena", NEW[:3])
            stale = ([1, 2], *KEEPS_IDENTITY)
            report.equal(
                expected, scene.lookup(range(9)), f"found, {num_blocks - 1} usable blocks", known=(stale,)
            )
    with report.case("too many, or fewer than none, are refused"):
        for n in (-2, 5):
            pool = pool_class(num_blocks=5)
            report.raises(ValueError, partial(pool.get_new_blocks, n), f"get_new_blocks({n})")
            report.equal([1, 2, 3, 4], ids(pool.free_queue), "free queue afterwards")


def _check_sharing(pool_class: Any, report: Report) -> None:
    with report.case("a hit leaves the free queue"):
        scene = _ada(7, pool_class)
        scene.finish("ada")
        scene.start("bob", [*range(8), 77])
        report.equal([1, 2, 3], scene.table("bob"), "Bob's table")
        stays = (
            [4, 5, 6, 2, 1],
            "a hit stays in the free queue",
            "Bob uses blocks 1 and 2, and the next request would be given them as well.",
        )
        report.equal([4, 5, 6], scene.queue, "free queue", known=(stays,))
    with report.case("a hit keeps its hash, for the third request"):
        scene = _ada(9, pool_class)
        scene.finish("ada")
        scene.start("bob", [*range(8), 77])
        report.equal([1, 2], scene.lookup([*range(8), 88]), "found while Bob runs")
    with report.case("two requests on one block are two users"):
        scene = _ada(7, pool_class)
        scene.start("bob", [*range(8), 77])
        one = (
            [1, 1],
            "the second user is not counted",
            "When one of the two ends, the block is given away under the other.",
        )
        users = [scene.pool.blocks[block_id].ref_count for block_id in (1, 2)]
        report.equal([2, 2], users, "users of blocks 1 and 2", known=(one,))
        scene.finish("ada")
        if {1, 2} & set(scene.queue):
            report.misconception(
                "the first release frees", "Bob still uses blocks 1 and 2. The last user gives a block back."
            )
        report.equal([3, 5, 6], scene.queue, "free queue after Ada has ended")
    with report.case("the null block is in no queue"):
        pool = pool_class(num_blocks=4)
        pool.touch([pool.null_block, pool.null_block])
        pool.free_blocks([pool.null_block])
        pool.free_blocks([pool.null_block])
        report.equal([1, 2, 3], ids(pool.free_queue), "free queue")


def _check_returning(pool_class: Any, report: Report) -> None:
    with report.case("a free block is still cached"):
        scene = _ada(6, pool_class)
        scene.finish("ada")
        erased: Known = ([], *FREE_IS_NOT_FORGOTTEN)
        report.equal([1, 2], scene.lookup(range(10)), "found after Ada has ended", known=(erased,))
    with report.case("cached blocks go to the back, tail first; the others to the front"):
        scene = _ada(6, pool_class)
        scene.finish("ada")
        known = (
            (
                [4, 5, 3, 2, 1],
                "everything goes to the back",
                "Block 3 can be found by nobody. At the back it outlives blocks that somebody could use.",
            ),
            (
                [2, 1, 3, 4, 5],
                "cached blocks go first",
                "They would be overwritten before blocks that hold nothing.",
            ),
            ([3, 4, 5, 1, 2], "the head goes first", "A tail without its head can never be found again."),
        )
        report.equal([3, 4, 5, 2, 1], scene.queue, "free queue", known=known)
    with report.case("worthless blocks keep the given order"):
        pool = pool_class(num_blocks=6)
        taken = pool.get_new_blocks(3)
        pool.free_blocks([taken[1], taken[0], taken[2]])
        report.equal([2, 1, 3, 4, 5], ids(pool.free_queue), "free queue")
    with report.case("a block with two users, given back twice in one call"):
        pool = pool_class(num_blocks=5)
        (block,) = pool.get_new_blocks(1)
        pool.touch([block])
        pool.free_blocks(iter([block, block]))
        report.equal([1, 2, 3, 4], ids(pool.free_queue), "free queue")
    with report.case("a block that nobody uses cannot be given back"):
        pool = pool_class(num_blocks=4)
        (block,) = pool.get_new_blocks(1)
        pool.free_blocks([block])
        if _accepts(pool, block):
            report.misconception(
                "a double release does no harm",
                "The count falls below zero, and whoever takes the block next is not counted rightly.",
            )
        pool = pool_class(num_blocks=4)
        (block,) = pool.get_new_blocks(1)
        pool.free_blocks([block])
        report.raises(IntegrityError, lambda: pool.free_blocks([block]), "a second release")


def _accepts(pool: Any, block: KVCacheBlock) -> bool:
    """Whether a block is taken back that nobody uses, quietly or with an accident in the queue."""
    try:
        pool.free_blocks([block])
    except IntegrityError:
        return False
    except ValueError:
        return True
    return True


def _check_finding(pool_class: Any, report: Report) -> None:
    with report.case("of two copies the first is found, then the other"):
        scene = _duplicates(pool_class)
        last = ([1, 3], "the last copy wins", "The copy that was published first is found, as in vLLM.")
        report.equal([1, 2], scene.lookup(range(9)), "found", known=(last,))
        scene.evict(2)
        gone = (
            [1],
            "one copy takes the other with it",
            "Block 3 holds the same content and is still in the index.",
        )
        report.equal([1, 3], scene.lookup(range(9)), "found without block 2", known=(gone,))
    with report.case("nothing is found where nothing is"):
        pool = pool_class(num_blocks=4)
        report.equal(None, pool.get_cached_block(b"no such hash", [0]), "get_cached_block of an unknown hash")
    with report.case("all groups have it, or none"):
        pool = pool_class(num_blocks=6)
        request = Request("a", list(range(4)), SamplingParams(), hasher=BlockHasher("sha256_cbor", 4))
        (digest,) = request.block_hashes
        pool.cache_full_blocks(request, pool.get_new_blocks(1), 0, 1, GroupSpec(0, FULL_ATTENTION, 4))
        one = pool.get_cached_block(digest, [0, 1])
        if one is not None:
            report.misconception(
                "one group is enough",
                "A block holds the layers of one group. Without the other group's block the prefix is not there.",
            )
        report.equal(None, one, "with a block for group 0 only")
        pool.cache_full_blocks(request, pool.get_new_blocks(1), 0, 1, GroupSpec(1, FULL_ATTENTION, 4))
        report.equal([2, 1], ids(pool.get_cached_block(digest, [1, 0]) or []), "for groups 1 and 0")


def _ada(num_blocks: int, pool_class: Any) -> Scene:
    """Ada runs: ten tokens in blocks 1, 2, 3, of which two are full."""
    scene = Scene(num_blocks, pool=pool_class)
    scene.start("ada", range(10))
    return scene


def _duplicates(pool_class: Any) -> Scene:
    """Ada has ended; Bob runs with the same eight tokens in blocks 1 and 3, and block 3 holds what 2 holds."""
    scene = Scene(10, pool=pool_class)
    scene.start("ada", range(8))
    scene.finish("ada")
    scene.start("bob", range(8))
    return scene


# -- 03.5 ---------------------------------------------------------------------------------------------------


def check_recycling(pool_class: Any, report: Report) -> None:
    with report.case("a taken block is found by nobody"):
        scene = Scene(3, pool=pool_class)
        scene.start("ada", range(8))
        scene.finish("ada")
        table = scene.start("xena", NEW[:3])
        found = scene.lookup(range(9))
        if found == [1, 2]:
            report.as_given()
        report.equal([2], table, "Xena's table")
        report.equal([1], found, "found of Ada's prompt")
    with report.case("what was not taken is still found"):
        scene = Scene(4, pool=pool_class)
        scene.start("ada", range(8))
        scene.finish("ada")
        scene.start("xena", NEW[:5])
        all_gone: Known = (
            [],
            "everything is forgotten",
            "Xena took blocks 3 and 2. Block 1 was nobody's business and must still be found.",
        )
        report.equal([1], scene.lookup(range(9)), "found of Ada's prompt", known=(all_gone,))
    with report.case("the other copy is still found"):
        scene = _duplicates(pool_class)
        scene.start("xena", NEW[:28])
        copies = (
            [1],
            "all copies are forgotten",
            "Only block 2 got new contents. Block 3 holds the same as before and must still be found.",
        )
        report.true(2 in scene.table("xena"), "Xena should have been given block 2.")
        report.equal([1, 3], scene.lookup(range(9)), "found of Ada's prompt", known=(copies,))
    with report.case("the block can be published again"):
        scene = Scene(3, pool=pool_class)
        scene.start("ada", range(8))
        scene.finish("ada")
        (block,) = scene.pool.get_new_blocks(1)
        if block.block_hash is not None:
            report.misconception(
                "the block keeps its hash",
                "The index has forgotten the block, but the block still carries the hash of its old contents.",
            )
        report.equal(None, block.block_hash, "hash of the taken block")


# -- 03.6 ---------------------------------------------------------------------------------------------------


def check_releasing(pool_class: Any, report: Report) -> None:
    with report.case("one call gives back a block twice"):
        pool = pool_class(num_blocks=5)
        (block,) = pool.get_new_blocks(1)
        pool.touch([block])
        try:
            pool.free_blocks([block, block])
        except ValueError:
            report.as_given()
            raise
        if block.ref_count == 1:
            report.misconception(
                "two releases count as one",
                "Two users ended, so nobody is left. With a count of 1 the block is used for ever, by nobody.",
            )
        report.equal(0, block.ref_count, "users left")
        report.equal([1, 2, 3, 4], ids(pool.free_queue), "free queue")
    with report.case("the blocks after it are given back too"):
        scene = Scene(6, pool=pool_class)
        scene.start("ada", range(12))
        first, second, third = (scene.pool.blocks[block_id] for block_id in (1, 2, 3))
        scene.pool.touch([third])
        scene.pool.free_blocks([third, third, second, first])
        if scene.pool.num_free_blocks < 5:
            report.misconception(
                "the error is swallowed",
                "The queue refused the second entry in the middle of its work, and the blocks after it were lost.",
            )
        if scene.queue == [4, 5, 1, 2, 3]:
            report.misconception(
                "the order is lost",
                "The blocks come in the order in which they should be evicted: a tail goes before its head.",
            )
        report.equal([4, 5, 3, 2, 1], scene.queue, "free queue")
    with report.case("while somebody uses it, it is not free"):
        pool = pool_class(num_blocks=5)
        (block,) = pool.get_new_blocks(1)
        pool.touch([block])
        pool.free_blocks([block])
        early = (
            [1, 2, 3, 4],
            "the first release frees",
            "One of two users ended. The block belongs to the other.",
        )
        report.equal([2, 3, 4], ids(pool.free_queue), "free queue after one of two releases", known=(early,))
    with report.case("everything else is as before"):
        for name in POOL_TRACES:
            result = replay_bare(name, pool_class)
            report.true(result.difference is None, f"{name}: {result.difference}")


# -- 03.7 ---------------------------------------------------------------------------------------------------


def check_resetting(pool_class: Any, report: Report) -> None:
    with report.case("with nothing in use it says yes, and nothing is found"):
        scene = _ada(6, pool_class)
        scene.finish("ada")
        before = scene.queue
        done = scene.pool.reset_prefix_cache()
        if done is False:
            report.as_given()
        report.equal(True, done, "reset")
        report.equal([], scene.lookup(range(10)), "found")
        if scene.queue != before:
            report.misconception(
                "the queue starts over",
                "A reset empties the index. The order of the free blocks is nobody's secret and may stay.",
            )
        report.equal(before, scene.queue, "free queue")
    with report.case("while a block is in use it says no, and nothing changes"):
        scene = _ada(6, pool_class)
        done = scene.pool.reset_prefix_cache()
        if done is not False or scene.lookup(range(10)) != [1, 2]:
            report.misconception(
                "a reset under a running request",
                "Ada still reads from these blocks, and may be preempted and look for them again.",
            )
        report.equal(False, done, "reset while Ada runs")
        report.equal([1, 2], scene.lookup(range(10)), "found while Ada runs")
    with report.case("with every block in use it says no"):
        scene = Scene(3, pool=pool_class)
        scene.start("ada", range(8))
        report.equal(False, scene.pool.reset_prefix_cache(), "reset with no free block")
    with report.case("no block carries a hash afterwards"):
        scene = _ada(6, pool_class)
        scene.finish("ada")
        scene.pool.reset_prefix_cache()
        carried = [block.block_id for block in scene.pool.blocks if block.block_hash is not None]
        if carried:
            report.misconception(
                "the blocks keep their hashes",
                "The index is empty, but these blocks still say that they are cached; publishing them again fails.",
            )
        report.equal([], carried, "blocks that carry a hash")


# -- 03.8 ---------------------------------------------------------------------------------------------------


def check_generations(cleo_in_v1: list[int], cleo_in_v0: list[int], report: Report) -> None:
    tables = []
    for scene in (Scene(8), SceneV0(7)):
        scene.start("ada", range(6))
        scene.start("bob", range(100, 106))
        scene.finish("bob")
        scene.finish("ada")
        tables.append(scene.start("cleo", NEW[:24]))
    with report.case("Cleo's blocks in V1"):
        lru = (
            [2, 4, 5, 6, 7, 1],
            "V1 goes by the last use",
            "V1 knows no times. Bob's block 3 was given back first, so it stands before Ada's block 1.",
        )
        report.equal(tables[0], cleo_in_v1, "Cleo in V1", known=(lru,))
    with report.case("Cleo's blocks in V0"):
        known = (
            (
                [1, 3, 4, 5, 6, 2],
                "V0 goes by the release",
                "The evictor sorts by the last use, and Ada ran before Bob, so her block 0 goes first.",
            ),
            (
                [0, 1, 3, 4, 5, 6],
                "V0 evicts first",
                "While the free list holds a block, no cached block is given up.",
            ),
            (
                [2, 4, 5, 6, 7, 1],
                "V0 has a null block",
                "V0 numbers its blocks from 0 and hands out all of them.",
            ),
        )
        report.equal(tables[1], cleo_in_v0, "Cleo in V0", known=known)


# -- 03.9 ---------------------------------------------------------------------------------------------------

# The words by which the code map says what each place decides.
DECIDES = {
    "hands_out": {"v1": "popping evicts", "v0": "hashless free list first"},
    "adopts_hit": {"v1": "out of the free queue", "v0": "same physical block"},
    "order": {"v1": "unhashed blocks to the front", "v0": "oldest access first"},
}


def _place(generation: str, question: str) -> str:
    """The symbol of the code map that decides it."""
    (symbol,) = {
        step.place.symbol for step in call_path(generation) if DECIDES[question][generation] in step.decides
    }
    return symbol


def check_map(
    hands_out: dict[str, str], adopts_hit: dict[str, str], order: dict[str, str], report: Report
) -> None:
    given = {"hands_out": hands_out, "adopts_hit": adopts_hit, "order": order}
    every = {name: {step.place.symbol for step in call_path(name)} for name in ("v0", "v1")}
    for question, answers in given.items():
        for generation, other in (("V1", "v0"), ("V0", "v1")):
            with report.case(f"{question} in {generation}"):
                got = answers.get(generation)
                if got in every[other] - every[generation.lower()]:
                    report.misconception(
                        "the other generation",
                        f"{got} is a name of {other.upper()}, and {generation} is asked for.",
                    )
                if question == "order" and got == "BlockPool.get_new_blocks":
                    report.misconception(
                        "the order is decided when a block is taken",
                        "Taking pops the front, whatever stands there. The places are given when blocks come back.",
                    )
                report.equal(_place(generation.lower(), question), got, f"{question}[{generation!r}]")
