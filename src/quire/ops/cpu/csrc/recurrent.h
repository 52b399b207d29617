// Recurrent layers: short convolutions, the gated delta rule, Mamba-2. ops/recurrent/__init__.py has the formulas.
//
// A task is one head of one sequence, or some of its columns. It processes the sequence chunk by chunk: first the products of keys and
// queries with the state and with each other, then the updates row by row, the outputs, and the next state. Each number is one chain of
// multiply-adds in an order that depends only on its row and position, so the number of rows in a step affects no bit.
#pragma once

#include <cstdlib>

#include "kinds.h"
#include "rows.h"

namespace {

constexpr int PIECE = 32;
constexpr float NORM_EPS = 1e-6f;  // of queries and keys

enum class Rule { DELTA, SPACE };

// log(1 + e^x), through log(1 + y) = 2 atanh(y / (2 + y)) with y <= 1.
QUIRE_INLINE V softplus(V x) {
    const V y = exp_any(-magnitude(x)), z = y / (2.0f + y), square = z * z;
    V p = splat(2.0f / 17.0f);
    p = fma(p, square, splat(2.0f / 15.0f));
    p = fma(p, square, splat(2.0f / 13.0f));
    p = fma(p, square, splat(2.0f / 11.0f));
    p = fma(p, square, splat(2.0f / 9.0f));
    p = fma(p, square, splat(2.0f / 7.0f));
    p = fma(p, square, splat(2.0f / 5.0f));
    p = fma(p, square, splat(2.0f / 3.0f));
    p = fma(p, square, splat(2.0f));
    return fma(p, z, x > 0.0f ? x : V{});
}

QUIRE_INLINE V sigmoid(V x) { return 1.0f / (1.0f + exp_any(-x)); }

// x *= sigmoid(gate).
template <class E>
static void gate_rows(
    ParallelFor parallel_for, const void* gate, int64_t stride, void* x, int64_t x_stride, int64_t rows, const GateParams& p) {
    using T = typename E::T;
    if (p.gates == p.dim)
        return combine_rows<E>(parallel_for, gate, stride, x, x_stride, rows, p.dim, [](V value, V by) { return value * sigmoid(by); });
    parallel(parallel_for, rows, rows_a_thread(p.dim), [&](int64_t i) {
        const V factor = splat(sigmoid(get_part<E>((const T*)gate + i * stride, 1))[0]);
        T* row = (T*)x + i * x_stride;
        for (int64_t c = 0; c < p.dim; c += W) {
            const int n = part(p.dim, c);
            put_part<E>(row + c, get_part<E>(row + c, n) * factor, n);
        }
    });
}

// The rows of one sequence in a step.
struct Stretch {
    int64_t row, count;    // of the step's rows
    int64_t first;         // position of the first one
    const int32_t *states, *records;  // of each chunk, from the chunk of the first row on
    int64_t end() const { return first + count; }
    int64_t piece(int64_t position) const { return position / PIECE - first / PIECE; }  // entry of the tables

    Stretch(const RecurrentStep& step, int64_t s) {
        row = step.query_starts[s], count = step.query_starts[s + 1] - row, first = step.context_lens[s] - count;
        states = step.state_tables + s * step.table_stride, records = step.row_tables + s * step.table_stride;
    }
};

// ------------------------------------------------------------------------------------------------ the convolution

// Some channels of one sequence.
template <class E>
struct Convolution {
    using T = typename E::T;
    const RecurrentSizes& sizes;
    const ConvolutionParams& p;
    const Stretch seq;
    const int64_t channel, channels;  // the first channel, the number of channels

    // Return the inputs at a position of the sequence, from K - 1 before its rows on; null: before its start.
    const T* input(int64_t position) const {
        if (position >= seq.first) return (const T*)p.x + (seq.row + position - seq.first) * p.x_stride + channel;
        if (position < 0) return nullptr;
        const int64_t begin = seq.first / PIECE * PIECE;
        if (position >= begin)
            return (const T*)p.cache.inputs + seq.records[0] * p.cache.inputs_record + (position - begin) * sizes.width + channel;
        const int64_t place = position - begin + sizes.taps - 1;
        return (const T*)p.cache.tail + seq.states[0] * p.cache.tail_record + place * sizes.width + channel;
    }

