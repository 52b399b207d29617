// How a step is cut into items. Where the cuts lie changes who computes what and when, never a bit of the result:
// tiles and splits stand at absolute positions, rows do not mix, and states merge in ascending order.

#include "plan.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

namespace {

constexpr int64_t MEMORY_ROWS = 12;  // reading a key costs as much as computing this many rows with it
constexpr int64_t ITEMS_A_THREAD = 4;

struct Buffer {  // memory that grows and starts at a cache line
    char* data = nullptr;
    size_t size = 0;
    ~Buffer() { free(data); }
    void reserve(size_t wanted) {
        if (wanted <= size) return;
        free(data);
        size = 0;
        data = static_cast<char*>(aligned_alloc(64, (wanted + 63) / 64 * 64));
        if (!data) throw std::bad_alloc();
        size = wanted;
    }
};

struct Tile {  // up to MAX_ROWS rows of one sequence
    int32_t sequence, first, count, begin, end;
};

}  // namespace

// The plan that the kernels see, and the memory behind it.
struct QuirePlan {
    Plan view{};
    std::vector<Item> items;
    std::vector<Tile> tiles;
    std::vector<int32_t> row_tokens, row_positions, split_tokens, first_state, first_split, num_splits;
    std::vector<int32_t> shared;  // [S]: leading splits that another sequence has too
    Buffer scratch, states;

    void update(const StepParams& step);

  private:
    int64_t cost(int64_t rows, int64_t begin, int64_t end) const { return (end - begin) * (rows + MEMORY_ROWS) + 64; }
    void make_tiles();
    void share(std::vector<int32_t> sequences, int32_t split);
    void make_items();
    void split_tile(const Tile& tile, int32_t begin, int64_t limit);
    void need_states(const Tile& tile);
};

void QuirePlan::make_tiles() {
    const SpecParams& spec = view.spec;
    const StepParams& step = view.step;
    const int32_t group = spec.num_heads / spec.num_kv_heads;
    for (int32_t s = 0; s < step.num_seqs; s++) {
        int32_t start = step.query_starts[s], rows = step.query_starts[s + 1] - start, context = step.context_lens[s];
        for (int32_t r = 0; r < rows; r++) {
            row_tokens.push_back(start + r);
            row_positions.push_back(context - rows + r);
        }
        for (int64_t at = 0; at < (int64_t)rows * group; at += MAX_ROWS) {
            int32_t count = (int32_t)std::min<int64_t>(MAX_ROWS, (int64_t)rows * group - at);
            int64_t low = row_positions[start + at / group], high = row_positions[start + (at + count - 1) / group];
            int64_t begin = spec.window ? std::max<int64_t>(0, low - spec.window + 1) : 0;
            int64_t end = spec.causal ? std::max<int64_t>(0, high + 1) : context;
            tiles.push_back({s, (int32_t)(start * (int64_t)group + at), count, (int32_t)std::min(begin, end), (int32_t)end});
        }
    }
}

