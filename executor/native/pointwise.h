// The small steps between matrix products: norms, rotation and the KV store, embedding rows, arg max.
#pragma once
#include <cmath>

#include "pool.h"
#include "vec.h"

// out = x / sqrt(mean(x^2) + eps) * weight, one row. `out` may be `x`.
static inline void rms_norm_row(const float* x, const float* weight, float eps, long n, float* out) {
    vfloat squares{};
    float tail = 0;
    long i = 0;
    for (; i + LANES <= n; i += LANES) squares += load(x + i) * load(x + i);
    for (; i < n; ++i) tail += x[i] * x[i];
    const float scale = 1.0f / std::sqrt((sum(squares) + tail) / n + eps);
    for (i = 0; i + LANES <= n; i += LANES) store(out + i, load(x + i) * scale * load(weight + i));
    for (; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

// to += from * scale, one row.
static inline void add_scaled(float* to, const float* from, float scale, long n) {
    long i = 0;
    for (; i + LANES <= n; i += LANES) store(to + i, load(to + i) + load(from + i) * scale);
    for (; i < n; ++i) to[i] += from[i] * scale;
}

template <typename T>
static inline void widen_row(const T* from, long n, float* to) {
    long i = 0;
    for (; i + LANES <= n; i += LANES) store(to + i, load(from + i));
    for (; i < n; ++i) to[i] = widen(from[i]);
}

struct Rotation {
    float* qkv;  // [rows, (heads + 2 kv_heads) * head_dim], rotated in place
    long ld, rows;
    const int32_t* positions;
    const int64_t* slots;      // block * block_size + offset; negative: a dummy row, stored nowhere
    const float *cos, *sin;    // [positions, half]
    long half;                 // rotated pairs (i, i + half)
    int heads, kv_heads, head_dim, block_size;
    const float *q_norm, *k_norm;  // over head_dim, or null
    float eps;
    void *keys, *values;  // [blocks, kv_heads, block_size, head_dim]
};

static inline void rotate(float* x, const float* cos, const float* sin, long half) {
    long i = 0;
    for (; i + LANES <= half; i += LANES) {
        const vfloat a = load(x + i), b = load(x + i + half), c = load(cos + i), s = load(sin + i);
        store(x + i, a * c - b * s);
        store(x + i + half, b * c + a * s);
    }
    for (; i < half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i] + a * sin[i];
    }
}

template <typename T>
static void rotate_and_store(const Rotation& r) {
    const long d = r.head_dim;
    parallel_rows(r.rows, 16, [&](long first, long last) {
    for (long row = first; row < last; ++row) {
        float* x = r.qkv + row * r.ld;
        const float *cos = r.cos + r.positions[row] * r.half, *sin = r.sin + r.positions[row] * r.half;
        for (long h = 0; h < r.heads + r.kv_heads; ++h) {
            const float* norm = h < r.heads ? r.q_norm : r.k_norm;
            if (norm) rms_norm_row(x + h * d, norm, r.eps, d, x + h * d);
            rotate(x + h * d, cos, sin, r.half);
        }
        const long slot = r.slots[row];
        if (slot < 0) continue;
        for (long h = 0; h < r.kv_heads; ++h) {
            const long at = ((slot / r.block_size * r.kv_heads + h) * r.block_size + slot % r.block_size) * d;
            const float *k = x + (r.heads + h) * d, *v = k + r.kv_heads * d;
            T *to_k = static_cast<T*>(r.keys) + at, *to_v = static_cast<T*>(r.values) + at;
            for (long i = 0; i < d; ++i) put(to_k + i, k[i]), put(to_v + i, v[i]);
        }
    }
    });
}

// First index of the largest value; -1 if any value is NaN, or the largest is infinite.
static inline long argmax_row(const float* x, long n) {
    vfloat top = splat(-INFINITY), unordered{};
    long i = 0;
    for (; i + LANES <= n; i += LANES) {
        const vfloat v = load(x + i);
        top = maximum(v, top);
        unordered += v - v;  // NaN or infinity leaves a NaN here
    }
    float best = largest(top), bad = sum(unordered);
    for (; i < n; ++i) {
        best = x[i] > best ? x[i] : best;
        bad += x[i] - x[i];
    }
    if (bad != bad) {
        for (i = 0; i < n; ++i)
            if (x[i] != x[i]) return -1;
    }
    if (std::isinf(best)) return -1;
    for (i = 0; i < n && x[i] != best; ++i) {}
    return i < n ? i : -1;
}
