// The entry points of small operators, the program of a model, and the chain of a draft head. The other files of a set have attention
// (attention.cpp), linears (linear.cpp, linear_integers.cpp), and recurrent layers (recurrent.cpp).

#include "ceilings.h"
#include "index.h"
#include "lora.h"
#include "small.h"

namespace {

// Call f.template operator()<K>() with the kind of operands that vectors use for this dtype, even if tiles are available.
template <class F>
static void with_vector_kind(int32_t dtype, const F& f) {
    with_kind(dtype, [&]<class K>() { f.template operator()<typename VectorKindOf<K>::Kind>(); });
}

}  // namespace

// Normalise x. With `residual`, add x to it first and normalise the sum.
ENTRY(rms_norm)(
    ParallelFor parallel_for, const void* x, int64_t outer_stride, int64_t inner, int64_t inner_stride, void* residual,
    int64_t residual_stride, const float* weight, void* out, int64_t out_stride, int64_t rows, int64_t dim, float eps,
    int32_t dtype) {
    with_element(dtype, [&](auto element) {
        using E = decltype(element);
        using T = typename E::T;
        const Rows<const T> from{(const T*)x, outer_stride, inner, inner_stride};
        const Rows<T> to{(T*)out, out_stride, inner, dim};
        parallel(parallel_for, rows, rows_a_thread(dim), [&](int64_t i) {
            const T* row = summed<E>(from[i], residual ? (T*)residual + i * residual_stride : nullptr, dim);
            rms_norm_row<E>(row, weight, to[i], dim, eps);
        });
    });
}

ENTRY(layer_norm)(
    ParallelFor parallel_for, const void* x, int64_t outer_stride, int64_t inner, int64_t inner_stride, void* residual,
    int64_t residual_stride, const float* weight, const float* bias, void* out, int64_t out_stride, int64_t rows, int64_t dim,
    float eps, int32_t dtype) {
    with_element(dtype, [&](auto element) {
        using E = decltype(element);
        using T = typename E::T;
        const Rows<const T> from{(const T*)x, outer_stride, inner, inner_stride};
        const Rows<T> to{(T*)out, out_stride, inner, dim};
        parallel(parallel_for, rows, rows_a_thread(dim), [&](int64_t i) {
            const T* row = summed<E>(from[i], residual ? (T*)residual + i * residual_stride : nullptr, dim);
            layer_norm_row<E>(row, weight, bias, to[i], dim, eps);
        });
    });
}

// Rotate q and k, and return -1. If a position is beyond the tables of `length` rows, change nothing and return its index.
ENTRY_OF(int64_t, rope)(
    ParallelFor parallel_for, void* q, int64_t q_token, int64_t q_heads, int64_t q_head, void* k, int64_t k_token,
    int64_t k_heads, int64_t k_head, const int64_t* positions, const float* cos, const float* sin, int64_t tokens,
    int64_t length, int64_t half, int32_t dtype) {
    for (int64_t t = 0; t < tokens; t++)
        if (positions[t] < 0 || positions[t] >= length) return t;
    with_element(dtype, [&](auto element) {
        using E = decltype(element);
        using T = typename E::T;
        const int64_t heads = q_heads + k_heads;
        parallel(parallel_for, tokens, rows_a_thread(2 * half * heads), [&](int64_t t) {
            const float *c = cos + positions[t] * half, *s = sin + positions[t] * half;
            for (int64_t h = 0; h < q_heads; h++) rope_row<E>((T*)q + t * q_token + h * q_head, c, s, half);
            for (int64_t h = 0; h < k_heads; h++) rope_row<E>((T*)k + t * k_token + h * k_head, c, s, half);
        });
    });
    return -1;
}

// Return the bytes of an adapter's packed matrix [out, in].
ENTRY_OF(int64_t, lora_bytes)(ParallelFor, int64_t out, int64_t in, int32_t dtype) {
    int64_t bytes = 0;
    with_vector_kind(dtype, [&]<class K>() { bytes = whole_vectors(out) / W * K::lanes(in) * Strips<K>::VECTOR; });
    return bytes;
}

ENTRY(lora_pack)(ParallelFor parallel_for, const void* matrix, int64_t out, int64_t in, void* packed, int32_t dtype) {
    with_vector_kind(dtype, [&]<class K>() { pack_strips<K>(parallel_for, matrix, in, out, in, packed); });
}

// Return the fp32 numbers of scratch per row, with adapters of that rank.
ENTRY_OF(int64_t, lora_room)(ParallelFor, int64_t in, int64_t rank, int32_t dtype) {
    int64_t room = 0;
    with_vector_kind(dtype, [&]<class K>() { room = Lora<K>::room(in, rank); });
    return room;
}

