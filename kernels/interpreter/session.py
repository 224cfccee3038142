"""`interpret`: inside it, launches of Numba CUDA kernels go to the interpreter instead of a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, get_args

from kernels.interpreter.launch import Launch, Options, Schedule
from kernels.interpreter.report import Report


class Session:
    """One `with interpret(...)`."""

    def __init__(self, options: Options) -> None:
        self.options, self.report = options, Report()

    def launch(
        self, dispatcher: Any, grid: Any, block: Any, shared_bytes: int, arguments: tuple[Any, ...]
    ) -> None:
        """Runs a kernel. Raises: KernelError."""
        Launch(dispatcher.py_func, grid, block, shared_bytes, self.options, self.report).run(arguments)


_SESSION: ContextVar[Session | None] = ContextVar("kernels.interpreter session", default=None)


@contextmanager
def interpret(
    schedule: Schedule = "in_order",
    seed: int = 0,
    races: bool = True,
    poison: bool = True,
    max_accesses: int = Options.max_accesses,
) -> Iterator[Report]:
    """Runs the kernels that are launched inside it, and yields the Report that they add to.

    Args:
        schedule: order of threads between two synchronisation points, and of blocks: "in_order", "reverse",
            or "random", which depends on nothing but the seed.
        races: look for races.
        poison: fill shared and local memory with NaN (bytes 0xFF) instead of zero.
        max_accesses: of one launch, by all its threads; a wait at a barrier or a shuffle counts as four. A launch
            that makes more is stopped with a LimitError.
    It may be nested; the innermost one runs the kernels.
    Raises: KernelError, at the launch; ValueError for a schedule that does not exist; RuntimeError in a
        process where `numba.cuda` is Numba's own simulator.
    """
    if schedule not in get_args(Schedule):
        raise ValueError(f"there is no schedule {schedule!r}; what exists is {', '.join(get_args(Schedule))}")
    session = Session(Options(schedule, seed, races, poison, max_accesses))
    _INTERCEPTION.start()
    token = _SESSION.set(session)
    try:
        yield session.report
    finally:
        _SESSION.reset(token)
        _INTERCEPTION.stop()


def is_interpreting() -> bool:
    """Whether an `interpret` is open here."""
    return _SESSION.get() is not None


class Configured:
    """`kernel[grid, block, stream, shared_bytes]`, to be called with the kernel's arguments.

    Args: otherwise: makes what to call when the session has ended by then.
    """

    def __init__(self, dispatcher: Any, configuration: Any, otherwise: Callable[[], Any]) -> None:
        self._dispatcher, self._otherwise = dispatcher, otherwise
        self._grid, self._block, *rest = configuration
        self._shared_bytes = rest[1] if len(rest) > 1 else 0

    def __call__(self, *arguments: Any) -> Any:
        session = _SESSION.get()
        if session is None:
            return self._otherwise()(*arguments)
        return session.launch(self._dispatcher, self._grid, self._block, self._shared_bytes, arguments)


class Interception:
    """The three ways in which a launch leaves Numba's dispatcher, exchanged while any session is open.

    Threads without a session of their own launch as ever.
    """

    NAMES = ("__getitem__", "call", "forall")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._originals: dict[str, Callable[..., Any]] = {}

    def start(self) -> None:
        """Exchanges them, if nobody has yet. Raises: RuntimeError under Numba's own simulator."""
        dispatcher = _dispatcher_class()
        with self._lock:
            self._open += 1
            if self._open == 1:
                self._originals = {name: getattr(dispatcher, name) for name in self.NAMES}
                for name in self.NAMES:
                    setattr(dispatcher, name, _replacement(name, self._originals[name]))

    def stop(self) -> None:
        """Puts the originals back, if nobody needs the others any more."""
        dispatcher = _dispatcher_class()
        with self._lock:
            self._open -= 1
            if not self._open:
                for name, original in self._originals.items():
                    setattr(dispatcher, name, original)


_INTERCEPTION = Interception()


def _dispatcher_class() -> Any:
    from numba import cuda

    if "simulator" in cuda.jit.__module__:
        raise RuntimeError(
            "numba.cuda is Numba's own simulator, because NUMBA_ENABLE_CUDASIM was set when it was imported: "
            "unset it and restart Python (in a notebook, restart the kernel)"
        )
    from numba.cuda.dispatcher import CUDADispatcher

    return CUDADispatcher


def _replacement(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def configure(dispatcher: Any, configuration: Any) -> Any:
        if not is_interpreting() or not isinstance(configuration, tuple) or not 2 <= len(configuration) <= 4:
            return original(dispatcher, configuration)  # which also has the words for a wrong configuration
        return Configured(dispatcher, configuration, lambda: original(dispatcher, configuration))

    def call(dispatcher: Any, arguments: Any, *configuration: Any) -> Any:
        if not is_interpreting():
            return original(dispatcher, arguments, *configuration)
        given = configuration
        if len(given) == 1:  # numba-cuda passes one object, Numba's own module its four fields
            given = (given[0].griddim, given[0].blockdim, given[0].stream, given[0].sharedmem)
        return Configured(dispatcher, given, lambda: None)(*arguments)

    def forall(dispatcher: Any, ntasks: int, tpb: int = 0, stream: Any = 0, sharedmem: int = 0) -> Any:
        if not is_interpreting() or not ntasks:
            return original(dispatcher, ntasks, tpb, stream, sharedmem)
        block = tpb or 128  # Numba asks the driver
        configuration = (-(-ntasks // block), block, stream, sharedmem)
        return Configured(
            dispatcher, configuration, lambda: original(dispatcher, ntasks, tpb, stream, sharedmem)
        )

    replacements: dict[str, Callable[..., Any]] = {"__getitem__": configure, "call": call, "forall": forall}
    return replacements[name]
