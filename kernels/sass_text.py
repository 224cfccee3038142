"""A disassembly as a list of instructions: what each one is, which registers it names, which line asked for it.

The text is that of `nvdisasm -c -g`. Only what a report on memory traffic needs is read out of it; the meaning
of arithmetic instructions is not.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable
from dataclasses import dataclass

_LINE = re.compile(r'//## File "(?P<file>[^"]*)", line (?P<line>\d+)')
_INSTRUCTION = re.compile(
    r"/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<guard>@!?U?P\w+\s+)?(?P<opcode>[A-Z][A-Z0-9_.]*)(?P<operands>[^;]*);"
)
_REGISTER = re.compile(r"\bR(\d+)\b")
_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
_LEAVE = ("BRA", "BRX", "EXIT", "JMP", "JMX", "RET")
_MAY_STAY = ("DIV", "CONV")  # BRA.DIV jumps only if the threads of the warp disagree


@dataclass(frozen=True)
class Instruction:
    """One instruction: `@!P0 LDG.E.128 R4, desc[UR6][R2.64]`, and the Python line that it comes from."""

    address: int  # bytes from the start of the kernel
    guard: str  # "@!P0", or "" when it is always carried out
    opcode: str  # "LDG.E.128"
    operands: str
    file: str  # "" when unknown
    line: int  # 0 when unknown

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def width(self) -> int:
        """Bytes that a load or store moves for each thread."""
        return next((_BYTES[part] for part in self.opcode.split(".") if part in _BYTES), 4)

    @property
    def is_global_load(self) -> bool:
        return self.name in ("LDG", "LD")

    @property
    def loaded(self) -> frozenset[int]:
        """Registers that a load fills: an `LDG.128 R4` fills R4 to R7."""
        first = _REGISTER.search(self.operands)
        if first is None:
            return frozenset()
        return frozenset(range(int(first[1]), int(first[1]) + max(1, self.width // 4)))

    @property
    def named(self) -> frozenset[int]:
        """Registers that stand in the text. A group of registers is named by its first."""
        return frozenset(map(int, _REGISTER.findall(self.operands)))

    @property
    def leaves(self) -> bool:
        """Whether the next instruction in the text is never the next one carried out."""
        name, *rest = self.opcode.split(".")
        return not self.guard and name in _LEAVE and not set(rest) & set(_MAY_STAY)

    @property
    def source(self) -> str:
        """The Python line, or "" when its file cannot be read any more."""
        return linecache.getline(self.file, self.line).strip() if self.file else ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.guard, self.opcode, self.operands)))


def parse(disassembly: str) -> list[Instruction]:
    """The instructions in the text, in order, without the padding after the last one."""
    found: list[Instruction] = []
    file, line = "", 0
    for text in disassembly.splitlines():
        if place := _LINE.search(text):
            file, line = place["file"], int(place["line"])
        elif match := _INSTRUCTION.search(text):
            guard = (match["guard"] or "").strip()
            operands = match["operands"].strip()
            found.append(Instruction(int(match["address"], 16), guard, match["opcode"], operands, file, line))
    return _without_padding(found)


def _without_padding(instructions: list[Instruction]) -> list[Instruction]:
    """A kernel ends with a jump to itself, which is never reached, and is filled up with NOPs."""
    end = len(instructions)
    while end and instructions[end - 1].name == "NOP":
        end -= 1
    if end and instructions[end - 1].name == "BRA":
        end -= 1
    return instructions[:end]


def loads_in_flight(instructions: Iterable[Instruction], width: int = 16) -> int:
    """The most loads of that width (bytes) which are issued before a value of any of them is needed.

    A load is on its way from where it is issued until the first instruction that names one of the registers it
    fills. Waiting for one is waiting for all: loads that are issued after that point did not hide its latency.
    So the count starts anew at each such instruction, and where the text stops being one path (a jump).
    The order of the text is followed, as a thread does that takes no guarded jump.
    """
    most, pending, count = 0, set[int](), 0
    for instruction in instructions:
        if pending & instruction.named or instruction.leaves:
            pending, count = set(), 0
        if instruction.is_global_load and instruction.width == width:
            pending |= instruction.loaded
            count += 1
            most = max(most, count)
    return most
