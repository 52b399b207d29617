// The entry points of one ISA. This file is compiled once for each, with QUIRE_ISA set to its name; all that it includes
// has internal linkage, so that no function of one ISA can stand in for another's.

#include "attention.h"
#include "ceilings.h"
#include "linear.h"
#include "lora.h"
#include "recurrent.h"
#include "rounding.h"
#include "small.h"

#define QUIRE_NAME_(name, isa) quire_##name##_##isa
#define QUIRE_NAME(name, isa) QUIRE_NAME_(name, isa)
extern "C" void quire_write_copies(ParallelFor parallel_for, const Plan* plan, const WriteParams* p);  // in cache.cpp

#define ENTRY(name) extern "C" QUIRE_EXPORT void QUIRE_NAME(name, QUIRE_ISA)

namespace {

// The kind of number that operands of this dtype become.
template <class F>
static void with_kind(int32_t dtype, const F& f) {
    if (dtype == DTYPE_F32) f.template operator()<Fp32>();
    else if (dtype == DTYPE_F16) f.template operator()<Widened<F16>>();
#if defined(QUIRE_TILES)
    else f.template operator()<Tiled>();
#elif defined(QUIRE_BF16_DOT)
    else f.template operator()<Pairs>();
#else
    else f.template operator()<Widened<BF16>>();
#endif
}

// The kind that vectors multiply numbers of this dtype as, also where tiles are at hand.
template <class F>
static void with_vector_kind(int32_t dtype, const F& f) {
    with_kind(dtype, [&]<class K>() { f.template operator()<typename VectorKindOf<K>::Kind>(); });
}

// The kind of a weight.
template <class F>
static void with_weight(const LinearParams* p, const F& f) {
    if (p->narrow) with_kind(p->dtype, [&]<class K>() { with_narrow<K>(*p, f); });
    else if (p->bits) with_integers(*p, f);
    else with_kind(p->dtype, f);
}

// The kind that attention computes with.
template <class F>
static void with_attention(const SpecParams& spec, const F& f) {
    with_kind(spec.dtype, [&]<class K>() {
        if (spec.kv_dtype != DTYPE_S8) f.template operator()<K>();
        else if (spec.latent) f.template operator()<LatentKind<K>>();
        else f.template operator()<ScaledKind<K>>();
    });
}

}  // namespace

// How attention is to be cut: rows of an item at most, and rows with which a key is computed while it is read.
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
                V mixed = {};  // what a state that weighs nothing holds may be NaN: it is left out
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

// residual, where there is one, takes in x and is what is normalised.
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

