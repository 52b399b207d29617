// Conversion of each dtype of the cache to operands of the matrix product: keys transposed, values in rows, both in panels.
//
// Keys are transposed as 32-bit lanes, whatever their dtype. A pair of bf16 is then an operand of the dot product already. In other
// cases, the halves are widened to fp32 after the transposition.
#pragma once

#include "elements.h"
#include "fetching.h"
#include "matmul.h"

#include <type_traits>

namespace {

// Cache lines to prefetch at a time, about as many as memory delivers until the next call. Together they are nearly all lines of
// a tile, for any dtype and head_dim.
constexpr int FETCH_PACK = 12;   // while W keys are packed, for each vector of a key
constexpr int FETCH_SCORE = 2;   // for each lane of a key's operand, while PANEL keys are scored
constexpr int FETCH_ROW = 32;    // for each row that is weighed
constexpr int FETCH_WEIGH = 2;   // for each lane of the values' operand

struct Fp32 {
    using E = F32;
    using Cache = E;  // element of the cache
    static constexpr bool SCALED = false, BYTES = false;
    using M = Multiply;
    static constexpr int PAIR = 1;     // numbers in a lane of an operand
    static constexpr bool TILED = false;
    static int64_t lanes(int64_t numbers) { return numbers; }  // of an operand
    QUIRE_INLINE void put_keys(float* at, V lanes, int) { store(at, lanes); }
    static constexpr int PER_LANE = 1;  // numbers in 32 bits of the cache
};

template <class Element>
struct Widened {
    using E = Element;
    using Cache = E;
    static constexpr bool SCALED = false, BYTES = false;
    using M = Multiply;
    static constexpr int PAIR = 1;
    static constexpr bool TILED = false;
    static int64_t lanes(int64_t numbers) { return numbers; }
    static constexpr int PER_LANE = 2;
    QUIRE_INLINE void put_keys(float* at, V lanes, int left) {
        store(at, E::lower(lanes));
        if (left > 1) store(at + PANEL, E::upper(lanes));
    }
};

#ifdef QUIRE_BF16_DOT
struct Pairs {
    using E = BF16;
    using Cache = E;
    static constexpr bool SCALED = false, BYTES = false;
    using M = MultiplyPairs;
    static constexpr int PAIR = 2;
    static constexpr bool TILED = false;
    static constexpr int PER_LANE = 2;
    static int64_t lanes(int64_t numbers) { return (numbers + 1) / 2; }
    QUIRE_INLINE void put_keys(float* at, V lanes, int) { store(at, lanes); }
};
#endif

#ifdef QUIRE_TILES
constexpr int TILE_LANES = 16;  // of a row of a tile: 32 numbers

// Pairs of bf16, multiplied by tiles. An operand consists of whole tiles.
struct Tiled {
    using E = BF16;
    using Cache = E;
    static constexpr bool SCALED = false, BYTES = false;
    static constexpr int PAIR = 2;
    static constexpr bool TILED = true;
    static constexpr int PER_LANE = 2;
    static int64_t lanes(int64_t numbers) { return (numbers + 2 * TILE_LANES - 1) / (2 * TILE_LANES) * TILE_LANES; }
    QUIRE_INLINE void put_keys(float* at, V lanes, int) { store(at, lanes); }
};
#endif

// Call f.template operator()<K>() with the kind of operands for this dtype.
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

// Return the i-th of the four integers in each lane.
QUIRE_INLINE V byte_of(V lanes, int i) { return __builtin_convertvector((I)lanes << (24 - 8 * i) >> 24, V); }

// Return pairs of bf16 from numbers that are exact in bf16.
QUIRE_INLINE V exact_pair(V first, V second) { return (V)((U)first >> 16 | ((U)second & 0xffff0000u)); }

// An int8 cache with scales, widened to the operands of Base: every integer is exact in bf16.
template <class Base>
struct Scaled : Base {
    using Cache = S8;
    static constexpr bool SCALED = true;
    static constexpr int PER_LANE = 4;
    QUIRE_INLINE void put_keys(float* at, V lanes, int left) {
        if constexpr (Base::PAIR == 2) {
            store(at, exact_pair(byte_of(lanes, 0), byte_of(lanes, 1)));
            if (Base::TILED || left > 2) store(at + PANEL, exact_pair(byte_of(lanes, 2), byte_of(lanes, 3)));
        } else {
            QUIRE_UNROLL for (int i = 0; i < PER_LANE; i++)
                if (i < left) store(at + i * PANEL, byte_of(lanes, i));
        }
    }
};

#ifdef QUIRE_BYTE_DOT
// An int8 cache with scales, multiplied as bytes, see attention_bytes.h.
struct Bytes : Scaled<Fp32> {
    static constexpr bool BYTES = true;
    static int64_t lanes(int64_t dim) { return (dim + 3) / 4 * 2 + 3; }  // of a query: see put_query
};
#endif

// The kind of operands for an int8 cache, given the kind K of q: widened to pairs of bf16 if K has pairs, else to fp32.
template <class K>
struct ScaledKindOf {
    using Kind = Scaled<std::conditional_t<K::PAIR == 2, K, Fp32>>;
};
#ifdef QUIRE_BYTE_DOT
template <class K>
    requires(!K::TILED && sizeof(typename K::E::T) == 2)
struct ScaledKindOf<K> {
    using Kind = Bytes;
};
#endif
template <class K>
using ScaledKind = typename ScaledKindOf<K>::Kind;

// The same for a latent cache, whose keys have two scales: sums of tiles cannot be split between these.
template <class K>
struct LatentKindOf {
    using Kind = ScaledKind<K>;
};
#ifdef QUIRE_TILES
template <>
struct LatentKindOf<Tiled> {
    using Kind = Scaled<Fp32>;
};
#endif
template <class K>
using LatentKind = typename LatentKindOf<K>::Kind;

// A tile reads 16 rows at once, which must not conflict in the sets of the L1 cache: a stride of an odd number of cache lines avoids
// this.
inline int64_t odd_lines(int64_t lanes) { return ((lanes + 15) / 16 | 1) * 16; }

// Return the stride between rows of an operand, in lanes.
template <class K>
int64_t row_lanes(int64_t numbers) {
    return K::TILED ? odd_lines(K::lanes(numbers)) : K::lanes(numbers);
}

// Write one row as lanes, zero after its end.
template <class K>
static void pack_row(const typename K::E::T* row, int64_t numbers, float* to) {
    if constexpr (K::PAIR == 2) {
        const int64_t lanes = K::lanes(numbers), last = K::TILED ? lanes - 16 : lanes - 1;
        memset(to + last, 0, (size_t)(lanes - last) * sizeof *to);
        memcpy(to, row, (size_t)numbers * sizeof *row);
    } else {
        for (int64_t c = 0; c < numbers; c += W) {
            const int left = numbers - c < W ? (int)(numbers - c) : W;
            put_part<F32>(to + c, get_part<typename K::E>(row + c, left), left);
        }
    }
}

// Write one row of that dtype as lanes. If K has fp32 operands, any dtype is allowed.
template <class K>
static void pack_row_of(int32_t dtype, const void* row, int64_t numbers, float* to) {
    if constexpr (K::PAIR == 2) return pack_row<K>((const typename K::E::T*)row, numbers, to);
    with_element(dtype, [&](auto element) {
        using E = decltype(element);
        pack_row<Widened<E>>((const typename E::T*)row, numbers, to);
    });
}

#ifdef QUIRE_TILES
// Write one row of the cache as lanes, zero after its end.
template <class K>
static void pack_cache_row(const typename K::Cache::T* row, int64_t numbers, float* to) {
    if constexpr (K::SCALED) {
        const int64_t all = K::lanes(numbers) * 2;
        auto get = [&](int64_t c) { return c < numbers ? get_part<S8>(row + c, numbers - c < W ? (int)(numbers - c) : W) : V{}; };
        for (int64_t c = 0; c < all; c += 2 * W) store(to + c / 2, pair_bf16(get(c), get(c + W)));
    } else {
        pack_row<K>(row, numbers, to);
    }
}
#endif

// Prefetches rows of the next tiles, line after line in the order of memory, a few at a time when the work on the current tile leaves
// memory idle.
template <class T>
class Fetcher {
    struct Rows {
        const T* const* first;
        const T* const* end;
        int bytes;  // of each
    };
    static constexpr int MOST = 4;  // keys and values of two tiles
    const T* const* row = nullptr;
    const T* const* end = nullptr;
    int bytes = 0, at = 0, count = 0, begun = 0;
    const int32_t kind = quire_fetching.keys;
    Rows all[MOST] = {};

