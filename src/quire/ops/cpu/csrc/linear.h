// x @ weight.T + bias for a packed weight.
//
// W rows of the weight, transposed, form a strip: the lines that the kernels read are contiguous, so a strip is one stream from memory,
// whatever the number of strips that are multiplied at a time.
//
// linear_calls.h divides products into items for threads, and LinearItems distributes them. A LinearKind multiplies: linear.cpp has the
// kinds of floating-point weights (linear_vectors.h, linear_narrow.h, linear_tiles.h), linear_integers.cpp those of integers
// (linear_integers.h, linear_integer_tiles.h). All are batch-invariant, and the bits do not depend on the division of the work either.
#pragma once

#include "isa.h"
#include "kinds.h"
#include "parallel.h"

// One product.
struct LinearCall {
    const LinearParams* params;
    const float* x;     // [T, x_stride] lanes
    const float* tail;  // lanes of the rows from `whole` on
    int64_t x_stride, tail_stride, whole, strips, lanes, panels, chunks;
    int64_t first;  // index of its first item among those of all products
};

// Items that a thread takes first. For one product with few rows, these are about the strips that it packed, whose pages are in the
// memory local to its core.
struct alignas(64) LinearShare {
    int64_t next, end;  // next: the first item that is not taken yet
};

constexpr int MOST_SHARES = 64;
constexpr int64_t PANEL_BYTES = 512 << 10;  // bytes of the weight that fit the L2 cache together with the rows

struct LinearKind;

// The state that all workers share: products with weights of one shape, treated as one range of items.
struct LinearWork {
    const LinearKind* kind;
    const LinearCall* calls;
    int64_t items, threads;
    int shares;
    LinearShare share[MOST_SHARES];
};

// A kind of weight: its layout, and the functions for rows of x and products.
struct LinearKind {
    int pair;    // numbers of x in a lane that is read in place
    bool tiled;  // 16 rows of x are read at a time
    int line;    // bytes of a line of a strip
    int chunk;   // most rows of x in an item
    int panel_strips, few_strips;  // strips of a panel; the same with at most 32 rows
    int unit;                      // strips that stay in one panel
    int64_t (*strip_lines)(const LinearParams& p);
    int64_t (*x_lanes)(const LinearParams& p);  // of a copied row of x
    // Whether the kernel can read rows in place, `stride` numbers apart, as lanes.
    bool (*in_place)(const LinearParams& p, int64_t rows, int64_t stride);
    void (*copy_row)(const LinearParams& p, const void* row, float* to);  // as lanes
    void (*work)(LinearWork& all, int64_t thread);
    void (*unpack_row)(const LinearParams& p, int64_t row, void* to);  // a row of the weight; null: not supported
};

// Return the kind of a weight; the kind of an integer weight.
const LinearKind& QUIRE_NAME(linear_kind, QUIRE_ISA)(const LinearParams& p);
const LinearKind& QUIRE_NAME(integer_kind, QUIRE_ISA)(const LinearParams& p);

namespace {

// A unit of work: a panel of strips and a chunk of rows.
struct LinearItem {
    const LinearCall* call;
    int64_t first_row, first_strip;
    int rows, strips;
    const char* weight;
    int64_t stride;  // bytes from one strip to the next
};

// Distributes items to a worker: those of its share, then the remaining ones of other shares. A panel that fits the L2 cache is
// multiplied with all chunks before the next panel; otherwise, a chunk is multiplied with all panels first.
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
        const LinearKind& kind = *all.kind;
        const LinearCall& call = *current;
        const LinearParams& p = *call.params;
        index -= call.first;
        item.call = &call;
        item.stride = call.lanes * kind.line;
        const bool stays = item.stride * kind.panel_strips <= PANEL_BYTES;
        const int64_t panel = stays ? index / call.chunks : index % call.panels;
        const int64_t chunk = stays ? index % call.chunks : index / call.panels;
        item.first_row = chunk * kind.chunk;
        item.rows = (int)(p.rows - item.first_row < kind.chunk ? p.rows - item.first_row : kind.chunk);
        const int64_t units = (call.strips + kind.unit - 1) / kind.unit, end = units * (panel + 1) / call.panels * kind.unit;
        item.first_strip = units * panel / call.panels * kind.unit;
        item.strips = (int)((end < call.strips ? end : call.strips) - item.first_strip);
        item.weight = (const char*)p.weight + item.first_strip * item.stride;
        return true;
    }

  private:
    LinearWork& all;
    const LinearCall* current;  // the call of the last item
    int share, left;            // the current share; the number of shares, this one included, that may have items left
};

// Call f.template operator()<N>(part, next) for parts of an item's strips, COLUMNS or 2 at a time. A single remaining strip is
// multiplied twice: its stride is 0, and its second sums are not read. next: weight of the next part; after: that of the next item.
template <class F>
static inline void each_part(LinearItem rest, const char* after, const F& f) {
    const auto run = [&]<int N>(int strips) {
        LinearItem part = rest;
        part.strips = strips;
        if (strips < N) part.stride = 0;
        rest.strips -= strips, rest.first_strip += strips, rest.weight += strips * rest.stride;
        f.template operator()<N>(part, rest.strips ? rest.weight : after);
    };
    if constexpr (COLUMNS == 4)
        while (rest.strips >= 4) run.template operator()<4>(4);
    while (rest.strips > 0) run.template operator()<2>(rest.strips < 2 ? 1 : 2);
}

}  // namespace
