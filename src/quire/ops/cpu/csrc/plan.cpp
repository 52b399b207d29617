// Division of a step into items. The division affects which thread computes an item and when, but no bit of the result: tiles and
// splits are at absolute positions, rows do not mix, and states are merged in ascending order.

#include "plan.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <vector>

namespace {

constexpr int64_t ITEMS_A_THREAD = 4;
constexpr int64_t TURNS_A_THREAD = 16;  // turns in which a thread takes these items; each turn synchronises with the other threads
constexpr int64_t WORTH_WAITING = 4096;  // keys times heads whose reading takes about as long as starting another phase

struct Buffer {  // memory that can grow, aligned to a cache line
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

// Return the bytes of that many fp32 numbers. On overflow, return a size that cannot be allocated.
size_t bytes_of(int64_t states, int64_t heads, int64_t numbers) {
    size_t all = sizeof(float);
    for (int64_t factor : {states, heads, numbers})
        if (__builtin_mul_overflow(all, (size_t)factor, &all)) throw std::bad_alloc();
    return all;
}

int64_t times(int64_t a, int64_t b) {  // a saturating product, which is sufficient for costs
    int64_t product;
    return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

struct Tile {  // up to item_rows rows of one sequence
    int32_t sequence, first, count, begin, end;
};

struct Shared {  // the leading keys of a tile that are computed by items of several sequences
    int32_t keys, phase;  // phase: that of the tile's own first item, which continues after these keys
};

}  // namespace

// The plan that the kernels read, and its memory.
struct QuirePlan {
    Plan view{};
    std::vector<Item> items;
    std::vector<Tile> tiles;
    std::vector<int32_t> row_tokens, row_positions, row_ends, row_sequences, split_tokens, first_state, first_split, num_splits;
    std::vector<Shared> shared;  // of each tile
    Buffer scratch, states;

    void update(const StepParams& step);

