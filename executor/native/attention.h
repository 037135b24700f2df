// Causal attention over a paged key/value pool. Decodes stream their context once and are bound by memory; chunks are
// computed as S^T = K Q^T and O^T = V^T P^T with the queries in the lanes: keys and values are then read as they lie
// in the pool (no transposition), and softmax needs no sums across lanes. Tiles start at multiples of KEYS from
// position 0, so a query's result does not depend on how its prompt was cut into chunks or its context into blocks.
#pragma once
#include <cmath>

#include "gemm.h"

constexpr int QUERY_VECTORS = 3;
constexpr int QUERIES = QUERY_VECTORS * LANES;  // lanes of a query tile: (token, head of the group) pairs
constexpr int KEYS = 64;                        // keys per softmax step
constexpr int GROUP = LANES == 16 ? 8 : 4;      // rows of the register tile
constexpr float LOWEST = -1e30f;

struct Pool {
    const void *keys, *values;  // [blocks, kv_heads, block_size, head_dim] of one layer
    int block_size, kv_heads, head_dim;
};

struct Work {
    Pool pool;
    const int32_t* tables;  // [rows, table_width]: block numbers of a request
    long table_width;
    const float* q;  // [rows, heads * head_dim], row stride ldq
    float* out;      // likewise
    long ldq, ldo;
    int heads, window;  // window 0: no limit
    float scale;
    long num_chunks, num_decodes;
    const int32_t *chunk_row, *chunk_tokens, *chunk_prefix, *chunk_table;
    const int32_t *decode_row, *decode_context, *decode_table;
};

template <typename T>
static inline const T* entry(const Work& w, const void* base, const int32_t* table, long position, long head) {
    const Pool& p = w.pool;
    const long block = table[position / p.block_size], slot = position % p.block_size;
    return static_cast<const T*>(base) + ((block * p.kv_heads + head) * p.block_size + slot) * p.head_dim;
}

template <typename T>
static void gather(const Work& w, const void* base, const int32_t* table, long first, long count, long head, float* out) {
    const long d = w.pool.head_dim;
    for (long i = 0; i < count;) {
        const long run = std::min(count - i, w.pool.block_size - (first + i) % w.pool.block_size);
        const T* from = entry<T>(w, base, table, first + i, head);
        float* to = out + i * d;
        long j = 0;
        for (; j + LANES <= run * d; j += LANES) store(to + j, load(from + j));
        for (; j < run * d; ++j) to[j] = widen(from[j]);
        i += run;
    }
    for (long i = count * d; i < (count + GROUP - 1) / GROUP * GROUP * d; ++i) out[i] = 0;
}

// acc[i][.] += sum over p of x(i, p) * b[p][.], x(i, p) = a[i * row + p * column].
template <size_t... I>
static inline __attribute__((always_inline)) void outer(const float* __restrict a, long row, long column, const float* __restrict b,
                                                        long count, vfloat (&acc)[GROUP][QUERY_VECTORS], std::index_sequence<I...>) {
    for (long p = 0; p < count; ++p, b += QUERIES, a += column) {
        const vfloat b0 = load(b), b1 = load(b + LANES), b2 = load(b + 2 * LANES);
        vfloat x;
        ((x = splat(a[I * row]), acc[I][0] += x * b0, acc[I][1] += x * b1, acc[I][2] += x * b2), ...);
    }
}

