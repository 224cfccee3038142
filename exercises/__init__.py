"""The exercises of the book: notebooks with parts to write, and the grader that judges them.

In a notebook: `from exercises import check`, then `check("03.1", FreeKVCacheBlockQueue)`.
"""

from exercises.grader import check

__all__ = ["check"]
