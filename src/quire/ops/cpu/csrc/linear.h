// x @ weight.T + bias for a weight that was packed once.
//
// W rows of the weight, transposed, make a strip: the lines that the kernels read lie one after the other, so a strip is one
// stream from memory however many strips are multiplied at a time.
//
// This file shares the work between threads; linear_vectors.h, linear_integers.h, linear_tiles.h, linear_integer_tiles.h and
// linear_narrow.h multiply. In each, the bits of a number depend neither on the other rows nor on how the work is cut.
#pragma once

#include "kinds.h"
#include "parallel.h"
#include "params.h"

namespace {

constexpr int64_t MANY = 16;       // items a thread, with which it does not matter how evenly they can be shared
constexpr int64_t FORK = 1 << 16;  // multiply-adds that are worth a second thread

// Whether a kind of weight is integers with scales.
template <class K>
constexpr bool INTEGERS = false;
// Whether it is floating-point numbers of 8 or 4 bits with scales.
template <class K>
constexpr bool NARROW = false;

// One strip: to[lane][column], zero after the last row of the weight and after its last input.
template <class K, class T = typename K::E::T>
static void pack_strip(const T* weight, int64_t row_stride, int64_t rows, int64_t in, T* to) {
    for (int64_t k = 0; k < K::lanes(in) * K::PAIR; k += K::PAIR, to += W * K::PAIR) {
        for (int i = 0; i < W; i++)
            for (int p = 0; p < K::PAIR; p++) to[i * K::PAIR + p] = i < rows && k + p < in ? weight[i * row_stride + k + p] : 0;
    }
}

// One product.
struct LinearCall {
    const LinearParams* params;
    const float* x;  // [T, x_stride] lanes
    const float* tail;  // lanes of the rows from `whole` on
    int64_t x_stride, tail_stride, whole, strips, lanes, panels, chunks;
    int64_t first;  // of its items among those of all products
};

// A panel of strips and a chunk of rows.
struct LinearItem {
    const LinearCall* call;
    int64_t first_row, first_strip;
    int rows, strips;
    const char* weight;
    int64_t stride;  // bytes from one strip to the next
};

// Items that a thread takes first. Of one product with few rows they are about the strips that it packed, whose pages so lie in
// its own memory.
struct alignas(64) LinearShare {
    int64_t next, end;  // the first one that is not taken yet
};

constexpr int MOST_SHARES = 64;

// What all workers share: products with weights of one shape, as one stretch of work.
struct LinearWork {
    const LinearCall* calls;
    int64_t items, threads;
    int shares;
    LinearShare share[MOST_SHARES];

    LinearWork(const LinearCall* calls, int64_t items, int64_t threads)
        : calls(calls), items(items), threads(threads), shares((int)(threads < MOST_SHARES ? threads : MOST_SHARES)) {
        for (int i = 0; i < shares; i++) share[i] = {items * i / shares, items * (i + 1) / shares};
    }
};

// Hands a worker its items: those of its share, then what is left of the others'. A panel that fits the second cache meets all
// chunks before the next panel; else a chunk meets all panels.
template <class Worker>
class LinearItems {
  public:
    LinearItems(LinearWork& all, int64_t thread)
        : all(all), current(all.calls), share((int)(thread * all.shares / all.threads)), left(all.shares) {}

    bool take(LinearItem& item) {
        int64_t index;
        while (true) {
            if (!left) return false;
            LinearShare& from = all.share[share];
            if (__atomic_load_n(&from.next, __ATOMIC_RELAXED) < from.end) {
                index = __atomic_fetch_add(&from.next, 1, __ATOMIC_RELAXED);
                if (index < from.end) break;
            }
            share = (share + 1) % all.shares, left--, current = all.calls;
        }
        while (index >= current->first + current->panels * current->chunks) current++;
        const LinearCall& call = *current;
        const LinearParams& p = *call.params;
        index -= call.first;
        item.call = &call;
        item.stride = call.lanes * Worker::LINE;
        const bool stays = item.stride * Worker::PANEL_STRIPS <= Worker::PANEL_BYTES;
        const int64_t panel = stays ? index / call.chunks : index % call.panels;
        const int64_t chunk = stays ? index % call.chunks : index / call.panels;
        item.first_row = chunk * Worker::CHUNK;
        item.rows = (int)(p.rows - item.first_row < Worker::CHUNK ? p.rows - item.first_row : Worker::CHUNK);
        const int64_t units = (call.strips + Worker::UNIT - 1) / Worker::UNIT, end = units * (panel + 1) / call.panels * Worker::UNIT;
        item.first_strip = units * panel / call.panels * Worker::UNIT;
        item.strips = (int)((end < call.strips ? end : call.strips) - item.first_strip);
        item.weight = (const char*)p.weight + item.first_strip * item.stride;
        return true;
    }

