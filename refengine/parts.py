"""Which implementation fills each slot of the engine: ours, or one that a reader wrote.

    LLM(parts={"free_queue": MyQueue})                    # objects
    LLM(parts={"free_queue": "my_module:MyQueue"})        # by name
    LLM(parts="exercises/03_used_free_cached.ipynb")      # every part written in a notebook
    LLM(parts="mine")                                     # every part that has passed its exercise

A part that is not ours runs under guard: each call is checked, and an error says which part, which call and
what was expected of it, instead of showing the inside of the engine.
"""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from kernels import Backend, backend_for
from refengine.config import near_match
from refengine.errors import ConfigError, PartError
from refengine.guard import guarded
from refengine.hashing import HashBlock
from refengine.sampling import Sampler, sample
from refengine.v1.block import FreeKVCacheBlockQueue
from refengine.v1.block_pool import BlockPool
from refengine.v1.coordinator import HybridKVCacheCoordinator
from refengine.v1.groups.full_attention import FullAttentionManager
from refengine.v1.groups.sliding_window import SlidingWindowManager
from refengine.v1.kv_cache_manager import KVCacheManager
from refengine.v1.scheduler import Scheduler

PROGRESS = Path("exercises/.progress.json")  # written by the grader
STUB = 'raise NotImplementedError("ex'


@dataclass(frozen=True)
class Parts:
    """The slots. Each default is the reference, and its docstrings are the contract for whatever replaces it."""

    hash_block: HashBlock | None = (
        None  # (parent, token_ids, extra_keys) -> digest; None: the configured algorithm
    )
    free_queue: type[FreeKVCacheBlockQueue] = FreeKVCacheBlockQueue
    block_pool: type[BlockPool] = BlockPool
    full_attention: type[FullAttentionManager] = FullAttentionManager
    sliding_window: type[SlidingWindowManager] = SlidingWindowManager
    coordinator: type[HybridKVCacheCoordinator] = HybridKVCacheCoordinator
    kv_cache_manager: type[KVCacheManager] = KVCacheManager
    scheduler: type[Scheduler] = Scheduler
    sampler: Sampler = sample
    attention: Backend | None = None  # None: the configured backend

    def replaced(self) -> dict[str, str]:
        """Slot -> name of every part that is not ours."""
        return {
            f.name: getattr(part, "__name__", type(part).__name__)
            for f in fields(self)
            if (part := getattr(self, f.name)) is not f.default
        }


SLOTS = tuple(f.name for f in fields(Parts))
OPERATIONS = ("reshape_and_cache", "paged_attention", "paged_attention_decode", "copy_blocks")
SUBCLASSED = {
    "full_attention": FullAttentionManager,
    "sliding_window": SlidingWindowManager,
    "coordinator": HybridKVCacheCoordinator,
    "kv_cache_manager": KVCacheManager,
    "scheduler": Scheduler,
}


def load_parts(spec: Parts | Mapping[str, Any] | str | Path | None) -> Parts:
    """The parts that `spec` names, under guard; see the head of this module for its forms.

    Raises: ConfigError for a slot that does not exist or a name that leads nowhere, PartError for a notebook
    whose cells fail or which has no finished part.
    """
    if spec is None:
        return Parts()
    if isinstance(spec, Parts):
        return spec
    if isinstance(spec, Mapping):
        return _fill(spec)
    if str(spec) == "mine":
        return _fill(_passed_parts())
    if str(spec).endswith(".ipynb"):
        return _fill(notebook_parts(Path(spec)))
    return _fill(_by_base(_resolve(str(spec)), str(spec)))


def notebook_parts(path: Path) -> dict[str, Any]:
    """Runs a notebook's set-up, answers and other definitions, in order. Returns: slot -> what was written for it.

    An untouched answer is left out, and so is every cell that does something else than define.
    Raises: PartError, ConfigError.
    """
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    except FileNotFoundError:
        raise ConfigError(f"there is no notebook {path}") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} is not a notebook") from None
    namespace: dict[str, Any] = {"__name__": path.stem}
    found: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        role, source = cell["metadata"].get("refengine", {}), _python("".join(cell["source"]))
        belongs = "task" in role or "setup" in cell["metadata"].get("tags", ()) or _only_defines(source)
        if not belongs or STUB in source:
            continue
        _run_cell(path, role.get("task", "a definition"), source, namespace)
        if "part" in role:
            found[role["part"]] = namespace[role["name"]]
    if not found:
        raise PartError(f"no part in {path} is written yet")
    return found


