// x @ weight.T + bias for a weight that was packed once.
//
// W rows of the weight, transposed, make a strip: the vectors that the micro-kernel reads lie one after the other, so a
// strip is one stream from memory however many strips are multiplied at a time.
//
// Every number of the output is the bias, plus one chain of multiply-adds for each NEAR_LANES lanes, in ascending order. Its
// bits depend neither on the other rows nor on how the work is cut, and the error grows with the root of the chains' length
// and number, not of all inputs.
#pragma once

#include "kinds.h"
#include "parallel.h"
#include "params.h"

namespace {

constexpr int CHUNK = 96;           // rows of x that an item has at most
constexpr int64_t NEAR = 24 << 10;  // bytes of the weight that stay in the first cache while a chunk's rows pass by
constexpr int64_t PANEL_BYTES = 512 << 10;  // of the weight, that stay in the second cache beside the rows
constexpr int64_t MANY = 16;        // items a thread, with which it does not matter how evenly they can be shared
constexpr int64_t FORK = 1 << 16;   // multiply-adds that are worth a second thread

// The strips of one kind of number.
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

// Brings COUNT strips into the cache, a vector of each for each lane that is multiplied. LOCALITY 3: into all caches, for
// other rows that will want them. 0: past the larger ones, where the weights of a step would drive out all that is used
// from step to step, the interpreter's code not least.
template <class S, int COUNT, int LOCALITY>
struct Fetch {
    const char* at;
    int64_t stride;

    __attribute__((always_inline)) void operator()(int64_t k) const {
        for (int j = 0; j < COUNT; j++) __builtin_prefetch(at + j * stride + k * S::VECTOR, 0, LOCALITY);
    }
};

// One strip: to[lane][column], columns after the last row of the weight being zero.
template <class K, class T = typename K::E::T>
static void pack_strip(const T* weight, int64_t row_stride, int64_t rows, int64_t in, T* to) {
    for (int64_t k = 0; k < in; k += K::PAIR, to += W * K::PAIR) {
        for (int i = 0; i < W; i++)
            for (int p = 0; p < K::PAIR; p++) to[i * K::PAIR + p] = i < rows && k + p < in ? weight[i * row_stride + k + p] : 0;
    }
}

// One product.
struct LinearCall {
    const LinearParams* params;
    const float* x;  // [T, x_stride] lanes
    int64_t x_stride, strips, lanes, panels, chunks;
    int64_t first;  // of its items among those of all products
};

// What all workers share: products with weights of one shape, as one stretch of work.
struct LinearWork {
    const LinearCall* calls;
    int64_t items;
    int64_t next;  // item that nobody has taken yet
};

template <class K>
struct LinearWorker {
    using E = typename K::E;
    using T = typename E::T;
    using S = Strips<K>;

    LinearWork& all;
    const LinearCall* current;  // whose item was taken last
    alignas(64) float sums[CHUNK * PANEL];

    explicit LinearWorker(LinearWork& all) : all(all), current(all.calls) {}

    struct Item {
        const LinearCall* call;
        int64_t first_row, first_strip;
        int rows, strips;
        S weight;
    };

    // The next item: a panel of strips and a chunk of rows. A panel that fits the second cache meets all chunks before the
    // next panel; else a chunk meets all panels.
    bool take(Item& item) {
        int64_t index = __atomic_fetch_add(&all.next, 1, __ATOMIC_RELAXED);
        if (index >= all.items) return false;
        while (index >= current->first + current->panels * current->chunks) current++;
        const LinearCall& call = *current;
        const LinearParams& p = *call.params;
        index -= call.first;
        item.call = &call;
        const bool stays = call.lanes * S::VECTOR * COLUMNS <= PANEL_BYTES;
        const int64_t panel = stays ? index / call.chunks : index % call.panels;
        const int64_t chunk = stays ? index % call.chunks : index / call.panels;
        item.first_row = chunk * CHUNK;
        item.rows = (int)(p.rows - item.first_row < CHUNK ? p.rows - item.first_row : CHUNK);
        item.first_strip = call.strips * panel / call.panels;
        item.strips = (int)(call.strips * (panel + 1) / call.panels - item.first_strip);
        const int64_t stride = call.lanes * S::VECTOR;
        item.weight = {(const char*)p.weight + item.first_strip * stride, stride};
        return true;
    }

