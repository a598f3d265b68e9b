// Attention of new tokens over their own paths.
//
// A row's keys are taken by their position on the row's path: first the context, then the row's
// ancestors among the new tokens, then the row itself. Positions are cut into chunks of 32 and
// splits of 256, always at the same places. A score is one chain of fma over the head's
// dimensions; a chunk updates the running maximum, sum and weighted values of its split; splits
// are merged from the first to the last. Nothing depends on how many rows there are, on which
// slot holds a key, on threads or on register blocking: a token verified in a tree gets the bits
// it gets when its ancestors are context already.
#pragma once

#include <limits>

#include "rows.hpp"

namespace dw {

constexpr int kChunk = 32;
constexpr int kSplit = 256;
constexpr int kMaxQueries = 192;  // of one key head, in one pass over the keys
constexpr int kMaxHeadDim = 256;

struct AttentionShape {
    int heads, kv_heads, dim;
    int window;  // keys a row sees, itself included; 0: all
    float scale, softcap;  // softcap 0: none
};

// New rows of one sequence: the last `rows` of `nodes` that lie behind the context, all of them
// written before attention starts. Field order and types are mirrored in ops.py.
struct Segment {
    const int64_t* slots;   // [context + nodes] or null: start, start + 1, ...
    const int32_t* path;    // node numbers of every row's ancestors, itself last; null: a chain
    const int32_t* offset;  // [rows + 1] into path
    int64_t start;
    int32_t row0, rows, context, nodes;
};

DW_INLINE int path_length(const Segment& s, int row) {
    return s.context + (s.path ? s.offset[row + 1] - s.offset[row] : s.nodes - s.rows + row + 1);
}
DW_INLINE int64_t slot_at(const Segment& s, int index) {
    return s.slots ? s.slots[index] : s.start + index;
}
DW_INLINE int64_t key_slot(const Segment& s, int row, int position) {
    if (position < s.context || !s.path) return slot_at(s, position);
    return slot_at(s, s.context + s.path[s.offset[row] + position - s.context]);
}
DW_INLINE int64_t own_slot(const Segment& s, int row) {
    return slot_at(s, s.context + s.nodes - s.rows + row);
}

// One row's result over a range of keys: maximum score, sum of exponentials, weighted values.
struct State {
    float* max;   // [queries]
    float* sum;   // [queries]
    float* acc;   // [queries, dim]
};
DW_INLINE size_t state_floats(int queries, int dim) {
    return static_cast<size_t>(queries) * (dim + 2);
}
DW_INLINE State state_at(float* memory, int queries) {
    return {memory, memory + queries, memory + 2 * queries};
}

// a = a followed by b
static void merge(const State& a, const State& b, int query, int dim) {
    const float top = std::max(a.max[query], b.max[query]);
    if (!(b.sum[query] > 0.0f)) return;
    const float keep_a = exp(a.max[query] - top), keep_b = exp(b.max[query] - top);
    a.max[query] = top;
    a.sum[query] = std::fma(a.sum[query], keep_a, b.sum[query] * keep_b);
    float* x = a.acc + static_cast<size_t>(query) * dim;
    const float* y = b.acc + static_cast<size_t>(query) * dim;
    for (int d = 0; d < dim; d += 16)
        fma(F16::load(x + d), F16::set(keep_a), F16::load(y + d) * F16::set(keep_b)).store(x + d);
}

// columns[d][j] = keys[j][d] for 16 keys and 16 dimensions.
#if defined(DW_AVX512)
DW_INLINE void transpose16(const float* const* keys, int d, float* columns) {
    __m512 r[16], t[16];
    DW_UNROLL for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_ps(keys[i] + d);
    DW_UNROLL for (int i = 0; i < 16; i += 4) {
        const __m512 a = _mm512_unpacklo_ps(r[i], r[i + 1]), b = _mm512_unpackhi_ps(r[i], r[i + 1]);
        const __m512 c = _mm512_unpacklo_ps(r[i + 2], r[i + 3]);
        const __m512 e = _mm512_unpackhi_ps(r[i + 2], r[i + 3]);
        t[i] = _mm512_shuffle_ps(a, c, 0x44);
        t[i + 1] = _mm512_shuffle_ps(a, c, 0xEE);
        t[i + 2] = _mm512_shuffle_ps(b, e, 0x44);
        t[i + 3] = _mm512_shuffle_ps(b, e, 0xEE);
    }
    DW_UNROLL for (int i = 0; i < 4; ++i) {
        const __m512 a = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88);
        const __m512 b = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xDD);
        const __m512 c = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x88);
        const __m512 e = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xDD);
        _mm512_storeu_ps(columns + i * kChunk, _mm512_shuffle_f32x4(a, c, 0x88));
        _mm512_storeu_ps(columns + (i + 4) * kChunk, _mm512_shuffle_f32x4(b, e, 0x88));
        _mm512_storeu_ps(columns + (i + 8) * kChunk, _mm512_shuffle_f32x4(a, c, 0xDD));
        _mm512_storeu_ps(columns + (i + 12) * kChunk, _mm512_shuffle_f32x4(b, e, 0xDD));
    }
}
#elif defined(DW_AVX2)
DW_INLINE void transpose8(const float* const* keys, int d, float* columns) {
    __m256 r[8], t[8];
    DW_UNROLL for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(keys[i] + d);
    DW_UNROLL for (int i = 0; i < 8; i += 4) {
        const __m256 a = _mm256_unpacklo_ps(r[i], r[i + 1]), b = _mm256_unpackhi_ps(r[i], r[i + 1]);
        const __m256 c = _mm256_unpacklo_ps(r[i + 2], r[i + 3]);
        const __m256 e = _mm256_unpackhi_ps(r[i + 2], r[i + 3]);
        t[i] = _mm256_shuffle_ps(a, c, 0x44);
        t[i + 1] = _mm256_shuffle_ps(a, c, 0xEE);
        t[i + 2] = _mm256_shuffle_ps(b, e, 0x44);
        t[i + 3] = _mm256_shuffle_ps(b, e, 0xEE);
    }
    DW_UNROLL for (int i = 0; i < 4; ++i) {
        _mm256_storeu_ps(columns + i * kChunk, _mm256_permute2f128_ps(t[i], t[i + 4], 0x20));
        _mm256_storeu_ps(columns + (i + 4) * kChunk, _mm256_permute2f128_ps(t[i], t[i + 4], 0x31));
    }
}
DW_INLINE void transpose16(const float* const* keys, int d, float* columns) {
    for (int j = 0; j < 16; j += 8)
        for (int i = 0; i < 16; i += 8) transpose8(keys + j, d + i, columns + i * kChunk + j);
}
#else
DW_INLINE void transpose16(const float* const* keys, int d, float* columns) {
    for (int i = 0; i < 16; ++i)
        for (int j = 0; j < 16; ++j) columns[i * kChunk + j] = keys[j][d + i];
}
#endif

