"""Instructions of a kernel: numbers for them, and the lines of source that they come from."""

from __future__ import annotations

import dis
import linecache
from bisect import bisect_right
from functools import lru_cache
from types import CodeType, FrameType


class Sites:
    """Numbers for the instructions of the interpreted functions: base of the code object + byte offset.

    CPython may say of one instruction that it is at its own offset or somewhere in the cache behind it, depending
    on how often it has run. `canonical` takes the one for the other.
    """

    def __init__(self) -> None:
        self.bases: dict[int, int] = {}  # id of a code object -> its base
        self._starts: list[int] = []
        self._codes: list[CodeType] = []  # kept, so that no id is used twice
        self._end = 0
        self._canonical: dict[int, int] = {-1: -1}

    def add(self, code: CodeType) -> None:
        """Makes a function, and the functions inside it, known."""
        if id(code) in self.bases:
            return
        self.bases[id(code)] = self._end
        self._starts.append(self._end)
        self._codes.append(code)
        self._end += len(code.co_code) + 1
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self.add(constant)

    def raw(self, frame: FrameType | None) -> int:
        """The innermost interpreted instruction at or above a frame, not yet canonical; -1 if there is none."""
        while frame is not None:
            base = self.bases.get(id(frame.f_code))
            if base is not None:
                return base + frame.f_lasti
            frame = frame.f_back
        return -1

    def at(self, frame: FrameType | None) -> int:
        """The innermost interpreted instruction at or above a frame; -1 if there is none."""
        return self.canonical(self.raw(frame))

    def canonical(self, site: int) -> int:
        """The site of the instruction that this byte belongs to."""
        known = self._canonical.get(site)
        if known is None:
            index = bisect_right(self._starts, site) - 1
            offsets, _ = instructions(self._codes[index])
            start = self._starts[index]
            known = self._canonical[site] = start + offsets[bisect_right(offsets, site - start) - 1]
        return known

    def code(self, site: int) -> CodeType:
        """The function that a site lies in."""
        return self._codes[bisect_right(self._starts, site) - 1]

    def line(self, site: int) -> int:
        """Line number in the file or notebook cell."""
        index = bisect_right(self._starts, site) - 1
        offsets, lines = instructions(self._codes[index])
        return lines[bisect_right(offsets, site - self._starts[index]) - 1]

    def source(self, site: int) -> str:
        """Text of the line, empty where the source is not at hand."""
        return linecache.getline(self.code(site).co_filename, self.line(site)).strip()

    def stored_in(self, site: int) -> str | None:
        """The variable that the result of a call goes to at once, as in `tile = cuda.shared.array(...)`."""
        index = bisect_right(self._starts, site) - 1
        following = site - self._starts[index]
        for instruction in dis.get_instructions(self._codes[index]):
            if instruction.offset > following:
                if not instruction.opname.startswith(("STORE_FAST", "STORE_DEREF")):
                    return None
                names = instruction.argval  # of one variable, or of two where one instruction does two things
                return str(names if isinstance(names, str) else names[0])
        return None


@lru_cache(maxsize=1024)
def instructions(code: CodeType) -> tuple[list[int], list[int]]:
    """Byte offset of each instruction of a function, and the line that each belongs to."""
    lines = [(start, line) for start, _, line in code.co_lines() if line is not None]
    starts = [start for start, _ in lines]
    offsets = [instruction.offset for instruction in dis.get_instructions(code)]
    return offsets, [lines[max(0, bisect_right(starts, offset) - 1)][1] for offset in offsets]


@lru_cache(maxsize=1024)
def global_names(code: CodeType) -> frozenset[str]:
    """Names that a function, or a function inside it, looks up in its globals."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    inner = (global_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(names.union(*inner))
