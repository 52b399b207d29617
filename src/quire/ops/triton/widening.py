"""The widening of numbers of 8 bits to 16, two dimensions of a key or value at a time.

The hardware's loads of a product's operands move units of 16 bits. Numbers of 8 bits, widened one by one, are therefore
read from shared memory byte by byte. So a pair of dimensions is loaded as one number of 16 bits; its lower byte, the
even dimension, and its upper one, the odd dimension, go to separate products. A register has the pairs of two keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

# By the cache's dtype and the one of q: instructions that widen a byte of each of two 16-bit numbers, of which `pick`
# brings the bytes together. Those of int8 build the number 128 + (its lower 7 bits), or 1152 + it, by its exponent's
# bits, and subtract 128 or 256, or 1152. All results are exact.
INT8_BF16 = """{
.reg .b32 w, a, c, one;
mov.b32 one, 0x3f803f80;
prmt.b32 w, $1, 0x43434343, %s;
and.b32 a, w, 0xff7fff7f;
lop3.b32 c, w, 0xff80ff80, 0x80008000, 0x6a;
fma.rn.bf16x2 $0, a, one, c;
}"""
INT8_FP16 = """{
.reg .b32 w, c;
mov.b32 c, 0xe480e480;
xor.b32 w, $1, 0x80808080;
prmt.b32 w, w, 0x64646464, %s;
add.rn.f16x2 $0, w, c;
}"""
FP8_FP16 = """{
.reg .b32 w;
.reg .b16 lo, hi;
prmt.b32 w, $1, 0, %s;
mov.b32 {lo, hi}, w;
cvt.rn.f16x2.%sx2 $0, lo;
}"""
FP8_BF16 = """{
.reg .b32 w;
.reg .b16 lo, hi;
.reg .f32 a, b;
prmt.b32 w, $1, 0, %s;
mov.b32 {lo, hi}, w;
cvt.rn.f16x2.%sx2 w, lo;
mov.b32 {lo, hi}, w;
cvt.f32.f16 a, lo;
cvt.f32.f16 b, hi;
cvt.rn.bf16x2.f32 $0, b, a;
}"""


@triton.constexpr_function
def _instructions(kind: str, bf16: bool, upper: bool) -> str:
    if kind == "int8":
        pick = "0x4341" if upper else "0x4240"
        return (INT8_BF16 if bf16 else INT8_FP16) % pick
    pick = "0x4431" if upper else "0x4420"
    return (FP8_BF16 if bf16 else FP8_FP16) % (pick, kind)


@triton.jit
def widen(pairs, dtype: tl.constexpr, KIND: tl.constexpr, UPPER: tl.constexpr):
    """Return the lower or the upper bytes of 16-bit numbers as numbers of `dtype`.

    KIND: the dtype of the bytes; with "plain" before it the operators of the language widen them, as the interpreter
    needs.
    """
    byte = (pairs >> 8 if UPPER else pairs).to(tl.int8)
    if KIND == "plain int8":
        found = byte.to(dtype)
    elif KIND == "plain e4m3":
        found = byte.to(tl.float8e4nv, bitcast=True).to(dtype)
    elif KIND == "plain e5m2":
        found = byte.to(tl.float8e5, bitcast=True).to(dtype)
    elif dtype == tl.bfloat16:
        found = tl.inline_asm_elementwise(
            _instructions(KIND, True, UPPER), "=r,r", [pairs], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        found = tl.inline_asm_elementwise(
            _instructions(KIND, False, UPPER), "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2
        )
    return found
