"""Exercise 09: right answers written in another style, and wrong ones that take more than a changed line."""

COUNT = """
blocks = -(-100 // 32)
idle = blocks * 32 - 100
sectors = (4, 4, 2 * 4, 32, 1)
passes = (1, 1, 2, 1, 1)
barriers = 1 + 6
"""

SLOTS = """
@cuda.jit
def slots_of(out, table, size):
    i = cuda.threadIdx.x + cuda.blockIdx.x * cuda.blockDim.x
    if i >= len(out):
        return
    out[i] = table[i // size] * size + (i - i // size * size)
"""

SLOTS_IN_A_LOOP = """
@cuda.jit
def slots_of(slots, block_table, block_size):
    if cuda.grid(1) == 0:
        for p in range(len(slots)):
            slots[p] = block_table[p // block_size] * block_size + p % block_size
"""

WRITE = """
@cuda.jit
def write_slots(pages, rows, where):
    column = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    row = cuda.blockIdx.y * cuda.blockDim.y + cuda.threadIdx.y
    if row >= len(where) or column >= rows.shape[1]:
        return
    if where[row] != -1:
        pages[where[row], column] = rows[row, column]
"""

ROWS = """
@cuda.jit
def gather_rows(out, cache, slots):
    row = out.shape[1]
    for i in range(cuda.grid(1), out.shape[0] * row, cuda.gridsize(1)):
        out[i // row, i % row] = cache[slots[i // row], i % row]
"""

SECTORS = """
def sectors_of(first, step, itemsize):
    found = set()
    for lane in range(32):
        found.add((first + lane * step) * itemsize // 32)
    return len(found)

alone_4, alone_2 = 32 // 4, 32 // 2
"""

TRANSPOSE = """
@cuda.jit
def transpose(out, keys):
    tile = cuda.shared.array(32 * 33, float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    d, token = cuda.grid(2)
    if token < keys.shape[0] and d < keys.shape[1]:
        tile[x * 33 + y] = keys[token, d]
    cuda.syncthreads()
    d, token = cuda.blockIdx.x * 32 + y, cuda.blockIdx.y * 32 + x
    if token < keys.shape[0] and d < keys.shape[1]:
        out[d, token] = tile[y * 33 + x]
"""

SOFTMAX = """
@cuda.jit
def softmax_rows(weights, scores):
    tops = cuda.shared.array(64, float32)
    sums = cuda.shared.array(64, float32)
    row, thread = cuda.blockIdx.x, cuda.threadIdx.x
    tops[thread] = sums[thread] = -1e30
    if thread < scores.shape[1]:
        tops[thread] = scores[row, thread]
    for half in (32, 16, 8, 4, 2, 1):
        cuda.syncthreads()
        if thread < half:
            tops[thread] = max(tops[thread], tops[thread + half])
    cuda.syncthreads()
    weight = float32(0)
    if thread < scores.shape[1]:
        weight = math.exp(scores[row, thread] - tops[0])
    sums[thread] = weight
    for half in (32, 16, 8, 4, 2, 1):
        cuda.syncthreads()
        if thread < half:
            sums[thread] += sums[thread + half]
    cuda.syncthreads()
    if thread < scores.shape[1]:
        weights[row, thread] = weight / sums[0]
"""

STATS = """
@cuda.jit
def row_stats(largest, total, scores):
    partial = cuda.shared.array((2, 2), float32)
    row, thread = cuda.blockIdx.x, cuda.threadIdx.x
    top, added, i = float32(-1e30), float32(0), thread
    while i < scores.shape[1]:
        score = scores[row, i]
        top, added, i = max(top, score), added + score, i + 64
    for distance in (16, 8, 4, 2, 1):
        top = max(top, cuda.shfl_down_sync(0xFFFFFFFF, top, distance))
        added += cuda.shfl_down_sync(0xFFFFFFFF, added, distance)
    if thread % 32 == 0:
        partial[0, thread // 32] = top
        partial[1, thread // 32] = added
    cuda.syncthreads()
    if thread == 0:
        largest[row] = max(partial[0, 0], partial[0, 1])
        total[row] = partial[1, 0] + partial[1, 1]
"""

TWO_TREES = """
@cuda.jit
def row_stats(largest, total, scores):
    scratch = cuda.shared.array(64, float32)
    row, thread = cuda.blockIdx.x, cuda.threadIdx.x
    top, added = float32(-math.inf), float32(0)
    for i in range(thread, scores.shape[1], 64):
        score = scores[row, i]
        top, added = max(top, score), added + score
    scratch[thread] = top
    for half in (32, 16, 8, 4, 2, 1):
        cuda.syncthreads()
        if thread < half:
            scratch[thread] = max(scratch[thread], scratch[thread + half])
    if thread == 0:
        largest[row] = scratch[0]
    cuda.syncthreads()
    scratch[thread] = added
    for half in (32, 16, 8, 4, 2, 1):
        cuda.syncthreads()
        if thread < half:
            scratch[thread] += scratch[thread + half]
    if thread == 0:
        total[row] = scratch[0]
"""

