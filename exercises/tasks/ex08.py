"""Tasks of exercise 08: attention with a cache, over pages, for a whole batch, and in one pass over tiles."""

from __future__ import annotations

from collections.abc import Callable

from exercises.grader import Task, WrongAnswer
from exercises.tasks.ex08_checks import (
    check_attend,
    check_bytes,
    check_cached,
    check_gather,
    check_map,
    check_online,
    check_small,
)
from exercises.tasks.ex08_paged import check_paged

# -- other right answers ------------------------------------------------------------------------------------

OTHER_ATTEND = """
def attend(query, keys, values, start, scale):
    n, num_heads, head_dim = query.shape
    total, num_kv_heads = keys.shape[:2]
    q = query.view(n, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = (q.permute(1, 2, 0, 3) @ keys.permute(1, 2, 0).unsqueeze(1)) * scale  # [kv heads, group, n, total]
    position = torch.arange(start, start + n)
    scores = scores + torch.where(torch.arange(total)[None] <= position[:, None], 0.0, float("-inf"))
    scores = (scores - scores.amax(-1, keepdim=True)).exp()
    mixed = scores @ values.transpose(0, 1).unsqueeze(1) / scores.sum(-1, keepdim=True)
    return mixed.permute(2, 0, 1, 3).reshape(n, num_heads, head_dim)
"""

OTHER_GATHER = """
def gather(cache, table, seq_len):
    block_size = cache.shape[1]
    rows = []
    for index in range(-(-seq_len // block_size)):
        rows.append(cache[int(table[index])])
    return torch.cat(rows)[:seq_len]
"""

OTHER_PAGED = """
def paged_attention(q, k_cache, v_cache, tables, starts, lens, scale, sliding_window=None, out=None):
    flat = [c.reshape(-1, *c.shape[2:]) for c in (k_cache, v_cache)]
    size = k_cache.shape[1]
    if out is None:
        out = torch.empty_like(q)
    out.zero_()
    for table, first, stop, total in zip(tables, starts[:-1], starts[1:], lens):
        where = torch.arange(int(total))
        slots = table.long()[where // size] * size + where % size
        keys, values = (c[slots].transpose(0, 1)[None] for c in flat)
        rows = q[first:stop].transpose(0, 1)[None]
        mask = torch.ones(rows.shape[2], int(total), dtype=torch.bool).tril(int(total) - rows.shape[2])
        result = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
        out[first:stop] = result[0].transpose(0, 1)
    return out
"""

OTHER_CACHED = """
class CachedAttention:
    def __init__(self):
        self.past = []

    def __call__(self, query, key, value, scale):
        self.past += zip(key, value)
        start = len(self.past) - len(query)
        rows = []
        for i in range(len(query)):
            keys, values = (torch.stack(x) for x in zip(*self.past[: start + i + 1]))
            group = query.shape[1] // keys.shape[1]
            keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
            weights = (torch.einsum("hd,khd->hk", query[i], keys) * scale).softmax(-1)
            rows.append(torch.einsum("hk,khd->hd", weights, values))
        return torch.stack(rows)
"""

OTHER_ONLINE = """
def online_attention(query, tiles, scale):
    log_sum, result = None, None
    for keys, values in tiles:
        scores = keys @ query * scale
        here = scores.logsumexp(0)
        mixed = (scores - here).exp() @ values
        if result is None:
            log_sum, result = here, mixed
            continue
        both = torch.logaddexp(log_sum, here)
        result = result * (log_sum - both).exp() + mixed * (here - both).exp()
        log_sum = both
    return result
"""

OTHER_BYTES = """
def read_bytes(seq_lens, num_kv_heads, head_dim, itemsize):
    total = 0
    for length in seq_lens:
        for what in ("keys", "values"):
            total += length * num_kv_heads * head_dim * itemsize
    return total

step_bytes = 4_194_304_000
times_moved = 3
"""

# -- wrong in more than a line -------------------------------------------------------------------------------

