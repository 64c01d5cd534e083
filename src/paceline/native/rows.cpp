// Attention of one query token per row over a bfloat16 cache whose rows have different lengths; sums in float32.
//
// Idea.  A step of many short sequences does little arithmetic with each key and value, so what counts is to read those
// that a row has, once, and nothing else.
//
// * All heads that share a key head pass over its keys and values together.
// * While keys are read, the values behind them are asked for, and while values are read, the next head's keys.
// * Weights stay in float32; only the result is rounded to bfloat16.
// * Every sum has one order that depends on the row's own length alone.
//
// It knows neither Python nor torch.  Little-endian: the first of two neighbours is the lower half of a word.
// Letters: B batch, C head width, G heads that share a key head, M of them at once, N pairs of vectors of a head at once.

#include <memory>
#include <new>

#include "attention.h"
#include "team.h"

namespace {

constexpr int KEYS = MANY ? 4 : 2;  // keys whose scores are summed together
constexpr int PAIRS = MANY ? 2 : 1;  // pairs of vectors of a value held at once
constexpr int64_t RUNS = 4;          // places that the memory is asked for in turn; measured
constexpr int64_t NEAR = 1 << 18;    // bytes asked for ahead: with what is being read, less than a second-level cache
typedef uint32_t uvec __attribute__((vector_size(4 * W)));

struct Rows {
  int64_t batch, key_heads, group, width, view, threads;
  int64_t row_step, head_step;     // of keys and values, in numbers
  const uint16_t *queries;         // [B, key heads * G, C] bfloat16
  const uint16_t *keys, *values;   // [B, key heads, view, C] bfloat16, a head's rows one behind the other
  const int64_t* counts;           // [B] slots that a row's query sees, 1 to view
  uint16_t* out;                   // [B, key heads * G, C] bfloat16
  Team team;
  float scale;
};

uvec pairs(const uint16_t* p) { uvec v; memcpy(&v, p, sizeof v); return v; }
vec firsts(uvec v) { return (vec)(v << 16); }
vec seconds(uvec v) { return (vec)(v & 0xffff0000u); }
uint16_t rounded(float x) {  // to the nearest, ties to even
  uint32_t u; memcpy(&u, &x, sizeof u);
  return x == x ? (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16) : 0x7fc0;
}

// Where pair of vectors j of a head starts: the last one is moved back so as to end with the head.
int64_t start(int64_t j, int64_t width) { return std::min(j * 2 * W, width - 2 * W); }
int64_t pairs_of(int64_t width) { return (width + 2 * W - 1) / (2 * W); }

// turned [pairs, 2, W]: first and second neighbours of a query; zero where the last pair repeats numbers.
void turn_query(const uint16_t* query, int64_t width, float* turned) {
  for (int64_t j = 0; j < pairs_of(width); j++, turned += 2 * W) {
    uvec v = pairs(query + start(j, width));
    store(turned, firsts(v)); store(turned + W, seconds(v));
    for (int64_t i = 0; i < (j * 2 * W - start(j, width)) / 2; i++) turned[i] = turned[W + i] = 0.f;
  }
}

// Scores of KEYS keys from `at` on; those from `count` on repeat the last.  Query m's turned numbers lie in q[m].q.
template <int M> inline void pair_scores(const Query* q, const uint16_t* keys, int64_t width, int64_t at, int64_t count) {
  vec acc[M * KEYS];
  UNROLL for (int i = 0; i < M * KEYS; i++) acc[i] = vec{};
  const uint16_t* key[KEYS];
  UNROLL for (int k = 0; k < KEYS; k++) key[k] = keys + std::min(at + k, count - 1) * width;
  for (int64_t j = 0; j < pairs_of(width); j++) {
    vec a[M], b[M];
    UNROLL for (int m = 0; m < M; m++) { a[m] = load(q[m].q + j * 2 * W); b[m] = load(q[m].q + j * 2 * W + W); }
    UNROLL for (int k = 0; k < KEYS; k++) {
      uvec v = pairs(key[k] + start(j, width));
      vec first = firsts(v), second = seconds(v);
      UNROLL for (int m = 0; m < M; m++) { acc[m * KEYS + k] += first * a[m]; acc[m * KEYS + k] += second * b[m]; }
    }
  }
  float sums[M * KEYS];
  sum_lanes<M * KEYS>(acc, sums);
  UNROLL for (int m = 0; m < M; m++) memcpy(q[m].scores + at, sums + m * KEYS, sizeof(float) * KEYS);
}

// Rows to ask the memory for meanwhile, from several places at once: one run of addresses alone leaves it idle.
struct Stream {
  const uint16_t* at;
  int64_t run;  // rows of each of RUNS runs
  Stream(const uint16_t* at, int64_t rows, int64_t width) : at(at), run(std::min(rows, NEAR / (2 * width)) / RUNS) {}
};
// Always inline: a function that only prefetches counts as one without effect, and its call is dropped.
__attribute__((always_inline)) inline void ask(const Stream& s, int64_t i, int64_t width) {
  if (i < s.run * RUNS)
    for (int64_t k = 0; k < width; k += 32) __builtin_prefetch(s.at + (i % RUNS * s.run + i / RUNS) * width + k, 0, 2);
}

// Weighted sum of values, for N pairs of vectors from pair j on.
template <int M, int N>
inline void pair_values(const Query* q, const uint16_t* values, int64_t width, int64_t count, int64_t j, Stream next) {
  vec low[M][N], high[M][N];
  UNROLL for (int m = 0; m < M; m++) UNROLL for (int n = 0; n < N; n++) low[m][n] = high[m][n] = vec{};
  for (int64_t i = 0; i < count; i++) {
    ask(next, i, width);
    vec first[N], second[N];
    UNROLL for (int n = 0; n < N; n++) {
      uvec v = pairs(values + i * width + start(j + n, width));
      first[n] = firsts(v); second[n] = seconds(v);
    }
    UNROLL for (int m = 0; m < M; m++) {
      float p = q[m].scores[i];
      UNROLL for (int n = 0; n < N; n++) { low[m][n] += first[n] * p; high[m][n] += second[n] * p; }
    }
  }
  UNROLL for (int m = 0; m < M; m++) UNROLL for (int n = 0; n < N; n++) {
    float* out = q[m].out + start(j + n, width);
    vec a = low[m][n] * q[m].inverse, b = high[m][n] * q[m].inverse;
    store(out, mix<Zip<0>>(a, b)); store(out + W, mix<Zip<W / 2>>(a, b));
  }
}
template <int M> void pair_values(const Query* q, const uint16_t* values, int64_t width, int64_t count, Stream next) {
  int64_t j = 0;
  for (; j + PAIRS <= pairs_of(width); j += PAIRS, next.run = 0) pair_values<M, PAIRS>(q, values, width, count, j, next);
  for (; j < pairs_of(width); j++, next.run = 0) pair_values<M, 1>(q, values, width, count, j, next);
}

int64_t padded(int64_t count) { return (count + W - 1) / W * W + KEYS; }
int64_t scratch_of(const Rows& r, int64_t longest) {
  return (r.group * (padded(longest) + (pairs_of(r.width) * 2 + 1) * W + r.width) + 15) / 16 * 16;
}

// One row and one key head.  next: keys that come behind.
void attend_row(const Rows& r, int64_t b, int64_t h, Stream next, Query* queries, float* scratch) {
  const int64_t C = r.width, G = r.group, count = r.counts[b], first = (b * r.key_heads + h) * G * C;
  const int64_t line = padded(count), turned = pairs_of(C) * 2 * W, place = b * r.row_step + h * r.head_step;
  const uint16_t *keys = r.keys + place, *values = r.values + place;
  float *query = scratch, *scores = query + G * turned, *out = scores + G * line;
  for (int64_t g = 0; g < G; g++) {
    turn_query(r.queries + first + g * C, C, query + g * turned);
    queries[g] = Query{query + g * turned, out + g * C, scores + g * line, nullptr, 0, 0.f};
  }
  const Stream behind(values, count, C);
  for (int64_t at = 0; at < count; at += KEYS) {
    UNROLL for (int k = 0; k < KEYS; k++) ask(behind, at + k, C);
    int64_t g = 0;
    for (; g + 3 <= G; g += 3) pair_scores<3>(queries + g, keys, C, at, count);
    for (; g < G; g++) pair_scores<1>(queries + g, keys, C, at, count);
  }
  for (int64_t g = 0; g < G; g++) weights_of(queries[g], 0, count, count, r.scale);
  int64_t g = 0;
  for (; g + 3 <= G; g += 3, next.run = 0) pair_values<3>(queries + g, values, C, count, next);
  for (; g < G; g++, next.run = 0) pair_values<1>(queries + g, values, C, count, next);
  for (int64_t i = 0; i < G * C; i++) r.out[first + i] = rounded(out[i]);
}

struct RowsJob { const Rows& r; float* scratch; int64_t scratch_of_thread; Query* queries; };

void walk(const RowsJob& job, int t, int T) {
  const Rows& r = job.r;
  const Range mine = share(r.batch * r.key_heads, 1, t, T);
  for (int64_t u = mine.from; u < mine.to; u++) {
    int64_t b = u / r.key_heads, h = u % r.key_heads, after = std::min(u + 1, mine.to - 1), row = after / r.key_heads;
    const Stream next(r.keys + row * r.row_step + after % r.key_heads * r.head_step, after == u ? 0 : r.counts[row], r.width);
    attend_row(r, b, h, next, job.queries + t * r.group, job.scratch + t * job.scratch_of_thread);
  }
}

}  // namespace

// Size of the struct and numbers of the smallest head, so that Python can tell a library that does not fit it.
extern "C" int64_t paceline_rows_layout() { return (int64_t)sizeof(Rows) * 1000 + 2 * W; }

// Writes out.  Returns 0; 1 for a row that sees no slot or more than are shown; 2 for want of memory.
extern "C" int paceline_rows(const Rows* r) {
  int64_t longest = 0;
  for (int64_t b = 0; b < r->batch; b++) {
    if (r->counts[b] < 1 || r->counts[b] > r->view) return 1;
    longest = std::max(longest, r->counts[b]);
  }
  try {
    const int64_t T = r->threads, floats = scratch_of(*r, longest);
    std::unique_ptr<float[]> memory(new float[T * floats + 16]);
    std::unique_ptr<Query[]> queries(new Query[T * r->group]);
    RowsJob job{*r, (float*)(((uintptr_t)memory.get() + 63) / 64 * 64), floats, queries.get()};
    in_team(job, T, r->team);
  } catch (const std::bad_alloc&) { return 2; }
  return 0;
}
