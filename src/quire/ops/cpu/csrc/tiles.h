// Matrix tiles: eight registers of up to 16 rows of 64 bytes, and products of bf16 or of bytes that are added to one of them.
//
// For bf16, with c of [rows, 16] fp32, a of [rows, 32] bf16, and b of [16, 16] pairs of bf16 (b[k][j] has inputs 2 k and
// 2 k + 1 of column j), the order of the sum is the one that Intel documents for TDPBF16PS:
//
//     even = 0;  for k in 0..15:  even = fma(a[i][2 k],     b[k][j].low,  even)
//     odd  = 0;  for k in 0..15:  odd  = fma(a[i][2 k + 1], b[k][j].high, odd)
//     c[i][j] += even + odd
//
// with denormal numbers read as zero and written as zero. For bytes, with c of [rows, 16] int32, a of [rows, 64], and b of
// [16, 16] groups of four bytes, the sum is exact.
//
// HardwareTiles are those of the processor. EmulatedTiles compute the same bits with vectors, so that any machine can test these
// sums; only the sign of a NaN may differ.
#pragma once

#include "simd.h"

namespace {

// The sizes of the registers. Products of 4 with 6 or 7 are added to 0 and 1, products of 5 with 6 or 7 to 2 and 3.
struct TileSizes {
    int first = 16, second = 16;  // rows of 4 and of 5
    int depth = 16;               // rows of 6 and 7: pairs of bf16, or groups of four bytes, that a product adds up

    int rows(int tile) const { return tile >= 6 ? depth : tile == 0 || tile == 1 || tile == 4 ? first : second; }
    int bytes(int tile) const { return tile == 4 || tile == 5 ? 4 * depth : 64; }  // of a row
};

class EmulatedTiles {
  public:
    explicit EmulatedTiles(TileSizes sizes = {}) : sizes(sizes) {}

    // Load a tile. stride: bytes from one row to the next. load_far: from the L2 cache.
    template <int N>
    void load(const void* at, int64_t stride) {
        for (int i = 0; i < sizes.rows(N); i++) memcpy(tiles[N][i], (const char*)at + i * stride, (size_t)sizes.bytes(N));
    }
    template <int N>
    void load_far(const void* at, int64_t stride) { load<N>(at, stride); }
    template <int N>
    void save(void* at, int64_t stride) {
        for (int i = 0; i < sizes.rows(N); i++) memcpy((char*)at + i * stride, tiles[N][i], (size_t)sizes.bytes(N));
    }
    template <int N>
    void zero() { memset(tiles[N], 0, sizeof tiles[N]); }

    template <int C, int A, int B>
    void multiply() {
        const uint32_t before = _mm_getcsr();
        set_rounding(before | 0x8040);  // denormal inputs and results are zero
        for (int i = 0; i < sizes.rows(C); i++) {
            __m512 even = _mm512_setzero_ps(), odd = even;
            for (int k = 0; k < sizes.depth; k++) {
                uint32_t pair;
                memcpy(&pair, &tiles[A][i][k], 4);
                const __m512i b = _mm512_load_si512(tiles[B][k]);
                even = _mm512_fmadd_ps((__m512)_mm512_set1_epi32((int)(pair << 16)), (__m512)_mm512_slli_epi32(b, 16), even);
                odd = _mm512_fmadd_ps((__m512)_mm512_set1_epi32((int)(pair & 0xffff0000u)),
                                      (__m512)_mm512_and_si512(b, _mm512_set1_epi32((int)0xffff0000)), odd);
            }
            _mm512_store_ps(tiles[C][i], _mm512_add_ps(_mm512_load_ps(tiles[C][i]), _mm512_add_ps(even, odd)));
        }
        set_rounding(before);
    }