    void work() {
        Item item, after;
        for (bool more = take(item); more; item = after) {
            more = take(after);
            if (!more) after.weight = item.weight;  // which is in the cache
            start(item);
            const int64_t lanes = item.call->lanes;
            for (int64_t begin = 0; begin < lanes; begin += S::NEAR_LANES) {
                const int64_t end = begin + S::NEAR_LANES < lanes ? begin + S::NEAR_LANES : lanes;
                // The lanes that come next are fetched meanwhile: of this item, or of the next one.
                if (end < lanes) multiply(item, begin, end, item.weight.data + end * S::VECTOR);
                else multiply(item, begin, end, after.weight.data);
            }
            if (item.call->params->out_dtype == DTYPE_F32) finish<F32>(item);
            else finish<E>(item);
        }
    }

    void start(const Item& item) {
        const LinearParams& p = *item.call->params;
        for (int64_t c = 0; c < item.strips * W; c += W) {
            const int64_t left = p.out_size - item.first_strip * W - c;
            const V v = p.bias ? get_part<F32>(p.bias + item.first_strip * W + c, left < W ? (int)left : W) : V{};
            for (int i = 0; i < item.rows; i++) store(sums + i * PANEL + c, v);
        }
    }

    void multiply(const Item& item, int64_t begin, int64_t end, const char* next) {
        const RowBlocks blocks(item.rows);
        const LinearCall& call = *item.call;
        const int64_t lda = call.x_stride, stride = item.weight.stride;
        const float* x = call.x + item.first_row * lda;
        next -= begin * S::VECTOR;
        for (int b = 0; b < blocks.blocks; b++) {
            const float* a = x + blocks.first(b) * lda;
            float* c = sums + blocks.first(b) * PANEL;
            with_vectors(item.strips, [&]<int N>() {
                with_rows(blocks.rows(b), [&]<int R>() {
                    const auto run = [&]<int COUNT, int LOCALITY>() {
                        const Fetch<S, COUNT, LOCALITY> fetch{b * COUNT < COLUMNS ? next + b * COUNT * stride : next, stride};
                        micro_kernel<typename K::M, R, N, Sums::ADDED>(a, lda, item.weight, c, PANEL, begin, end, fetch);
                    };
                    // The blocks of rows share the strips that are to be fetched.
                    if (blocks.blocks == 1) run.template operator()<COLUMNS, 0>();
                    else if (blocks.blocks < COLUMNS) run.template operator()<2, 0>();
                    else if (call.chunks == 1) run.template operator()<1, 0>();
                    else run.template operator()<1, 3>();
                });
            });
        }
    }

