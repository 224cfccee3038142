"""Why is my hit 0? What each group could have served, what all of them could, and what was missing.

    print(explain_hit(manager, request))

It asks the same questions as a lookup and changes nothing.
vLLM: V0 and V1 none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from refengine.v1.groups.base import GroupManager
from refengine.v1.groups.spec import FULL_ATTENTION, MAMBA, hash_block_size
from refengine.v1.kv_cache_manager import KVCacheManager
from refengine.v1.request import Request


@dataclass(frozen=True)
class GroupHit:
    """One group's side of a lookup. `alone`: tokens that it could serve if no other group had a say."""

    group_id: int
    kind: str
    block_size: int  # tokens
    alone: int  # tokens
    missing: tuple[
        int, ...
    ]  # positions of blocks that it would need to serve `wanted` tokens, and does not find
    reason: str


@dataclass(frozen=True)
class HitReport:
    """A lookup, taken apart. All lengths in tokens."""

    num_tokens: int
    limit: int  # one token has to be left to compute
    hash_block_size: int
    alignment: int  # every hit is a multiple of it
    wanted: int  # what some group could serve, or if none can serve anything: the longest hit there could be
    hit: int
    boundary: int  # the shared-prefix boundary; 0: no group had more than the common hit
    groups: tuple[GroupHit, ...]
    note: str = ""  # a reason that is the same for all groups

    def __str__(self) -> str:
        lines = [
            f"{self.num_tokens} tokens, at most {self.limit} from the cache; "
            f"a hash per {self.hash_block_size} tokens, hits in multiples of {self.alignment}"
        ]
        lines += [
            f"group {group.group_id} {group.kind}, blocks of {group.block_size}: alone {group.alone}\n"
            f"    {group.reason}"
            for group in self.groups
        ]
        boundary = f", shared-prefix boundary {self.boundary}" if self.boundary else ""
        return "\n".join([*lines, f"common hit {self.hit}{boundary}", *filter(None, [self.note])])


def explain_hit(manager: KVCacheManager, request: Request) -> HitReport:
    """Takes the lookup apart that `get_computed_blocks` would do now. Mutates nothing."""
    coordinator, limit = manager.coordinator, request.num_tokens - 1
    unit = coordinator.alignment
    hit = boundary = 0
    note = "" if manager.enable_caching else "prefix caching is off"
    if manager.enable_caching and request.skip_reading_prefix_cache:
        note = "this request does not read the cache: scores of its prompt come out of computing it"
    if not note:
        _, hit, boundary = coordinator.find_longest_cache_hit(request.block_hashes, limit)
    alone = [
        0 if note else _alone(group, request, limit, coordinator.drop_last) for group in coordinator.groups
    ]
    wanted = max(alone) or limit // unit * unit
    return HitReport(
        num_tokens=request.num_tokens,
        limit=limit,
        hash_block_size=hash_block_size([group.spec for group in coordinator.groups]),
        alignment=unit,
        wanted=wanted,
        hit=hit,
        boundary=boundary,
        groups=tuple(
            _explained(group, request, length, wanted)
            for group, length in zip(coordinator.groups, alone, strict=True)
        ),
        note=note,
    )


def _alone(group: GroupManager, request: Request, limit: int, drop_last: bool) -> int:
    hashes = group.spec.hashes(request.block_hashes)
    blocks = group.find_longest_cache_hit(hashes, limit, drop_last and group.drops_last)
    unit = group.retention.alignment
    return len(blocks) * group.block_size // unit * unit


def _explained(group: GroupManager, request: Request, alone: int, wanted: int) -> GroupHit:
    hashes = group.spec.hashes(request.block_hashes)
    needed = group.needed_positions(wanted)
    missing = tuple(i for i in needed if group.cached_block(hashes[i]) is None)
    reason = _reason(group, needed, missing, wanted)
    return GroupHit(group.spec.group_id, group.spec.kind, group.block_size, alone, missing, reason)


def _reason(group: GroupManager, needed: Sequence[int], missing: Sequence[int], wanted: int) -> str:
    if not wanted:
        return f"fewer tokens than the {group.retention.alignment} that a hit comes in"
    if not missing:
        return f"all that {wanted} tokens need is there"
    if group.spec.kind == MAMBA:
        return f"no state after {wanted} tokens"
    first = missing[0]
    where = f"block {first} (tokens {first * group.block_size} to {(first + 1) * group.block_size - 1})"
    if group.spec.kind == FULL_ATTENTION:
        return f"{where} is the first that is not there"
    return f"{wanted} tokens need blocks {needed[0]} to {needed[-1]}, and {where} is not there"
