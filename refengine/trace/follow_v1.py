"""What V1's functions decided about one request, read off their own variables.

One entry per function of the code map's path; see `Teller`. Each `see` takes what the function has in its hands
when it returns, so a fact here is what the engine went on with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refengine.trace.watch import Facts, Teller, Variables
from refengine.trace.words import blocks, count, ranges, slots, span

Group = list[Any]  # KVCacheBlocks


def _ids(group: Group) -> list[int]:
    return [block.block_id for block in group]


# -- before the first step ----------------------------------------------------------------------------------


def _generate(variables: Variables, result: Any) -> Facts | None:
    (output,) = result
    return {"request_id": output.request_id, "num_tokens": len(output.prompt_token_ids)}


def tell_generate(facts: list[Facts]) -> str:
    """The words for `LLM.generate`, which both generations have in common."""
    return f"{count(facts[0]['num_tokens'], 'prompt token')}, entered as {facts[0]['request_id']}"


GENERATE = Teller(_generate, tell_generate)


def _hashes(variables: Variables, result: Any) -> Facts | None:
    request = variables["self"]
    hasher = request._hasher
    if hasher is None or (request.num_output_tokens and request.num_tokens % hasher.block_size):
        return None  # no block became full
    return {"num_full": len(request.block_hashes), "num_tokens": request.num_tokens}


def _tell_hashes(facts: list[Facts]) -> str:
    return f"{count(facts[-1]['num_full'], 'full block')} hashed; the request carries its hashes"


# -- the scheduler ------------------------------------------------------------------------------------------


def _step(variables: Variables, result: Any) -> Facts | None:
    return {"num_tokens": variables["scheduler_output"].total_num_scheduled_tokens}


def _schedule(variables: Variables, result: Any) -> Facts | None:
    if not result.scheduled:
        return None
    (share,) = result.scheduled
    return {"kind": share.kind, "num_tokens": share.num_tokens, "start": share.num_computed_tokens}


def _tell_schedule(facts: list[Facts]) -> str:
    share = facts[0]
    return f"{share['kind']} request: {count(share['num_tokens'], 'token')} from position {share['start']} on"


def _running(variables: Variables, result: Any) -> Facts | None:
    request = variables.get("request")
    if request is None:
        return None
    computed = request.num_computed_tokens
    return {"num_tokens": request.num_tokens, "computed": computed, "new": variables["num_new_tokens"]}


def _tell_running(facts: list[Facts]) -> str:
    its = facts[0]
    return f"num_new_tokens = {its['num_tokens']} known - {its['computed']} computed = {its['new']}"


def _waiting(variables: Variables, result: Any) -> Facts | None:
    if variables.get("new_blocks") is None:
        return None
    request, hit = variables["request"], variables["num_hit_tokens"]
    return {"num_tokens": request.num_tokens, "skipped": hit, "new": variables["num_new_tokens"]}


def _tell_waiting(facts: list[Facts]) -> str:
    its = facts[0]
    left, new = its["num_tokens"] - its["skipped"], its["new"]
    cut = f", cut to {new}" if new < left else ""
    skips = f"{count(its['skipped'], 'token')} skipped" if its["skipped"] else "nothing to skip"
    return f"num_new_tokens = {its['num_tokens']} - {its['skipped']} = {left}{cut}: {skips}"


def _commit(variables: Variables, result: Any) -> Facts | None:
    if not result.scheduled:
        return None
    (share,) = result.scheduled
    return {"computed": share.num_computed_tokens + share.num_tokens}


def _tell_commit(facts: list[Facts]) -> str:
    return f"num_computed_tokens = {facts[0]['computed']} from here on, before the model has run"


# -- the cache ----------------------------------------------------------------------------------------------


def _computed(variables: Variables, result: Any) -> Facts | None:
    hits, num_tokens, _ = result
    most = variables.get("max_cache_hit_length")  # None: the request may not look
    return {"hit_tokens": num_tokens, "block_ids": _ids(hits.blocks[0]), "most": most}


def _tell_computed(facts: list[Facts]) -> str:
    its = facts[0]
    if its["most"] is None:
        return "hit 0: this request does not look"
    found = f", {blocks(its['block_ids'])}" if its["block_ids"] else ""
    return f"hit {count(its['hit_tokens'], 'token')}{found}; at most {its['most']}, since one must run"


def _coordinated(variables: Variables, result: Any) -> Facts | None:
    hits, num_tokens, _ = result
    return {"hit_tokens": num_tokens, "block_ids": _ids(hits[0])}


def _tell_coordinated(facts: list[Facts]) -> str:
    return f"one group, so its {count(facts[0]['hit_tokens'], 'token')} are the answer"


def _walked(variables: Variables, result: Any) -> Facts | None:
    most = variables["max_length"] // variables["self"].block_size
    return {"block_ids": _ids(result), "asked": min(len(variables["block_hashes"]), most)}


def _tell_walked(facts: list[Facts]) -> str:
    found, asked = len(facts[0]["block_ids"]), facts[0]["asked"]
    end = "no miss" if found == asked else "then a miss"
    return f"left to right: {found} of {count(asked, 'full block')} found, {end}"


def _looked_up(variables: Variables, result: Any) -> Facts | None:
    return {"block_id": result[0].block_id if result else None}


def _tell_looked_up(facts: list[Facts]) -> str:
    found = [each["block_id"] for each in facts if each["block_id"] is not None]
    miss = ", then none" if len(found) < len(facts) else ""
    return f"asked {count(len(facts), 'time')}: {blocks(found)}{miss}"


def _slots(variables: Variables, result: Any) -> Facts | None:
    required, free = variables["required"], variables["self"].block_pool.num_free_blocks
    new = None if result is None else _ids(result.blocks[0])
    return {"admitted": result is not None, "required": required, "block_ids": new, "free_after": free}


def _tell_slots(facts: list[Facts]) -> str:
    its = facts[-1]
    if not its["admitted"]:
        return f"not now: {count(its['required'], 'free block')} needed"
    return f"yes: it takes {count(its['required'], 'free block')}, {its['free_after']} are left"


def _touched(variables: Variables, result: Any) -> Facts | None:
    its = variables["blocks"]
    revived = [block.block_id for block in its if block.ref_count == 1]
    return {"block_ids": _ids(its), "revived": revived} if its else None


def _tell_touched(facts: list[Facts]) -> str:
    its = facts[0]
    shared = [i for i in its["block_ids"] if i not in its["revived"]]
    parts = [f"{blocks(its['revived'])} out of the free queue"] if its["revived"] else []
    parts += [f"{blocks(shared)} shared with others"] if shared else []
    return ", ".join(parts) + "; one user more each"


def _new_blocks(variables: Variables, result: Any) -> Facts | None:
    return {"block_ids": _ids(result)}


def _tell_new_blocks(facts: list[Facts]) -> str:
    ids = facts[0]["block_ids"]
    return f"{blocks(ids)}, from the front of the free queue" if ids else "none: the last block has room"


def _published(variables: Variables, result: Any) -> Facts | None:
    return {"block_ids": _ids(variables["blocks"][variables["num_cached"] : variables["num_full"]])}


def _tell_published(facts: list[Facts]) -> str:
    return f"{blocks(facts[0]['block_ids'])} can be found from now on, before the model has run"


# -- the worker ---------------------------------------------------------------------------------------------


def _states(variables: Variables, result: Any) -> Facts | None:
    batch = variables["self"].batch
    if not variables["output"].scheduled:
        return None
    (share,) = variables["output"].scheduled
    row = batch.row_of[share.request_id]
    table = batch.block_table[row, : batch.num_blocks[row]].tolist()
    return {"row": row, "computed": int(batch.num_computed_tokens[row]), "block_table": table}


def _tell_states(facts: list[Facts]) -> str:
    its = facts[0]
    return f"row {its['row']}: {its['computed']} computed, block table {ranges(its['block_table'])}"


def _inputs(variables: Variables, result: Any) -> Facts | None:
    metadata = result.metadata
    return {"positions": result.positions.tolist(), "slots": metadata.slot_mapping.tolist()}


def _tell_inputs(facts: list[Facts]) -> str:
    positions = facts[0]["positions"]
    return f"{span('position', positions[0], len(positions))}, {slots(facts[0]['slots'])}"


def _attention(variables: Variables, result: Any) -> Facts | None:
    return {"layer": variables["layer"], "num_queries": len(variables["query"])}


def _tell_attention(facts: list[Facts]) -> str:
    tokens = count(facts[0]["num_queries"], "token")
    return f"{count(len(facts), 'layer')}, {tokens}: K/V written, then all pages of the request read"


def _updated(variables: Variables, result: Any) -> Facts | None:
    if not result:
        return None
    ((_, token_ids),) = result.items()
    return {"token_ids": token_ids, "num_tokens": variables["request"].num_tokens}


def _tell_updated(facts: list[Facts]) -> str:
    its = facts[0]
    return f"token {ranges(its['token_ids'])} joins: {its['num_tokens']} tokens now"


HOME = "refengine.v1"
STEP = f"{HOME}.engine.EngineCore.step"
TELLERS: Mapping[str, Teller] = {
    "refengine.llm.LLM.generate": GENERATE,
    f"{HOME}.request.Request._extend_hashes": Teller(_hashes, _tell_hashes),
    STEP: Teller(_step, lambda facts: f"schedule, execute, update: {count(facts[0]['num_tokens'], 'token')}"),
    f"{HOME}.scheduler.Scheduler.schedule": Teller(_schedule, _tell_schedule),
    f"{HOME}.scheduler.Scheduler._schedule_running": Teller(_running, _tell_running, at_end=True),
    f"{HOME}.scheduler.Scheduler._schedule_waiting": Teller(_waiting, _tell_waiting, at_end=True),
    f"{HOME}.scheduler.Scheduler._commit": Teller(_commit, _tell_commit),
    f"{HOME}.kv_cache_manager.KVCacheManager.get_computed_blocks": Teller(_computed, _tell_computed),
    f"{HOME}.kv_cache_manager.KVCacheManager.allocate_slots": Teller(_slots, _tell_slots),
    f"{HOME}.coordinator.UnitaryKVCacheCoordinator.find_longest_cache_hit": Teller(
        _coordinated, _tell_coordinated
    ),
    f"{HOME}.groups.full_attention.FullAttentionManager.find_longest_cache_hit": Teller(
        _walked, _tell_walked
    ),
    f"{HOME}.block_pool.BlockPool.get_cached_block": Teller(_looked_up, _tell_looked_up),
    f"{HOME}.block_pool.BlockPool.touch": Teller(_touched, _tell_touched),
    f"{HOME}.block_pool.BlockPool.get_new_blocks": Teller(_new_blocks, _tell_new_blocks),
    f"{HOME}.block_pool.BlockPool.cache_full_blocks": Teller(_published, _tell_published),
    f"{HOME}.model_runner.ModelRunner._update_states": Teller(_states, _tell_states),
    f"{HOME}.model_runner.ModelRunner._prepare_inputs": Teller(_inputs, _tell_inputs),
    "refengine.attention.PagedAttention.__call__": Teller(_attention, _tell_attention),
    f"{HOME}.scheduler.Scheduler.update": Teller(_updated, _tell_updated),
}
