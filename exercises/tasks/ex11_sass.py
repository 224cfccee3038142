"""What the house's kernels compile to for a GPU, kept in a file: `python -m exercises.tasks.ex11_sass` writes it anew.

Compiling needs the extra `sass` and seconds for each kernel, and the chapter is to show the same without either. A test
compiles again, where the extra is there, and compares.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernels import sass
from kernels.cuda.decode_plain import decode_plain_kernel
from kernels.cuda.decode_split import decode_split_kernel
from kernels.cuda.elements import ELEMENTS
from kernels.cuda.prefill import PrefillTiling, prefill_kernel
from kernels.cuda.tiling import tiling_for
from refengine.viz import Table

RECORD = Path(__file__).with_suffix(".json")
ARCH, HEAD_DIM, BLOCK_SIZE = "sm_90", 128, 16
GROUP = 4  # of the kernel whose instructions are kept
LOADS = ("LDG", "FFMA")  # loads from global memory, and the arithmetic that uses what they bring


def kernels() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Kernels in bfloat16 by name, each with examples of its arguments."""
    element = ELEMENTS[torch.bfloat16]
    ones, flat = torch.ones(1, dtype=torch.int32), torch.zeros(16, dtype=element.stored)
    table, row, scale = ones.view(1, 1), flat.view(1, 1, -1), np.float32(1)
    plain = (row, row, row[None], row[None], table, ones, scale, 1)
    parts = (torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1))
    split = (*parts, flat, 1, ones, flat, flat, table, ones, scale, 1)
    prefill = (row, flat, 1, ones, ones, flat, flat, table, ones, scale, 1)
    found: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "plain decode": (decode_plain_kernel(element, HEAD_DIM, HEAD_DIM), plain)
    }
    for group in (1, 2, GROUP):
        tiling = tiling_for(element, HEAD_DIM, group, BLOCK_SIZE)
        assert tiling is not None  # it is one that the kernel is made for
        found[f"split decode, group {group}"] = decode_split_kernel(tiling), split
    found["prefill, group 4"] = prefill_kernel(PrefillTiling(element, HEAD_DIM, GROUP, BLOCK_SIZE)), prefill
    return found


def compiled() -> dict[str, Any]:
    """What the file holds. Raises: SassError without the extra."""
    rows = {name: dict(sass.report(*kernel, ARCH).rows()) for name, kernel in kernels().items()}
    listing = sass.listing(*kernels()[f"split decode, group {GROUP}"], ARCH, LOADS)
    until_used = listing[: listing.index("FFMA")].rsplit("\n", 1)[0]
    return {
        "arch": ARCH,
        "rows": rows,
        "loads": re.sub(r"^ *\d+ \| ", "", until_used, flags=re.M).split("\n"),
    }


def recorded() -> Mapping[str, Any]:
    """What was compiled when the file was written."""
    found: Mapping[str, Any] = json.loads(RECORD.read_text())
    return found


def sass_table() -> Table:
    """A column per kernel."""
    rows: Mapping[str, Mapping[str, str]] = recorded()["rows"]
    properties = next(iter(rows.values()))
    return Table(("", *rows), [(name, *(row[name] for row in rows.values())) for name in properties], wrap=16)


def sass_loads() -> str:
    """Python lines of the split decode, and below each its loads, up to where the first key is used."""
    return "\n".join(recorded()["loads"])


if __name__ == "__main__":
    RECORD.write_text(json.dumps(compiled(), indent=1) + "\n")
    print(f"wrote {RECORD.name}")
