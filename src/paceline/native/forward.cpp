// One forward call of a Llama-shaped decoder over a static key/value cache, in float32, for 1 to some hundred rows.
//
// Idea.  A verify call of a few rows reads every weight once and does little arithmetic, so what counts is to stream the
// weights and to lose no time in between.  All threads walk through the layers together in one parallel region.
//
// * Weights are read where the model keeps them, row-major [outputs, inputs]: nothing is packed, nothing is held twice.
// * Every sum has one order that depends neither on the number of rows nor on the row's place in a tree: a product's
//   terms go in order of the inputs; keys go in order of their position, a node's ancestors following its prefix as
//   they would if they were committed.  So a node's logits are the same bits scored alone, in a chain, or in a tree.
// * Attention reads lengths and a node mask, not a [rows, slots] mask; slots nobody may see are never touched.
//
// A draft's layer is the same walk: its residual starts at given features, and it reads the embedding beside them.
//
// It knows neither Python nor torch.
// Compile without -ffast-math: infinities mark what is masked, and the order of sums is meant.

#include <atomic>
#include <memory>
#include <new>

#include "attention.h"
#include "product.h"
#include "team.h"

namespace {

// All threads of a call meet here between two steps.
class Barrier {
 public:
  void wait(int T) {
    if (T == 1) return;
    int phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == T - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++)
      if (spins < 2000) pause(); else std::this_thread::yield();  // somebody else may need the core
  }

 private:
  static void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
  }
  std::atomic<int> arrived_{0}, phase_{0};
};

// How many numbers of a row q, k and v read.
int64_t inputs(const Model& m) { return m.embed_norm ? 2 * m.hidden : m.hidden; }

// The activations of a call: rows [n, ...] of every step, then attention's scratch of each thread.
struct Work {
  std::unique_ptr<float[]> memory;
  float *x, *normed, *q, *k, *v, *mixed, *gate, *up, *scratch;
  int64_t scratch_of_thread;

  Work(const Model& m, const Call& c) {
    int64_t n = c.batch * c.nodes, A = m.heads * m.width, KV = m.key_heads * m.width, longest = 0;
    for (int64_t b = 0; b < c.batch; b++) longest = std::max(longest, c.lengths[b]);
    scratch_of_thread = m.width * W + std::min<int64_t>(CHUNK, c.nodes * m.heads / m.key_heads) * (longest + c.above + c.nodes + 3 * W);
    scratch_of_thread = (scratch_of_thread + 15) / 16 * 16;
    int64_t sizes[] = {n * m.hidden, std::max(n * inputs(m), c.wanted * m.hidden), n * A, n * KV, n * KV, n * A, n * m.inner, n * m.inner, c.threads * scratch_of_thread};
    float** places[] = {&x, &normed, &q, &k, &v, &mixed, &gate, &up, &scratch};
    int64_t total = 0;
    for (int64_t size : sizes) total += size;
    memory.reset(new float[total + 16]);
    float* at = (float*)(((uintptr_t)memory.get() + 63) / 64 * 64);  // a vector then never straddles two cache lines
    for (int i = 0; i < 9; i++) *places[i] = at, at += sizes[i];
  }
};

struct Job { const Model& m; const Call& c; const Trees& trees; Work& work; Barrier barrier; };

