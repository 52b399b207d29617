// Conversion of GGUF blocks to the tensors of a quantised weight. It only moves bits, the same on every ISA. The formats are those of
// llama.cpp (ggml/src/ggml-common.h); ops/weights/gguf_blocks.py reads them with torch's operators.

#include <cstring>

#include "parallel.h"
#include "params.h"

namespace {

template <class T>
T* at(T* first, int64_t n) {
    return first ? first + n : first;
}

// Return the parts of the blocks from the n-th on.
BlockParts parts_at(const BlockParts& to, int64_t n, int inputs, int subs) {
    return {to.values + n * inputs, to.scales + n, at(to.minimums, n), at(to.sub_scales, n * subs), at(to.sub_minimums, n * subs)};
}

uint16_t half(const uint8_t* from) {
    uint16_t bits;
    memcpy(&bits, from, sizeof bits);
    return bits;
}

// Unpack the lower four bits of N bytes, then the upper four.
template <int N>
void halves(const uint8_t* from, uint8_t* to) {
    for (int i = 0; i < N; i++) to[i] = from[i] & 15, to[N + i] = from[i] >> 4;
}

// Set the fifth bits of 32 numbers from the bits of a word.
void fifth_bits(const uint8_t* from, uint8_t* to) {
    uint32_t bits;
    memcpy(&bits, from, sizeof bits);
    for (int i = 0; i < 32; i++) to[i] |= (uint8_t)((bits >> i & 1) << 4);
}

// Blocks of 32 inputs: scale, optional minimum, optional fifth bits, and the lower four bits.
template <bool HAS_MINIMUM, bool HAS_FIFTH>
struct Small {
    static constexpr int INPUTS = 32, SUBS = 0, BYTES = 18 + 2 * HAS_MINIMUM + 4 * HAS_FIFTH;
    static void read(const uint8_t* from, const BlockParts& to) {
        *to.scales = half(from), from += 2;
        if constexpr (HAS_MINIMUM) *to.minimums = half(from), from += 2;
        halves<16>(from + 4 * HAS_FIFTH, to.values);
        if constexpr (HAS_FIFTH) fifth_bits(from, to.values);
    }
};

struct Q8_0 {
    static constexpr int INPUTS = 32, SUBS = 0, BYTES = 34;
    static void read(const uint8_t* from, const BlockParts& to) {
        *to.scales = half(from);
        for (int i = 0; i < INPUTS; i++) to.values[i] = from[2 + i] ^ 128;
    }
};

// Blocks of 256 inputs with eight scales and minimums of 6 bits: the first four of each are in a byte, the last four in the halves of
// the third word and the remaining two bits of those bytes.
template <bool HAS_FIFTH>
struct Large {
    static constexpr int INPUTS = 256, SUBS = 8, BYTES = 144 + 32 * HAS_FIFTH;
    static void read(const uint8_t* from, const BlockParts& to) {
        *to.scales = half(from);
        *to.minimums = half(from + 2) ^ 0x8000;  // it is subtracted
        const uint8_t *scales = from + 4, *minimums = from + 8, *low = from + 12;
        for (int i = 0; i < 4; i++) {
            to.sub_scales[i] = scales[i] & 63, to.sub_minimums[i] = minimums[i] & 63;
            to.sub_scales[4 + i] = (int8_t)((low[i] & 15) | scales[i] >> 6 << 4);
            to.sub_minimums[4 + i] = (int8_t)(low[i] >> 4 | minimums[i] >> 6 << 4);
        }
        for (int i = 0; i < 4; i++) halves<32>(from + 16 + 32 * HAS_FIFTH + 32 * i, to.values + 64 * i);
        if constexpr (HAS_FIFTH)
            for (int i = 0; i < INPUTS; i++) to.values[i] |= (uint8_t)((from[16 + i % 32] >> i / 32 & 1) << 4);
    }
};

// 128 inputs have 64 bytes of lower bits, with 64 inputs in the lower halves, and 32 bytes of upper bits.
struct Q6_K {
    static constexpr int INPUTS = 256, SUBS = 16, BYTES = 210;
    static void read(const uint8_t* from, const BlockParts& to) {
        for (int part = 0; part < 2; part++) {
            uint8_t* values = to.values + 128 * part;
            halves<64>(from + 64 * part, values);
            for (int i = 0; i < 128; i++) values[i] |= (uint8_t)((from[128 + 32 * part + i % 32] >> i / 32 * 2 & 3) << 4);
        }
        memcpy(to.sub_scales, from + 192, 16);
        *to.scales = half(from + 208);
    }
};

template <class Format>
void read_row(const uint8_t* blocks, int64_t in_size, const BlockParts& to) {
    for (int64_t n = 0; n < in_size / Format::INPUTS; n++)
        Format::read(blocks + n * Format::BYTES, parts_at(to, n, Format::INPUTS, Format::SUBS));
}

struct Reader {
    void (*read_row)(const uint8_t*, int64_t, const BlockParts&);
    int inputs, subs;  // of a block
};

template <class Format>
constexpr Reader READER = {read_row<Format>, Format::INPUTS, Format::SUBS};

// In the order of FORMATS of ops/weights/gguf_blocks.py.
constexpr Reader READERS[] = {
    READER<Q8_0>, READER<Small<false, false>>, READER<Small<true, false>>, READER<Small<false, true>>, READER<Small<true, true>>,
    READER<Large<false>>, READER<Large<true>>, READER<Q6_K>};

}  // namespace

void quire_read_row(int32_t kind, const uint8_t* blocks, int64_t in_size, const BlockParts& to) {
    READERS[kind].read_row(blocks, in_size, to);
}

// Read rows of blocks, `stride` bytes apart.
extern "C" QUIRE_EXPORT void quire_read_blocks(
    ParallelFor parallel_for, int32_t kind, const uint8_t* blocks, int64_t stride, int64_t rows, int64_t in_size,
    uint8_t* values, uint16_t* scales, uint16_t* minimums, int8_t* sub_scales, int8_t* sub_minimums) {
    const Reader& reader = READERS[kind];
    const BlockParts all = {values, scales, minimums, sub_scales, sub_minimums};
    parallel(parallel_for, rows, rows_a_thread(in_size), [&](int64_t row) {
        reader.read_row(blocks + row * stride, in_size, parts_at(all, row * (in_size / reader.inputs), reader.inputs, reader.subs));
    });
}
