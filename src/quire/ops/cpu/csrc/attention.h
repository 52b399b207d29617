// Attention over paged keys: each worker takes items of the plan and iterates over their tiles. The computation of a tile is in
// attention_vectors.h, attention_bytes.h and attention_tiles.h.
#pragma once

#include "parallel.h"
#include "softmax.h"

namespace {

QUIRE_INLINE int least(int a, int b) { return a < b ? a : b; }
QUIRE_INLINE int most(int a, int b) { return a > b ? a : b; }

// The current position of a worker: one tile of one item, and the addresses of its keys and values, of type T.
template <class T>
struct Place {
    const Item* item;
    int head;            // KV head
    int tile;            // position of the tile's first key
    int begin, end;      // keys to compute, relative to the tile: multiples of SUBTILE
    int stop;            // end of the item's keys
    int fetched;         // number of the keys begin..stop - 1, from the first on, that were fetched with earlier tiles
    const T* keys[TILE];
    const T* values[TILE];
};

// The state that all workers of a call share.
struct Call {
    const Plan* plan;
    const AttentionParams* params;
    int64_t next, end;  // the first item and head that no worker has taken yet; the end of the phase
};

alignas(64) const float NOTHING[1024] = {};  // replaces the key and the value of slots that do not belong to the item

// Self computes a tile: compute(step, fetcher).
template <class Self, class K>
struct Worker {
    using C = typename K::Cache::T;  // of the cache
    using Step = Place<C>;

    Call& call;
    const Plan& plan;
    const SpecParams& spec;
    const AttentionParams& params;
    const int group, lanes, lda_weights;
    const int wide;  // columns of the sums
    const int64_t number = spec.dtype == DTYPE_F32 ? 4 : 2;  // bytes of one of q and of the output
    ScoreRule rule;
    bool bent;
    int64_t taken = 0, taken_end = 0;  // items that this worker took and has not begun
    float *query, *keys, *values, *scores, *weights, *sums, *total_sums;
    float *top, *total, *whole_top, *whole_total;
    int *low, *high;
    alignas(64) float key_scales[K::SCALED ? TILE : 1], value_scales[K::SCALED ? TILE : 1];  // of the current tile

    Worker(Call& call, int64_t thread)
        : call(call), plan(*call.plan), spec(plan.spec), params(*call.params), group(spec.num_heads / spec.num_kv_heads),
          lanes((int)K::lanes(spec.head_dim)), lda_weights(TILE / K::PAIR),
          wide((spec.head_dim_v + PANEL - 1) / PANEL * PANEL) {
        bent = params.softcap != 0.0f || params.alibi_slopes || !(params.scale > 0.0f);
        rule = {params.scale * LOG2E, params.softcap * LOG2E, params.softcap != 0.0f ? 1.0f / (params.softcap * LOG2E) : 0.0f};
        const Scratch sizes = scratch_sizes(spec);
        float* at = (float*)(plan.scratch + thread * plan.scratch_stride);
        auto take = [&](int64_t size) { float* p = at; at += size; return p; };
        query = take(sizes.query), keys = take(sizes.keys), values = take(sizes.values), scores = take(sizes.scores);
        weights = take(sizes.weights), sums = take(sizes.sums), total_sums = take(sizes.sums);
        top = take(sizes.row), total = take(sizes.row), whole_top = take(sizes.row), whole_total = take(sizes.row);
        low = (int*)take(sizes.row), high = (int*)take(sizes.row);
        if (K::PAIR == 1 && !K::BYTES) weights = scores;
    }

    // ---------------------------------------------------------------------------------------- walking