    void run() const {
        const T* inputs[PIECE + 1];
        for (int64_t i = 0; i < seq.count; i++) {
            for (int64_t k = 0; k < sizes.taps; k++) inputs[k] = input(seq.first + i - (sizes.taps - 1) + k);
            T* out = (T*)p.out + (seq.row + i) * p.out_stride + channel;
            for (int64_t c = 0; c < channels; c += W) {
                const int n = part(channels, c);
                V sum = p.bias ? get_part<F32>(p.bias + channel + c, n) : V{};
                for (int64_t k = 0; k < sizes.taps; k++)
                    if (inputs[k]) sum = fma(get_part<F32>(p.weight + k * sizes.width + channel + c, n), get_part<E>(inputs[k] + c, n), sum);
                put_part<E>(out + c, p.silu ? silu(sum) : sum, n);
            }
        }
        keep();
    }

    void keep() const {
        for (int64_t j = 1; j <= seq.piece(seq.end()); j++) {
            if (seq.states[j] < 0) continue;
            const int64_t before = (seq.first / PIECE + j) * PIECE - (sizes.taps - 1);
            T* to = (T*)p.cache.tail + seq.states[j] * p.cache.tail_record + channel;
            for (int64_t k = 0; k < sizes.taps - 1; k++) copy(to + k * sizes.width, input(before + k));
        }
        for (int64_t position = seq.first; position < seq.end(); position++) {
            const int32_t record = seq.records[seq.piece(position)];
            if (record < 0) continue;
            copy((T*)p.cache.inputs + record * p.cache.inputs_record + position % PIECE * sizes.width + channel, input(position));
        }
    }

    void copy(T* to, const T* from) const { memcpy(to, from, (size_t)channels * sizeof(T)); }
};

template <class E>
static void convolve(ParallelFor parallel_for, const RecurrentStep& step, const ConvolutionParams& p) {
    constexpr int64_t block = 512;
    const RecurrentSizes& sizes = step.sizes;
    const int64_t blocks = (sizes.width + block - 1) / block;
    if (step.num_seqs == 0) return;
    // Tasks of the same channels of all sequences are adjacent, so that threads share a long sequence.
    parallel(parallel_for, blocks * step.num_seqs, rows_a_thread(block * sizes.taps * (step.num_rows / step.num_seqs)), [&](int64_t i) {
        const int64_t channel = i / step.num_seqs * block, left = sizes.width - channel;
        Convolution<E>{sizes, p, Stretch(step, i % step.num_seqs), channel, left < block ? left : block}.run();
    });
}

// ------------------------------------------------------------------------------------------------- the recurrence

// Memory of a thread, which grows to the size that its largest call needs.
class Room {
  public:
    static float* of(int64_t numbers) {
        static thread_local Room room;
        if (numbers > room.size) {
            free(room.data);
            room.data = (float*)aligned_alloc(64, ((size_t)numbers * sizeof(float) + 63) / 64 * 64);
            room.size = room.data ? numbers : 0;
            if (!room.data) abort();  // unlikely: it is a few hundred KiB
        }
        return room.data;
    }
    ~Room() { free(data); }

  private:
    float* data = nullptr;
    int64_t size = 0;
};

// Reduce each of W vectors: lane i of the result is the sum of sums[i]. All are added up as the same tree.
QUIRE_INLINE V sums_of_lanes(V* sums) {
    auto fold = [&]<int STEP>() __attribute__((always_inline)) {
        if constexpr (STEP < W) {
            QUIRE_UNROLL for (int i = 0; i < W; i += 2 * STEP)
                sums[i] = pair_lanes<STEP, false>(sums[i], sums[i + STEP]) + pair_lanes<STEP, true>(sums[i], sums[i + STEP]);
        }
    };
    fold.template operator()<1>();
    fold.template operator()<2>();
    fold.template operator()<4>();
    fold.template operator()<8>();
    return sums[0];
}

// Columns of a state or of updates, with the stride of its rows.
struct Strip {
    float* data;  // null: zeros
    int64_t stride;
};

// Some columns of one head of one sequence.
template <Rule RULE>
struct Recurrence {
    static constexpr bool DELTA = RULE == Rule::DELTA;
    static constexpr int PRODUCTS = DELTA ? 2 : 1;  // vectors per row that are multiplied with the state: key and query, or query

