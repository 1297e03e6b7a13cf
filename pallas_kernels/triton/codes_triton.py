"""Decodes 8 and 4 bits to float16 in Triton kernels. It is PTX, as two numbers share a register. Triton would compute
each alone. Conversions are slow. So an integer becomes the low bits of a float16 number from 1024 on, whose last bit
counts 1."""

import triton
import triton.language as tl

_INT8 = """{{
    .reg .b32 high, ones, less;
    mov.b32 ones, 0x64806480;
    mov.b32 less, {less};
    shr.b32 high, $2, 8;
    lop3.b32 $0, $2, 0x00FF00FF, ones, 0x6A;
    lop3.b32 $1, high, 0x00FF00FF, ones, 0x6A;
    sub.rn.f16x2 $0, $0, less;
    sub.rn.f16x2 $1, $1, less;
}}"""  # 0x6A: a & b ^ c
_INT4 = """{{
    .reg .b32 high, ones, sixteens, sixteenth, less, least;
    mov.b32 ones, 0x64086408;
    mov.b32 sixteens, 0x64806480;
    mov.b32 sixteenth, 0x2C002C00;
    mov.b32 less, {less};
    mov.b32 least, {least};
    shr.b32 high, $4, 8;
    lop3.b32 $0, $4, 0x000F000F, ones, 0x6A;
    lop3.b32 $1, $4, 0x00F000F0, sixteens, 0x6A;
    lop3.b32 $2, high, 0x000F000F, ones, 0x6A;
    lop3.b32 $3, high, 0x00F000F0, sixteens, 0x6A;
    sub.rn.f16x2 $0, $0, less;
    fma.rn.f16x2 $1, $1, sixteenth, least;
    sub.rn.f16x2 $2, $2, less;
    fma.rn.f16x2 $3, $3, sixteenth, least;
}}"""  # every second code is 16 times as much at first
# With a zero beside the scale codes count from the least one on.
INT8, INT8_FROM_ZERO = (tl.constexpr(_INT8.format(less=less)) for less in ("0x64806480", "0x64006400"))
INT4 = tl.constexpr(_INT4.format(less="0x64086408", least="0xD480D480"))
INT4_FROM_ZERO = tl.constexpr(_INT4.format(less="0x64006400", least="0xD400D400"))

E4M3 = tl.constexpr("""{
    .reg .b32 sorted;
    .reg .b16 even, odd;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {even, odd}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
}""")
# A float8's bits are those of a float16 2^8 times smaller. Only NaN's are those of 1.875. Times 36864 that alone is
# infinite, and times 0 then NaN.
E4M3_BY_INTEGERS = tl.constexpr("""{
    .reg .b32 even, odd, large, none, size;
    mov.b32 large, 0x78807880;
    mov.b32 none, 0x00000000;
    mov.b32 size, 0x5C005C00;
    shl.b32 even, $2, 7;
    shr.b32 odd, $2, 1;
    lop3.b32 $1, $2, 0x80008000, none, 0xEA;
    shl.b32 $0, $2, 8;
    lop3.b32 $0, $0, 0x80008000, none, 0xEA;
    lop3.b32 even, even, 0x3F803F80, $0, 0xEA;
    lop3.b32 odd, odd, 0x3F803F80, $1, 0xEA;
    mul.rn.f16x2 $0, even, large;
    mul.rn.f16x2 $1, odd, large;
    mul.rn.f16x2 $0, $0, none;
    mul.rn.f16x2 $1, $1, none;
    fma.rn.f16x2 $0, even, size, $0;
    fma.rn.f16x2 $1, odd, size, $1;
}""")  # 0xEA: a & b | c


@triton.jit
def decoded(x, PLANES: tl.constexpr, INTEGERS: tl.constexpr, ZEROS: tl.constexpr, FLOAT8: tl.constexpr):
    """Returns float16 planes of codes. Each number of x, int16, has PLANES of them, the first in its lowest bits. Codes
    are integers, with zeros or without, or float8. FLOAT8: the device converts from that."""
    if PLANES == 4:
        int4: tl.constexpr = INT4_FROM_ZERO if ZEROS else INT4
        found = tl.inline_asm_elementwise(
            int4, "=&r,=&r,=&r,=&r,r", [x], (tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        int8: tl.constexpr = INT8_FROM_ZERO if ZEROS else INT8
        ptx: tl.constexpr = int8 if INTEGERS else E4M3 if FLOAT8 else E4M3_BY_INTEGERS
        found = tl.inline_asm_elementwise(ptx, "=&r,=&r,r", [x], (tl.float16, tl.float16), is_pure=True, pack=2)
    return found


@triton.jit
def from_e4m3(code):
    """Returns float32 of float8_e4m3fn's bits, which are those of a float16 2^8 times smaller."""
    code = code.to(tl.uint16)
    size = code & 0x7F
    bits = tl.where(size == 0x7F, 0x7FFF, size << 7) | ((code & 0x80) << 8)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
