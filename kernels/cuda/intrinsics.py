"""What Numba's Python has no word for: a load of 16 bytes, the bits of a number, fast powers of two.

Each is one or two instructions, written out in PTX. Beside it stands what it means in Python, which is what
the interpreter runs. The compiler would not come to the wide load by itself: it does not know that the
addresses are multiples of 16, and four loads of 4 bytes take four times as many requests.
vLLM: V0 and V1 `csrc/attention/dtype_*.cuh`, the vector types and their conversions.
"""

# mypy: disable-error-code=attr-defined

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.cuda import types
from numba.cuda.extending import intrinsic

from kernels.interpreter import register

WORDS = 4  # of 32 bits, in one load of 16 bytes

I16, I32, I64, F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


def _address(context: Any, builder: Any, array_type: Any, array: Any, index_type: Any, index: Any) -> Any:
    """Of one element, as the 64-bit number that PTX wants."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.ptrtoint(builder.gep(data, [context.cast(builder, index, index_type, types.intp)]), I64)


def _instruction(text: str, result: Any, operand: Any, constraint: str) -> Callable[..., Any]:
    """Code generator for one PTX instruction with one operand."""
    asm = ir.InlineAsm(ir.FunctionType(result, [operand]), text, constraint, side_effect=False)
    return lambda context, builder, signature, arguments: builder.call(asm, arguments)


def _load_16_bytes(typing_context: Any, array: Any, index: Any) -> Any:
    """load_16_bytes(array, index): the 16 bytes from element `index` of a flat array on, as four 32-bit words.

    `array[index]` must lie at a multiple of 16 bytes, and nobody may write to the array while the kernel
    runs: the load goes through the read-only path. It leaves no copy in the first cache, since a kernel that
    walks over pages does not come back.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = _address(context, builder, array, arguments[0], index, arguments[1])
        text = "ld.global.nc.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];"
        function = ir.FunctionType(ir.LiteralStructType([I32] * WORDS), [I64])
        asm = ir.InlineAsm(function, text, "=r,=r,=r,=r,l", side_effect=False)
        loaded = builder.call(asm, [address])
        return context.make_tuple(
            builder, signature.return_type, [builder.extract_value(loaded, i) for i in range(WORDS)]
        )

    return types.UniTuple(types.uint32, WORDS)(array, index), generate


def _bits_float(typing_context: Any, bits: Any) -> Any:
    """bits_float(bits): the fp32 number whose bits are the lower 32 of an integer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = context.cast(builder, arguments[0], bits, types.uint32)
        return builder.bitcast(word, F32)

    return types.float32(bits), generate


def _float_bits(typing_context: Any, x: Any) -> Any:
    """float_bits(x): the 32-bit word of an fp32 number."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], I32)

    return types.uint32(types.float32), generate


def _half_float(typing_context: Any, bits: Any) -> Any:
    """half_float(bits): the number whose fp16 bits are the lower 16 of an integer."""
    convert = _instruction("cvt.f32.f16 $0, $1;", F32, I16, "=f,h")

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        half = context.cast(builder, arguments[0], bits, types.uint16)
        return convert(context, builder, signature, [half])

    return types.float32(bits), generate


def _float_half(typing_context: Any, x: Any) -> Any:
    """float_half(x): the bits of the fp16 number next to x, as int16; of two equally near ones the even one."""
    return types.int16(types.float32), _instruction("cvt.rn.f16.f32 $0, $1;", I16, F32, "=h,f")


def _low_half(typing_context: Any, bits: Any) -> Any:
    """low_half(bits): the lower 16 bits of an integer, as int16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.cast(builder, arguments[0], bits, types.int16)

    return types.int16(bits), generate


def _exp2(typing_context: Any, x: Any) -> Any:
    """exp2(x): 2 to the power of x in one instruction, within 2 units in the last place."""
    return types.float32(types.float32), _instruction("ex2.approx.ftz.f32 $0, $1;", F32, F32, "=f,f")


def _log2(typing_context: Any, x: Any) -> Any:
    """log2(x): the logarithm to base 2 in one instruction."""
    return types.float32(types.float32), _instruction("lg2.approx.ftz.f32 $0, $1;", F32, F32, "=f,f")


load_16_bytes: Any = intrinsic(_load_16_bytes)
bits_float: Any = intrinsic(_bits_float)
float_bits: Any = intrinsic(_float_bits)
half_float: Any = intrinsic(_half_float)
float_half: Any = intrinsic(_float_half)
low_half: Any = intrinsic(_low_half)
exp2: Any = intrinsic(_exp2)
log2: Any = intrinsic(_log2)


# What they mean in Python


def load_16_bytes_meaning(array: Any, index: int) -> tuple[int, ...]:
    """Loads as many elements as 16 bytes hold, in one request, and packs them into words."""
    if array.dtype.itemsize == 4:
        return struct.unpack("<4I", struct.pack("<4f", *array.load_vector(index, 4)))
    return struct.unpack("<4I", struct.pack("<8h", *array.load_vector(index, 8)))


def bits_float_meaning(bits: int) -> float:
    """The word read as fp32."""
    value: float = struct.unpack("<f", struct.pack("<I", bits & 0xFFFFFFFF))[0]
    return value


def float_bits_meaning(x: float) -> int:
    """x rounded to fp32, as a word."""
    bits: int = struct.unpack("<I", struct.pack("<f", x))[0]
    return bits


def half_float_meaning(bits: int) -> float:
    """The 16 bits read as fp16."""
    value: float = struct.unpack("<e", struct.pack("<H", bits & 0xFFFF))[0]
    return value


def float_half_meaning(x: float) -> int:
    """x rounded to fp16; what is too large becomes infinite."""
    try:
        packed = struct.pack("<e", x)
    except OverflowError:
        packed = struct.pack("<e", math.copysign(math.inf, x))
    bits: int = struct.unpack("<h", packed)[0]
    return bits


def low_half_meaning(bits: int) -> int:
    """The lower 16 bits, the highest of them as the sign."""
    return ((bits & 0xFFFF) ^ 0x8000) - 0x8000


def exp2_meaning(x: float) -> float:
    """2 to the power of x; what is too small for fp32 is 0, what is too large is infinite."""
    if x >= 128:
        return math.inf
    return 0.0 if x < -126 else 2.0**x


register(load_16_bytes, load_16_bytes_meaning)
register(bits_float, bits_float_meaning)
register(float_bits, float_bits_meaning)
register(half_float, half_float_meaning)
register(float_half, float_half_meaning)
register(low_half, low_half_meaning)
register(exp2, exp2_meaning)
register(log2, math.log2)