    const RecurrentStep& step;
    const RecurrentSizes& sizes;
    const RecurrenceParams& p;
    const int32_t dtype;  // of x, the gates and the output
    const int64_t head, key_head;
    const int panel, panels;  // the first panel, the number of panels
    const bool writes_keys, writes_decays;
    const int64_t dim, wide;  // size of keys; the same rounded up to whole vectors
    float *products, *scaled, *recalled, *states, *columns;  // see room()
    struct Range {
        const char *at, *end;
    };
    Range ahead[3];  // memory that the next task will read, to be prefetched
    int ranges = 0, fetched = 0;  // number of these ranges; number of ranges that were prefetched completely
    alignas(64) float decays[PIECE], betas[PIECE];  // G; beta, or dt
    // For row t and the rows j: -e^(G_t - G_j) k_j·k_t, and e^(G_t - G_j) k_j·q_t.
    alignas(64) float with_keys[PIECE][PIECE], with_queries[PIECE][PIECE];

    Recurrence(const RecurrentStep& step, const RecurrenceParams& p, int32_t dtype, int64_t head, int panel, int panels)
        : step(step), sizes(step.sizes), p(p), dtype(dtype), head(head), key_head(head / (step.sizes.heads / step.sizes.k_heads)), panel(panel),
          panels(panels), writes_keys(panel == 0 && head % (step.sizes.heads / step.sizes.k_heads) == 0), writes_decays(panel == 0),
          dim(step.sizes.dim_k), wide((step.sizes.dim_k + W - 1) / W * W) {
        float* at = Room::of(room());
        const auto take = [&](int64_t numbers) { float* taken = at; at += numbers; return taken; };
        products = take(2 * PIECE * wide);         // [C][key, query][Dk], zero after each row's end
        scaled = take(wide * PIECE);               // [Dk][C]: the keys, scaled for the next state
        recalled = take(2 * PIECE * PANEL);        // [C][for the key, for the query][columns]
        states = take(panels * dim * PANEL);       // [panels][Dk][columns]
        columns = take(panels * PIECE * PANEL);    // [panels][C][columns]: updates that are not stored in a record
    }
    int64_t room() const { return 2 * PIECE * wide + wide * PIECE + 2 * PIECE * PANEL + panels * (dim + PIECE) * PANEL; }

    int64_t column(int i) const { return (int64_t)(panel + i) * PANEL; }
    int64_t left(int i) const { return sizes.dim_v - column(i); }
    bool whole(int i) const { return left(i) >= PANEL; }

    float* key_record(int32_t record) const { return p.cache.keys + record * p.cache.keys_record + key_head * PIECE * dim; }
    float* decay_record(int32_t record) const { return p.cache.decays + record * p.cache.decays_record + head * PIECE; }
    float* update_record(int32_t record) const { return p.cache.updates + record * p.cache.updates_record + head * PIECE * sizes.dim_v; }
    float* state_record(int32_t record) const { return p.cache.state + record * p.cache.state_record + head * dim * sizes.dim_v; }

    // Return the offsets of a row's inputs in x, in numbers.
    int64_t query(int64_t row) const {
        return row * p.x_stride + (DELTA ? 0 : sizes.heads * sizes.dim_v + sizes.k_heads * dim) + key_head * dim;
    }
    int64_t key(int64_t row) const { return row * p.x_stride + (DELTA ? sizes.k_heads * dim : sizes.heads * sizes.dim_v) + key_head * dim; }
    int64_t value(int64_t row) const { return row * p.x_stride + (DELTA ? 2 * sizes.k_heads * dim : 0) + head * sizes.dim_v; }

