// Attention of a tree of nodes behind a prefix, by lengths and a node mask; sums go in order of position.
// Letters: G heads that share a key head, M queries at once.
#pragma once

#include <cmath>
#include <vector>

#include "call.h"
#include "vectors.h"

constexpr int CHUNK = 48;              // queries of one key head that share a pass over the keys
constexpr int PV = MANY ? 4 : 2;       // vectors of a head computed together

// Per row of B * N: the nodes it sees, ascending, those above counted first.  A chain (node j sees exactly 0..j, at
// depth j) needs no list.
struct Trees {
  std::vector<int32_t> seen, count;
  std::vector<uint8_t> chain;
  int64_t line;  // nodes that a row may see
  explicit Trees(const Call& c) : count(c.batch * c.nodes), chain(c.batch, c.above == 0), line(c.above + c.nodes) {
    seen.resize(c.batch * c.nodes * line);
    for (int64_t r = 0; r < c.batch * c.nodes; r++) {
      int32_t found = 0;
      for (int64_t j = 0; j < line; j++)
        if (c.mask[r * line + j]) seen[r * line + found++] = (int32_t)j;
      count[r] = found;
      int64_t own = r % c.nodes;
      if (found != own + 1 || seen[r * line + own] != own || c.depths[r] != own) chain[r / c.nodes] = 0;
    }
  }
};

struct Query {
  const float* q;
  float *out, *scores;   // scores of keys in order of position, from the chunk's first slot on
  const int32_t* nodes;  // tree nodes it sees behind the prefix, in order; null for a chain
  int num_nodes;
  float inverse;         // 1 / sum of the weights
};

template <int M> static inline void scores_of(const Query* q, const float* turned, int64_t width, int64_t at) {
  vec acc[M];
  UNROLL for (int m = 0; m < M; m++) acc[m] = vec{};
  for (int64_t d = 0; d < width; d++) {
    vec key = load(turned + d * W);
    UNROLL for (int m = 0; m < M; m++) acc[m] += key * q[m].q[d];
  }
  UNROLL for (int m = 0; m < M; m++) store(q[m].scores + at, acc[m]);
}

// turned [width, W] = W keys, turned; keys from `end` on repeat the last one.
static inline void turn_keys(const float* keys, int64_t slot, int64_t end, int64_t width, float* turned) {
  for (int64_t d = 0; d < width; d += W) {
    vec v[W], w[W];
    UNROLL for (int i = 0; i < W; i++) v[i] = load(keys + std::min(slot + i, end - 1) * width + d);
    UNROLL for (int step = 1; step < W; step *= 2) {
      UNROLL for (int i = 0; i < W / 2; i++) {
        w[2 * i] = mix<Zip<0>>(v[i], v[i + W / 2]);
        w[2 * i + 1] = mix<Zip<W / 2>>(v[i], v[i + W / 2]);
      }
      UNROLL for (int i = 0; i < W; i++) v[i] = w[i];
    }
    UNROLL for (int i = 0; i < W; i++) store(turned + (d + i) * W, v[i]);
  }
}

// Scores become weights (not yet divided by their sum): -inf below `first`, [first, count) kept, zero up to `end`.
static inline void weights_of(Query& q, int64_t first, int64_t count, int64_t end, float scale) {
  float* s = q.scores;
  int64_t stop = (count + W - 1) / W * W, low = first / W * W;
  std::fill(s + low, s + first, -INFINITY);
  std::fill(s + count, s + stop, -INFINITY);
  vec best = vec{} - INFINITY, total = vec{};
  for (int64_t i = low; i < stop; i += W) { vec a = load(s + i) * scale; store(s + i, a); best = a > best ? a : best; }
  float top = best[0];
  for (int i = 1; i < W; i++) top = std::max(top, (float)best[i]);
  for (int64_t i = low; i < stop; i += W) {
    vec d = load(s + i) - top, e = exp_of(d);
    e = d < -80.f ? vec{} : e;
    store(s + i, e); total += e;
  }
  std::fill(s, s + low, 0.f);
  if (stop < end) std::fill(s + stop, s + end, 0.f);
  q.inverse = 1.f / sum(total);
}