    template <class Out>
    void finish(const Item& item) {
        const LinearParams& p = *item.call->params;
        const int64_t column = item.first_strip * W;
        const int64_t columns = p.out_size - column < item.strips * W ? p.out_size - column : item.strips * W;
        for (int i = 0; i < item.rows; i++) {
            typename Out::T* out = (typename Out::T*)p.out + (item.first_row + i) * p.out_size + column;
            for (int64_t c = 0; c < columns; c += W)
                put_part<Out>(out + c, load(sums + i * PANEL + c), columns - c < W ? (int)(columns - c) : W);
        }
    }
};

template <class K>
static LinearCall linear_call(const LinearParams* p) {
    LinearCall call = {};
    call.params = p;
    call.strips = (p->out_size + W - 1) / W, call.lanes = (p->in_size + K::PAIR - 1) / K::PAIR;
    call.chunks = (p->rows + CHUNK - 1) / CHUNK;
    return call;
}

// The rows of x as lanes: where they lie if they are that already, else copied.
template <class K>
static void take_rows(ParallelFor parallel_for, LinearCall& call) {
    using T = typename K::E::T;
    const LinearParams& p = *call.params;
    if (sizeof(T) * K::PAIR == 4 && p.in_size % K::PAIR == 0 && p.x_stride % K::PAIR == 0) {
        call.x = (const float*)p.x, call.x_stride = p.x_stride / K::PAIR;
        return;
    }
    float* to = p.copy;
    parallel(parallel_for, p.rows, rows_a_thread(p.in_size),
             [&](int64_t i) { pack_query<K>((const T*)p.x + i * p.x_stride, (int)p.in_size, to + i * call.lanes); });
    call.x = to, call.x_stride = call.lanes;
}

// All of these products, at least one. Their weights are of one shape, and their rows lie in lanes.
template <class K>
static void multiply_calls(ParallelFor parallel_for, LinearCall* calls, int64_t count, int64_t most_threads) {
    const LinearParams& p = *calls->params;
    int64_t rows = 0, chunks = 0;
    for (int64_t i = 0; i < count; i++) rows += calls[i].params->rows, chunks += calls[i].chunks;
    const int64_t threads = rows * p.in_size * p.out_size < FORK ? 1 : most_threads;
    int64_t panels = (calls->strips + COLUMNS - 1) / COLUMNS;
    if (panels * chunks < MANY * threads) {  // narrower ones, so that all threads end together
        const int64_t turns = (panels + threads - 1) / threads;
        panels = turns * threads < calls->strips ? turns * threads : calls->strips;
    }
    LinearWork all = {calls, panels * chunks, 0};
    int64_t first = 0;
    for (int64_t i = 0; i < count; i++) {
        calls[i].panels = panels, calls[i].first = first;
        first += panels * calls[i].chunks;
    }
    parallel(parallel_for, threads, 1, [&](int64_t) { LinearWorker<K>(all).work(); });
}

template <class K>
static void linear(ParallelFor parallel_for, const LinearParams* p) {
    LinearCall call = linear_call<K>(p);
    take_rows<K>(parallel_for, call);
    multiply_calls<K>(parallel_for, &call, 1, p->threads);
}

template <class K>
static void pack(ParallelFor parallel_for, const void* weight, int64_t row_stride, int64_t rows, int64_t in, void* packed) {
    using T = typename K::E::T;
    const int64_t size = (in + K::PAIR - 1) / K::PAIR * K::PAIR * W;
    parallel(parallel_for, (rows + W - 1) / W, 1, [&](int64_t i) {
        const int64_t left = rows - i * W;
        pack_strip<K>((const T*)weight + i * W * row_stride, row_stride, left < W ? left : W, in, (T*)packed + i * size);
    });
}

// Rows of the weight, bit for bit what was packed: to[i] is row places[i]. A row has some numbers of each of its strip's cache
// lines, so reading one costs as many bytes as W rows have.
template <class K>
static void unpack(
    ParallelFor parallel_for, const void* packed, int64_t in, const int64_t* places, int64_t count, void* to) {
    using T = typename K::E::T;
    const int64_t lanes = (in + K::PAIR - 1) / K::PAIR, whole = in / K::PAIR;
    parallel(parallel_for, count, rows_a_thread(in * W), [&](int64_t i) {
        const T* from = (const T*)packed + (places[i] / W * lanes * W + places[i] % W) * K::PAIR;
        T* row = (T*)to + i * in;
        for (int64_t k = 0; k < whole; k++) memcpy(row + k * K::PAIR, from + k * W * K::PAIR, K::PAIR * sizeof(T));
        if (whole < lanes) row[in - 1] = from[whole * W * K::PAIR];
    });
}

}  // namespace