PADDED = """
def paged_attention(q, k_cache, v_cache, tables, starts, lens, scale, sliding_window=None, out=None):
    longest, result = int(lens.max()), torch.zeros_like(q)
    for i, total in enumerate(lens.tolist()):
        first, stop = int(starts[i]), int(starts[i + 1])
        keys, values = (gather(cache, tables[i], total) for cache in (k_cache, v_cache))
        keys, values = (torch.cat((x, x.new_zeros(longest - total, *x.shape[1:]))) for x in (keys, values))
        n = stop - first
        mask = torch.cat((torch.ones(n, total).tril(total - n), torch.ones(n, longest - total)), dim=1).bool()
        three = (x.transpose(0, 1) for x in (q[first:stop], keys, values))
        mixed = F.scaled_dot_product_attention(*three, attn_mask=mask, scale=scale, enable_gqa=True)
        result[first:stop] = mixed.transpose(0, 1)
    return result if out is None else out.copy_(result)
"""

ALL_TILES = """
def online_attention(query, tiles, scale):
    keys, values = (torch.cat(part) for part in zip(*tiles))
    return (keys @ query * scale).softmax(0) @ values
"""

TILE_MEAN = """
def online_attention(query, tiles, scale):
    parts = [(keys @ query * scale).softmax(0) @ values for keys, values in tiles]
    return sum(parts) / len(parts)
"""

HIDDEN = "hidden = torch.arange(len(keys)) > start + torch.arange(len(query))[:, None]"
REPEATED = "keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)"
SOFTMAX = "weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)"
READ = "return cache[table[positions // block_size], positions % block_size]"
CALL = "attend(query[first:stop], keys, values, total - (stop - first), scale)"
MASK = "mask = torch.ones(n, total, dtype=torch.bool).tril(total - n)"
ABOVE = "above = torch.maximum(largest, scores.max())"

