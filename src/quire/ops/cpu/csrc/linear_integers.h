// Products of integers: weights of 4 or 8 bits with scales, and rows of x as bytes with scales. What is computed, and in which
// order it is rounded, stands in quire/ops/quantised.py; it is the same on every instruction set.
//
// A strip has for each segment of inputs its lines, then where each group has a scale a line of these, and where it has a zero a
// line of those. A line holds 4 inputs of W columns as bytes, or 8 as nibbles: the first four in the lower ones. 16 lines of
// bytes are what a tile of integers takes: linear_integer_tiles.h multiplies by these.
//
// A row of x is its bytes, zero after its end, then a scale for each segment, then for each the sum of its bytes.
#pragma once

#include "linear.h"
#include "linear_vectors.h"
#include "rounding.h"

namespace {

constexpr int64_t ACTIVATION_GROUP = 128;  // inputs of x that share a scale

template <int N>
struct Integers {
    static constexpr int BITS = N;
    static constexpr bool TILED = false;
};
template <int N>
constexpr bool INTEGERS<Integers<N>> = true;

// How the inputs of a weight are divided: into those whose products make one sum. The last segment may have fewer.
struct Segments {
    int64_t size, count, last;
    explicit Segments(const LinearParams& p)
        : size(p.scales ? ACTIVATION_GROUP : p.group), count((p.in_size + size - 1) / size), last(p.in_size - (count - 1) * size) {}

    int64_t row_lanes() const {
        const int64_t lanes = size * count / 4 + 2 * count;
#ifdef QUIRE_TILES
        return odd_lines(lanes);
#else
        return lanes;
#endif
    }
    float* scales(float* row) const { return row + size * count / 4; }
    int32_t* sums(float* row) const { return (int32_t*)(scales(row) + count); }
};

// The lines of a strip.
template <int BITS>
struct Lines {
    static constexpr int BYTES = 4 * W, INPUTS = 32 / BITS;  // of each column
    Segments segments;
    int64_t scales, each, all;  // of a segment: lines of scales and zeros, and all of them; of the strip
    explicit Lines(const LinearParams& p)
        : segments(p), scales((p.scales ? 0 : 1) + (p.zeros ? 1 : 0)), each(segments.size / INPUTS + scales),
          all((segments.count - 1) * each + inputs(segments.count - 1) + scales) {}

