// A step's attention cut into pieces for threads, and their results put together again.
#pragma once

#include <vector>

#include "attention.hpp"

namespace dw {

// A block of rows, a key head, and one split of the positions or (few rows: all splits apart, so
// that threads can share them) all of them.
struct Piece {
    int segment, kv_head, split, splits;
    Range rows;
};

// All of a step's attention, cut into pieces for threads.
struct AttentionPlan {
    AttentionShape shape;
    const Segment* segments;
    std::vector<Piece> pieces;
    std::vector<int> divided;  // the first pieces of those whose splits lie apart
    size_t piece_floats;
    bool by_split;
};

static AttentionPlan plan_attention(const AttentionShape& shape, const Segment* segments,
                                    int num_segments) {
    int rows = 0, widest = 1;
    for (int i = 0; i < num_segments; ++i) {
        rows += segments[i].rows;
        widest = std::max(widest, static_cast<int>(segments[i].rows));
    }
    const int group = shape.heads / shape.kv_heads;
    const int block = std::min(std::max(1, kMaxQueries / group), widest);
    AttentionPlan p{shape, segments, {}, {}, state_floats(block * group, shape.dim),
                    rows <= 2 * kMaxRows};
    for (int i = 0; i < num_segments; ++i)
        for (int row = 0; row < segments[i].rows; row += block) {
            const Range range{row, std::min(static_cast<int>(segments[i].rows), row + block)};
            int longest = 0;
            for (int r = range.begin; r < range.end; ++r)
                longest = std::max(longest, path_length(segments[i], r));
            const int splits = ceil_div(longest, kSplit);
            for (int h = 0; h < shape.kv_heads; ++h) {
                if (p.by_split && splits > 1) p.divided.push_back(static_cast<int>(p.pieces.size()));
                for (int s = 0; s < (p.by_split ? splits : 1); ++s)
                    p.pieces.push_back({i, h, s, splits, range});
            }
        }
    return p;
}

// Floats of memory that `attend_piece` needs: a state per piece, or two per thread.
DW_INLINE size_t plan_floats(const AttentionPlan& p, int threads) {
    return p.piece_floats * (p.by_split ? p.pieces.size() : 2 * static_cast<size_t>(threads));
}

DW_INLINE int num_queries(const AttentionPlan& p, const Piece& piece) {
    return (piece.rows.end - piece.rows.begin) * (p.shape.heads / p.shape.kv_heads);
}

static void write_piece(const AttentionPlan& p, const Piece& piece, const State& state, float* out,
                        size_t out_stride) {
    const int group = p.shape.heads / p.shape.kv_heads;
    const int row0 = p.segments[piece.segment].row0 + piece.rows.begin;
    for (int q = 0; q < num_queries(p, piece); ++q)
        finish(p.shape, state, q,
               out + (row0 + q / group) * out_stride +
                   static_cast<size_t>(piece.kv_head * group + q % group) * p.shape.dim);
}

static void merge_all(const AttentionPlan& p, const Piece& piece, const State& a, const State& b) {
    for (int q = 0; q < num_queries(p, piece); ++q) merge(a, b, q, p.shape.dim);
}

// First stage of a step's attention: one piece.
static void attend_piece(const AttentionPlan& p, int index, const Planes& kv, const float* q,
                         size_t q_stride, float* out, size_t out_stride, float* memory, int thread,
                         Workspace& w) {
    const Piece& piece = p.pieces[index];
    const Segment& s = p.segments[piece.segment];
    const int queries = num_queries(p, piece);
    point_queries(p.shape, q + s.row0 * q_stride, q_stride, piece.kv_head, piece.rows, w);
    const size_t slot = p.by_split ? index : 2 * thread;
    const State state = state_at(memory + slot * p.piece_floats, queries);
    attend_split(p.shape, s, kv, piece.kv_head, piece.rows, piece.split, state, w);
    if (p.by_split && piece.splits > 1) return;
    const State next = state_at(memory + (slot + 1) * p.piece_floats, queries);
    for (int split = 1; split < piece.splits; ++split) {
        attend_split(p.shape, s, kv, piece.kv_head, piece.rows, split, next, w);
        merge_all(p, piece, state, next);
    }
    write_piece(p, piece, state, out, out_stride);
}

// Second stage: merges one of the divided pieces, in the order of the splits.
static void merge_piece(const AttentionPlan& p, int nth, float* out, size_t out_stride,
                        float* memory) {
    const int index = p.divided[nth];
    const Piece& piece = p.pieces[index];
    const int queries = num_queries(p, piece);
    const State state = state_at(memory + index * p.piece_floats, queries);
    for (int s = 1; s < piece.splits; ++s)
        merge_all(p, piece, state, state_at(memory + (index + s) * p.piece_floats, queries));
    write_piece(p, piece, state, out, out_stride);
}

}  // namespace dw
