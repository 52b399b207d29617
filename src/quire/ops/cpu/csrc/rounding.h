// Rounding of rows of numbers to bytes with a scale, with the same bits as ops/weights/rounding.py.
#pragma once

#include "elements.h"
#include "parallel.h"
#include "plan.h"

namespace {

constexpr float SMALLEST = 0x1p-100f;  // smaller numbers count as 0, so that 127 / x does not overflow
constexpr float LARGEST_INT8 = 127.0f;

struct Rounding {
    float scale = 0.0f, factor = 0.0f;  // factor 0: all numbers become zero
};

// Return the largest magnitude. finite: set to false if a number is not finite.
template <class E>
static float largest_number(const typename E::T* row, int64_t numbers, bool& finite) {
    V top = {}, found = {};  // found becomes NaN
    for (int64_t c = 0; c < numbers; c += W) {
        const V x = get_part<E>(row + c, numbers - c < W ? (int)(numbers - c) : W);
        found = fma(x, V{}, found);
        top = larger((V)((U)x & 0x7fffffffu), top);
    }
    finite = finite && reduce_add(found) == 0.0f;
    return reduce_max(top);
}

static Rounding rounding_of(float largest, bool finite) {
    if (!finite) return {__builtin_nanf(""), 0.0f};
    return largest < SMALLEST ? Rounding{} : Rounding{largest / LARGEST_INT8, LARGEST_INT8 / largest};
}

template <class E>
static void round_numbers(const typename E::T* row, int64_t numbers, const Rounding& rounding, int8_t* to) {
    if (rounding.factor == 0.0f) {
        memset(to, 0, (size_t)numbers);
        return;
    }
    for (int64_t c = 0; c < numbers; c += W) {
        const int left = numbers - c < W ? (int)(numbers - c) : W;
        put_part<S8>(to + c, round_to_even(get_part<E>(row + c, left) * rounding.factor), left);
    }
}

// Round a row. Return whether all of its numbers are finite.
template <class E>
static bool round_row(const typename E::T* row, int64_t numbers, int8_t* to, float* scale) {
    bool finite = true;
    const float largest = largest_number<E>(row, numbers, finite);
    const Rounding rounding = rounding_of(largest, finite);
    *scale = rounding.scale;
    round_numbers<E>(row, numbers, rounding, to);
    return finite;
}

// Write row t's K and V to its slot; slot -1 skips the row. Rows that are not finite are marked.
template <class E>
static void write_rounded(ParallelFor parallel_for, const Plan* plan, const WriteParams* p) {
    using T = typename E::T;
    const SpecParams& spec = plan->spec;
    const CacheParams& cache = p->cache;
    const int64_t tokens = plan->step.query_starts[plan->step.num_seqs];
    const int64_t first = spec.latent ? spec.head_dim_v : 0;  // K's numbers from here on are not part of V
    const int64_t numbers = (int64_t)spec.num_kv_heads * (spec.head_dim - first + spec.head_dim_v);
    parallel(parallel_for, tokens, rows_a_thread(numbers), [&](int64_t t) {
        const int64_t slot = plan->step.slots[t];
        if (slot < 0) return;
        const int64_t block = slot / spec.block_size, offset = slot % spec.block_size;
        bool finite = true;
        for (int64_t h = 0; h < spec.num_kv_heads; h++) {
            const T* key = (const T*)p->k_new + t * p->k_new_token + h * p->k_new_head + first;
            const T* value = (const T*)p->v_new + t * p->v_new_token + h * p->v_new_head;
            int8_t* k = (int8_t*)cache.k + block * cache.k_block + h * cache.k_head + offset * cache.k_slot + first;
            int8_t* v = (int8_t*)cache.v + block * cache.v_block + h * cache.v_head + offset * cache.v_slot;
            float* k_scale = cache.k_scale + block * cache.k_scale_block + h * cache.k_scale_head + offset * cache.k_scale_slot;
            float* v_scale = cache.v_scale + block * cache.v_scale_block + h * cache.v_scale_head + offset * cache.v_scale_slot;
            finite &= round_row<E>(key, spec.head_dim - first, k, k_scale);
            finite &= round_row<E>(value, spec.head_dim_v, v, v_scale);
        }
        if (!finite) plan->step.nonfinite[t] = 1;
    });
}

}  // namespace
