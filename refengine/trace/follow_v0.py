"""What V0's functions decided about one request, read off their own variables.

One entry per function of the code map's path; see `Teller`. Each `see` takes what the function has in its hands
when it returns, so a fact here is what the engine went on with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refengine.trace.follow_v1 import GENERATE
from refengine.trace.watch import Facts, Teller, Variables, returned
from refengine.trace.words import blocks, count, ranges, slots, span

# -- the scheduler ------------------------------------------------------------------------------------------


def _step(variables: Variables, result: Any) -> Facts | None:
    return {"num_tokens": variables["scheduled"].num_batched_tokens}


def _schedule(variables: Variables, result: Any) -> Facts | None:
    if not result[0]:
        return None
    (metadata,) = result[0]
    return {"kind": "prompt" if metadata.is_prompt else "decode", "chunk": metadata.token_chunk_size}


def _tell_schedule(facts: list[Facts]) -> str:
    its = facts[0]
    cached = ", cached ones included" if its["kind"] == "prompt" else ""
    return f"{its['kind']}: {count(its['chunk'], 'token')}{cached}"


def _running(variables: Variables, result: Any) -> Facts | None:
    scheduled = [*result.prefills, *result.decodes]
    return {"chunk": scheduled[0].token_chunk_size} if scheduled else None


def _prefills(variables: Variables, result: Any) -> Facts | None:
    if not result.prefills:
        return None
    (share,) = result.prefills
    return {"chunk": share.token_chunk_size, "cached": variables["cached"], "uncached": variables["uncached"]}


def _tell_prefills(facts: list[Facts]) -> str:
    its = facts[0]
    return (
        f"admitted: token_chunk_size = {its['uncached']} uncached + {its['cached']} cached = {its['chunk']}"
    )


def _new_tokens(variables: Variables, result: Any) -> Facts | None:
    uncached, cached = result
    return {"uncached": uncached, "cached": cached}


def _tell_new_tokens(facts: list[Facts]) -> str:
    its = facts[0]
    free = f"; {count(its['cached'], 'cached token')} cost nothing" if its["cached"] else ""
    return f"{count(its['uncached'], 'token')} charged to the budget{free}"


def _metadata(variables: Variables, result: Any) -> Facts | None:
    (table,) = result.block_tables.values()
    return {
        "computed_block_nums": result.computed_block_nums,
        "chunk": result.token_chunk_size,
        "block_table": list(table),
    }


def _tell_metadata(facts: list[Facts]) -> str:
    its = facts[0]
    return f"to the worker: computed_block_nums {ranges(its['computed_block_nums'])}, chunk {its['chunk']}"


# -- the block manager --------------------------------------------------------------------------------------


def _tell_door(facts: list[Facts]) -> str:
    return f"passes the question on: {count(facts[-1]['hit_tokens'], 'token')}"


def _tracked(variables: Variables, result: Any) -> Facts | None:
    seq, faithful = variables["seq"], variables["self"].faithful
    kept = ("its first look" if faithful else "its admission") if seq.is_prefill else None
    return {"hit_tokens": result, "num_tokens": len(seq), "kept_from": kept}


def _tell_tracked(facts: list[Facts]) -> str:
    its = facts[-1]
    kept = f"; kept from {its['kept_from']} on" if its["kept_from"] else ""
    return f"hit {its['hit_tokens']} of {count(its['num_tokens'], 'token')}{kept}"


def _prefix(variables: Variables, result: Any) -> Facts | None:
    return {"found": result, "asked": len(variables["hashes"]), "bisected": variables["self"].faithful}


def _tell_prefix(facts: list[Facts]) -> str:
    its = facts[-1]
    how = "by bisection" if its["bisected"] else "left to right"
    return f"{how}: {its['found']} of {count(its['asked'], 'full block')} cached and computed"


def _can_allocate(variables: Variables, result: Any) -> Facts | None:
    return {"status": result.value, "needed": variables["needed"], "free": variables.get("free")}


def _tell_can_allocate(facts: list[Facts]) -> str:
    its = facts[-1]
    free = f" of {its['free']} free" if its["free"] is not None else ""
    return f"{its['status']}: {count(its['needed'], 'block')}{free}; hits are not subtracted"


def _table(variables: Variables, result: Any) -> Facts | None:
    return {"block_table": variables["table"].block_ids}


def _tell_allocate(facts: list[Facts]) -> str:
    return f"the whole prompt gets its block table: {ranges(facts[0]['block_table'])}"


def _immutable(variables: Variables, result: Any) -> Facts | None:
    shared = variables["self"].trackers[result.block_id].computed
    return {"block_id": result.block_id, "shared": shared}


def _tell_immutable(facts: list[Facts]) -> str:
    found = [each["block_id"] for each in facts if each["shared"]]
    new = [each["block_id"] for each in facts if not each["shared"]]
    parts = [f"{blocks(found)} taken from the cache"] if found else []
    parts += [f"{blocks(new)} new"] if new else []
    return f"{count(len(facts), 'full block')}: {', '.join(parts)}"


def _tell_append(facts: list[Facts]) -> str:
    return f"room for the newest token: block table {ranges(facts[0]['block_table'])}"


def _tell_common(facts: list[Facts]) -> str:
    ids = facts[0]["block_ids"]
    return f"computed blocks, as ids: {ranges(ids)}" if ids else "no block is computed"


def _tell_marked(facts: list[Facts]) -> str:
    ids = facts[0]["block_ids"]
    if not ids:
        return "no block becomes full"
    verb = "counts" if len(ids) == 1 else "count"
    return f"{blocks(ids)} {verb} as computed from now on, before the model has run"


# -- the worker ---------------------------------------------------------------------------------------------


def _execute(variables: Variables, result: Any) -> Facts | None:
    out = variables["out"]
    return {"swapped": len(out.blocks_to_swap_in + out.blocks_to_swap_out), "copied": len(out.blocks_to_copy)}


def _tell_execute(facts: list[Facts]) -> str:
    orders = facts[0]["swapped"] + facts[0]["copied"]
    moved = count(orders, "block") if orders else "no block"
    return f"input per sequence, then memory orders ({moved} to move), then the model"


def _arrived(variables: Variables, result: Any) -> Facts | None:
    return {"computed_block_nums": variables["metadata"].computed_block_nums}


def _tell_arrived(facts: list[Facts]) -> str:
    return f"computed_block_nums {ranges(facts[0]['computed_block_nums'])} arrive; a list of functions runs"


def _lens(variables: Variables, result: Any) -> Facts | None:
    seq = variables["seq"]
    return {"start": seq.context_len, "num_tokens": seq.query_len}


def _tell_lens(facts: list[Facts]) -> str:
    its = facts[0]
    return f"first guess, cache not looked at: {span('position', its['start'], its['num_tokens'])}"


def _skipped(variables: Variables, result: Any) -> Facts | None:
    seq = variables["seq"]
    return {
        "is_prompt": seq.is_prompt,
        "hit": seq.prefix_cache_hit,
        "skipped": seq.context_len - seq.num_computed_tokens if seq.is_prompt else 0,
        "cached": seq.num_cached_tokens,
        "left": seq.query_len,
    }


def _tell_skipped(facts: list[Facts]) -> str:
    its = facts[0]
    if not its["is_prompt"]:
        return "a decode: computed_block_nums is ignored"
    if not its["hit"]:
        return "no hit: nothing is skipped"
    again = "; full hit, so the last one runs again" if its["skipped"] < its["cached"] else ""
    return f"{count(its['skipped'], 'token')} skipped: {its['left']} left{again}"


def _built(variables: Variables, result: Any) -> Facts | None:
    return {"positions": result.input_positions, "reads_pages": any(result.block_tables)}


def _tell_built(facts: list[Facts]) -> str:
    its = facts[0]
    pages = "the block table goes along" if its["reads_pages"] else "no block table: no page is read"
    return f"{span('position', its['positions'][0], len(its['positions']))}; {pages}"


def _slot_mapping(variables: Variables, result: Any) -> Facts | None:
    return {"slots": result, "start": variables["context_len"]}


def _tell_slot_mapping(facts: list[Facts]) -> str:
    return f"{slots(facts[0]['slots'])}, from position {facts[0]['start']} on"


def _attention(variables: Variables, result: Any) -> Facts | None:
    prompts, given = variables["n"], variables["self"].input
    kernel = "decode" if not prompts else "prompt, pages" if any(given.block_tables) else "prompt, no pages"
    return {"layer": variables["layer"], "kernel": kernel, "num_queries": len(variables["query"])}


def _tell_attention(facts: list[Facts]) -> str:
    how = {
        "decode": "the decode kernel",
        "prompt, pages": "the prompt kernel, which reads pages",
        "prompt, no pages": "attention among themselves: no page is read",
    }
    tokens, kernel = count(facts[0]["num_queries"], "token"), how[facts[0]["kernel"]]
    return f"{count(len(facts), 'layer')}, {tokens}: K/V written, then {kernel}"


def _updated(variables: Variables, result: Any) -> Facts | None:
    if not variables["scheduled"].scheduled:
        return None
    (share,) = variables["scheduled"].scheduled
    return {
        "token_ids": variables["sampled"].sampled.get(share.group.request_id, []),
        "chunk": share.token_chunk_size,
        "num_tokens": len(share.group.first_seq),
    }


def _tell_updated(facts: list[Facts]) -> str:
    its = facts[0]
    joins = f"; token {ranges(its['token_ids'])} joins" if its["token_ids"] else ""
    return f"num_computed_tokens += {its['chunk']}{joins}: {its['num_tokens']} tokens now"


HOME = "refengine.v0"
STEP = f"{HOME}.engine.LLMEngine.step"
CACHE = f"{HOME}.prefix_caching.PrefixCachingBlockAllocator"
BUILDER = f"{HOME}.model_input.ModelInputBuilder"
TELLERS: Mapping[str, Teller] = {
    "refengine.llm.LLM.generate": GENERATE,
    STEP: Teller(_step, lambda facts: f"schedule, execute, update: {count(facts[0]['num_tokens'], 'token')}"),
    f"{HOME}.scheduler.Scheduler.schedule": Teller(_schedule, _tell_schedule),
    f"{HOME}.phases.SchedulerPhases._schedule_running": Teller(
        _running, lambda facts: f"goes on: {count(facts[0]['chunk'], 'token')}"
    ),
    f"{HOME}.phases.SchedulerPhases._schedule_prefills": Teller(_prefills, _tell_prefills),
    f"{HOME}.phases.SchedulerPhases._num_new_tokens": Teller(_new_tokens, _tell_new_tokens),
    f"{HOME}.scheduler.Scheduler._metadata": Teller(_metadata, _tell_metadata, at_end=True),
    f"{HOME}.block_manager.BlockManager.get_num_cached_tokens": Teller(returned("hit_tokens"), _tell_door),
    f"{HOME}.tracker.ComputedBlocksTracker.get_num_cached_tokens": Teller(_tracked, _tell_tracked),
    f"{CACHE}.find_cached_blocks_prefix": Teller(_prefix, _tell_prefix),
    f"{HOME}.block_manager.BlockManager.can_allocate": Teller(_can_allocate, _tell_can_allocate),
    f"{HOME}.block_manager.BlockManager.allocate": Teller(_table, _tell_allocate),
    f"{CACHE}.allocate_immutable_block": Teller(_immutable, _tell_immutable),
    f"{HOME}.block_manager.BlockManager.append_slots": Teller(_table, _tell_append),
    f"{HOME}.block_manager.BlockManager.get_common_computed_block_ids": Teller(
        returned("block_ids"), _tell_common
    ),
    f"{HOME}.block_manager.BlockManager.mark_blocks_as_computed": Teller(returned("block_ids"), _tell_marked),
    f"{HOME}.worker.Worker.execute": Teller(_execute, _tell_execute),
    f"{BUILDER}.add_seq_group": Teller(_arrived, _tell_arrived),
    f"{BUILDER}.compute_lens": Teller(_lens, _tell_lens),
    f"{BUILDER}.compute_for_prefix_cache_hit": Teller(_skipped, _tell_skipped),
    f"{BUILDER}.build": Teller(_built, _tell_built),
    f"{HOME}.model_input.compute_slot_mapping": Teller(_slot_mapping, _tell_slot_mapping),
    f"{HOME}.worker.PhasedAttention.__call__": Teller(_attention, _tell_attention),
    f"{HOME}.engine.LLMEngine._update": Teller(_updated, _tell_updated),
}
