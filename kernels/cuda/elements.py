"""The three number formats of a cache, each as what is stored and how it becomes fp32 and back.

Kernels compute in fp32 whatever the cache holds. A 16-bit number is stored as the int16 with its bits: Numba
knows no bf16, and for moving and unpacking the bits are all that matters.
vLLM: V0 `csrc/attention/dtype_bfloat16.cuh`, `dtype_float16.cuh`, `dtype_float32.cuh`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.cuda.intrinsics import WORDS, bits_float, float_bits, float_half, half_float, low_half
from kernels.cuda.jit import device_function

INFINITY = 0x7F800000  # as fp32; larger is NaN
QUIET_NAN = 0x7FC0  # as bf16


@dataclass(frozen=True)
class Element:
    """One number format. `widen`, `narrow` and `unpack` are for kernels to call.

    stored: the dtype that a kernel sees.
    per_word: numbers in a 32-bit word.
    widen: stored number -> fp32. narrow: fp32 -> stored number, the nearest, of two the even one.
    unpack: (word, i) -> the i-th number of a word as fp32; i = 0 is the one at the lower address.
    """

    name: str
    stored: torch.dtype
    per_word: int
    widen: Callable[[Any], Any]
    narrow: Callable[[Any], Any]
    unpack: Callable[[Any, Any], Any]

    @property
    def per_load(self) -> int:
        """Numbers in 16 bytes."""
        return WORDS * self.per_word

    def view(self, x: Tensor) -> Tensor:
        """The same memory as a kernel sees it."""
        return x.view(self.stored)


# bf16 is the upper half of an fp32 number


@device_function
def widen_bf16(stored: Any) -> Any:
    """Puts 16 zero bits behind."""
    return bits_float(stored << 16)


@device_function
def narrow_bf16(x: Any) -> Any:
    """Cuts the lower half off, after adding just under half of what the last kept bit is worth, or exactly half
    if that bit is set: so a tie goes to the even number. NaN is not rounded, it could end as infinity."""
    bits = float_bits(x)
    if (bits & 0x7FFFFFFF) > INFINITY:
        return low_half(QUIET_NAN)
    return low_half((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


@device_function
def unpack_bf16(word: Any, i: Any) -> Any:
    """Moves the chosen half up and clears the other."""
    return bits_float((word << (16 - 16 * i)) & 0xFFFF0000)


@device_function
def widen_f16(stored: Any) -> Any:
    """By the conversion instruction."""
    return half_float(stored)


@device_function
def narrow_f16(x: Any) -> Any:
    """By the conversion instruction."""
    return float_half(x)


@device_function
def unpack_f16(word: Any, i: Any) -> Any:
    """Moves the chosen half down and converts it."""
    return half_float(word >> (16 * i))


@device_function
def as_it_is(x: Any) -> Any:
    """fp32 to fp32."""
    return x


@device_function
def unpack_f32(word: Any, i: Any) -> Any:
    """A word is one number."""
    return bits_float(word)


ELEMENTS = {
    torch.float32: Element("float32", torch.float32, 1, as_it_is, as_it_is, unpack_f32),
    torch.float16: Element("float16", torch.int16, 2, widen_f16, narrow_f16, unpack_f16),
    torch.bfloat16: Element("bfloat16", torch.int16, 2, widen_bf16, narrow_bf16, unpack_bf16),
}


def element_of(x: Tensor) -> Element:
    """The number format of a query or a cache. Raises: ValueError, with the formats that there are."""
    if x.dtype not in ELEMENTS:
        known = ", ".join(element.name for element in ELEMENTS.values())
        raise ValueError(f"the CUDA kernels know {known}, but query and cache are {str(x.dtype)[6:]}")
    return ELEMENTS[x.dtype]
