"""How the split kernel lays a cache row over the lanes of a warp, as constants to compile with."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.cuda.elements import Element
from kernels.cuda.intrinsics import WORDS

WARP = 32  # lanes
MAX_GROUP = 4  # query heads that one pass keeps in registers

HEAD_DIMS = (64, 128, 256)
GROUPS = (1, 2, 4, 8)
BLOCK_SIZES = (8, 16, 32)


@dataclass(frozen=True)
class Tiling:
    """A row is one token's key or value of one kv head: head_dim numbers, loaded 16 bytes a lane.

    group: query heads per kv head that are served together.
    passes: how often a kv head's rows are read. A group of 8 takes two, of 4 heads each: eight heads' queries
        and results do not fit into the registers, and the second reading finds the rows in the L2 cache.
    """

    element: Element
    head_dim: int
    group: int
    passes: int
    block_size: int  # tokens
    warps: int = 4

    @property
    def lanes(self) -> int:
        """Lanes for one row."""
        return min(WARP, self.head_dim // self.element.per_load)

    @property
    def loads(self) -> int:
        """Loads per lane for one row."""
        return self.head_dim // (self.lanes * self.element.per_load)

    @property
    def words(self) -> int:
        """32-bit words of one row in one lane."""
        return self.loads * WORDS

    @property
    def numbers(self) -> int:
        """Numbers of one row in one lane."""
        return self.words * self.element.per_word

    @property
    def rows(self) -> int:
        """Rows that a warp loads at once."""
        return WARP // self.lanes

    @property
    def unroll(self) -> int:
        """Keys, and as many values, that are on their way to a lane before the first is used."""
        return 4 if self.loads == 1 else 2

    @property
    def step(self) -> int:
        """Tokens per round of the whole block of threads."""
        return self.warps * self.rows * self.unroll

    @property
    def threads(self) -> int:
        return self.warps * WARP


def tiling_for(element: Element, head_dim: int, group: int, block_size: int) -> Tiling | None:
    """None if the split kernel is not made for this shape; `decode_plain` is for all of them."""
    if head_dim not in HEAD_DIMS or group not in GROUPS or block_size not in BLOCK_SIZES:
        return None
    passes = max(1, group // MAX_GROUP)
    return Tiling(element, head_dim, group // passes, passes, block_size)
