"""A GPU as a stopwatch: what work costs on the device, for the host, and as one replay of a CUDA graph.

Behind `Device`, so that what is computed from the times is tested where there is none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Protocol

import torch

ROUNDS, ROUND_SECONDS = 5, 0.03  # the median round counts

Work = Callable[[], None]


class Device(Protocol):
    """Where work runs and how long it took there."""

    name: torch.device
    l2_bytes: int

    def free_bytes(self) -> int:
        """Memory that could be allocated now."""
        ...

    def captured(self, work: Work) -> Work:
        """The same work as one replay of a graph."""
        ...

    def seconds(self, work: Work, repeats: int) -> float:
        """Time on the device of one call, out of `repeats` in a row."""
        ...

    def host_seconds(self, work: Work, repeats: int) -> float:
        """Time until one call returns, out of `repeats` in a row; what it started may still run."""
        ...


class CudaDevice:
    """The current GPU, on a stream of its own.

    Graphs cannot be captured on torch's default stream. To use one other stream for everything also keeps clear
    of a trap: numba hands the stream to torch when it takes a tensor, and torch refuses the default one's 0.
    """

    def __init__(self) -> None:
        self.name = torch.device("cuda", torch.cuda.current_device())
        self.l2_bytes = torch.cuda.get_device_properties(self.name).L2_cache_size
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(self.stream)

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def captured(self, work: Work) -> Work:
        work()  # compiles and allocates, neither of which may happen during a capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            work()
        return graph.replay

    def seconds(self, work: Work, repeats: int) -> float:
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        stop = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(repeats):
            work()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3 / repeats

    def host_seconds(self, work: Work, repeats: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        ended = time.perf_counter()
        torch.cuda.synchronize()
        return (ended - began) / repeats


def median_seconds(device: Device, work: Work) -> float:
    """Of one call, from several rounds that are long against the resolution of the clock."""
    work()
    once = device.seconds(work, 1)
    repeats = max(1, min(1000, round(ROUND_SECONDS / max(once, 1e-9))))
    return median(device.seconds(work, repeats) for _ in range(ROUNDS))
