// Sixteen float32 lanes on whatever the compiler targets.
//
// Every operation is defined lane by lane with one rounding (fma included), and the only
// horizontal operation, `sum`, adds in one fixed tree. So a formula written with F16 gives the
// same bits on AVX-512, on AVX2 with FMA and in the portable loop.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define DW_INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define DW_AVX512 1
#elif defined(__AVX2__) && defined(__FMA__)
#define DW_AVX2 1
#if defined(__AVXVNNI__)
#define DW_AVXVNNI 1
#endif
#endif

namespace dw {

#if defined(DW_AVX512)

struct F16 {
    __m512 v;
    static DW_INLINE F16 set(float x) { return {_mm512_set1_ps(x)}; }
    static DW_INLINE F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
    DW_INLINE void store(float* p) const { _mm512_storeu_ps(p, v); }
    DW_INLINE F16 operator+(F16 o) const { return {_mm512_add_ps(v, o.v)}; }
    DW_INLINE F16 operator-(F16 o) const { return {_mm512_sub_ps(v, o.v)}; }
    DW_INLINE F16 operator*(F16 o) const { return {_mm512_mul_ps(v, o.v)}; }
    DW_INLINE F16 operator/(F16 o) const { return {_mm512_div_ps(v, o.v)}; }
};
DW_INLINE F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
DW_INLINE F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
DW_INLINE F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
DW_INLINE F16 abs(F16 a) { return {_mm512_abs_ps(a.v)}; }
DW_INLINE F16 round(F16 a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// 2^n for an integral n in [-126, 127].
DW_INLINE F16 exp2i(F16 n) {
    const __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(e, 23))};
}
// Lanes [first, last) of `a`, `other` elsewhere.
DW_INLINE F16 keep(F16 a, int first, int last, float other) {
    const __m512i lane =
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __mmask16 k = _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(first)) &
                        _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(last));
    return {_mm512_mask_blend_ps(k, _mm512_set1_ps(other), a.v)};
}
// `a` where x >= limit, 0 elsewhere.
DW_INLINE F16 zero_below(F16 a, F16 x, float limit) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_GE_OQ), a.v)};
}
DW_INLINE bool any_greater(F16 a, F16 b) {
    return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ) != 0;
}
// Rounded lanes as int8 (values must be within [-127, 127]) and the sum of the integers.
DW_INLINE void store_i8(F16 a, int8_t* p) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
}

// One step of a Hadamard transform: lane i becomes x[i] + x[i ^ D], or x[i ^ D] - x[i] where the
// bit D of i is set.
template <int D>
DW_INLINE F16 butterfly(F16 a) {
    __m512 other;
    if constexpr (D == 1) other = _mm512_permute_ps(a.v, 0xB1);
    if constexpr (D == 2) other = _mm512_permute_ps(a.v, 0x4E);
    if constexpr (D == 4) other = _mm512_shuffle_f32x4(a.v, a.v, 0xB1);
    if constexpr (D == 8) other = _mm512_shuffle_f32x4(a.v, a.v, 0x4E);
    constexpr int mask = D == 1 ? 0xAAAA : D == 2 ? 0xCCCC : D == 4 ? 0xF0F0 : 0xFF00;
    return {_mm512_mask_sub_ps(_mm512_add_ps(a.v, other), mask, other, a.v)};
}

#elif defined(DW_AVX2)

