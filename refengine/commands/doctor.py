"""`refengine doctor`: what is here, what will be used, and one verdict.

The exit status is 0 if everything that the base install needs works. A missing GPU is not a fault: everything
runs without one.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

MINIMUM_PYTHON = (3, 10)
REQUIRED = (
    "torch",
    "numpy",
    "tokenizers",
    "safetensors",
    "cbor2",
    "xxhash",
    "rich",
    "typer",
    "numba",
    "greenlet",
)
OPTIONAL = {
    "jupyterlab": "read the chapters: pip install -e '.[lab]'",
    "ipywidgets": "step through pictures in a notebook: pip install -e '.[lab]'",
    "matplotlib": "draw the pictures: pip install -e '.[lab]'",
    "numba-cuda": "run the CUDA kernels on a GPU: pip install -e '.[gpu]'",
    "nvidia-cuda-nvdisasm": "read the kernels' machine code: pip install -e '.[sass]'",
    "gguf": "read quantized GGUF files: pip install -e '.[gguf]'",
    "transformers": "run the tests: pip install -e '.[dev]'",
    "huggingface_hub": "load models by name: pip install -e '.[hub]'",
}


@dataclass(frozen=True)
class Finding:
    """One row: what was looked at, what was found, and whether it stops anything."""

    what: str
    found: str
    is_fault: bool = False


def examine() -> list[Finding]:
    """Looks at Python, the packages, the shipped model and the GPU. Changes nothing."""
    python = Finding("python", platform.python_version(), sys.version_info < MINIMUM_PYTHON)
    packages = [*map(_required, REQUIRED), *map(_optional, OPTIONAL)]
    return [python, *packages, _kernels(), _tiny_model(), _attention(), *_gpu(), _threads()]


def run_doctor(console: Console) -> int:
    """Prints the findings and one verdict line. Returns: the exit status."""
    findings = examine()
    table = Table(show_header=False)
    for finding in findings:
        found = escape(finding.found)
        table.add_row(finding.what, f"[red]{found}[/red]" if finding.is_fault else found)
    console.print(table)
    faults = [finding.what for finding in findings if finding.is_fault]
    device = (
        "on the CPU, and with device='cuda' on the GPU"
        if torch.cuda.is_available()
        else "on the CPU; nothing here needs a GPU"
    )
    console.print(
        escape(
            f"Not ready: {', '.join(faults)}. `pip install -e '.[lab,dev]'` in this folder installs what is missing."
        )
        if faults
        else f"Ready: the engine runs {device}."
    )
    return 1 if faults else 0


def _required(name: str) -> Finding:
    try:
        importlib.import_module(name)
    except Exception as error:  # a broken binary package can raise anything while it is imported
        return Finding(name, f"cannot be imported: {error}", is_fault=True)
    return Finding(name, importlib.metadata.version(name))


def _optional(name: str) -> Finding:
    try:
        return Finding(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, f"not installed; needed to {OPTIONAL[name]}")


def _kernels() -> Finding:
    """Hugging Face has a package of the same name, for which `transformers` looks; ours must be the one found."""
    kernels = importlib.import_module("kernels")
    if not hasattr(kernels, "paged_attention"):
        return Finding(
            "kernels", f"another package of this name comes first: {kernels.__file__}", is_fault=True
        )
    try:
        other = importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        return Finding("kernels", "ours")
    return Finding("kernels", f"ours; the hub's `kernels` {other} is installed too and hidden in this folder")


def _attention() -> Finding:
    """What attention ran on when the tiny model spoke, and whether it had to be compiled for that."""
    try:
        from kernels.cpu.attention import attend
    except Exception as error:  # numba is there but does not work with what else is
        return Finding("attention", f"the cpu backend cannot be imported: {error}", is_fault=True)
    state = "found compiled in" if attend.stats.cache_hits else "compiled just now and kept in"
    return Finding("attention", f"backend cpu on the CPU, {state} {_short(Path(attend.stats.cache_path))}")


def _short(folder: Path) -> str:
    """Relative to where we are, if it is inside."""
    return os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder)


def _tiny_model() -> Finding:
    from refengine.llm import LLM  # here, so that a broken package is reported as itself first
    from refengine.sampling import SamplingParams

    try:
        (output,) = LLM("tiny").generate(
            ["Q: What is a KV block?\nA:"], SamplingParams(max_tokens=32, stop="\n")
        )
    except Exception as error:  # whatever it is, the verdict must name it
        return Finding("tiny model", f"{type(error).__name__}: {error}", is_fault=True)
    return Finding("tiny model", f"says {output.text.strip()!r}")


def _gpu() -> list[Finding]:
    """The GPU that torch would use, and what compiles kernels for it. Neither is needed."""
    if not torch.cuda.is_available():
        return [Finding("GPU", "none that torch can use")]
    try:
        from kernels.cuda import check_device
        from kernels.dispatch import BackendError
        from kernels.gpu_stages import versions

        facts = {row["what"]: row["found"] for row in versions()}
        gpu = f"{facts['GPU']}, {facts['memory, bytes'] / 2**30:.0f} GiB, driver {facts['driver']}"
        gpu += f", CUDA {facts['CUDA of torch']} in torch"
        try:
            check_device(torch.device("cuda"))
            compiler = f"numba-cuda {facts['numba-cuda']}, libnvvm {facts['libnvvm']}"
        except BackendError as error:
            compiler = str(error)
    except Exception as error:  # a driver that is half there can fail in any way
        return [Finding("GPU", f"there is one, but {type(error).__name__}: {error}")]
    return [Finding("GPU", gpu), Finding("CUDA kernels", compiler)]


def _threads() -> Finding:
    return Finding("CPU", f"{os.cpu_count()} cores, torch threads: {torch.get_num_threads()}")
