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

// Where the keys of a tile lie, as offsets into the pool (those of the values are the same); one division a tile.
static inline void locate(const Work& w, const int32_t* table, long head, long from, long count, long* at) {
    const Pool& p = w.pool;
    long block = from / p.block_size, slot = from % p.block_size;
    for (long j = 0; j < count; ++block, slot = 0) {
        long offset = ((table[block] * long(p.kv_heads) + head) * p.block_size + slot) * p.head_dim;
        const long run = std::min(count - j, p.block_size - slot);
        for (long i = 0; i < run; ++i, offset += p.head_dim) at[j++] = offset;
    }
}

// Neighbours added pairwise: first half of the result from a, second from b.
static inline vfloat add_pairs(vfloat a, vfloat b) {
    const vint even = lane_numbers() * 2;
    return shuffled(a, b, even) + shuffled(a, b, even + 1);
}

// The sums of four vectors, written to out[0..3].
static inline void sum_four(vfloat a, vfloat b, vfloat c, vfloat d, float* out) {
    vfloat v = add_pairs(add_pairs(a, b), add_pairs(c, d));
    const vint lane = lane_numbers();
    for (int half = LANES / 8; half > 0; half /= 2) v += shuffled(v, lane ^ half);
    const vfloat four = shuffled(v, lane * (LANES / 4) % LANES);
    memcpy(out, &four, 16);
}

template <typename T>
static inline void fetch(const T* p, long d) {
    for (long b = 0; b < long(d * sizeof(T)); b += 64) __builtin_prefetch(reinterpret_cast<const char*>(p) + b);
}

// Scores of four keys for two query heads that share each load.
template <typename T, int D>
static inline void score_four(const float* q0, const float* q1, const T* keys, const long* at, float* s0, float* s1) {
    vfloat a0{}, a1{}, a2{}, a3{}, b0{}, b1{}, b2{}, b3{};
    const T *k0 = keys + at[0], *k1 = keys + at[1], *k2 = keys + at[2], *k3 = keys + at[3];
#pragma GCC unroll 8
    for (int v = 0; v < D; ++v) {
        const int i = v * LANES;
        const vfloat x = load(q0 + i), y = load(q1 + i);
        vfloat k = load(k0 + i);
        a0 += x * k, b0 += y * k;
        k = load(k1 + i);
        a1 += x * k, b1 += y * k;
        k = load(k2 + i);
        a2 += x * k, b2 += y * k;
        k = load(k3 + i);
        a3 += x * k, b3 += y * k;
    }
    sum_four(a0, a1, a2, a3, s0);
    if (s1 != s0) sum_four(b0, b1, b2, b3, s1);
}

// acc += p[j] * value[j] over a tile, for two query heads that share each load. The next tile's keys are fetched meanwhile.
template <typename T, int D, size_t... I>
static inline __attribute__((always_inline)) void add_values(const float* p0, const float* p1, const T* values, const long* at,
                                                             long width, const T* next, const long* next_at, long next_width,
                                                             float* o0, float* o1, std::index_sequence<I...>) {
    vfloat a[D] = {load(o0 + I * LANES)...}, b[D] = {load(o1 + I * LANES)...};
    for (long j = 0; j < width; ++j) {
        if (j < next_width) fetch(next + next_at[j], D * LANES);
        const T* value = values + at[j];
        const vfloat x = splat(p0[j]), y = splat(p1[j]);
        vfloat v;
        ((v = load(value + I * LANES), a[I] += x * v, b[I] += y * v), ...);
    }
    (store(o0 + I * LANES, a[I]), ...);
    if (o1 != o0) (store(o1 + I * LANES, b[I]), ...);
}

// One decode and one key/value head. D: head_dim in vectors, 0 for sizes that have no code of their own.
template <typename T, int D>
static void decode_heads(const Work& w, long decode, long head) {
    const long d = D ? D * LANES : w.pool.head_dim, share = w.heads / w.pool.kv_heads;
    const int32_t* table = w.tables + w.decode_table[decode] * w.table_width;
    const long end = w.decode_context[decode] + 1, row = w.decode_row[decode];
    const long start = w.window && end > w.window ? end - w.window : 0;
    const T *keys = static_cast<const T*>(w.pool.keys), *values = static_cast<const T*>(w.pool.values);
    float* memory = scratch(share * (2 * d + KEYS) + 2 * share + 64);
    float *q = memory, *o = q + share * d, *scores = o + share * d, *top = scores + share * KEYS, *total = top + share;
    for (long i = 0; i < share * d; ++i) {
        q[i] = w.q[row * w.ldq + head * share * d + i] * w.scale;
        o[i] = 0;
    }
    for (long g = 0; g < share; ++g) top[g] = LOWEST, total[g] = 0;
    long places[2][KEYS];
    const auto tile_from = [&](long base) { return std::max(start, base); };
    const auto tile_width = [&](long base) { return std::max(0L, std::min(end, base + KEYS) - tile_from(base)); };
    const long first = start / KEYS * KEYS;
    locate(w, table, head, tile_from(first), tile_width(first), places[first / KEYS % 2]);
    for (long base = first; base < end; base += KEYS) {
        const long width = tile_width(base), next_width = tile_width(base + KEYS);
        long *at = places[base / KEYS % 2], *next_at = places[(base / KEYS + 1) % 2];
        locate(w, table, head, base + KEYS, next_width, next_at);
        for (long j = width; j % 4; ++j) at[j] = at[width - 1];
        for (long j = 0; j < width; j += 4) {
            for (long i = 0; i < 4; ++i) fetch(values + at[j + i], d);
            for (long g = 0; g < share; g += 2) {
                const long h = g + 1 < share ? g + 1 : g;
                if constexpr (D > 0) {
                    score_four<T, D>(q + g * d, q + h * d, keys, at + j, scores + g * KEYS + j, scores + h * KEYS + j);
                } else {
                    for (long i = 0; i < 4; ++i)
                        for (long e = g; e <= h; ++e) {
                            float s = 0;
                            for (long x = 0; x < d; ++x) s += q[e * d + x] * widen(keys[at[j + i] + x]);
                            scores[e * KEYS + j + i] = s;
                        }
                }
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
            const long h = g + 1 < share ? g + 1 : g;
            if constexpr (D > 0) {
                add_values<T, D>(scores + g * KEYS, scores + h * KEYS, values, at, width, keys, next_at, g ? 0 : next_width,
                                 o + g * d, o + h * d, std::make_index_sequence<D>{});
            } else {
                for (long j = 0; j < width; ++j)
                    for (long e = g; e <= h; ++e)
                        for (long i = 0; i < d; ++i) o[e * d + i] += scores[e * KEYS + j] * widen(values[at[j] + i]);
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
