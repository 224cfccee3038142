"""A chain of hashes: blocks as boxes, each pointing out of its parent, with all that its hash covers.

Requests with a common prefix share the boxes of that prefix. The first box that differs branches off, and
nothing after it is shared, even if its tokens are the same: the parent is part of the hash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from refengine.viz.picture import Picture
from refengine.viz.svg import (
    GREY,
    LARGE,
    PALE_BLUE,
    PALE_ORANGE,
    PALE_YELLOW,
    SHADE,
    SMALL,
    Canvas,
    text_width,
)

WIDTH, MARGIN, GAP = 800, 20, 26
BOX_HEIGHT, ROW = 84, 106
MAX_BOX, MIN_BOX, START = 150.0, 74.0, 58
DIGEST_CHARS = 6


@dataclass(frozen=True)
class HashedBlock:
    """What identifies a block: its tokens, its extra keys, and the digest over both and the parent's digest."""

    tokens: Sequence[Any]
    digest: str  # shown by its first characters
    extra_keys: Sequence[Any] = ()

    @property
    def short(self) -> str:
        return self.digest[:DIGEST_CHARS]


def hashed_blocks(
    token_ids: Sequence[Any],
    digests: Sequence[bytes | str],
    block_size: int,
    extra_keys: Sequence[Sequence[Any] | None] = (),
) -> list[HashedBlock]:
    """The full blocks of a request from its tokens and hashes. `extra_keys`: per block, as `extra_keys()` gives."""
    keys = [*extra_keys, *[None] * len(digests)]
    return [
        HashedBlock(
            token_ids[i * block_size : (i + 1) * block_size],
            digest.hex() if isinstance(digest, bytes) else digest,
            keys[i] or (),
        )
        for i, digest in enumerate(digests)
    ]


def chain_picture(
    chains: Mapping[str, Sequence[HashedBlock]], *, title: str = "A chain of hashes"
) -> Picture:
    """One line per request; a block that an earlier line has at the same place is drawn once, there.

    Raises: ValueError if a chain is too long to be legible (more than seven blocks).
    """
    deepest = max(map(len, chains.values()))
    width = min(MAX_BOX, (WIDTH - 2 * MARGIN - START - GAP * deepest) / deepest)
    if width < MIN_BOX:
        raise ValueError(f"a chain of {deepest} blocks is too long for one line; show its first blocks")
    canvas = Canvas(WIDTH)
    canvas.text(MARGIN, 28, title, size=LARGE, bold=True)
    canvas.rect(MARGIN, 62, START, BOX_HEIGHT, fill=SHADE)
    canvas.text(MARGIN + START / 2, 100, "start", size=SMALL, anchor="middle")
    canvas.text(MARGIN + START / 2, 114, "value", size=SMALL, anchor="middle")
    drawn: dict[tuple[int, str], tuple[int, list[str]]] = {}  # (place, digest) -> line, requests
    for name, blocks in chains.items():
        _draw_chain(canvas, name, blocks, width, drawn)
    for (place, _), (line, names) in drawn.items():
        x, y = _corner(place, line, width)
        canvas.text(
            x + width / 2, y - 6, " + ".join(names), size=SMALL, fill=GREY, anchor="middle", width=width
        )
    return Picture.of(canvas, _words(chains, title))


def _corner(place: int, line: int, width: float) -> tuple[float, float]:
    return MARGIN + START + GAP + place * (width + GAP), 62 + line * ROW


def _draw_chain(
    canvas: Canvas,
    name: str,
    blocks: Sequence[HashedBlock],
    width: float,
    drawn: dict[tuple[int, str], tuple[int, list[str]]],
) -> None:
    """The boxes of a request that no line above has. Mutates: `drawn`."""
    line = max((line for line, _ in drawn.values()), default=-1) + 1
    parent = 0  # the line of the box before, or of the start value
    for place, block in enumerate(blocks):
        key = (place, block.digest)
        if key in drawn:
            drawn[key][1].append(name)
            parent = drawn[key][0]
            continue
        drawn[key] = (line, [name])
        x, y = _corner(place, line, width)
        _draw_box(canvas, x, y, width, place, block)
        _draw_arrow(canvas, x, y, parent, line)
        parent = line


def _draw_arrow(canvas: Canvas, x: float, y: float, parent: int, line: int) -> None:
    """From the right edge of the parent to the left edge of this box, down through the gap if need be."""
    middle = y + BOX_HEIGHT / 2
    if parent == line:
        canvas.line([(x - GAP + 1, middle), (x - 2, middle)], arrow=True)
        return
    above = 62 + parent * ROW + BOX_HEIGHT / 2
    bend = x - GAP / 2
    canvas.line([(x - GAP + 1, above), (bend, above), (bend, middle), (x - 2, middle)], arrow=True)


def _draw_box(canvas: Canvas, x: float, y: float, width: float, place: int, block: HashedBlock) -> None:
    """Three bands: what block it is, what goes into the hash (tokens, extra keys), and the hash."""
    canvas.rect(x, y, width, BOX_HEIGHT, fill=PALE_BLUE)
    middle = x + width / 2
    canvas.text(middle, y + 15, f"block {place}", size=SMALL, bold=True, anchor="middle")
    tokens = " ".join(map(str, block.tokens))
    canvas.text(middle, y + 31, tokens, size=SMALL, anchor="middle", width=width - 8)
    if block.extra_keys:
        canvas.rect(x + 4, y + 36, width - 8, 18, fill=PALE_ORANGE, dash="3 2")
        canvas.text(middle, y + 49, _keys(block), size=SMALL, anchor="middle", width=width - 14)
    canvas.rect(x, y + 60, width, BOX_HEIGHT - 60, fill=PALE_YELLOW)
    digest = f"hash {block.short}…"
    if text_width(digest, SMALL, True) > width - 6:
        digest = f"{block.short}…"
    canvas.text(middle, y + 76, digest, size=SMALL, bold=True, anchor="middle")


def _keys(block: HashedBlock) -> str:
    """Extra keys in short: `cache_salt acme`; of nested keys the tag and the first value."""
    return ", ".join(
        " ".join(map(str, key[:2])) if isinstance(key, tuple | list) else str(key) for key in block.extra_keys
    )


def _words(chains: Mapping[str, Sequence[HashedBlock]], title: str) -> str:
    """The chains in words, shared blocks named as such."""
    lines = [f"{title}: {len(chains)} request{'' if len(chains) == 1 else 's'}."]
    seen: dict[tuple[int, str], str] = {}
    for name, blocks in chains.items():
        for place, block in enumerate(blocks):
            first = seen.setdefault((place, block.digest), name)
            parent = f"the hash of block {place - 1}" if place else "the start value"
            keys = f" and the extra keys {_keys(block)}" if block.extra_keys else ""
            shared = f"; the same block as in {first}" if first != name else ""
            tokens = " ".join(map(str, block.tokens))
            lines.append(
                f"{name}, block {place}: hash {block.short} over {parent}, tokens {tokens}{keys}{shared}."
            )
    return "\n".join(lines)
