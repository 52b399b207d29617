// x86-64-v4: 16 lanes, 32 registers; with AVX512_BF16 also the dot product of bf16 pairs.
#pragma once

#include <immintrin.h>

namespace {

constexpr int W = 16;       // fp32 lanes of a vector
constexpr int ROWS = 6;     // the micro-kernel has ROWS x COLUMNS vectors of sums in registers
constexpr int COLUMNS = 4;

typedef float V __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef int16_t H __attribute__((vector_size(64)));
typedef uint8_t B __attribute__((vector_size(64)));

QUIRE_INLINE V fma(V a, V b, V c) { return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
QUIRE_INLINE V round_to_even(V x) { return (V)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// Return the larger lanes; if one is NaN, that of b.
QUIRE_INLINE V larger(V a, V b) { return (V)_mm512_max_ps((__m512)a, (__m512)b); }
// Lane i gets lane i ^ STEP.
template <int STEP>
QUIRE_INLINE V swap_lanes(V v) {
    if constexpr (STEP == 8) return (V)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0x4e);
    else if constexpr (STEP == 4) return (V)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0xb1);
    else return (V)_mm512_permute_ps((__m512)v, STEP == 2 ? 0x4e : 0xb1);
}
QUIRE_INLINE V fraction(V x) { return (V)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
// Return p * 2^floor(x) for p in 1..2 and x >= -200, or 0 below the smallest number.
QUIRE_INLINE V scale_by_power(V p, V x) { return (V)_mm512_scalef_ps((__m512)p, (__m512)x); }

// Load the first `bytes` bytes of a vector without reading memory after them; the rest is zero.
QUIRE_INLINE V load_lanes(const void* p, int bytes) {
    if (bytes >= 64) return (V)_mm512_loadu_ps(p);
    return (V)_mm512_maskz_loadu_epi8(~0ull >> (64 - bytes), p);
}

QUIRE_INLINE V widen_bf16(const uint16_t* p) {
    return (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
}
QUIRE_INLINE V widen_fp16(const uint16_t* p) { return (V)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }

QUIRE_INLINE void narrow_fp16(uint16_t* p, V v) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
QUIRE_INLINE void narrow_32_to_16(uint16_t* p, U v) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)v));
}

QUIRE_INLINE V widen_int8(const int8_t* p) {
    return (V)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
QUIRE_INLINE void narrow_int8(int8_t* p, V v) {  // v: integers in -128..127
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)v)));
}

QUIRE_INLINE I nearest(V x) { return (I)_mm512_cvtps_epi32((__m512)x); }
// Store the lowest byte of each lane.
QUIRE_INLINE void put_bytes(void* p, I v) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v)); }

// Store the upper and the lower bytes of 64 integers below 2^16.
QUIRE_INLINE void split_bytes(const I (&v)[4], char* upper, char* lower) {
    // After packing, each quarter has four numbers of each of the four vectors.
    const __m512i first = _mm512_packus_epi32((__m512i)v[0], (__m512i)v[1]), second = _mm512_packus_epi32((__m512i)v[2], (__m512i)v[3]);
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0), low = _mm512_set1_epi16(0xff);
    const __m512i high = _mm512_packus_epi16(_mm512_srli_epi16(first, 8), _mm512_srli_epi16(second, 8));
    _mm512_storeu_si512(upper, _mm512_permutexvar_epi32(order, high));
    const __m512i rest = _mm512_packus_epi16(_mm512_and_si512(first, low), _mm512_and_si512(second, low));
    _mm512_storeu_si512(lower, _mm512_permutexvar_epi32(order, rest));
}

// Interleave four rows of 64 bytes, so that a lane has one byte of each row: columns 16 i + 4 j .. 16 i + 4 j + 3 are in quarter i of
// vector j.
QUIRE_INLINE void interleave_bytes(V (&rows)[4]) {
    const __m512i a = (__m512i)rows[0], b = (__m512i)rows[1], c = (__m512i)rows[2], d = (__m512i)rows[3];
    const __m512i ab = _mm512_unpacklo_epi8(a, b), cd = _mm512_unpacklo_epi8(c, d);
    const __m512i more_ab = _mm512_unpackhi_epi8(a, b), more_cd = _mm512_unpackhi_epi8(c, d);
    rows[0] = (V)_mm512_unpacklo_epi16(ab, cd), rows[1] = (V)_mm512_unpackhi_epi16(ab, cd);
    rows[2] = (V)_mm512_unpacklo_epi16(more_ab, more_cd), rows[3] = (V)_mm512_unpackhi_epi16(more_ab, more_cd);
}

// Reorder lanes from that order to the order of the columns.
QUIRE_INLINE void part_columns(V (&v)[4]) {
    const __m512 a = (__m512)v[0], b = (__m512)v[1], c = (__m512)v[2], d = (__m512)v[3];
    const __m512 low_ab = _mm512_shuffle_f32x4(a, b, 0x44), low_cd = _mm512_shuffle_f32x4(c, d, 0x44);
    const __m512 high_ab = _mm512_shuffle_f32x4(a, b, 0xee), high_cd = _mm512_shuffle_f32x4(c, d, 0xee);
    v[0] = (V)_mm512_shuffle_f32x4(low_ab, low_cd, 0x88), v[1] = (V)_mm512_shuffle_f32x4(low_ab, low_cd, 0xdd);
    v[2] = (V)_mm512_shuffle_f32x4(high_ab, high_cd, 0x88), v[3] = (V)_mm512_shuffle_f32x4(high_ab, high_cd, 0xdd);
}

