// Vectors of the widest float lanes that the compiler's target has, through GCC/Clang vector extensions: one source
// for AVX-512, AVX2 and narrower machines. No intrinsics, so that the same arithmetic can be read anywhere.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float vfloat __attribute__((vector_size(LANES * 4)));
typedef int32_t vint __attribute__((vector_size(LANES * 4)));
typedef uint32_t vuint __attribute__((vector_size(LANES * 4)));
typedef uint16_t vhalf __attribute__((vector_size(LANES * 2)));

static inline vfloat load(const float* p) {
    vfloat v;
    memcpy(&v, p, sizeof v);
    return v;
}
static inline void store(float* p, vfloat v) { memcpy(p, &v, sizeof v); }
static inline vfloat splat(float x) { return x - vfloat{}; }  // x - 0 is x for every x, so this is a bare broadcast

// bfloat16 is the upper half of a float, so widening is exact.
static inline vfloat load(const uint16_t* p) {
    vhalf h;
    memcpy(&h, p, sizeof h);
    return (vfloat)(__builtin_convertvector(h, vuint) << 16);
}
static inline float widen(float x) { return x; }
static inline float widen(uint16_t h) {
    uint32_t bits = uint32_t(h) << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
// Round to nearest even; a NaN stays a NaN.
static inline uint16_t narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(0x7fc0);
    return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
static inline void put(float* p, float x) { *p = x; }
static inline void put(uint16_t* p, float x) { *p = narrow(x); }

// A NaN in either operand survives into the maximum of (a, b) only through b; softmax adds it back through the sum.
static inline vfloat maximum(vfloat a, vfloat b) { return a > b ? a : b; }

// The lanes of `a`, or of `a` and then `b`, that `at` names. Clang has no form of its own for places in a variable.
#if defined(__clang__)
static inline vfloat shuffled(vfloat a, vint at) {
    vfloat out;
    for (int i = 0; i < LANES; ++i) out[i] = a[at[i] & (LANES - 1)];
    return out;
}
static inline vfloat shuffled(vfloat a, vfloat b, vint at) {
    vfloat out;
    for (int i = 0; i < LANES; ++i) out[i] = at[i] & LANES ? b[at[i] & (LANES - 1)] : a[at[i] & (LANES - 1)];
    return out;
}
#else
static inline vfloat shuffled(vfloat a, vint at) { return __builtin_shuffle(a, at); }
static inline vfloat shuffled(vfloat a, vfloat b, vint at) { return __builtin_shuffle(a, b, at); }
#endif

// Sum of all lanes by halves: the same order on every call.
static inline vint lane_numbers() {
    vint v;
    for (int i = 0; i < LANES; ++i) v[i] = i;
    return v;
}
static inline float sum(vfloat v) {
    const vint lane = lane_numbers();
    for (int half = LANES / 2; half > 0; half /= 2) v += shuffled(v, lane ^ half);
    return v[0];
}
static inline float largest(vfloat v) {
    const vint lane = lane_numbers();
    for (int half = LANES / 2; half > 0; half /= 2) v = maximum(v, shuffled(v, lane ^ half));
    return v[0];
}

// e^x, relative error below 3e-7 (Cody-Waite reduction, degree-6 polynomial): 0 below -87, clamped above 88; a NaN stays one.
static inline vfloat exponential(vfloat x) {
    const vfloat magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    const vfloat floor = splat(-87.0f), ceiling = splat(88.0f);
    vfloat in = x < floor ? floor : x;
    in = in > ceiling ? ceiling : in;
    vfloat rounded = in * 1.44269504f + magic;
    vfloat n = rounded - magic;
    vfloat r = in - n * 0.693359375f + n * 2.12194440e-4f;
    vfloat p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vint scale = ((vint)rounded - (vint)magic) << 23;
    vfloat y = (vfloat)((vint)p + scale);
    y = x < floor ? vfloat{} : y;
    return x == x ? y : x;
}