    // Register the memory that a task of this head and sequence reads first, for prefetching: the chunk's rows, the state before it.
    void fetch_for(const Stretch& seq, int64_t of_head) {
        if (seq.count == 0 || panels * PANEL < sizes.dim_v) return;
        const int64_t of_key = of_head / (sizes.heads / sizes.k_heads), rows = seq.first % PIECE;
        if (rows > 0) {
            fetch_range(p.cache.keys + seq.records[0] * p.cache.keys_record + of_key * PIECE * dim, rows * dim);
            fetch_range(p.cache.updates + seq.records[0] * p.cache.updates_record + of_head * PIECE * sizes.dim_v, rows * sizes.dim_v);
        }
        if (seq.first >= PIECE) fetch_range(p.cache.state + seq.states[0] * p.cache.state_record + of_head * dim * sizes.dim_v, dim * sizes.dim_v);
    }
    void fetch_range(const float* from, int64_t numbers) { ahead[ranges++] = {(const char*)from, (const char*)(from + numbers)}; }

    void run(const Stretch& seq) {
        Strip state[MAX_PANELS];  // before the chunk
        const int64_t first_piece = seq.first / PIECE;
        for (int i = 0; i < panels; i++) state[i] = first_piece == 0 ? Strip{nullptr, 0} : state_of(seq.states[0], i);
        for (int64_t at = seq.first; at < seq.end();) {
            const int64_t begin = at / PIECE * PIECE, stop = begin + PIECE < seq.end() ? begin + PIECE : seq.end();
            const int low = (int)(at - begin), high = (int)(stop - begin);  // rows of the chunk
            const int64_t j = seq.piece(at), row = seq.row + (at - seq.first) - low;  // row: the step's row for the chunk's first row
            const int32_t record = seq.records[j];
            // The next state is only needed if the step continues from it or stores it.
            const bool goes_on = high == PIECE && (stop < seq.end() || seq.states[j + 1] >= 0);
            gates(row, low, high, record);
            keys_and_queries(row, low, high);
            const float* known = low > 0 ? key_record(record) : nullptr;
            for (int t = low; t < high; t++) weights(t, low, known);
            if (goes_on) scale_keys(low, known);
            for (int i = 0; i < panels; i++) {
                with_width((int)left(i), [&]<int N>() {
                    const Strip updates = updates_of(record, low, i);
                    recall<N>(state[i], low, high);
                    if constexpr (DELTA) solve<N>(state[i], i, row, low, high, updates);
                    else inject<N>(i, row, low, high, updates);
                    output<N>(state[i], i, row, low, high, updates);
                    if (record >= 0 && !whole(i)) put_columns(updates, low, high, update_record(record) + column(i), i);
                    if (goes_on) state[i] = next<N>(state[i], updates, seq.states[j + 1], i);
                });
            }
            if (record >= 0) keep(record, low, high);
            if (seq.count < PIECE) fetch_lines(INT32_MAX);
            at = stop;
        }
    }

    // ------------------------------------------------------------------------- columns, whole or a copy of a part

    Strip state_of(int32_t record, int i) const {
        float* from = state_record(record) + column(i);
        if (whole(i)) return {from, sizes.dim_v};
        Strip own{states + i * dim * PANEL, PANEL};
        get_columns(from, (int)dim, own, i);
        return own;
    }

    // Return the updates of a chunk, which include those of the rows before `low`.
    Strip updates_of(int32_t record, int low, int i) const {
        Strip own{columns + i * PIECE * PANEL, PANEL};
        if (record < 0) return own;
        float* from = update_record(record) + column(i);
        if (whole(i)) return {from, sizes.dim_v};
        get_columns(from, low, own, i);
        return own;
    }

    void get_columns(const float* from, int rows, const Strip& to, int i) const {
        for (int r = 0; r < rows; r++)
            for (int64_t c = 0; c < PANEL; c += W) {
                const V numbers = c < left(i) ? load_lanes(from + r * sizes.dim_v + c, (int)sizeof(float) * part(left(i), c)) : V{};
                store(to.data + r * to.stride + c, numbers);
            }
    }

    void put_columns(const Strip& from, int low, int high, float* to, int i) const {
        for (int r = low; r < high; r++)
            for (int64_t c = 0; c < left(i); c += W)
                put_part<F32>(to + r * sizes.dim_v + c, load(from.data + r * from.stride + c), part(left(i), c));
    }

    // --------------------------------------------------------------------------------------------- shared by all columns

