// Integer weights, as kinds of linear.h, and their entry points.

#include "linear_integers_pack.h"
#ifdef QUIRE_TILES
#include "linear_integer_tiles.h"
#endif

namespace {

static int64_t integer_lanes(const LinearParams& p) { return Segments(p).row_lanes(); }

static bool never_in_place(const LinearParams&, int64_t, int64_t) { return false; }

template <class K>
static void unpack_as(const LinearParams& p, int64_t row, void* to) {
    const std::unique_ptr<float[]> numbers(new float[p.in_size]);
    unpack_row<K>(p, row, numbers.get());
    with_element(p.dtype, [&](auto element) {
        using E = decltype(element);
        for (int64_t c = 0; c < p.in_size; c += W) {
            const int n = p.in_size - c < W ? (int)(p.in_size - c) : W;
            put_part<E>((typename E::T*)to + c, get_part<F32>(numbers.get() + c, n), n);
        }
    });
}

template <class K>
static const LinearKind& kind_of_integers() {
#ifdef QUIRE_TILES
    using Worker = LinearIntegerTiles<K>;
    constexpr int STRIPS = LinearTiles::PANEL_STRIPS, FEW = LinearTiles::FEW_STRIPS, UNIT = LinearTiles::UNIT;
#else
    using Worker = LinearIntegers<K>;
    constexpr int STRIPS = COLUMNS, FEW = COLUMNS, UNIT = 1;
#endif
    static constexpr LinearKind KIND = {
        .pair = 1,
        .tiled = false,
        .line = Worker::LINE,
        .chunk = Worker::CHUNK,
        .panel_strips = STRIPS,
        .few_strips = FEW,
        .unit = UNIT,
        .strip_lines = [](const LinearParams& p) { return Lines<K>(p).all; },
        .x_lanes = integer_lanes,
        .in_place = never_in_place,
        .copy_row = copy_integer_row,
        .work = [](LinearWork& all, int64_t thread) { Worker(all, thread).work(); },
        .unpack_row = unpack_as<K>,
    };
    return KIND;
}

}  // namespace

const LinearKind& QUIRE_NAME(integer_kind, QUIRE_ISA)(const LinearParams& p) {
    const LinearKind* kind = nullptr;
    with_integers(p, [&]<class K>() { kind = &kind_of_integers<K>(); });
    return *kind;
}

// Pack a quantised weight. weight: [out, in]. packed: strips of W rows each.
ENTRY(pack_values)(ParallelFor parallel_for, const LinearParams* p, const IntegerParts* parts, char* packed) {
    with_integers(*p, [&]<class K>() { pack_values<K>(parallel_for, *p, *parts, packed); });
}

// Pack a weight of GGUF blocks of a kind. rows: the address of each row of the weight.
ENTRY(pack_blocks)(ParallelFor parallel_for, const LinearParams* p, int32_t kind, const uint8_t* const* rows, char* packed) {
    with_integers(*p, [&]<class K>() { pack_blocks<K>(parallel_for, *p, kind, rows, packed); });
}
