// Rotary position embedding of q and k in one launch, bound by memory: both are read and written once.
//
// A thread has a fixed place in the head: the vectors at i and i + rotary_dim / 2, which it rotates, or one vector behind
// rotary_dim, which it copies (a rotation by cos 1, sin 0 with nothing to pair with). It loads its cos and sin once for a position
// (batch, seq) and walks over heads of q or of k, with `heads_in_flight` heads' loads outstanding; mostly that is all of its heads.
#include "kernels/rope.h"

#include "gpu/device.h"
#include "gpu/rows.h"

namespace liger::gpu {
namespace {

template <class T, int VEC>
struct RopeKernel {  // two blocks of 61 KB of loads on a multiprocessor
  static constexpr int max_threads = 256, min_blocks = 2, heads_in_flight = 4;
  struct Args {
    Rope rope;
    int lanes, q_slots, k_slots;  // of a position's threads: side by side in a head; heads at a time
  };
  struct Rotation {  // out = x * direct + pair * crossed, for the lower and the upper vector
    float direct[2][VEC], crossed[2][VEC];
  };

  static LIGER_DEVICE void run(const Args& args) {
    const Rope& a = args.rope;
    const int threads_per_position = args.lanes * (args.q_slots + args.k_slots), positions = block_threads() / threads_per_position;
    const int in_block = thread_id() / threads_per_position, within = thread_id() - in_block * threads_per_position;
    const int64_t position = block_id() * positions + in_block;
    if (in_block >= positions || position >= a.batch * a.seq) return;  // no collective follows
    const int64_t batch = quotient(position, a.seq), seq = position - batch * a.seq;
    const int64_t half = a.rotary_dim / 2, rotating = half / VEC, places = rotating + (a.head_dim - a.rotary_dim) / VEC;
    const int slot = within / args.lanes;
    for (int64_t place = within - slot * args.lanes; place < places; place += args.lanes) {
      const bool rotates = place < rotating;
      const int64_t low = rotates ? place * VEC : a.rotary_dim + (place - rotating) * VEC;
      const bool of_q = slot < args.q_slots;
      const RopeHeads& heads = of_q ? a.q : a.k;
      const int step = of_q ? args.q_slots : args.k_slots;
      int64_t head = of_q ? slot : slot - args.q_slots;
      const T* const in = static_cast<const T*>(heads.in) + (batch * heads.in_batch + seq * heads.in_seq + low);
      T* const out = static_cast<T*>(heads.out) + (batch * heads.out_batch + seq * heads.out_seq + low);
      // The first heads' loads are on their way before cos and sin are waited for.
      Loaded x;
      x.load(heads, in, rotates ? half : 0, head, step);
      Rotation r;
      load_rotation(r, a, rotates, batch, seq, low, low + half);
      while (head < heads.heads) {
        rotate(r, x, heads, out, rotates ? half : 0, head, step);
        head += int64_t{step} * heads_in_flight;
        x.load(heads, in, rotates ? half : 0, head, step);
      }
    }
  }

 private:
  LIGER_DEVICE static void load_rotation(Rotation& r, const Rope& a, bool rotates, int64_t batch, int64_t seq, int64_t low,
                                         int64_t high) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      r.direct[0][i] = r.direct[1][i] = 1;
      r.crossed[0][i] = r.crossed[1][i] = -0.0f;  // x + 0 * -0 is x, of either sign
    }
    if (!rotates) return;
    const int64_t cos = batch * a.cos_batch + seq * a.cos_seq, sin = batch * a.sin_batch + seq * a.sin_seq;
    load_any(r.direct[0], a.cos, a.table_dtype, cos + low);
    load_any(r.direct[1], a.cos, a.table_dtype, cos + high);
    // Forward: low - high * sin[low], high + low * sin[high]. The transpose swaps the two sines and their signs.
    load_any(r.crossed[0], a.sin, a.table_dtype, sin + (a.transpose ? high : low));
    load_any(r.crossed[1], a.sin, a.table_dtype, sin + (a.transpose ? low : high));
    const float sign = a.transpose ? 1 : -1;
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      r.crossed[0][i] *= sign;
      r.crossed[1][i] *= -sign;
    }
  }
  // `half`: the distance of a pair's vectors, 0 where there is no pair.
  struct Loaded {
    Packed<T, VEC> low[heads_in_flight], high[heads_in_flight];
    LIGER_DEVICE void load(const RopeHeads& heads, const T* in, int64_t half, int64_t first, int step) {
#pragma unroll
      for (int h = 0; h < heads_in_flight; ++h) {
        high[h] = {};
        if (first + h * step >= heads.heads) continue;
        const T* from = in + (first + h * step) * heads.in_head;
        gpu::load<Hint::stream>(low[h], from);
        if (half) gpu::load<Hint::stream>(high[h], from + half);
      }
    }
  };
  LIGER_DEVICE static void rotate(const Rotation& r, Loaded& x, const RopeHeads& heads, T* out, int64_t half, int64_t first, int step) {
#pragma unroll
    for (int h = 0; h < heads_in_flight; ++h) {
      if (first + h * step >= heads.heads) continue;
      float lower[VEC], upper[VEC];
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        lower[i] = x.low[h][i] * r.direct[0][i] + x.high[h][i] * r.crossed[0][i];
        upper[i] = x.high[h][i] * r.direct[1][i] + x.low[h][i] * r.crossed[1][i];
      }
      T* to = out + (first + h * step) * heads.out_head;
      x.low[h].set(lower);
      store<Hint::stream>(to, x.low[h]);
      if (!half) continue;
      x.high[h].set(upper);
      store<Hint::stream>(to + half, x.high[h]);
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
      const int64_t places = (a.rotary_dim / 2 + a.head_dim - a.rotary_dim) / VEC;
      const launch::RopePlan plan = launch::plan_rope(device_profile(stream.device), a.batch * a.seq, a.q.heads, a.k.heads, places,
                                                      Kernel::heads_in_flight);
      launch<Kernel>(plan.launch, {a, plan.lanes, plan.q_slots, plan.k_slots}, stream);
    };
    if (vectors) start(std::integral_constant<int, 16 / int(sizeof(T))>{});
    else start(std::integral_constant<int, 1>{});
  });
}

}  // namespace liger::gpu