// slots: [rows], each row's adapter; -1: none.
ENTRY(lora)(ParallelFor parallel_for, const LoraParams* p, const int32_t* slots, int64_t count, int32_t dtype) {
    const LoraRows rows(slots, count);
    with_vector_kind(dtype, [&]<class K>() { Lora<K>{*p, rows}.run(parallel_for); });
}

ENTRY(swiglu)(
    ParallelFor parallel_for, const void* x, int64_t stride, void* out, int64_t out_stride, int64_t rows, int64_t dim,
    int32_t dtype) {
    with_element(dtype, [&](auto element) {
        using E = decltype(element);
        using T = typename E::T;
        parallel(parallel_for, rows, rows_a_thread(dim), [&](int64_t i) {
            const T* row = (const T*)x + i * stride;
            swiglu_row<E>(row, row + dim, (T*)out + i * out_stride, dim);
        });
    });
}

ENTRY(gelu)(
    ParallelFor parallel_for, const void* x, int64_t outer_stride, int64_t inner, int64_t inner_stride, void* out,
    int64_t out_stride, int64_t rows, int64_t dim, int32_t tanh, int32_t dtype) {
    with_element(dtype, [&](auto element) {
        using E = decltype(element);
        using T = typename E::T;
        const Rows<const T> from{(const T*)x, outer_stride, inner, inner_stride};
        const Rows<T> to{(T*)out, out_stride, inner, dim};
        parallel(parallel_for, rows, rows_a_thread(dim), [&](int64_t i) { gelu_row<E>(from[i], to[i], dim, tanh != 0); });
    });
}

ENTRY(activate)(
    ParallelFor parallel_for, const void* x, int64_t stride, void* out, int64_t out_stride, int64_t rows,
    const ActivationParams* activation, int32_t dtype) {
    activate_rows(parallel_for, x, stride, out, out_stride, rows, *activation, dtype);
}

// logits: [rows, E], overwritten. scores: [rows, E] and heaps: [rows, heap_size] of scratch.
ENTRY(choose)(
    ParallelFor parallel_for, float* logits, float* scores, uint64_t* heaps, int64_t* chosen, float* shares, int64_t rows,
    const ChoiceParams* choice) {
    const int64_t count = choice->num_experts, k = choice->num_chosen;
    parallel(parallel_for, rows, rows_a_thread(count), [&](int64_t i) {
        choose_row(logits + i * count, scores + i * count, *choice, heaps + i * heap_size(*choice), chosen + i * k, shares + i * k);
    });
}

ENTRY(logsumexp)(ParallelFor parallel_for, const float* x, int64_t stride, float* out, int64_t rows, int64_t dim) {
    parallel(parallel_for, rows, rows_a_thread(dim), [&](int64_t i) { out[i] = logsumexp_row(x + i * stride, dim); });
}

// heaps: [rows, k] of scratch.
ENTRY(top_k)(
    ParallelFor parallel_for, const float* x, int64_t stride, uint64_t* heaps, int64_t* places, int64_t rows, int64_t dim,
    int64_t k) {
    parallel(parallel_for, rows, rows_a_thread(dim),
             [&](int64_t i) { top_k_row(x + i * stride, dim, k, heaps + i * k, places + i * k); });
}

// shares: [rows, k], of each row's softmax.
ENTRY(top_k_softmax)(
    ParallelFor parallel_for, const float* x, int64_t stride, uint64_t* heaps, int64_t* places, float* shares, int64_t rows,
    int64_t dim, int64_t k) {
    parallel(parallel_for, rows, rows_a_thread(dim), [&](int64_t i) {
        top_k_row(x + i * stride, dim, k, heaps + i * k, places + i * k);
        shares_row(x + i * stride, dim, places + i * k, k, shares + i * k);
    });
}

ENTRY(index_scores)(ParallelFor parallel_for, const IndexParams* p) {
    with_element(p->dtype, [&](auto element) { index_rows<decltype(element)>(parallel_for, *p); });
}

// results: [threads], so that nothing is left out.
ENTRY(read)(ParallelFor parallel_for, const char* data, int64_t bytes, float* results, int64_t threads) {
    parallel(parallel_for, threads, 1, [&](int64_t i) {
        const int64_t stretch = bytes / threads / 64 * 64;
        results[i] = read_all(data + i * stretch, stretch);
    });
}

// Each thread multiplies and adds 2 * ROWS vectors `rounds` times. Return the operations of one thread, two per element.
ENTRY_OF(int64_t, multiply)(
    ParallelFor parallel_for, int64_t rounds, float* results, int64_t threads) {
    parallel(parallel_for, threads, 1, [&](int64_t i) { results[i] = multiply_all(rounds); });
    return rounds * 2 * ROWS * W * 2;
}

#include "chain.h"
