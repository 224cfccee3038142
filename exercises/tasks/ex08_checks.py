"""How the answers to exercise 08 are judged: by their values against float64, on fresh pages with NaN around them.

Task 08.4 has a module of its own, `ex08_paged`; wrong ideas that can be told from their numbers are in `ex08_wrong`.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from exercises.grader import Report
from exercises.grader.values import difference
from exercises.tasks.ex08_scene import SMALL, Pages, draw, exactly, in_chunks, make_pages, qkv
from exercises.tasks.ex08_wrong import (
    LEFT,
    MASKS,
    NO_MASK,
    PAST_END,
    SQUARE,
    TOO_FEW,
    UNSAFE,
    Mask,
    compare,
    left_aligned,
    one_sequence,
    same_bits,
    seen,
    variant,
)
from refengine.trace.codemap import topic

# -- 08.1 ---------------------------------------------------------------------------------------------------


def check_small(visible: list[int], slots_of_b: list[int], out_shape: list[int], report: Report) -> None:
    right = [total - new + i + 1 for new, total, _ in SMALL.values() for i in range(new)]
    with report.case("the keys that each query sees"):
        left = [i + 1 for new, _, _ in SMALL.values() for i in range(new)]
        every = [total for new, total, _ in SMALL.values() for _ in range(new)]
        before = [count - 1 for count in right]
        known = ((left, *LEFT), (every, *NO_MASK), (before, *TOO_FEW))
        report.equal(right, list(visible), "visible", known=known)
    with report.case("the slots that b reads"):
        _, total, table = SMALL["b"]
        slots = [table[position // 4] * 4 + position % 4 for position in range(total)]
        whole = [block * 4 + offset for block in table for offset in range(4)]
        others = ((slots[-1:], "a decode reads one slot", "It writes one and reads all."), (whole, *PAST_END))
        report.equal(slots, list(slots_of_b), "slots_of_b", known=others)
    with report.case("the shape of the result"):
        fewer = (
            [8, 2, 16],
            "a result per KV head",
            "KV heads are shared; each query head has its own result.",
        )
        report.equal([8, 6, 16], list(out_shape), "out_shape", known=(fewer,))


# -- 08.2 ---------------------------------------------------------------------------------------------------

# what, (queries, all tokens, heads, KV heads, head_dim)
SEQUENCES = {
    "a prompt": (7, 7, 4, 2, 8),
    "a decode": (1, 9, 4, 2, 8),
    "a chunk behind a cache": (4, 9, 4, 2, 8),
    "a head of its own for each": (3, 11, 3, 3, 5),
    "one KV head for all": (5, 6, 4, 1, 7),
    "groups of four": (2, 13, 8, 2, 16),
}


def check_attend(attend: Any, report: Report) -> None:
    for what, (new, total, heads, kv_heads, head_dim) in SEQUENCES.items():
        with report.case(what):
            query, keys, values = qkv(total, heads, kv_heads, head_dim, seed=total)
            query, scale, start = query[total - new :], 1.7 * head_dim**-0.5, total - new
            suspects = one_sequence(query, keys, values, scale)
            got = _tried(attend, report, query, keys, values, start, scale)
            compare(report, exactly(query, keys, values, scale), got, "the result", suspects)
    with report.case("twelve tokens: at once, as 5 + 4 + 3, one by one"):
        query, keys, values = qkv(12, seed=3)
        for sizes in ([12], [5, 4, 3], [1] * 12):
            got = in_chunks(attend, sizes, query.clone(), keys.clone(), values.clone(), 0.4)
            compare(report, exactly(query, keys, values, 0.4), got, f"in pieces of {sizes}")
    with report.case("scores of 10,000"):
        query, keys, values = qkv(9, seed=4)
        got = attend(query[3:].clone(), keys.clone(), values.clone(), 3, 4000.0)
        if isinstance(got, Tensor) and bool(got.isnan().any()):
            report.misconception(*UNSAFE)
        compare(report, exactly(query[3:], keys, values, 4000.0), got, "the result")
    with report.case("what it was given stays as it is"):
        given = qkv(6, seed=5)
        kept = [x.clone() for x in given]
        attend(given[0][2:], given[1], given[2], 2, 0.4)
        report.true(all(map(torch.equal, given, kept)), "It changes its query, keys or values.")


def _tried(attend: Any, report: Report, *arguments: Any) -> Any:
    """The result. Shapes that fit without a cache only come from a square mask."""
    query, keys, values, start, scale = arguments
    try:
        return attend(query.clone(), keys.clone(), values.clone(), start, scale)
    except (RuntimeError, IndexError) as error:
        if start and {len(query), len(keys)} <= {int(size) for size in re.findall(r"\d+", str(error))}:
            report.misconception(*SQUARE)
        raise


# -- 08.3 ---------------------------------------------------------------------------------------------------

# (block size, tokens)
GATHERS = ((4, 11), (4, 12), (4, 13), (4, 2), (3, 10), (16, 40), (1, 5), (5, 5))
NO_TABLE = ("a position is a slot", "The block table says in which block a position lies.")
OTHER_SIZE = (
    "an offset from another block size",
    "The block size is that of this cache: its second dimension. A manager may count in larger blocks.",
)
TAIL = (
    "the last block is left out",
    "The last block of a sequence may hold a few tokens only, and they count.",
)


def check_gather(gather: Any, report: Report) -> None:
    for block_size, total in GATHERS:
        with report.case(f"{total} tokens in blocks of {block_size}"):
            pages = make_pages([(1, 6), (1, total)], block_size, seed=total)
            table, keys = pages.block_tables[1], pages.keys[1]
            try:
                got = gather(pages.key_cache.clone(), table.clone(), total)
            except IndexError:
                report.misconception(*OTHER_SIZE)
                raise
            report.true(isinstance(got, Tensor), "It should return a tensor.")
            _name_rows(report, got, pages, table, total)
            report.equal(list(keys.shape), list(got.shape), "shape")
            report.close(keys, got, "rows")
    with report.case("values, and a table of 32-bit numbers"):
        pages = make_pages([(1, 7)], 4, num_kv_heads=1, num_heads=1, head_dim=3)
        got = gather(pages.value_cache, pages.block_tables[0].int(), int(pages.seq_lens[0]))
        report.close(pages.values[0], got, "rows")


def _name_rows(report: Report, got: Tensor, pages: Pages, table: Tensor, total: int) -> None:
    cache, size = pages.key_cache, pages.key_cache.shape[1]
    if len(got) > total:
        report.misconception(*PAST_END)
    elif len(got) == total // size * size != total:
        report.misconception(*TAIL)
    elif same_bits(got, cache.flatten(0, 1)[:total]):
        report.misconception(*NO_TABLE)
    elif not same_bits(got, pages.keys[1]):
        rows = {int(row) for row in torch.arange(total) if not same_bits(got[row], pages.keys[1][row])}
        if rows and min(rows) >= min(size, 4):
            report.misconception(*OTHER_SIZE)


# -- 08.5 ---------------------------------------------------------------------------------------------------


FEEDS = {
    "all at once": [12],
    "one by one": [1] * 12,
    "chunks of 5, 4 and 3": [5, 4, 3],
    "a prompt, then single tokens, then a chunk": [6, 1, 1, 4],
    "a chunk as long as the cache": [6, 6],
}


def check_cached(cached_class: Any, report: Report) -> None:
    results = {what: _fed(cached_class(), sizes) for what, sizes in FEEDS.items()}
    given = {what: _masked(sizes, _as_given) for what, sizes in FEEDS.items()}
    if not any(difference(given[what].to(got.dtype), got) for what, got in results.items()):
        report.as_given()
    for what, sizes in FEEDS.items():
        with report.case(what):
            suspects = {known: _masked(sizes, mask) for known, mask in MASKS.items()}
            compare(report, _masked(sizes, seen), results[what], f"in pieces of {sizes}", suspects)
    with report.case("a second sequence begins empty"):
        for seed in (1, 2):
            got = _fed(cached_class(), [3, 2], seed)
            compare(report, exactly(*qkv(5, seed=seed), 0.4), got, "the result")


def _as_given(start: int, count: int) -> Tensor:
    return left_aligned(start, count) if count > 1 else seen(start, count)


def _masked(sizes: Sequence[int], mask: Mask) -> Tensor:
    """Twelve tokens in pieces under a mask, float64."""

    def attend(query: Tensor, keys: Tensor, values: Tensor, start: int, scale: float) -> Tensor:
        return variant(query, keys, values, scale, mask)

    return in_chunks(attend, sizes, *qkv(12, seed=len(sizes)), 0.4)


def _fed(cached: Any, sizes: Sequence[int], seed: int | None = None) -> Tensor:
    query, keys, values = qkv(sum(sizes), seed=len(sizes) if seed is None else seed)
    out, first = [], 0
    for size in sizes:
        piece = slice(first, first + size)
        out.append(cached(query[piece].clone(), keys[piece].clone(), values[piece].clone(), 0.4))
        first += size
    return torch.cat(out)


# -- 08.6 ---------------------------------------------------------------------------------------------------


def check_map(
    writes: dict[str, str], table_in_v0: str, chunk: dict[str, str], decode: dict[str, str], report: Report
) -> None:
    kernel = topic("kernel_per_phase")
    prefix, single = (place.symbol for place in kernel.v0.vllm)
    (both,) = (place.symbol for place in kernel.v1.vllm)
    with report.case("who writes"):
        right = {"V0": topic("kv_write").v0.vllm[0].symbol, "V1": topic("kv_write").v1.vllm[0].symbol}
        inside = (
            {**right, "V1": both},
            "attention writes its keys",
            "So it was until 0.14.1 of those looked at. In 0.33.0 writing is a call of its own, before attention.",
        )
        report.equal(right, dict(writes), "writes", known=(inside,))
    with report.case("who gives a prompt its table"):
        build, per_sequence = (place.symbol for place in topic("attention_metadata").v0.vllm)
        whole = (build, "the batch decides for one", "It looks over the step and asks the other, one by one.")
        report.equal(per_sequence, table_in_v0, "table_in_v0", known=(whole,))
    with report.case("a chunk"):
        as_decode = (
            {"V0": single, "V1": both},
            "a chunk is a decode",
            "V0's decode kernel takes one query token per sequence.",
        )
        report.equal({"V0": prefix, "V1": both}, dict(chunk), "chunk", known=(as_decode,))
    with report.case("a decode"):
        report.equal({"V0": single, "V1": both}, dict(decode), "decode")


# -- 08.7 ---------------------------------------------------------------------------------------------------

KEPT = (
    "the tiles are kept",
    "Keeping them all needs the room that a kernel does not have. A tile's scores are folded in, and it can go.",
)
NO_RESCALE = (
    "old sums are not rescaled",
    "They were taken under a smaller maximum. A larger one shrinks them: times exp(old - new).",
)
HALF_RESCALE = (
    "only the sum is rescaled",
    "The mixture of the values was taken under the same old maximum, and shrinks with it.",
)
MEAN = ("tiles are averaged", "A tile weighs as much as its exponentials, not as much as another tile.")
AT_ZERO = (
    "the maximum starts at 0",
    "If all scores are far below, every exponential is 0, and so is their sum. Begin with minus infinity.",
)
FALLING = (
    "the maximum falls",
    "A later tile may have a smaller one. The largest so far stays, or the old sums overflow when they grow back.",
)
ONE_TILE = ("only the last tile counts", "What the tiles before gave is carried along.")

# scores of each tile, as they come
TILES: dict[str, list[list[float]]] = {
    "one tile": [[0.3, -1.0, 2.0]],
    "the largest comes last": [[0.1, 0.2], [1.0, 0.4, 0.9], [3.0, 2.5]],
    "the largest comes first": [[3.0, 2.5], [1.0, 0.4, 0.9], [0.1]],
    "many tiles of one key": [[0.5 * i % 3] for i in range(11)],
    "scores around 10,000": [[9990.0, 10000.0], [9999.0], [9998.0, 10001.0, 9000.0]],
    "scores around -10,000": [[-10000.0, -10001.0], [-10002.0, -9999.0], [-10003.0]],
    "both ends": [[-10000.0, 10000.0, 3.0], [9999.5, 0.0], [-10000.0]],
    "from 10,000 down": [[10000.0, 9999.0], [-10000.0, -9999.0], [0.0]],
    "the first far below": [[-10000.0], [-9000.0], [0.0, 1.0]],
}


def check_online(online_attention: Any, report: Report) -> None:
    for number, (what, tiles) in enumerate(TILES.items()):
        with report.case(what):
            query, pairs = _with_scores(tiles, number)
            keys, values = (torch.cat(part) for part in zip(*pairs, strict=True))
            expected = (keys @ query * 0.25).softmax(0) @ values
            counter = _Counted(pairs)
            got = online_attention(query.clone(), iter(counter), 0.25)
            report.true(isinstance(got, Tensor), "It should return a tensor.")
            _name_online(report, got, what, query, pairs)
            compare(report, expected, got, "the result")
            if counter.most_alive > 2:
                report.misconception(*KEPT)
            report.true(
                counter.most_alive <= 2,
                f"{counter.most_alive} tiles were there at once; it may hold one or two.",
            )


def _with_scores(tiles: Sequence[Sequence[float]], seed: int) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """A query and tiles of keys with exactly these scores under the scale 0.25, float64; head_dim 6."""
    query = torch.zeros(6, dtype=torch.float64)
    query[0] = 4.0
    pairs = []
    for i, scores in enumerate(tiles):
        keys = draw(len(scores), 6, seed=100 * seed + i, dtype=torch.float64)
        keys[:, 0] = torch.tensor(scores, dtype=torch.float64)
        pairs.append((keys, draw(len(scores), 6, seed=100 * seed + i + 50, dtype=torch.float64)))
    return query, pairs


class _Counted:
    """Gives tiles once, as copies, and counts how many of those it has given are still held by somebody."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.pairs = pairs
        self.given: list[weakref.ref[Tensor]] = []
        self.most_alive = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for keys, values in self.pairs:
            copy = keys.clone()
            self.given.append(weakref.ref(copy))
            alive = sum(ref() is not None for ref in self.given)
            self.most_alive = max(self.most_alive, alive)
            yield copy, values.clone()
            del copy


