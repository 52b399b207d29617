// The vector types of one ISA. Everything above this file is written in these words only; another ISA is another file
// beside simd_avx2.h that defines them.
#pragma once

#include <cstdint>
#include <cstring>

#define QUIRE_INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#else
#error "no vector types for this ISA"
#endif

namespace {

constexpr int PANEL = COLUMNS * W;  // columns of a packed operand that lie side by side

QUIRE_INLINE V splat(float x) { return V{} + x; }

// A lane's bits to all lanes: it may hold a pair of bf16.
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

QUIRE_INLINE V iota() {
    V v;
    for (int i = 0; i < W; i++) v[i] = (float)i;
    return v;
}

// Of two equal or unordered numbers the second, so that a NaN score does not become the maximum.
QUIRE_INLINE V larger(V a, V b) { return a > b ? a : b; }

// The order of the lanes' combination is fixed: halves, quarters, ...
QUIRE_INLINE float reduce_max(V v) {
    for (int step = W / 2; step; step /= 2) {
        I other;
        for (int i = 0; i < W; i++) other[i] = i ^ step;
        v = larger(v, __builtin_shuffle(v, other));
    }
    return v[0];
}

QUIRE_INLINE float reduce_add(V v) {
    for (int step = W / 2; step; step /= 2) {
        I other;
        for (int i = 0; i < W; i++) other[i] = i ^ step;
        v = v + __builtin_shuffle(v, other);
    }
    return v[0];
}

// Exchange the elements between rows i and i + STEP whose index differs in that bit: one stage of a transposition.
template <int STEP>
QUIRE_INLINE void exchange(V* rows) {
    I first, second;
    for (int k = 0; k < W; k++) {
        first[k] = (k & STEP) ? W + k - STEP : k;
        second[k] = (k & STEP) ? W + k : k + STEP;
    }
    for (int i = 0; i < W; i++) {
        if (i & STEP) continue;
        V a = rows[i], b = rows[i + STEP];
        rows[i] = __builtin_shuffle(a, b, first);
        rows[i + STEP] = __builtin_shuffle(a, b, second);
    }
}

QUIRE_INLINE void transpose(V* rows) {
    exchange<1>(rows);
    exchange<2>(rows);
    if constexpr (W >= 8) exchange<4>(rows);
    if constexpr (W >= 16) exchange<8>(rows);
}

}  // namespace