#if defined(DW_AVX512)
constexpr int kScoreQueries = 6, kValueQueries = 6, kValueLanes = 4;
#else
constexpr int kScoreQueries = 2, kValueQueries = 2, kValueLanes = 2;
#endif

// scores[q][0..31] of Q queries against a chunk's columns. `next`, here and below: rows of the
// chunk after this one, fetched ahead; or null.
template <int Q>
static void score_kernel(const float* const* queries, const float* columns, int dim,
                         float* scores, const float* const* next) {
    F16 c[Q][2];
    DW_UNROLL for (int q = 0; q < Q; ++q) c[q][0] = c[q][1] = F16::set(0.0f);
    for (int d = 0; d < dim; ++d) {
        if (next) {
            const int line = d / 16 * 16;
            __builtin_prefetch(next[2 * d % kChunk] + line);
            __builtin_prefetch(next[2 * d % kChunk + 1] + line);
        }
        const F16 low = F16::load(columns + d * kChunk), high = F16::load(columns + d * kChunk + 16);
        DW_UNROLL for (int q = 0; q < Q; ++q) {
            const F16 x = F16::set(queries[q][d]);
            c[q][0] = fma(low, x, c[q][0]);
            c[q][1] = fma(high, x, c[q][1]);
        }
    }
    DW_UNROLL for (int q = 0; q < Q; ++q) {
        c[q][0].store(scores + q * kChunk);
        c[q][1].store(scores + q * kChunk + 16);
    }
}

// acc[q][d .. d + 16 L) += sum over j in [first, last) of weights[q][j] * values[j], in that order.
template <int Q, int L>
static void value_kernel(const float* weights, const float* const* values, int first, int last,
                         int d, float* acc, int dim, const float* const* next) {
    F16 c[Q][L];
    DW_UNROLL for (int q = 0; q < Q; ++q)
        DW_UNROLL for (int l = 0; l < L; ++l) c[q][l] = F16::load(acc + q * dim + d + 16 * l);
    for (int j = first; j < last; ++j) {
        if (next)
            DW_UNROLL for (int l = 0; l < L; ++l) __builtin_prefetch(next[j] + d + 16 * l);
        F16 v[L];
        DW_UNROLL for (int l = 0; l < L; ++l) v[l] = F16::load(values[j] + d + 16 * l);
        DW_UNROLL for (int q = 0; q < Q; ++q) {
            const F16 w = F16::set(weights[q * kChunk + j]);
            DW_UNROLL for (int l = 0; l < L; ++l) c[q][l] = fma(w, v[l], c[q][l]);
        }
    }
    DW_UNROLL for (int q = 0; q < Q; ++q)
        DW_UNROLL for (int l = 0; l < L; ++l) c[q][l].store(acc + q * dim + d + 16 * l);
}

