/* Vectors of as many floats as the instruction set has lanes: loads, exp, reductions.
 *
 * Included by paged.h and rows.h. GCC vector extensions, so that one source serves AVX-512, AVX2
 * and, four lanes wide, everything else.
 */
#ifndef FOVEAL_LANES_H
#define FOVEAL_LANES_H

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define ANY_ABOVE(v, x) _mm512_cmp_ps_mask((__m512)(v), _mm512_set1_ps(x), _CMP_GT_OQ)
#define EVEN(a, b) \
    __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define ODD(a, b) \
    __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
#define COLUMNS 8 /* accumulators held in registers at once */
#elif defined(__AVX2__)
#define LANES 8
#define ANY_ABOVE(v, x) \
    _mm256_movemask_ps(_mm256_cmp_ps((__m256)(v), _mm256_set1_ps(x), _CMP_GT_OQ))
#define EVEN(a, b) __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14)
#define ODD(a, b) __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15)
#define COLUMNS 8
#else
#define LANES 4
#define ANY_ABOVE(v, x) ((v)[0] > (x) || (v)[1] > (x) || (v)[2] > (x) || (v)[3] > (x))
#define EVEN(a, b) __builtin_shufflevector(a, b, 0, 2, 4, 6)
#define ODD(a, b) __builtin_shufflevector(a, b, 1, 3, 5, 7)
#define COLUMNS 8
#endif

/* Before loops over a head's dimensions or a tile's tokens: unrolled whole. Of vectors of four that
 * would be so much code that GCC takes minutes over it on arm64. */
#if LANES == 4
#define UNROLL _Pragma("GCC unroll 4")
#else
#define UNROLL _Pragma("GCC unroll 64")
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES)));

enum { FLOAT32 = 0, BFLOAT16 = 1 };

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512BF16__)
#define HAS_DOTS 1
#else
#define HAS_DOTS 0
#endif

INLINE vec splat(float x) { return x - (vec){0}; }

INLINE vec pick(ivec mask, vec yes, vec no) {
    return (vec)((mask & (ivec)yes) | (~mask & (ivec)no));
}

/* b where one is not a number. */
INLINE vec larger(vec a, vec b) {
#if LANES == 16
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return pick(a > b, a, b);
#endif
}

INLINE vec load(const float *p) {
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store(float *p, vec v) { memcpy(p, &v, sizeof v); }

/* A lane's 32 bits from memory, whatever they are, in all lanes. */
INLINE vec splat_bits(const void *p) {
    uint32_t u;
    memcpy(&u, p, sizeof u);
    return (vec)(u - (uvec){0});
}

/* Of the pair of bfloat16 numbers in each lane. */
INLINE vec low_half(vec pair) { return (vec)((uvec)pair << 16); }
INLINE vec high_half(vec pair) { return (vec)((uvec)pair & 0xffff0000u); }

/* sum + two products in each lane, of pairs of bfloat16 numbers. The instruction rounds after each
 * product and takes subnormal numbers for 0. */
INLINE vec add_dots(vec sum, vec a, vec b) {
#if HAS_DOTS
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    return sum + low_half(a) * low_half(b) + high_half(a) * high_half(b);
#endif
}

INLINE uvec widened(hvec h) {
#if LANES == 16 /* GCC 12 makes four instructions of the conversion */
    return (uvec)_mm512_cvtepu16_epi32((__m256i)h);
#else
    return __builtin_convertvector(h, uvec);
#endif
}

INLINE uvec load_halves(const uint16_t *p) {
    hvec h;
    memcpy(&h, p, sizeof h);
    return widened(h);
}

INLINE vec load_bf16(const uint16_t *p) { return (vec)(load_halves(p) << 16); }

/* The first `count` numbers, 1 ... LANES, and zeros. */
INLINE vec load_first(const float *p, int count) {
#if LANES == 16
    return (vec)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), p);
#else
    vec v = splat(0.0f);
    if (count == LANES) return load(p);
    memcpy(&v, p, count * sizeof *p);
    return v;
#endif
}

INLINE uvec load_first_halves(const uint16_t *p, int count) {
#if LANES == 16
    return widened((hvec)_mm256_maskz_loadu_epi16((__mmask16)((1u << count) - 1), p));
#else
    hvec h = {0};
    if (count == LANES) return load_halves(p);
    memcpy(&h, p, count * sizeof *p);
    return widened(h);
#endif
}

