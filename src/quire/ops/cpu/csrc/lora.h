// LoRA adapters: adds (scale * x @ A.T) @ B.T to the results of a linear, for each row with its adapter.
//
// Rows are grouped by adapter, a few at a time, independent of their positions in the batch. A number is one chain of multiply-adds
// in each of the two products; between these it is scaled and rounded to the dtype. So the result is batch-invariant.
#pragma once

#include <vector>

#include "isa.h"
#include "parallel.h"
#include "strips.h"

namespace {

constexpr int LORA_ROWS = 2 * ROWS;  // rows that read an adapter together

// Tiles would mostly multiply zeros, as the rank and the number of rows per adapter are small.
template <class K>
struct VectorKindOf {
    using Kind = K;
};
#ifdef QUIRE_TILES
template <>
struct VectorKindOf<Tiled> {
    using Kind = Widened<BF16>;
};
#endif

// The rows of a step that have an adapter, sorted by adapter.
struct LoraRows {
    struct Item {
        int32_t slot;
        int first, count;
    };
    std::vector<int32_t> rows;
    std::vector<Item> items;  // at most LORA_ROWS of the rows each

    // slots: each row's adapter; -1: none. kept: the remaining rows; null: the first `count` rows.
    LoraRows(const int32_t* slots, int64_t count, const int64_t* kept = nullptr) {
        if (!slots) return;
        const auto slot_of = [&](int64_t i) { return slots[kept ? kept[i] : i]; };
        std::vector<int> starts;
        for (int64_t i = 0; i < count; i++) {
            if ((int64_t)starts.size() < slot_of(i) + 2) starts.resize(slot_of(i) + 2, 0);
            if (slot_of(i) >= 0) starts[slot_of(i) + 1]++;
        }
        for (size_t s = 1; s < starts.size(); s++) starts[s] += starts[s - 1];
        for (size_t s = 0; s + 1 < starts.size(); s++)
            for (int first = starts[s]; first < starts[s + 1]; first += LORA_ROWS)
                items.push_back({(int32_t)s, first, starts[s + 1] - first < LORA_ROWS ? starts[s + 1] - first : LORA_ROWS});
        rows.resize(starts.empty() ? 0 : starts.back());
        for (int64_t i = 0; i < count; i++)
            if (slot_of(i) >= 0) rows[starts[slot_of(i)]++] = (int32_t)i;
    }
};

inline int64_t whole_vectors(int64_t numbers) { return (numbers + W - 1) / W * W; }
inline int64_t whole_panels(int64_t numbers) { return (numbers + PANEL - 1) / PANEL * PANEL; }

template <class K>
struct Lora {
    using E = typename K::E;
    using T = typename E::T;
    using S = Strips<K>;

    const LoraParams& p;
    const LoraRows& rows;

    // Return the fp32 numbers of scratch for a row: the row as lanes, its product with A, and that product as lanes.
    static int64_t room(int64_t in, int64_t rank) { return K::lanes(in) + whole_panels(rank) + whole_vectors(rank); }

    void run(ParallelFor parallel_for) const {
        const int64_t work = (int64_t)rows.rows.size() * p.in_size * W;  // multiply-adds for a rank of W
        const int64_t items = (int64_t)rows.items.size();
        parallel(parallel_for, items, work < FORK ? items : 1, [&](int64_t i) { add(rows.items[i]); });
    }

  private:
    void add(const LoraRows::Item& item) const {
        const LoraSlot& slot = p.slots[item.slot];
        if (!slot.a) return;  // the adapter does not change this linear
        const int count = item.count;
        const int32_t* own = rows.rows.data() + item.first;
        const int64_t lanes = K::lanes(p.in_size), apart = whole_panels(slot.rank);
        float* x = p.room + item.first * room(p.in_size, p.most_rank);
        float* shrunk = x + count * lanes;
        float* ready = shrunk + count * apart;
        for (int i = 0; i < count; i++) pack_row<K>((const T*)p.x + own[i] * p.x_stride, p.in_size, x + i * lanes);
        for (int64_t c = 0; c < apart; c += PANEL)
            multiply(x, lanes, (const char*)slot.a, p.in_size, slot.rank, c, count, shrunk + c, apart);
        for (int64_t i = 0; i < slot.num_parts; i++) expand(slot.parts[i], own, count, shrunk, apart, (T*)x, ready);
    }

    // Multiply with B. rounded: scratch for a row of numbers.
    void expand(const LoraPart& part, const int32_t* own, int count, const float* shrunk, int64_t apart, T* rounded, float* ready) const {
        const int64_t lanes = K::lanes(part.rank);
        for (int i = 0; i < count; i++) {
            for (int64_t c = 0; c < part.rank; c += W) {
                const int n = part.rank - c < W ? (int)(part.rank - c) : W;
                put_part<E>(rounded + c, get_part<F32>(shrunk + i * apart + part.first_rank + c, n) * part.scale, n);
            }
            pack_row<K>(rounded, part.rank, ready + i * lanes);
        }
        alignas(64) float sums[LORA_ROWS * PANEL];
        for (int64_t c = 0; c < part.size; c += PANEL) {
            multiply(ready, lanes, (const char*)part.b, part.rank, part.size, c, count, sums, PANEL);
            for (int i = 0; i < count; i++) {
                T* out = (T*)p.out + own[i] * p.out_stride + part.first;
                for (int64_t k = c; k < part.size && k < c + PANEL; k += W) {
                    const int n = part.size - k < W ? (int)(part.size - k) : W;
                    put_part<E>(out + k, get_part<E>(out + k, n) + load(sums + i * PANEL + k - c), n);
                }
            }
        }
    }

    // Multiply `count` rows by one panel of columns, from c on, of a weight [columns, in] in strips. If a panel has no second half, the
    // first half is multiplied twice.
    static void multiply(
        const float* x, int64_t lanes, const char* weight, int64_t in, int64_t columns, int64_t c, int count, float* to, int64_t apart) {
        const int64_t stride = K::lanes(in) * S::VECTOR, strips = (columns - c + W - 1) / W;
        const RowBlocks blocks(count);
        for (int j = 0; j < COLUMNS && j < strips; j += 2) {
            const S pair{weight + (c / W + j) * stride, j + 1 < strips ? stride : 0};
            for (int b = 0; b < blocks.blocks; b++)
                with_rows(blocks.rows(b), [&]<int R>() {
                    micro_kernel<typename K::M, R, 2, Sums::REPLACED>(
                        x + blocks.first(b) * lanes, lanes, pair, to + blocks.first(b) * apart + j * W, apart, 0, (int)lanes, idle);
                });
        }
    }
};

}  // namespace