def _name_online(
    report: Report, got: Tensor, what: str, query: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]
) -> None:
    scores = [keys @ query * 0.25 for keys, _ in pairs]
    values = [value for _, value in pairs]
    means = [s.softmax(0) @ v for s, v in zip(scores, values, strict=True)]
    suspects = {
        NO_RESCALE: _fold(scores, values, False, False),
        HALF_RESCALE: _fold(scores, values, True, False),
        MEAN: torch.stack(means).mean(0),
        ONE_TILE: means[-1],
    }
    right = torch.cat(scores).softmax(0) @ torch.cat(values)
    for known, value in suspects.items():
        if len(pairs) > 1 and difference(right, got) and not difference(value, got):
            report.misconception(*known)
            return
    if got.shape == right.shape and bool((got.isnan() | got.isinf()).any()):
        wrong = {"scores around -10,000": AT_ZERO, "from 10,000 down": FALLING, "both ends": FALLING}
        report.misconception(*wrong.get(what, UNSAFE))


def _fold(scores: Sequence[Tensor], values: Sequence[Tensor], sums: bool, mixture: bool) -> Tensor:
    """The online softmax, with the rescaling of the sum and of the mixture on or off."""
    largest, total, mixed = torch.tensor(-torch.inf), torch.tensor(0.0), torch.zeros_like(values[0][0])
    for s, v in zip(scores, values, strict=True):
        above = torch.maximum(largest, s.max())
        shrink, weights = (largest - above).exp(), (s - above).exp()
        total = total * (shrink if sums else 1) + weights.sum()
        mixed = mixed * (shrink if mixture else 1) + weights @ v
        largest = above
    return mixed / total


