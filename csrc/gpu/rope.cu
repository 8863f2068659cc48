// Rotary position embedding of q and k in one launch, bound by memory: both are read and written once.
//
// A thread has a fixed place in the head, a pair of vectors: those at i and i + rotary_dim / 2, which it rotates, or two behind
// rotary_dim, which it copies. It loads its cos and sin once for a position (batch, seq) and walks over heads of q or of k, with
// `heads_in_flight` heads' loads outstanding; mostly that is all of its heads.
#include "kernels/rope.h"

#include "gpu/device.h"
#include "gpu/rows.h"

namespace liger::gpu {
namespace {

template <class T, int VEC> struct RopeKernel {
  // Two blocks of 61 KB of loads on a multiprocessor: fewer heads in flight for more threads were measured to be slower.
  static constexpr int max_threads = launch::piece_threads, min_blocks = 2, heads_in_flight = launch::rope_heads_in_flight;
  struct Args {
    Rope rope;
    int lanes, q_slots, k_slots;  // of a position's threads: side by side in a head; heads at a time
  };
  // out = x * cos + pair * sin, for the lower and the upper vector, with the sine's sign in it.
  template <class Table> struct Rotation {
    Packed<Table, VEC> cos[2], sin[2];
  };

  static LIGER_DEVICE void run(const Args& args) {
    const Rope& a = args.rope;
    const int threads_per_position = args.lanes * (args.q_slots + args.k_slots), positions = block_threads() / threads_per_position;
    const int in_block = thread_id() / threads_per_position, within = thread_id() - in_block * threads_per_position;
    const int64_t position = block_id() * positions + in_block;
    if (in_block >= positions || position >= a.batch * a.seq) return;  // no collective follows
    const int64_t batch = quotient(position, a.seq), seq = position - batch * a.seq;
    const int slot = within / args.lanes;
    const bool of_q = slot < args.q_slots;
    // One by one: a reference to one of two arguments is an address, and puts them all into memory.
    const auto of = [&](auto member) { return of_q ? a.q.*member : a.k.*member; };
    const int step = of_q ? args.q_slots : args.k_slots, first = of_q ? slot : slot - args.q_slots;
    // From here on this thread's heads: `step` apart.
    const int count = (int(of(&RopeHeads::heads)) - first + step - 1) / step;
    const int64_t in_head = of(&RopeHeads::in_head), out_head = of(&RopeHeads::out_head), in_step = step * in_head,
                  out_step = step * out_head;
    const T* const in =
        static_cast<const T*>(of(&RopeHeads::in)) + (batch * of(&RopeHeads::in_batch) + seq * of(&RopeHeads::in_seq) + first * in_head);
    T* const out =
        static_cast<T*>(of(&RopeHeads::out)) + (batch * of(&RopeHeads::out_batch) + seq * of(&RopeHeads::out_seq) + first * out_head);
    const int64_t cos = batch * a.cos_batch + seq * a.cos_seq, sin = batch * a.sin_batch + seq * a.sin_seq;
    const int half = int(a.rotary_dim / 2), rotating = half / VEC, passing = int(a.head_dim - a.rotary_dim) / VEC,
              passing_pairs = (passing + 1) / 2;
    with_dtype(a.table_dtype, [&](auto tag) {
      using Table = std::remove_cvref_t<decltype(tag)>;
      for (int place = within - slot * args.lanes; place < rotating + passing_pairs; place += args.lanes) {
        const bool rotates = place < rotating;
        const int passed = place - rotating, low = rotates ? place * VEC : 2 * half + passed * VEC;
        const int pair = rotates ? half : passed + passing_pairs < passing ? passing_pairs * VEC : 0;
        // The first heads' loads are on their way before cos and sin are waited for.
        Loaded x;
        x.load(opaque(in + low), pair, in_step, count);
        Rotation<Table> r;
        if (rotates) load_rotation(r, a, cos, sin, low, low + half);
        for (int done = 0; done < count; done += heads_in_flight) {
          if (rotates) rotate(r, x, count - done);
          x.store(opaque(out + done * out_step + low), pair, out_step, count - done);
          const int next = done + heads_in_flight;
          if (next < count) x.load(opaque(in + next * in_step + low), pair, in_step, count - next);
        }
      }
    });
  }

 private:
  // Forward: low * cos[low] - high * sin[low], high * cos[high] + low * sin[high]; the transpose swaps the two sines and their signs.
  template <class Table>
  LIGER_DEVICE static void load_rotation(Rotation<Table>& r, const Rope& a, int64_t cos, int64_t sin, int low, int high) {
    const Table *cosines = opaque(static_cast<const Table*>(a.cos) + cos), *sines = opaque(static_cast<const Table*>(a.sin) + sin);
    load<Hint::constant>(r.cos[0], cosines + low);
    load<Hint::constant>(r.cos[1], cosines + high);
    load<Hint::constant>(r.sin[0], sines + (a.transpose ? high : low));
    load<Hint::constant>(r.sin[1], sines + (a.transpose ? low : high));
    if (a.transpose) r.sin[1].negate();
    else r.sin[0].negate();
  }
  // `pair`: the distance of a pair's vectors, 0 where there is no second one.
  struct Loaded {
    Packed<T, VEC> low[heads_in_flight], high[heads_in_flight];
    LIGER_DEVICE void load(const T* from, int pair, int64_t step, int count) {
#pragma unroll
      for (int h = 0; h < heads_in_flight; ++h) {
        if (h >= count) continue;
        gpu::load<Hint::stream>(low[h], from + h * step);
        if (pair) gpu::load<Hint::stream>(high[h], from + h * step + pair);
      }
    }
    LIGER_DEVICE void store(T* to, int pair, int64_t step, int count) const {
#pragma unroll
      for (int h = 0; h < heads_in_flight; ++h) {
        if (h >= count) continue;
        gpu::store<Hint::stream>(to + h * step, low[h]);
        if (pair) gpu::store<Hint::stream>(to + h * step + pair, high[h]);
      }
    }
  };
  template <class Table> LIGER_DEVICE static void rotate(const Rotation<Table>& r, Loaded& x, int count) {
#pragma unroll
    for (int h = 0; h < heads_in_flight; ++h) {
      if (h >= count) continue;
      float lower[VEC], upper[VEC];
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        lower[i] = x.low[h][i] * r.cos[0][i] + x.high[h][i] * r.sin[0][i];
        upper[i] = x.high[h][i] * r.cos[1][i] + x.low[h][i] * r.sin[1][i];
      }
      x.low[h].set(lower);
      x.high[h].set(upper);
    }
  }
};

bool whole_vectors(const void* data, int64_t vec, std::initializer_list<int64_t> offsets) {
  bool ok = reinterpret_cast<uintptr_t>(data) % 16 == 0;
  for (const int64_t offset : offsets) ok = ok && offset % vec == 0;
  return ok;
}

}  // namespace

