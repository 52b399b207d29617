// The strips of a packed weight whose numbers are multiplied without a conversion, see linear.h.
#pragma once

#include "kinds.h"
#include "parallel.h"

namespace {

constexpr int64_t NEAR = 24 << 10;  // bytes of a weight that stay in the L1 cache for many rows

template <class K>
struct Strips {
    using T = typename K::E::T;
    static constexpr int VECTOR = W * (K::PAIR == 2 ? 4 : (int)sizeof(T));  // bytes
    static constexpr int NEAR_LANES = (int)(NEAR / (COLUMNS * VECTOR));

    const char* data;
    int64_t stride;  // bytes from one strip to the next

    __attribute__((always_inline)) V operator()(int64_t k, int j) const {
        const char* at = data + j * stride + k * VECTOR;
        if constexpr (K::PAIR == 2) return load((const float*)at);
        else return K::E::get((const T*)at);
    }
};

// Pack one strip: to[lane][column], zero after the last row of the weight and after its last input.
template <class K, class T = typename K::E::T>
static void pack_strip(const T* weight, int64_t row_stride, int64_t rows, int64_t in, T* to) {
    for (int64_t k = 0; k < K::lanes(in) * K::PAIR; k += K::PAIR, to += W * K::PAIR) {
        for (int i = 0; i < W; i++)
            for (int p = 0; p < K::PAIR; p++) to[i * K::PAIR + p] = i < rows && k + p < in ? weight[i * row_stride + k + p] : 0;
    }
}

// Pack a weight. weight: [out, in]. packed: its strips.
template <class K>
static void pack_strips(ParallelFor parallel_for, const void* weight, int64_t row_stride, int64_t out, int64_t in, void* packed) {
    using T = typename K::E::T;
    const int64_t size = K::lanes(in) * K::PAIR * W;
    parallel(parallel_for, (out + W - 1) / W, 1, [&](int64_t i) {
        const int64_t left = out - i * W;
        pack_strip<K>((const T*)weight + i * W * row_stride, row_stride, left < W ? left : W, in, (T*)packed + i * size);
    });
}

}  // namespace