    // Prefetch some lines for the next task, so that memory is used while this task computes.
    QUIRE_INLINE_MEMBER void fetch_lines(int lines) {
        for (; lines > 0 && fetched < ranges; lines--) {
            Range& range = ahead[fetched];
            __builtin_prefetch(range.at, 0, 2);
            range.at += 64;
            fetched += range.at >= range.end;
        }
    }

    void report(int64_t row) const { __atomic_store_n(step.nonfinite + row, 1, __ATOMIC_RELAXED); }

    float number_at(const void* numbers, int64_t i) const {
        float found = 0.0f;
        with_element(dtype, [&](auto element) {
            using E = decltype(element);
            found = get_part<E>((const typename E::T*)numbers + i, 1)[0];
        });
        return found;
    }

    // Compute G and beta of the rows low..high - 1. row: the step's row for the chunk's first row.
    void gates(int64_t row, int low, int high, int32_t record) {
        float* g = decays;
        for (int t = 0; t < low; t++) g[t] = decay_record(record)[t];
        const float bias = p.dt_bias[head], rate = p.decay_rate[head];
        for (int begin = low; begin < high; begin += W) {
            const int n = part(high, begin);
            V time = V{}, b = V{};
            for (int i = 0; i < n; i++) {
                const int64_t gate = (row + begin + i) * p.gates_stride + head;
                time[i] = number_at(p.gates, gate + (DELTA ? sizes.heads : 0));
                if constexpr (DELTA) b[i] = number_at(p.gates, gate);
            }
            V delta = softplus(time + bias);
            if constexpr (!DELTA) {  // comparisons with NaN are false, so NaN is not clamped
                delta = delta < p.dt_low ? splat(p.dt_low) : delta;
                delta = delta > p.dt_high ? splat(p.dt_high) : delta;
            }
            const V beta = DELTA ? sigmoid(b) * p.scale : delta, decay = delta * rate;
            for (int i = 0; i < n; i++) {
                const int t = begin + i;
                betas[t] = beta[i];
                g[t] = decay[i] + (t > 0 ? g[t - 1] : 0.0f);
                if (!(decay[i] - decay[i] == 0.0f)) report(row + t);
            }
        }
    }

    float* key_row(int t) const { return products + t * 2 * wide; }
    float* query_row(int t) const { return products + t * 2 * wide + wide; }

    void keys_and_queries(int64_t row, int low, int high) {
        for (int t = low; t < high; t++) {
            widen(key(row + t), key_row(t), 1.0f);
            widen(query(row + t), query_row(t), DELTA ? 1.0f / __builtin_sqrtf((float)dim) : 1.0f);
            V odd = {};
            for (int64_t c = 0; c < wide; c += W) { const V k = load(key_row(t) + c); odd = odd + (k - k); }
            if (reduce_add(odd) != 0.0f) report(row + t);
        }
    }

    // Widen to fp32, normalise to length 1 for the delta rule, and multiply by `scale`.
    void widen(int64_t from, float* to, float scale) {
        with_element(dtype, [&](auto element) {
            using E = decltype(element);
            for (int64_t c = 0; c < wide; c += W) {
                fetch_lines(W / 4);
                store(to + c, get_part<E>((const typename E::T*)p.x + from + c, part(dim, c)));
            }
        });
        if constexpr (!DELTA) return;
        const float squares = sum_over(wide, [&](int64_t c) { const V v = load(to + c); return v * v; });
        const float factor = 1.0f / __builtin_sqrtf(squares + NORM_EPS) * scale;
        for (int64_t c = 0; c < wide; c += W) store(to + c, load(to + c) * factor);
    }

    // Compute the weights of row t with the rows up to it. Keys of rows before `low` are in `known`.
    void weights(int t, int low, const float* known) {
        for (int begin = 0; begin <= t; begin += W) {
            const float* keys[W];
            for (int i = 0; i < W; i++) {
                const int j = begin + i <= t ? begin + i : t;
                keys[i] = j < low ? known + j * dim : key_row(j);
            }
            const V faded = exp2_negative((decays[t] - load_decays(begin, t)) * LOG2E);
            store(&with_queries[t][begin], dots(keys, query_row(t)) * faded);
            if constexpr (DELTA) store(&with_keys[t][begin], dots(keys, key_row(t)) * -faded);
        }
    }

