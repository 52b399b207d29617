// Floating-point weights, as kinds of linear.h, and the entry points of all weights.

#include "entries.h"
#include "linear_calls.h"
#include "linear_vectors.h"
#ifdef QUIRE_TILES
#include "linear_tiles.h"
#endif
#include "linear_narrow.h"

namespace {

// -------------------------------------------------------------------------------- weights that are multiplied unconverted

// Tiles read rows of x in place only if these are whole cache lines, and not if there are many rows with a stride that is a multiple
// of 4 KiB, whose lines would conflict in the caches.
template <class K>
static bool in_place(const LinearParams& p, int64_t rows, int64_t stride) {
    if constexpr (K::TILED) return p.in_size % 32 == 0 && stride % 32 == 0 && (rows <= 32 || stride % 2048);
    return sizeof(typename K::E::T) * K::PAIR == 4 && p.in_size % K::PAIR == 0 && stride % K::PAIR == 0;
}

template <class K>
static void unpack_row(const LinearParams& p, int64_t row, void* to) {
    using T = typename K::E::T;
    const int64_t in = p.in_size, whole = in / K::PAIR;
    const T* from = (const T*)p.weight + (row / W * K::lanes(in) * W + row % W) * K::PAIR;
    T* numbers = (T*)to;
    for (int64_t k = 0; k < whole; k++) memcpy(numbers + k * K::PAIR, from + k * W * K::PAIR, K::PAIR * sizeof(T));
    if (whole * K::PAIR < in) numbers[in - 1] = from[whole * W * K::PAIR];
}

template <class K>
struct WorkerOf {
    using Worker = LinearVectors<K>;
};
#ifdef QUIRE_TILES
template <>
struct WorkerOf<Tiled> {
    using Worker = LinearTiles;
};
#endif

template <class K>
static const LinearKind& plain_kind() {
    using Worker = typename WorkerOf<K>::Worker;
    constexpr bool TILED = K::TILED;
    static constexpr LinearKind KIND = {
        .pair = K::PAIR,
        .tiled = TILED,
        .line = Worker::LINE,
        .chunk = Worker::CHUNK,
        .panel_strips = TILED ? 16 : COLUMNS,
        .few_strips = TILED ? 4 : COLUMNS,
        .unit = TILED ? 2 : 1,
        .strip_lines = [](const LinearParams& p) { return K::lanes(p.in_size); },
        .x_lanes = [](const LinearParams& p) { return row_lanes<K>(p.in_size); },
        .in_place = in_place<K>,
        .copy_row = [](const LinearParams& p, const void* row, float* to) { pack_row<K>((const typename K::E::T*)row, p.in_size, to); },
        .work = [](LinearWork& all, int64_t thread) { Worker(all, thread).work(); },
        .unpack_row = unpack_row<K>,
    };
    return KIND;
}

// ------------------------------------------------------------------------------------------------------- narrow weights

template <class K>
static bool narrow_in_place(const LinearParams& p, int64_t, int64_t stride) {
    return !K::TILED && p.in_size % 8 == 0 && stride % K::PAIR == 0 && (p.dtype == DTYPE_F32 || K::PAIR == 2);
}

template <class K>
static void copy_narrow_row(const LinearParams& p, const void* row, float* to) {
    memset(to, 0, (size_t)row_lanes<K>(p.in_size) * sizeof *to);
    pack_row_of<typename K::Wide>(p.dtype, row, p.in_size, to);
}

template <class K>
static const LinearKind& narrow_kind() {
    using Worker = LinearNarrow<K>;
    static constexpr LinearKind KIND = {
        .pair = K::PAIR,
        .tiled = K::TILED,
        .line = Worker::LINE,
        .chunk = Worker::CHUNK,
        .panel_strips = COLUMNS,
        .few_strips = COLUMNS,
        .unit = 1,
        .strip_lines = [](const LinearParams& p) { return NarrowLines<K>(p).all; },
        .x_lanes = [](const LinearParams& p) { return row_lanes<K>(p.in_size); },
        .in_place = narrow_in_place<K>,
        .copy_row = copy_narrow_row<K>,
        .work = [](LinearWork& all, int64_t thread) { Worker(all, thread).work(); },
        .unpack_row = nullptr,
    };
    return KIND;
}

}  // namespace

