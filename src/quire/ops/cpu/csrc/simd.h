// The vector types and functions of one ISA. All other files use only these; another ISA is another file next to
// simd_avx2.h that defines them.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#define QUIRE_INLINE static inline __attribute__((always_inline))
#define QUIRE_INLINE_MEMBER inline __attribute__((always_inline))

// Placed before a loop over an array of vectors, it unrolls the loop early, so that the array becomes registers. Otherwise the compiler
// may keep the array in memory and store every vector in every step.
#if defined(__clang__)
#define QUIRE_UNROLL _Pragma("clang loop unroll_count(16)")
#else
#define QUIRE_UNROLL _Pragma("GCC unroll 16")
#endif

#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#elif defined(__aarch64__)
#include "simd_neon.h"
#else
#error "no vector types for this ISA"
#endif

namespace {

constexpr int PANEL = COLUMNS * W;  // adjacent columns of a packed operand

QUIRE_INLINE V splat(float x) { return V{} + x; }

// Copy the bits of a number, which may be a pair of bf16, to all lanes.
QUIRE_INLINE V broadcast(const float* p) {
    int32_t bits;
    memcpy(&bits, p, sizeof bits);
    return (V)(I{} + bits);
}

QUIRE_INLINE V load(const float* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}

QUIRE_INLINE void store(float* p, V v) { memcpy(p, &v, sizeof v); }

// Return the larger of each two lanes, compared as integers.
QUIRE_INLINE V larger_bits(V a, V b) { return (I)a > (I)b ? a : b; }

QUIRE_INLINE V iota() {
    V v;
    for (int i = 0; i < W; i++) v[i] = (float)i;
    return v;
}

// Combine all lanes in a fixed order: halves, quarters, ...
template <class F>
QUIRE_INLINE float combine_lanes(V v, const F& f) {
    if constexpr (W == 16) v = f(v, swap_lanes<8>(v));
    if constexpr (W >= 8) v = f(v, swap_lanes<4>(v));
    v = f(v, swap_lanes<2>(v));
    return f(v, swap_lanes<1>(v))[0];
}

QUIRE_INLINE float reduce_max(V v) {
    return combine_lanes(v, [](V a, V b) __attribute__((always_inline)) { return larger(a, b); });
}

QUIRE_INLINE float reduce_add(V v) {
    return combine_lanes(v, [](V a, V b) __attribute__((always_inline)) { return a + b; });
}

// Combine the lanes of a and b whose index lacks the bit STEP or, with UPPER, has it: those of a go to the lanes without that bit, those
// of b to the lanes with it.
template <int STEP, bool UPPER>
QUIRE_INLINE V pair_lanes(V a, V b) {
    return [&]<int... K>(std::integer_sequence<int, K...>) __attribute__((always_inline)) {
#if defined(__clang__)
        return __builtin_shufflevector(a, b, ((K & STEP ? W + K - STEP : K) + (UPPER ? STEP : 0))...);
#else
        return __builtin_shuffle(a, b, I{((K & STEP ? W + K - STEP : K) + (UPPER ? STEP : 0))...});
#endif
    }(std::make_integer_sequence<int, W>());
}

// Exchange elements between rows i and i + STEP whose indices differ in that bit: one stage of a transposition.
template <int STEP>
QUIRE_INLINE void exchange(V* rows) {
    if constexpr (STEP < W) {
        for (int i = 0; i < W; i++) {
            if (i & STEP) continue;
            const V a = rows[i], b = rows[i + STEP];
            rows[i] = pair_lanes<STEP, false>(a, b);
            rows[i + STEP] = pair_lanes<STEP, true>(a, b);
        }
    }
}

QUIRE_INLINE void transpose(V* rows) {
    exchange<1>(rows);
    exchange<2>(rows);
    exchange<4>(rows);
    exchange<8>(rows);
}

// Combine all lanes of each row: lane i of the result belongs to row i. The rows are overwritten.
template <class F>
QUIRE_INLINE V reduce_rows(V (&rows)[W], const F& f) {
    transpose(rows);
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; i++) rows[i] = f(rows[i], rows[i + half]);
    return rows[0];
}

}  // namespace
