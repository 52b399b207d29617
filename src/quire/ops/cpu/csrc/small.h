// The small operators of a decoder. Rows are computed one by one, in fp32, in an order that depends only on their length.
#pragma once

#include "rows.h"

namespace {

// The input of a norm: x, or the sum of the residual and x, which is stored to the residual.
template <class E>
static const typename E::T* summed(const typename E::T* x, typename E::T* residual, int64_t dim) {
    if (!residual) return x;
    for (int64_t c = 0; c < dim; c += W) {
        const int n = part(dim, c);
        put_part<E>(residual + c, get_part<E>(residual + c, n) + get_part<E>(x + c, n), n);
    }
    return residual;
}

template <class E>
static void rms_norm_row(const typename E::T* x, const float* weight, typename E::T* out, int64_t dim, float eps) {
    const float squares = sum_over(dim, [&](int64_t c) { V v = get_part<E>(x + c, part(dim, c)); return v * v; });
    const float factor = 1.0f / __builtin_sqrtf(squares / (float)dim + eps);
    for (int64_t c = 0; c < dim; c += W) {
        const int n = part(dim, c);
        put_part<E>(out + c, get_part<E>(x + c, n) * factor * get_part<F32>(weight + c, n), n);
    }
}

template <class E>
static void layer_norm_row(const typename E::T* x, const float* weight, const float* bias, typename E::T* out, int64_t dim, float eps) {
    const float mean = sum_over(dim, [&](int64_t c) { return get_part<E>(x + c, part(dim, c)); }) / (float)dim;
    const float squares = sum_over(dim, [&](int64_t c) {
        const int n = part(dim, c);
        V v = only(get_part<E>(x + c, n) - mean, n);
        return v * v;
    });
    const float factor = 1.0f / __builtin_sqrtf(squares / (float)dim + eps);
    for (int64_t c = 0; c < dim; c += W) {
        const int n = part(dim, c);
        V v = (get_part<E>(x + c, n) - mean) * factor * get_part<F32>(weight + c, n);
        put_part<E>(out + c, bias ? v + get_part<F32>(bias + c, n) : v, n);
    }
}

// Rotate the pairs (i, i + half) by their angles.
template <class E>
static void rope_row(typename E::T* x, const float* cos, const float* sin, int64_t half) {
    for (int64_t c = 0; c < half; c += W) {
        const int n = part(half, c);
        const V a = get_part<E>(x + c, n), b = get_part<E>(x + half + c, n);
        const V cosine = get_part<F32>(cos + c, n), sine = get_part<F32>(sin + c, n);
        put_part<E>(x + c, a * cosine - b * sine, n);
        put_part<E>(x + half + c, b * cosine + a * sine, n);
    }
}

// Return x * Phi(x), with the tail of the normal distribution by Abramowitz & Stegun 7.1.26.
QUIRE_INLINE V gelu_erf(V x) {
    V z = magnitude(x) * 0.70710678118654752f;
    V t = 1.0f / (1.0f + 0.3275911f * z);
    V p = splat(1.061405429f);
    p = fma(p, t, splat(-1.453152027f));
    p = fma(p, t, splat(1.421413741f));
    p = fma(p, t, splat(-0.284496736f));
    p = fma(p, t, splat(0.254829592f));
    V tail = 0.5f * p * t * exp2_negative(z * z * -LOG2E);
    return x * (x < 0.0f ? tail : 1.0f - tail);
}

QUIRE_INLINE V gelu_tanh(V x) {
    V inner = 0.79788456080286536f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + tanh_any(inner));
}

template <class E>
static void swiglu_row(const typename E::T* gate, const typename E::T* up, typename E::T* out, int64_t dim) {
    for (int64_t c = 0; c < dim; c += W) {
        const int n = part(dim, c);
        put_part<E>(out + c, silu(get_part<E>(gate + c, n)) * get_part<E>(up + c, n), n);
    }
}

template <class E>
static void gelu_row(const typename E::T* x, typename E::T* out, int64_t dim, bool tanh) {
    for (int64_t c = 0; c < dim; c += W) {
        const int n = part(dim, c);
        V v = get_part<E>(x + c, n);
        put_part<E>(out + c, tanh ? gelu_tanh(v) : gelu_erf(v), n);
    }
}

