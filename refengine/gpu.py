"""The few calls of torch that a GPU needs and a CPU does not: streams, pinned copies, graphs, free memory.

On a CPU each of them does nothing, so that the engine has one path for both.
vLLM: V0 and V1 keep such calls in their workers and in platforms/cuda.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

Work = Callable[[], Tensor]


def staged(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on the host, ready for `.to` or `.copy_` with `non_blocking=True`.

    Only from pinned memory does such a copy really run on its own. torch keeps the memory until it is done.
    """
    return x.pin_memory() if device.type == "cuda" else x


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A tensor from the host, there. The host does not wait; on a CPU it is the same tensor."""
    return staged(x, device).to(device, non_blocking=True)


def new_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream for all work of an engine; None on a CPU.

    Not the default one: on that no graph can be captured.
    """
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


@contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Work inside goes to `stream`: after all that was started before, and before all that is started after."""
    if stream is None:
        yield
        return
    outer = torch.cuda.current_stream(stream.device)
    stream.wait_stream(outer)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        outer.wait_stream(stream)


class GraphCapture:
    """Records work as CUDA graphs, which share the memory for what they compute on the way."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        """Runs the work once, then records it. Call it on the stream.

        Returns: a replay; its result lies in the same memory each time, and only until the next replay of any.
        """
        work()  # a kernel that is new is compiled here, which a capture could not record
        graph = torch.cuda.CUDAGraph()
        # A capture may fail because another thread of this process, a notebook's for example, allocates memory.
        with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"):
            result = work()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


def free_bytes(device: torch.device) -> tuple[int, int]:
    """Memory of the GPU in bytes: what could be allocated now, and all there is."""
    torch.cuda.empty_cache()  # what torch holds without need counts as free
    return torch.cuda.mem_get_info(device)


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Memory that some work needs at its worst moment, beyond what is allocated before it. Bytes."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    return torch.cuda.max_memory_allocated(device) - before