    // Load the decays of rows up to t. Those after t are not computed yet.
    V load_decays(int begin, int t) const {
        return iota() + (float)begin <= (float)t ? load(decays + begin) : splat(decays[t]);
    }

    V dots(const float* const* keys, const float* x) {
        V sums[W] = {};
        int64_t c = 0;
        for (; c + W <= dim; c += W) {
            const V own = load(x + c);
            fetch_lines(W / 4);
            QUIRE_UNROLL for (int i = 0; i < W; i++) sums[i] = fma(load(keys[i] + c), own, sums[i]);
        }
        if (c < dim) {
            const V own = load(x + c);
            QUIRE_UNROLL for (int i = 0; i < W; i++)
                sums[i] = fma(load_lanes(keys[i] + c, (int)sizeof(float) * (int)(dim - c)), own, sums[i]);
        }
        return sums_of_lanes(sums);
    }

    // Scale each key by its decay up to the end of the chunk, and transpose: [Dk][C].
    void scale_keys(int low, const float* known) {
        for (int begin = 0; begin < PIECE; begin += W) {
            alignas(64) float factors[W];
            store(factors, exp2_negative((decays[PIECE - 1] - load(decays + begin)) * LOG2E));
            for (int64_t c = 0; c < wide; c += W) {
                V rows[W];
                for (int i = 0; i < W; i++) {
                    const int j = begin + i;
                    const float* key = j < low ? known + j * dim + c : key_row(j) + c;
                    rows[i] = load_lanes(key, (int)sizeof(float) * part(dim, c)) * factors[i];
                }
                transpose(rows);
                for (int i = 0; i < W; i++) store(scaled + (c + i) * PIECE + begin, rows[i]);
            }
        }
    }

    void keep(int32_t record, int low, int high) const {
        if (writes_keys)
            for (int t = low; t < high; t++) memcpy(key_record(record) + t * dim, key_row(t), (size_t)dim * sizeof(float));
        if (writes_decays) memcpy(decay_record(record) + low, decays + low, (size_t)(high - low) * sizeof(float));
    }

    // ---------------------------------------------------------------------------------------- columns, N vectors of them

    // Multiply keys and queries with the state.
    template <int N>
    void recall(const Strip& state, int low, int high) {
        if (!state.data) return;
        const int rows = PRODUCTS * (high - low);
        const float* x = DELTA ? key_row(low) : query_row(low);
        const int64_t lda = DELTA ? wide : 2 * wide;
        float* out = recalled + PRODUCTS * low * PANEL;
        const auto b = [&](int64_t k, int v) __attribute__((always_inline)) { return load(state.data + k * state.stride + v * W); };
        const auto fetch = [&](int64_t) __attribute__((always_inline)) { fetch_lines((N * W * (int)sizeof(float) + 63) / 64); };
        const RowBlocks blocks(rows);
        for (int i = 0; i < blocks.blocks; i++)
            with_rows(blocks.rows(i), [&]<int R>() {
                const float* a = x + blocks.first(i) * lda;
                float* c = out + blocks.first(i) * PANEL;
                micro_kernel<Multiply, R, N, Sums::REPLACED>(a, lda, b, c, PANEL, 0, (int)dim, fetch);
            });
    }

    // Compute e^(G_t) times the product of the state with the row's key (which = 0) or query.
    template <int N>
    QUIRE_INLINE_MEMBER void faded(const Strip& state, int t, int which, V* to) const {
        if (!state.data) {
            for (int v = 0; v < N; v++) to[v] = V{};
            return;
        }
        const V factor = exp2_negative(splat(decays[t] * LOG2E));
        const float* from = recalled + (PRODUCTS * t + which) * PANEL;
        for (int v = 0; v < N; v++) to[v] = load(from + v * W) * factor;
    }

    // Read the value of a row, zero after the last column.
    template <int N>
    __attribute__((noinline)) void get_value(int i, int64_t row, V* to) const {
        with_element(dtype, [&](auto element) {
            using E = decltype(element);
            const auto* from = (const typename E::T*)p.x + value(row) + column(i);
            for (int v = 0; v < N; v++) to[v] = left(i) > v * W ? get_part<E>(from + v * W, part(left(i), v * W)) : V{};
        });
    }

