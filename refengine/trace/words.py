"""Numbers in words, for everything that tells what was decided."""

from __future__ import annotations

from collections.abc import Sequence

from refengine.trace.observer import MarkKind

STEPS = ("The request arrives", "The step that admits it", "The first decode step")  # of a followed request
MARKS: dict[MarkKind, str] = {
    "lookup": "which prefix is computed",
    "admit": "yes, or not now",
    "allocate": "which blocks",
    "publish": "others can find it",
    "run": "K/V written, attention read",
    "append": "the sampled token joins",
}


def ranges(ids: Sequence[int]) -> str:
    """Block ids in their order, with runs folded: `1-9, 12`; `none` if there are none."""
    runs: list[list[int]] = []
    for block_id in ids:
        if runs and runs[-1][-1] == block_id - 1:
            runs[-1] = [runs[-1][0], block_id]
        else:
            runs.append([block_id])
    return ", ".join("-".join(map(str, run)) for run in runs) or "none"


def count(number: int, noun: str) -> str:
    """`1 block`, `2 blocks`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def blocks(ids: Sequence[int]) -> str:
    """`block 3`, `blocks 1-6`, `no block`."""
    return f"block{'' if len(ids) == 1 else 's'} {ranges(ids)}" if ids else "no block"


def slots(ids: Sequence[int]) -> str:
    """`slot 74`, `slots 64-73`."""
    return f"slot{'' if len(ids) == 1 else 's'} {ranges(ids)}"


def span(noun: str, first: int, number: int) -> str:
    """`position 4`, `positions 4-9`: `number` of them from `first` on."""
    return f"{noun} {first}" if number == 1 else f"{noun}s {first}-{first + number - 1}"