/* Pairs of two rows' bfloat16 numbers, and zeros. */
INLINE vec load_pairs(const uint16_t *low, const uint16_t *high, int count) {
    return (vec)(load_first_halves(low, count) | load_first_halves(high, count) << 16);
}

INLINE uint16_t to_bf16(float x) { /* round to nearest even; NaN stays NaN */
    uint32_t u;
    memcpy(&u, &x, 4);
    if (x != x) return (uint16_t)((u >> 16) | 0x40);
    return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

/* The nearest bfloat16 numbers, ties to even; NaN stays NaN. The instruction takes subnormal numbers
 * for 0. */
#if HAS_DOTS
INLINE hvec to_halves(vec x) { return (hvec)_mm512_cvtneps_pbh((__m512)x); }
INLINE vec nearest(vec x) { return (vec)(widened(to_halves(x)) << 16); }
#else
INLINE vec nearest(vec x) {
    const uvec u = (uvec)x, near = u + 0x7fff + ((u >> 16) & 1);
    return (vec)((uvec)pick(x == x, (vec)near, (vec)(u | 0x400000u)) & 0xffff0000u);
}
INLINE hvec to_halves(vec x) { return __builtin_convertvector((uvec)nearest(x) >> 16, hvec); }
#endif

/* exp(x), relative error 2e-7; exactly 0 below -87, so masked scores (-inf) weigh nothing. */
INLINE vec vexp(vec x) {
    const vec shift = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
#if LANES == 16
    const __mmask16 alive = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    x = (vec)_mm512_min_ps(_mm512_set1_ps(88.0f), (__m512)x);
#else
    ivec dead = x < splat(-87.0f);
    x = pick(dead, splat(-87.0f), x);
    x = pick(x > splat(88.0f), splat(88.0f), x);
#endif
    vec z = x * splat(1.44269504f) + shift;
    vec n = z - shift;
    vec r = x - n * splat(0.693359375f) + n * splat(2.12194440e-4f);
    vec p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1.0f);
#if LANES == 16
    return (vec)_mm512_maskz_scalef_ps(alive, (__m512)p, (__m512)n);
#else
    ivec scale = (__builtin_convertvector(n, ivec) + 127) << 23;
    vec e = p * (vec)scale;
    return pick(dead, splat(0.0f), e);
#endif
}

/* 2^x for what is rounded to bfloat16 afterwards: relative error 3e-6, in half of vexp's time; 0 for
 * -inf. The polynomial is the one of degree 4 with the smallest relative error between 0 and 1. */
INLINE vec vexp2_coarse(vec x) {
#if HAS_DOTS
    const vec part = (vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    vec p = splat(1.353416724e-02f);
    p = p * part + splat(5.201146191e-02f);
    p = p * part + splat(2.414427561e-01f);
    p = p * part + splat(6.930038346e-01f);
    p = p * part + splat(1.000002593e+00f);
    return (vec)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
    return vexp(x * splat(0.69314718f));
#endif
}

/* x times the sigmoid of y, rounded to `kind` afterwards. */
INLINE vec times_sigmoid(const int kind, vec x, vec y) {
    const int coarse = HAS_DOTS && kind == BFLOAT16;
    return x / (splat(1.0f) + (coarse ? vexp2_coarse(y * splat(-1.44269504f)) : vexp(-y)));
}

INLINE vec vcap(vec x, float cap) { /* cap * tanh(x / cap) */
    vec e = vexp(x * splat(2.0f / cap));
    return splat(cap) * (splat(1.0f) - splat(2.0f) / (e + splat(1.0f)));
}

INLINE float reduce_max(vec v) {
#if LANES == 16
    return _mm512_reduce_max_ps((__m512)v);
#else
    float m = v[0];
    for (int i = 1; i < LANES; i++) m = v[i] > m ? v[i] : m;
    return m;
#endif
}

/* Lane i of the result is the sum of the lanes of v[i]. Destroys v. */
INLINE vec sums_of(vec *v) {
    for (int n = LANES; n > 1; n /= 2)
        for (int i = 0; i < n / 2; i++)
            v[i] = EVEN(v[2 * i], v[2 * i + 1]) + ODD(v[2 * i], v[2 * i + 1]);
    return v[0];
}

#endif