// Normalise (where the family does) and rotate the heads of q and k; put k and v into their slots.
void rotate_and_store(Job& job, const Layer& layer, int64_t index, int t, int T) {
  const Model& m = job.m; const Call& c = job.c;
  const int64_t C = m.width, half = C / 2, heads = m.heads + 2 * m.key_heads;
  Range mine = share(c.batch * c.nodes * heads, 1, t, T);
  for (int64_t u = mine.from; u < mine.to; u++) {
    int64_t r = u / heads, head = u % heads, b = r / c.nodes, key_head = head - m.heads;
    bool is_query = head < m.heads, is_value = head >= m.heads + m.key_heads;
    if (is_value) key_head -= m.key_heads;
    float* a = is_query ? job.work.q + (r * m.heads + head) * C : (is_value ? job.work.v : job.work.k) + (r * m.key_heads + key_head) * C;
    if (!is_value) {
      const float* norm = is_query ? layer.q_norm : layer.k_norm;
      if (norm) rms_norm(a, norm, a, C, m.eps);
      int64_t position = c.lengths[b] + c.depths[r];
      const float *cos = c.cos + position * C, *sin = c.sin + position * C;
      for (int64_t i = 0; i < half; i++) {
        float low = a[i], high = a[i + half];
        a[i] = low * cos[i] - high * sin[i];
        a[i + half] = high * cos[i + half] + low * sin[i + half];
      }
    }
    if (is_query) continue;
    float* buffer = is_value ? c.values[index] : c.keys[index];
    memcpy(buffer + ((b * m.key_heads + key_head) * c.capacity + c.lengths[b] + c.above + r % c.nodes) * C, a, C * sizeof(float));
  }
}

void attend_all(Job& job, const Layer& layer, int64_t index, int t, int T) {
  const Model& m = job.m; const Call& c = job.c;
  int64_t queries = c.nodes * m.heads / m.key_heads, chunks = (queries + CHUNK - 1) / CHUNK;
  if (c.batch * m.key_heads * chunks < 4 * T) chunks = std::min(queries, chunks * T);  // something for every thread
  Range mine = share(c.batch * m.key_heads * chunks, 1, t, T);
  for (int64_t u = mine.from; u < mine.to; u++) {
    int64_t b = u / chunks / m.key_heads, h = u / chunks % m.key_heads, part = u % chunks;
    int64_t at = (b * m.key_heads + h) * c.capacity * m.width;
    attend(m, c, layer, job.trees, c.keys[index] + at, c.values[index] + at, job.work.q, job.work.mixed, b, h,
           queries * part / chunks, queries * (part + 1) / chunks, job.work.scratch + t * job.work.scratch_of_thread);
  }
}

// gate = silu(gate) * up over the columns of `part`, which start and end at multiples of 16.
void gate_by_silu(float* gate, const float* up, int64_t n, int64_t inner, Range part) {
  for (int64_t r = 0; r < n; r++)
    for (int64_t i = r * inner + part.from; i < r * inner + part.to; i += W) {
      vec g = load(gate + i), m = -g;
      m = m > 88.f ? vec{} + 88.f : m;
      store(gate + i, g * load(up + i) / (exp_of(m) + 1.f));
    }
}

// ldy: floats from a row of y to the next.
void norm_rows(const float* x, const float* weight, float* y, int64_t ldy, int64_t n, const Model& m, int t, int T) {
  Range mine = share(n, 1, t, T);
  for (int64_t r = mine.from; r < mine.to; r++) rms_norm(x + r * m.hidden, weight, y + r * ldy, m.hidden, m.eps);
}

// What q, k and v read: norm1(x), behind the normed embedding where the layer is a draft's.
void norm_inputs(Job& job, const Layer& l, int t, int T) {
  const Model& m = job.m; const Call& c = job.c;
  const int64_t H = m.hidden, D = inputs(m), n = c.batch * c.nodes;
  norm_rows(job.work.x, l.norm1, job.work.normed + (D - H), D, n, m, t, T);
  Range mine = share(m.embed_norm ? n : 0, 1, t, T);
  for (int64_t r = mine.from; r < mine.to; r++) rms_norm(m.embed + c.tokens[r] * H, m.embed_norm, job.work.normed + r * D, H, m.eps);
}

