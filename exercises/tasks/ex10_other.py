"""Answers to exercise 10 in more than a line: right ones in another style, and wrong ones."""

OTHER_NUMBERS = """
written = ([1, 1, 10],)
lands = (2, 3)
first_element, in_32_bits = 2_147_516_416, -2_147_450_880
kernel_place = (3 * 2 + 1, 5 % 4)
slot = 3 * 8 + 5
"""

OTHER_WRITE = """
@cuda.jit
def write(new_keys, new_values, keys, values, slots):
    token, lane = cuda.blockIdx.x, cuda.threadIdx.x
    slot = slots[token]
    if slot != -1:
        for head in range(new_keys.shape[1]):
            for d in range(lane, new_keys.shape[2], 32):
                keys[slot // keys.shape[1], slot % keys.shape[1], head, d] = new_keys[token, head, d]
        for head in range(new_keys.shape[1]):
            for d in range(lane, new_keys.shape[2], 32):
                values[slot // keys.shape[1], slot % keys.shape[1], head, d] = new_values[token, head, d]
"""

CHUNKS = """
@cuda.jit
def write(key, value, key_cache, value_cache, slot_mapping):
    token, slot = cuda.blockIdx.x, slot_mapping[cuda.blockIdx.x]
    row, head_dim, size = key.shape[1] * key.shape[2], key.shape[2], key_cache.shape[1]
    share = (row + 31) // 32
    if slot >= 0:
        for i in range(cuda.threadIdx.x * share, min(row, (cuda.threadIdx.x + 1) * share)):
            head, d = i // head_dim, i % head_dim
            key_cache[slot // size, slot % size, head, d] = key[token, head, d]
            value_cache[slot // size, slot % size, head, d] = value[token, head, d]
"""

OTHER_SCORES = """
@cuda.jit
def scores(out, query, key_cache, block_table, seq_len, scale):
    head, lane, size = cuda.blockIdx.x, cuda.threadIdx.x & 31, key_cache.shape[1]
    kv_head = head * key_cache.shape[2] // query.shape[0]
    for position in range(cuda.threadIdx.x >> 5, seq_len, 2):
        total = 0.0
        for d in range(lane, query.shape[1], 32):
            total += query[head, d] * scale * key_cache[block_table[position // size], position % size, kv_head, d]
        for distance in (16, 8, 4, 2, 1):
            total += cuda.shfl_down_sync(0xFFFFFFFF, total, distance)
        if lane == 0:
            out[head, position] = total
"""

BY_THREAD = """
@cuda.jit
def scores(out, query, key_cache, block_table, seq_len, scale):
    head, size = cuda.blockIdx.x, key_cache.shape[1]
    kv_head = head // (query.shape[0] // key_cache.shape[2])
    for position in range(cuda.threadIdx.x, seq_len, cuda.blockDim.x):
        block, offset = block_table[position // size], position % size
        score = float32(0)
        for d in range(query.shape[1]):
            score += query[head, d] * key_cache[block, offset, kv_head, d]
        out[head, position] = score * scale
"""

OTHER_STARTS = """
@cuda.jit
def row_starts(out, block_table, seq_len, block_size, block_stride, row_size):
    position = cuda.grid(1)
    if position >= seq_len:
        return
    start = numba.int64(position % block_size)
    start *= row_size
    start += numba.int64(block_table[position // block_size]) * numba.int64(block_stride)
    out[position] = start
"""

OTHER_DECODE = """
@cuda.jit
def decode(out, query, key_cache, value_cache, block_tables, seq_lens, scale):
    seq, head, t = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    n, size, dims = seq_lens[seq], key_cache.shape[1], query.shape[2]
    kv = head * key_cache.shape[2] // query.shape[1]
    tile = cuda.shared.array(THREADS, float32)
    q = cuda.shared.array(THREADS, float32)
    q[t] = query[seq, head, t] * scale if t < dims else 0.0
    cuda.syncthreads()
    top, total, mixed = -math.inf, 0.0, 0.0
    for start in range(0, n, THREADS):
        here = min(THREADS, n - start)
        if t < here:
            score = 0.0
            for d in range(dims):
                score += q[d] * key_cache[block_tables[seq, (start + t) // size], (start + t) % size, kv, d]
            tile[t] = score
        cuda.syncthreads()
        above = top
        for i in range(here):
            above = max(above, tile[i])
        shrink = math.exp(top - above)
        total, mixed, top = total * shrink, mixed * shrink, above
        for i in range(here):
            weight = math.exp(tile[i] - above)
            total += weight
            if t < dims:
                mixed += weight * value_cache[block_tables[seq, (start + i) // size], (start + i) % size, kv, t]
        cuda.syncthreads()
    if t < dims:
        out[seq, head, t] = mixed / total

attention = on_kernels(decode)
"""