// Sequences that all have the same blocks up to this split, and their rows in one tile: find which have the next split in
// common too, and give it to one item for all of them.
void QuirePlan::share(std::vector<int32_t> candidates, int32_t split) {
    const StepParams& step = view.step;
    const int32_t size = view.spec.block_size, group = view.spec.num_heads / view.spec.num_kv_heads;
    const int64_t from = (int64_t)split * SPLIT / size, to = ((int64_t)(split + 1) * SPLIT + size - 1) / size;
    auto table = [&](int32_t tile) { return step.block_tables + tiles[tile].sequence * step.table_stride; };
    auto compare = [&](int32_t a, int32_t b) {
        return memcmp(table(a) + from, table(b) + from, (size_t)(to - from) * sizeof(int32_t));
    };
    candidates.erase(std::remove_if(candidates.begin(), candidates.end(),
                                    [&](int32_t t) { return tiles[t].end < (int64_t)(split + 1) * SPLIT; }),
                     candidates.end());
    std::stable_sort(candidates.begin(), candidates.end(), [&](int32_t a, int32_t b) { return compare(a, b) < 0; });
    for (size_t i = 0, j; i < candidates.size(); i = j) {
        for (j = i + 1; j < candidates.size() && compare(candidates[i], candidates[j]) == 0; j++) {}
        if (j - i < 2) continue;
        std::vector<int32_t> same(candidates.begin() + (long)i, candidates.begin() + (long)j);
        for (size_t k = 0; k < same.size();) {
            int32_t first = (int32_t)row_tokens.size(), count = 0;
            for (; k < same.size() && count + tiles[same[k]].count <= MAX_ROWS; k++) {
                const Tile& tile = tiles[same[k]];
                for (int32_t r = 0; r < tile.count / group; r++) {
                    row_tokens.push_back(row_tokens[(size_t)(tile.first / group + r)]);
                    row_positions.push_back(row_positions[(size_t)(tile.first / group + r)]);
                }
                count += tile.count;
            }
            items.push_back({tiles[same[k - 1]].sequence, first * group, count, split * SPLIT, (split + 1) * SPLIT, 1});
        }
        for (int32_t t : same) shared[(size_t)t] = split + 1;
        share(same, split + 1);
    }
}

// Room for the states of the splits that the tile's tokens see.
void QuirePlan::need_states(const Tile& tile) {
    const SpecParams& spec = view.spec;
    const int32_t group = spec.num_heads / spec.num_kv_heads;
    for (int32_t row = tile.first / group; row <= (tile.first + tile.count - 1) / group; row++) {
        const size_t token = (size_t)row_tokens[(size_t)row];
        const int64_t position = row_positions[(size_t)row];
        const int64_t low = spec.window ? std::max<int64_t>(0, position - spec.window + 1) : 0;
        const int64_t high = spec.causal ? position + 1 : view.step.context_lens[tile.sequence];
        if (num_splits[token]) continue;  // a token of many query heads stands in several tiles
        split_tokens.push_back((int32_t)token);
        first_split[token] = (int32_t)(low / SPLIT);
        num_splits[token] = (int32_t)std::max<int64_t>(0, (high + SPLIT - 1) / SPLIT - low / SPLIT);
    }
}

void QuirePlan::split_tile(const Tile& tile, int32_t begin, int64_t limit) {
    int64_t splits = std::max<int64_t>(1, limit / cost(tile.count, 0, SPLIT));
    for (int64_t at = begin; at < tile.end;) {
        int64_t stop = std::min<int64_t>(tile.end, (at / SPLIT + splits) * SPLIT);
        items.push_back({tile.sequence, tile.first, tile.count, (int32_t)at, (int32_t)stop, 1});
        at = stop;
    }
}