    int64_t inputs(int64_t segment) const {
        return segment + 1 < segments.count ? segments.size / INPUTS : (segments.last + INPUTS - 1) / INPUTS;
    }
};

// ------------------------------------------------------------------------------------------------- rows of x

// Numbers of an activation group as fp32, zero after the row's end.
template <class E, class T = typename E::T>
static void get_group(const LinearParams& p, const T* row, int64_t first, float* to) {
    for (int64_t c = 0; c < ACTIVATION_GROUP; c += W) {
        const int64_t left = p.in_size - first - c;
        const int n = left < 0 ? 0 : left < W ? (int)left : W;
        if (p.order) {
            T few[W] = {};
            for (int i = 0; i < n; i++) few[i] = row[p.order[first + c + i]];
            store(to + c, E::get(few));
        } else {
            store(to + c, n ? get_part<E>(row + first + c, n) : V{});
        }
    }
}

template <class E>
static void round_groups(const LinearParams& p, const typename E::T* row, float* to) {
    const Segments segments(p);
    int8_t* bytes = (int8_t*)to;
    float* scales = segments.scales(to);
    int32_t* sums = segments.sums(to);
    const int64_t end = segments.size * segments.count;
    alignas(64) float group[ACTIVATION_GROUP];
    Rounding of_row;
    if (p.whole_rows) {
        float largest = 0.0f;
        bool finite = true;
        for (int64_t first = 0; first < end; first += ACTIVATION_GROUP) {
            get_group<E>(p, row, first, group);
            const float found = largest_number<F32>(group, ACTIVATION_GROUP, finite);
            largest = found > largest ? found : largest;
        }
        of_row = rounding_of(largest, finite);
    }
    for (int64_t first = 0; first < end; first += ACTIVATION_GROUP) {
        const int64_t count = end - first < ACTIVATION_GROUP ? end - first : ACTIVATION_GROUP;
        get_group<E>(p, row, first, group);
        bool finite = true;
        const float largest = largest_number<F32>(group, ACTIVATION_GROUP, finite);
        const Rounding rounding = p.whole_rows ? of_row : rounding_of(largest, finite);
        round_numbers<F32>(group, count, rounding, bytes + first);
        for (int64_t c = first; c < first + count; c += segments.size) {
            V sum = {};  // of whole numbers, exact
            for (int64_t k = c; k < c + segments.size; k += W) sum = sum + S8::get(bytes + k);
            *scales++ = rounding.scale, *sums++ = (int32_t)reduce_add(sum);
        }
    }
}

// -------------------------------------------------------------------------------------------------- products

// W numbers of a row of the output from `column` on. sums: of all segments; int32 where a row of x has one scale, x_scale.
template <class Out>
static void put_sums(const LinearParams& p, V sums, float x_scale, int64_t column, typename Out::T* row) {
    const int n = p.out_size - column < W ? (int)(p.out_size - column) : W;
    if (p.whole_rows) sums = __builtin_convertvector((I)sums, V) * x_scale;
    if (p.scales) sums = sums * get_part<F32>(p.scales + column, n);
    if (p.bias) sums = sums + get_part<F32>(p.bias + column, n);
    put_part<Out>(row + column, sums, n);
}

// Multiplies items of up to MOST_ROWS rows and COLUMNS strips by vectors.
template <int BITS, int MOST_ROWS>
class IntegerVectors {
  public:
    static constexpr int LINE = Lines<BITS>::BYTES;

    // after: the weight of the next item, which is fetched once nothing is left of this one.
    void multiply(const LinearItem& item, const char* after) {
        memset(sums, 0, (size_t)item.rows * PANEL * sizeof *sums);
        const LinearParams& p = *item.call->params;
        const Lines<BITS> lines(p);
        const int64_t near = NEAR / (COLUMNS * LINE * lines.each), stretch = near ? near : 1, count = lines.segments.count;
        for (int64_t begin = 0; begin < count; begin += stretch)
            add_segments(item, begin, begin + stretch < count ? begin + stretch : count, lines, after);
        with_element(p.out_dtype, [&](auto element) { finish<decltype(element)>(item); });
    }

  private:
    const Fetching fetching = quire_fetching;
    alignas(64) float sums[MOST_ROWS * PANEL];  // where rows have one scale, int32 until they are complete

    void add_segments(const LinearItem& item, int64_t begin, int64_t end, const Lines<BITS>& lines, const char* after) {
        const RowBlocks blocks(item.rows);
        const LinearCall& call = *item.call;
        const int64_t stride = item.stride, stop = end < lines.segments.count ? end * lines.each : lines.all;
        const int64_t ahead = blocks.blocks == 1 ? fetching.weights_ahead / LINE : stop - begin * lines.each;
        const int64_t turn = call.lanes - ahead;
        const char *here = item.weight + ahead * LINE, *next = after - turn * LINE;
        for (int b = 0; b < blocks.blocks; b++) {
            with_vectors(item.strips, [&]<int N>() {
                with_rows(blocks.rows(b), [&]<int R>() {
                    const int row = blocks.first(b);
                    if (MOST_ROWS <= ROWS || blocks.blocks == 1)
                        return add_rows<R, N>(item, row, begin, end, lines, FetchAhead<LINE>{here, next, turn, stride, fetching.weights});
                    const char* from = begin * lines.each < turn ? here : next;
                    const char* share = b < COLUMNS ? from + b * stride : from;
                    const bool past = fetching.weights == FETCH_PAST && call.chunks == 1;
                    if (past) add_rows<R, N>(item, row, begin, end, lines, Fetch<LINE, 1, FETCH_PAST>{share, stride});
                    else add_rows<R, N>(item, row, begin, end, lines, Fetch<LINE, 1, FETCH_FIRST>{share, stride});
                });
            });
        }
    }

