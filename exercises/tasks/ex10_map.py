"""How the last two tasks of exercise 10 are judged: the map against the code map, the sectors against the count."""

from __future__ import annotations

from typing import Any

import torch

from exercises.grader import Report
from exercises.tasks.ex10_layouts import WAYS, count
from refengine.trace.codemap import topic


def check_map(
    decodes: dict[str, str], splits_keys: str, tokens_first: str, chooses_size: str, report: Report
) -> None:
    split, shape = (place.symbol for place in topic("cache_layout").v0.vllm)
    (v0,), (v1,) = (side.vllm for side in (topic("decode_kernel").v0, topic("decode_kernel").v1))
    with report.case("a decode"):
        right = {"V0": v0.symbol, "V1": v1.symbol}
        writes = topic("cache_layout").v1.vllm[0].symbol
        writing = (
            {**right, "V1": writes},
            "writing taken for reading",
            "It puts new keys and values into their slots.",
        )
        report.equal(right, dict(decodes), "decodes", known=(writing,))
    swapped = (
        "the two layouts exchanged",
        "FlashAttention's backend keeps a row in one piece; the others split keys.",
    )
    with report.case("pieces of 16 bytes"):
        report.equal(split, splits_keys, "splits_keys", known=((shape, *swapped),))
    with report.case("tokens first"):
        report.equal(shape, tokens_first, "tokens_first", known=((split, *swapped),))
    with report.case("the size of a kernel's block"):
        choose, views = (place.symbol for place in topic("kernel_blocks").v1.vllm)
        made = (
            views,
            "the view taken for the choice",
            "It gives each cache a view in blocks whose size is known.",
        )
        report.equal(choose, chooses_size, "chooses_size", known=(made,))


# (tokens, head_dim, itemsize)
LEAST = ((32, 128, 2), (32, 64, 4), (1, 16, 2), (100, 256, 4), (7, 80, 2))


def check_sectors(least_sectors: Any, best: list[str], worst_times: int, report: Report) -> None:
    for tokens, head_dim, itemsize in LEAST:
        with report.case(f"{tokens} tokens of {head_dim} numbers of {itemsize} bytes"):
            right = tokens * head_dim * itemsize // 32
            numbers = (
                tokens * head_dim,
                "a sector per number",
                "A sector holds 32 bytes, thus several numbers.",
            )
            size = (
                tokens * head_dim // 32,
                "a sector of 32 numbers",
                "A sector has 32 bytes, whatever a number has.",
            )
            report.equal(right, least_sectors(tokens, head_dim, itemsize), "sectors", known=(numbers, size))
    counted = {way: count(way, 128, torch.float16)[1] for way in WAYS}
    least = min(counted.values())
    with report.case("the best ways"):
        reached = [way for way, used in counted.items() if used == least]
        layout = (
            ["d", "e"],
            "the layout alone",
            "A thread that takes 2 bytes of 16 fetches the rest for nothing.",
        )
        wide = (["b", "c", "e"], "wide loads alone", "A thread's 16 bytes fill half a sector of its own row.")
        one = (
            ["e"],
            "V0's layout alone",
            "Way c fills its sectors, too: 16 neighbouring lanes read one row.",
        )
        report.equal(reached, list(best), "best", known=(layout, wide, one))
    with report.case("the worst way"):
        requests = (
            128 // 16,
            "requests instead of sectors",
            "It asks eight times as often, and each time fetches twice as many sectors.",
        )
        whole = (max(counted.values()), "sectors instead of times", "Divide them by the least.")
        report.equal(max(counted.values()) // least, worst_times, "worst_times", known=(requests, whole))