struct F16 {
    __m256 a, b;
    static DW_INLINE F16 set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
    static DW_INLINE F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
    DW_INLINE void store(float* p) const {
        _mm256_storeu_ps(p, a);
        _mm256_storeu_ps(p + 8, b);
    }
    DW_INLINE F16 operator+(F16 o) const { return {_mm256_add_ps(a, o.a), _mm256_add_ps(b, o.b)}; }
    DW_INLINE F16 operator-(F16 o) const { return {_mm256_sub_ps(a, o.a), _mm256_sub_ps(b, o.b)}; }
    DW_INLINE F16 operator*(F16 o) const { return {_mm256_mul_ps(a, o.a), _mm256_mul_ps(b, o.b)}; }
    DW_INLINE F16 operator/(F16 o) const { return {_mm256_div_ps(a, o.a), _mm256_div_ps(b, o.b)}; }
};
DW_INLINE F16 fma(F16 x, F16 y, F16 z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
DW_INLINE F16 max(F16 x, F16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
DW_INLINE F16 min(F16 x, F16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
DW_INLINE F16 abs(F16 x) {
    const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return {_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)};
}
DW_INLINE F16 round(F16 x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
DW_INLINE __m256 exp2i_half(__m256 n) {
    const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}
DW_INLINE F16 exp2i(F16 n) { return {exp2i_half(n.a), exp2i_half(n.b)}; }
DW_INLINE __m256 keep_half(__m256 x, __m256i lane, int first, int last, float other) {
    const __m256i outside = _mm256_or_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane),
                                            _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(last - 1)));
    return _mm256_blendv_ps(x, _mm256_set1_ps(other), _mm256_castsi256_ps(outside));
}
DW_INLINE F16 keep(F16 x, int first, int last, float other) {
    const __m256i low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i high = _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15);
    return {keep_half(x.a, low, first, last, other), keep_half(x.b, high, first, last, other)};
}
DW_INLINE F16 zero_below(F16 y, F16 x, float limit) {
    const __m256 l = _mm256_set1_ps(limit);
    return {_mm256_and_ps(y.a, _mm256_cmp_ps(x.a, l, _CMP_GE_OQ)),
            _mm256_and_ps(y.b, _mm256_cmp_ps(x.b, l, _CMP_GE_OQ))};
}
DW_INLINE bool any_greater(F16 x, F16 y) {
    return (_mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ)) |
            _mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ))) != 0;
}
DW_INLINE void store_i8(F16 x, int8_t* p) {
    const __m256i w = _mm256_permute4x64_epi64(
        _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)), 0xD8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}
DW_INLINE void store_i16(F16 x, int16_t* p) {
    const __m256i w = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(w, 0xD8));
}

template <int D>
DW_INLINE __m256 butterfly_half(__m256 x) {
    __m256 other;
    if constexpr (D == 1) other = _mm256_permute_ps(x, 0xB1);
    if constexpr (D == 2) other = _mm256_permute_ps(x, 0x4E);
    if constexpr (D == 4) other = _mm256_permute2f128_ps(x, x, 0x01);
    constexpr int mask = D == 1 ? 0xAA : D == 2 ? 0xCC : 0xF0;
    return _mm256_blend_ps(_mm256_add_ps(x, other), _mm256_sub_ps(other, x), mask);
}
template <int D>
DW_INLINE F16 butterfly(F16 x) {
    if constexpr (D == 8) return {_mm256_add_ps(x.a, x.b), _mm256_sub_ps(x.a, x.b)};
    else return {butterfly_half<D>(x.a), butterfly_half<D>(x.b)};
}

#else

