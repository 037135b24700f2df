// C = A * W^T for row-major A [m, k] and weights packed in panels of 2 * LANES output columns: [panel][k][2 * LANES].
// A tile of MR rows by one panel lives in registers over the whole of k, so every row's sum runs over k in the same
// order whatever the batch around it: a row's result never depends on its neighbours.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <type_traits>
#include <utility>

#include "pool.h"
#include "vec.h"

constexpr int PANEL = 2 * LANES;
constexpr int MAX_ROWS = LANES == 16 ? 14 : 6;
constexpr long PANEL_GROUP_BYTES = 384 << 10;  // weights that one work unit keeps in its core's L2

enum Epilogue { STORE = 0, ADD = 1, SILU_MUL = 2 };

// Two bfloat16 columns share one 32-bit word (low half: first vector, high half: second): one shift or mask widens each.
static inline void load_panel(const float* b, vfloat& b0, vfloat& b1) {
    b0 = load(b);
    b1 = load(b + LANES);
}
static inline void load_panel(const uint32_t* b, vfloat& b0, vfloat& b1) {
    vuint w;
    memcpy(&w, b, sizeof w);
    b0 = (vfloat)(w << 16);
    b1 = (vfloat)(w & 0xffff0000u);
}
template <typename W>
constexpr long panel_step() {
    return std::is_same<W, float>::value ? PANEL : LANES;
}

// Indices are unrolled as a parameter pack: GCC then keeps the whole tile in registers, which it does not do for a loop.
template <int MR, typename W, size_t... I>
static inline __attribute__((always_inline)) void multiply(const float* __restrict a, long lda, const W* __restrict b, long k,
                                                           const char* ahead, long stride, vfloat (&acc)[MR][2],
                                                           std::index_sequence<I...>) {
    constexpr long step = panel_step<W>();
    for (long p = 0; p < k; ++p, b += step, ahead += stride) {
        vfloat b0, b1, x;
        load_panel(b, b0, b1);
        __builtin_prefetch(b + 16 * step);
        if constexpr (step == PANEL) __builtin_prefetch(b + 16 * step + LANES);
        __builtin_prefetch(ahead, 0, 2);
        ((x = splat(a[I * lda + p]), acc[I][0] += x * b0, acc[I][1] += x * b1), ...);
    }
}

// Adds `v` (its first `valid` lanes) to or stores it at `c`.
static inline void finish(float* c, vfloat v, long valid, bool add) {
    if (valid >= LANES) {
        store(c, add ? load(c) + v : v);
        return;
    }
    for (long i = 0; i < valid; ++i) c[i] = add ? c[i] + v[i] : v[i];
}

static inline vfloat silu(vfloat x) { return x / (1.0f + exponential(-x)); }

struct Output {
    const float* bias;  // padded to whole panels, or null
    float* c;
    long ldc, columns;  // columns of C; with SILU_MUL half the columns of the product
    int epilogue;
};

template <int MR, typename W>
static void tile(const float* a, long lda, const W* b, long k, const char* ahead, long stride, long panel, long row,
                 const Output& out) {
    vfloat acc[MR][2] = {};
    multiply<MR>(a + row * lda, lda, b, k, ahead, stride, acc, std::make_index_sequence<MR>{});
    vfloat bias0{}, bias1{};
    if (out.bias) {
        bias0 = load(out.bias + panel * PANEL);
        bias1 = load(out.bias + panel * PANEL + LANES);
    }
    for (int i = 0; i < MR; ++i) {
        float* c = out.c + (row + i) * out.ldc;
        vfloat first = acc[i][0] + bias0, second = acc[i][1] + bias1;
        if (out.epilogue == SILU_MUL) {
            finish(c + panel * LANES, silu(first) * second, out.columns - panel * LANES, false);
        } else {
            long column = panel * PANEL;
            finish(c + column, first, out.columns - column, out.epilogue == ADD);
            finish(c + column + LANES, second, out.columns - column - LANES, out.epilogue == ADD);
        }
    }
}

template <typename W>
using Tile = void (*)(const float*, long, const W*, long, const char*, long, long, long, const Output&);

template <typename W, size_t... I>
static constexpr auto tile_table(std::index_sequence<I...>) {
    struct Table {
        Tile<W> of[MAX_ROWS + 1];
    };
    return Table{{nullptr, tile<I + 1, W>...}};
}