    // Add products of bytes to C. The bytes of A are signed, those of B depend on SIGNED.
    template <int C, int A, int B, bool SIGNED>
    void multiply_bytes() {
        const I half = I{} + (int32_t)0x80808080;
        for (int i = 0; i < sizes.rows(C); i++) {
            I sum = (I)_mm512_load_si512(tiles[C][i]), more = {};  // more: the excess if 128 is added to each byte of B
            for (int k = 0; k < sizes.depth; k++) {
                const I a = (I)broadcast(&tiles[A][i][k]), b = (I)_mm512_load_si512(tiles[B][k]);
                sum = dot_bytes(sum, SIGNED ? b ^ half : b, a);
                if (SIGNED) more = dot_bytes(more, half, a);
            }
            _mm512_store_si512(tiles[C][i], (__m512i)(sum - more));
        }
    }

  private:
    alignas(64) float tiles[8][16][16];
    const TileSizes sizes;

    // The compiler moves no arithmetic across this, since its operands are in memory, which the asm statement may access.
    void set_rounding(uint32_t to) { asm volatile("ldmxcsr %0" ::"m"(to), "r"(this) : "memory"); }
};

#ifdef QUIRE_HARDWARE_TILES
class HardwareTiles {
  public:
    // The registers belong to a thread, so each worker configures them. After their release, a context switch does not save them.
    explicit HardwareTiles(TileSizes sizes = {}) {
        struct alignas(64) Configuration {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } wanted;
        for (int i = 0; i < 8; i++) wanted.row_bytes[i] = (uint16_t)sizes.bytes(i), wanted.rows[i] = (uint8_t)sizes.rows(i);
        asm volatile("ldtilecfg %0" ::"m"(wanted));
    }
    ~HardwareTiles() { asm volatile("tilerelease" ::: "memory"); }
    HardwareTiles(const HardwareTiles&) = delete;

    template <int N>
    QUIRE_INLINE_MEMBER void load(const void* at, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(at), "r"(stride), "i"(N) : "memory");
    }
    template <int N>
    QUIRE_INLINE_MEMBER void load_far(const void* at, int64_t stride) {
        asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(at), "r"(stride), "i"(N) : "memory");
    }
    template <int N>
    QUIRE_INLINE_MEMBER void save(void* at, int64_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(at), "r"(stride), "i"(N) : "memory");
    }
    template <int N>
    QUIRE_INLINE_MEMBER void zero() {
        asm volatile("tilezero %%tmm%c0" ::"i"(N));
    }
    template <int C, int A, int B>
    QUIRE_INLINE_MEMBER void multiply() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
    }
    template <int C, int A, int B, bool SIGNED>
    QUIRE_INLINE_MEMBER void multiply_bytes() {
        if constexpr (SIGNED) asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
        else asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
    }
};
using Tiles = HardwareTiles;

// Whether the processor's sums equal the documented ones, for numbers of many magnitudes, some of them denormal, and for bytes.
static inline bool adds_as_documented() {
    alignas(64) uint16_t a[16][32], b[16][32];
    alignas(64) float sums[2][3][16][16];
    uint32_t state = 12345;
    auto random = [&] {  // any exponent from 2^-130 to 2^30
        state = state * 1664525u + 1013904223u;
        return (uint16_t)((state >> 31) << 15 | (state >> 8) % 157 << 7 | (state >> 24 & 0x7f));
    };
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < 32; k++) a[i][k] = random(), b[i][k] = random();
    memset(sums, 0, sizeof sums);
    auto multiply = [&](auto&& tiles, float (*to)[16][16]) {
        tiles.template load<4>(a, 64), tiles.template load<5>(a, 64), tiles.template load<6>(b, 64);
        tiles.template zero<0>(), tiles.template zero<1>(), tiles.template zero<2>();
        for (int round = 0; round < 3; round++) {
            tiles.template multiply<0, 4, 6>();
            tiles.template multiply_bytes<1, 4, 6, false>(), tiles.template multiply_bytes<2, 5, 6, true>();
        }
        tiles.template save<0>(to[0], 64), tiles.template save<1>(to[1], 64), tiles.template save<2>(to[2], 64);
    };
    multiply(HardwareTiles(), sums[0]);
    multiply(EmulatedTiles(), sums[1]);
    return memcmp(sums[0], sums[1], sizeof sums[0]) == 0;
}
#else
using Tiles = EmulatedTiles;
#endif

}  // namespace