    // Adds what segments begin.. give for R rows and N strips to their sums.
    template <int R, int N, class F>
    void add_rows(const LinearItem& item, int row, int64_t begin, int64_t end, const Lines<BITS>& lines, const F& fetch) {
        const LinearCall& call = *item.call;
        const LinearParams& p = *call.params;
        const Segments segments = lines.segments;
        const int64_t each = lines.each, quads = segments.size / 4;
        const bool zeros = p.zeros, by_output = p.scales, whole_rows = p.whole_rows;
        float* const x = (float*)call.x + (item.first_row + row) * call.x_stride;
        float* const to = sums + row * PANEL;
        for (int64_t s = begin; s < end; s++) {
            const char* weight = item.weight + s * each * LINE;
            const int64_t inputs = lines.inputs(s);
            I sum[R][N];
            QUIRE_UNROLL for (int i = 0; i < R; i++) {
                const int32_t bytes = segments.sums(x + i * call.x_stride)[s];
                QUIRE_UNROLL for (int j = 0; j < N; j++) sum[i][j] = I{} - (zeros ? 0 : bytes << (BITS - 1));
            }
            const float* row_bytes = x + s * quads;
            for (int64_t line = 0; line < inputs; line++) {
                add_line<R, N>(sum, row_bytes, call.x_stride, weight + line * LINE, item.stride, line);
                fetch(s * each + line);
            }
            for (int64_t line = inputs; line < inputs + lines.scales; line++) fetch(s * each + line);
            QUIRE_UNROLL for (int i = 0; i < R; i++) {
                const V scale = splat(segments.scales(x + i * call.x_stride)[s]);
                const V bytes = splat((float)segments.sums(x + i * call.x_stride)[s]);
                QUIRE_UNROLL for (int j = 0; j < N; j++) {
                    float* const at = to + i * PANEL + j * W;
                    if (whole_rows) {
                        store(at, (V)((I)load(at) + sum[i][j]));
                        continue;
                    }
                    const float* of_group = (const float*)(weight + j * item.stride + inputs * LINE);
                    V total = __builtin_convertvector(sum[i][j], V);
                    if (zeros) total = total - load(of_group + (by_output ? 0 : W)) * bytes;  // exact: whole numbers
                    store(at, fma(total, by_output ? scale : scale * load(of_group), load(at)));
                }
            }
        }
    }

    // Adds the products of one line.
    template <int R, int N>
    QUIRE_INLINE void add_line(I (&sum)[R][N], const float* x, int64_t x_stride, const char* line, int64_t stride, int64_t index) {
        QUIRE_UNROLL for (int half = 0; half < 8 / BITS; half++) {
            I column[N];
            QUIRE_UNROLL for (int j = 0; j < N; j++) {
                const I all = (I)load((const float*)(line + j * stride));
                if constexpr (BITS == 8) column[j] = all;
                else column[j] = (half ? (I)((U)all >> 4) : all) & 0x0f0f0f0f;
            }
            QUIRE_UNROLL for (int i = 0; i < R; i++) {
                const I bytes = (I)broadcast(x + i * x_stride + index * (8 / BITS) + half);
                QUIRE_UNROLL for (int j = 0; j < N; j++) {
                    if constexpr (BITS == 8) sum[i][j] = dot_bytes(sum[i][j], column[j], bytes);
                    else sum[i][j] = dot_nibbles(sum[i][j], column[j], bytes);
                }
            }
        }
    }