    template <int KIND>
    __attribute__((always_inline)) void fetch_as(int lines) {
        for (int i = 0; i < lines && row != end; i++) {
            fetch_line<KIND>((const char*)*row + at);
            if ((at += 64) < bytes) continue;
            at = 0;
            if (++row == end && begun < count) begin(all[begun++]);
        }
    }

    void begin(const Rows& rows) { row = rows.first, end = rows.end, bytes = rows.bytes; }

  public:
    // Append rows to those that were added before.
    void add(const T* const* rows, int number, int bytes_of_row) {
        if (number <= 0) return;
        all[count++] = {rows, rows + number, bytes_of_row};
        if (count == 1) begin(all[begun++]);
    }

    __attribute__((always_inline)) void fetch(int lines) {
        if (kind == FETCH_FIRST) fetch_as<FETCH_FIRST>(lines);
        else if (kind == FETCH_SECOND) fetch_as<FETCH_SECOND>(lines);
        else fetch_as<FETCH_PAST>(lines);
    }
};

// Transpose up to PANEL keys: to[lane][key]. It processes W keys at a time, so `count` is rounded up to a multiple of W.
template <class K, class T = typename K::Cache::T>
static void pack_keys(const T* const* rows, int count, int dim, float* to, Fetcher<T>& fetcher) {
    constexpr int step = W * K::PER_LANE;  // numbers of a key in one vector
    constexpr int lanes_of_step = step / K::PAIR;
    for (int t = 0; t < count; t += W) {
        for (int c = 0; c < dim; c += step) {
            V lanes[W];
            const int left = dim - c;
            const bool whole = left >= step;
            fetcher.fetch(FETCH_PACK);
            if (whole) {
                for (int i = 0; i < W; i++) lanes[i] = load((const float*)(rows[t + i] + c));
            } else {
                for (int i = 0; i < W; i++) lanes[i] = load_lanes(rows[t + i] + c, left * (int)sizeof(T));
            }
            transpose(lanes);
            float* at = to + (int64_t)(c / step) * lanes_of_step * PANEL + t;
            constexpr int apart = lanes_of_step / W * PANEL;
            if (whole) {  // a separate loop, so that lanes are stored from registers
                QUIRE_UNROLL for (int i = 0; i < W; i++) K::put_keys(at + i * apart, lanes[i], K::PER_LANE);
                continue;
            }
            const int held = (int)K::lanes(left) * K::PAIR;  // numbers that fit into the operand
            for (int i = 0; i < W && i * K::PER_LANE < held; i++) K::put_keys(at + i * apart, lanes[i], left - i * K::PER_LANE);
        }
    }
}

// Load N vectors of the operand from the values of K::PAIR keys, from a column on, of which `left` columns exist.
template <class K, int N, bool WHOLE, class T = typename K::Cache::T>
QUIRE_INLINE void get_values(const T* const* rows, int column, int left, V* to) {
    using C = typename K::Cache;
    auto get = [&](const T* row, int j) __attribute__((always_inline)) {
        if (!WHOLE && left <= j * W) return V{};
        return WHOLE ? C::get(row + column + j * W) : get_part<C>(row + column + j * W, left - j * W);
    };
    if constexpr (K::PAIR == 2 && K::SCALED) {
        QUIRE_UNROLL for (int j = 0; j < N; j++) to[j] = exact_pair(get(rows[0], j), get(rows[1], j));
    } else if constexpr (K::PAIR == 2) {
#ifdef QUIRE_BF16_PAIRS
        QUIRE_UNROLL for (int j = 0; j < N; j += 2) {
            const int at = column + j * W, bytes = WHOLE ? 4 * W : (left - j * W) * 2;
            if (!WHOLE && bytes <= 0) to[j] = to[j + 1] = V{};
            else interleave_bf16(load_lanes(rows[0] + at, bytes), load_lanes(rows[1] + at, bytes), to + j, to + j + 1);
        }
#endif
    } else {
        QUIRE_UNROLL for (int j = 0; j < N; j++) to[j] = get(rows[0], j);
    }
}

// Pack the values of `count` keys (an even number if lanes are pairs) in one panel of columns as an operand: to[lane][column].
// `fetch` is called for each lane.
template <class K, int N, bool WHOLE, class Fetch, class T = typename K::Cache::T>
static void pack_columns(const T* const* rows, int count, int column, int left, float* to, const Fetch& fetch) {
    for (int t = 0; t < count; t += K::PAIR, to += PANEL) {
        V values[N];
        get_values<K, N, WHOLE>(rows + t, column, left, values);
        fetch();
        QUIRE_UNROLL for (int j = 0; j < N; j++) store(to + j * W, values[j]);
    }
}
template <class K, int N, class Fetch, class T = typename K::Cache::T>
static void pack_panel(const T* const* rows, int count, int column, int left, float* to, const Fetch& fetch) {
    if (left >= N * W) pack_columns<K, N, true>(rows, count, column, left, to, fetch);
    else pack_columns<K, N, false>(rows, count, column, left, to, fetch);
}

// Compute the sums of R rows over N vectors of columns, reading the values where they are stored. It gives the same bits as packing
// and multiplying them, and is faster for few rows.
template <class K, int R, int N, class T = typename K::Cache::T>
static void weigh_panel(
    const float* weights, int64_t stride, const T* const* rows, int begin, int end, int column, float* sums, int64_t sums_stride,
    Fetcher<T>& fetcher) {
    V sum[R][N];
    QUIRE_UNROLL for (int i = 0; i < R; i++)
        QUIRE_UNROLL for (int j = 0; j < N; j++) sum[i][j] = load(sums + i * sums_stride + j * W);
    for (int k = begin; k < end; k++) {
        V values[N];
        get_values<K, N, true>(rows + k * K::PAIR, column, N * W, values);
        fetcher.fetch(FETCH_WEIGH);
        QUIRE_UNROLL for (int i = 0; i < R; i++) {
            const V weight = broadcast(weights + i * stride + k);
            QUIRE_UNROLL for (int j = 0; j < N; j++) sum[i][j] = K::M::mac(sum[i][j], weight, values[j]);
        }
    }
    QUIRE_UNROLL for (int i = 0; i < R; i++)
        QUIRE_UNROLL for (int j = 0; j < N; j++) store(sums + i * sums_stride + j * W, sum[i][j]);
}

// Call f.template operator()<N>() with the number of vectors, 2 or COLUMNS, that hold `left` numbers, or as many of them as fit.
template <class F>
QUIRE_INLINE void with_width(int left, const F& f) {
    if constexpr (COLUMNS == 4)
        if (left > 2 * W) return f.template operator()<4>();
    f.template operator()<2>();
}

}  // namespace
