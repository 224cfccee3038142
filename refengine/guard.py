"""Runs a reader's part so that its faults are named as its own.

Around every call of the part stands a check: an exception becomes a sentence with the part, the call and what
was expected (the first line of the reference's docstring), a result of the wrong form is refused on the spot,
and structures that count something are counted after every call, not only at the end of a step.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch

from refengine.errors import IntegrityError, PartError
from refengine.v1.block import KVCacheBlock, check_queue
from refengine.v1.block_pool import check_pool
from refengine.v1.kv_cache_manager import KVCacheManager

# Checked after every public call of such a part, by means of its public attributes only.
AFTER_EACH_CALL: dict[str, Callable[[Any], None]] = {"free_queue": check_queue, "block_pool": check_pool}
SHOWN_CHARS = 60
LOOKUPS = ("full_attention", "sliding_window")  # slots whose part looks prefixes up
LOOKING = ("check_integrity", "snapshot")  # they only look, and what they find may be another part's doing

# By how much each call on a free queue changes its count.
QUEUE_GROWTH: dict[str, Callable[[Any], int]] = {
    "popleft_n": lambda n: -n,
    "remove": lambda block: -1,
    "append_n": len,
    "prepend_n": len,
}


def guarded(slot: str, part: Any, reference: Any) -> Any:
    """`part` with a guard around every public call. A class stays a class, with the guard in a subclass."""
    if isinstance(part, type):
        return _guarded_class(slot, part, reference)
    if not callable(part):
        raise PartError(f"the part for {slot!r} is {part!r}, which is neither a class nor a function")
    if isinstance(reference, type):
        raise PartError(
            f"the part for {slot!r} is {part!r}, but it must be a class like {reference.__name__}"
        )
    return _guard_call(slot, getattr(part, "__name__", slot), part, reference, is_method=False)


def _guarded_class(slot: str, part: type, reference: Any) -> type:
    busy: set[int] = set()
    members: dict[str, Any] = {}
    for name, function in inspect.getmembers(part, inspect.isfunction):
        if name == "__init__" or (not name.startswith("_") and name not in LOOKING):
            members[name] = _guard_method(slot, part.__name__, function, getattr(reference, name, None), busy)
    if slot in AFTER_EACH_CALL:
        # The check of the engine, not the reader's own: that one is what is being checked.
        own = reference.check_integrity if issubclass(part, reference) else AFTER_EACH_CALL[slot]
        members["check_integrity"] = own
    return type(part.__name__, (part,), members)


def _guard_method(
    slot: str, part_name: str, function: Callable[..., Any], reference: Any, busy: set[int]
) -> Callable[..., Any]:
    """A method under guard. A call inside a call of the same object is the part's own affair: `busy` knows."""
    checked = AFTER_EACH_CALL.get(slot) if function.__name__ != "__init__" else None
    guarded_call = _guard_call(slot, part_name, function, reference, is_method=True, check=checked)

    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self) in busy:
            return function(self, *args, **kwargs)
        busy.add(id(self))
        try:
            if slot == "free_queue" and args and function.__name__ in QUEUE_GROWTH:
                args = _checked_arguments(self, function.__name__, args)
            return guarded_call(self, *args, **kwargs)
        finally:
            busy.discard(id(self))

    return method


