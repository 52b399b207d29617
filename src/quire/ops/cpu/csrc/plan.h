// The work list of attention in one step, built once and used by every layer of a cache group.
#pragma once

#include "params.h"

constexpr int TILE = 256;      // keys that share a softmax pass; tiles begin at multiples of it
constexpr int SPLIT = 1024;    // keys whose sums are merged as one state; splits begin at multiples of it
constexpr int SUBTILE = 64;    // keys that are scored, or skipped, together

// Attention of some rows to a range of the keys of one block table, for one KV head at a time. Row i is query head i % G of the token
// row_tokens[i / G]. The rows may belong to several sequences whose tables are equal in the range.
struct Item {
    int32_t table;       // row of block_tables
    int32_t first;       // first row, counted in query heads
    int32_t count;       // rows
    int32_t begin, end;  // keys; begin is at or after the first key that any of the rows attends to
    int32_t partial;     // 1: the state of each split is stored; 0: the item finishes its rows
    int32_t phase;       // 0; else the item continues, within a split, from states that items of the previous phase stored
};

// Estimate the cost of `rows` rows over these keys.
static inline int64_t cost(const SpecParams& spec, int64_t rows, int64_t begin, int64_t end) {
    return (end - begin) * (rows + spec.memory_rows) + 64;
}

constexpr int PHASES = SPLIT / TILE;  // the most phases

// A state is the result of a row's attention to one split: Dv sums, the maximum, the total.
struct Plan {
    SpecParams spec;
    StepParams step;
    const Item* items;  // phase by phase, the most expensive first
    int64_t phase_ends[PHASES];
    int64_t num_phases;
    int64_t grain;  // cost of the items that a thread takes at a time
    const int32_t* row_tokens;     // query token of each row
    const int32_t* row_positions;  // its absolute position
    const int32_t* row_ends;       // it attends to no key from this one on
    const int32_t* row_sequences;  // its sequence
    const int32_t* split_tokens;   // tokens whose rows are computed in parts
    int64_t num_split_tokens;
    const int32_t* first_state;  // [T]: index of the token's first state; only set for split tokens
    const int32_t* first_split;  // [T]: the split of that state
    const int32_t* num_splits;   // [T]
    float* states;
    int64_t state_stride;
    char* scratch;  // one part per thread
    int64_t scratch_stride;
};

static inline float* state_of(const Plan& plan, int64_t index, int head) {
    return plan.states + (index * plan.spec.num_heads + head) * plan.state_stride;
}

// Sizes of one thread's scratch, in fp32 numbers, sufficient for every ISA and dtype.
struct Scratch {
    int64_t query, keys, values, scores, weights, sums, row;
    int64_t total() const { return query + keys + values + scores + weights + 2 * sums + 8 * row; }
};

static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

static inline Scratch scratch_sizes(const SpecParams& spec) {
    // Matrix tiles need all keys and values of a TILE at once, in pairs; vectors need SUBTILE of them, with one number per lane.
    int64_t lanes = round_up(spec.head_dim, 32), wide = round_up(spec.head_dim_v, 64);
    const int64_t rows = spec.item_rows;
    return {rows * lanes, TILE / 2 * lanes, TILE / 2 * most(wide, 2 * SUBTILE), rows * TILE, rows * TILE / 2, rows * wide, rows};
}