// `next`: the weights that this thread will need after these. The tiles fetch them from memory in equal shares, one line
// or less per step, so that a product of few rows is not the wait for its own weights.
template <typename W>
static void row_tiles(const float* a, long lda, const W* b, long k, const void* next, long panel, long row, long end,
                      const Output& out) {
    static constexpr auto tiles = tile_table<W>(std::make_index_sequence<MAX_ROWS>{});
    long count = (end - row + MAX_ROWS - 1) / MAX_ROWS;  // tiles of nearly equal height: no thin last one
    const long stride = panel_step<W>() * 4 / count;
    const char* ahead = static_cast<const char*>(next);
    for (; count > 0; --count, ahead += stride * k) {
        long height = (end - row + count - 1) / count;
        tiles.of[height](a, lda, b, k, ahead, stride, panel, row, out);
        row += height;
    }
}

static inline float* scratch(long floats) {
    static thread_local float* memory = nullptr;
    static thread_local long capacity = 0;
    if (floats > capacity) {
        free(memory);
        capacity = (floats + 1023) / 1024 * 1024;
        memory = static_cast<float*>(aligned_alloc(64, capacity * sizeof(float)));
    }
    return memory;
}

// Panels [begin, stop) of the product for rows [row, end). `next`: the weights that this thread will likely need after
// these. bfloat16 panels that many rows share are widened once.
template <typename W>
static void panel_range(const float* a, long lda, const W* packed, long k, long begin, long stop, const W* next, long row,
                        long end, const Output& out) {
    const long panel_words = k * panel_step<W>();
    const bool widen_first = !std::is_same<W, float>::value && end - row > 3 * MAX_ROWS;
    for (long panel = begin; panel < stop; ++panel) {
        const W* b = packed + panel * panel_words;
        if constexpr (!std::is_same<W, float>::value) {
            if (widen_first) {
                float* wide = scratch(k * PANEL + 1024);
                for (long p = 0; p < k; ++p) {
                    vfloat b0, b1;
                    load_panel(b + p * LANES, b0, b1);
                    store(wide + p * PANEL, b0);
                    store(wide + p * PANEL + LANES, b1);
                }
                row_tiles(a, lda, static_cast<const float*>(wide), k, b, panel, row, end, out);
                continue;
            }
        }
        row_tiles(a, lda, b, k, panel + 1 < stop ? b + panel_words : next, panel, row, end, out);
    }
}

// Panels [first, last) of the product. Threads take work units (a group of panels x a block of rows) from a counter, so
// that a core which another process disturbs takes fewer.
template <typename W>
static void gemm(const float* a, long lda, long m, const W* packed, long k, long first, long last, const Output& out) {
    const long panels = last - first, panel_words = k * panel_step<W>();
    const int threads = ThreadPool::shared().threads();
    long group = std::clamp(PANEL_GROUP_BYTES / (k * PANEL * 4), 1L, panels);
    long blocks = 1;
    while (group > 1 && (panels + group - 1) / group * blocks < 4 * threads) {
        if (m / (blocks + 1) >= 8 * MAX_ROWS) ++blocks;
        else group = (group + 1) / 2;
    }
    const long groups = (panels + group - 1) / group, rows = ((m + blocks - 1) / blocks + MAX_ROWS - 1) / MAX_ROWS * MAX_ROWS;
    parallel(groups * blocks, [&](long unit) {
        const long row = unit % blocks * rows, end = std::min(m, row + rows);
        const long begin = first + unit / blocks * group, stop = std::min(last, begin + group);
        if (row >= end) return;
        // The unit that this thread will likely take next: the others are at those between.
        const long later = unit + threads < groups * blocks ? first + (unit + threads) / blocks * group : begin;
        panel_range(a, lda, packed, k, begin, stop, packed + later * panel_words, row, end, out);
    });
}

// Rows of W that feed output column c of panel p: gate and up rows side by side when the epilogue multiplies them.
static inline long packed_row(long panel, long column, long n, bool gated) {
    if (!gated) return panel * PANEL + column;
    long row = panel * LANES + column % LANES;
    return row >= n / 2 ? n : column < LANES ? row : n / 2 + row;
}

template <typename E>
static void pack(const E* w, long ldw, long n, long k, bool gated, E* out) {
    const long panels = gated ? (n / 2 + LANES - 1) / LANES : (n + PANEL - 1) / PANEL;
    parallel(panels, [&](long panel) {
        for (long column = 0; column < PANEL; ++column) {
            const long row = packed_row(panel, column, n, gated);
            // bfloat16: the two vectors are interleaved into 32-bit words.
            const long place = sizeof(E) == 4 ? column : column % LANES * 2 + column / LANES;
            for (long p = 0; p < k; ++p) out[(panel * k + p) * PANEL + place] = row < n ? w[row * ldw + p] : E(0);
        }
    });
}
