// Recurrences whose decay differs between the elements of a state: KDA, Mamba-1, RG-LRU. ops/recurrent/__init__.py has the formulas.
//
// A task is one head of one sequence, or some of its columns. It begins with the state before the chunk of its first row and updates it
// row by row. Rows of that chunk that earlier steps have computed are added from their record, by the same multiply-adds.
#pragma once

#include "recurrent.h"

namespace {

QUIRE_INLINE V square_root(V x) {
    for (int i = 0; i < W; i++) x[i] = __builtin_sqrtf(x[i]);
    return x;
}

// Return 1 - e^x for x <= 0, without cancellation.
QUIRE_INLINE V one_minus_exp(V x) {
    V p = splat(1.0f / 5040.0f);
    p = fma(p, x, splat(1.0f / 720.0f));
    p = fma(p, x, splat(1.0f / 120.0f));
    p = fma(p, x, splat(1.0f / 24.0f));
    p = fma(p, x, splat(1.0f / 6.0f));
    p = fma(p, x, splat(0.5f));
    p = fma(p, x, splat(1.0f));
    return x > -0.5f ? -x * p : 1.0f - exp2_negative(x * LOG2E);
}

template <int RULE>
struct Scan {
    static constexpr bool DELTA = RULE == SCAN_DELTA, LRU = RULE == SCAN_LRU;

    const RecurrentStep& step;
    const RecurrentSizes& sizes;
    const ScanParams& p;
    const int32_t dtype;  // of the inputs and the output
    const int64_t head, key_head;
    const int panel, panels;  // the first panel, the number of panels
    const bool writes_keys, writes_decays;
    const int64_t dim, wide;  // size of keys; the same rounded up to whole vectors
    float *rows, *states;     // [C][key, query, decay][Dk]; [panels][Dk][columns]
    float betas[PIECE];

    Scan(const RecurrentStep& step, const ScanParams& p, int32_t dtype, int64_t head, int panel, int panels)
        : step(step), sizes(step.sizes), p(p), dtype(dtype), head(head), key_head(head / (step.sizes.heads / step.sizes.k_heads)), panel(panel),
          panels(panels), writes_keys(panel == 0 && head % (step.sizes.heads / step.sizes.k_heads) == 0), writes_decays(panel == 0),
          dim(step.sizes.dim_k), wide((step.sizes.dim_k + W - 1) / W * W) {
        rows = Room::of(3 * PIECE * wide + panels * dim * PANEL);
        states = rows + 3 * PIECE * wide;
    }

    float* key(int t) const { return rows + 3 * t * wide; }
    float* query(int t) const { return key(t) + wide; }
    float* fade(int t) const { return key(t) + 2 * wide; }
    int64_t column(int i) const { return (int64_t)(panel + i) * PANEL; }
    int64_t left(int i, int v) const { return sizes.dim_v - column(i) - v * W; }
    void report(int64_t row) const { __atomic_store_n(step.nonfinite + row, 1, __ATOMIC_RELAXED); }

    // Read part of a vector of fp32, zeros after the last column.
    QUIRE_INLINE_MEMBER V read(const float* from, int i, int v) const {
        return left(i, v) >= W ? load(from + v * W) : left(i, v) > 0 ? get_part<F32>(from + v * W, (int)left(i, v)) : V{};
    }
    QUIRE_INLINE_MEMBER void write(float* to, V x, int i, int v) const {
        if (left(i, v) > 0) put_part<F32>(to + v * W, x, part(left(i, v), 0));
    }

    // Read a vector of an input, in which `from` is an element.
    template <int N>
    __attribute__((noinline)) void get(const void* x, int64_t from, int i, V* to) const {
        with_element(dtype, [&](auto element) {
            using E = decltype(element);
            const auto* row = (const typename E::T*)x + from;
            for (int v = 0; v < N; v++) to[v] = left(i, v) > 0 ? get_part<E>(row + v * W, part(left(i, v), 0)) : V{};
        });
    }

    void widen(const void* x, int64_t from, float* to) const {
        with_element(dtype, [&](auto element) {
            using E = decltype(element);
            for (int64_t c = 0; c < wide; c += W) store(to + c, get_part<E>((const typename E::T*)x + from + c, part(dim, c)));
        });
    }

    void normalise(float* x, float scale) const {
        const float squares = sum_over(wide, [&](int64_t c) { const V v = load(x + c); return v * v; });
        const float factor = 1.0f / __builtin_sqrtf(squares + NORM_EPS) * scale;
        for (int64_t c = 0; c < wide; c += W) store(x + c, load(x + c) * factor);
    }

