"""What the accesses of a launch cost on a GPU: requests, 32-byte sectors, wavefronts.

The lanes of a warp that execute the same instruction together make one request. Which executions belong
together is read from the log: the n-th time a lane executes an instruction after its last synchronisation point
goes with the n-th time of the other lanes. Where lanes take different ways through a loop this is a guess, and
a generous one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernels.interpreter.log import Accesses, Column, Tag, column
from kernels.interpreter.thread import WARP_SIZE

SECTOR = 32  # bytes that global memory moves at once
NUM_BANKS, BANK = 32, 4  # shared memory: 32 banks, 4 bytes wide


@dataclass(frozen=True)
class Requests:
    """One entry per request of a warp."""

    tag: Column
    site: Column
    lanes: Column
    bytes: Column  # distinct ones
    sectors: Column  # 0 outside global memory
    wavefronts: Column  # 0 outside shared memory
    least: Column  # sectors or wavefronts that this many bytes need at least, in 1/SECTOR of one


def count(accesses: Accesses, tags: list[Tag]) -> Requests:
    """The requests that these accesses make."""
    request = _request_of(accesses)
    bases, itemsizes = (
        column(tags, (t.array.base for t in tags)),
        column(tags, (t.array.itemsize for t in tags)),
    )
    sizes = column(tags, (t.size for t in tags))
    address = bases[accesses.tag] + accesses.offset * itemsizes[accesses.tag]
    order = np.lexsort((address, request))
    request, address = request[order], address[order]
    tag, lane = accesses.tag[order], accesses.runs.lane[accesses.run[order]]
    first = _changes(request)
    number = np.cumsum(first) - 1
    starts = np.flatnonzero(first)
    distinct = first | _changes(address)
    num = len(starts)
    request_tag = tag[starts]
    size = sizes[request_tag]
    num_bytes = np.bincount(number[distinct], minlength=num) * size
    in_global = column(tags, (t.array.space == "global" for t in tags))[request_tag].astype(bool)
    in_shared = column(tags, (t.array.space == "shared" for t in tags))[request_tag].astype(bool)
    new_sector = first | _changes(address // SECTOR)
    sectors = np.bincount(number[new_sector], minlength=num)
    wavefronts = np.zeros(num, dtype=np.int64)
    shared = np.flatnonzero(in_shared[number])
    if len(shared):
        wavefronts += _wavefronts(number[shared], address[shared], lane[shared], size[number[shared]], num)
    full = np.maximum(1, -(-num_bytes // (NUM_BANKS * BANK)))
    return Requests(
        tag=request_tag,
        site=accesses.site[order][starts],
        lanes=np.bincount(number, minlength=num),
        bytes=num_bytes,
        sectors=np.where(in_global, sectors, 0),
        wavefronts=wavefronts,
        least=np.where(in_global, num_bytes, np.where(in_shared, full * SECTOR, 0)),
    )


def _request_of(accesses: Accesses) -> Column:
    """The request that each access belongs to, as a number."""
    runs, run = accesses.runs, accesses.run
    sites, site = np.unique(accesses.site, return_inverse=True)
    segments, warps = int(runs.segment.max(initial=0)) + 1, int(runs.warp.max(initial=0)) + 1
    key = _dense(runs.thread * segments + runs.segment)[run] * len(sites) + site
    order = np.argsort(key, kind="stable")
    starts = np.flatnonzero(_changes(key[order]))
    lengths = np.diff(np.append(starts, len(key)))
    nth = np.empty_like(key)
    nth[order] = np.arange(len(key)) - np.repeat(starts, lengths)
    most = int(lengths.max(initial=0))
    num_tags = int(accesses.tag.max(initial=0)) + 1
    warp = _dense((runs.block * warps + runs.warp) * segments + runs.segment)[run]
    return ((warp * len(sites) + site) * most + nth) * num_tags + accesses.tag


def _dense(keys: Column) -> Column:
    """The keys as numbers from 0 on, so that products of them do not overflow."""
    return np.unique(keys, return_inverse=True)[1]


def _wavefronts(request: Column, address: Column, lane: Column, size: Column, num: int) -> Column:
    """Passes over the banks that each request needs.

    A pass serves each bank once, and all lanes that want the same word of it. Accesses of 8 bytes are served half
    a warp at a time, of 16 bytes a quarter.
    """
    words = np.maximum(1, size // BANK)
    row = np.repeat(np.arange(len(request)), words)
    within = np.arange(len(row)) - np.repeat(np.cumsum(words) - words, words)
    word = address[row] // BANK + within
    turn = request[row] * 4 + (lane * words // WARP_SIZE)[row]
    bank = word % NUM_BANKS
    order = np.lexsort((word, bank, turn))
    turn, bank, word = turn[order], bank[order], word[order]
    wanted = _changes(turn) | _changes(word)
    slot = _changes(turn) | _changes(bank)
    per_slot = np.add.reduceat(wanted.astype(np.int64), np.flatnonzero(slot))
    turn_of_slot = turn[slot]
    starts = np.flatnonzero(_changes(turn_of_slot))
    passes = np.maximum.reduceat(per_slot, starts)
    return np.bincount(turn_of_slot[starts] // 4, weights=passes, minlength=num).astype(np.int64)


def _changes(sorted_keys: Column) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """True where a key differs from the one before it."""
    change = np.ones(len(sorted_keys), dtype=bool)
    change[1:] = sorted_keys[1:] != sorted_keys[:-1]
    return change
