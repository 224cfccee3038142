"""Random programs: the search finds a race exactly where a slow and obvious one does.

A program is a list of steps that all threads take together. Each step is a barrier of the block, a warp sync
with masks that split the warp, or one access (or none) of each thread. The oracle compares every two accesses.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import cuda, int32

from kernels.interpreter import RaceError
from tests.kernels.interpreter.launching import SCHEDULES, launch

THREADS, BLOCKS, CELLS = 6, 2, 3
NOTHING, READ, WRITE, ATOMIC = range(4)
BARRIER, SYNCWARP, SHARED, GLOBAL = range(4)

Step = tuple[int, tuple[Any, ...]]


def run(program: list[Step], schedule: str) -> None:
    """Runs it, each block in the same way."""

    @cuda.jit
    def kernel(cells):
        tile = cuda.shared.array(CELLS, int32)
        i, block = cuda.threadIdx.x, cuda.blockIdx.x
        for what, details in program:
            if what == BARRIER:
                cuda.syncthreads()
            elif what == SYNCWARP:
                cuda.syncwarp(details[i])
            else:
                memory = tile if what == SHARED else cells
                kind, cell = details[block * THREADS + i]
                if kind == READ:
                    memory[cell]
                elif kind == WRITE:
                    memory[cell] = i
                elif kind == ATOMIC:
                    cuda.atomic.add(memory, cell, 1)

    launch(kernel, (BLOCKS, THREADS), np.zeros(CELLS, np.int32), schedule=schedule, seed=len(program))


@dataclass(frozen=True)
class Access:
    thread: int  # of the grid
    kind: int
    memory: tuple[int, ...]
    knows: tuple[int, ...]  # accesses of each thread that come before this one

    def races_with(self, other: Access, number: int, others_number: int) -> bool:
        if self.thread == other.thread or self.memory != other.memory:
            return False
        if self.kind == other.kind and self.kind != WRITE:
            return False
        return self.knows[other.thread] < others_number and other.knows[self.thread] < number


def has_race(program: list[Step]) -> bool:
    """Every access knows how many accesses of each thread come before it; two that do not know each other race."""
    total = BLOCKS * THREADS
    known = [[0] * total for _ in range(total)]
    made: list[tuple[Access, int]] = []
    for what, details in program:
        for thread in range(total):
            block = thread // THREADS
            if what in (SHARED, GLOBAL) and details[thread][0] != NOTHING:
                kind, cell = details[thread]
                memory = (cell, block) if what == SHARED else (cell,)
                known[thread][thread] += 1
                made.append((Access(thread, kind, memory, tuple(known[thread])), known[thread][thread]))
        if what in (BARRIER, SYNCWARP):
            known = [join(known, thread, details) for thread in range(total)]
    return any(a.races_with(b, m, n) for (a, m), (b, n) in combinations(made, 2))


def join(known: list[list[int]], thread: int, masks: tuple[int, ...]) -> list[int]:
    """What a thread knows after a barrier (no masks) or a warp sync."""
    block, i = divmod(thread, THREADS)
    group = [block * THREADS + k for k in range(THREADS) if not masks or masks[i] >> k & 1]
    return [max(known[t][k] for t in group) for k in range(len(known))]


def masks_of(split: list[int]) -> tuple[int, ...]:
    """Threads with the same number meet; each gets the mask of its group."""
    return tuple(sum(1 << k for k, group in enumerate(split) if group == own) for own in split)


access = st.tuples(
    st.sampled_from([NOTHING, NOTHING, NOTHING, READ, WRITE, ATOMIC]), st.integers(0, CELLS - 1)
)
accesses = st.lists(access, min_size=THREADS * BLOCKS, max_size=THREADS * BLOCKS).map(tuple)
splits = st.lists(st.integers(0, 1), min_size=THREADS, max_size=THREADS).map(masks_of)
quiet = st.tuples(st.integers(0, THREADS - 1), access).map(
    lambda t: tuple(t[1] if k == t[0] else (NOTHING, 0) for k in range(THREADS * BLOCKS))
)
steps = st.one_of(
    st.just((BARRIER, ())),
    st.tuples(st.just(SYNCWARP), splits),
    st.tuples(st.just(SYNCWARP), st.just(((1 << THREADS) - 1,) * THREADS)),
    st.tuples(st.sampled_from([SHARED, GLOBAL]), quiet),
    st.tuples(st.sampled_from([SHARED, GLOBAL]), quiet),
    st.tuples(st.sampled_from([SHARED, GLOBAL]), accesses),
)


@settings(max_examples=150, deadline=None)
@given(program=st.lists(steps, max_size=14), schedule=st.sampled_from(SCHEDULES))
def test_a_race_is_reported_where_there_is_one_and_nowhere_else(program: list[Step], schedule: str) -> None:
    try:
        run(program, schedule)
        found = False
    except RaceError:
        found = True
    assert found == has_race(program)
