"""The two ways in which a function becomes code for a GPU, with the types of plain Python functions.

Numba compiles at the first launch, once for every combination of argument types. Decorating needs no GPU, so
these modules can be imported, read and interpreted anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba.cuda

cuda: Any = numba.cuda  # whose own annotations are those of its simulator

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: Callable[..., None]) -> Any:
    """A function to launch, as `kernel[grid, block](...)`.

    Fast arithmetic: multiply-adds are fused, sums may be regrouped, divisions are rounded less carefully.
    """
    return cuda.jit(fastmath=True)(function)


def resident_kernel(threads: int, blocks: int) -> Callable[[Callable[..., None]], Any]:
    """A kernel of which `blocks` blocks of `threads` threads are to fit on one processor at the same time.

    This tells the compiler how many registers it may take. Without being told it saves registers by moving
    every load down to where its result is used, and then no two loads are on their way together.
    """
    return cast(
        Callable[[Callable[..., None]], Any], cuda.jit(fastmath=True, launch_bounds=(threads, blocks))
    )


def device_function(function: F) -> F:
    """A function to be called by kernels. The compiler puts its body where it is called."""
    return cast(F, cuda.jit(device=True, fastmath=True)(function))