// Compute f of the gates times the ups, or f of the numbers.
template <class E>
static void activate_row(const typename E::T* x, typename E::T* out, const ActivationParams& a) {
    const V limit = splat(a.limit);
    const auto row = [&](const auto& f) {
        for (int64_t c = 0; c < a.dim; c += W) {
            const int n = part(a.dim, c);
            V gate = get_part<E>(x + c, n);
            gate = f(gate > limit ? limit : gate);
            if (a.gated) {
                V up = get_part<E>(x + a.dim + c, n);
                up = up > limit ? limit : up < -limit ? -limit : up;
                gate = gate * (up + a.offset);
            }
            put_part<E>(out + c, gate, n);
        }
    };
    switch (a.function) {
        case FUNCTION_SILU: return row([&](V v) { return v / (1.0f + exp_any(v * -a.slope)); });
        case FUNCTION_GELU: return row([](V v) { return gelu_erf(v); });
        case FUNCTION_GELU_TANH: return row([](V v) { return gelu_tanh(v); });
        case FUNCTION_RELU: return row([](V v) { return v < 0.0f ? V{} : v; });
        case FUNCTION_RELU_SQUARED: return row([](V v) { return v < 0.0f ? V{} : v * v; });
        case FUNCTION_SIGMOID: return row([](V v) { return 1.0f / (1.0f + exp_any(-v)); });
    }
}

static void activate_rows(
    ParallelFor parallel_for, const void* x, int64_t x_stride, void* out, int64_t out_stride, int64_t rows, const ActivationParams& a,
    int32_t dtype) {
    with_element(dtype, [&](auto element) {
        using E = decltype(element);
        using T = typename E::T;
        parallel(parallel_for, rows, rows_a_thread(a.dim),
                 [&](int64_t i) { activate_row<E>((const T*)x + i * x_stride, (T*)out + i * out_stride, a); });
    });
}

// -------------------------------------------------------------------------------- for the sampler and for routers

static float largest_of(const float* x, int64_t dim) {
    V top = splat(-INF);
    for (int64_t c = 0; c < dim; c += W) {
        const int n = part(dim, c);
        V v = get_part<F32>(x + c, n);
        top = larger(iota() < (float)n ? v : splat(-INF), top);
    }
    return reduce_max(top);
}

static float logsumexp_row(const float* x, int64_t dim) {
    const float highest = largest_of(x, dim);
    if (highest == -INF || highest == INF) return highest;
    const float sum = sum_over(dim, [&](int64_t c) {
        const int n = part(dim, c);
        return only(exp2_negative((get_part<F32>(x + c, n) - highest) * LOG2E), n);
    });
    return highest + __builtin_logf(sum);
}

// Convert a number and its index to an integer with the order of preference: larger numbers first, of equal ones the lower index.
QUIRE_INLINE uint64_t rank_of(float x, int64_t place) {
    int32_t bits;
    x = x + 0.0f;  // -0 is 0
    memcpy(&bits, &x, sizeof bits);
    const uint32_t ordered = (uint32_t)bits ^ (bits < 0 ? 0xffffffffu : 0x80000000u);
    return (uint64_t)ordered << 32 | (0xffffffffu - (uint32_t)place);
}

static void sift_down(uint64_t* heap, int64_t size, int64_t at) {  // the least element is the first one
    const uint64_t moved = heap[at];
    for (int64_t child; (child = 2 * at + 1) < size; at = child) {
        if (child + 1 < size && heap[child + 1] < heap[child]) child++;
        if (heap[child] >= moved) break;
        heap[at] = heap[child];
    }
    heap[at] = moved;
}

// Find the indices of the k largest numbers, the largest first. heap: scratch for k.
static void top_k_row(const float* x, int64_t dim, int64_t k, uint64_t* heap, int64_t* places) {
    if (k == 0) return;
    for (int64_t i = 0; i < k; i++) heap[i] = rank_of(x[i], i);
    for (int64_t i = k / 2; i-- > 0;) sift_down(heap, k, i);
    auto offer = [&](int64_t c) {
        const uint64_t rank = rank_of(x[c], c);
        if (rank > heap[0]) heap[0] = rank, sift_down(heap, k, 0);
    };
    int64_t c = k;
    for (; c < dim && c % W; c++) offer(c);
    for (; c + W <= dim; c += W) {
        const float bar = x[0xffffffffu - (uint32_t)heap[0]];
        if (reduce_max((V)(load(x + c) > bar ? splat(1.0f) : V{})) == 0.0f) continue;
        for (int64_t i = c; i < c + W; i++) offer(i);
    }
    for (; c < dim; c++) offer(c);
    for (int64_t size = k; size > 0; size--) {
        places[size - 1] = (int64_t)(0xffffffffu - (uint32_t)heap[0]);
        heap[0] = heap[size - 1];
        sift_down(heap, size - 1, 0);
    }
}