template <int Q>
static void value_rows(const float* weights, const float* const* values, int first, int last,
                       float* acc, int dim, const float* const* next) {
    int d = 0;
    for (; d + 16 * kValueLanes <= dim; d += 16 * kValueLanes)
        value_kernel<Q, kValueLanes>(weights, values, first, last, d, acc, dim, next);
    for (; d < dim; d += 16) value_kernel<Q, 1>(weights, values, first, last, d, acc, dim, next);
}

// What one thread needs for one key head and a block of rows.
struct Workspace {
    alignas(64) float columns[kMaxHeadDim * kChunk];
    alignas(64) float scores[kMaxQueries * kChunk];
    const float* queries[kMaxQueries];
    const float* keys[kChunk];
    const float* values[kChunk];
    const float* next_keys[kChunk];
    const float* next_values[kChunk];
    bool ahead;  // whether the last two name anything
};

struct Planes {
    const float* k;
    const float* v;
    size_t stride;  // floats from one slot to the next
};

static void score_queries(Workspace& w, int first, int count, int dim) {
    typedef void (*Kernel)(const float* const*, const float*, int, float*, const float* const*);
#if defined(DW_AVX512)
    static const Kernel table[] = {score_kernel<1>, score_kernel<2>, score_kernel<3>,
                                   score_kernel<4>, score_kernel<5>, score_kernel<6>};
#else
    static const Kernel table[] = {score_kernel<1>, score_kernel<2>};
#endif
    const int blocks = ceil_div(count, kScoreQueries);
    for (int b = 0; b < blocks; ++b) {
        const Range r = part(count, b, blocks);
        const int q = first + r.begin;
        table[r.end - r.begin - 1](w.queries + q, w.columns, dim, w.scores + q * kChunk,
                                         b == 0 && w.ahead ? w.next_keys : nullptr);
    }
}

static void add_values(Workspace& w, int first, int count, int from, int to, float* acc, int dim) {
    typedef void (*Kernel)(const float*, const float* const*, int, int, float*, int,
                           const float* const*);
#if defined(DW_AVX512)
    static const Kernel table[] = {value_rows<1>, value_rows<2>, value_rows<3>,
                                   value_rows<4>, value_rows<5>, value_rows<6>};
#else
    static const Kernel table[] = {value_rows<1>, value_rows<2>};
#endif
    const int blocks = ceil_div(count, kValueQueries);
    for (int b = 0; b < blocks; ++b) {
        const Range r = part(count, b, blocks);
        const int q = first + r.begin;
        table[r.end - r.begin - 1](w.scores + q * kChunk, w.values, from, to,
                                   acc + static_cast<size_t>(q) * dim, dim,
                                         b == 0 && w.ahead ? w.next_values : nullptr);
    }
}

DW_INLINE F16 capped(F16 s, float softcap) {
    if (softcap == 0.0f) return s;
    const F16 one = F16::set(1.0f), two = F16::set(2.0f), cap = F16::set(softcap);
    return cap * (one - two / (exp(two * (s / cap)) + one));
}

// Turns one query's scores of a chunk into weights and moves its state to the new maximum.
static void soften(const AttentionShape& a, float* scores, int from, int to, const State& state,
                   int query) {
    constexpr float lowest = -std::numeric_limits<float>::infinity();
    const F16 scale = F16::set(a.scale);
    const F16 low = keep(capped(F16::load(scores) * scale, a.softcap), from, to, lowest);
    const F16 high =
        keep(capped(F16::load(scores + 16) * scale, a.softcap), from - 16, to - 16, lowest);
    const float before = state.max[query];
    const float top = std::max(before, max_lane(max(low, high)));
    const F16 p = exp(low - F16::set(top)), r = exp(high - F16::set(top));
    p.store(scores);
    r.store(scores + 16);
    const float shrink = top == before ? 1.0f : exp(before - top);
    state.max[query] = top;
    state.sum[query] = std::fma(state.sum[query], shrink, sum(p + r));
    if (shrink == 1.0f) return;
    float* acc = state.acc + static_cast<size_t>(query) * a.dim;
    const F16 s = F16::set(shrink);
    for (int d = 0; d < a.dim; d += 16) (F16::load(acc + d) * s).store(acc + d);
}

// Queries [first, first + count), which all see keys [from, to) of the chunk.
static void attend_chunk(const AttentionShape& a, Workspace& w, int first, int count, int from,
                         int to, const State& state) {
    score_queries(w, first, count, a.dim);
    for (int q = first; q < first + count; ++q)
        soften(a, w.scores + q * kChunk, from, to, state, q);
    add_values(w, first, count, from, to, state.acc, a.dim);
    w.ahead = false;
}