# -- 08.8 ---------------------------------------------------------------------------------------------------

# (seq_lens, KV heads, head_dim, itemsize)
READS = (([1], 1, 1, 1), ([100, 57], 2, 64, 4), ([2000] * 16, 8, 128, 2), ([7, 0, 33], 3, 80, 2))


def check_bytes(read_bytes: Any, step_bytes: int, times_moved: int, report: Report) -> None:
    for seq_lens, kv_heads, head_dim, itemsize in READS:
        right = 2 * sum(seq_lens) * kv_heads * head_dim * itemsize
        shown = seq_lens if len(seq_lens) < 9 else f"{len(seq_lens)} times {seq_lens[0]}"
        with report.case(f"lengths {shown}, {kv_heads} x {head_dim} numbers of {itemsize} bytes"):
            longest = 2 * max(seq_lens) * len(seq_lens) * kv_heads * head_dim * itemsize
            known = (
                (right // 2, "values are left out", "Attention reads a key and a value of every token."),
                (
                    longest,
                    "everybody is as long as the longest",
                    "Nothing has to be read past a sequence's end.",
                ),
                (
                    2 * len(seq_lens) * kv_heads * head_dim * itemsize,
                    "one token is read",
                    "A cache spares computing keys, not reading them: attention of one token still goes over all.",
                ),
            )
            report.equal(
                right, read_bytes(list(seq_lens), kv_heads, head_dim, itemsize), "bytes", known=known
            )
    with report.case("the whole step"):
        layer = 2 * sum([2000] * 16) * 8 * 128 * 2
        query_heads = (
            32 * 4 * layer,
            "counted with query heads",
            "The cache holds KV heads; four queries share one.",
        )
        one_layer = (layer, "one layer", "Each of the 32 layers has keys and values of its own.")
        report.equal(32 * layer, step_bytes, "step_bytes", known=(query_heads, one_layer))
    with report.case("what gathering costs"):
        copies = (
            (1, "a copy is free", "What is gathered is read, written, and read again by attention."),
            (2, "the copy is not read", "What is gathered is read, written, and read again by attention."),
        )
        report.equal(3, times_moved, "times_moved", known=copies)
