"""Right answers to exercise 11, each written in another style than the solution."""

COUNT = """
places = 396
blocks = 1 * 8
splits = max(n for n in range(1, places) if n * blocks <= places)
num_bytes = 128 * 2**20
floor_us = 27
waiting = 29090
empty = tuple(max(0, places - 8 * n) for n in (1, 8, 49, 64))
"""

MERGE = """
def merge(results, log_sums):
    whole = torch.logsumexp(log_sums, 0)
    out = torch.zeros_like(results[0])
    for result, log_sum in zip(results, log_sums):
        for head in range(len(log_sum)):
            if log_sum[head] > -math.inf:
                out[head] += (log_sum[head] - whole[head]).exp() * result[head]
    return out, whole
"""

SHARES = """
def shares(seq_len, num_splits, step, window):
    first = max(0, seq_len - window)
    rounds = [(at, min(step, seq_len - at)) for at in range(first, seq_len, step)]
    most = -(-len(rounds) // num_splits)
    found = []
    for split in range(num_splits):
        own = rounds[split * most : (split + 1) * most]
        found.append((own[0][0] if own else seq_len, sum(count for _, count in own)))
    return found
"""

SPLIT = """
@cuda.jit
def decode_split(out, lse, q, k, v, tables, lens, scale):
    lane = cuda.laneid
    seq, head, split = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
    group = q.shape[1] // k.shape[2]
    n, splits, block_size = lens[seq], cuda.gridDim.z, k.shape[1]
    size = n // splits + (1 if n % splits else 0)
    result = cuda.local.array(2, float32)
    result[0], result[1] = 0, 0
    log_sum = float32(-math.inf)
    position = split * size
    while position < n and position < split * size + size:
        block, offset = tables[seq, position // block_size], position % block_size
        dot = float32(0)
        for j in range(2):
            dot += q[seq, head, 32 * j + lane] * k[block, offset, head // group, 32 * j + lane]
        score = scale * warp_sum(dot)
        top = max(log_sum, score)
        both = top + math.log(math.exp(log_sum - top) + math.exp(score - top))
        for j in range(2):
            number = v[block, offset, head // group, 32 * j + lane]
            result[j] = result[j] * math.exp(log_sum - both) + number * math.exp(score - both)
        log_sum = both
        position += 1
    for j in range(2):
        out[seq, head, split, 32 * j + lane] = result[j]
    if lane == 31:
        lse[seq, head, split] = log_sum
"""

MERGE_PARTS = """
@cuda.jit
def merge_parts(out, partial, log_sums):
    seq, head, d = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    top, total, mixed = float32(-3e38), float32(0), float32(0)
    for part in range(partial.shape[2]):
        log_sum = log_sums[seq, head, part]
        if log_sum > -3e38:
            above = max(top, log_sum)
            total = total * math.exp(top - above) + math.exp(log_sum - above)
            mixed = mixed * math.exp(top - above) + math.exp(log_sum - above) * partial[seq, head, part, d]
            top = above
    if total == 0:
        out[seq, head, d] = 0
    else:
        out[seq, head, d] = mixed / total
"""

MAP = """
splits_in_v0 = "paged_attention_" + "v2"
decides = "PagedAttention.forward_decode"
chunks, merges = "context_attention_fwd", "merge_attn_states"
asked = ((1, 300), (1, 3000), (32, 3000), (32, 9000))
takes = tuple("v2" if n > 8192 or (n > 512 and seqs * 32 <= 512) else "v1" for seqs, n in asked)
"""

LIMIT = """
def limit(operations, num_bytes, peak, bandwidth):
    if operations * bandwidth >= num_bytes * peak:
        return operations / peak, "arithmetic"
    return num_bytes / bandwidth, "memory"

per_byte = (4, 32)
queries = 4
"""

TILE = """
@cuda.jit
def attend_tile(out, query, key_cache, value_cache, table, seq_len, scale):
    lane, warp, head = cuda.threadIdx.x, cuda.threadIdx.y, cuda.blockIdx.y
    keys = cuda.shared.array(64, float32)
    values = cuda.shared.array(64, float32)
    n, block_size = query.shape[0], key_cache.shape[1]
    kv_head = head * key_cache.shape[2] // query.shape[1]
    row = 4 * cuda.blockIdx.x + warp
    last = seq_len - n + min(4 * cuda.blockIdx.x + 3, n - 1)
    top, total = float32(-3e38), float32(0)
    mixed = cuda.local.array(2, float32)
    mixed[0], mixed[1] = 0, 0
    for position in range(last + 1):
        place = table[position // block_size]
        if warp == 0:
            keys[lane] = key_cache[place, position % block_size, kv_head, lane]
            keys[lane + 32] = key_cache[place, position % block_size, kv_head, lane + 32]
        if warp == 1:
            values[lane] = value_cache[place, position % block_size, kv_head, lane]
            values[lane + 32] = value_cache[place, position % block_size, kv_head, lane + 32]
        cuda.syncthreads()
        if row < n and position <= seq_len - n + row:
            dot = query[row, head, lane] * keys[lane] + query[row, head, lane + 32] * keys[lane + 32]
            score = warp_sum(dot) * scale
            above = max(top, score)
            total = total * math.exp(top - above) + math.exp(score - above)
            for j in range(2):
                mixed[j] = mixed[j] * math.exp(top - above) + math.exp(score - above) * values[lane + 32 * j]
            top = above
        cuda.syncthreads()
    if row < n:
        for j in range(2):
            out[row, head, lane + 32 * j] = mixed[j] / total
"""