struct F16 {
    float v[16];
    static DW_INLINE F16 set(float x) {
        F16 r;
        for (float& l : r.v) l = x;
        return r;
    }
    static DW_INLINE F16 load(const float* p) {
        F16 r;
        std::memcpy(r.v, p, sizeof r.v);
        return r;
    }
    DW_INLINE void store(float* p) const { std::memcpy(p, v, sizeof v); }
#define DW_LANES(expression)                         \
    F16 r;                                           \
    for (int i = 0; i < 16; ++i) r.v[i] = expression; \
    return r
    DW_INLINE F16 operator+(const F16& o) const { DW_LANES(v[i] + o.v[i]); }
    DW_INLINE F16 operator-(const F16& o) const { DW_LANES(v[i] - o.v[i]); }
    DW_INLINE F16 operator*(const F16& o) const { DW_LANES(v[i] * o.v[i]); }
    DW_INLINE F16 operator/(const F16& o) const { DW_LANES(v[i] / o.v[i]); }
};
#if defined(__FP_FAST_FMAF)
DW_INLINE F16 fma(const F16& a, const F16& b, const F16& c) {
    DW_LANES(std::fma(a.v[i], b.v[i], c.v[i]));
}
#else  // no FMA in the machine: two roundings, still the same for every row
DW_INLINE F16 fma(const F16& a, const F16& b, const F16& c) { DW_LANES(a.v[i] * b.v[i] + c.v[i]); }
#endif
DW_INLINE F16 max(const F16& a, const F16& b) { DW_LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
DW_INLINE F16 min(const F16& a, const F16& b) { DW_LANES(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
DW_INLINE F16 abs(const F16& a) { DW_LANES(std::fabs(a.v[i])); }
DW_INLINE F16 round(const F16& a) { DW_LANES(std::nearbyint(a.v[i])); }
DW_INLINE float exp2i_lane(float n) {
    const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;
    float f;
    std::memcpy(&f, &bits, sizeof f);
    return f;
}
DW_INLINE F16 exp2i(const F16& n) { DW_LANES(exp2i_lane(n.v[i])); }
DW_INLINE F16 keep(const F16& a, int first, int last, float other) {
    DW_LANES(i >= first && i < last ? a.v[i] : other);
}
DW_INLINE F16 zero_below(const F16& a, const F16& x, float limit) {
    DW_LANES(x.v[i] >= limit ? a.v[i] : 0.0f);
}
DW_INLINE bool any_greater(const F16& a, const F16& b) {
    bool any = false;
    for (int i = 0; i < 16; ++i) any |= a.v[i] > b.v[i];
    return any;
}
template <int D>
DW_INLINE F16 butterfly(const F16& a) {
    DW_LANES(i & D ? a.v[i ^ D] - a.v[i] : a.v[i] + a.v[i ^ D]);
}
DW_INLINE void store_i16(const F16& x, int16_t* p) {
    for (int i = 0; i < 16; ++i) p[i] = static_cast<int16_t>(x.v[i]);
}
#undef DW_LANES

#endif

// Adds the lanes in one fixed tree: halves, quarters, pairs.
#if defined(DW_AVX512) || defined(DW_AVX2)
DW_INLINE float sum8(__m256 x) {
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
DW_INLINE float max8(__m256 x) {
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}
#endif
#if defined(DW_AVX512)
DW_INLINE __m256 low(F16 x) { return _mm512_castps512_ps256(x.v); }
DW_INLINE __m256 high(F16 x) {
    return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x.v), 1));
}
DW_INLINE float sum(F16 x) { return sum8(_mm256_add_ps(low(x), high(x))); }
DW_INLINE float max_lane(F16 x) { return max8(_mm256_max_ps(low(x), high(x))); }
#elif defined(DW_AVX2)
DW_INLINE float sum(F16 x) { return sum8(_mm256_add_ps(x.a, x.b)); }
DW_INLINE float max_lane(F16 x) { return max8(_mm256_max_ps(x.a, x.b)); }
#else
DW_INLINE float sum(F16 x) {
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) x.v[i] += x.v[i + half];
    return x.v[0];
}
DW_INLINE float max_lane(F16 x) {
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) x.v[i] = x.v[i] > x.v[i + half] ? x.v[i] : x.v[i + half];
    return x.v[0];
}
#endif

// e^x: error below 2 units in the last place; exp(0) is exactly 1; 0 below -87.3.
DW_INLINE F16 exp(F16 x) {
    const F16 clamped = max(min(x, F16::set(88.3f)), F16::set(-87.3f));
    const F16 n = round(clamped * F16::set(1.44269504f));
    F16 r = fma(n, F16::set(-0.693359375f), clamped);
    r = fma(n, F16::set(2.12194440e-4f), r);
    F16 p = F16::set(1.9875691500e-4f);
    p = fma(p, r, F16::set(1.3981999507e-3f));
    p = fma(p, r, F16::set(8.3334519073e-3f));
    p = fma(p, r, F16::set(4.1665795894e-2f));
    p = fma(p, r, F16::set(1.6666665459e-1f));
    p = fma(p, r, F16::set(5.0000001201e-1f));
    p = fma(p, r * r, r);
    return zero_below((p + F16::set(1.0f)) * exp2i(n), x, -87.3f);
}
DW_INLINE float exp(float x) {
    alignas(64) float t[16];
    exp(F16::set(x)).store(t);
    return t[0];
}

}  // namespace dw