// Rotates nothing and returns a place in `positions` that the tables of `length` rows do not hold, or -1.
extern "C" QUIRE_EXPORT int64_t QUIRE_NAME(rope, QUIRE_ISA)(
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

// How weights and rows are laid out: bytes of a weight once it is packed.
extern "C" QUIRE_EXPORT int64_t QUIRE_NAME(packed_bytes, QUIRE_ISA)(ParallelFor, const LinearParams* p) {
    int64_t bytes = 0;
    with_weight(p, [&]<class K>() { bytes = (p->out_size + W - 1) / W * strip_lines<K>(*p) * LinearWorker<K>::LINE; });
    return bytes;
}

// fp32 numbers that the copy of a row takes.
extern "C" QUIRE_EXPORT int64_t QUIRE_NAME(row_lanes, QUIRE_ISA)(ParallelFor, const LinearParams* p) {
    int64_t lanes = 0;
    with_weight(p, [&]<class K>() { lanes = x_lanes<K>(*p); });
    return lanes;
}

// How far rows of so many numbers should lie apart to be read fast where they lie.
extern "C" QUIRE_EXPORT int64_t QUIRE_NAME(row_stride, QUIRE_ISA)(ParallelFor, int64_t numbers, int32_t dtype) {
    int64_t stride = 0;
    with_kind(dtype, [&]<class K>() { stride = row_stride<K>(numbers); });
    return stride;
}

// fp32 numbers of room for what linear copies of so many rows of x that lie so many numbers apart.
extern "C" QUIRE_EXPORT int64_t QUIRE_NAME(copy_size, QUIRE_ISA)(ParallelFor, const LinearParams* p, int64_t rows, int64_t stride) {
    int64_t size = 0;
    with_weight(p, [&]<class K>() { size = copy_size<K>(*p, rows, stride); });
    return size;
}

ENTRY(linear)(ParallelFor parallel_for, const LinearParams* params) {
    with_weight(params, [&]<class K>() { linear<K>(parallel_for, params); });
}

// weight: [out, in]. packed: strips of W rows each.
ENTRY(pack)(ParallelFor parallel_for, const LinearParams* p, const void* weight, int64_t row_stride, void* packed) {
    with_kind(p->dtype, [&]<class K>() { pack<K>(parallel_for, *p, weight, row_stride, packed); });
}

// The same of a quantised weight.
ENTRY(pack_values)(ParallelFor parallel_for, const LinearParams* p, const IntegerParts* parts, char* packed) {
    with_integers(*p, [&]<class K>() { pack_values<K>(parallel_for, *p, *parts, packed); });
}

// The same of GGUF's blocks of a kind. rows: where each of the weight's begins.
ENTRY(pack_blocks)(ParallelFor parallel_for, const LinearParams* p, int32_t kind, const uint8_t* const* rows, char* packed) {
    with_integers(*p, [&]<class K>() { pack_blocks<K>(parallel_for, *p, kind, rows, packed); });
}

// The same of narrow numbers. codes: [out, in], one a byte. scales: [out, groups].
ENTRY(pack_narrow)(ParallelFor parallel_for, const LinearParams* p, const uint8_t* codes, const float* scales, char* packed) {
    with_kind(p->dtype, [&]<class F>() {
        with_narrow<F>(*p, [&]<class K>() { pack_narrow<K>(parallel_for, *p, codes, scales, packed); });
    });
}

// Rows of a weight that was packed, other than a narrow one. Writes nothing and returns a place in `places` that is no row, or -1.
extern "C" QUIRE_EXPORT int64_t QUIRE_NAME(unpack, QUIRE_ISA)(
    ParallelFor parallel_for, const LinearParams* p, const int64_t* places, int64_t count, void* to) {
    for (int64_t i = 0; i < count; i++)
        if (places[i] < 0 || places[i] >= p->out_size) return i;
    with_weight(p, [&]<class K>() {
        if constexpr (!NARROW<K>) unpack<K>(parallel_for, *p, places, count, to);
    });
    return -1;
}

// Bytes of a matrix [out, in] of an adapter, packed.
extern "C" QUIRE_EXPORT int64_t QUIRE_NAME(lora_bytes, QUIRE_ISA)(ParallelFor, int64_t out, int64_t in, int32_t dtype) {
    int64_t bytes = 0;
    with_vector_kind(dtype, [&]<class K>() { bytes = whole_vectors(out) / W * K::lanes(in) * Strips<K>::VECTOR; });
    return bytes;
}

ENTRY(lora_pack)(ParallelFor parallel_for, const void* matrix, int64_t out, int64_t in, void* packed, int32_t dtype) {
    LinearParams p = {};
    p.out_size = out, p.in_size = in;
    with_vector_kind(dtype, [&]<class K>() { pack<K>(parallel_for, p, matrix, in, packed); });
}

// fp32 numbers of room for each row, with adapters of that rank.
extern "C" QUIRE_EXPORT int64_t QUIRE_NAME(lora_room, QUIRE_ISA)(ParallelFor, int64_t in, int64_t rank, int32_t dtype) {
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
    with_element(dtype, [&](auto element) {
        activate_rows<decltype(element)>(parallel_for, x, stride, out, out_stride, rows, *activation);
    });
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

// x *= sigmoid(gate).
ENTRY(gate)(
    ParallelFor parallel_for, const void* gate, int64_t stride, void* x, int64_t x_stride, int64_t rows, const GateParams* p, int32_t dtype) {
    with_element(dtype, [&](auto element) {
        gate_rows<decltype(element)>(parallel_for, gate, stride, x, x_stride, rows, *p);
    });
}

// Rows of `heads` parts, each with a norm of its own.
ENTRY(gated_norm)(
    ParallelFor parallel_for, const void* x, int64_t stride, const void* gate, int64_t gate_stride, void* out, int64_t out_stride,
    int64_t rows, const GatedNormParams* p, int32_t dtype) {
    with_element(dtype, [&](auto element) {
        using E = decltype(element);
        using T = typename E::T;
        parallel(parallel_for, rows * p->heads, rows_a_thread(p->dim), [&](int64_t i) {
            const int64_t row = i / p->heads, at = i % p->heads * p->dim;
            gated_norm_row<E>((const T*)x + row * stride + at, (const T*)gate + row * gate_stride + at, p->weight + at,
                              (T*)out + row * out_stride + at, p->dim, p->eps, p->gate_first);
        });
    });
}

ENTRY(convolve)(ParallelFor parallel_for, const RecurrentStep* step, const ConvolutionParams* params, int32_t dtype) {
    with_element(dtype, [&](auto element) { convolve<decltype(element)>(parallel_for, *step, *params); });
}

ENTRY(recur)(ParallelFor parallel_for, const RecurrentStep* step, const RecurrenceParams* params, int32_t dtype) {
    with_element(dtype, [&](auto element) {
        using E = decltype(element);
        if (params->skip) recur<E, Rule::SPACE>(parallel_for, *step, *params);
        else recur<E, Rule::DELTA>(parallel_for, *step, *params);
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

// results: [threads], so that nothing is left out.
ENTRY(read)(ParallelFor parallel_for, const char* data, int64_t bytes, float* results, int64_t threads) {
    parallel(parallel_for, threads, 1, [&](int64_t i) {
        const int64_t stretch = bytes / threads / 64 * 64;
        results[i] = read_all(data + i * stretch, stretch);
    });
}

// Each thread multiplies and adds 2 * ROWS vectors `rounds` times; returns the operations of one thread, two an element.
extern "C" QUIRE_EXPORT int64_t QUIRE_NAME(multiply, QUIRE_ISA)(
    ParallelFor parallel_for, int64_t rounds, float* results, int64_t threads) {
    parallel(parallel_for, threads, 1, [&](int64_t i) { results[i] = multiply_all(rounds); });
    return rounds * 2 * ROWS * W * 2;
}

#ifdef QUIRE_HARDWARE_TILES
extern "C" int32_t quire_amx_adds_as_documented(void) { return adds_as_documented(); }
#endif

#include "program.h"
