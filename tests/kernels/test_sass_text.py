"""Reading a disassembly: instructions, the registers they name, and how many loads are on their way at once."""

from __future__ import annotations

import pytest
import torch

from kernels import sass
from kernels.sass_text import Instruction, loads_in_flight, parse

TEXT = """
.text.kernel:
\t//## File "/somewhere/kernel.py", line 7
        /*0000*/                   LDC R1, c[0x0][0x28] ;
\t//## File "/somewhere/kernel.py", line 9
        /*0010*/              @!P0 LDG.E.NA.128.CONSTANT R4, desc[UR6][R2.64+0x10] ;
.L_x_1:
        /*0020*/                   FFMA.FTZ R8, R5.reuse, R6, RZ ;
        /*0030*/                   STG.E.64 desc[UR6][R2.64], R8 ;
        /*0040*/                   EXIT ;
.L_x_2:
        /*0050*/                   BRA `(.L_x_2);
        /*0060*/                   NOP;
        /*0070*/                   NOP;
"""


def instruction(text: str) -> Instruction:
    return parse(f"/*0000*/ {text} ;\n/*0010*/ EXIT ;")[0]


def in_flight(*texts: str) -> int:
    return loads_in_flight(map(instruction, texts))


def test_instructions_are_read_with_their_lines_and_without_the_padding() -> None:
    found = parse(TEXT)
    assert [(i.address, i.line, i.opcode) for i in found] == [
        (0x00, 7, "LDC"),
        (0x10, 9, "LDG.E.NA.128.CONSTANT"),
        (0x20, 9, "FFMA.FTZ"),
        (0x30, 9, "STG.E.64"),
        (0x40, 9, "EXIT"),
    ]
    load, multiply, store = found[1:4]
    assert (load.guard, load.width, load.is_global_load) == ("@!P0", 16, True)
    assert load.loaded == {4, 5, 6, 7}
    assert multiply.named == {5, 6, 8}
    assert (store.width, store.is_global_load) == (8, False)
    assert str(load) == "@!P0 LDG.E.NA.128.CONSTANT R4, desc[UR6][R2.64+0x10]"


@pytest.mark.parametrize(
    ("text", "width"),
    [("LDG.E R2, [R4]", 4), ("LDG.E.U16 R2, [R4]", 2), ("LDG.E.S8 R2, [R4]", 1), ("LDG.E.64 R2, [R4]", 8)],
)
def test_the_width_of_a_load(text: str, width: int) -> None:
    assert instruction(text).width == width


A, B, C = (f"LDG.E.128 R{n}, desc[UR4][R2.64]" for n in (4, 8, 12))
USE_A, USE_C = "FADD R20, R20, R7", "FADD R21, R21, R12"


def test_loads_are_in_flight_until_the_first_use_of_any_of_them() -> None:
    assert in_flight() == 0
    assert in_flight(A, USE_A) == 1
    assert in_flight(A, B, C, USE_A) == 3
    assert in_flight(A, B, USE_A, C, USE_C) == 2  # C was not on its way while A was waited for
    assert in_flight(A, USE_A, B, C) == 2


def test_what_is_not_a_use() -> None:
    assert in_flight(A, "FADD R20, R21, R22", B, "LDG.E R30, desc[UR4][R2.64]", C) == 3
    assert in_flight(A, "@P0 BRA `(.L_1)", B, "BRA.DIV UR4, `(.L_2)", C) == 3  # may go on below


def test_what_ends_a_path_or_needs_an_address() -> None:
    assert in_flight(A, B, "BRA `(.L_1)", C) == 2
    assert in_flight(A, B, "EXIT", C) == 2
    assert (
        in_flight(A, "LDG.E.128 R8, desc[UR4][R6.64]") == 1
    )  # the second address comes out of the first load


def test_a_missing_package_is_one_sentence_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "find_spec", lambda name: None)
    assert sass.available() == "numba-cuda is not installed: pip install -e '.[sass]'"
    with pytest.raises(sass.SassError, match="numba-cuda is not installed"):
        sass.report(lambda x: None, (torch.zeros(1),))