    // Compute the keys, queries and decays of the chunk's rows. row: the step's row for the chunk's first row.
    void prepare(int64_t row, int low, int high, int32_t record) {
        float* keys = p.cache.keys + record * p.cache.keys_record + key_head * PIECE * dim;
        float* decays = p.cache.decays + record * p.cache.decays_record + head * PIECE * dim;
        for (int t = 0; t < high; t++) {
            if (t < low) {
                if (LRU) key(t)[0] = 1.0f;
                else memcpy(key(t), keys + t * dim, (size_t)dim * sizeof(float));
                if constexpr (DELTA) memcpy(fade(t), decays + t * dim, (size_t)dim * sizeof(float));
            } else if constexpr (LRU) {
                key(t)[0] = query(t)[0] = 1.0f;
            } else {
                const int64_t queries = (DELTA ? (row + t) * p.x_stride : (row + t) * p.side_stride) + key_head * dim;
                const void* from = DELTA ? p.x : p.side;
                widen(from, queries, query(t));
                widen(from, queries + sizes.k_heads * dim, key(t));
                if constexpr (DELTA) {
                    normalise(key(t), 1.0f);
                    normalise(query(t), 1.0f / __builtin_sqrtf((float)dim));
                    widen(p.gates, (row + t) * p.gates_stride + head * dim, fade(t));
                    V beta = V{};
                    with_element(dtype, [&](auto element) {
                        using E = decltype(element);
                        beta = get_part<E>((const typename E::T*)p.side + (row + t) * p.side_stride + head, 1);
                    });
                    betas[t] = sigmoid(beta)[0];
                }
                V odd = {};
                for (int64_t c = 0; c < wide; c += W) {
                    const V k = load(key(t) + c);
                    odd = odd + (k - k);
                    if constexpr (DELTA) {
                        const V x = load(fade(t) + c) + get_part<F32>(p.bias + head * dim + c, part(dim, c));
                        const float rate = p.rate[head];
                        const V g = p.floor < 0.0f ? p.floor * sigmoid(x * -rate) : softplus(x) * rate;
                        odd = odd + (g - g);
                        store(fade(t) + c, exp2_negative(g * LOG2E));
                    }
                }
                if (reduce_add(odd) != 0.0f) report(row + t);
                if (record >= 0 && writes_keys) memcpy(keys + t * dim, key(t), (size_t)dim * sizeof(float));
                if (DELTA && record >= 0 && writes_decays) memcpy(decays + t * dim, fade(t), (size_t)dim * sizeof(float));
            }
        }
    }

    // Update and read columns of the state.
    template <int N>
    void columns(int i, int64_t row, int64_t position, int low, int high, int32_t record) const {
        float* state = states + i * dim * PANEL;
        const int64_t first = head * sizes.dim_v + column(i), last = sizes.heads * sizes.dim_v;
        float* updates = p.cache.updates + record * p.cache.updates_record + head * PIECE * sizes.dim_v + column(i);
        float* decays = p.cache.decays + record * p.cache.decays_record + head * PIECE * sizes.dim_v + column(i);
        const float* rate = p.rate + head * dim * sizes.dim_v + column(i);
        for (int t = 0; t < high; t++, updates += sizes.dim_v, decays += sizes.dim_v) {
            V x[N], u[N], dt[N], o[N];
            for (int v = 0; v < N; v++) o[v] = u[v] = dt[v] = V{};
            if (t < low) {
                for (int v = 0; v < N; v++) {
                    u[v] = read(updates, i, v);
                    if constexpr (!DELTA) dt[v] = read(decays, i, v);
                }
            } else {
                get<N>(p.x, (row + t) * p.x_stride + (DELTA ? 2 * sizes.k_heads * dim : 0) + first, i, x);
                if constexpr (!DELTA) get<N>(p.gates, (row + t) * p.gates_stride + first, i, dt);
                if constexpr (LRU) get<N>(p.side, (row + t) * p.side_stride + first, i, u);
                V odd = {};
                for (int v = 0; v < N; v++) {
                    if constexpr (DELTA) {
                        for (int64_t d = 0; d < dim; d++) {
                            const V faded = load(state + d * PANEL + v * W) * fade(t)[d];
                            store(state + d * PANEL + v * W, faded);
                            o[v] = fma(splat(key(t)[d]), faded, o[v]);
                        }
                        u[v] = (x[v] - o[v]) * (betas[t] * p.scale);
                        o[v] = V{};
                    } else if constexpr (LRU) {
                        dt[v] = sigmoid(dt[v] + read(p.bias + first, i, v));
                        u[v] = sigmoid(u[v] + read(p.bias + last + first, i, v)) * x[v];
                        if (position + t > 0) u[v] = u[v] * square_root(one_minus_exp(2.0f * (read(rate, i, v) * dt[v])));
                    } else {
                        dt[v] = softplus(dt[v] + read(p.bias + first, i, v));
                        u[v] = dt[v] * x[v];
                    }
                    odd = odd + (u[v] - u[v]) + (dt[v] - dt[v]);
                    if (record >= 0) write(updates, u[v], i, v);
                    if (!DELTA && record >= 0) write(decays, dt[v], i, v);
                }
                if (reduce_add(odd) != 0.0f) report(row + t);
            }
            for (int64_t d = 0; d < dim; d++)
                for (int v = 0; v < N; v++) {
                    V s = load(state + d * PANEL + v * W);
                    if constexpr (!DELTA) s = s * exp2_negative(read(rate + d * sizes.dim_v, i, v) * dt[v] * LOG2E);
                    else if (t < low) s = s * fade(t)[d];
                    s = fma(splat(key(t)[d]), u[v], s);
                    store(state + d * PANEL + v * W, s);
                    if (t >= low) o[v] = fma(splat(query(t)[d]), s, o[v]);
                }
            if (t < low) continue;
            if (p.skip)
                for (int v = 0; v < N; v++) o[v] = fma(read(p.skip + first, i, v), x[v], o[v]);
            with_element(dtype, [&](auto element) {
                using E = decltype(element);
                auto* to = (typename E::T*)p.out + (row + t) * p.out_stride + first;
                for (int v = 0; v < N; v++)
                    if (left(i, v) > 0) put_part<E>(to + v * W, o[v], part(left(i, v), 0));
            });
        }
    }