    // Take items and heads that no worker has taken, worth at least plan.grain. Return whether there were any.
    bool take_turn() {
        taken = __atomic_load_n(&call.next, __ATOMIC_RELAXED);
        do {
            taken_end = taken;
            for (int64_t sum = 0; taken_end < call.end && (sum < plan.grain || taken_end == taken); taken_end++) {
                const Item& item = plan.items[taken_end / spec.num_kv_heads];
                sum += cost(spec, item.count, item.begin, item.end);
            }
        } while (!__atomic_compare_exchange_n(&call.next, &taken, taken_end, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
        return taken < taken_end;
    }

    bool take_item(Step& step) {
        if (taken == taken_end && !take_turn()) return false;
        const int64_t index = taken++;
        step.item = plan.items + index / spec.num_kv_heads;
        step.head = (int)(index % spec.num_kv_heads);
        locate(step, step.item->begin / TILE * TILE);
        return true;
    }

    // Find the next tile: of the same item, or the first one of the next item. Return whether there is one.
    bool next(const Step& step, Step& after) {
        if (step.tile + TILE >= step.item->end) return take_item(after);
        after.item = step.item;
        after.head = step.head;
        locate(after, step.tile + TILE);
        return true;
    }

    // Whether the next tile may be taken long before it is computed: it belongs to the same item, to an item that this worker has
    // already, or more items are left than there are threads. With vectors of fewer than 16 lanes, computation takes so long that
    // this has no benefit, and it was 8 % slower in fp32.
    bool may_look_beyond(const Step& step) const {
        if (W < 16) return false;
        if (step.tile + TILE < step.item->end || taken < taken_end) return true;
        return call.end - __atomic_load_n(&call.next, __ATOMIC_RELAXED) > plan.step.num_threads;
    }

    void locate(Step& step, int tile) {
        const Item& item = *step.item;
        const int first = most(item.begin - tile, 0), stop = least(item.end - tile, TILE);
        step.tile = tile;
        step.begin = first / SUBTILE * SUBTILE;
        step.stop = stop, step.fetched = 0;
        step.end = stop > first ? (stop + SUBTILE - 1) / SUBTILE * SUBTILE : step.begin;
        const CacheParams& cache = params.cache;
        const C *k = (const C*)cache.k + step.head * cache.k_head, *v = (const C*)cache.v + step.head * cache.v_head;
        for (int t = step.begin; t < first; t++) step.keys[t] = step.values[t] = (const C*)NOTHING;
        each_run(step, [&](int t, int until, int64_t block, int offset) __attribute__((always_inline)) {
            const C *key = k + block * cache.k_block + offset * cache.k_slot;
            const C *value = v + block * cache.v_block + offset * cache.v_slot;
            if constexpr (K::SCALED) {
                fetch_scales(key_scale(step, block, offset), until - t);
                fetch_scales(value_scale(step, block, offset), until - t);
            }
            for (; t < until; t++) {
                step.keys[t] = key, step.values[t] = value;
                key += cache.k_slot, value += cache.v_slot;
            }
        });
        for (int t = most(stop, first); t < step.end; t++) step.keys[t] = step.values[t] = (const C*)NOTHING;
    }

    // Call f(t, until, block, offset) for each run of keys t..until - 1 of the step's tile that are in one block, from `offset` on.
    template <class F>
    QUIRE_INLINE_MEMBER void each_run(const Step& step, const F& f) const {
        const int32_t* table = plan.step.block_tables + step.item->table * plan.step.table_stride;
        const int size = spec.block_size, first = most(step.item->begin - step.tile, 0);
        int column = (step.tile + first) / size, offset = (step.tile + first) % size;
        for (int t = first, until; t < step.stop; t = until, column++, offset = 0) {
            until = least(step.stop, t + size - offset);
            f(t, until, table[column], offset);
        }
    }

    // ---------------------------------------------------------------------------- scales of the cache

    const float* key_scale(const Step& step, int64_t block, int offset) const {
        const CacheParams& c = params.cache;
        return c.k_scale + block * c.k_scale_block + step.head * c.k_scale_head + offset * c.k_scale_slot;
    }

    const float* value_scale(const Step& step, int64_t block, int offset) const {
        const CacheParams& c = params.cache;
        return c.v_scale + block * c.v_scale_block + step.head * c.v_scale_head + offset * c.v_scale_slot;
    }

    // Prefetch `count` contiguous scales, one tile ahead of their use.
    static void fetch_scales(const float* at, int count) {
        for (int i = 0; i < count; i += 16) fetch_line((const char*)(at + i), FETCH_FIRST);
    }

    // Load the scales of the step's keys and values. Keys that do not belong to the item get 0.
    void take_scales(const Step& step) {
        const CacheParams& cache = params.cache;
        const int first = most(step.item->begin - step.tile, 0);
        for (int t = step.begin; t < first; t++) key_scales[t] = value_scales[t] = 0.0f;
        each_run(step, [&](int t, int until, int64_t block, int offset) __attribute__((always_inline)) {
            const float *k = key_scale(step, block, offset), *v = value_scale(step, block, offset);
            for (; t < until; t++, k += cache.k_scale_slot, v += cache.v_scale_slot) key_scales[t] = *k, value_scales[t] = *v;
        });
        for (int t = most(step.stop, first); t < step.end; t++) key_scales[t] = value_scales[t] = 0.0f;
    }

    // ------------------------------------------------------------------------------------------- rows

    int row_of(const Item& item, int i) const { return (item.first + i) / group; }
    int head_of(const Step& step, int i) const { return step.head * group + (step.item->first + i) % group; }

    void put_query(const void* row, float* to) { pack_row_of<K>(spec.dtype, row, spec.head_dim, to); }

    void start_item(const Step& step) {
        const Item& item = *step.item;
        for (int i = 0; i < item.count; i++) {
            const int row = row_of(item, i), position = plan.row_positions[row];
            const int64_t q = plan.row_tokens[row] * params.q_token + head_of(step, i) * params.q_head;
            static_cast<Self*>(this)->put_query((const char*)params.q + q * number, query + (int64_t)i * lanes);
            const int64_t from = (int64_t)position - spec.window + 1;
            low[i] = spec.window && from > 0 ? (int)from : 0;
            if (params.chunk && position > 0) low[i] = most(low[i], position / params.chunk * params.chunk);
            high[i] = least(plan.row_ends[row], item.end);
            whole_total[i] = 0.0f;
            whole_top[i] = -INF;
        }
    }

    void start_split(int count) {
        for (int i = 0; i < count; i++) top[i] = -INF, total[i] = 0.0f;
        memset(sums, 0, sizeof(float) * (size_t)count * wide);
    }

    // Load the rows' states within a split where another item stopped. Continuing from there gives the same bits as a computation
    // of the whole split.
    void resume_split(const Step& step) {
        const Item& item = *step.item;
        start_split(item.count);
        for (int i = 0; i < item.count; i++) {
            const float* state = stored_state(step, i);
            if (!state) continue;
            memcpy(sums + (int64_t)i * wide, state, sizeof(float) * (size_t)spec.head_dim_v);
            top[i] = state[spec.head_dim_v];
            total[i] = state[spec.head_dim_v + 1];
        }
    }

    // Return the stored state of row i in the step's split; null if the row does not attend to the split.
    float* stored_state(const Step& step, int i) const {
        const int token = plan.row_tokens[row_of(*step.item, i)], index = step.tile / SPLIT - plan.first_split[token];
        if (index < 0 || index >= plan.num_splits[token]) return nullptr;
        return state_of(plan, plan.first_state[token] + index, head_of(step, i));
    }

    // ------------------------------------------------------------------------------------------- a tile

    // Whether computing this tile fetches others.
    bool fetches(const Step&) const { return true; }

    static int keys_of(const Step& step) { return step.stop - step.begin; }

    // Return a fetcher for the keys and values of the next tile. If the current tile has more keys than that one, it also fetches
    // a part of the tile beyond, since a short tile leaves no time to fetch a long one. after, beyond: may be null.
    Fetcher<C> fetcher_of(const Step& step, Step* after, Step* beyond) const {
        Fetcher<C> fetcher;
        int room = keys_of(step);
        for (Step* next : {after, beyond}) {
            if (!next) break;
            const int left = keys_of(*next) - next->fetched, count = next == after ? left : least(left, room);
            const int from = next->begin + next->fetched;
            fetcher.add(next->keys + from, count, spec.head_dim * (int)sizeof(C));
            fetcher.add(next->values + from, count, spec.head_dim_v * (int)sizeof(C));
            next->fetched += count, room -= count;
        }
        return fetcher;
    }

    static constexpr int ALL_LINES = 4 * TILE * (int)sizeof(C) * 1024 / 64;  // at least the cache lines of a tile

    // Whether a key that some row of the item does not attend to has a value that is not finite. A weight of 0 would not keep it
    // out of that row's sums: 0 * inf is NaN. Integers are finite, and their scales are applied to the weights.
    bool hides_nonfinite(const Step& step) const {
        if (K::SCALED) return false;
        const int first = most(step.item->begin - step.tile, step.begin), stop = least(step.end, step.stop);
        int from = first, to = stop;  // keys that all rows attend to
        for (int i = 0; i < step.item->count; i++) from = most(from, low[i] - step.tile), to = least(to, high[i] - step.tile);
        if (from <= first && to >= stop) return false;
        auto nonfinite = [&](int begin, int end) {
            V found = {};  // becomes NaN
            for (int t = begin; t < end; t++)
                for (int c = 0; c < spec.head_dim_v; c += W)
                    found = fma(get_part<typename K::Cache>(step.values[t] + c, spec.head_dim_v - c), V{}, found);
            float lanes[W];
            store(lanes, found);
            return unordered(lanes, 0, W);
        };
        return from < to ? nonfinite(first, from) || nonfinite(to, stop) : nonfinite(first, stop);
    }

    bool sees(int position, int keys, int first, int rows) const {
        for (int i = first; i < first + rows; i++)
            if (low[i] < position + keys && high[i] > position) return true;
        return false;
    }

    // The range of keys, within the step's tile, that at least one of the rows from `first` on attends to.
    struct Seen {
        int begin = TILE, end = 0;
    };
    Seen seen(const Step& step, int first, int rows) const {
        Seen all;
        for (int i = first; i < first + rows; i++) {
            const int from = most(low[i] - step.tile, step.begin), to = least(high[i] - step.tile, step.end);
            if (from < to) all.begin = least(all.begin, from), all.end = most(all.end, to);
        }
        return all;
    }

    // Convert the scores of row i to weights, and rescale its sums to the new maximum. Return the largest weight, for K::BYTES.
    float weigh(const Step& step, int i, float* s, float* w) {
        const int from = most(low[i] - step.tile, step.begin), to = least(high[i] - step.tile, step.end);
        float highest = top[i];
        if (from < to) {
            float found;
            if (K::SCALED && !K::BYTES && !spec.latent) scale_row(s, key_scales, from, to);
            if (bent) {
                const int row = row_of(*step.item, i), position = plan.row_positions[row];
                const float* slopes = params.alibi_slopes + plan.row_sequences[row] * params.slope_seq;
                const float slope = params.alibi_slopes ? slopes[head_of(step, i)] * LOG2E : 0.0f;
                found = bend_row(s, from, to, rule, slope, (float)(step.tile - position));
            } else {
                found = top_score(s, from, to) * rule.scale;
            }
            if (found > highest) highest = found;
        }
        if (from >= to || (highest == -INF && !unordered(s, from, to))) {
            memset(w + step.begin / K::PAIR, 0, sizeof(float) * (size_t)(step.end - step.begin) / K::PAIR);
            return 0.0f;
        }
        const float shift = highest == -INF ? 0.0f : highest;
        const auto [added, largest] = weigh_row<K>(s, w, from, to, step.begin, step.end, bent ? 1.0f : rule.scale, shift, value_scales);
        if (highest != top[i]) {
            if (total[i] != 0.0f) {
                const float factor = exp2_scalar(top[i] - highest);
                total[i] *= factor;
                for (int c = 0; c < wide; c += W) store(sums + (int64_t)i * wide + c, load(sums + (int64_t)i * wide + c) * factor);
            }
            top[i] = highest;
        }
        total[i] += added;
        return largest;
    }

    // Whether a score is NaN, which the maximum ignores.
    static bool unordered(const float* s, int from, int to) {
        for (int t = from; t < to; t++)
            if (s[t] != s[t]) return true;
        return false;
    }

    // --------------------------------------------------------------------------------------- its end

    void end_split(const Step& step) {
        const Item& item = *step.item;
        for (int i = 0; i < item.count; i++) {
            const float* from = sums + (int64_t)i * wide;
            if (!item.partial) {
                fold(total_sums + (int64_t)i * wide, whole_top[i], whole_total[i], from, top[i], total[i], wide);
                continue;
            }
            float* state = stored_state(step, i);
            if (!state) continue;  // only other rows of the item attend to this split
            memcpy(state, from, sizeof(float) * (size_t)spec.head_dim_v);
            state[spec.head_dim_v] = top[i];
            state[spec.head_dim_v + 1] = total[i];
        }
    }

    // Merge a state into the merged state of the splits before it.
    static void fold(float* sums, float& top, float& total, const float* more, float more_top, float more_total, int dim) {
        if (more_total == 0.0f) return;
        if (total == 0.0f) {
            memcpy(sums, more, sizeof(float) * (size_t)dim);
            top = more_top, total = more_total;
            return;
        }
        const float highest = more_top > top ? more_top : top;
        const float a = exp2_scalar(top - highest), b = exp2_scalar(more_top - highest);
        int c = 0;
        for (; c + W <= dim; c += W) store(sums + c, fma(load(more + c), splat(b), load(sums + c) * a));
        if (c < dim) put_part<F32>(sums + c, fma(get_part<F32>(more + c, dim - c), splat(b), get_part<F32>(sums + c, dim - c) * a), dim - c);
        top = highest;
        total = __builtin_fmaf(more_total, b, total * a);
    }

    // Tiles whose weights are all zero are skipped for some blocks of rows and added for others, which affects the sign of a sum
    // that is zero. This makes it always positive.
    static V scaled(V sums, float factor) { return K::TILED ? fma(sums, splat(factor), V{}) : sums * factor; }

    // Write the output and the LSE of a row from its merged sums.
    void finish_row(const float* sums, float top, float total, int token, int head) {
        char* const out = (char*)params.out + (token * params.out_token + head * params.out_head) * number;
        float factor = total != 0.0f ? 1.0f / total : 0.0f;
        if (params.sinks && total != 0.0f) {
            // In double: with a sink far above all scores, the outputs fit fp32, but an exponential in fp32 would be 0.
            const double sink = (double)params.sinks[head] * LOG2E, highest = sink > top ? sink : top;
            const double share = __builtin_exp2(top - highest);
            factor = (float)(share / (total * share + __builtin_exp2(sink - highest)));
        }
        const int dim = spec.head_dim_v;
        if (total == 0.0f) {
            memset(out, 0, (size_t)(dim * number));
        } else {
            with_element(spec.dtype, [&](auto element) {
                using E = decltype(element);
                for (int c = 0; c < dim; c += W)
                    put_part<E>((typename E::T*)out + c, scaled(get_part<F32>(sums + c, dim - c), factor), dim - c);
            });
        }
        if (params.lse) {
            const float lse = total != 0.0f ? (top + __builtin_log2f(total)) * LN2 : -INF;
            params.lse[(int64_t)token * spec.num_heads + head] = lse;
        }
    }

    void end_item(const Step& step) {
        const Item& item = *step.item;
        if (item.partial) return;
        for (int i = 0; i < item.count; i++)
            finish_row(total_sums + (int64_t)i * wide, whole_top[i], whole_total[i], plan.row_tokens[row_of(item, i)], head_of(step, i));
    }

    void drain() {
        Step places[3], *step = places, *after = places + 1, *beyond = places + 2;
        for (int known = take_item(*step); known; known--) {  // number of tiles in `places` that are set
            if (known == 1) known += next(*step, *after);
            const bool fetches = static_cast<Self*>(this)->fetches(*step);
            if (known == 2 && fetches && keys_of(*after) < keys_of(*step) && may_look_beyond(*after)) known += next(*after, *beyond);
            const bool first = step->tile <= step->item->begin;
            if (first) static_cast<Self*>(this)->start_item(*step);
            if (first && step->item->phase) resume_split(*step);
            else if (first || step->tile % SPLIT == 0) start_split(step->item->count);
            if constexpr (K::SCALED) take_scales(*step);
            static_cast<Self*>(this)->compute(
                *step, fetches ? fetcher_of(*step, known > 1 ? after : nullptr, known > 2 ? beyond : nullptr) : Fetcher<C>());
            const bool last = step->tile + TILE >= step->item->end;
            if (last || (step->tile + TILE) % SPLIT == 0) end_split(*step);
            if (last) end_item(*step);
            Step* done = step;
            step = after, after = beyond, beyond = done;
        }
    }

    // Merge the states of a row that several items computed, in ascending order.
    void merge(int64_t index) {
        const int token = plan.split_tokens[index / spec.num_heads], head = (int)(index % spec.num_heads);
        float top = -INF, total = 0.0f;
        for (int split = 0; split < plan.num_splits[token]; split++) {
            const float* state = state_of(plan, plan.first_state[token] + split, head);
            fold(total_sums, top, total, state, state[spec.head_dim_v], state[spec.head_dim_v + 1], spec.head_dim_v);
        }
        finish_row(total_sums, top, total, token, head);
    }
};

}  // namespace

#include "attention_vectors.h"
#include "attention_bytes.h"
#ifdef QUIRE_TILES
#include "attention_tiles.h"
#endif

namespace {

template <class K>
struct AttentionOf {
    using Worker = VectorAttention<K>;
};
#ifdef QUIRE_TILES
template <class K>
    requires K::TILED
struct AttentionOf<K> {
    using Worker = TileAttention<K>;
};
#endif
#ifdef QUIRE_BYTE_DOT
template <class K>
    requires K::BYTES
struct AttentionOf<K> {
    using Worker = ByteAttention<K>;
};
#endif

template <class K>
static void attend(ParallelFor parallel_for, const Plan* plan, const AttentionParams* params) {
    const int64_t threads = plan->step.num_threads;
    const int64_t heads = plan->spec.num_kv_heads;
    Call call{plan, params, 0, 0};
    for (int64_t phase = 0; phase < plan->num_phases; phase++) {
        call.next = call.end;
        call.end = plan->phase_ends[phase] * heads;
        parallel(parallel_for, threads, 1, [&](int64_t thread) { typename AttentionOf<K>::Worker(call, thread).drain(); });
    }
    const int64_t merges = plan->num_split_tokens * plan->spec.num_heads;
    if (!merges) return;
    parallel(parallel_for, threads, 1, [&](int64_t thread) {
        typename AttentionOf<K>::Worker worker(call, thread);
        for (int64_t i = merges * thread / threads; i < merges * (thread + 1) / threads; i++) worker.merge(i);
    });
}

}  // namespace