    template <class Out>
    void finish(const LinearItem& item) {
        const LinearCall& call = *item.call;
        const LinearParams& p = *call.params;
        const Segments segments(p);
        for (int i = 0; i < item.rows; i++) {
            const float scale = *segments.scales((float*)call.x + (item.first_row + i) * call.x_stride);
            typename Out::T* out = (typename Out::T*)p.out + (item.first_row + i) * p.out_stride;
            for (int j = 0; j < item.strips; j++)
                put_sums<Out>(p, load(sums + i * PANEL + j * W), scale, (item.first_strip + j) * W, out);
        }
    }
};

template <int BITS>
struct LinearIntegers {
    static constexpr int LINE = Lines<BITS>::BYTES;
    static constexpr int CHUNK = 96;  // rows of x that an item has at most
    static constexpr int PANEL_STRIPS = COLUMNS;
    static constexpr int64_t PANEL_BYTES = 512 << 10;
    static constexpr int UNIT = 1;
    static int64_t panel_strips(int64_t) { return PANEL_STRIPS; }

    LinearItems<LinearIntegers> items;
    IntegerVectors<BITS, CHUNK> vectors;

    LinearIntegers(LinearWork& all, int64_t thread) : items(all, thread) {}

    void work() {
        LinearItem item, after;
        for (bool more = items.take(item); more; item = after) {
            more = items.take(after);
            vectors.multiply(item, more ? after.weight : item.weight);  // the latter is in the cache
        }
    }
};

// --------------------------------------------------------------------------------------------------- weights

// values: [out, in], contiguous. scales and zeros: [out, groups], for p.group inputs each; null where there are none.
template <int BITS>
static void pack_values(
    ParallelFor parallel_for, const LinearParams& p, const uint8_t* values, const float* scales, const float* zeros, char* packed) {
    const Lines<BITS> lines(p);
    const Segments& segments = lines.segments;
    const int64_t groups = (p.in_size + p.group - 1) / p.group;
    constexpr int INPUTS = Lines<BITS>::INPUTS, LINE = Lines<BITS>::BYTES;
    parallel(parallel_for, (p.out_size + W - 1) / W, 1, [&](int64_t strip) {
        char* to = packed + strip * lines.all * LINE;
        memset(to, 0, (size_t)(lines.all * LINE));
        for (int64_t i = 0; i < W && strip * W + i < p.out_size; i++) {
            const int64_t row = strip * W + i;
            for (int64_t s = 0; s < segments.count; s++) {
                char* at = to + s * lines.each * LINE;
                const int64_t first = s * segments.size, count = s + 1 < segments.count ? segments.size : segments.last;
                for (int64_t k = 0; k < count; k++) {
                    char& byte = at[k / INPUTS * LINE + i * 4 + k % 4];
                    byte = (char)(byte | values[row * p.in_size + first + k] << (k % INPUTS / 4 * 4));
                }
                float* of_group = (float*)(at + lines.inputs(s) * LINE);
                const int64_t group = row * groups + first / p.group;
                if (!p.scales) of_group[i] = scales[group];
                if (p.zeros) of_group[(p.scales ? 0 : W) + i] = zeros[group];
            }
        }
    });
}

// One row of the weight: numbers, in the order of the inputs.
template <int BITS, class E>
static void unpack_row(const LinearParams& p, int64_t row, typename E::T* to) {
    const Lines<BITS> lines(p);
    constexpr int INPUTS = Lines<BITS>::INPUTS, LINE = Lines<BITS>::BYTES;
    const char* strip = (const char*)p.weight + row / W * lines.all * LINE;
    const int64_t i = row % W;
    for (int64_t k = 0; k < p.in_size; k++) {
        const int64_t s = k / lines.segments.size, within = k % lines.segments.size;
        const char* at = strip + s * lines.each * LINE;
        const float* of_group = (const float*)(at + lines.inputs(s) * LINE);
        const int value = (uint8_t)at[within / INPUTS * LINE + i * 4 + within % 4] >> (within % INPUTS / 4 * 4) & ((1 << BITS) - 1);
        const float zero = p.zeros ? of_group[(p.scales ? 0 : W) + i] : (float)(1 << (BITS - 1));
        const float number = ((float)value - zero) * (p.scales ? p.scales[row] : of_group[i]);
        put_part<E>(to + (p.order ? p.order[k] : k), broadcast(&number), 1);
    }
}

}  // namespace