struct Seen {
    int from, to;
};
// The keys of the chunk at `base` that a row sees.
DW_INLINE Seen seen(const AttentionShape& a, const Segment& s, int row, int base) {
    const int length = path_length(s, row);
    const int first = a.window ? std::max(0, length - a.window) : 0;
    return {std::max(0, first - base), std::min(kChunk, length - base)};
}

// Keys that are the same for all rows as far as they see them.
DW_INLINE int shared_keys(const Segment& s) { return s.path ? s.context : s.context + s.nodes; }

// Points the workspace at the chunk's keys that all rows share.
static void load_shared(const AttentionShape& a, const Segment& s, const Planes& kv, int kv_head,
                        int base, int shared, Workspace& w) {
    const size_t head = static_cast<size_t>(kv_head) * a.dim;
    for (int j = 0; j < kChunk; ++j) {
        const int64_t slot = key_slot(s, 0, base + std::min(j, shared - 1));
        w.keys[j] = kv.k + slot * kv.stride + head;
        w.values[j] = kv.v + slot * kv.stride + head;
    }
    for (int d = 0; d < a.dim; d += 16)
        for (int j = 0; j < kChunk; j += 16)
            transpose16(w.keys + j, d, w.columns + d * kChunk + j);
    const int common = shared_keys(s), next = base + kChunk;
    w.ahead = next < common;
    for (int j = 0; w.ahead && j < kChunk; ++j) {
        const size_t at = key_slot(s, 0, std::min(next + j, common - 1)) * kv.stride + head;
        w.next_keys[j] = kv.k + at;
        w.next_values[j] = kv.v + at;
    }
}

// Puts a row's own ancestors into the columns behind the shared ones.
static void load_own(const AttentionShape& a, const Segment& s, const Planes& kv, int kv_head,
                     int row, int base, int shared, int to, Workspace& w) {
    for (int j = shared; j < to; ++j) {
        const size_t at = key_slot(s, row, base + j) * kv.stride + static_cast<size_t>(kv_head) * a.dim;
        const float* key = kv.k + at;
        w.values[j] = kv.v + at;
        if (w.keys[j] == key) continue;
        w.keys[j] = key;
        for (int d = 0; d < a.dim; ++d) w.columns[d * kChunk + j] = key[d];
    }
}

// State of rows [rows.begin, rows.end) of a segment over one split of the positions.
static void attend_split(const AttentionShape& a, const Segment& s, const Planes& kv, int kv_head,
                         Range rows, int split, const State& state, Workspace& w) {
    const int group = a.heads / a.kv_heads, queries = (rows.end - rows.begin) * group;
    std::fill(state.max, state.max + queries, -std::numeric_limits<float>::infinity());
    std::fill(state.sum, state.sum + queries, 0.0f);
    std::fill(state.acc, state.acc + static_cast<size_t>(queries) * a.dim, 0.0f);
    const int common = shared_keys(s);
    for (int base = split * kSplit; base < (split + 1) * kSplit; base += kChunk) {
        const int shared = std::max(0, std::min(kChunk, common - base));
        for (int j = 0; j < kChunk; ++j) w.keys[j] = nullptr;
        bool loaded = w.ahead = false;
        for (int row = rows.begin; row < rows.end;) {
            const Seen r = seen(a, s, row, base);
            int end = row + 1;
            if (r.from < r.to) {
                if (!loaded && shared > 0) load_shared(a, s, kv, kv_head, base, shared, w);
                loaded = true;
                if (r.to > shared) load_own(a, s, kv, kv_head, row, base, shared, r.to, w);
                for (; end < rows.end && r.to <= shared; ++end) {
                    const Seen next = seen(a, s, end, base);
                    if (next.from != r.from || next.to != r.to) break;
                }
                attend_chunk(a, w, (row - rows.begin) * group, (end - row) * group, r.from, r.to,
                             state);
            }
            row = end;
        }
    }
}

// Where the queries of a block of rows lie; row 0 of `q` is the segment's first row.
static void point_queries(const AttentionShape& a, const float* q, size_t stride, int kv_head,
                          Range rows, Workspace& w) {
    const int group = a.heads / a.kv_heads;
    int at = 0;
    for (int row = rows.begin; row < rows.end; ++row)
        for (int h = 0; h < group; ++h)
            w.queries[at++] = q + row * stride + static_cast<size_t>(kv_head * group + h) * a.dim;
}

static void finish(const AttentionShape& a, const State& state, int query, float* out) {
    const float* acc = state.acc + static_cast<size_t>(query) * a.dim;
    const F16 total = F16::set(state.sum[query]);
    for (int d = 0; d < a.dim; d += 16) (F16::load(acc + d) / total).store(out + d);
}

}  // namespace dw
