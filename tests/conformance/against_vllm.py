"""Does the real vLLM say what this repository says of it: its decisions, and where they stand in its sources?

    python -m tests.conformance.against_vllm DIR_OR_FILE ...     decisions of vLLM 0.33.0
    python -m tests.conformance.against_vllm --codemap [DIR]     line ranges of the code map

The first replays V1 traces on vLLM's own classes instead of this repository's engine, with the same comparison
as `python -m tests.conformance`. Use it to check the harness, and to check new traces before an engine is
blamed for them. It needs an environment of its own, without this package's dependencies (CPU only; a
warning about vLLM's missing compiled module is expected):

    python3 -m venv vllmenv
    vllmenv/bin/pip install torch==2.13.0
    vllmenv/bin/pip install --no-deps vllm==0.33.0
    vllmenv/bin/pip install --no-deps -r tests/conformance/traces/requirements-vllm033.txt

and then, from the root of the repository:

    vllmenv/bin/python -m tests.conformance.against_vllm tests/conformance/traces

The second compares every line range that the code map names with the sources of the installed vLLM, or with those
below DIR (an unpacked wheel). Nothing of vLLM is imported for it, so it works for both releases and in any
environment.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from tests.conformance.replay import Check, replay, run


def checks() -> dict[str, Check]:
    """What can be replayed on vLLM. Imports it."""
    from tests.conformance.vllm_drivers import VllmKVManager, VllmScheduler
    from tests.conformance.vllm_hashes import check_hashes

    return {
        "kv_manager": lambda trace: replay(trace, VllmKVManager),
        "scheduler": lambda trace: replay(trace, VllmScheduler),
        "hashes": check_hashes,
    }


def check_codemap(folder: str | None) -> int:
    """Compare the code map with vLLM's sources and report. Returns the exit status."""
    from refengine.trace import codemap

    try:
        root, release = _installed() if folder is None else _unpacked(Path(folder))
        problems = codemap.verify(root, release)
    except ValueError as error:
        print(f"The code map was not checked: {error}.", file=sys.stderr)
        return 2
    for problem in problems:
        print(problem)
    total = len(codemap.places_in(release))
    print(f"vLLM {release}: {total - len(problems)} of {total} line ranges are the named definition.")
    return 1 if problems else 0


def _installed() -> tuple[Path, str]:
    """Where the installed vLLM is, and which release. Raises: ValueError if there is none."""
    try:
        found = distribution("vllm")
    except PackageNotFoundError:
        raise ValueError("vllm is not installed here; name the folder of an unpacked release") from None
    return Path(str(found.locate_file(""))), found.version


def _unpacked(folder: Path) -> tuple[Path, str]:
    """The folder and its release, from the name of the `.dist-info` beside the sources or from its own name.

    Raises: ValueError if neither says it.
    """
    names = [path.name for path in folder.glob("vllm-*.dist-info")] or [folder.resolve().name]
    found = re.search(r"\d+\.\d+\.\d+", names[0])
    if found is None:
        raise ValueError(f"nothing says which release {folder} holds; name the folder after it, as in 0.7.3")
    return folder, found[0]


def main(arguments: Sequence[str]) -> int:
    """Replay, or compare, and report. Returns the exit status."""
    if not arguments or (arguments[0] == "--codemap" and len(arguments) > 2):
        print("Name at least one folder or file of traces, or --codemap [DIR].", file=sys.stderr)
        return 2
    if arguments[0] == "--codemap":
        return check_codemap(*arguments[1:] or [None])
    return run(arguments, checks())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
