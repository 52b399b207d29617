// AArch64: 4 lanes, 32 registers; optionally with dot products of bytes, and with those of bf16 pairs and of unsigned bytes.
#pragma once

#include <arm_neon.h>

namespace {

constexpr int W = 4;        // fp32 lanes of a vector
constexpr int ROWS = 6;     // the micro-kernel has ROWS x COLUMNS vectors of sums in registers
constexpr int COLUMNS = 4;

typedef float V __attribute__((vector_size(16)));
typedef int32_t I __attribute__((vector_size(16)));
typedef uint32_t U __attribute__((vector_size(16)));
typedef int16_t H __attribute__((vector_size(16)));
typedef uint8_t B __attribute__((vector_size(16)));

QUIRE_INLINE V fma(V a, V b, V c) { return (V)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
QUIRE_INLINE V round_to_even(V x) { return (V)vrndnq_f32((float32x4_t)x); }
// Return the larger lanes; if one is NaN, that of b.
QUIRE_INLINE V larger(V a, V b) { return a > b ? a : b; }
// Lane i gets lane i ^ STEP.
template <int STEP>
QUIRE_INLINE V swap_lanes(V v) {
    if constexpr (STEP == 2) return (V)vextq_f32((float32x4_t)v, (float32x4_t)v, 2);
    else return (V)vrev64q_f32((float32x4_t)v);
}
QUIRE_INLINE V floor_of(V x) { return (V)vrndmq_f32((float32x4_t)x); }
QUIRE_INLINE V fraction(V x) { return x - floor_of(x); }
// Return p * 2^floor(x) for p in 1..2 and x >= -200, or 0 below 2^-126.
QUIRE_INLINE V scale_by_power(V p, V x) {
    const V scaled = (V)((U)p + ((U)vcvtmq_s32_f32((float32x4_t)x) << 23));
    return x < -126.0f ? V{} : scaled;
}

// Load the first `bytes` bytes of a vector without reading memory after them; the rest is zero.
QUIRE_INLINE V load_lanes(const void* p, int bytes) {
    V v = {};
    if (bytes >= 16) memcpy(&v, p, 16);
    else memcpy(&v, p, (size_t)bytes);
    return v;
}

QUIRE_INLINE V widen_bf16(const uint16_t* p) { return (V)vshll_n_u16(vld1_u16(p), 16); }
QUIRE_INLINE V widen_fp16(const uint16_t* p) { return (V)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }

QUIRE_INLINE void narrow_fp16(uint16_t* p, V v) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v))); }
QUIRE_INLINE void narrow_32_to_16(uint16_t* p, U v) { vst1_u16(p, vmovn_u32((uint32x4_t)v)); }

QUIRE_INLINE V widen_int8(const int8_t* p) {
    int8x8_t bytes = vdup_n_s8(0);
    memcpy(&bytes, p, 4);
    return (V)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(bytes))));
}
QUIRE_INLINE void narrow_int8(int8_t* p, V v) {  // v: integers in -128..127
    const int16x4_t halves = vmovn_s32(vcvtq_s32_f32((float32x4_t)v));
    const int8x8_t bytes = vmovn_s16(vcombine_s16(halves, halves));
    memcpy(p, &bytes, 4);
}

// Widen the lower or the upper of the two fp16 numbers in each lane.
QUIRE_INLINE V lower_fp16(V lanes) { return (V)vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32((uint32x4_t)lanes))); }
QUIRE_INLINE V upper_fp16(V lanes) { return (V)vcvt_f32_f16(vreinterpret_f16_u16(vshrn_n_u32((uint32x4_t)lanes, 16))); }

// Widen 2 W fp16 numbers: the first W, the others.
QUIRE_INLINE void widen_halves(V halves, V* to) {
    const uint16x8_t all = (uint16x8_t)halves;
    to[0] = (V)vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(all)));
    to[1] = (V)vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(all)));
}

// Look up each byte, which must be below 16, in a table.
QUIRE_INLINE B look_up(const uint8_t (&table)[16], B at) { return (B)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)at); }

// Combine lower and upper bytes to numbers of 16 bits: the first eight of each 16 bytes, the others.
QUIRE_INLINE V join_lower(B low, B high) { return (V)vzip1q_u8((uint8x16_t)low, (uint8x16_t)high); }
QUIRE_INLINE V join_upper(B low, B high) { return (V)vzip2q_u8((uint8x16_t)low, (uint8x16_t)high); }

// Return acc plus the products of each lane's two int16 numbers.
QUIRE_INLINE I dot_halves(I acc, I a, I b) {
    const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
    return acc + (I)vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
}

// Return acc plus the products of each lane's four bytes, all of which are signed.
QUIRE_INLINE I dot_signed(I acc, I a, I b) {
    const int8x16_t x = (int8x16_t)a, y = (int8x16_t)b;
#if defined(__ARM_FEATURE_DOTPROD)
    return (I)vdotq_s32((int32x4_t)acc, x, y);
#else
    const int16x8_t low = vmull_s8(vget_low_s8(x), vget_low_s8(y)), high = vmull_high_s8(x, y);
    return acc + (I)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));  // widened: sums of two products do not fit 16 bits
#endif
}

// dot_bytes does the same with bytes of a weight, after byte_operand has converted them; 128 becomes BYTE_MIDDLE. dot_small: bytes below
// 128, which need no conversion.
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int BYTE_MIDDLE = 128;
QUIRE_INLINE I byte_operand(I weight) { return weight; }
QUIRE_INLINE I dot_bytes(I acc, I u, I s) { return (I)vusdotq_s32((int32x4_t)acc, (uint8x16_t)u, (int8x16_t)s); }
#else
constexpr int BYTE_MIDDLE = 0;
QUIRE_INLINE I byte_operand(I weight) { return (I)((U)weight ^ 0x80808080u); }
QUIRE_INLINE I dot_bytes(I acc, I operand, I s) { return dot_signed(acc, operand, s); }
#endif
QUIRE_INLINE I dot_small(I acc, I u, I s) { return dot_signed(acc, u, s); }

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define QUIRE_BF16_DOT 1
#define QUIRE_BF16_PAIRS 1  // bf16 is multiplied in pairs

// Return acc + a.low * b.low + a.high * b.high, where each lane is a pair of bf16: rounded to odd twice, with denormals as zero.
QUIRE_INLINE V dot_bf16(V acc, V a, V b) {
    return (V)vbfdotq_f32((float32x4_t)acc, (bfloat16x8_t)a, (bfloat16x8_t)b);
}

QUIRE_INLINE void narrow_bf16(uint16_t* p, V v) {
    const bfloat16x4_t halves = vcvt_bf16_f32((float32x4_t)v);
    memcpy(p, &halves, sizeof halves);
}
QUIRE_INLINE V pair_bf16(V first, V second) {
    return (V)vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)first), (float32x4_t)second);
}

// Interleave two rows of 8 bf16 numbers to 8 lanes of pairs, in order.
QUIRE_INLINE void interleave_bf16(V x, V y, V* low, V* high) {
    *low = (V)vzip1q_u16((uint16x8_t)x, (uint16x8_t)y);
    *high = (V)vzip2q_u16((uint16x8_t)x, (uint16x8_t)y);
}
#endif

}  // namespace