    // Call f(address in a state record, address in the state of this task, panel, vector) for all columns.
    template <class F>
    void each_vector(int32_t record, const F& f) const {
        float* of_head = record < 0 ? nullptr : p.cache.state + record * p.cache.state_record + head * dim * sizes.dim_v;
        for (int i = 0; i < panels; i++)
            for (int64_t d = 0; d < dim; d++)
                for (int v = 0; v < PANEL / W; v++) f(of_head + d * sizes.dim_v + column(i), states + (i * dim + d) * PANEL + v * W, i, v);
    }

    void run(const Stretch& seq) {
        const bool begins = seq.first < PIECE;
        each_vector(begins ? -1 : seq.states[0], [&](float* kept, float* own, int i, int v) { store(own, begins ? V{} : read(kept, i, v)); });
        for (int64_t at = seq.first; at < seq.end();) {
            const int64_t begin = at / PIECE * PIECE, stop = begin + PIECE < seq.end() ? begin + PIECE : seq.end();
            const int low = (int)(at - begin), high = (int)(stop - begin);
            const int64_t j = seq.piece(at), row = seq.row + (at - seq.first) - low;
            prepare(row, low, high, seq.records[j]);
            for (int i = 0; i < panels; i++)
                with_width((int)left(i, 0), [&]<int N>() { columns<N>(i, row, begin, low, high, seq.records[j]); });
            if (high == PIECE && seq.states[j + 1] >= 0)
                each_vector(seq.states[j + 1], [&](float* kept, float* own, int i, int v) { write(kept, load(own), i, v); });
            at = stop;
        }
    }
};

template <int RULE>
static void scan(ParallelFor parallel_for, const RecurrentStep& step, const ScanParams& p, int32_t dtype) {
    const RecurrentSizes& sizes = step.sizes;
    if (step.num_seqs == 0) return;
    const int panels = (int)((sizes.dim_v + PANEL - 1) / PANEL);
    const int wanted = (int)((2 * p.threads + sizes.heads - 1) / sizes.heads), parts = p.threads == 1 || wanted <= 1 ? 1 : wanted < panels ? wanted : panels;
    const int64_t work = sizes.dim_k * sizes.dim_v * (step.num_rows / step.num_seqs + 1);
    parallel(parallel_for, sizes.heads * parts * step.num_seqs, rows_a_thread(work), [&](int64_t i) {
        const Stretch seq(step, i % step.num_seqs);
        const int at = (int)(i / step.num_seqs % parts), first = panels * at / parts, end = panels * (at + 1) / parts;
        if (seq.count) Scan<RULE>(step, p, dtype, i / step.num_seqs / parts, first, end - first).run(seq);
    });
}

}  // namespace