void rope(const Rope& a, Stream stream) {
  if (a.batch * a.seq * a.head_dim == 0) return;
  const launch::DeviceProfile& device = device_profile(stream.device);
  const int64_t wide = 16 / size_of(a.dtype);
  const auto fits = [&](const RopeHeads& h) {
    return h.heads == 0 || (whole_vectors(h.in, wide, {h.in_batch, h.in_head, h.in_seq}) &&
                            whole_vectors(h.out, wide, {h.out_batch, h.out_head, h.out_seq}));
  };
  const bool vectors = fits(a.q) && fits(a.k) && a.head_dim % wide == 0 && (a.rotary_dim / 2) % wide == 0 &&
                       whole_vectors(a.cos, wide, {a.cos_batch, a.cos_seq}) && whole_vectors(a.sin, wide, {a.sin_batch, a.sin_seq});
  dispatch(a.dtype, [&](auto tag) {
    using T = std::remove_cvref_t<decltype(tag)>;
    const auto start = [&](auto vec) {
      constexpr int VEC = decltype(vec)::value;
      using Kernel = RopeKernel<T, VEC>;
      const int64_t positions = a.batch * a.seq;
      const launch::Knobs knobs =
          launch::knobs_of(device, launch::Tunable::rope, VEC, positions, a.head_dim, a.q.heads, a.k.heads, a.rotary_dim);
      const launch::RopePlan plan = launch::plan_rope_heads(device, positions, a.q.heads, a.k.heads, a.head_dim, a.rotary_dim, VEC, knobs);
      launch<Kernel>(plan.launch, {a, plan.lanes, plan.q_slots, plan.k_slots}, stream);
    };
    if (vectors) start(std::integral_constant<int, 16 / int(sizeof(T))>{});
    else start(std::integral_constant<int, 1>{});
  });
}

}  // namespace liger::gpu