// One tile of queries: tokens [first, first + count) of the chunk, all heads that share one key/value head.
template <typename T>
static void chunk_tile(const Work& w, long chunk, long head, long first, long count) {
    const long d = w.pool.head_dim, share = w.heads / w.pool.kv_heads, lanes = count * share;
    const long prefix = w.chunk_prefix[chunk], row = w.chunk_row[chunk] + first;
    const int32_t* table = w.tables + w.chunk_table[chunk] * w.table_width;
    float* memory = scratch(2 * KEYS * d + KEYS * QUERIES + 2 * d * QUERIES);
    float *keys = memory, *values = keys + KEYS * d, *scores = values + KEYS * d, *qt = scores + KEYS * QUERIES,
          *ot = qt + d * QUERIES;
    vfloat top[QUERY_VECTORS], total[QUERY_VECTORS];
    vint position[QUERY_VECTORS];
    for (long lane = 0; lane < QUERIES; ++lane) {
        const long token = std::min(lane / share, count - 1);
        position[lane / LANES][lane % LANES] = int32_t(prefix + first + token);
        const float* q = w.q + (row + token) * w.ldq + (head * share + lane % share) * d;
        for (long i = 0; i < d; ++i) qt[i * QUERIES + lane] = lane < lanes ? q[i] * w.scale : 0.0f;
    }
    for (int v = 0; v < QUERY_VECTORS; ++v) top[v] = splat(LOWEST), total[v] = vfloat{};
    memset(ot, 0, d * QUERIES * sizeof(float));
    const long lowest = prefix + first, end = prefix + first + count;
    const long start = w.window && lowest >= w.window ? (lowest - w.window + 1) / KEYS * KEYS : 0;
    constexpr auto group = std::make_index_sequence<GROUP>{};
    for (long base = start; base < end; base += KEYS) {
        const long width = std::min<long>(KEYS, end - base);
        gather<T>(w, w.pool.keys, table, base, width, head, keys);
        gather<T>(w, w.pool.values, table, base, width, head, values);
        const bool masked = base + width - 1 > lowest || (w.window && base <= end - 1 - w.window);
        vfloat now[QUERY_VECTORS] = {top[0], top[1], top[2]};
        for (long j = 0; j < width; j += GROUP) {
            vfloat acc[GROUP][QUERY_VECTORS] = {};
            outer(keys + j * d, d, 1, qt, d, acc, group);
            for (int i = 0; i < GROUP; ++i)
                for (int v = 0; v < QUERY_VECTORS; ++v) {
                    vfloat s = acc[i][v];
                    if (masked || j + i >= width) {
                        const int32_t at = int32_t(base + j + i);
                        s = position[v] < at ? splat(-INFINITY) : s;
                        if (w.window) s = position[v] - w.window >= at ? splat(-INFINITY) : s;
                    }
                    now[v] = maximum(now[v], s);
                    store(scores + (j + i) * QUERIES + v * LANES, s);
                }
        }
        vfloat shrink[QUERY_VECTORS];
        for (int v = 0; v < QUERY_VECTORS; ++v) {
            shrink[v] = exponential(top[v] - now[v]);
            top[v] = now[v];
            total[v] *= shrink[v];
        }
        for (long j = 0; j < width; ++j)
            for (int v = 0; v < QUERY_VECTORS; ++v) {
                float* s = scores + j * QUERIES + v * LANES;
                const vfloat p = exponential(load(s) - top[v]);
                total[v] += p;
                store(s, p);
            }
        for (long i = 0; i < d; i += GROUP) {
            vfloat acc[GROUP][QUERY_VECTORS];
            for (int r = 0; r < GROUP; ++r)
                for (int v = 0; v < QUERY_VECTORS; ++v) acc[r][v] = load(ot + (i + r) * QUERIES + v * LANES) * shrink[v];
            outer(values + i, 1, d, scores, width, acc, group);
            for (int r = 0; r < GROUP; ++r)
                for (int v = 0; v < QUERY_VECTORS; ++v) store(ot + (i + r) * QUERIES + v * LANES, acc[r][v]);
        }
    }
    for (int v = 0; v < QUERY_VECTORS; ++v) total[v] = 1.0f / total[v];
    for (long lane = 0; lane < lanes; ++lane) {
        float* o = w.out + (row + lane / share) * w.ldo + (head * share + lane % share) * d;
        const float norm = total[lane / LANES][lane % LANES];
        for (long i = 0; i < d; ++i) o[i] = ot[i * QUERIES + lane] * norm;
    }
}

