"""Runs Numba CUDA kernels on a CPU, with no GPU: says what is wrong with them, and counts what they cost.

    from numba import cuda
    from kernels.interpreter import interpret

    @cuda.jit
    def add_ten(out, a):
        i = cuda.grid(1)
        if i < len(a):
            out[i] = a[i] + 10

    with interpret(schedule="random", seed=3) as report:
        add_ten[2, 32](out, a)        # torch CPU tensors, numpy arrays, numbers
    print(report)                     # a line of the kernel per row; in a notebook, a table
    report.total("global", "read", "a").sectors

Kernels are ordinary `@cuda.jit` functions without a signature, wherever they are defined; the same object runs
on a GPU outside of `interpret`. `NUMBA_ENABLE_CUDASIM` must not be set: Numba's own simulator finds none of the
mistakes below.

What it finds, each as a subclass of `KernelError` with `.kernel`, `.line`, `.source`, `.block` and `.thread`:

- `RaceError`: in shared and in global memory, within a block and between blocks; found from what orders two
  accesses, not from a schedule that happens to go wrong. `.other` is the place of the other access. What orders
  is `syncthreads`, `syncwarp` among the lanes of its mask, and a `threadfence` with an atomic behind it for those
  who use the same atomic later. A shuffle or a vote orders nothing in memory.
- `BarrierError`: threads of a block wait at different barriers, some have left before it, or a lane calls a
  warp function whose mask leaves it out.
- `DeadlockError`: threads wait for each other for ever.
- `BoundsError`: an index past the end, or a negative one, which Numba wraps and C does not.
- `AlignmentError`: a vector access that is not at a multiple of its size.
- `LimitError`: more accesses and waits than `max_accesses`; this ends a loop that never would.
- `LaunchError`: a grid, a block, an argument or an amount of shared memory that no GPU takes.
- `KernelError` itself: an exception of the kernel's own code (its `__cause__`), or something that the interpreter
  does not have; the sentence names it.

If one thread fails, the others still run to where they wait. A race that led to the failure is then what is
reported, and the failure is its `__cause__`.

Shared and local memory starts as NaN (bytes 0xFF), so reading before writing gives a wrong result rather than a
lucky zero. Three schedules (`in_order`, `reverse`, `random` with a seed) run the threads in different orders
between synchronisation points; each is deterministic.

What it counts (`Report`, `Record`): warp requests, distinct bytes, 32-byte sectors of global memory, wavefronts of
shared memory (bank conflicts), per line of source, array and kind; barriers, shuffles, atomics. Local arrays,
which are registers if all goes well, are only counted.

An intrinsic (inline PTX) needs a Python version: `register(load_f32x4, lambda array, i: array.load_vector(i, 4))`.
It gets views as arrays, with `load_vector(index, n) -> tuple` and `store_vector(index, values)`: one access of up
to 16 bytes, checked for alignment. Device functions and plain helpers are interpreted along with the kernel.

`is_interpreting()` says whether an `interpret` is open; one inside another takes over until it ends.

bfloat16 does not exist in Numba: pass `tensor.view(torch.int16)` and widen by shifting, as on a GPU.

What it cannot show:

- Whether Numba can compile the kernel: shapes of allocations that are no constants, names that change their type.
- Time, occupancy, register pressure, caches. Sectors and wavefronts are what the hardware bills for, not what it
  takes.
- Rounding of float32 between stores: a float32 is computed with as a double, and rounded when it is stored or
  cast (`numba.float32(x)`). A sum is therefore a little better than on a GPU.
- Overflow of integers between stores: Python's do not. `numba.int32(x)` does wrap to 32 bits.
- Division by zero is an error here; a GPU goes on with infinity or NaN. `math.log(0.0)` and its like are as on
  a GPU.
- The order in which memory becomes visible to other blocks. Blocks run one after another, whole; a block that
  waits for a later one never ends, and neither does a thread that spins on a value of its own block. Both end in
  a `LimitError`; a loop that neither waits nor touches memory goes on until it is interrupted.
- How lanes of a warp come together again after a branch. The n-th time that a lane executes an instruction since
  its last synchronisation point counts as one request with the n-th time of the other lanes.
- What only a device has: `cuda.to_device`, `cuda.synchronize` and other calls of the host go to the driver. Pass
  tensors or arrays as they are.
- NaN or infinity stored into an integer array is an error here; in C it is undefined.
- Cooperative groups, complex numbers, records, textures, dynamic parallelism, asynchronous copies.
"""

from kernels.interpreter.errors import (
    AlignmentError,
    BarrierError,
    BoundsError,
    DeadlockError,
    KernelError,
    LaunchError,
    LimitError,
    Place,
    RaceError,
)
from kernels.interpreter.rebuild import register
from kernels.interpreter.report import Record, Report
from kernels.interpreter.session import interpret, is_interpreting

__all__ = [
    "AlignmentError",
    "BarrierError",
    "BoundsError",
    "DeadlockError",
    "KernelError",
    "LaunchError",
    "LimitError",
    "Place",
    "RaceError",
    "Record",
    "Report",
    "interpret",
    "is_interpreting",
    "register",
]