TWO_PASSES = """
@cuda.jit
def decode(out, query, key_cache, value_cache, block_tables, seq_lens, scale):
    seq, head, t = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    n, size, dims = seq_lens[seq], key_cache.shape[1], query.shape[2]
    kv = head // (query.shape[1] // key_cache.shape[2])
    tile = cuda.shared.array(THREADS, float32)
    scratch = cuda.shared.array(THREADS, float32)
    top = float32(-3e38)
    for position in range(t, n, THREADS):
        score = float32(0)
        for d in range(dims):
            score += query[seq, head, d] * key_cache[block_tables[seq, position // size], position % size, kv, d]
        top = max(top, score * scale)
    top = block_max(top, scratch)
    total, mixed = float32(0), float32(0)
    for start in range(0, n, THREADS):
        position, weight = start + t, float32(0)
        if position < n:
            score = float32(0)
            for d in range(dims):
                score += query[seq, head, d] * key_cache[block_tables[seq, position // size], position % size, kv, d]
            weight = math.exp(score * scale - top)
        tile[t] = weight
        total += block_sum(weight, scratch)
        if t < dims:
            for i in range(min(THREADS, n - start)):
                block = block_tables[seq, (start + i) // size]
                mixed += tile[i] * value_cache[block, (start + i) % size, kv, t]
        cuda.syncthreads()
    if t < dims:
        out[seq, head, t] = mixed / total

attention = on_kernels(decode)
"""

OTHER_GROUP = """
@cuda.jit
def group_scores(out, query, key_cache, block_table, seq_len, scale):
    kv, warp, lane = cuda.blockIdx.x, cuda.threadIdx.x // 32, cuda.threadIdx.x % 32
    size, group = key_cache.shape[1], query.shape[0] // key_cache.shape[2]
    rows = cuda.shared.array((2, 64), float32)
    for position in range(warp, seq_len, 2):
        block, offset = block_table[position // size], position % size
        for d in range(lane, query.shape[1], 32):
            rows[warp, d] = key_cache[block, offset, kv, d]
        cuda.syncwarp()
        if lane < group:
            score = float32(0)
            for d in range(query.shape[1]):
                score += query[kv * group + lane, d] * rows[warp, d]
            out[kv * group + lane, position] = score * scale
        cuda.syncwarp()
"""

EACH_HEAD = """
@cuda.jit
def group_scores(out, query, key_cache, block_table, seq_len, scale):
    kv, lane, size = cuda.blockIdx.x, cuda.threadIdx.x % 32, key_cache.shape[1]
    group = query.shape[0] // key_cache.shape[2]
    for head in range(kv * group, kv * group + group):
        for position in range(cuda.threadIdx.x // 32, seq_len, 2):
            score = float32(0)
            for d in range(lane, query.shape[1], 32):
                score += query[head, d] * key_cache[block_table[position // size], position % size, kv, d]
            score = lanes_sum(score, 32)
            if lane == 0:
                out[head, position] = score * scale
"""

GROUP_BY_THREAD = """
@cuda.jit
def group_scores(out, query, key_cache, block_table, seq_len, scale):
    kv, size, group = cuda.blockIdx.x, key_cache.shape[1], query.shape[0] // key_cache.shape[2]
    sums = cuda.local.array(4, float32)
    for position in range(cuda.threadIdx.x, seq_len, 64):
        for g in range(group):
            sums[g] = 0
        for d in range(query.shape[1]):
            number = key_cache[block_table[position // size], position % size, kv, d]
            for g in range(group):
                sums[g] += query[kv * group + g, d] * number
        for g in range(group):
            out[kv * group + g, position] = sums[g] * scale
"""

OTHER_SECTORS = """
def least_sectors(num_tokens, head_dim, itemsize):
    per_row = -(-head_dim * itemsize // 32)
    return per_row * num_tokens

best = ("c", "e")
worst_times = 16
"""
