"""Checks of exercise 09, threads of a block: a tile in between, a softmax with two faults, a reduction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from exercises.grader import Report
from exercises.tasks.ex08_scene import draw
from exercises.tasks.ex09_checks import FAR_APART
from exercises.tasks.kernel_checks import (
    NO_GUARD,
    Budget,
    Contents,
    Cost,
    Launch,
    Suspect,
    WriteRace,
    check_budgets,
    check_launch,
    distinct,
    sectors,
    unwritten,
)
from kernels.interpreter import BoundsError, RaceError

CONFLICT: Suspect = (
    "a bank conflict",
    "Lanes of a warp want different words of one bank (word modulo 32), and are served one after the other.",
)
MISSING_BARRIER: Suspect = (
    "a barrier is missing",
    "A thread touches what another one writes, and nothing makes it wait.",
)


def no_conflict(space: str = "shared") -> Budget:
    """No pass over the banks beyond the one that each request needs."""

    def extra(cost: Cost) -> int:
        return cost.total(space).wavefronts - cost.total(space).requests

    return Budget("passes over the banks beyond one per request", extra, 0, 0, CONFLICT)


# -- 09.6: a tile in between ---------------------------------------------------------------------------------

SAME_GUARD: Suspect = (
    "one guard for reading and writing",
    "A thread writes another element than it has read, with other bounds: its own guard belongs to it.",
)


def check_transpose(transpose: Any, report: Report) -> None:
    for num_tokens, head_dim in ((72, 40), (33, 65)):
        keys = distinct(num_tokens, head_dim)
        grid = (-(-head_dim // 32), -(-num_tokens // 32))
        launch = Launch(
            f"{num_tokens} keys of {head_dim} numbers, {grid[0] * grid[1]} blocks of 32 x 32 threads",
            grid=grid,
            block=(32, 32),
            arguments={"out": unwritten(head_dim, num_tokens), "keys": keys},
            expected={"out": keys.T.contiguous()},
        )
        errors = {RaceError: MISSING_BARRIER, BoundsError: SAME_GUARD}
        cost = check_launch(report, transpose, launch, known={SAME_GUARD: {"out": _cut(keys)}}, errors=errors)
        if num_tokens % 8 == head_dim % 8 == 0:
            least = num_tokens * head_dim // 8
            both = (("keys", "read"), ("out", "write"))
            budgets = [sectors(*each, most=least, least=least, suspect=FAR_APART) for each in both]
            check_budgets(report, cost, *budgets, no_conflict())


def _cut(keys: Tensor) -> Tensor:
    """What is written if a thread writes only where it has read."""
    out = unwritten(*keys.T.shape)
    num_tokens, head_dim = keys.shape
    for token in range(num_tokens):
        for d in range(head_dim):
            y, x = d % 32, token % 32  # of the thread that writes it
            if token - x + y < num_tokens and d - y + x < head_dim:
                out[d, token] = keys[token, d]
    return out


# -- 09.7: two faults ----------------------------------------------------------------------------------------

TOO_EARLY: Suspect = (
    "the scratch memory is used again too early",
    "Some threads have not read the largest score when others overwrite it: a barrier belongs between.",
)
COUNTS_AS_0: Suspect = (
    "a score that is not there counts as 0",
    "Its weight must be 0, so the score must lie below all others: minus infinity.",
)


def check_softmax(softmax_rows: Any, report: Report) -> None:
    full = _softmax_launch("full rows, 3 blocks", draw(3, 64, seed=1))
    ragged = [_softmax_launch(f"rows of {n}", draw(4, n, seed=n) * 3 - 20) for n in (41, 1)]
    sentences, errors = [], {RaceError: TOO_EARLY, BoundsError: NO_GUARD}  # a guard in every block
    for launch in (full, *ragged):
        scores = launch.arguments["scores"]
        assert isinstance(scores, Tensor)
        zeros = torch.zeros(len(scores), 64 - scores.shape[1])
        padded = torch.cat((scores, zeros), dim=1).double().softmax(1)[:, : scores.shape[1]]
        wrong: dict[Suspect, Contents] = {COUNTS_AS_0: {"weights": padded}}
        check_launch(report, softmax_rows, launch, known=wrong, errors=errors)
        sentences.append(report.cases[-1].sentence)
    if sentences[0].startswith("RaceError") and sentences[1].startswith("BarrierError"):
        report.as_given()


def _softmax_launch(title: str, scores: Tensor) -> Launch:
    arguments = {"weights": unwritten(*scores.shape), "scores": scores}
    return Launch(title, len(scores), 64, arguments, {"weights": scores.double().softmax(1)})


# -- 09.8: a block agrees ------------------------------------------------------------------------------------

FROM_ZERO: Suspect = (
    "the largest starts at 0",
    "If all scores are negative, 0 stays the largest. Start below every score.",
)
BY_ELEMENTS: Suspect = (
    "the tree counts elements, not threads",
    "What is halved are the numbers in shared memory, one per thread, and their number is a power of two. Elements "
    "have been taken in before.",
)
ONE_EACH: Suspect = ("a thread has one element", "The row is longer than the block: a thread goes on by 64.")
ALL_WRITE: Suspect = (
    "every thread writes the result",
    "Two writes of one element race, even of the same value: let thread 0 write.",
)
MANY_BARRIERS: Suspect = (
    "a tree for each number",
    "One step of the tree can carry both numbers, and both wait at the same barrier.",
)


def check_stats(row_stats: Any, report: Report) -> None:
    for num_rows, n in ((3, 152), (4, 41), (3, 1)):
        scores = draw(num_rows, n, seed=n) - 6.0
        largest, total = scores.double().amax(1), scores.double().sum(1)
        head = scores.double()[:, :64]
        wrong: dict[Suspect, Contents] = {
            FROM_ZERO: {"largest": largest.clamp(min=0), "total": total},
            ONE_EACH: {"largest": head.amax(1), "total": head.sum(1)},
        }
        launch = Launch(
            f"{num_rows} rows of {n} negative numbers",
            grid=num_rows,
            block=64,
            arguments={"largest": unwritten(num_rows), "total": unwritten(num_rows), "scores": scores},
            expected={"largest": largest, "total": total},
        )
        errors = {BoundsError: BY_ELEMENTS, WriteRace: ALL_WRITE, RaceError: MISSING_BARRIER}
        cost = check_launch(report, row_stats, launch, known=wrong, errors=errors)
        if n == 152:
            least = num_rows * n // 8
            check_budgets(
                report,
                cost,
                Budget("barriers per block", lambda c: c.counts.barriers // 3, 7, 1, MANY_BARRIERS),
                no_conflict(),
                sectors("scores", "read", most=least, least=least, suspect=FAR_APART),
            )