    template <int N>
    __attribute__((noinline)) void put_output(int i, int64_t row, const V* sums) const {
        with_element(dtype, [&](auto element) {
            using E = decltype(element);
            auto* to = (typename E::T*)p.out + row * p.out_stride + head * sizes.dim_v + column(i);
            for (int v = 0; v < N && v * W < left(i); v++) put_part<E>(to + v * W, sums[v], part(left(i), v * W));
        });
    }

    template <int N>
    void store_update(const V* update, int64_t row, float* to) const {
        V odd = {};
        for (int v = 0; v < N; v++) store(to + v * W, update[v]), odd = odd + (update[v] - update[v]);
        if (reduce_add(odd) != 0.0f) report(row);
    }

    // For R rows from t on: sums += weights[t][j] * updates[j], over the rows j < t, which all R rows have in common.
    template <int R, int N>
    QUIRE_INLINE_MEMBER void mix(const float (*weights)[PIECE], int t, const Strip& updates, V (&sums)[R][N]) const {
        for (int j = 0; j < t; j++) {
            V update[N];
            QUIRE_UNROLL for (int v = 0; v < N; v++) update[v] = load(updates.data + j * updates.stride + v * W);
            QUIRE_UNROLL for (int i = 0; i < R; i++) {
                const V weight = splat(weights[t + i][j]);
                QUIRE_UNROLL for (int v = 0; v < N; v++) sums[i][v] = fma(weight, update[v], sums[i][v]);
            }
        }
    }

    template <int N>
    QUIRE_INLINE_MEMBER void mix_one(float weight, const float* update, V* sums) const {
        QUIRE_UNROLL for (int v = 0; v < N; v++) sums[v] = fma(splat(weight), load(update + v * W), sums[v]);
    }

    template <int N>
    void solve(const Strip& state, int i, int64_t row, int low, int high, const Strip& updates) const {
        each_block(low, high, [&]<int R>(int t) {
            V sums[R][N];
            for (int r = 0; r < R; r++) {
                V known[N];
                get_value<N>(i, row + t + r, sums[r]);
                faded<N>(state, t + r, 0, known);
                for (int v = 0; v < N; v++) sums[r][v] = sums[r][v] - known[v];
            }
            mix<R, N>(with_keys, t, updates, sums);
            for (int r = 0; r < R; r++) {
                for (int j = t; j < t + r; j++) mix_one<N>(with_keys[t + r][j], updates.data + j * updates.stride, sums[r]);
                for (int v = 0; v < N; v++) sums[r][v] = sums[r][v] * betas[t + r];
                store_update<N>(sums[r], row + t + r, updates.data + (t + r) * updates.stride);
            }
        });
    }

    template <int N>
    void inject(int i, int64_t row, int low, int high, const Strip& updates) const {
        for (int t = low; t < high; t++) {
            V update[N];
            get_value<N>(i, row + t, update);
            for (int v = 0; v < N; v++) update[v] = update[v] * betas[t];
            store_update<N>(update, row + t, updates.data + t * updates.stride);
        }
    }

    template <int N>
    void output(const Strip& state, int i, int64_t row, int low, int high, const Strip& updates) const {
        each_block(low, high, [&]<int R>(int t) {
            V sums[R][N];
            for (int r = 0; r < R; r++) faded<N>(state, t + r, PRODUCTS - 1, sums[r]);
            mix<R, N>(with_queries, t, updates, sums);
            for (int r = 0; r < R; r++) {
                for (int j = t; j <= t + r; j++) mix_one<N>(with_queries[t + r][j], updates.data + j * updates.stride, sums[r]);
                if constexpr (!DELTA) {
                    V x[N];
                    get_value<N>(i, row + t + r, x);
                    for (int v = 0; v < N; v++) sums[r][v] = fma(splat(p.skip[head]), x[v], sums[r][v]);
                }
                put_output<N>(i, row + t + r, sums[r]);
            }
        });
    }

