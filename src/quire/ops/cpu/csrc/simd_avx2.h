// x86-64-v3 with F16C: 8 lanes, 16 registers.
#pragma once

#include <immintrin.h>

namespace {

constexpr int W = 8;        // fp32 lanes of a vector
constexpr int ROWS = 6;     // the micro-kernel has ROWS x COLUMNS vectors of sums in registers
constexpr int COLUMNS = 2;

typedef float V __attribute__((vector_size(32)));
typedef int32_t I __attribute__((vector_size(32)));
typedef uint32_t U __attribute__((vector_size(32)));
typedef int16_t H __attribute__((vector_size(32)));
typedef uint8_t B __attribute__((vector_size(32)));

QUIRE_INLINE V fma(V a, V b, V c) { return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
QUIRE_INLINE V round_to_even(V x) { return (V)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// Return the larger lanes; if one is NaN, that of b.
QUIRE_INLINE V larger(V a, V b) { return (V)_mm256_max_ps((__m256)a, (__m256)b); }
// Lane i gets lane i ^ STEP.
template <int STEP>
QUIRE_INLINE V swap_lanes(V v) {
    if constexpr (STEP == 4) return (V)_mm256_permute2f128_ps((__m256)v, (__m256)v, 1);
    else return (V)_mm256_permute_ps((__m256)v, STEP == 2 ? 0x4e : 0xb1);
}
QUIRE_INLINE V fraction(V x) { return x - (V)_mm256_floor_ps((__m256)x); }
// Return p * 2^floor(x) for p in 1..2 and x >= -200, or 0 below 2^-126.
QUIRE_INLINE V scale_by_power(V p, V x) {
    V scaled = (V)((U)p + ((U)_mm256_cvtps_epi32(_mm256_floor_ps((__m256)x)) << 23));
    return x < -126.0f ? V{} : scaled;
}

// Load the first `bytes` bytes of a vector without reading memory after them; the rest is zero.
QUIRE_INLINE V load_lanes(const void* p, int bytes) {
    V v = {};
    if (bytes >= 32) memcpy(&v, p, 32);
    else memcpy(&v, p, (size_t)bytes);
    return v;
}

QUIRE_INLINE V widen_bf16(const uint16_t* p) {
    return (V)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
}
QUIRE_INLINE V widen_fp16(const uint16_t* p) { return (V)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }

QUIRE_INLINE void narrow_fp16(uint16_t* p, V v) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

QUIRE_INLINE __m128i low_halves(__m256i lanes) {  // the lower 16 bits of each lane
    __m256i packed = _mm256_packus_epi32(_mm256_and_si256(lanes, _mm256_set1_epi32(0xffff)), _mm256_setzero_si256());
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}
QUIRE_INLINE void narrow_32_to_16(uint16_t* p, U v) { _mm_storeu_si128((__m128i*)p, low_halves((__m256i)v)); }

QUIRE_INLINE V widen_int8(const int8_t* p) {
    return (V)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
QUIRE_INLINE void narrow_int8(int8_t* p, V v) {  // v: integers in -128..127
    const __m256i lanes = _mm256_cvtps_epi32((__m256)v);
    const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(halves, halves));
}

// Widen the lower or the upper of the two fp16 numbers in each lane.
QUIRE_INLINE V lower_fp16(V lanes) { return (V)_mm256_cvtph_ps(low_halves((__m256i)lanes)); }
QUIRE_INLINE V upper_fp16(V lanes) {
    return (V)_mm256_cvtph_ps(low_halves(_mm256_srli_epi32((__m256i)lanes, 16)));
}

// Widen 2 W fp16 numbers: the first W, the others.
QUIRE_INLINE void widen_halves(V halves, V* to) {
    to[0] = (V)_mm256_cvtph_ps(_mm256_castsi256_si128((__m256i)halves));
    to[1] = (V)_mm256_cvtph_ps(_mm256_extracti128_si256((__m256i)halves, 1));
}

// Look up each byte, which must be below 16, in a table.
QUIRE_INLINE B look_up(const uint8_t (&table)[16], B at) {
    return (B)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table)), (__m256i)at);
}

// Combine lower and upper bytes to numbers of 16 bits: the first eight of each 16 bytes, the others.
QUIRE_INLINE V join_lower(B low, B high) { return (V)_mm256_unpacklo_epi8((__m256i)low, (__m256i)high); }
QUIRE_INLINE V join_upper(B low, B high) { return (V)_mm256_unpackhi_epi8((__m256i)low, (__m256i)high); }

// Return acc plus the products of each lane's two int16 numbers.
QUIRE_INLINE I dot_halves(I acc, I a, I b) { return acc + (I)_mm256_madd_epi16((__m256i)a, (__m256i)b); }

// There is no instruction for four bytes. pair_products returns the sums of the products of each two bytes, unsigned in u and signed in
// s; they must fit 16 bits.
#define QUIRE_BYTE_PAIRS 1
QUIRE_INLINE H pair_products(I u, I s) { return (H)_mm256_maddubs_epi16((__m256i)u, (__m256i)s); }
// Zero-extend bytes 0 and 2, or 1 and 3, of each lane to 16 bits.
QUIRE_INLINE I even_bytes(I u) { return (I)_mm256_and_si256((__m256i)u, _mm256_set1_epi16(0xff)); }
QUIRE_INLINE I odd_bytes(I u) { return (I)_mm256_srli_epi16((__m256i)u, 8); }
// Sign-extend byte i (0..3) of each lane to 16 bits, and copy it to both halves.
QUIRE_INLINE I doubled_byte(I line, int i) {
    const I first = {0, 4, 8, 12, 0, 4, 8, 12};  // byte of a lane, within its half
    const I places = first * 0x01000100 + (i * 0x01000100 | 0x00800080);  // 0x80: a zero
    return (I)_mm256_srai_epi16(_mm256_shuffle_epi8((__m256i)line, (__m256i)places), 8);
}

}  // namespace