// out = weighted sum of values over slots [0, end) (from the chunk's first slot), then over each query's own nodes.
template <int M, int N>
static inline void values_of(const Query* q, const float* values, int64_t width, int64_t end, const float* node_values, int64_t column) {
  vec acc[M][N];
  UNROLL for (int m = 0; m < M; m++) UNROLL for (int j = 0; j < N; j++) acc[m][j] = vec{};
  for (int64_t i = 0; i < end; i++) {
    vec v[N];
    UNROLL for (int j = 0; j < N; j++) v[j] = load(values + i * width + column + j * W);
    UNROLL for (int m = 0; m < M; m++) { float p = q[m].scores[i]; UNROLL for (int j = 0; j < N; j++) acc[m][j] += v[j] * p; }
  }
  UNROLL for (int m = 0; m < M; m++) {
    for (int i = 0; i < q[m].num_nodes; i++) {
      const float* value = node_values + q[m].nodes[i] * width + column; float p = q[m].scores[end + i];
      UNROLL for (int j = 0; j < N; j++) acc[m][j] += load(value + j * W) * p;
    }
    UNROLL for (int j = 0; j < N; j++) store(q[m].out + column + j * W, acc[m][j] * q[m].inverse);
  }
}
template <int M> static void values_of(const Query* q, const float* values, int64_t width, int64_t end, const float* node_values) {
  int64_t column = 0;
  for (; column + PV * W <= width; column += PV * W) values_of<M, PV>(q, values, width, end, node_values, column);
  for (; column < width; column += W) values_of<M, 1>(q, values, width, end, node_values, column);
}

// Queries [from, to) of row b and key head h; query m is node m / G, head m % G of those that share the key head.
// A sliding window asks for the depths of all nodes, so it takes no nodes above.
static void attend(const Model& m, const Call& c, const Layer& layer, const Trees& trees, const float* keys, const float* values,
                   const float* q, float* out, int64_t b, int64_t h, int64_t from, int64_t to, float* scratch) {
  const int64_t C = m.width, G = m.heads / m.key_heads, N = c.nodes, length = c.lengths[b], count = to - from;
  const bool chain = trees.chain[b];
  auto oldest = [&](int64_t node) {  // first position that the node may see
    return layer.window ? std::max<int64_t>(0, length + c.depths[b * N + node] - layer.window + 1) : 0;
  };
  int64_t first = length;
  for (int64_t node = from / G; node <= (to - 1) / G; node++) first = std::min(first, oldest(node));
  first = first / W * W;  // a position keeps its lane whatever the window
  const int64_t end = length + (chain ? (to - 1) / G + 1 : trees.line), common = (chain ? end : length) - first;
  const int64_t line = (end - first + W - 1) / W * W + W;
  float* turned = scratch; scratch += C * W;
  Query queries[CHUNK];
  for (int64_t i = 0; i < count; i++) {
    int64_t row = b * N + (from + i) / G, at = row * m.heads * C + (h * G + (from + i) % G) * C;
    queries[i] = Query{q + at, out + at, scratch + i * line, nullptr, 0, 0.f};
  }
  for (int64_t slot = first; slot < end; slot += W) {
    turn_keys(keys, slot, end, C, turned);
    int64_t i = 0;
    for (; i + 12 <= count; i += 12) scores_of<12>(queries + i, turned, C, slot - first);
    for (; i + 3 <= count; i += 3) scores_of<3>(queries + i, turned, C, slot - first);
    for (; i < count; i++) scores_of<1>(queries + i, turned, C, slot - first);
  }
  for (int64_t i = 0; i < count; i++) {
    Query& one = queries[i];
    int64_t node = (from + i) / G, row = b * N + node, low = std::max(oldest(node) - first, (int64_t)0), keep;
    if (chain) keep = length + node + 1 - first;
    else {  // close the gaps between the node's ancestors: its scores then stand as if the path were committed
      const int32_t* seen = trees.seen.data() + row * trees.line;
      int32_t total = trees.count[row], skip = 0;
      while (layer.window && skip < total && c.depths[b * N + seen[skip]] <= c.depths[row] - layer.window) skip++;
      one.nodes = seen + skip; one.num_nodes = total - skip;
      for (int32_t k = 0; k < one.num_nodes; k++) one.scores[common + k] = one.scores[common + one.nodes[k]];
      low = std::min(low, common);
      keep = common + one.num_nodes;
    }
    weights_of(one, low, keep, common, m.scale);
  }
  values += first * C;
  const float* node_values = values + common * C;
  int64_t i = 0;
  for (; i + 6 <= count; i += 6) values_of<6>(queries + i, values, C, common, node_values);
  for (; i + 3 <= count; i += 3) values_of<3>(queries + i, values, C, common, node_values);
  for (; i < count; i++) values_of<1>(queries + i, values, C, common, node_values);
}