// One decode and one key/value head: two query heads at a time share each load of keys and values.
template <typename T, int D>
static void decode_heads(const Work& w, long decode, long head) {
    const long d = D ? D * LANES : w.pool.head_dim, share = w.heads / w.pool.kv_heads;
    const long vectors = d / LANES, tail = vectors * LANES;
    const int32_t* table = w.tables + w.decode_table[decode] * w.table_width;
    const long end = w.decode_context[decode] + 1, row = w.decode_row[decode];
    const long start = w.window && end > w.window ? end - w.window : 0;
    float* memory = scratch(share * (2 * d + KEYS) + 2 * share + 64);
    float *q = memory, *o = q + share * d, *scores = o + share * d, *top = scores + share * KEYS, *total = top + share;
    for (long i = 0; i < share * d; ++i) {
        q[i] = w.q[row * w.ldq + head * share * d + i] * w.scale;
        o[i] = 0;
    }
    for (long g = 0; g < share; ++g) top[g] = LOWEST, total[g] = 0;
    const T *keys[2][KEYS], *value[KEYS];
    const auto tile_from = [&](long base) { return std::max(start, base); };
    const auto tile_width = [&](long base) { return std::max(0L, std::min(end, base + KEYS) - tile_from(base)); };
    const auto locate = [&](const T** at, const void* pool, long base) {
        for (long j = 0; j < tile_width(base); ++j) at[j] = entry<T>(w, pool, table, tile_from(base) + j, head);
    };
    locate(keys[start / KEYS % 2], w.pool.keys, start / KEYS * KEYS);
    for (long base = start / KEYS * KEYS; base < end; base += KEYS) {
        const long width = tile_width(base), next_width = tile_width(base + KEYS);
        const T** key = keys[base / KEYS % 2];
        const T** next_key = keys[(base / KEYS + 1) % 2];  // fetched into the cache while this tile's values are summed
        locate(value, w.pool.values, base);
        locate(next_key, w.pool.keys, base + KEYS);
        for (long j = 0; j < width; ++j) {
            for (long b = 0; b < long(d * sizeof(T)); b += 64) __builtin_prefetch(reinterpret_cast<const char*>(value[j]) + b);
            for (long g = 0; g < share; ++g) {
                vfloat acc{};
                const float* query = q + g * d;
#pragma GCC unroll 8
                for (long v = 0; v < vectors; ++v) acc += load(query + v * LANES) * load(key[j] + v * LANES);
                float s = sum(acc);
                for (long i = tail; i < d; ++i) s += query[i] * widen(key[j][i]);
                scores[g * KEYS + j] = s;
            }
        }
        for (long g = 0; g < share; ++g) {
            float* s = scores + g * KEYS;
            for (long j = width; j < (width + LANES - 1) / LANES * LANES; ++j) s[j] = -INFINITY;
            vfloat high = splat(top[g]);
            for (long j = 0; j < width; j += LANES) high = maximum(high, load(s + j));
            const float now = largest(high);
            const float shrink = exponential(splat(top[g] - now))[0];
            vfloat mass{};
            for (long j = 0; j < width; j += LANES) {
                const vfloat p = exponential(load(s + j) - now);
                mass += p;
                store(s + j, p);
            }
            total[g] = total[g] * shrink + sum(mass);
            top[g] = now;
            for (long i = 0; i < d; ++i) o[g * d + i] *= shrink;
        }
        for (long g = 0; g < share; g += 2) {
            const bool two = g + 1 < share;
            float *s0 = scores + g * KEYS, *s1 = scores + (two ? g + 1 : g) * KEYS, *o0 = o + g * d, *o1 = o + (two ? g + 1 : g) * d;
            if constexpr (D > 0) {
                vfloat a0[D], a1[D];
                for (int v = 0; v < D; ++v) a0[v] = load(o0 + v * LANES), a1[v] = load(o1 + v * LANES);
                for (long j = 0; j < width; ++j) {
                    if (g == 0 && j < next_width)
                        for (long b = 0; b < long(d * sizeof(T)); b += 64)
                            __builtin_prefetch(reinterpret_cast<const char*>(next_key[j]) + b);
                    const vfloat p0 = splat(s0[j]), p1 = splat(s1[j]);
                    for (int v = 0; v < D; ++v) {
                        const vfloat x = load(value[j] + v * LANES);
                        a0[v] += p0 * x;
                        a1[v] += p1 * x;
                    }
                }
                for (int v = 0; v < D; ++v) {
                    store(o0 + v * LANES, a0[v]);
                    if (two) store(o1 + v * LANES, a1[v]);
                }
            } else {
                for (long j = 0; j < width; ++j)
                    for (long i = 0; i < d; ++i) {
                        o0[i] += s0[j] * widen(value[j][i]);
                        if (two) o1[i] += s1[j] * widen(value[j][i]);
                    }
            }
        }
    }
    for (long g = 0; g < share; ++g)
        for (long i = 0; i < d; ++i) w.out[row * w.ldo + (head * share + g) * d + i] = o[g * d + i] / total[g];
}

template <typename T>
static void decode_tile(const Work& w, long decode, long head) {
    switch (w.pool.head_dim) {
        case 2 * LANES: return decode_heads<T, 2>(w, decode, head);
        case 4 * LANES: return decode_heads<T, 4>(w, decode, head);
        case 5 * LANES: return decode_heads<T, 5>(w, decode, head);
        case 6 * LANES: return decode_heads<T, 6>(w, decode, head);
        case 8 * LANES: return decode_heads<T, 8>(w, decode, head);
        default: return decode_heads<T, 0>(w, decode, head);
    }
}

// Every tile of every chunk and every decode of the batch, taken from one counter: long tiles first.
template <typename T>
static void attend(const Work& w) {
    const long share = w.heads / w.pool.kv_heads, tokens_per_tile = QUERIES / share, kv_heads = w.pool.kv_heads;
    long chunk_items = 0;
    for (long c = 0; c < w.num_chunks; ++c) chunk_items += (w.chunk_tokens[c] + tokens_per_tile - 1) / tokens_per_tile * kv_heads;
    const long items = chunk_items + w.num_decodes * kv_heads;
    parallel(items, [&](long item) {
        if (item >= chunk_items) {
            decode_tile<T>(w, (item - chunk_items) / kv_heads, (item - chunk_items) % kv_heads);
            return;
        }
        for (long c = 0, left = item; c < w.num_chunks; ++c) {
            const long tiles = (w.chunk_tokens[c] + tokens_per_tile - 1) / tokens_per_tile;
            if (left >= tiles * kv_heads) {
                left -= tiles * kv_heads;
                continue;
            }
            const long first = (tiles - 1 - left / kv_heads) * tokens_per_tile;
            chunk_tile<T>(w, c, left % kv_heads, first, std::min(tokens_per_tile, w.chunk_tokens[c] - first));
            break;
        }
    });
}
