// A mixture of experts: each row is routed to a few of many MLPs. The result is the sum of theirs, weighted by the row's shares.
//
// Rows are gathered by expert, so that a step reads the weights of each chosen expert once, and of any other expert never.
// The result is batch-invariant: a row's results are added up in the order of its routing, independent of the other rows.
#pragma once

#include <vector>

#include "entries.h"
#include "gather.h"
#include "linear_calls.h"
#include "small.h"

namespace {

struct Experts {
    ParallelFor parallel_for;
    const ExpertsParams& p;
    const int64_t rows;
    const int threads;
    const int32_t dtype;  // of the rows

    int64_t number() const { return dtype == DTYPE_F32 ? 4 : 2; }  // bytes

    // Compute the layer. seen: the router's input. Return false if a rank of the group is lost.
    bool run(const void* x, int64_t x_stride, const void* seen, int64_t seen_stride, void* out, int64_t out_stride) const {
        if (rows == 0) return true;
        const int64_t k = p.choice.num_chosen, hidden = p.mlp_in->in_size, inner = p.mlp_out->in_size, all = rows * k;
        choose(seen, seen_stride);
        const std::vector<int64_t> starts = sort();
        const int64_t apart = QUIRE_NAME(row_stride, QUIRE_ISA)(parallel_for, inner, dtype);
        const LinearKind& kind_in = linear_kind(*p.mlp_in);  // all experts have weights of one kind
        const int64_t lanes = kind_in.x_lanes(*p.mlp_in);
        parallel(parallel_for, rows, rows_a_thread(hidden * k), [&](int64_t i) {
            const char* row = (const char*)x + i * x_stride * number();
            if (p.weighs_inputs) return take_weighed(kind_in, i, row);
            const int64_t* places = p.places + i * k;
            kind_in.copy_row(*p.mlp_in, row, p.gathered + places[0] * lanes);
            for (int64_t r = 1; r < k; r++)
                memcpy(p.gathered + places[r] * lanes, p.gathered + places[0] * lanes, (size_t)lanes * sizeof(float));
        });
        multiply(kind_in, p.mlp_in, starts, p.gathered, lanes, p.inner);
        if (!activate(all, apart)) return false;
        LinearParams whole = *p.mlp_out;  // all rows of all experts together, to prepare their lanes
        whole.x = p.activated, whole.x_stride = apart, whole.rows = all, whole.copy = p.copy;
        const LinearKind& kind_out = linear_kind(*p.mlp_out);
        LinearCall activated = linear_call(kind_out, &whole);
        take_rows(parallel_for, kind_out, activated);
        multiply(kind_out, p.mlp_out, starts, activated.x, activated.x_stride, p.results);
        with_element(dtype, [&](auto element) {
            using E = decltype(element);
            parallel(parallel_for, rows, rows_a_thread(hidden * k), [&](int64_t i) { add_up<E>(i, (typename E::T*)out + i * out_stride); });
        });
        return true;
    }

  private:
    // Compute the inputs of the experts' second linears, for all rows.
    bool activate(int64_t all, int64_t apart) const {
        const int64_t in = p.mlp_in->out_size;
        if (!p.inner_columns.exchange) {
            activate_rows(parallel_for, p.inner, in, p.activated, apart, all, p.activation, dtype);
            return true;
        }
        return gather_columns(parallel_for, p.inner_columns, number(), all, (char*)p.activated, apart, [&](int64_t first, int64_t count, char* slot) {
            activate_rows(parallel_for, (const char*)p.inner + first * in * number(), in, slot, p.activation.dim, count, p.activation, dtype);
        });
    }

    // Choose each row's experts, and compute their shares.
    void choose(const void* x, int64_t x_stride) const {
        const int64_t count = p.choice.num_experts, k = p.choice.num_chosen;
        LinearParams router = *p.router;
        router.x = x, router.x_stride = x_stride, router.rows = rows;
        router.out = p.logits, router.out_stride = count, router.copy = p.gathered, router.threads = threads;
        linear(parallel_for, &router);
        parallel(parallel_for, rows, rows_a_thread(count), [&](int64_t i) {
            choose_row(p.logits + i * count, p.scores + i * count, p.choice, p.heaps + i * heap_size(p.choice), p.chosen + i * k,
                       p.shares + i * k);
        });
    }

    // Write row i, times each of its shares, to its places. `results` serves as temporary memory, as there are no results yet.
    void take_weighed(const LinearKind& kind, int64_t i, const void* x) const {
        const int64_t k = p.choice.num_chosen, hidden = p.mlp_in->in_size;
        for (int64_t r = 0; r < k; r++) {
            const int64_t place = p.places[i * k + r];
            char* weighed = (char*)p.results + place * hidden * number();
            with_element(dtype, [&](auto element) {
                using E = decltype(element);
                for (int64_t c = 0; c < hidden; c += W) {
                    const int n = part(hidden, c);
                    put_part<E>((typename E::T*)weighed + c, get_part<E>((const typename E::T*)x + c, n) * p.shares[i * k + r], n);
                }
            });
            kind.copy_row(*p.mlp_in, weighed, p.gathered + place * kind.x_lanes(*p.mlp_in));
            p.shares[i * k + r] = 1.0f;
        }
    }

    // Compute the places of all choices. Return the first row of each expert.
    std::vector<int64_t> sort() const {
        const int64_t all = rows * p.choice.num_chosen;
        std::vector<int64_t> starts(p.choice.num_experts + 1, 0);
        for (int64_t c = 0; c < all; c++) starts[p.chosen[c] + 1]++;
        for (int64_t e = 0; e < p.choice.num_experts; e++) starts[e + 1] += starts[e];
        std::vector<int64_t> next = starts;
        for (int64_t c = 0; c < all; c++) p.places[c] = next[p.chosen[c]]++;
        return starts;
    }

    // Multiply every expert's rows by its weight.
    void multiply(
        const LinearKind& kind, const LinearParams* weights, const std::vector<int64_t>& starts, const float* x, int64_t x_stride,
        void* out) const {
        std::vector<LinearParams> params;
        std::vector<LinearCall> calls;
        params.reserve(p.choice.num_experts);  // the calls point to its elements, so it must not reallocate
        for (int64_t e = 0; e < p.choice.num_experts; e++) {
            if (starts[e] == starts[e + 1]) continue;
            params.push_back(weights[e]);
            params.back().rows = starts[e + 1] - starts[e];
            params.back().out = (char*)out + starts[e] * weights[e].out_size * number(), params.back().out_stride = weights[e].out_size;
            calls.push_back(linear_call(kind, &params.back()));
            calls.back().x = x + starts[e] * x_stride, calls.back().x_stride = x_stride;
        }
        multiply_calls(parallel_for, kind, calls.data(), (int64_t)calls.size(), threads);
    }

    template <class E>
    void add_up(int64_t row, typename E::T* out) const {
        const int64_t k = p.choice.num_chosen, hidden = p.mlp_out->out_size;
        for (int64_t c = 0; c < hidden; c += W) {
            const int n = part(hidden, c);
            V sum = {};
            for (int64_t r = 0; r < k; r++) {
                const auto* result = (const typename E::T*)p.results + p.places[row * k + r] * hidden;
                sum = sum + get_part<E>(result + c, n) * p.shares[row * k + r];
            }
            put_part<E>(out + c, sum, n);
        }
    }
};

}  // namespace
