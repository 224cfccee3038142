"""One block: its threads run in turn, each to its next synchronisation point, where they meet and go on.

A thread is a greenlet. The order in which threads that can run do run is the schedule; a right kernel gives the
same result in every order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

from greenlet import greenlet  # type: ignore[import-untyped]

from kernels.interpreter.clock import NOTHING, Clock, join
from kernels.interpreter.errors import BarrierError, DeadlockError, KernelError, LimitError, Place, Position
from kernels.interpreter.log import TOO_MANY, Log
from kernels.interpreter.thread import Meeting, Thread


class Context(Protocol):
    """What a block needs of its launch."""

    log: Log
    passed: dict[str, int]  # name -> how often threads met there
    published: dict[int, Clock]  # address in global memory -> what its atomics hand on

    def enter(self, thread: Thread) -> None:
        """Makes a thread the running one, as seen through `cuda.threadIdx`."""

    def order(self, threads: list[Thread]) -> list[Thread]:
        """Threads that can run, in the order of the schedule."""
        ...

    def place(self, site: int, position: Position | None) -> Place:
        """An instruction and a thread of the running block, in words."""
        ...

    def wrapped(self, error: Exception, thread: Thread) -> KernelError:
        """An exception of the kernel's own code as an error that says where."""
        ...


class Block:
    """The threads of one block, and the run of it."""

    def __init__(self, context: Context, number: int, body: Callable[..., Any], shape: Position) -> None:
        self.context, self.number, self.epoch = context, number, 0
        self.main = greenlet.getcurrent()
        x, y, z = shape
        positions = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
        first = number * len(positions)
        self.threads = [Thread(body, i, first + i, position) for i, position in enumerate(positions)]
        self.current = self.threads[0]
        self._published: dict[int, Clock] = {}  # address in shared memory -> what its atomics hand on

    def run(self, arguments: tuple[Any, ...]) -> None:
        """Runs all threads to their ends. Raises: KernelError. Leaves no greenlet behind."""
        try:
            while live := [thread for thread in self.threads if not thread.done]:
                ready = [thread for thread in live if thread.meeting is None]
                self._round(self.context.order(ready), arguments)
                self._meet([thread for thread in live if not thread.done])
        finally:
            for thread in self.threads:
                if not thread.greenlet.dead:
                    thread.greenlet.throw()

    def _round(self, ready: list[Thread], arguments: tuple[Any, ...]) -> None:
        """Runs each to where it waits. Raises: the first error of a thread, once the others have had their turn.

        They may do what the failed thread should have waited for, and then the race says more than the error.
        """
        errors: list[KernelError] = []
        for thread in ready:
            try:
                self._step(thread, arguments)
            except LimitError:
                raise
            except KernelError as error:
                thread.done = True
                errors.append(error)
        if errors:
            raise errors[0]

    def _step(self, thread: Thread, arguments: tuple[Any, ...]) -> None:
        self.current = thread
        self.context.enter(thread)
        self.begin_run(thread)
        try:
            returned = thread.greenlet.switch(*(() if thread.greenlet else arguments))
        except KernelError:
            raise
        except Exception as error:
            raise self.context.wrapped(error, thread) from error
        thread.done = thread.greenlet.dead
        if thread.done and returned is not None:
            raise KernelError("a kernel returns nothing", self.context.place(-1, thread.position))

    def begin_run(self, thread: Thread) -> None:
        """What the log gets from here on is this thread's, with its present clock."""
        t = thread
        self.context.log.begin(
            (self.number, t.number, self.epoch, t.step, t.warp, t.lane, t.segment), t.clock
        )

    def wait(self, meeting: Meeting) -> Any:
        """Called by a thread: lets the others run until the meeting has taken place; the thread's result.

        Raises: LimitError, so that a loop of nothing but barriers or shuffles ends.
        """
        thread = self.current
        if not self.context.log.wait():
            raise LimitError(TOO_MANY, self.context.place(meeting.site, thread.position))
        thread.meeting = meeting
        self.main.switch()
        return thread.result

    # Memory order

    def fence(self, thread: Thread) -> None:
        """A later atomic of this thread hands on all that it has done so far."""
        thread.step += 1
        thread.fenced = Clock(
            {**thread.clock.epochs, self.number: self.epoch},
            {**thread.clock.threads, thread.number: thread.step},
        )
        self.begin_run(thread)

    def synchronise(self, thread: Thread, address: int, shared: bool) -> None:
        """An atomic at this address: takes what earlier ones handed on, hands on what was fenced."""
        published = self._published if shared else self.context.published
        if address in published:
            thread.clock = join((thread.clock, published[address]))
            self.begin_run(thread)
        if thread.fenced is not None:
            published[address] = join((published.get(address, NOTHING), thread.fenced))

    # Meetings

    def _meet(self, live: list[Thread]) -> None:
        """Lets those go on whose meeting is complete. Raises: BarrierError, DeadlockError if nobody can."""
        if not live:
            return
        barrier = [t for t in live if t.meeting and t.meeting.mask is None]
        if len(barrier) == len(live):
            self._meet_barrier(live)
            return
        if not any(self._meet_warps(live, whoever) for whoever in (False, True)):
            self._deadlock(live)

    def _meet_barrier(self, live: list[Thread]) -> None:
        first = live[0]
        elsewhere = [t for t in live if _site(t) != _site(first)]
        if elsewhere:
            message = (
                f"{len(live) - len(elsewhere)} threads wait at this barrier, but {len(elsewhere)} at another: "
                f"thread {elsewhere[0].position} at {self._place(elsewhere[0]).where}"
            )
            raise BarrierError(message, self._place(first))
        if gone := [t for t in self.threads if t.done]:
            message = (
                f"{len(live)} threads wait at this barrier, but {len(gone)} have left the kernel before it, "
                f"thread {gone[0].position} for one"
            )
            raise BarrierError(message, self._place(first))
        self.epoch += 1
        known = join(t.clock for t in live)
        if known is not NOTHING:  # about the threads of this block the epoch says it all
            own = {t.number for t in self.threads}
            known = Clock(known.epochs, {k: v for k, v in known.threads.items() if k not in own})
        self._release(live, "index")
        for thread in live:
            thread.clock = known

    def _meet_warps(self, live: list[Thread], with_whoever_is_here: bool) -> bool:
        """Whether some lanes went on.

        Lanes that have left the kernel are not waited for: the hardware does not wait for them either.
        """
        present: dict[int, int] = defaultdict(int)  # lanes of each warp that have not left
        groups: dict[tuple[int, str, int], list[Thread]] = defaultdict(list)
        for thread in live:
            present[thread.warp] |= 1 << thread.lane
            meeting = thread.meeting
            if meeting and meeting.mask is not None and (meeting.mask == 0) == with_whoever_is_here:
                groups[thread.warp, meeting.name, meeting.mask].append(thread)
        complete = [
            group
            for (warp, _, mask), group in groups.items()
            if with_whoever_is_here or len(group) == (mask & present[warp]).bit_count()
        ]
        for group in complete:
            if group[0].meeting and group[0].meeting.orders:
                self._share_clocks(group)
            self._release(group, "lane")
        return bool(complete)

    def _share_clocks(self, group: list[Thread]) -> None:
        known = join(t.clock for t in group)
        threads = dict(known.threads)
        for thread in group:
            thread.step += 1
            threads[thread.number] = thread.step
        clock = Clock(known.epochs, threads)
        for thread in group:
            thread.clock = clock

    def _release(self, group: list[Thread], place: str) -> None:
        """Gives everybody the result and lets them go on; place: the attribute by which values are known."""
        first = group[0].meeting
        assert first is not None
        if first.result is not None:
            values = {getattr(t, place): t.meeting.value for t in group if t.meeting}
            for thread in group:
                if thread.meeting and thread.meeting.result:
                    thread.result = thread.meeting.result(getattr(thread, place), values)
        for thread in group:
            thread.meeting = None
            thread.segment += 1
        passed = self.context.passed
        passed[first.name] = passed.get(first.name, 0) + 1

    # Words

    def _place(self, thread: Thread) -> Place:
        return self.context.place(_site(thread), thread.position)

    def _deadlock(self, live: list[Thread]) -> None:
        first = next(t for t in live if t.meeting and t.meeting.mask is not None)
        missing = next(t for t in live if _in_mask(t, first) and _named(t) != _named(first))
        message = (
            f"waits for ever at {_named(first)}, since thread {missing.position} waits at {_named(missing)}, "
            f"{self._place(missing).where}"
        )
        raise DeadlockError(message, self._place(first))


def _site(thread: Thread) -> int:
    return thread.meeting.site if thread.meeting else -1


def _in_mask(thread: Thread, caller: Thread) -> bool:
    """Whether the one is a lane that the other waits for."""
    mask = caller.meeting.mask if caller.meeting else None
    return mask is not None and thread.warp == caller.warp and bool(mask >> thread.lane & 1)


def _named(thread: Thread) -> str:
    """What a thread waits at."""
    meeting = thread.meeting
    assert meeting is not None
    return meeting.name if meeting.mask is None else f"{meeting.name} with mask {meeting.mask:#010x}"
