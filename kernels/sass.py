"""What the hardware would be told to do: a CUDA kernel compiled for a GPU that is not there, and read.

Python -> PTX (numba-cuda, with NVVM) -> machine code (ptxas) -> text (nvdisasm). All four come from pip packages
and need neither a GPU nor a driver. The report counts what decides about the speed of a kernel that is bound by
memory: registers and stack, traffic to local memory, how wide its loads are, and how many are on their way at
once. ptxas calls a kernel free of spills when its arrays still live in local memory; so stack bytes and LDL/STL
instructions are counted, not only spills.

On a machine with nvJitLink numba compiles by way of its link-time optimiser instead. For seven layouts of
`decode_split` both ways gave the same registers and as many instructions (CUDA 13.0).
"""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kernels.sass_text import Instruction, loads_in_flight, parse

INSTALL = "pip install -e '.[sass]'"
TOOLS, LIBRARIES = ("ptxas", "nvdisasm"), ("nvrtc", "nvvm")
NOT_FOR_PTX = "max_registers"  # an option of @cuda.jit that ptxas applies, not the compiler to PTX


class SassError(RuntimeError):
    """Something is missing for compiling, or the kernel does not compile."""


@dataclass(frozen=True)
class SassReport:
    """What one kernel compiles to. Registers and stack are for each thread, shared memory for each block."""

    kernel: str
    arch: str
    registers: int
    stack: int  # bytes
    spill_stores: int  # bytes, as ptxas counts them
    spill_loads: int  # bytes
    shared: int  # bytes, declared in the kernel
    instructions: tuple[Instruction, ...] = field(repr=False)

    @property
    def local_loads(self) -> int:
        return sum(i.name == "LDL" for i in self.instructions)

    @property
    def local_stores(self) -> int:
        return sum(i.name == "STL" for i in self.instructions)

    @property
    def vector_loads(self) -> int:
        return sum(i.is_global_load and i.width == 16 for i in self.instructions)

    @property
    def narrow_loads(self) -> int:
        return sum(i.is_global_load and i.width < 16 for i in self.instructions)

    @property
    def loads_in_flight(self) -> int:
        return loads_in_flight(self.instructions)

    def rows(self) -> list[tuple[str, str]]:
        """What is reported, and its value with its unit, in words."""
        return [
            ("registers", f"{self.registers} a thread"),
            ("stack", f"{self.stack} bytes a thread"),
            ("spills", f"{self.spill_stores} bytes stored, {self.spill_loads} loaded"),
            ("local memory", f"{self.local_loads} loads, {self.local_stores} stores"),
            ("shared memory", f"{self.shared} bytes a block"),
            ("16-byte global loads", str(self.vector_loads)),
            ("narrower global loads", str(self.narrow_loads)),
            ("16-byte loads in flight", str(self.loads_in_flight)),
            ("instructions", str(len(self.instructions))),
        ]

    def __str__(self) -> str:
        lines = [f"{name:<24}{value}" for name, value in self.rows()]
        return "\n".join([f"{self.kernel}, {self.arch}", *lines])

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><td style="text-align:left">{name}</td><td style="text-align:left">{value}</td></tr>'
            for name, value in self.rows()
        )
        title = html.escape(f"{self.kernel}, {self.arch}")
        return f'<table><caption style="text-align:left">{title}</caption>{rows}</table>'


def available() -> str | None:
    """None if kernels can be compiled here, else one sentence that says what is missing and how to get it."""
    if find_spec("numba_cuda") is None:
        return f"numba-cuda is not installed: {INSTALL}"
    if import_module("numba.cuda.core.config").ENABLE_CUDASIM:
        return "NUMBA_ENABLE_CUDASIM is set, so numba interprets kernels in this process and compiles none"
    missing = [name for name in (*TOOLS, *LIBRARIES) if name not in toolkit()]
    return f"{' and '.join(missing)} not found: {INSTALL}" if missing else None


@lru_cache(maxsize=1)
def toolkit() -> dict[str, str]:
    """Where each tool and library was found: in a package, or else in a CUDA toolkit of the system."""
    pathfinder = import_module("cuda.pathfinder")
    found = {}
    for name in TOOLS:
        if path := pathfinder.find_nvidia_binary_utility(name) or shutil.which(name):
            found[name] = path
    for name in LIBRARIES:
        with suppress(pathfinder.DynamicLibNotFoundError):
            found[name] = pathfinder.load_nvidia_dynamic_lib(name).abs_path
    return found


