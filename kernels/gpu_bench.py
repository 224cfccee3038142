"""How fast the decode kernels are on a GPU, as shares of what copying memory reaches on the same GPU.

A decode step reads every key and value once, so memory bandwidth is its limit: the floor of its time is the
bytes of the cache divided by the bandwidth. Three things make such a number honest. Several sets of blocks are
read in turn, together larger than the L2 cache, or the second launch would find everything there. Launches are
recorded in a CUDA graph, or at small sizes the host would be measured. And the yardstick is measured, not taken
from a data sheet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import ceil
from statistics import median
from typing import Any

import torch

from kernels.gpu_decode import KERNELS, LLAMA, Kernel, Layout, Pool, decode_step
from kernels.gpu_device import ROUNDS, Device, Work, median_seconds

NUM_SEQS = (1, 8, 64)
CONTEXTS = (1024, 8192, 32768)  # tokens in each sequence
COPY_BYTES = 1 << 30
COLD = 4  # the sets of blocks together are so many times the L2 cache
FREE_SHARE = 0.8  # of the free memory that may be used

Row = dict[str, Any]


@dataclass(frozen=True)
class Timing:
    """One kernel at one size. kv_bytes: what it has to read, at least, in one launch."""

    kernel: str
    num_seqs: int
    context: int
    seconds: float
    kv_bytes: int
    num_sets: int

    def row(self, copy_bandwidth: float) -> Row:
        """For the table and for JSON. copy_bandwidth: bytes per second, read and written."""
        bandwidth = self.kv_bytes / self.seconds
        return asdict(self) | {"bandwidth": bandwidth, "share_of_copy": bandwidth / copy_bandwidth}


def copy_bandwidth(device: Device, num_bytes: int = COPY_BYTES) -> float:
    """Bytes per second that a copy of `num_bytes` reads and writes together."""
    num_bytes = min(num_bytes, int(device.free_bytes() * FREE_SHARE) // 2)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device.name)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    return 2 * num_bytes / median_seconds(device, copy)


def decode_rows(
    device: Device,
    bandwidth: float,
    kernels: Mapping[str, Kernel] = KERNELS,
    layout: Layout = LLAMA,
    num_seqs: tuple[int, ...] = NUM_SEQS,
    contexts: tuple[int, ...] = CONTEXTS,
) -> Iterator[Row]:
    """Every kernel at every size: a `Timing.row`, or one with "skipped" or "error" and the reason.

    Args: bandwidth: of a copy, as `copy_bandwidth` gives it.
    """
    # Half of the memory: torch's way gathers everything once more.
    room = int(device.free_bytes() * FREE_SHARE / 2) // layout.block_bytes
    sizes = [(n, context) for n in num_seqs for context in contexts]
    fitting = [n * layout.blocks(context) for n, context in sizes if n * layout.blocks(context) <= room]
    cold_blocks = ceil(COLD * device.l2_bytes / layout.block_bytes)
    pool = Pool(device, layout, min(room, max([*fitting, 2 * cold_blocks])))
    for n, context in sizes:
        for name, kernel in kernels.items():
            row: Row = {"kernel": name, "num_seqs": n, "context": context}
            needed = n * layout.blocks(context)
            if needed > pool.num_blocks:
                gigabytes = 2 * needed * layout.block_bytes / FREE_SHARE / 1e9
                yield row | {"skipped": f"needs {gigabytes:.1f} GB of free memory"}
                continue
            try:
                yield row | _timing(device, name, kernel, pool, n, context).row(bandwidth)
            except Exception as error:  # whatever a kernel dies of, the other sizes are still worth having
                yield row | {"error": f"{type(error).__name__}: {error}"}


def _timing(
    device: Device,
    name: str,
    kernel: Kernel,
    pool: Pool,
    num_seqs: int,
    context: int,
) -> Timing:
    layout = pool.layout
    tables = pool.tables(num_seqs, context, COLD * device.l2_bytes)
    works = [kernel(decode_step(pool, table, context)) for table in tables]

    def through_all_sets() -> None:
        for work in works:
            work()

    seconds = median_seconds(device, device.captured(through_all_sets)) / len(tables)
    kv_bytes = num_seqs * context * layout.block_bytes // layout.block_size
    return Timing(name, num_seqs, context, seconds, kv_bytes, len(tables))


def launch_rows(device: Device, works: Mapping[str, Work], launches: int = 100) -> Iterator[Row]:
    """What starting a kernel costs: for the host when called from Python, and for the device within a graph."""
    for name, work in works.items():
        try:
            work()
            eager = median(device.host_seconds(work, launches) for _ in range(ROUNDS))

            def many(work: Work = work) -> None:
                for _ in range(launches):
                    work()

            graph = median_seconds(device, device.captured(many)) / launches
            yield {"kernel": name, "eager_seconds": eager, "graph_seconds": graph}
        except Exception as error:  # as above
            yield {"kernel": name, "error": f"{type(error).__name__}: {error}"}


def small_works(device: Device, layout: Layout = LLAMA) -> dict[str, Work]:
    """Decoding of one sequence of one block with each kernel, and the least that torch can be asked to do."""
    pool = Pool(device, layout, num_blocks=1)
    step = decode_step(pool, pool.tables(1, layout.block_size, 0)[0], layout.block_size)
    number = torch.zeros(1, device=device.name)

    def add() -> None:
        number.add_(1)

    return {"torch add": add} | {name: kernel(step) for name, kernel in KERNELS.items()}
