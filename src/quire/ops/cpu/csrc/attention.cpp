// Entry points of attention over a paged cache, and of the related operators.

#include "attention.h"
#include "entries.h"
#include "rounding.h"
#include "vmath.h"

extern "C" void quire_write_copies(ParallelFor parallel_for, const Plan* plan, const WriteParams* p);  // in cache.cpp

namespace {

// Call f.template operator()<K>() with the kind of operands that attention uses.
template <class F>
static void with_attention(const SpecParams& spec, const F& f) {
    with_kind(spec.dtype, [&]<class K>() {
        if (spec.kv_dtype != DTYPE_S8) f.template operator()<K>();
        else if (spec.latent) f.template operator()<LatentKind<K>>();
        else f.template operator()<ScaledKind<K>>();
    });
}

}  // namespace

// Sizes for planning: the most rows of an item, and the number of rows whose computation takes as long as reading a key.
ENTRY(item_sizes)(ParallelFor, SpecParams* spec) {
    with_attention(*spec, [&]<class K>() {
        spec->item_rows = AttentionOf<K>::Worker::ITEM_ROWS;
        spec->memory_rows = AttentionOf<K>::Worker::MEMORY_ROWS;
    });
}

ENTRY(attention)(ParallelFor parallel_for, const Plan* plan, const AttentionParams* params) {
    with_attention(plan->spec, [&]<class K>() { attend<K>(parallel_for, plan, params); });
}

ENTRY(write_kv)(ParallelFor parallel_for, const Plan* plan, const WriteParams* params) {
    if (plan->spec.kv_dtype != DTYPE_S8) return quire_write_copies(parallel_for, plan, params);
    with_element(plan->spec.dtype, [&](auto element) { write_rounded<decltype(element)>(parallel_for, plan, params); });
}

// out = (e^lse_a * out_a + e^lse_b * out_b) / (e^lse_a + e^lse_b); rows [rows, dim], LSEs [rows], all contiguous.
ENTRY(merge_states)(
    ParallelFor parallel_for, const void* out_a, const float* lse_a, const void* out_b, const float* lse_b, void* out,
    float* lse, int64_t rows, int64_t dim, int32_t dtype) {
    with_element(dtype, [&](auto element) {
        using E = decltype(element);
        using T = typename E::T;
        parallel(parallel_for, rows, rows_a_thread(dim), [&](int64_t i) {
            const float highest = lse_b[i] > lse_a[i] ? lse_b[i] : lse_a[i];
            const float a = lse_a[i] == -INF ? 0.0f : exp2_scalar((lse_a[i] - highest) * LOG2E);
            const float b = lse_b[i] == -INF ? 0.0f : exp2_scalar((lse_b[i] - highest) * LOG2E);
            const float total = a + b, factor_a = a / total, factor_b = b / total;
            lse[i] = total == 0.0f ? -INF : highest + __builtin_logf(total);
            for (int64_t c = 0; c < dim; c += W) {
                const int n = part(dim, c);
                V mixed = {};  // a state with weight 0 may hold NaN, so it is skipped
                if (a != 0.0f) mixed = get_part<E>((const T*)out_a + i * dim + c, n) * factor_a;
                if (b != 0.0f) mixed = fma(get_part<E>((const T*)out_b + i * dim + c, n), splat(factor_b), mixed);
                put_part<E>((T*)out + i * dim + c, mixed, n);
            }
        });
    });
}

// out = state * e^lse / (e^lse + e^sink); rows [tokens * heads, dim], contiguous.
ENTRY(apply_sinks)(
    ParallelFor parallel_for, const void* state, const float* lse, const float* sinks, void* out, int64_t rows,
    int64_t heads, int64_t dim, int32_t dtype) {
    with_element(dtype, [&](auto element) {
        using E = decltype(element);
        using T = typename E::T;
        parallel(parallel_for, rows, rows_a_thread(dim), [&](int64_t i) {
            const float share = lse[i] == -INF ? 0.0f : 1.0f / (1.0f + exp_any(splat(sinks[i % heads] - lse[i]))[0]);
            for (int64_t c = 0; c < dim; c += W) {
                const int n = part(dim, c);
                put_part<E>((T*)out + i * dim + c, get_part<E>((const T*)state + i * dim + c, n) * share, n);
            }
        });
    });
}

#ifdef QUIRE_HARDWARE_TILES
extern "C" int32_t quire_amx_adds_as_documented(void) { return adds_as_documented(); }
#endif
