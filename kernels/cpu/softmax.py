"""Scores into weights, tile by tile (the online softmax), as vector code for 1, 2, 4 and 8 heads side by side.

All numbers of a step stay in registers. Written for arrays, Numba has to assume that they overlap and to go
through memory each time, which made this part slower than all multiplications of a short sequence.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from kernels.cpu.options import inlined
from kernels.cpu.vectors import I32, I64, LANES, State, Vector, Writer, generator

LOWEST = -1e30  # below every score

# 2**x = 2**whole * e**(rest * ln 2) with rest in -1/2..1/2. Of the series as many terms as the type can tell from
# nothing; then how it keeps an exponent: whole numbers of its size, where its bits begin, what is added to it.
TERMS = {"float": 8, "double": 14}
EXPONENT = {"float": (I32, 23, 127), "double": (I64, 52, 1023)}


class ScoreWriter(Writer):
    """Adds to the writer's words what a softmax needs."""

    def constant(self, x: float) -> Vector:
        """A number that is known now, in all lanes."""
        return ir.Constant(self.kind, [x] * LANES)

    def greater(self, a: Vector, b: Vector) -> Vector:
        """Lane by lane. Where `a` is not a number it is `b`."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def minus(self, a: Vector, b: Vector) -> Vector:
        """Lane by lane."""
        return self.builder.fsub(a, b)

    def power_of_2(self, x: Vector) -> Vector:
        """2**x for x <= 0, lane by lane; 0 where the type has no exponent any more."""
        number = str(self.kind.element)
        whole_numbers, position, bias = EXPONENT[number]
        lowest = self.constant(1.0 - bias)
        too_low = self.builder.fcmp_ordered("<", x, lowest)
        x = self.builder.select(too_low, lowest, x)
        name = f"llvm.rint.v{LANES}f{32 if number == 'float' else 64}"
        rint = self.builder.module.declare_intrinsic(name, (), ir.FunctionType(self.kind, [self.kind]))
        whole = self.builder.call(rint, [x])
        rest, power = self.minus(x, whole), self.constant(0.0)
        for k in reversed(range(TERMS[number])):
            power = self.multiply_add(power, rest, self.constant(math.log(2) ** k / math.factorial(k)))
        kind = ir.VectorType(whole_numbers, LANES)
        exponent = self.builder.add(self.builder.fptosi(whole, kind), ir.Constant(kind, [bias] * LANES))
        scale = self.builder.shl(exponent, ir.Constant(kind, [position] * LANES))
        power = self.builder.fmul(power, self.builder.bitcast(scale, self.kind))
        return self.builder.select(too_low, self.constant(0.0), power)


def _soften(heads: int) -> Any:
    """The version of `soften` for so many heads."""

    def write(w: ScoreWriter) -> None:
        scores, at, end, top, total, first, factor = w.arguments

        def highest(i: Any, state: State) -> State:
            return [w.greater(w.load(scores, w.plus(at, i)), state[0])]

        def weights(i: Any, state: State) -> State:
            weight = w.power_of_2(w.minus(w.load(scores, w.plus(at, i)), best))
            w.store(weight, scores, w.plus(at, i))
            return [w.builder.fadd(state[0], weight)]

        before = w.load(top, first)
        (best,) = w.loop(end, LANES, [before], highest)
        step = heads
        while step < LANES:  # the highest of each head, into all of its lanes
            best = w.greater(w.pick(best, best, [i ^ step for i in range(LANES)]), best)
            step *= 2
        correction = w.power_of_2(w.minus(before, best))
        so_far = w.builder.fmul(w.load(total, first), correction)
        (so_far,) = w.loop(end, LANES, [so_far], weights)
        w.store(best, top, first)
        w.store(so_far, total, first)
        w.store(correction, factor, I64(0))

    def typing(context: Any, scores, at, end, top, total, first, factor):  # type: ignore
        return types.void(scores, at, end, top, total, first, factor), generator(write, ScoreWriter)

    return intrinsic(typing)


_soften1, _soften2, _soften4, _soften8 = (_soften(heads) for heads in (1, 2, 4, 8))


@inlined
def soften(
    heads: int, scores: Any, at: int, count: int, top: Any, total: Any, first: int, factor: Any
) -> None:
    """Scores become weights, relative to the highest score so far. All arrays are flat.

    Args:
        scores: in powers of two; `count` of them from `at` on, those of all heads for the first token, then for
            the next; and room up to the next multiple of LANES, which is filled.
        top, total: highest score and sum of weights so far; lane i, from `first` on, is about head i % heads.
        factor: `[LANES]` what is to be done to all that was added up before.
    Mutates: all arrays.
    """
    end = (count + LANES - 1) // LANES * LANES
    for i in range(at + count, at + end):
        scores[i] = -math.inf
    if heads == 1:
        _soften1(scores, at, end, top, total, first, factor)
    elif heads == 2:
        _soften2(scores, at, end, top, total, first, factor)
    elif heads == 4:
        _soften4(scores, at, end, top, total, first, factor)
    else:
        _soften8(scores, at, end, top, total, first, factor)
