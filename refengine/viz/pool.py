"""The block pool as a picture: one cell per block, the free queue in order, block tables over it.

`pool_picture` shows one moment, `pool_pair` two. Either is drawn from `PoolState`s and says everything it shows
in its alternative text too. The signs are explained in `refengine.viz.pool_parts`.
"""

from __future__ import annotations

from refengine.viz.picture import Picture
from refengine.viz.pool_parts import KEY_HEIGHT, Area, draw_cells, draw_key, draw_queue, draw_tables
from refengine.viz.state import BlockFacts, PoolState, ordinal, ranges
from refengine.viz.svg import BOTTOM, LARGE, Canvas

WIDTH, MARGIN, MIDDLE = 800, 20, 44
MAX_SIDE_BY_SIDE = 16  # blocks; of a larger pool, two moments stand above each other
MAX_ONE_BY_ONE = 12  # blocks; of a larger pool, the words put blocks with the same facts together


def pool_picture(
    state: PoolState,
    *,
    title: str | None = None,
    before: PoolState | None = None,
    queue: bool = True,
    tables: bool = True,
    min_height: int = 0,
) -> Picture:
    """The pool at one moment. With `before`, blocks whose facts changed since then carry a ring.

    `queue`, `tables`: whether to show them. `min_height` in px: pictures of a series can be equally high, so that
    nothing jumps when one takes the place of another.
    """
    canvas = Canvas(WIDTH)
    area = Area(canvas, MARGIN, WIDTH - 2 * MARGIN)
    name = _title(state) if title is None else title
    _draw(area, 0, state, name, show=(queue, tables), before=before)
    canvas.height = max(canvas.height, min_height - KEY_HEIGHT - BOTTOM)
    draw_key(canvas, MARGIN, "" if before is None else _changed(before, state))
    return Picture.of(canvas, _words(state, name, before))


def pool_pair(
    before: PoolState,
    after: PoolState,
    *,
    titles: tuple[str, str] | None = None,
    queue: bool = True,
    tables: bool = True,
) -> Picture:
    """Two moments beside each other (large pools: above each other).

    In the first a ring marks what is about to leave the free queue, in the second whatever changed.
    """
    names = titles or (_title(before), _title(after))
    canvas, show = Canvas(WIDTH), (queue, tables)
    if len(after.block_ids) <= MAX_SIDE_BY_SIDE:
        half = (WIDTH - 2 * MARGIN - MIDDLE) / 2
        left, right = Area(canvas, MARGIN, half), Area(canvas, MARGIN + half + MIDDLE, half)
        _draw(left, 0, before, names[0], show=show, after=after)
        _draw(right, 0, after, names[1], show=show, before=before, beside=True)
        canvas.line([(WIDTH / 2 - 12, 75), (WIDTH / 2 + 12, 75)], thickness=2.5, arrow=True)
    else:
        area = Area(canvas, MARGIN, WIDTH - 2 * MARGIN)
        bottom = _draw(area, 0, before, names[0], show=show, after=after)
        canvas.line([(WIDTH / 2, bottom + 8), (WIDTH / 2, bottom + 32)], thickness=2.5, arrow=True)
        _draw(area, bottom + 24, after, names[1], show=show, before=before, beside=True)
    draw_key(canvas, MARGIN, _changed(before, after))
    return Picture.of(canvas, f"{_words(before, names[0], None)}\n{_words(after, names[1], before)}")


def changed_blocks(before: PoolState, after: PoolState) -> list[int]:
    """Blocks with another fact than before. A mere step forward in the queue is no change of the block."""

    def essence(state: PoolState, block_id: int) -> tuple[int, bool, bool]:
        facts = state.facts(block_id)
        return facts.used, facts.place is not None, facts.cached

    return [
        i for i in after.block_ids if i not in before.block_ids or essence(before, i) != essence(after, i)
    ]


def left_queue(before: PoolState, after: PoolState) -> list[tuple[int, int]]:
    """Blocks that were taken out of the free queue, each with the place that it had, 1 = next out."""
    return [(block_id, place) for place, block_id in enumerate(before.free, 1) if block_id not in after.free]


def joined_queue(before: PoolState, after: PoolState) -> list[tuple[int, int]]:
    """Blocks that came into the free queue, each with the place that it has, 1 = next out."""
    return left_queue(after, before)


def _changed(before: PoolState, after: PoolState) -> str:
    """What the key says beside the ring."""
    return "changed" if changed_blocks(before, after) else "changed: nothing"


def _title(state: PoolState) -> str:
    if state.mark is not None:
        return state.when.capitalize()
    return f"Block pool {state.when}".strip()


def _draw(
    area: Area,
    top: float,
    state: PoolState,
    title: str,
    *,
    show: tuple[bool, bool],
    before: PoolState | None = None,
    after: PoolState | None = None,
    beside: bool = False,
) -> float:
    """One moment in an area; `show`: queue, tables. Returns: the lower edge.

    Rings: with `before`, what is another than then; with `after`, what is about to leave the queue. `beside`:
    the moment before stands beside this one, and shows itself what left the queue.
    """
    area.canvas.text(area.x, top + 28, title, size=LARGE, bold=True, width=area.width)
    bottom = draw_cells(area, top + 46, state, changed_blocks(before, state) if before else [])
    queue, tables = show
    if queue:
        ringed = [i for i, _ in joined_queue(before, state)] if before else []
        ringed += [i for i, _ in left_queue(state, after)] if after else []
        gone = left_queue(before, state) if before and not beside else []
        bottom = draw_queue(area, bottom + 30, state, ringed, gone)
    if tables and state.tables:
        bottom = draw_tables(area, bottom + 30, state)
    return bottom


# -- in words -----------------------------------------------------------------------------------------------


def _words(state: PoolState, title: str, before: PoolState | None) -> str:
    """The picture in words: every block, the queue, the tables, and what changed."""
    cached = len(state.cached)
    lines = [f"{title}: {len(state.block_ids)} blocks, {len(state.free)} free, {cached} cached."]
    lines += [f"{words}." for words in _blocks(list(state))]
    lines.append(f"Free queue, next out first: {', '.join(map(str, state.free)) or 'empty'}.")
    lines += [f"Block table of {name}: {', '.join(map(str, table))}." for name, table in state.tables.items()]
    if before is not None:
        lines.append(f"Changed blocks: {ranges(changed_blocks(before, state))}.")
        lines += _moves("Out of the queue", left_queue(before, state), "was")
        lines += _moves("Into the queue", joined_queue(before, state), "is")
    return "\n".join(lines)


def _moves(what: str, blocks: list[tuple[int, int]], verb: str) -> list[str]:
    """`Out of the queue: 6 (was 1st), 2 (was 12th).`, or nothing."""
    told = ", ".join(f"{block_id} ({verb} {ordinal(place)})" for block_id, place in blocks)
    return [f"{what}: {told}."] if told else []


def _blocks(blocks: list[BlockFacts]) -> list[str]:
    """One sentence per block or, of a large pool, per group of blocks with the same facts."""
    if len(blocks) <= MAX_ONE_BY_ONE:
        return [facts.words().capitalize() for facts in blocks]
    groups: dict[str, list[int]] = {}
    for facts in blocks:
        state = facts.used_words if facts.used else "free"
        groups.setdefault(f"{state}, {facts.cached_words}", []).append(facts.block_id)
    return [
        f"{'Blocks' if len(ids) > 1 else 'Block'} {ranges(ids)}: {words}" for words, ids in groups.items()
    ]