const LinearKind& QUIRE_NAME(linear_kind, QUIRE_ISA)(const LinearParams& p) {
    if (p.bits && !p.narrow) return QUIRE_NAME(integer_kind, QUIRE_ISA)(p);
    const LinearKind* kind = nullptr;
    if (p.narrow) with_narrow(p, [&]<class K>() { kind = &narrow_kind<K>(); });
    else with_kind(p.dtype, [&]<class K>() { kind = &plain_kind<K>(); });
    return *kind;
}

// ---------------------------------------------------------------------------------------------------- entry points

// Return the bytes of a packed weight.
ENTRY_OF(int64_t, packed_bytes)(ParallelFor, const LinearParams* p) {
    const LinearKind& kind = linear_kind(*p);
    return (p->out_size + W - 1) / W * kind.strip_lines(*p) * kind.line;
}

// Return the fp32 numbers that the copy of a row takes.
ENTRY_OF(int64_t, row_lanes)(ParallelFor, const LinearParams* p) { return linear_kind(*p).x_lanes(*p); }

// Return the stride, in numbers, at which rows of `numbers` numbers are read fast in place.
ENTRY_OF(int64_t, row_stride)(ParallelFor, int64_t numbers, int32_t dtype) {
    int64_t stride = 0;
    with_kind(dtype, [&]<class K>() { stride = row_lanes<K>(numbers) * K::PAIR; });
    return stride;
}

// Return the fp32 numbers of scratch for the rows of x that `linear` copies. stride: from row to row, in numbers.
ENTRY_OF(int64_t, copy_size)(ParallelFor, const LinearParams* p, int64_t rows, int64_t stride) {
    const LinearKind& kind = linear_kind(*p);
    if (kind.in_place(*p, rows, stride)) return kind.tiled && rows > 32 ? 16 * kind.x_lanes(*p) : 0;
    return (rows + 15) * kind.x_lanes(*p);
}

ENTRY(linear)(ParallelFor parallel_for, const LinearParams* params) { linear(parallel_for, params); }

// Pack a weight. weight: [out, in]. packed: strips of W rows each.
ENTRY(pack)(ParallelFor parallel_for, const LinearParams* p, const void* weight, int64_t row_stride, void* packed) {
    with_kind(p->dtype, [&]<class K>() { pack_strips<K>(parallel_for, weight, row_stride, p->out_size, p->in_size, packed); });
}

// Pack a weight of narrow numbers. codes: [out, in], one per byte. scales: [out, groups].
ENTRY(pack_narrow)(ParallelFor parallel_for, const LinearParams* p, const uint8_t* codes, const float* scales, char* packed) {
    with_narrow(*p, [&]<class K>() { pack_narrow<K>(parallel_for, *p, codes, scales, packed); });
}

// Read rows of a packed weight: to[i] is row places[i], with the bits that were packed, or dequantised if they are integers. Each of a
// strip's cache lines has some numbers of a row, so reading one row costs as many bytes as W rows have. Return -1. If an entry of
// `places` is not a row, write nothing and return its index. Narrow weights are not supported.
ENTRY_OF(int64_t, unpack)(ParallelFor parallel_for, const LinearParams* p, const int64_t* places, int64_t count, void* to) {
    for (int64_t i = 0; i < count; i++)
        if (places[i] < 0 || places[i] >= p->out_size) return i;
    const LinearKind& kind = linear_kind(*p);
    const int64_t bytes = p->in_size * (p->dtype == DTYPE_F32 ? 4 : 2);
    if (kind.unpack_row)
        parallel(parallel_for, count, rows_a_thread(p->in_size * W), [&](int64_t i) { kind.unpack_row(*p, places[i], (char*)to + i * bytes); });
    return -1;
}