// What thread t of T does.
void walk(Job& job, int t, int T) {
  const Model& m = job.m; const Call& c = job.c; Work& w = job.work;
  const int64_t n = c.batch * c.nodes, H = m.hidden, D = inputs(m), A = m.heads * m.width, KV = m.key_heads * m.width;
  auto meet = [&] { job.barrier.wait(T); };
  const Range embed = share(n, 1, t, T), q = share(A, BLOCK, t, T), kv = share(KV, BLOCK, t, T), h = share(H, BLOCK, t, T);
  const Range inner = share(m.inner, 2 * BLOCK, t, T), vocab = share(m.vocab, BLOCK, t, T);
  for (int64_t r = embed.from; r < embed.to; r++) 
    memcpy(w.x + r * H, c.features ? c.features + r * H : m.embed + c.tokens[r] * H, H * sizeof(float));
  for (int64_t i = 0; i < m.layers; i++) {
    const Layer& l = m.layer[i];
    const float* next = i + 1 < m.layers ? m.layer[i + 1].q.weight + q.from * D : m.head.weight + vocab.from * H;
    norm_inputs(job, l, t, T);
    meet();
    product(w.normed, n, D, l.q, q, w.q, A, false, l.k.weight + kv.from * D, D);
    product(w.normed, n, D, l.k, kv, w.k, KV, false, l.v.weight + kv.from * D, D);
    product(w.normed, n, D, l.v, kv, w.v, KV, false, l.o.weight + h.from * A, A);
    meet();
    rotate_and_store(job, l, i, t, T);
    meet();
    attend_all(job, l, i, t, T);
    meet();
    product(w.mixed, n, A, l.o, h, w.x, H, true, l.gate.weight + inner.from * H, H);
    meet();
    norm_rows(w.x, l.norm2, w.normed, H, n, m, t, T);
    meet();
    product(w.normed, n, H, l.gate, inner, w.gate, m.inner, false, l.up.weight + inner.from * H, H);
    product(w.normed, n, H, l.up, inner, w.up, m.inner, false, l.down.weight + h.from * m.inner, m.inner);
    gate_by_silu(w.gate, w.up, n, m.inner, inner);
    meet();
    product(w.gate, n, m.inner, l.down, h, w.x, H, true, next, i + 1 < m.layers ? D : H);
    meet();
    for (int64_t k = 0; k < c.taps; k++)
      if (c.tap_layers[k] == i)
        for (int64_t r = embed.from; r < embed.to; r++) memcpy(c.tapped + (r * c.taps + k) * H, w.x + r * H, H * sizeof(float));
  }
  for (int64_t k = 0; k < c.taps; k++)  // the state after the final norm stands behind the layers
    if (c.tap_layers[k] == m.layers)
      for (int64_t r = embed.from; r < embed.to; r++) rms_norm(w.x + r * H, m.norm, c.tapped + (r * c.taps + k) * H, H, m.eps);
  Range wanted = share(c.wanted, 1, t, T);
  for (int64_t r = wanted.from; r < wanted.to; r++) rms_norm(w.x + c.rows[r] * H, m.norm, w.normed + r * H, H, m.eps);
  meet();
  product(w.normed, c.wanted, H, m.head, vocab, c.logits, m.vocab, false, nullptr, 0);
}

}  // namespace

// Sizes of the structs and floats of a vector, so that Python can tell a library that does not fit it.
extern "C" int64_t paceline_layout() {
  return (int64_t)sizeof(Layer) * 1000000000 + (int64_t)sizeof(Model) * 1000000 + (int64_t)sizeof(Call) * 1000 + W;
}

// Writes keys, values, logits and taps.  Returns 0; 1 for a token outside the vocabulary; 2 for want of memory; 3 for a
// depth that no node of such a tree can have.
extern "C" int paceline_forward(const Model* m, const Call* c) {
  for (int64_t r = 0; r < c->batch * c->nodes; r++) {
    if (c->tokens[r] < 0 || c->tokens[r] >= m->words) return 1;
    if (c->depths[r] < 0 || c->depths[r] >= c->above + c->nodes) return 3;
  }
  try {
    Trees trees(*c);
    Work work(*m, *c);
    Job job{*m, *c, trees, work, {}};
    in_team(job, c->threads, c->team);
  } catch (const std::bad_alloc&) { return 2; }
  return 0;
}