  private:
    LinearWork& all;
    const LinearCall* current;  // whose item was taken last
    int share, left;            // from which it takes; how many there are, this one included, that may have items left
};

}  // namespace

#include "linear_vectors.h"
#include "linear_integers.h"
#ifdef QUIRE_TILES
#include "linear_tiles.h"
#include "linear_integer_tiles.h"
#endif
#include "linear_narrow.h"

namespace {

template <class K>
struct LinearWorkerOf {
    using Worker = LinearVectors<K>;
};
template <int BITS, int SUB, bool BLOCKS>
struct LinearWorkerOf<Integers<BITS, SUB, BLOCKS>> {
#ifdef QUIRE_TILES
    using Worker = LinearIntegerTiles<Integers<BITS, SUB, BLOCKS>>;
#else
    using Worker = LinearIntegers<Integers<BITS, SUB, BLOCKS>>;
#endif
};
#ifdef QUIRE_TILES
template <>
struct LinearWorkerOf<Tiled> {
    using Worker = LinearTiles;
};
#endif
template <class Base, int BITS>
struct LinearWorkerOf<Narrow<Base, BITS>> {
    using Worker = LinearNarrow<Narrow<Base, BITS>>;
};
template <class K>
using LinearWorker = typename LinearWorkerOf<K>::Worker;

// Lines of a strip, and lanes of a row of x that was copied.
template <class K>
static int64_t strip_lines(const LinearParams& p) {
    if constexpr (INTEGERS<K>) return Lines<K>(p).all;
    else if constexpr (NARROW<K>) return NarrowLines<K>(p).all;
    else return K::lanes(p.in_size);
}
template <class K>
static int64_t x_lanes(const LinearParams& p) {
    if constexpr (INTEGERS<K>) return Segments<K>(p).row_lanes();
    else return row_lanes<K>(p.in_size);
}

template <class K>
static LinearCall linear_call(const LinearParams* p) {
    LinearCall call = {};
    call.params = p;
    call.strips = (p->out_size + W - 1) / W, call.lanes = strip_lines<K>(*p);
    call.chunks = (p->rows + LinearWorker<K>::CHUNK - 1) / LinearWorker<K>::CHUNK;
    call.whole = p->rows;
    return call;
}

// How far rows of so many numbers should lie apart, so that they are read where they lie, as fast as a copy of them.
template <class K>
static int64_t row_stride(int64_t numbers) { return row_lanes<K>(numbers) * K::PAIR; }

// Whether rows that lie so many numbers apart are the lanes that the kernel reads. For tiles they are whole lines; of many rows
// that lie a multiple of 4 KiB apart, the lines would compete for the same places of the caches.
template <class K>
static bool rows_in_place(const LinearParams& p, int64_t rows, int64_t stride) {
    if constexpr (INTEGERS<K> || (NARROW<K> && K::TILED)) return false;
    else if (NARROW<K> && p.in_size % 8) return false;
    else if (K::TILED) return p.in_size % 32 == 0 && stride % 32 == 0 && (rows <= 32 || stride % 2048);
    else return sizeof(typename K::E::T) * K::PAIR == 4 && p.in_size % K::PAIR == 0 && stride % K::PAIR == 0;
}

// fp32 numbers of room for what is copied of x.
template <class K>
static int64_t copy_size(const LinearParams& p, int64_t rows, int64_t stride) {
    if (rows_in_place<K>(p, rows, stride)) return K::TILED && rows > 32 ? 16 * x_lanes<K>(p) : 0;
    return (rows + 15) * x_lanes<K>(p);
}

// A row of x as lanes.
template <class K>
static void copy_row(const LinearParams& p, const void* row, float* to) {
    if constexpr (INTEGERS<K>)
        with_element(p.dtype, [&](auto element) { round_groups<K, decltype(element)>(p, (const typename decltype(element)::T*)row, to); });
    else if constexpr (NARROW<K>) {
        memset(to, 0, (size_t)x_lanes<K>(p) * sizeof *to);
        pack_row<typename K::Wide>((const typename K::E::T*)row, p.in_size, to);
    } else pack_row<K>((const typename K::E::T*)row, p.in_size, to);
}

// Rows of x from `first` on, as lanes.
template <class K>
static void copy_rows(ParallelFor parallel_for, const LinearParams& p, int64_t first) {
    const int64_t lanes = x_lanes<K>(p), bytes = p.x_stride * (p.dtype == DTYPE_F32 ? 4 : 2);
    parallel(parallel_for, p.rows - first, rows_a_thread(p.in_size),
             [&](int64_t i) { copy_row<K>(p, (const char*)p.x + (first + i) * bytes, p.copy + i * lanes); });
}

// The rows of x as lanes: where they lie if they are that already, else copied. In place, tiles may read 15 rows too many.
template <class K>
static void take_rows(ParallelFor parallel_for, LinearCall& call) {
    const LinearParams& p = *call.params;
    if (rows_in_place<K>(p, p.rows, p.x_stride)) {
        if constexpr (!INTEGERS<K>) call.x = (const float*)p.x, call.x_stride = p.x_stride / K::PAIR;
        return;
    }
    copy_rows<K>(parallel_for, p, 0);
    call.x = p.copy, call.x_stride = x_lanes<K>(p);
}

// Tiles read many rows 16 at a time: the last ones are copied, so that nothing after them is read.
template <class K>
static void take_tail(ParallelFor parallel_for, LinearCall& call) {
    const LinearParams& p = *call.params;
    if (!K::TILED || p.rows <= 32 || call.x == p.copy) return;
    call.whole = p.rows / 16 * 16;
    copy_rows<K>(parallel_for, p, call.whole);
    call.tail = p.copy, call.tail_stride = x_lanes<K>(p);
}

// All of these products, at least one. Their weights are of one shape, and their rows lie in lanes.
template <class K>
static void multiply_calls(ParallelFor parallel_for, LinearCall* calls, int64_t count, int64_t most_threads) {
    using Worker = LinearWorker<K>;
    const LinearParams& p = *calls->params;
    int64_t rows = 0, most_rows = 0, chunks = 0;
    for (int64_t i = 0; i < count; i++) {
        rows += calls[i].params->rows, chunks += calls[i].chunks;
        most_rows = calls[i].params->rows > most_rows ? calls[i].params->rows : most_rows;
    }
    const int64_t threads = rows * p.in_size * p.out_size < FORK ? 1 : most_threads;
    const int64_t wide = Worker::panel_strips(most_rows), units = (calls->strips + Worker::UNIT - 1) / Worker::UNIT;
    int64_t panels = (calls->strips + wide - 1) / wide;
    if (panels * chunks < MANY * threads) {  // narrower ones, so that all threads end together
        const int64_t turns = (panels + threads - 1) / threads;
        panels = turns * threads < units ? turns * threads : units;
    }
    LinearWork all(calls, panels * chunks, threads);
    int64_t first = 0;
    for (int64_t i = 0; i < count; i++) {
        calls[i].panels = panels, calls[i].first = first;
        first += panels * calls[i].chunks;
    }
    parallel(parallel_for, threads, 1, [&](int64_t thread) { Worker(all, thread).work(); });
}

template <class K>
static void linear(ParallelFor parallel_for, const LinearParams* p) {
    LinearCall call = linear_call<K>(p);
    take_rows<K>(parallel_for, call);
    take_tail<K>(parallel_for, call);
    multiply_calls<K>(parallel_for, &call, 1, p->threads);
}

template <class K>
static void pack(ParallelFor parallel_for, const LinearParams& p, const void* weight, int64_t row_stride, void* packed) {
    using T = typename K::E::T;
    const int64_t size = K::lanes(p.in_size) * K::PAIR * W;
    parallel(parallel_for, (p.out_size + W - 1) / W, 1, [&](int64_t i) {
        const int64_t left = p.out_size - i * W;
        pack_strip<K>((const T*)weight + i * W * row_stride, row_stride, left < W ? left : W, p.in_size, (T*)packed + i * size);
    });
}

// Rows of the weight: to[i] is row places[i], bit for bit what was packed, or the number that the integers stand for. A row has
// some numbers of each of its strip's cache lines, so reading one costs as many bytes as W rows have.
template <class K>
static void unpack(ParallelFor parallel_for, const LinearParams& p, const int64_t* places, int64_t count, void* to) {
    const int64_t in = p.in_size;
    if constexpr (INTEGERS<K>) {
        with_element(p.dtype, [&](auto element) {
            using E = decltype(element);
            parallel(parallel_for, count, rows_a_thread(in * W),
                     [&](int64_t i) { unpack_row<K, E>(p, places[i], (typename E::T*)to + i * in); });
        });
    } else {
        using T = typename K::E::T;
        const int64_t lanes = K::lanes(in), whole = in / K::PAIR;
        parallel(parallel_for, count, rows_a_thread(in * W), [&](int64_t i) {
            const T* from = (const T*)p.weight + (places[i] / W * lanes * W + places[i] % W) * K::PAIR;
            T* row = (T*)to + i * in;
            for (int64_t k = 0; k < whole; k++) memcpy(row + k * K::PAIR, from + k * W * K::PAIR, K::PAIR * sizeof(T));
            if (whole * K::PAIR < in) row[in - 1] = from[whole * W * K::PAIR];
        });
    }
}

}  // namespace