def report(kernel: Any, arguments: Sequence[Any], arch: str = "sm_90") -> SassReport:
    """Compiles a kernel and counts.

    Args:
        kernel: a function under `@cuda.jit`, whose options are used, or a plain one.
        arguments: one per parameter: numba types, or examples (tensors and arrays, of any size; numbers).
        arch: sm_80 (A100), sm_90 (H100, H200) and others that ptxas knows.
    Raises: SassError with one sentence if a tool is missing or the kernel does not compile.
    """
    if reason := available():
        raise SassError(reason)
    options = {
        name: value
        for name in ("fastmath", "opt", "launch_bounds", NOT_FOR_PTX)
        if (value := getattr(kernel, "targetoptions", {}).get(name)) is not None
    }
    function = getattr(kernel, "py_func", kernel)
    return _report(function, tuple(map(_type_of, arguments)), arch, tuple(options.items()))


def listing(
    kernel: Any,
    arguments: Sequence[Any],
    arch: str = "sm_90",
    opcodes: Sequence[str] = (),
    limit: int | None = None,
) -> str:
    """The machine code as text: each Python line, and below it the instructions that it became.

    Args:
        kernel, arguments, arch: as in `report`.
        opcodes: only the instructions that begin so, for example ("LDG", "FFMA").
        limit: so many instructions at most.
    Raises: as `report`.
    """
    wanted = [
        i
        for i in report(kernel, arguments, arch).instructions
        if not opcodes or i.opcode.startswith(tuple(opcodes))
    ]
    lines: list[str] = []
    place: tuple[str, int] | None = None
    for instruction in wanted[:limit]:
        if (instruction.file, instruction.line) != place:
            place = instruction.file, instruction.line
            lines.append(f"{instruction.line:>4} | {instruction.source}")
        lines.append(f"       {instruction}")
    left = len(wanted) - len(wanted[:limit])
    return "\n".join([*lines, f"       ... and {left} more"] if left else lines)


@lru_cache(maxsize=64)
def _report(
    function: Callable[..., None], types: tuple[Any, ...], arch: str, options: tuple[tuple[str, Any], ...]
) -> SassReport:
    flags = [f"--maxrregcount={value}" for name, value in options if name == NOT_FOR_PTX]
    ptx = _to_ptx(function, types, arch, {k: v for k, v in options if k != NOT_FOR_PTX})
    with tempfile.TemporaryDirectory() as directory:
        source, binary = Path(directory, "kernel.ptx"), Path(directory, "kernel.cubin")
        source.write_text(ptx)
        log = _call(
            "ptxas", "-v", "-lineinfo", f"-arch={arch}", *flags, str(source), "-o", str(binary)
        ).stderr
        text = _call("nvdisasm", "-c", "-g", str(binary)).stdout
    return SassReport(
        kernel=function.__name__,
        arch=arch,
        registers=_number(r"Used (\d+) registers", log),
        stack=_number(r"(\d+) bytes stack frame", log),
        spill_stores=_number(r"(\d+) bytes spill stores", log),
        spill_loads=_number(r"(\d+) bytes spill loads", log),
        shared=_number(r"(\d+) bytes smem", log),
        instructions=tuple(parse(text)),
    )


def _to_ptx(function: Callable[..., None], types: tuple[Any, ...], arch: str, options: dict[str, Any]) -> str:
    match = re.fullmatch(r"sm_(\d+)(\d)[a-z]?", arch)
    if match is None:
        raise SassError(f"arch {arch!r} is not of the form sm_90")
    cuda = import_module("numba.cuda")
    capability = int(match[1]), int(match[2])
    try:
        with _as_if_at_hand(capability):
            ptx, _ = cuda.compile(
                function, types, cc=capability, device=False, abi="numba", lineinfo=True, **options
            )
    except Exception as error:  # numba has dozens of kinds; the first lines of its message say what is wrong
        reason = " ".join(str(error).split())[:400]
        raise SassError(f"{function.__name__} does not compile for {arch}: {reason}") from error
    return str(ptx)


@contextmanager
def _as_if_at_hand(capability: tuple[int, int]) -> Iterator[None]:
    """Numba compiles what a kernel calls for the current device, and asks the driver which that is.

    What it keeps of a called function is not yet machine code, and serves every device.
    """
    dispatcher: Any = import_module("numba.cuda.dispatcher")
    current = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=capability)
    try:
        yield
    finally:
        dispatcher.get_current_device = current


def _type_of(argument: Any) -> Any:
    """The numba type that a launch with this argument would be compiled for."""
    types = import_module("numba.cuda.types")
    if isinstance(argument, types.Type):
        return argument
    if hasattr(argument, "numpy"):  # a tensor; numba would read a GPU's through its array interface
        try:
            argument = argument.detach().cpu().numpy()
        except TypeError:
            raise SassError(
                f"numba has no arrays of {argument.dtype}; pass tensor.view(torch.int16)"
            ) from None
    return import_module("numba.cuda.typing.typeof").typeof(argument)


def _call(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([toolkit()[tool], *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SassError(f"{tool} failed: {' '.join(done.stderr.split())[:400]}")
    return done


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    return int(match[1]) if match else 0