DOTS = """
@cuda.jit
def dot_products(scores, query, keys):
    lane, warp = cuda.laneid, cuda.threadIdx.x // 32
    k = cuda.blockIdx.x * (cuda.blockDim.x // 32) + warp
    if k >= len(scores):
        return
    added, d = float32(0), lane
    while d < len(query):
        added += keys[k, d] * query[d]
        d += 32
    for distance in (1, 2, 4, 8, 16):
        added += cuda.shfl_down_sync(0xFFFFFFFF, added, distance)
    if lane == 0:
        scores[k] = added
"""

DOTS_IN_SHARED = """
@cuda.jit
def dot_products(scores, query, keys):
    parts = cuda.shared.array(128, float32)
    k, thread = cuda.grid(1) // 32, cuda.threadIdx.x
    x = float32(0)
    if k < keys.shape[0]:
        for d in range(thread % 32, keys.shape[1], 32):
            x += query[d] * keys[k, d]
    parts[thread] = x
    cuda.syncthreads()
    if k < keys.shape[0] and thread % 32 == 0:
        x = float32(0)
        for lane in range(32):
            x += parts[thread + lane]
        scores[k] = x
"""

DOTS_BY_THREAD = """
@cuda.jit
def dot_products(scores, query, keys):
    k, lane = cuda.blockIdx.x * 4 + cuda.threadIdx.x, cuda.threadIdx.x
    if lane < 4 and k < keys.shape[0]:
        x = float32(0)
        for d in range(keys.shape[1]):
            x += query[d] * keys[k, d]
        scores[k] = x
"""

ONLINE = """
@cuda.jit
def online_softmax(largest, total, scores):
    warp, lane = (cuda.threadIdx.x + cuda.blockIdx.x * cuda.blockDim.x) // 32, cuda.laneid
    if warp >= scores.shape[0]:
        return
    m, s = LOWEST, float32(0)
    for i in range(lane, scores.shape[1], 32):
        if scores.shape[1] > i:
            score = scores[warp, i]
            if score > m:
                s, m = s * math.exp(m - score) + 1, score
            else:
                s += math.exp(score - m)
    top = m
    for distance in (1, 2, 4, 8, 16):
        top = max(top, cuda.shfl_xor_sync(0xFFFFFFFF, top, distance))
    s *= math.exp(m - top)
    for distance in (1, 2, 4, 8, 16):
        s += cuda.shfl_xor_sync(0xFFFFFFFF, s, distance)
    if lane == 0:
        largest[warp] = top
        total[warp] = s
"""

ONE_PASS = """
@cuda.jit
def online_softmax(largest, total, scores):
    row = cuda.grid(1)
    if row < len(scores):
        top, added = LOWEST, float32(0)
        for i in range(scores.shape[1]):
            score = scores[row, i]
            above = max(top, score)
            added = added * math.exp(top - above) + math.exp(score - above)
            top = above
        largest[row], total[row] = top, added
"""

TWICE = """
@cuda.jit
def online_softmax(largest, total, scores):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < scores.shape[0]:
        top, added = LOWEST, float32(0)
        for i in range(lane, scores.shape[1], 32):
            top = max(top, scores[row, i])
        for distance in (16, 8, 4, 2, 1):
            top = max(top, cuda.shfl_xor_sync(0xFFFFFFFF, top, distance))
        for i in range(lane, scores.shape[1], 32):
            added += math.exp(scores[row, i] - top)
        for distance in (16, 8, 4, 2, 1):
            added += cuda.shfl_xor_sync(0xFFFFFFFF, added, distance)
        if lane == 0:
            largest[row], total[row] = top, added
"""

BARE = """
@cuda.jit
def online_softmax(largest, total, scores):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < scores.shape[0]:
        top, added = LOWEST, float32(0)
        for i in range(lane, scores.shape[1], 32):
            score = scores[row, i]
            top, added = max(top, score), added + math.exp(score)
        for distance in (16, 8, 4, 2, 1):
            top = max(top, cuda.shfl_xor_sync(0xFFFFFFFF, top, distance))
            added += cuda.shfl_xor_sync(0xFFFFFFFF, added, distance)
        if lane == 0:
            largest[row], total[row] = top, added
"""

PAGES = """
@cuda.jit
def paged_scores(scores, query, key_cache, block_table, scale):
    warp, lane, head = cuda.threadIdx.x // 32, cuda.laneid, cuda.blockIdx.y
    p = cuda.blockIdx.x * 4 + warp
    if p >= scores.shape[1]:
        return
    group = query.shape[0] // key_cache.shape[2]
    key = key_cache[block_table[p // key_cache.shape[1]], p % key_cache.shape[1], head // group]
    added, d = float32(0), lane
    while d < len(key):
        added += key[d] * (query[head, d] * scale)
        d += 32
    for distance in (1, 2, 4, 8, 16):
        added += cuda.shfl_down_sync(0xFFFFFFFF, added, distance)
    if lane == 0:
        scores[head, p] = added
"""
