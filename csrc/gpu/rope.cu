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
struct RopeKernel {
  static constexpr int max_threads = 256, heads_in_flight = 4;
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
      Rotation r;
      load_rotation(r, a, rotates, batch, seq, low, low + half);
      if (slot < args.q_slots) walk(r, a.q, rotates, batch, seq, low, low + half, slot, args.q_slots);
      else walk(r, a.k, rotates, batch, seq, low, low + half, slot - args.q_slots, args.k_slots);
    }
  }

 private:
  LIGER_DEVICE static void load_rotation(Rotation& r, const Rope& a, bool rotates, int64_t batch, int64_t seq, int64_t low, int64_t high) {
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
  LIGER_DEVICE static void walk(const Rotation& r, const RopeHeads& heads, bool rotates, int64_t batch, int64_t seq, int64_t low, int64_t high,
                                int first_head, int step) {
    const T* const in = static_cast<const T*>(heads.in) + (batch * heads.in_batch + seq * heads.in_seq);
    T* const out = static_cast<T*>(heads.out) + (batch * heads.out_batch + seq * heads.out_seq);
    for (int64_t head = first_head; head < heads.heads; head += int64_t{step} * heads_in_flight) {
      Packed<T, VEC> x[heads_in_flight], pair[heads_in_flight];
#pragma unroll
      for (int h = 0; h < heads_in_flight; ++h) {
        pair[h] = {};
        if (head + h * step >= heads.heads) continue;
        const T* from = in + (head + h * step) * heads.in_head;
        load<Hint::stream>(x[h], from + low);
        if (rotates) load<Hint::stream>(pair[h], from + high);
      }
#pragma unroll
      for (int h = 0; h < heads_in_flight; ++h) {
        if (head + h * step >= heads.heads) continue;
        float lower[VEC], upper[VEC];
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          lower[i] = x[h][i] * r.direct[0][i] + pair[h][i] * r.crossed[0][i];
          upper[i] = pair[h][i] * r.direct[1][i] + x[h][i] * r.crossed[1][i];
        }
        T* to = out + (head + h * step) * heads.out_head;
        x[h].set(lower);
        store<Hint::stream>(to + low, x[h]);
        if (!rotates) continue;
        pair[h].set(upper);
        store<Hint::stream>(to + high, pair[h]);
      }
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
    return h.heads == 0 || (whole_vectors(h.in, wide, {h.in_batch, h.in_head, h.in_seq}) && whole_vectors(h.out, wide, {h.out_batch, h.out_head, h.out_seq}));
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