// Widen the lower or the upper of the two fp16 numbers in each lane.
QUIRE_INLINE V lower_fp16(V lanes) { return (V)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)lanes)); }
QUIRE_INLINE V upper_fp16(V lanes) {
    return (V)_mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)lanes, 16)));
}

// Widen 2 W fp16 numbers: the first W, the others.
QUIRE_INLINE void widen_halves(V halves, V* to) {
    to[0] = (V)_mm512_cvtph_ps(_mm512_castsi512_si256((__m512i)halves));
    to[1] = (V)_mm512_cvtph_ps(_mm512_extracti64x4_epi64((__m512i)halves, 1));
}

// Look up each byte, which must be below 16, in a table.
QUIRE_INLINE B look_up(const uint8_t (&table)[16], B at) {
    return (B)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)table)), (__m512i)at);
}

// Combine lower and upper bytes to numbers of 16 bits: the first eight of each 16 bytes, the others.
QUIRE_INLINE V join_lower(B low, B high) { return (V)_mm512_unpacklo_epi8((__m512i)low, (__m512i)high); }
QUIRE_INLINE V join_upper(B low, B high) { return (V)_mm512_unpackhi_epi8((__m512i)low, (__m512i)high); }

// Return acc plus the products of each lane's two int16 numbers.
QUIRE_INLINE I dot_halves(I acc, I a, I b) { return acc + (I)_mm512_madd_epi16((__m512i)a, (__m512i)b); }

#if defined(__AVX512VNNI__)
#ifndef QUIRE_TILES  // tiles are emulated without VNNI, with the same bits
#define QUIRE_BYTE_DOT 1
#endif
// Return acc plus the products of each lane's four bytes, unsigned in u and signed in s; dot_small: the bytes of u are below 128.
constexpr int BYTE_MIDDLE = 128;  // the operand of dot_bytes for 128
QUIRE_INLINE I byte_operand(I weight) { return weight; }
QUIRE_INLINE I dot_bytes(I acc, I u, I s) { return (I)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)u, (__m512i)s); }
QUIRE_INLINE I dot_small(I acc, I u, I s) { return dot_bytes(acc, u, s); }
#else
// There is no instruction for four bytes. pair_products returns the sums of the products of each two bytes, unsigned in u and signed in
// s; they must fit 16 bits.
#define QUIRE_BYTE_PAIRS 1
QUIRE_INLINE H pair_products(I u, I s) { return (H)_mm512_maddubs_epi16((__m512i)u, (__m512i)s); }
// Zero-extend bytes 0 and 2, or 1 and 3, of each lane to 16 bits.
QUIRE_INLINE I even_bytes(I u) { return (I)_mm512_and_si512((__m512i)u, _mm512_set1_epi16(0xff)); }
QUIRE_INLINE I odd_bytes(I u) { return (I)_mm512_srli_epi16((__m512i)u, 8); }
// Sign-extend byte i (0..3) of each lane to 16 bits, and copy it to both halves.
QUIRE_INLINE I doubled_byte(I line, int i) {
    const U moved = (U)line << (24 - 8 * i) & 0xff000000u;
    return (I)_mm512_srai_epi16((__m512i)(moved | moved >> 16), 8);
}
#ifdef QUIRE_TILES
QUIRE_INLINE I dot_bytes(I acc, I u, I s) {  // equals the VNNI instruction, for emulated tiles
    const H bytes = (H)s;
    return dot_halves(dot_halves(acc, even_bytes(u), (I)((H)(bytes << 8) >> 8)), odd_bytes(u), (I)(bytes >> 8));
}
#endif
#endif

// Round 16 numbers to bf16; numbers below the smallest normal one become zero. pair_bf16: 32 numbers, in order.
#if defined(__AVX512BF16__)
#define QUIRE_BF16_DOT 1

// Return acc + a.low * b.low + a.high * b.high, where each lane is a pair of bf16.
QUIRE_INLINE V dot_bf16(V acc, V a, V b) { return (V)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b); }

QUIRE_INLINE void narrow_bf16(uint16_t* p, V v) {
    _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
}
QUIRE_INLINE V pair_bf16(V first, V second) { return (V)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first); }
#else
QUIRE_INLINE U rounded_bf16(V v) {  // the result is in the lower halves
    const U bits = (U)v, rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, quiet = (bits >> 16) | 0x40u;
    const U whole = (U)(v != v) ? quiet : rounded;  // rounding by addition could turn a NaN into an infinity
    return (U)((bits & 0x7f800000u) == 0u) ? (bits >> 31) << 15 : whole;
}
QUIRE_INLINE void narrow_bf16(uint16_t* p, V v) { narrow_32_to_16(p, rounded_bf16(v)); }
QUIRE_INLINE V pair_bf16(V first, V second) {
    V v;
    narrow_bf16((uint16_t*)&v, first), narrow_bf16((uint16_t*)&v + 16, second);
    return v;
}
#endif

#if defined(__AVX512BF16__) || defined(QUIRE_TILES)
#define QUIRE_BF16_PAIRS 1  // bf16 is multiplied in pairs, and rounded as above
#endif

// Interleave two rows of 32 bf16 numbers to 32 lanes of pairs, in order.
QUIRE_INLINE void interleave_bf16(V x, V y, V* low, V* high) {
    const __m512i first = _mm512_set_epi16(
        47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
    *low = (V)_mm512_permutex2var_epi16((__m512i)x, first, (__m512i)y);
    *high = (V)_mm512_permutex2var_epi16((__m512i)x, second, (__m512i)y);
}

}  // namespace
