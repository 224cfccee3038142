"""Checks of exercise 11 outside of kernels: counts, the merge, the shares of the keys, the map, the limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from exercises.grader import Report
from exercises.tasks.ex08_wrong import Suspect, compare

# -- 11.1 ------------------------------------------------------------------------------------------------------


def check_count(
    blocks: int,
    splits: int,
    num_bytes: int,
    floor_us: int,
    waiting: int,
    empty: Sequence[int],
    report: Report,
) -> None:
    with report.case("blocks of threads without splitting"):
        query_heads = (32, "a block for each query head", "A block serves a KV head with its whole group.")
        one = (1, "a block for each sequence", "Each KV head has its own blocks.")
        report.equal(8, blocks, "blocks", known=(query_heads, one))
    with report.case("splits that run at once"):
        more = (50, "rounded up", "50 splits are 400 blocks, and 4 of them wait for a second round.")
        alone = (16, "one block at a time on a processor", "A processor has room for 3 blocks.")
        report.equal(49, splits, "splits", known=(more, alone))
    with report.case("bytes"):
        right = 134_217_728
        known = (
            (4 * right, "counted with query heads", "A KV head is read once for its group."),
            (right // 2, "values are left out", "The keys are half of it."),
        )
        report.equal(right, num_bytes, "num_bytes", known=known)
    with report.case("the shortest time"):
        report.equal(27, floor_us, "floor_us", known=((28, "rounded up", "27.96 rounded down is 27."),))
    with report.case("bytes that are waited for"):
        whole = (3_840_000, "of the whole GPU", "132 processors share it.")
        place = (9_696, "for each place", "132 processors share it; places do not count here.")
        up = (29_091, "rounded up", "29,090.9 rounded down is 29,090.")
        report.equal(29_090, waiting, "waiting", known=(whole, place, up))
    with report.case("empty places"):
        per_processor = ([124, 68, 0, 0], "one block at a time on a processor", "There are 3 * 132 places.")
        per_sequence = ([395, 388, 347, 332], "a block for each sequence", "Each sequence has 8 KV heads.")
        below = ([388, 332, 4, -116], "fewer than no place", "512 blocks fill all places, and 116 wait.")
        report.equal([388, 332, 4, 0], empty, "empty", known=(per_processor, per_sequence, below))


# -- 11.2 ------------------------------------------------------------------------------------------------------

MEAN: Suspect = (
    "parts are averaged",
    "A part counts as much as the sum of its exponentials is of the whole.",
)
BY_LOG: Suspect = (
    "weighted by the log sums",
    "The weight is the sum itself: its logarithm has to be undone by exp.",
)
OVERFLOWS: Suspect = (
    "the exponential overflows",
    "exp of 1000 is infinite, and of -1000 zero. Subtract the largest log sum first.",
)
READS_EMPTY: Suspect = (
    "an empty part's results are used",
    "Its weight is 0, and 0 times NaN is NaN. Leave the part out, do not multiply it away.",
)
INF_INF: Suspect = (
    "minus infinity minus minus infinity",
    "If all parts are empty, so is the largest, and -inf - -inf is no number.",
)
LARGEST: Suspect = (
    "the largest is taken for the log sum",
    "log(a + b) is more than the larger of the two logs.",
)
NO_TOP: Suspect = ("the largest is not added back", "It was subtracted before the exponentials.")


def check_merge(merge: Callable[[Tensor, Tensor], Any], report: Report) -> None:
    shift = torch.tensor([[0.0], [3.0], [-2.0]])
    for title, scores in (
        ("three parts and two heads", shift),
        ("log sums near 1000", shift + 1000),
        ("log sums near -1000", shift - 1000),
    ):
        with report.case(title):
            _merges(merge, *_parts(3, shift=scores), report)
    for title, gone in (("the last part is empty", 2), ("the first part is empty", 0)):
        with report.case(title):
            results, log_sums = _parts(3, shift=shift)
            results[gone], log_sums[gone] = torch.nan, -torch.inf
            _merges(merge, results, log_sums, report)
    with report.case("a head without any key beside one with keys"):
        results, log_sums = _parts(2)
        results[:, 0], log_sums[:, 0] = torch.nan, -torch.inf
        _merges(merge, results, log_sums, report)
    with report.case("what was merged can be merged again"):
        results, log_sums = _parts(4, shift=torch.tensor([[0.0], [5.0], [1.0], [2.0]]))
        pairs = [merge(results[half].clone(), log_sums[half].clone()) for half in (slice(0, 2), slice(2, 4))]
        again = merge(torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs]))
        compare(report, merged(results, log_sums)[0], again[0], "two by two and then all")


def _parts(num_parts: int, num_heads: int = 2, head_dim: int = 5, shift: Any = 0.0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(num_parts)
    results = torch.randn(num_parts, num_heads, head_dim, generator=random)
    return results, torch.randn(num_parts, num_heads, generator=random) + shift


def merged(results: Tensor, log_sums: Tensor) -> tuple[Tensor, Tensor]:
    """The right merge along the first dimension, in float64."""
    log_sums = log_sums.double()
    whole = torch.logsumexp(log_sums, 0)
    weights = (log_sums - torch.where(whole == -torch.inf, 0.0, whole)).exp()
    return torch.where((weights > 0)[..., None], weights[..., None] * results.double(), 0.0).sum(0), whole


def wrongly_merged(results: Tensor, log_sums: Tensor) -> dict[Suspect, Tensor]:
    """What wrong ideas make of the results, in float32 where that is what goes wrong."""
    single, top = log_sums.float(), log_sums.amax(0)

    def mix(weights: Tensor) -> Tensor:
        return ((weights[..., None] * results).sum(0) / weights.sum(0)[..., None]).double()

    shifted = (single - top).exp()
    skipped = torch.where((shifted > 0)[..., None], shifted[..., None] * results, 0.0)
    return {
        READS_EMPTY: mix(shifted),
        MEAN: results.double().mean(0),
        BY_LOG: mix(log_sums),
        OVERFLOWS: mix(single.exp()),
        INF_INF: (skipped.sum(0) / shifted.sum(0)[..., None]).double(),
    }


def _merges(
    merge: Callable[[Tensor, Tensor], Any], results: Tensor, log_sums: Tensor, report: Report
) -> None:
    """One call, both of its results."""
    answer = merge(results.clone(), log_sums.clone())
    report.true(isinstance(answer, (tuple, list)) and len(answer) == 2, "It should return two tensors.")
    expected, whole = merged(results, log_sums)
    wrong = wrongly_merged(results, log_sums)
    if bool((log_sums == -torch.inf).all(0).any()):
        wrong = {INF_INF: wrong[INF_INF], **wrong}
    compare(report, expected, answer[0], "the results", wrong)
    top = log_sums.amax(0)
    compare(report, whole, answer[1], "the log sum", {LARGEST: top, NO_TOP: whole - top})


# -- 11.3 ------------------------------------------------------------------------------------------------------

Cut = tuple[int, int, int, int]  # seq_len, num_splits, step, window
CUTS: tuple[Cut, ...] = (
    (256, 4, 32, 10**6),
    (1100, 4, 32, 10**6),
    (1130, 8, 32, 10**6),
    (100, 8, 32, 10**6),
    (1, 3, 32, 10**6),
    (1100, 4, 32, 310),
    (77, 5, 8, 10**6),
)


def check_shares(shares: Callable[..., Any], report: Report) -> None:
    answers = {cut: _pairs(shares(*cut)) for cut in CUTS}
    if all(answers[cut] == _as_given(*cut) for cut in CUTS):
        report.as_given()
    for cut in CUTS:
        seq_len, num_splits, step, window = cut
        visible = min(seq_len, window)
        seen = f", the last {visible} visible" if window < seq_len else ""
        with report.case(f"{seq_len} tokens{seen} in {num_splits} splits, steps of {step}"):
            pairs = answers[cut]
            report.true(
                pairs is not None,
                "It should return two whole numbers for each split: where its keys begin, and how many.",
            )
            _judge(pairs or [], seq_len, num_splits, step, visible, report)


def _pairs(answer: Any) -> list[tuple[int, int]] | None:
    """What a learner returned as a list of pairs; None if it is something else."""
    found = list(answer) if isinstance(answer, Iterable) else [answer]
    try:
        return [(int(first), int(count)) for first, count in found]
    except (TypeError, ValueError):
        return None


def _as_given(seq_len: int, num_splits: int, step: int, window: int) -> list[tuple[int, int]]:
    visible = min(seq_len, window)
    size = visible // (num_splits * step) * step
    begins = [split * size for split in range(num_splits)]
    return [(seq_len - visible + begin, max(0, min(size, visible - begin))) for begin in begins]


def _judge(
    pairs: Sequence[tuple[int, int]], seq_len: int, num_splits: int, step: int, visible: int, report: Report
) -> None:
    if len(pairs) < num_splits:
        report.misconception("splits without keys are left out", "They exist, and their number of keys is 0.")
    report.equal(num_splits, len(pairs), "number of splits")
    if any(count < 0 for _, count in pairs):
        report.misconception("a number of keys below zero", "A split behind the end has 0 keys.")
    report.true(all(count >= 0 for _, count in pairs), f"The numbers of keys are {[n for _, n in pairs]}.")
    keys = sorted(position for first, count in pairs for position in range(first, first + count))
    if keys and keys[0] < seq_len - visible:
        report.misconception("the window is forgotten", "The first visible key is at seq_len - visible.")
    elif keys and keys[-1] >= seq_len:
        report.misconception("reading past the sequence", "The last split ends where the sequence ends.")
    elif len(set(keys)) < visible:
        report.misconception("the rest of a division is lost", "Round up, or the last keys belong to nobody.")
    report.equal(seq_len - visible, keys[0] if keys else None, "the first key that is read")
    report.equal(visible, len(set(keys)), "keys that some split reads")
    report.equal(visible, len(keys), "keys that are read, over all splits")
    begins = {(first - seq_len + visible) % step for first, count in pairs if count}
    if begins != {0}:
        report.misconception("a split begins within a round", "Sizes are whole rounds of `step` keys.")
    report.true(begins == {0}, f"Splits should begin at multiples of {step} keys; got {list(pairs)}.")
    shortest = math.ceil(math.ceil(visible / step) / num_splits) * step
    longest = max(count for _, count in pairs)
    if pairs[-1][1] == longest > shortest:
        report.misconception(
            "one split takes the rest", "All others wait for the longest. Round the size up instead."
        )
    elif longest > shortest:
        report.misconception(
            "more rounds than needed",
            "Round up, and not beyond: a division without rest needs nothing added.",
        )
    report.true(longest <= shortest, f"The longest split has {longest} keys, and {shortest} are enough.")


# -- 11.6 ------------------------------------------------------------------------------------------------------


def check_map(
    splits_in_v0: str, decides: str, merges: str, chunks: str, takes: Sequence[str], report: Report
) -> None:
    first = (
        "paged_attention_v1",
        "v1 splits",
        "In V0 v1 is the kernel with one block per sequence and head.",
    )
    forward = (
        "FlashAttentionImpl.forward",
        "the caller of the kernels",
        "Look for the function that merges.",
    )
    segments = (
        "reduce_segments",
        "the merge of segments",
        "It gets maxima and sums of many parts, no log sums.",
    )
    prefix = (
        "PagedAttention.forward_prefix",
        "the method that calls it",
        "It hands on to a function of a module.",
    )
    ours = tuple(
        (name, "a kernel of ours", "The column of vLLM is asked for.")
        for name in ("decode_split_kernel", "merge_kernel", "prefill_kernel")
    )
    questions = (
        ("splits_in_v0", "paged_attention_v2", splits_in_v0, (first, *ours)),
        ("decides", "PagedAttention.forward_decode", decides, ours),
        ("merges", "merge_attn_states", merges, (forward, segments, *ours)),
        ("chunks", "context_attention_fwd", chunks, (prefix, *ours)),
    )
    for name, right, got, known in questions:
        with report.case(name):
            report.equal(right, got, name, known=known)
    with report.case("which kernel V0 takes"):
        engines = (["v2", "v1", "v2", "v1"], "v1 and v2 exchanged", "v2 is the one that splits.")
        batch = (
            ["v1", "v2", "v2", "v2"],
            "long sequences always split",
            "32 sequences of 32 heads are 1024 blocks, and more blocks are not needed.",
        )
        memory = (
            ["v1", "v2", "v1", "v1"],
            "a large batch never splits",
            "Above 8192 tokens v1 runs short of shared memory.",
        )
        report.equal(["v1", "v2", "v1", "v2"], takes, "takes", known=(engines, batch, memory))


# -- 11.7 ------------------------------------------------------------------------------------------------------


def check_limit(limit: Callable[..., Any], per_byte: Sequence[float], queries: int, report: Report) -> None:
    for operations, num_bytes, seconds, waits_for in (
        (100.0, 1000.0, 10.0, "memory"),
        (9000.0, 1000.0, 90.0, "arithmetic"),
        (1000.0, 1000.0, 10.0, "arithmetic"),
    ):
        with report.case(f"{operations:g} operations, {num_bytes:g} bytes, 100 of each a second"):
            answer = limit(operations, num_bytes, 100.0, 100.0)
            report.true(
                isinstance(answer, (tuple, list)) and len(answer) == 2, "It should return two things."
            )
            report.true(
                not isinstance(answer[0], str),
                "It should return the seconds first, then what the work waits for.",
            )
            both = operations / 100 + num_bytes / 100
            added = (both, "both times are added", "A device reads while it computes.")
            shorter = (
                min(operations, num_bytes) / 100,
                "the shorter time",
                "Whatever takes longer is the limit.",
            )
            report.equal(seconds, float(answer[0]), "seconds", known=(added, shorter))
            report.equal(waits_for, answer[1], "waits for")
    with report.case("operations per byte"):
        group = ([2.0, 16.0], "one operation per number", "A multiplication and an addition are two.")
        number = ([8.0, 64.0], "per number, not per byte", "A number has two bytes.")
        report.equal([4.0, 32.0], [float(x) for x in per_byte], "per_byte", known=(group, number))
    with report.case("queries that share a reading"):
        ridge = (14, "the group is forgotten", "Each query of a chunk stands for 4 query heads of the group.")
        low = (3, "rounded down", "With 3 it is still memory.")
        report.equal(4, queries, "queries", known=(ridge, low))