void QuirePlan::make_items() {
    const SpecParams& spec = view.spec;
    const int32_t group = spec.num_heads / spec.num_kv_heads;
    shared.assign(tiles.size(), 0);
    if (!spec.window) {
        // Tiles that are a whole sequence's rows and leave room for another's.
        std::vector<int32_t> small;
        for (size_t t = 0; t < tiles.size(); t++) {
            bool alone = (t == 0 || tiles[t - 1].sequence != tiles[t].sequence) &&
                         (t + 1 == tiles.size() || tiles[t + 1].sequence != tiles[t].sequence);
            if (alone && 2 * tiles[t].count <= MAX_ROWS && tiles[t].count % group == 0) small.push_back((int32_t)t);
        }
        share(small, 0);
    }
    int64_t total = 0;
    for (const Tile& tile : tiles) total += cost(tile.count, tile.begin, tile.end);
    const int64_t limit = total * spec.num_kv_heads / (view.step.num_threads * ITEMS_A_THREAD);
    // Rows of a token must all be finished by an item, or all be merged.
    std::vector<char> parts(tiles.size());
    for (size_t t = 0; t < tiles.size(); t++) {
        const Tile& tile = tiles[t];
        bool long_enough = (tile.end - 1) / SPLIT > tile.begin / SPLIT;
        parts[t] = shared[t] || (view.step.num_threads > 1 && long_enough && cost(tile.count, tile.begin, tile.end) > limit);
    }
    for (size_t t = 1; t < tiles.size(); t++) {
        bool same_token = tiles[t].first / group == (tiles[t - 1].first + tiles[t - 1].count - 1) / group;
        if (same_token && parts[t - 1]) parts[t] = 1;
    }
    for (size_t t = tiles.size(); t-- > 1;) {
        bool same_token = tiles[t].first / group == (tiles[t - 1].first + tiles[t - 1].count - 1) / group;
        if (same_token && parts[t]) parts[t - 1] = 1;
    }
    for (size_t t = 0; t < tiles.size(); t++) {
        const Tile& tile = tiles[t];
        if (!parts[t]) {
            items.push_back({tile.sequence, tile.first, tile.count, tile.begin, tile.end, 0});
            continue;
        }
        need_states(tile);
        split_tile(tile, std::max(tile.begin, shared[t] * SPLIT), std::max<int64_t>(limit, 1));
    }
    std::stable_sort(items.begin(), items.end(), [&](const Item& a, const Item& b) {
        return cost(a.count, a.begin, a.end) > cost(b.count, b.begin, b.end);
    });
}

void QuirePlan::update(const StepParams& step) {
    view.step = step;
    const int32_t num_tokens = step.query_starts[step.num_seqs];
    items.clear(), tiles.clear(), row_tokens.clear(), row_positions.clear(), split_tokens.clear();
    first_state.assign((size_t)num_tokens, 0), first_split.assign((size_t)num_tokens, 0), num_splits.assign((size_t)num_tokens, 0);
    make_tiles();
    make_items();
    int64_t states_needed = 0;
    for (int32_t token : split_tokens) {
        first_state[(size_t)token] = (int32_t)states_needed;
        states_needed += num_splits[(size_t)token];
    }
    view.state_stride = round_up(view.spec.head_dim_v + 2, 16);
    states.reserve((size_t)(states_needed * view.spec.num_heads * view.state_stride) * sizeof(float));
    view.scratch_stride = round_up(scratch_sizes(view.spec).total() * (int64_t)sizeof(float), 4096) + 64;
    scratch.reserve((size_t)(view.scratch_stride * step.num_threads));
    view.items = items.data(), view.num_items = (int64_t)items.size();
    view.row_tokens = row_tokens.data(), view.row_positions = row_positions.data();
    view.split_tokens = split_tokens.data(), view.num_split_tokens = (int64_t)split_tokens.size();
    view.first_state = first_state.data(), view.first_split = first_split.data(), view.num_splits = num_splits.data();
    view.states = (float*)states.data;
    view.scratch = scratch.data;
}

extern "C" {

QUIRE_EXPORT QuirePlan* quire_plan_new(const SpecParams* spec) {
    QuirePlan* plan = new (std::nothrow) QuirePlan;
    if (plan) plan->view.spec = *spec;
    return plan;
}

QUIRE_EXPORT void quire_plan_free(QuirePlan* plan) { delete plan; }

// 0, or 1 where there is no memory. The step's arrays must stay where they are for as long as the plan is used.
QUIRE_EXPORT int32_t quire_plan_update(QuirePlan* plan, const StepParams* step) {
    try {
        plan->update(*step);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

QUIRE_EXPORT const Plan* quire_plan_view(const QuirePlan* plan) { return &plan->view; }

QUIRE_EXPORT int32_t quire_num_items(const QuirePlan* plan) { return (int32_t)plan->items.size(); }

QUIRE_EXPORT int32_t quire_num_parts(const QuirePlan* plan) { return (int32_t)plan->split_tokens.size(); }

}  // extern "C"
