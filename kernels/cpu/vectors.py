"""What the compiler does not find by itself: the two inner loops of attention, as vector code.

`dots` multiplies queries with keys. It holds as many sums as a vector has lanes and turns them into one vector
of scores at the end, so nothing is ever added up across a single vector. `weigh` adds up weighted values and
keeps its sums in registers for a whole tile. Both come in versions for 1, 2, 4 and 8 query heads that share a
key: each key and value is loaded once for all of them.

Written as LLVM instructions on vectors of LANES numbers, float32 or float64; LLVM maps them to what the machine
has. Numba's cache on disk does not notice a change of this file: see `BUILT_FROM` in `attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from kernels.cpu.options import inlined

LANES = 16 if binding.get_host_cpu_features().get("avx512f") else 8  # float32 numbers in one instruction
MOST_HEADS = 8  # that share a key in one call

I32, I64 = ir.IntType(32), ir.IntType(64)
FUSED = ("contract",)  # a * b + c may be rounded once
L2_CACHE = 2  # as the prefetch instruction counts: 3 is the first level

Vector = Any  # a value of the program that is being written, as are all `Any` below
State = list[Vector]


class Writer:
    """Writes instructions at the builder's position. A place in an array is counted in elements.

    The first argument is an array; all vectors are of its type of number.
    """

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        self.builder = builder
        self.kind = ir.VectorType(context.get_value_type(signature.args[0].dtype), LANES)
        self.arguments = [
            context.make_array(kind)(context, builder, x).data if isinstance(kind, types.Array) else x
            for kind, x in zip(signature.args, arguments, strict=True)
        ]

    def plus(self, first: Any, *terms: Any) -> Any:
        """The sum of whole numbers; a term may be one of Python's."""
        for term in terms:
            first = self.builder.add(first, I64(term) if isinstance(term, int) else term)
        return first

    def times(self, a: Any, factor: int) -> Any:
        """A whole number times one of Python's."""
        return self.builder.mul(a, I64(factor))

    def element(self, array: Any, at: Any) -> Any:
        """One element of an array."""
        return self.builder.load(self.builder.gep(array, [at]))

    def load(self, array: Any, at: Any) -> Vector:
        """LANES elements from `at` on, which need not lie at a round address."""
        return self.builder.load(self._place(array, at), align=4)

    def store(self, vector: Vector, array: Any, at: Any) -> None:
        """The reverse of `load`. Mutates: the array."""
        self.builder.store(vector, self._place(array, at), align=4)

    def _place(self, array: Any, at: Any) -> Any:
        return self.builder.bitcast(self.builder.gep(array, [at]), self.kind.as_pointer())

    def multiply_add(self, a: Vector, b: Vector, c: Vector) -> Vector:
        """a * b + c, rounded once where the machine can."""
        return self.builder.fadd(self.builder.fmul(a, b, flags=FUSED), c, flags=FUSED)

    def pick(self, a: Vector, b: Vector, lanes: list[int]) -> Vector:
        """Lanes out of two vectors: 0..LANES-1 are those of `a`, the next those of `b`."""
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, LANES), lanes))

    def spread(self, x: Any) -> Vector:
        """One number in all lanes."""
        vector = self.builder.insert_element(ir.Constant(self.kind, ir.Undefined), x, I32(0))
        return self.pick(vector, vector, [0] * LANES)

    def sums(self, vectors: State) -> Vector:
        """LANES vectors -> one whose lane i is the sum over vector i.

        Each round halves the number of vectors. Lanes with bit `width` unset come from `a`, the others from `b`.
        """
        width = 1
        while len(vectors) > 1:
            lower = [LANES + i - width if i & width else i for i in range(LANES)]
            upper = [LANES + i if i & width else i + width for i in range(LANES)]
            pairs = zip(vectors[::2], vectors[1::2], strict=True)
            vectors = [self.builder.fadd(self.pick(a, b, lower), self.pick(a, b, upper)) for a, b in pairs]
            width *= 2
        return vectors[0]

    def loop(self, stop: Any, step: int, state: State, body: Callable[[Any, State], State]) -> State:
        """`for i in range(0, stop, step): state = body(i, state)`, with the state in registers."""
        builder, before = self.builder, self.builder.block
        head, inside, after = (builder.append_basic_block(name) for name in ("head", "inside", "after"))
        builder.branch(head)
        builder.position_at_end(head)
        i, carried = builder.phi(I64), [builder.phi(self.kind) for _ in state]
        builder.cbranch(builder.icmp_signed("<", i, stop), inside, after)
        builder.position_at_end(inside)
        results = [self.plus(i, step), *body(i, list(carried))]
        for phi, first, result in zip([i, *carried], [I64(0), *state], results, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(result, builder.block)
        builder.branch(head)
        builder.position_at_end(after)
        return carried


def generator(write: Callable[[Any], None], kind: type[Writer] = Writer) -> Any:
    """For Numba: calls `write` with a writer that stands where the call is compiled. There is no result."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        write(kind(context, builder, signature, arguments))
        return context.get_dummy_value()

    return generate


def _dots(heads: int) -> Any:
    """The version of `dots` for so many heads. It takes LANES / heads keys at a time."""
    num_keys = LANES // heads

    def write(w: Writer) -> None:
        scores, at, queries, first, keys, rows, t, offset, head_dim = w.arguments
        places = [w.plus(w.element(rows, w.plus(t, j)), offset) for j in range(num_keys)]
        starts = [w.plus(first, w.times(head_dim, head)) for head in range(heads)]

        def body(d: Any, total: State) -> State:
            query = [w.load(queries, w.plus(start, d)) for start in starts]
            key = [w.load(keys, w.plus(place, d)) for place in places]
            return [
                w.multiply_add(query[i % heads], key[i // heads], total[i]) for i in range(LANES)
            ]  # lane i: key i // heads with head i % heads

        zeros = [ir.Constant(w.kind, [0.0] * LANES)] * LANES
        w.store(w.sums(w.loop(head_dim, LANES, zeros, body)), scores, at)

    def typing(context: Any, scores, at, queries, first, keys, rows, t, offset, head_dim):  # type: ignore
        return types.void(scores, at, queries, first, keys, rows, t, offset, head_dim), generator(write)

    return intrinsic(typing)


def _weigh(heads: int, width: int) -> Any:
    """The version of `weigh` for so many heads and `width` vectors of the head dimension."""

    def write(w: Writer) -> None:
        sums, first, weights, at, values, rows, t, num_tokens, offset, head_dim = w.arguments
        starts = [
            w.plus(first, w.times(head_dim, head), i * LANES) for head in range(heads) for i in range(width)
        ]

        def body(i: Any, total: State) -> State:
            place = w.plus(w.element(rows, w.plus(t, i)), offset)
            value = [w.load(values, w.plus(place, j * LANES)) for j in range(width)]
            weight = w.plus(at, w.times(i, heads))
            spread = [w.spread(w.element(weights, w.plus(weight, head))) for head in range(heads)]
            return [
                w.multiply_add(spread[j // width], value[j % width], total[j]) for j in range(heads * width)
            ]

        total = [w.load(sums, start) for start in starts]
        for start, result in zip(starts, w.loop(num_tokens, 1, total, body), strict=True):
            w.store(result, sums, start)

    def typing(context: Any, sums, first, weights, at, values, rows, t, num_tokens, offset, head_dim):  # type: ignore
        signature = types.void(sums, first, weights, at, values, rows, t, num_tokens, offset, head_dim)
        return signature, generator(write)

    return intrinsic(typing)


def _fetch(context: Any, array: Any, at: Any) -> Any:
    """fetch(array, at): asks for the 64 bytes there to be brought into the L2 cache; nothing waits for them.

    Not into the first level: the machine can have far fewer requests under way for that one.
    """

    def write(w: Writer) -> None:
        place = w.builder.bitcast(w.builder.gep(w.arguments[0], [w.arguments[1]]), ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [place.type, I32, I32, I32])
        prefetch = w.builder.module.declare_intrinsic("llvm.prefetch", (place.type,), kind)
        w.builder.call(prefetch, [place, I32(0), I32(L2_CACHE), I32(1)])

    return types.void(array, at), generator(write)


def _float_of_bits(context: Any, bits: Any) -> Any:
    """float_of_bits(uint32): the float with this bit pattern."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


fetch: Any = intrinsic(_fetch)
float_of_bits: Any = intrinsic(_float_of_bits)

_dots1, _dots2, _dots4, _dots8 = (_dots(heads) for heads in (1, 2, 4, 8))
# As many sums as half of the registers hold, and one vector for what is then left of the head dimension.
_wide1, _wide2, _wide4, _wide8 = (_weigh(heads, min(4, LANES // heads)) for heads in (1, 2, 4, 8))
_rest1, _rest2, _rest4, _rest8 = (_weigh(heads, 1) for heads in (1, 2, 4, 8))


@inlined
def dots(
    heads: int,
    scores: Any,
    at: int,
    queries: Any,
    first: int,
    keys: Any,
    rows: Any,
    t: int,
    offset: int,
    head_dim: int,
) -> None:
    """Scores of LANES / heads keys for `heads` queries, key by key.

    Args:
        scores: flat; the LANES scores go to `at` and behind. Mutated.
        queries: flat; those of the heads lie one after another from `first` on.
        keys: flat; that of token t begins at rows[t] + offset.
        head_dim: a multiple of LANES.
    """
    if heads == 1:
        _dots1(scores, at, queries, first, keys, rows, t, offset, head_dim)
    elif heads == 2:
        _dots2(scores, at, queries, first, keys, rows, t, offset, head_dim)
    elif heads == 4:
        _dots4(scores, at, queries, first, keys, rows, t, offset, head_dim)
    else:
        _dots8(scores, at, queries, first, keys, rows, t, offset, head_dim)


@inlined
def weigh(
    heads: int,
    sums: Any,
    first: int,
    weights: Any,
    at: int,
    values: Any,
    rows: Any,
    t: int,
    num_tokens: int,
    offset: int,
    head_dim: int,
) -> None:
    """Adds the weighted values of num_tokens tokens to the sums of `heads` heads.

    Args:
        sums: flat; those of the heads lie one after another from `first` on. Mutated.
        weights: flat; from `at` on, those of all heads for the first token, then for the next.
        values: flat; that of token t begins at rows[t] + offset.
        head_dim: a multiple of LANES.
    """
    wide = min(4, LANES // heads) * LANES
    d = 0
    while d + wide <= head_dim:
        if heads == 1:
            _wide1(sums, first + d, weights, at, values, rows, t, num_tokens, offset + d, head_dim)
        elif heads == 2:
            _wide2(sums, first + d, weights, at, values, rows, t, num_tokens, offset + d, head_dim)
        elif heads == 4:
            _wide4(sums, first + d, weights, at, values, rows, t, num_tokens, offset + d, head_dim)
        else:
            _wide8(sums, first + d, weights, at, values, rows, t, num_tokens, offset + d, head_dim)
        d += wide
    while d < head_dim:
        if heads == 1:
            _rest1(sums, first + d, weights, at, values, rows, t, num_tokens, offset + d, head_dim)
        elif heads == 2:
            _rest2(sums, first + d, weights, at, values, rows, t, num_tokens, offset + d, head_dim)
        elif heads == 4:
            _rest4(sums, first + d, weights, at, values, rows, t, num_tokens, offset + d, head_dim)
        else:
            _rest8(sums, first + d, weights, at, values, rows, t, num_tokens, offset + d, head_dim)
        d += LANES