def _python(source: str) -> str:
    """A cell's source; if it is no Python as it stands, without the lines that only a notebook understands."""
    try:
        ast.parse(source)
    except SyntaxError:
        return "\n".join(line for line in source.splitlines() if not line.startswith(("%", "!")))
    return source


def _only_defines(source: str) -> bool:
    """Whether a cell holds nothing but imports, functions, classes and constants."""
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return False
    defining = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    return all(
        isinstance(node, defining) or (isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant))
        for node in body
    )


def _run_cell(path: Path, what: str, source: str, namespace: dict[str, Any]) -> None:
    try:
        exec(
            compile(source, f"{path.name}, {what}", "exec"), namespace
        )  # the reader's own code, at their request
    except Exception as error:
        raise PartError(f"the cell of {what} in {path} raised {type(error).__name__}: {error}") from error


def _passed_parts() -> dict[str, Any]:
    """Slot -> part, for every part whose exercise is recorded as passed, here or in a folder above."""
    root = next(
        (folder for folder in (Path.cwd(), *Path.cwd().parents) if (folder / PROGRESS).exists()), None
    )
    if root is None:
        raise ConfigError(f"no exercise has been passed yet ({PROGRESS} does not exist)")
    try:
        tasks = json.loads((root / PROGRESS).read_text(encoding="utf-8"))["tasks"].values()
    except (ValueError, KeyError, AttributeError):
        raise ConfigError(f"{PROGRESS} is damaged; `refengine check` writes it anew") from None
    passed = [task["part"] for task in tasks if task["status"] == "passed" and task.get("part")]
    if not passed:
        raise ConfigError("no exercise that builds a part has been passed yet")
    loaded = {notebook: notebook_parts(root / notebook) for notebook in {part["notebook"] for part in passed}}
    for part in passed:
        if part["slot"] not in loaded[part["notebook"]]:
            raise ConfigError(f"{part['notebook']} no longer holds the part for {part['slot']!r} that passed")
    return {part["slot"]: loaded[part["notebook"]][part["slot"]] for part in passed}


def _fill(chosen: Mapping[str, Any]) -> Parts:
    filled: dict[str, Any] = {}
    for slot, part in chosen.items():
        if slot not in SLOTS:
            raise ConfigError(
                f"there is no slot {slot!r} for a part{near_match(slot, SLOTS)} ({', '.join(SLOTS)})"
            )
        part = _resolve(part) if isinstance(part, str) else part
        base = SUBCLASSED.get(slot)
        if base is not None and not (isinstance(part, type) and issubclass(part, base)):
            raise ConfigError(f"the part for {slot!r} must be a subclass of {base.__name__}, not {part!r}")
        filled[slot] = _attention(part) if slot == "attention" else guarded(slot, part, getattr(Parts, slot))
    return Parts(**filled)


def _attention(part: Backend | Callable[..., Any]) -> Backend:
    """A whole backend as it is; a lone `paged_attention` function with the reference's other operations.

    Raises: PartError for what is neither.
    """
    reference = backend_for("cpu", "reference")
    if not callable(part) and not any(hasattr(part, name) for name in OPERATIONS):
        raise PartError(f"the part for 'attention' is {part!r}, which is neither a backend nor a function")
    operations = {name: getattr(part, name, getattr(reference, name)) for name in OPERATIONS}
    if callable(part):
        operations["paged_attention"] = part
    mine = {
        name: guarded("attention", function, getattr(reference, name))
        for name, function in operations.items()
        if function is not getattr(reference, name)
    }
    return cast(
        Backend, SimpleNamespace(__name__=getattr(part, "__name__", "attention"), **(operations | mine))
    )


def _resolve(name: str) -> Any:
    """`"module:Name"` -> the object."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"the part {name!r} cannot be loaded as module:Name ({error})") from None


def _by_base(part: Any, name: str) -> dict[str, Any]:
    """The slot of a class that is derived from one of ours; of anything else only its writer knows."""
    for slot in SLOTS:
        default = getattr(Parts, slot)
        if isinstance(default, type) and isinstance(part, type) and issubclass(part, default):
            return {slot: part}
    raise ConfigError(
        f"say which slot {name!r} is for: parts={{slot: {name!r}}}, slot one of {', '.join(SLOTS)}"
    )