    // Call f.template operator()<R>(t) for the rows t..t + R - 1, up to ROWS at a time.
    template <class F>
    QUIRE_INLINE_MEMBER void each_block(int low, int high, const F& f) const {
        const RowBlocks blocks(high - low);
        for (int b = 0; b < blocks.blocks; b++)
            with_rows(blocks.rows(b), [&]<int R>() { f.template operator()<R>(low + blocks.first(b)); });
    }

    // Compute the state after the chunk, in its record if it has one.
    template <int N>
    Strip next(const Strip& state, const Strip& updates, int32_t record, int i) const {
        Strip to{states + i * dim * PANEL, PANEL};
        if (record >= 0 && whole(i)) to = {state_record(record) + column(i), sizes.dim_v};
        const V factor = exp2_negative(splat(decays[PIECE - 1] * LOG2E));
        for (int64_t d = 0; d < dim; d++)
            for (int v = 0; v < N; v++)
                store(to.data + d * to.stride + v * W, state.data ? load(state.data + d * state.stride + v * W) * factor : V{});
        const auto b = [&](int64_t k, int v) __attribute__((always_inline)) { return load(updates.data + k * updates.stride + v * W); };
        const RowBlocks blocks((int)dim);
        for (int n = 0; n < blocks.blocks; n++)
            with_rows(blocks.rows(n), [&]<int R>() {
                micro_kernel<Multiply, R, N, Sums::CONTINUED>(
                    scaled + blocks.first(n) * PIECE, PIECE, b, to.data + blocks.first(n) * to.stride, to.stride, 0, PIECE, idle);
            });
        if (record >= 0 && !whole(i)) put_columns(to, 0, (int)dim, state_record(record) + column(i), i);
        return to;
    }

    static constexpr int MAX_PANELS = 1024 / PANEL;
};

template <Rule RULE>
static void recur(ParallelFor parallel_for, const RecurrentStep& step, const RecurrenceParams& p, int32_t dtype) {
    const RecurrentSizes& sizes = step.sizes;
    if (step.num_seqs == 0) return;
    // Columns are divided only if there are few heads, since each part computes the keys' products again.
    const int panels = (int)((sizes.dim_v + PANEL - 1) / PANEL);
    const int wanted = (int)((2 * p.threads + sizes.heads - 1) / sizes.heads), parts = p.threads == 1 || wanted <= 1 ? 1 : wanted < panels ? wanted : panels;
    // Tasks of the same head of all sequences are adjacent, so that threads share a long sequence.
    const int64_t work = sizes.dim_k * sizes.dim_v * (step.num_rows / step.num_seqs + 1);
    const int64_t tasks = sizes.heads * parts * step.num_seqs;
    parallel(parallel_for, tasks, rows_a_thread(work), [&](int64_t i) {
        const Stretch seq(step, i % step.num_seqs);
        const int64_t head = i / step.num_seqs / parts;
        const int at = (int)(i / step.num_seqs % parts), first = panels * at / parts, end = panels * (at + 1) / parts;
        if (seq.count == 0) return;
        Recurrence<RULE> task(step, p, dtype, head, first, end - first);
        const int64_t next = i + 1;
        if (next < tasks) task.fetch_for(Stretch(step, next % step.num_seqs), next / step.num_seqs / parts);
        task.run(seq);
    });
}

// ------------------------------------------------------------------------------------------------ gates and gated norms

// Compute RMSNorm and multiplication by silu(gate) for each head, in either order.
template <class E>
static void gated_norm_row(
    const typename E::T* x, const typename E::T* gate, const float* weight, typename E::T* out, int64_t dim, float eps, bool gate_first) {
    const auto get = [&](int64_t c, int n) __attribute__((always_inline)) {
        const V v = get_part<E>(x + c, n);
        return gate_first ? v * silu(get_part<E>(gate + c, n)) : v;
    };
    const float squares = sum_over(dim, [&](int64_t c) { const V v = get(c, part(dim, c)); return v * v; });
    const float factor = 1.0f / __builtin_sqrtf(squares / (float)dim + eps);
    for (int64_t c = 0; c < dim; c += W) {
        const int n = part(dim, c);
        const V normed = get(c, n) * factor * get_part<F32>(weight + c, n);
        put_part<E>(out + c, gate_first ? normed : normed * silu(get_part<E>(gate + c, n)), n);
    }
}

}  // namespace