TASKS = [
    Task(
        id="08.1",
        kind="predict",
        title="a batch by hand",
        points=10,
        answers={"visible": list, "slots_of_b": list, "out_shape": list},
        check=check_small,
        hints=(
            "First say at which position the first new token of each sequence stands.",
            "A query at position p sees p + 1 keys. The slot of position p is table[p // 4] * 4 + p % 4.",
            "a stands at 5, 6, 7, 8 and b at 5. b has six tokens: four in block 7 and two in block 2. The result has "
            "a row per query and a column per query head.",
        ),
        wrong=(
            WrongAnswer(
                "from the left",
                "a mask aligned to the left",
                edits=(("[6, 7, 8, 9, 6, 1, 2, 3]", "[1, 2, 3, 4, 1, 1, 2, 3]"),),
            ),
            WrongAnswer(
                "all",
                "no mask with a cache",
                edits=(("[6, 7, 8, 9, 6, 1, 2, 3]", "[9, 9, 9, 9, 6, 3, 3, 3]"),),
            ),
            WrongAnswer(
                "without itself",
                "one key too few",
                edits=(("[6, 7, 8, 9, 6, 1, 2, 3]", "[5, 6, 7, 8, 5, 0, 1, 2]"),),
            ),
            WrongAnswer("new slot", "a decode reads one slot", edits=(("[28, 29, 30, 31, 8, 9]", "[9]"),)),
            WrongAnswer(
                "whole blocks",
                "reading past the sequence",
                edits=(("[28, 29, 30, 31, 8, 9]", "[28, 29, 30, 31, 8, 9, 10, 11]"),),
            ),
            WrongAnswer("KV heads", "a result per KV head", edits=(("[8, 6, 16]", "[8, 2, 16]"),)),
        ),
        other=(
            "visible = (*range(6, 10), 6, *range(1, 4))\n"
            "slots_of_b = tuple(range(28, 32)) + (2 * 4, 2 * 4 + 1)\n"
            "out_shape = (4 + 1 + 3, 6, 16)"
        ),
    ),
    Task(
        id="08.2",
        kind="build",
        title="attention with a cache",
        points=15,
        answers={"attend": Callable},
        check=check_attend,
        hints=(
            "Compare positions: where does each key stand, and where does each query?",
            "Keys stand at torch.arange(len(keys)), queries at start + torch.arange(len(query)). Give each query head "
            "its KV head by repeat_interleave. A hidden score is minus infinity before the softmax.",
            "scores = torch.einsum('qhd,khd->hqk', query, keys) * scale; mask where key position > query position; "
            "softmax over the last dimension; torch.einsum('hqk,khd->qhd', weights, values).",
        ),
        wrong=(
            WrongAnswer(
                "no start",
                "a mask aligned to the left",
                edits=((HIDDEN, "hidden = torch.arange(len(keys)) > torch.arange(len(query))[:, None]"),),
            ),
            WrongAnswer(
                "the new tokens' triangle",
                "a square mask",
                edits=((HIDDEN, "hidden = ~torch.ones(len(query), len(query), dtype=torch.bool).tril()"),),
            ),
            WrongAnswer(
                "the triangle, moved to the right",
                "a square mask",
                edits=(
                    (
                        HIDDEN,
                        "hidden = ~F.pad(torch.ones(len(query), len(query)).tril(), (start, 0)).bool()",
                    ),
                ),
            ),
            WrongAnswer(
                "none behind the prompt",
                "no mask with a cache",
                edits=((HIDDEN, HIDDEN + "\n    hidden = hidden & (start == 0)"),),
            ),
            WrongAnswer(
                "next too", "one key too many", edits=((HIDDEN, HIDDEN.replace("> start", "> 1 + start")),)
            ),
            WrongAnswer(
                "repeat",
                "KV head by remainder",
                edits=((REPEATED, "keys, values = keys.repeat(1, group, 1), values.repeat(1, group, 1)"),),
            ),
            WrongAnswer(
                "no scale", "the scale is left out", edits=(("query, keys) * scale", "query, keys)"),)
            ),
            WrongAnswer(
                "bare exp",
                "the exponential overflows",
                edits=(
                    (
                        SOFTMAX,
                        "weights = scores.masked_fill(hidden, -torch.inf).exp()\n"
                        "    weights = weights / weights.sum(-1, keepdim=True)",
                    ),
                ),
            ),
        ),
        other=OTHER_ATTEND,
    ),
    Task(
        id="08.3",
        kind="build",
        title="the gather",
        points=10,
        answers={"gather": Callable},
        check=check_gather,
        hints=(
            "Chapter 01: a position has a block index and an offset.",
            "positions = torch.arange(seq_len); the block of each is table[positions // block_size].",
            "Index the cache with two tensors at once: cache[blocks, offsets], and block_size = cache.shape[1].",
        ),
        wrong=(
            WrongAnswer(
                "whole blocks",
                "reading past the sequence",
                edits=((READ, "return cache[table].flatten(0, 1)"),),
            ),
            WrongAnswer(
                "blocks of four",
                "an offset from another block size",
                edits=(("block_size = cache.shape[1]", "block_size = 4"),),
            ),
            WrongAnswer(
                "the first dimension",
                "an offset from another block size",
                edits=(("block_size = cache.shape[1]", "block_size = cache.shape[0]"),),
            ),
            WrongAnswer(
                "no table", "a position is a slot", edits=((READ, "return cache.flatten(0, 1)[positions]"),)
            ),
            WrongAnswer(
                "full blocks",
                "the last block is left out",
                edits=((READ, "return cache[table[: seq_len // block_size]].flatten(0, 1)"),),
            ),
        ),
        other=OTHER_GATHER,
    ),
    Task(
        id="08.4",
        kind="build",
        title="attention over pages",
        points=25,
        answers={"paged_attention": Callable},
        check=check_paged,
        hints=(
            "Go through the sequences. For each: its rows of the query, its keys, its values. You have functions for "
            "two of the three.",
            "Keys and values: gather with row i of block_tables and seq_lens[i]. The first new token stands at seq_len "
            "minus the number of new tokens.",
            "result = torch.zeros_like(query); result[first:stop] = attend(query[first:stop], keys, values, total - "
            "(stop - first), scale); at the end out.copy_(result) if there is an out.",
        ),
        wrong=(
            WrongAnswer(
                "from zero",
                "a chunk starts at position 0",
                edits=((CALL, "attend(query[first:stop], keys, values, 0, scale)"),),
            ),
            WrongAnswer(
                "row as position",
                "a row is a position",
                edits=((CALL, "attend(query[first:stop], keys, values, first, scale)"),),
            ),
            WrongAnswer(
                "everything",
                "no mask with a cache",
                edits=(
                    (
                        CALL,
                        "attend(query[first:stop], keys, values, total if total > stop - first else 0, scale)",
                    ),
                ),
            ),
            WrongAnswer(
                "first table",
                "everybody reads the first table",
                edits=(
                    (
                        "keys = gather(key_cache, block_tables[i], total)",
                        "keys = gather(key_cache, block_tables[0], total)",
                    ),
                    (
                        "values = gather(value_cache, block_tables[i], total)",
                        "values = gather(value_cache, block_tables[0], total)",
                    ),
                ),
            ),
            WrongAnswer(
                "whole blocks under a mask",
                "reading past the sequence",
                edits=(
                    (
                        "keys = gather(key_cache, block_tables[i], total)",
                        "keys = key_cache[block_tables[i]].flatten(0, 1)",
                    ),
                    (
                        "values = gather(value_cache, block_tables[i], total)",
                        "values = value_cache[block_tables[i]].flatten(0, 1)",
                    ),
                ),
            ),
            WrongAnswer("filled up with zeros", "padding takes part in the softmax", source=PADDED),
            WrongAnswer(
                "uninitialised",
                "rows of nobody are not zero",
                edits=(("torch.zeros_like(query)", "torch.full_like(query, torch.nan)"),),
            ),
            WrongAnswer(
                "usual scale",
                "the scale is taken for granted",
                edits=(("(stop - first), scale)", "(stop - first), query.shape[-1] ** -0.5)"),),
            ),
            WrongAnswer(
                "returns another",
                "out is not written",
                edits=(("return result if out is None else out.copy_(result)", "return result"),),
            ),
        ),
        other=OTHER_PAGED,
        part="attention",
    ),
    Task(
        id="08.5",
        kind="bug",
        title="the mask of a chunk",
        points=15,
        answers={"CachedAttention": type},
        check=check_cached,
        hints=(
            "Which keys does is_causal=True show to the first of four queries, when nine keys are there?",
            "torch aligns its triangle to the left edge. Yours ends at the right edge: the last query sees all keys.",
            "Pass attn_mask=torch.ones(n, total, dtype=torch.bool).tril(total - n) and no is_causal.",
        ),
        wrong=(
            WrongAnswer(
                "only without a cache",
                "no mask with a cache",
                edits=(
                    (
                        MASK,
                        "mask = torch.ones(n, total, dtype=torch.bool)\n"
                        "        mask = mask.tril() if n == total else mask",
                    ),
                ),
            ),
            WrongAnswer(
                "the new tokens' triangle",
                "a square mask",
                edits=((MASK, "mask = F.pad(torch.ones(n, n).tril(), (total - n, 0)).bool()"),),
            ),
            WrongAnswer(
                "one on", "one key too many", edits=((MASK, MASK.replace("total - n)", "total - n + 1)")),)
            ),
            WrongAnswer(
                "still at the left",
                "a mask aligned to the left",
                edits=((MASK, "mask = torch.ones(n, total, dtype=torch.bool).tril()"),),
            ),
        ),
        other=OTHER_CACHED,
    ),
    Task(
        id="08.6",
        kind="map",
        title="where it is in vLLM",
        points=10,
        answers={"writes": dict, "table_in_v0": str, "chunk": dict, "decode": dict},
        check=check_map,
        hints=(
            "Every answer stands in the column vLLM; the first column says which line is about what.",
            "A chunk has a prefix in the cache. Tables are given sequence by sequence, in a method with an underscore.",
            "reshape_and_cache_flash and do_kv_cache_update write; forward_prefix and forward_decode are V0's two; in "
            "V1 FlashAttentionImpl.forward takes both.",
        ),
        wrong=(
            WrongAnswer(
                "inside",
                "attention writes its keys",
                edits=(("FlashAttentionImpl.do_kv_cache_update", "FlashAttentionImpl.forward"),),
            ),
            WrongAnswer(
                "the builder",
                "the batch decides for one",
                edits=(
                    ("FlashAttentionMetadataBuilder._add_seq_group", "FlashAttentionMetadataBuilder.build"),
                ),
            ),
            WrongAnswer(
                "decode for both",
                "a chunk is a decode",
                edits=(("PagedAttention.forward_prefix", "PagedAttention.forward_decode"),),
            ),
        ),
        other=(
            'writes = dict(V0="reshape_and_cache_flash", V1="FlashAttentionImpl.do_kv_cache_update")\n'
            'table_in_v0 = "FlashAttentionMetadataBuilder._add_seq_group"\n'
            'chunk, decode = ({"V1": "FlashAttentionImpl.forward", "V0": f"PagedAttention.forward_{which}"}\n'
            '                 for which in ("prefix", "decode"))'
        ),
    ),
    Task(
        id="08.7",
        kind="build",
        title="the softmax that never sees all its scores",
        points=20,
        answers={"online_attention": Callable},
        check=check_online,
        hints=(
            "Carry three things from tile to tile: the largest score so far, the sum of exponentials under it, and the "
            "values mixed with the same exponentials.",
            "When a tile brings a larger score, what was summed so far shrinks by exp(old largest - new largest).",
            "Begin with minus infinity, 0 and zeros. Per tile: above = max(largest, scores.max()), shrink = "
            "exp(largest - above), weights = exp(scores - above); sum and mixture are both old * shrink + new. "
            "At the end divide.",
        ),
        wrong=(
            WrongAnswer(
                "no maximum",
                "the exponential overflows",
                edits=(
                    (ABOVE, "above = torch.zeros_like(largest)"),
                    ("query.new_tensor(-torch.inf)", "query.new_tensor(0.0)"),
                ),
            ),
            WrongAnswer(
                "no rescale",
                "old sums are not rescaled",
                edits=(
                    ("total = total * shrink", "total = total"),
                    ("mixed = mixed * shrink", "mixed = mixed"),
                ),
            ),
            WrongAnswer(
                "half", "only the sum is rescaled", edits=(("mixed = mixed * shrink", "mixed = mixed"),)
            ),
            WrongAnswer("mean", "tiles are averaged", source=TILE_MEAN),
            WrongAnswer(
                "from 0",
                "the maximum starts at 0",
                edits=(("query.new_tensor(-torch.inf)", "query.new_tensor(0.0)"),),
            ),
            WrongAnswer("per tile", "the maximum falls", edits=((ABOVE, "above = scores.max()"),)),
            WrongAnswer("all", "the tiles are kept", source=ALL_TILES),
        ),
        other=OTHER_ONLINE,
    ),
    Task(
        id="08.8",
        kind="measure",
        title="bytes",
        points=15,
        answers={"read_bytes": Callable, "step_bytes": int, "times_moved": float},
        check=check_bytes,
        hints=(
            "How many numbers does the cache hold for one token in one layer?",
            "2 * num_kv_heads * head_dim numbers per token; query heads do not count. Times 32 layers for the step.",
            "2 * sum(seq_lens) * num_kv_heads * head_dim * itemsize. In the table: everything moved, over what the "
            "gather reads.",
        ),
        wrong=(
            WrongAnswer("keys", "values are left out", edits=(("return 2 * sum", "return sum"),)),
            WrongAnswer(
                "longest",
                "everybody is as long as the longest",
                edits=(("sum(seq_lens)", "max(seq_lens) * len(seq_lens)"),),
            ),
            WrongAnswer("constant", "one token is read", edits=(("sum(seq_lens)", "len(seq_lens)"),)),
            WrongAnswer(
                "query heads",
                "counted with query heads",
                edits=(("[2000] * 16, 8, 128, 2)", "[2000] * 16, 32, 128, 2)"),),
            ),
            WrongAnswer("a layer", "one layer", edits=(("= 32 * read_bytes", "= read_bytes"),)),
            WrongAnswer("free", "a copy is free", edits=(("times_moved = 3", "times_moved = 1"),)),
            WrongAnswer("written", "the copy is not read", edits=(("times_moved = 3", "times_moved = 2"),)),
        ),
        other=OTHER_BYTES,
    ),
]