  private:
    void make_tiles();
    int compare(int32_t a, int32_t b, int32_t at) const;
    std::vector<std::vector<int32_t>> groups(std::vector<int32_t> candidates, int32_t at) const;
    void share(const std::vector<int32_t>& same, int32_t begin, int32_t end, int32_t phase);
    void add_shared(const std::vector<int32_t>& same, int32_t begin, int32_t end, int32_t phase);
    void make_items();
    void split_tile(const Tile& tile, Shared shared, int64_t limit);
    void need_states(const Tile& tile);
};

// Check the number of rows: items count the rows of all query heads in an int32.
static void number_rows(int64_t rows, int64_t group) {
    if (rows * group > INT32_MAX) throw std::length_error("rows");
}

void QuirePlan::make_tiles() {
    const SpecParams& spec = view.spec;
    const StepParams& step = view.step;
    const int32_t group = spec.num_heads / spec.num_kv_heads;
    number_rows(step.query_starts[step.num_seqs], group);
    for (int32_t s = 0; s < step.num_seqs; s++) {
        int32_t start = step.query_starts[s], rows = step.query_starts[s + 1] - start, context = step.context_lens[s];
        for (int32_t r = 0; r < rows; r++) {
            row_tokens.push_back(start + r);
            row_positions.push_back(context - rows + r);
            row_ends.push_back(!spec.causal ? context : step.key_ends ? step.key_ends[start + r] : std::max(0, context - rows + r + 1));
            row_sequences.push_back(s);
        }
        for (int64_t at = 0; at < (int64_t)rows * group; at += view.spec.item_rows) {
            int32_t count = (int32_t)std::min<int64_t>(view.spec.item_rows, (int64_t)rows * group - at);
            int64_t low = row_positions[start + at / group];
            int64_t begin = spec.window ? std::max<int64_t>(0, low - spec.window + 1) : 0;
            int64_t end = row_ends[start + (at + count - 1) / group];  // they never fall within a sequence
            tiles.push_back({s, (int32_t)(start * (int64_t)group + at), count, (int32_t)std::min(begin, end), (int32_t)end});
        }
    }
}

// Compare two tiles' sequences by their blocks of the tile of keys at `at`; 0: the blocks are the same.
int QuirePlan::compare(int32_t a, int32_t b, int32_t at) const {
    const StepParams& step = view.step;
    const int64_t size = view.spec.block_size, from = at / size, to = (at + TILE + size - 1) / size;
    const int32_t* one = step.block_tables + tiles[(size_t)a].sequence * step.table_stride;
    const int32_t* other = step.block_tables + tiles[(size_t)b].sequence * step.table_stride;
    return memcmp(one + from, other + from, (size_t)(to - from) * sizeof(int32_t));
}

// Select the candidates that attend to the whole tile of keys at `at`, in groups of two or more with the same blocks there.
std::vector<std::vector<int32_t>> QuirePlan::groups(std::vector<int32_t> candidates, int32_t at) const {
    candidates.erase(std::remove_if(candidates.begin(), candidates.end(),
                                    [&](int32_t t) { return tiles[(size_t)t].end < (int64_t)at + TILE; }),
                     candidates.end());
    std::stable_sort(candidates.begin(), candidates.end(), [&](int32_t a, int32_t b) { return compare(a, b, at) < 0; });
    std::vector<std::vector<int32_t>> found;
    for (size_t i = 0, j; i < candidates.size(); i = j) {
        for (j = i + 1; j < candidates.size() && compare(candidates[i], candidates[j], at) == 0; j++) {}
        if (j - i > 1) found.emplace_back(candidates.begin() + (long)i, candidates.begin() + (long)j);
    }
    return found;
}

// Create one item for sequences with the same blocks for the keys begin..end - 1, and with all their rows in one tile each. The item
// covers these keys, and the further keys that all of them have in common. phase: of an item that begins at `begin`.
void QuirePlan::share(const std::vector<int32_t>& same, int32_t begin, int32_t end, int32_t phase) {
    auto all_have = [&](int32_t at) {
        return std::all_of(same.begin(), same.end(), [&](int32_t t) {
            return tiles[(size_t)t].end >= (int64_t)at + TILE && compare(same[0], t, at) == 0;
        });
    };
    while (all_have(end)) end += TILE;
    // If the common keys end within a split, all sequences wait for the shared part of it. That must be worth it.
    const int32_t whole = std::max(begin, end / SPLIT * SPLIT);
    if (times((int64_t)(same.size() - 1) * (end - whole), view.spec.num_kv_heads) < WORTH_WAITING) {
        if (whole == begin) {  // some of the sequences may have more keys in common
            for (const auto& some : groups(same, end)) share(some, begin, end + TILE, phase);
            return;
        }
        end = whole;
    }
    for (int32_t at = begin, stop; at < end; at = stop) {
        stop = std::min(end, (at / SPLIT + 1) * SPLIT);
        add_shared(same, at, stop, at == begin ? phase : 0);
    }
    const int32_t next = end % SPLIT == 0 ? 0 : end / SPLIT == begin / SPLIT ? phase + 1 : 1;
    for (int32_t t : same) shared[(size_t)t] = {end, next};
    for (const auto& some : groups(same, end)) share(some, end, end + TILE, next);
}

// Add items for all rows of tiles of several sequences.
void QuirePlan::add_shared(const std::vector<int32_t>& same, int32_t begin, int32_t end, int32_t phase) {
    const int32_t group = view.spec.num_heads / view.spec.num_kv_heads;
    for (size_t k = 0; k < same.size();) {
        number_rows((int64_t)row_tokens.size() + view.spec.item_rows, group);
        int32_t first = (int32_t)row_tokens.size(), count = 0;
        for (; k < same.size() && count + tiles[(size_t)same[k]].count <= view.spec.item_rows; k++) {
            const Tile& tile = tiles[(size_t)same[k]];
            for (int32_t r = 0; r < tile.count / group; r++) {
                row_tokens.push_back(row_tokens[(size_t)(tile.first / group + r)]);
                row_positions.push_back(row_positions[(size_t)(tile.first / group + r)]);
                row_ends.push_back(row_ends[(size_t)(tile.first / group + r)]);
                row_sequences.push_back(tile.sequence);
            }
            count += tile.count;
        }
        items.push_back({tiles[(size_t)same[k - 1]].sequence, first * group, count, begin, end, 1, phase});
    }
}

// Reserve states for the splits that the tile's tokens attend to.
void QuirePlan::need_states(const Tile& tile) {
    const SpecParams& spec = view.spec;
    const int32_t group = spec.num_heads / spec.num_kv_heads;
    for (int32_t row = tile.first / group; row <= (tile.first + tile.count - 1) / group; row++) {
        const size_t token = (size_t)row_tokens[(size_t)row];
        const int64_t position = row_positions[(size_t)row];
        const int64_t low = spec.window ? std::max<int64_t>(0, position - spec.window + 1) : 0;
        const int64_t high = row_ends[(size_t)row];
        if (num_splits[token]) continue;  // a token with many query heads is in several tiles
        split_tokens.push_back((int32_t)token);
        first_split[token] = (int32_t)(low / SPLIT);
        num_splits[token] = (int32_t)std::max<int64_t>(0, (high + SPLIT - 1) / SPLIT - low / SPLIT);
    }
}

void QuirePlan::split_tile(const Tile& tile, Shared shared, int64_t limit) {
    int64_t splits = std::max<int64_t>(1, limit / cost(view.spec, tile.count, 0, SPLIT));
    int32_t phase = shared.phase;
    for (int64_t at = std::max(tile.begin, shared.keys); at < tile.end; phase = 0) {
        int64_t stop = std::min<int64_t>(tile.end, (at / SPLIT + (phase ? 1 : splits)) * SPLIT);
        items.push_back({tile.sequence, tile.first, tile.count, (int32_t)at, (int32_t)stop, 1, phase});
        at = stop;
    }
}

void QuirePlan::make_items() {
    const SpecParams& spec = view.spec;
    const int32_t group = spec.num_heads / spec.num_kv_heads;
    shared.assign(tiles.size(), {0, 0});
    if (!spec.window) {
        // Tiles with all rows of a sequence and space for those of another one.
        std::vector<int32_t> small;
        for (size_t t = 0; t < tiles.size(); t++) {
            bool alone = (t == 0 || tiles[t - 1].sequence != tiles[t].sequence) &&
                         (t + 1 == tiles.size() || tiles[t + 1].sequence != tiles[t].sequence);
            if (alone && 2 * tiles[t].count <= view.spec.item_rows && tiles[t].count % group == 0) small.push_back((int32_t)t);
        }
        for (const auto& same : groups(small, 0)) share(same, 0, TILE, 0);
    }
    int64_t total = 0;
    for (const Tile& tile : tiles) total += cost(view.spec, tile.count, tile.begin, tile.end);
    const int64_t limit = times(total, spec.num_kv_heads) / (view.step.num_threads * ITEMS_A_THREAD);
    // The rows of a token must either all be finished by an item, or all be merged.
    std::vector<char> parts(tiles.size());
    for (size_t t = 0; t < tiles.size(); t++) {
        const Tile& tile = tiles[t];
        bool long_enough = (tile.end - 1) / SPLIT > tile.begin / SPLIT;
        parts[t] = shared[t].keys || (view.step.num_threads > 1 && long_enough && cost(view.spec, tile.count, tile.begin, tile.end) > limit);
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
            items.push_back({tile.sequence, tile.first, tile.count, tile.begin, tile.end, 0, 0});
            continue;
        }
        need_states(tile);
        split_tile(tile, shared[t], std::max<int64_t>(limit, 1));
    }
    std::stable_sort(items.begin(), items.end(), [&](const Item& a, const Item& b) {
        return a.phase != b.phase ? a.phase < b.phase : cost(view.spec, a.count, a.begin, a.end) > cost(view.spec, b.count, b.begin, b.end);
    });
    total = 0;
    for (const Item& item : items) total += cost(view.spec, item.count, item.begin, item.end);
    view.grain = times(total, spec.num_kv_heads) / (view.step.num_threads * TURNS_A_THREAD);
    view.num_phases = 0;
    for (size_t i = 0; i < items.size(); i++) {
        view.num_phases = items[i].phase + 1;  // every phase has items, since the next phase continues from their states
        view.phase_ends[items[i].phase] = (int64_t)i + 1;
    }
}

void QuirePlan::update(const StepParams& step) {
    view.step = step;
    const int32_t num_tokens = step.query_starts[step.num_seqs];
    items.clear(), tiles.clear(), row_tokens.clear(), row_positions.clear(), row_ends.clear(), row_sequences.clear(), split_tokens.clear();
    first_state.assign((size_t)num_tokens, 0), first_split.assign((size_t)num_tokens, 0), num_splits.assign((size_t)num_tokens, 0);
    make_tiles();
    make_items();
    int64_t states_needed = 0;
    for (int32_t token : split_tokens) {
        first_state[(size_t)token] = (int32_t)states_needed;
        states_needed += num_splits[(size_t)token];
    }
    view.state_stride = round_up(view.spec.head_dim_v + 2, 16);
    if (states_needed > INT32_MAX) throw std::length_error("states");
    states.reserve(bytes_of(states_needed, view.spec.num_heads, view.state_stride));
    view.scratch_stride = round_up(scratch_sizes(view.spec).total() * (int64_t)sizeof(float), 4096) + 64;
    scratch.reserve((size_t)(view.scratch_stride * step.num_threads));
    view.items = items.data();
    view.row_tokens = row_tokens.data(), view.row_positions = row_positions.data();
    view.row_ends = row_ends.data(), view.row_sequences = row_sequences.data();
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

// Plan a step. Return 0, 1 if there is not enough memory, or 2 if the step has more rows than fit an int32. The step's arrays must stay
// valid as long as the plan is used.
QUIRE_EXPORT int32_t quire_plan_update(QuirePlan* plan, const StepParams* step) {
    try {
        plan->update(*step);
        return 0;
    } catch (const std::bad_alloc&) {
        plan->view.num_phases = plan->view.num_split_tokens = 0;  // the arrays that they count may be invalid
        return 1;
    } catch (const std::length_error&) {
        plan->view.num_phases = plan->view.num_split_tokens = 0;
        return 2;
    }
}

QUIRE_EXPORT const Plan* quire_plan_view(const QuirePlan* plan) { return &plan->view; }

QUIRE_EXPORT int32_t quire_num_items(const QuirePlan* plan) { return (int32_t)plan->items.size(); }

QUIRE_EXPORT int32_t quire_num_phases(const QuirePlan* plan) { return (int32_t)plan->view.num_phases; }

QUIRE_EXPORT int32_t quire_num_parts(const QuirePlan* plan) { return (int32_t)plan->split_tokens.size(); }

}  // extern "C"