def _checked_arguments(queue: Any, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, with any iterable of blocks as a list. Raises IntegrityError if the *caller* misuses the queue."""
    if name == "popleft_n":
        return args
    blocks = [args[0]] if name == "remove" else list(args[0])
    listed = {block.block_id for block in queue}
    for block in blocks:
        if name == "remove" and block.block_id not in listed:
            raise IntegrityError(f"block {block.block_id} is to leave the free queue, but it is not in it")
        if name != "remove" and block.block_id in listed:
            raise IntegrityError(f"block {block.block_id} is to join the free queue, but it is in it already")
    return args if name == "remove" else (blocks, *args[1:])


def _guard_call(
    slot: str,
    part_name: str,
    function: Callable[..., Any],
    reference: Any,
    *,
    is_method: bool,
    check: Callable[[Any], None] | None = None,
) -> Callable[..., Any]:
    where = f"part {slot} ({part_name})"
    name = getattr(function, "__name__", part_name)  # a callable object has none
    operation = getattr(reference, "__name__", name)  # a function may be called anything
    growth = QUEUE_GROWTH.get(operation) if slot == "free_queue" else None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        due = args[0].num_free_blocks + growth(args[1]) if growth else None
        users = _num_users(args[0]) if operation == "find_longest_cache_hit" else None
        shown = functools.partial(_show_call, name, args[is_method:], kwargs)
        try:
            result = function(*args, **kwargs)
        except PartError:
            raise  # a part inside this part has named itself
        except Exception as error:
            text = f"{where}: {shown()} raised {type(error).__name__}: {error}.{_expectation(reference)}"
            raise PartError(text) from error
        problem = _problem(slot, operation, args, kwargs, result, is_method)
        if problem is None and users is not None and _num_users(args[0]) != users:
            problem = "reference counts have changed, and a lookup must change nothing"
        if problem is None and check is not None:
            problem = _broken_invariant(check, args[0])
        if problem is None and due is not None and args[0].num_free_blocks != due:
            problem = f"the queue holds {args[0].num_free_blocks} blocks instead of {due}"
        if problem is not None:
            raise PartError(f"{where}: after {shown()}, {problem}.{_expectation(reference)}")
        return result

    return call


def _broken_invariant(check: Callable[[Any], None], part: Any) -> str | None:
    try:
        check(part)
    except IntegrityError as error:
        return str(error)
    except Exception as error:  # the part lacks what every such part has
        return f"it could not be checked: {type(error).__name__}: {error}"
    return None


def _num_users(group: Any) -> int:
    """All reference counts of the pool together, of a group or of whoever asks all groups."""
    pool = getattr(group, "pool", None) or group.groups[0].pool
    return sum(block.ref_count for block in pool.blocks)


def _problem(
    slot: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, is_method: bool
) -> str | None:
    """What is wrong with a result, for the calls whose result the engine builds on."""
    part, given = (args[0], args[1:]) if is_method else (None, args)
    if slot == "hash_block" and not (isinstance(result, bytes) and result):
        return f"it returned {_short(result)} instead of bytes"
    if slot == "free_queue" and name == "popleft_n":
        blocks = result if isinstance(result, list) else []
        if len(blocks) != given[0] or not all(isinstance(block, KVCacheBlock) for block in blocks):
            return f"it returned {_short(result)} instead of a list of {given[0]} blocks"
    if slot in LOOKUPS and name == "find_longest_cache_hit":
        return _hit_problem(part, given[1], result)
    if slot == "coordinator" and name == "find_longest_cache_hit":
        return _common_hit_problem(part, given[1], result)
    if slot == "kv_cache_manager" and name == "get_computed_blocks":
        return _lookup_problem(given[0], result)
    if slot == "kv_cache_manager" and name == "allocate_slots" and result is not None:
        return _room_problem(part, given, kwargs)
    if slot in ("sampler", "attention"):
        return _tensor_problem(slot, name, given, result)
    return None


def _tensor_problem(slot: str, name: str, args: tuple[Any, ...], result: Any) -> str | None:
    is_tensor = isinstance(result, torch.Tensor)
    rows = args[0].shape[:1]
    if slot == "sampler" and not (is_tensor and result.shape == rows and result.dtype == torch.int64):
        return f"it returned {_short(result)} instead of int64 token ids of shape {list(rows)}"
    if name.startswith("paged_attention") and not (is_tensor and result.shape == args[0].shape):
        return (
            f"it returned {_short(result)} instead of a tensor shaped like the query, {list(args[0].shape)}"
        )
    return None


def _hit_problem(group: Any, max_length: int, result: Any) -> str | None:
    if not isinstance(result, list):
        return f"it returned {_short(result)} instead of a list of blocks"
    if len(result) * group.block_size > max_length:
        return f"it found {len(result) * group.block_size} tokens, more than the {max_length} that were asked for"
    return None


def _common_hit_problem(coordinator: Any, max_length: int, result: Any) -> str | None:
    if not (isinstance(result, tuple) and len(result) == 3 and isinstance(result[1], int)):
        return f"it returned {_short(result)} instead of (blocks of each group, number of tokens, boundary)"
    blocks, length, _ = result
    if not (isinstance(blocks, tuple) and len(blocks) == len(coordinator.groups)):
        return f"it returned {_short(blocks)} instead of a tuple with the blocks of each group"
    if not 0 <= length <= max_length:
        return f"it found {length} tokens, and {max_length} were asked for"
    for group, found in zip(coordinator.groups, blocks, strict=True):
        if len(found) * group.block_size != length:
            return (
                f"group {group.spec.group_id} has {len(found)} blocks of {group.block_size} tokens in a hit of "
                f"{length} tokens"
            )
    return None


def _room_problem(manager: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Whether the request now has slots for what it was granted."""
    bound = inspect.signature(KVCacheManager.allocate_slots).bind(manager, *args, **kwargs)
    bound.apply_defaults()
    request, asked = bound.arguments["request"], bound.arguments["num_new_tokens"]
    needed = min(
        request.num_computed_tokens + bound.arguments["num_hit_tokens"] + asked, manager.max_model_len
    )
    for group in manager.coordinator.groups:
        room = len(group.table(request.request_id)) * group.block_size
        if room < needed:
            return f"{request.request_id!r} has slots for {room} tokens and needs {needed}"
    return None


def _lookup_problem(request: Any, result: Any) -> str | None:
    if not (isinstance(result, tuple) and len(result) == 3 and isinstance(result[1], int)):
        return f"it returned {_short(result)} instead of (blocks, number of tokens, boundary)"
    if not 0 <= result[1] < request.num_tokens:
        return f"it found {result[1]} of {request.num_tokens} tokens; at least one must be left to compute"
    return None


def _expectation(reference: Any) -> str:
    doc = inspect.getdoc(reference) if reference is not None else None
    return f" Expected: {doc.splitlines()[0]}" if doc else ""


def _show_call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    named = (f"{key}={_short(value)}" for key, value in kwargs.items())
    return f"{name}({', '.join(itertools.chain(map(_short, args), named))})"


def _short(value: Any) -> str:
    if isinstance(value, KVCacheBlock):
        return f"block {value.block_id}"
    if isinstance(value, list | tuple) and value and all(isinstance(item, KVCacheBlock) for item in value):
        return f"blocks {[block.block_id for block in value]}"
    if isinstance(value, torch.Tensor):
        return f"tensor {list(value.shape)} of {value.dtype}"
    identity = getattr(value, "request_id", None)
    text = f"request {identity!r}" if identity is not None else repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 3]}..."
