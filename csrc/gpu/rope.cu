// Rotary position embedding of q and k in one launch, bound by memory: both are read and written once.
//
// A thread has one place in two heads of a position (batch, seq): a pair of vectors, those at i and i + rotary_dim / 2, which it
// rotates, or two behind rotary_dim, which it copies. Threads are numbered as the tensors lie in memory, whatever the blocks. More heads
// to a thread would load cos and sin, which the L1 has, less often, but a thread's life would be longer than what it waits for.
#include "kernels/rope.h"

#include "gpu/device.h"
#include "gpu/rows.h"
#include "launch/rope.h"

namespace liger::gpu {
namespace {

template <class T, int VEC> struct RopeKernel {
  static constexpr int max_threads = launch::rope_kernel.instance(VEC).max_threads, min_blocks = 4,
                       heads_in_flight = launch::rope_heads_in_flight;
  struct Args {
    Rope rope;
    int first;                               // position
    int threads, q_slots, k_slots;           // of the grid; of a position's threads: heads at a time
    Divisor per_position, per_slot, of_seq;  // threads, threads, positions
  };
  // out = x * cos + pair * sin, for the lower and the upper vector, with the sine's sign in it.
  template <class Table> struct Rotation {
    Packed<Table, VEC> cos[2], sin[2];
  };

  static LIGER_DEVICE void run(const Args& args) {
    const Rope& a = args.rope;
    const int index = int(block_id()) * block_threads() + thread_id();
    if (index >= args.threads) return;  // no collective follows
    const int nth = args.per_position(index), within = index - nth * int(args.per_position.d);
    const int slot = args.per_slot(within), place = within - slot * int(args.per_slot.d);
    const int position = args.first + nth, batch = args.of_seq(position), seq = position - batch * int(args.of_seq.d);
    const bool of_q = slot < args.q_slots;
    // One by one: a reference to one of two arguments is an address, and puts them all into memory.
    const auto of = [&](auto member) { return of_q ? a.q.*member : a.k.*member; };
    const int step = of_q ? args.q_slots : args.k_slots, first = of_q ? slot : slot - args.q_slots;
    const bool two = first + step < int(of(&RopeHeads::heads));  // this thread's heads: `step` apart
    const int64_t in_head = of(&RopeHeads::in_head), out_head = of(&RopeHeads::out_head);
    const T* const in =
        static_cast<const T*>(of(&RopeHeads::in)) + (batch * of(&RopeHeads::in_batch) + seq * of(&RopeHeads::in_seq) + first * in_head);
    T* const out =
        static_cast<T*>(of(&RopeHeads::out)) + (batch * of(&RopeHeads::out_batch) + seq * of(&RopeHeads::out_seq) + first * out_head);
    const int half = int(a.rotary_dim / 2), rotating = half / VEC, passing = int(a.head_dim - a.rotary_dim) / VEC,
              passing_pairs = (passing + 1) / 2;
    const bool rotates = place < rotating;
    const int passed = place - rotating, low = rotates ? place * VEC : 2 * half + passed * VEC;
    const int pair = rotates ? half : passed + passing_pairs < passing ? passing_pairs * VEC : 0;
    Loaded x;
    x.load(opaque(in + low), pair, step * in_head, two);
    if (rotates)
      with_dtype(a.table_dtype, [&](auto tag) {
        Rotation<std::remove_cvref_t<decltype(tag)>> r;
        load_rotation(r, a, batch * a.cos_batch + seq * a.cos_seq, batch * a.sin_batch + seq * a.sin_seq, low, low + half);
        rotate(r, x);
      });
    x.store(opaque(out + low), pair, step * out_head, two);
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
  // `pair`: the distance of a pair's vectors, 0 where there is no second one. two: heads.
  struct Loaded {
    Packed<T, VEC> low[heads_in_flight] = {}, high[heads_in_flight] = {};
    LIGER_DEVICE void load(const T* from, int pair, int64_t step, bool two) {
#pragma unroll
      for (int h = 0; h < heads_in_flight; ++h) {
        if (h > 0 && !two) continue;
        gpu::load<Hint::stream>(low[h], from + h * step);
        if (pair) gpu::load<Hint::stream>(high[h], from + h * step + pair);
      }
    }
    LIGER_DEVICE void store(T* to, int pair, int64_t step, bool two) const {
#pragma unroll
      for (int h = 0; h < heads_in_flight; ++h) {
        if (h > 0 && !two) continue;
        gpu::store<Hint::stream>(to + h * step, low[h]);
        if (pair) gpu::store<Hint::stream>(to + h * step + pair, high[h]);
      }
    }
  };
  template <class Table> LIGER_DEVICE static void rotate(const Rotation<Table>& r, Loaded& x) {
#pragma unroll
    for (int h = 0; h < heads_in_flight; ++h) {
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
  if (a.batch * a.seq * a.head_dim * (a.q.heads + a.k.heads) == 0) return;
  const int64_t wide = 16 / size_of(a.dtype);
  const auto whole = [&](const RopeHeads& h) {
    return h.heads == 0 || (whole_vectors(h.in, wide, {h.in_batch, h.in_head, h.in_seq}) &&
                            whole_vectors(h.out, wide, {h.out_batch, h.out_head, h.out_seq}));
  };
  const bool vectors = whole(a.q) && whole(a.k) && a.head_dim % wide == 0 && (a.rotary_dim / 2) % wide == 0 &&
                       whole_vectors(a.cos, wide, {a.cos_batch, a.cos_seq}) && whole_vectors(a.sin, wide, {a.sin_batch, a.sin_seq});
  const int64_t positions = a.batch * a.seq;
  require(positions < int64_t{1} << 31, "rope: ", positions, " positions are more than the GPU kernel counts (2^31)");
  for (int64_t done = 0; done < positions;) {
    const launch::RopeLaunch made = launch::rope(device_profile(stream.device), {positions, a.q.heads, a.k.heads, a.head_dim, a.rotary_dim},
                                                 done, vectors ? int(wide) : 1);
    const int threads = made.plan.threads_per_row;
    dispatch(a.dtype, [&](auto tag) {
      using T = decltype(tag);
      with_instance<launch::rope_kernel, fits<T>>(made, [&]<Instance I>() {
        launch<RopeKernel<T, I.vec>>(
            made,
            {a, int(done), int(made.rows * threads), made.q_slots, made.k_slots, Divisor(threads), Divisor(made.lanes), Divisor(a.seq)},
            stream);
      });
    });
    done += made.rows;
  }
}

}  // namespace liger::gpu