// Compute the chosen numbers' shares of a row's softmax. The first chosen number must be the largest.
static void shares_row(const float* x, int64_t dim, const int64_t* chosen, int64_t k, float* shares) {
    if (k == 0) return;
    const float highest = x[chosen[0]];
    const float sum = sum_over(dim, [&](int64_t c) {
        const int n = part(dim, c);
        return only(exp2_negative((get_part<F32>(x + c, n) - highest) * LOG2E), n);
    });
    for (int64_t i = 0; i < k; i++) shares[i] = exp2_scalar((x[chosen[i]] - highest) * LOG2E) / sum;
}

// Return the sum of the `left` largest of `count` numbers, added from the largest on.
static float sum_of_best(const float* x, int64_t count, int64_t left) {
    float sum = 0.0f;
    for (float bar = INF;;) {
        int64_t equal = 0;
        float next = -INF;  // the largest below the bar
        for (int64_t i = 0; i < count; i++) {
            equal += x[i] == bar;
            next = x[i] < bar && x[i] > next ? x[i] : next;
        }
        for (; equal > 0 && left > 0; equal--, left--) sum += bar;
        if (left == 0) return sum;
        if (next == -INF) return -INF;
        bar = next;
    }
}

// Set the preferences of all experts outside the best groups to -inf. Of groups with equal sums, the first is better.
static void within_groups(float* preferred, const ChoiceParams& c, uint64_t* ranks) {
    const int64_t size = c.num_experts / c.groups, best = size < c.group_best ? size : c.group_best;
    for (int64_t group = 0; group < c.groups; group++) ranks[group] = rank_of(sum_of_best(preferred + group * size, size, best), group);
    for (int64_t group = 0; group < c.groups; group++) {
        int64_t better = 0;
        for (int64_t other = 0; other < c.groups; other++) better += ranks[other] > ranks[group];
        for (int64_t i = 0; better >= c.groups_chosen && i < size; i++) preferred[group * size + i] = -INF;
    }
}

// Return the size of the heap that a row's choice needs.
QUIRE_INLINE int64_t heap_size(const ChoiceParams& c) { return c.num_chosen > c.groups ? c.num_chosen : c.groups; }

// Choose a row's experts, the preferred one first, and their shares. logits: may be overwritten. scores: scratch of the same size.
// heap: scratch, see heap_size.
static void choose_row(float* logits, float* scores, const ChoiceParams& c, uint64_t* heap, int64_t* chosen, float* shares) {
    const int64_t count = c.num_experts, k = c.num_chosen;
    if (!c.sigmoid && !c.bias && c.groups == 1) {
        top_k_row(logits, count, k, heap, chosen);
        shares_row(logits, count, chosen, k, shares);
    } else {
        const float highest = c.sigmoid ? 0.0f : largest_of(logits, count);
        for (int64_t i = 0; i < count; i += W) {
            const int n = part(count, i);
            const V x = get_part<F32>(logits + i, n);
            put_part<F32>(scores + i, c.sigmoid ? 1.0f / (1.0f + exp_any(-x)) : exp2_negative((x - highest) * LOG2E), n);
        }
        if (!c.sigmoid) {
            const float sum = sum_over(count, [&](int64_t i) { return get_part<F32>(scores + i, part(count, i)); });
            for (int64_t i = 0; i < count; i++) scores[i] /= sum;
        }
        for (int64_t i = 0; i < count; i++) logits[i] = c.bias ? scores[i] + c.bias[i] : scores[i];
        if (c.groups > 1) within_groups(logits, c, heap);
        top_k_row(logits, count, k, heap, chosen);
        for (int64_t r = 0; r < k; r++) shares[r] = scores[chosen[r]];
    }
    float total = 1.0f;
    if (c.renormalised) {
        total = 0.0f;
        for (int64_t r = 0; r < k; r++) total += shares[r];
        total += c.epsilon;
    }
    for (int64_t r = 0; r < k; r++) shares[r] = shares[r] / total * c.factor * (c.scales ? c.scales[chosen[r]] : 1.0f);
}

}  // namespace
