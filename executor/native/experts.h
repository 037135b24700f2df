// Mixture of experts for one layer: routing, then the products of the experts that the batch touches, all experts in one
// parallel loop, so that experts of a few rows do not each wait for all threads.
//
// Rows are gathered by expert; a row's products and their weighted sum run in an order that depends on the row alone.
#pragma once
#include <cmath>
#include <vector>

#include "gemm.h"
#include "pointwise.h"
#include "pool.h"
#include "vec.h"

struct ExpertLayer {
    const float* x;  // [rows, hidden]
    long ldx, rows, hidden, width;
    const float* logits;  // [rows, experts], and one more column with shared_gate
    long ld_logits;
    int experts, top_k, norm_topk, half, shared_gate;
    const void *gate_up, *down;              // packed, one expert after the other
    long gate_up_panels, down_panels;        // of one expert
    const float* shared;                     // [rows, hidden] or null: what every row adds, times sigmoid of its gate
    float* out;                              // [rows, hidden], added to
    long ldo;
    int32_t *ids, *place, *counts;           // ids, place: [rows * top_k]; counts: [experts]
    float *weights, *gathered, *activated, *products;  // [rows * top_k] of 1, hidden, width, hidden
};

// The top k of a row's logits, largest first (the first of equal ones), and their share of a softmax over all experts or
// over the chosen ones. Any k experts where logits are NaN: their weights are NaN too.
static inline void route_row(const float* logits, int experts, int k, bool norm, int32_t* ids, float* weights) {
    for (int i = 0; i < k; ++i) ids[i] = i;
    int held = 0;
    for (int e = 0; e < experts; ++e) {
        if (held == k && !(logits[e] > logits[ids[k - 1]])) continue;
        int at = held < k ? held++ : k - 1;
        for (; at > 0 && logits[e] > logits[ids[at - 1]]; --at) ids[at] = ids[at - 1];
        ids[at] = e;
    }
    const float top = logits[ids[0]];
    float total = 0;
    for (int i = 0; i < k; ++i) total += weights[i] = std::exp(logits[ids[i]] - top);
    if (!norm) {
        total = 0;
        for (int e = 0; e < experts; ++e) total += std::exp(logits[e] - top);
    }
    for (int i = 0; i < k; ++i) weights[i] /= total;
}

// One product of every touched expert: rows [start[e], start[e + 1]) of `a` times the expert's weights.
template <typename W>
static void expert_products(const float* a, long k, const W* packed, long panels, const int* touched, int num_touched,
                            const long* start, const Output& out) {
    const long panel_words = k * panel_step<W>();
    const int threads = ThreadPool::shared().threads();
    long group = std::clamp(PANEL_GROUP_BYTES / (k * PANEL * 4), 1L, panels);
    while (group > 1 && (panels + group - 1) / group * num_touched < 4 * threads) group = (group + 1) / 2;
    const long groups = (panels + group - 1) / group;
    const auto weights_of = [&](long unit) {
        return packed + (touched[unit / groups] * panels + unit % groups * group) * panel_words;
    };
    parallel(groups * num_touched, [&](long unit) {
        const int expert = touched[unit / groups];
        const long begin = unit % groups * group, stop = std::min(panels, begin + group);
        const W* of_expert = packed + expert * panels * panel_words;
        const W* next = unit + threads < groups * num_touched ? weights_of(unit + threads) : of_expert;
        panel_range(a, k, of_expert, k, begin, stop, next, start[expert], start[expert + 1], out);
    });
}

template <typename W>
static void run_experts(const ExpertLayer& l) {
    const long slots = l.rows * l.top_k;
    parallel_rows(l.rows, 32, [&](long first, long last) {
        for (long row = first; row < last; ++row)
            route_row(l.logits + row * l.ld_logits, l.experts, l.top_k, l.norm_topk, l.ids + row * l.top_k,
                      l.weights + row * l.top_k);
    });
    static thread_local std::vector<long> start, next;
    static thread_local std::vector<int> touched;
    start.assign(l.experts + 1, 0);
    touched.clear();
    for (long slot = 0; slot < slots; ++slot) ++start[l.ids[slot] + 1];
    for (int e = 0; e < l.experts; ++e) {
        l.counts[e] = int32_t(start[e + 1]);
        if (l.counts[e]) touched.push_back(e);
        start[e + 1] += start[e];
    }
    next.assign(start.begin(), start.end());
    for (long slot = 0; slot < slots; ++slot) l.place[slot] = int32_t(next[l.ids[slot]]++);
    parallel_rows(l.rows, 16, [&](long first, long last) {
        for (long slot = first * l.top_k; slot < last * l.top_k; ++slot)
            memcpy(l.gathered + l.place[slot] * l.hidden, l.x + slot / l.top_k * l.ldx, l.hidden * sizeof(float));
    });
    const int num = int(touched.size());
    const long* rows = start.data();
    expert_products(l.gathered, l.hidden, static_cast<const W*>(l.gate_up), l.gate_up_panels, touched.data(), num, rows,
                    Output{nullptr, l.activated, l.width, l.width, SILU_MUL});
    expert_products(l.activated, l.width, static_cast<const W*>(l.down), l.down_panels, touched.data(), num, rows,
                    Output{nullptr, l.products, l.hidden, l.hidden, STORE});
    parallel_rows(l.rows, 16, [&](long first, long last) {
        for (long row = first; row < last; ++row) {
            float* to = l.out + row * l.ldo;
            for (int i = 0; i < l.top_k; ++i)
                add_scaled(to, l.products + l.place[row * l.top_k + i] * l.hidden, l.weights[row * l.top_k + i], l.hidden);
            if (l.shared) {
                const float gate = l.logits[row * l.ld_logits + l.experts];
                add_scaled(to, l.shared + row * l.hidden, l.shared_gate ? 1.0f / (1.0f + std::exp(-gate)) : 1.0f, l.hidden);
            }
        }
    });
}
