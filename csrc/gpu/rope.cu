// Rotary position embedding of q and k in one launch (more, beyond 2^31 threads). Bound by memory: q and k are read and written once.
//
// A thread processes up to two vectors of VEC columns in each of up to two heads of a position (batch, seq). Either it rotates them: they
// begin at columns i and i + rotary_dim / 2. Or it copies them: they lie at or after column rotary_dim. Threads are numbered by position,
// head and column, so a block may begin in the middle of a position's heads. More heads per thread would load cos and sin less often, but
// were not faster (docs/measurements.md), since these loads hit the L1.
//
// The input and the results each have either half-split pairs (columns p and p + rotary_dim / 2) or interleaved pairs (columns 2p and
// 2p + 1). In every case a thread stores whole vectors at columns i and i + rotary_dim / 2, and loads the elements of their pairs from the
// columns where the input has them. If the results are interleaved, each stored vector consists of VEC / 2 pairs (VEC = 1: a thread stores
// the two elements of a pair). Two adjacent vectors per thread would load as fast, but store more slowly (docs/decisions.md).
#include "kernels/rope.h"

#include "gpu/device.h"
#include "gpu/rows.h"
#include "launch/rope.h"

namespace liger::gpu {
namespace {

// Regroups two words that hold interleaved pairs: the first elements of both pairs go to `a`, and the second ones to `b`. A second call
// undoes the first one. fp32 words hold one element each and do not change.
template <class T> LIGER_DEVICE void regroup(uint32_t& a, uint32_t& b) {
  if constexpr (sizeof(T) == 2) {
    const uint32_t low = (a & 0xffff) | b << 16;
    b = a >> 16 | (b & 0xffff0000u);
    a = low;
  }
}
// Splits two vectors that hold interleaved pairs: the first elements of all pairs go to `a`, and the second ones to `b`. join() is the
// inverse.
template <class T, int VEC> LIGER_DEVICE void split(Packed<T, VEC>& a, Packed<T, VEC>& b) {
  constexpr int words = Packed<T, VEC>::words;
  Packed<T, VEC> first, second;
#pragma unroll
  for (int w = 0; w < words; ++w) {
    const Packed<T, VEC>& from = 2 * w < words ? a : b;
    first.data[w] = from.data[2 * w % words];
    second.data[w] = from.data[2 * w % words + 1];
    regroup<T>(first.data[w], second.data[w]);
  }
  a = first;
  b = second;
}
template <class T, int VEC> LIGER_DEVICE void join(Packed<T, VEC>& first, Packed<T, VEC>& second) {
  constexpr int words = Packed<T, VEC>::words;
  Packed<T, VEC> a, b;
#pragma unroll
  for (int w = 0; w < words; ++w) {
    Packed<T, VEC>& to = 2 * w < words ? a : b;
    uint32_t one = first.data[w], other = second.data[w];
    regroup<T>(one, other);
    to.data[2 * w % words] = one;
    to.data[2 * w % words + 1] = other;
  }
  first = a;
  second = b;
}

template <class T, int VEC, bool Interleaved> struct RopeRotation {
  static constexpr int max_threads = (Interleaved ? launch::rope_interleaved_kernel : launch::rope_kernel).instance(VEC).max_threads,
                       min_blocks = 4, heads_in_flight = launch::rope_heads_in_flight;
  struct Args {
    Rope rope;
    int first;  // the launch's first position
    int threads, q_slots, k_slots;  // threads: of the grid, without the last block's idle ones; slots: as in plan_rope (launch/plan.h)
    Divisor per_position, per_slot, by_seq;  // by the threads per position, threads per slot, positions per sequence
  };
  // The factors of the lower and of the upper vector: out = x * cos + (the other vector's x) * sin. `sin` includes the sign.
  template <class Table> struct Rotation {
    Packed<Table, VEC> cos[2], sin[2];
  };

  static LIGER_DEVICE void run(const Args& args) {
    const Rope& a = args.rope;
    const int index = int(block_id()) * block_threads() + thread_id();
    if (index >= args.threads) return;  // no collective operation follows
    const int nth = args.per_position(index), within = index - nth * int(args.per_position.d);
    const int slot = args.per_slot(within), place = within - slot * int(args.per_slot.d);
    const int position = args.first + nth, batch = args.by_seq(position), seq = position - batch * int(args.by_seq.d);
    const bool is_q = slot < args.q_slots;
    // Selects members one by one: a reference to one of two arguments would be an address and move all arguments to memory.
    const auto select = [&](auto member) { return is_q ? a.q.*member : a.k.*member; };
    const int step = is_q ? args.q_slots : args.k_slots, first = is_q ? slot : slot - args.q_slots;
    const bool has_second_head = first + step < int(select(&RopeHeads::heads));  // whether the thread has two heads; they are `step` apart
    const int64_t in_head = select(&RopeHeads::in_head), out_head = select(&RopeHeads::out_head);
    const T* const in = static_cast<const T*>(select(&RopeHeads::in)) +
                        (batch * select(&RopeHeads::in_batch) + seq * select(&RopeHeads::in_seq) + first * in_head);
    T* const out = static_cast<T*>(select(&RopeHeads::out)) +
                   (batch * select(&RopeHeads::out_batch) + seq * select(&RopeHeads::out_seq) + first * out_head);
    const int half = int(a.rotary_dim / 2), rotating = half / VEC, passing = int(a.head_dim - a.rotary_dim) / VEC,
              passing_pairs = (passing + 1) / 2;
    const bool rotates = place < rotating;
    const int passed = place - rotating, low = rotates ? place * VEC : 2 * half + passed * VEC;
    const int pair = rotates ? half : passed + passing_pairs < passing ? passing_pairs * VEC : 0;
    const auto neighbours = [&](bool interleaved) { return VEC == 1 && rotates && interleaved; };  // a pair's elements are adjacent
    Loaded x;
    if (!Interleaved || !rotates) {
      const bool near = neighbours(a.in_interleaved);
      x.load(opaque(in + (near ? 2 * low : low)), near ? 1 : pair, step * in_head, has_second_head);
    }
    if (rotates) {
      const Tables tables{batch * a.cos_batch + seq * a.cos_seq, batch * a.sin_batch + seq * a.sin_seq, low, half};
      if constexpr (!Interleaved) {
        with_dtype(a.table_dtype, [&](auto tag) { rotate(tables.template load<std::remove_cvref_t<decltype(tag)>>(a), x); });
      } else {
        const auto turn = [&]<bool In, bool Out, bool HalfTables = false>() {
          x.template load_pairs<In, Out>(opaque(in), low, half, step * in_head, has_second_head);
          with_dtype(a.table_dtype, [&](auto tag) {
            using Table = std::remove_cvref_t<decltype(tag)>;
            rotate(tables.template load_pairs<In, Out, HalfTables, Table>(a), x);
          });
          if (Out) x.join();
        };
        if (!a.out_interleaved) turn.template operator()<true, false>();
        else if (!a.in_interleaved) turn.template operator()<false, true>();
        else if (!a.half_tables) turn.template operator()<true, true>();
        else turn.template operator()<true, true, true>();
      }
    }
    const bool near = neighbours(a.out_interleaved);
    x.store(opaque(out + (near ? 2 * low : low)), near ? 1 : pair, step * out_head, has_second_head);
  }

 private:
  // Loads the columns of this thread's pairs from a row with one column per pair. The thread stores the results of its pairs in vectors at
  // columns `low` and low + half. The pairs are VEC pairs from pair `low` on or, if the results are interleaved (Out), VEC / 2 pairs from
  // low / 2 on and VEC / 2 pairs from (low + half) / 2 on.
  template <bool Out, Hint H, class E> LIGER_DEVICE static void load_columns(Packed<E, VEC>& out, const E* from, int low, int half) {
    if constexpr (Out) {
      Packed<E, VEC / 2> parts[2];
      gpu::load<H>(parts[0], from + low / 2);
      gpu::load<H>(parts[1], from + (low + half) / 2);
#pragma unroll
      for (int w = 0; w < out.words; ++w) out.data[w] = parts[2 * w / out.words].data[w % parts[0].words];
    } else {
      gpu::load<H>(out, from + low);
    }
  }
  // Loads both elements of each of this thread's pairs. In the row they are adjacent (In), or `apart` elements from each other.
  template <bool In, bool Out, Hint H, class E>
  LIGER_DEVICE static void load_both(Packed<E, VEC>& first, Packed<E, VEC>& second, const E* from, int low, int half, int apart) {
    if constexpr (In) {
      gpu::load<H>(first, from + (Out ? low : 2 * low));
      gpu::load<H>(second, from + (Out ? low + half : 2 * low + VEC));
      split(first, second);
    } else {
      load_columns<Out, H>(first, from, low, half);
      load_columns<Out, H>(second, from + apart, low, half);
    }
  }

  struct Tables {
    int64_t cos, sin;  // offsets of this position's rows in the tables
    int low, half;

    // Returns the factors. Forward: low * cos[low] - high * sin[low], high * cos[high] + low * sin[high]; the transpose swaps the two sines
    // and their signs.
    template <class Table> LIGER_DEVICE Rotation<Table> load(const Rope& a) const {
      const Table *cosines = opaque(static_cast<const Table*>(a.cos) + cos), *sines = opaque(static_cast<const Table*>(a.sin) + sin);
      const bool near = VEC == 1 && a.tables_interleaved();
      const int first = near ? 2 * low : low, second = first + (near ? 1 : a.half_tables ? 0 : half);
      Rotation<Table> r;
      gpu::load<Hint::constant>(r.cos[0], cosines + first);
      gpu::load<Hint::constant>(r.cos[1], cosines + second);
      gpu::load<Hint::constant>(r.sin[0], sines + (a.transpose ? second : first));
      gpu::load<Hint::constant>(r.sin[1], sines + (a.transpose ? first : second));
      if (a.transpose) r.sin[1].negate();
      else r.sin[0].negate();
      return r;
    }
    template <bool In, bool Out, bool HalfTables, class Table> LIGER_DEVICE Rotation<Table> load_pairs(const Rope& a) const {
      constexpr bool interleaved = In && Out && !HalfTables;
      const Table *cosines = opaque(static_cast<const Table*>(a.cos) + cos), *sines = opaque(static_cast<const Table*>(a.sin) + sin);
      const int apart = HalfTables || a.half_tables ? 0 : half;
      Rotation<Table> r;
      load_both<interleaved, Out, Hint::constant>(r.cos[0], r.cos[1], cosines, low, half, apart);
      load_both<interleaved, Out, Hint::constant>(r.sin[0], r.sin[1], sines, low, half, apart);
      if (a.transpose) {
        const Packed<Table, VEC> first = r.sin[0];
        r.sin[0] = r.sin[1];
        r.sin[1] = first;
        r.sin[1].negate();
      } else {
        r.sin[0].negate();
      }
      return r;
    }
  };
  // This thread's vectors of one head, or of two. pair: the distance of a pair's vectors; 0 if there is no second one.
  struct Loaded {
    Packed<T, VEC> low[heads_in_flight] = {}, high[heads_in_flight] = {};
    LIGER_DEVICE void load(const T* from, int pair, int64_t step, bool has_second_head) {
#pragma unroll
      for (int h = 0; h < heads_in_flight; ++h) {
        if (h > 0 && !has_second_head) continue;
        gpu::load<Hint::stream>(low[h], from + h * step);
        if (pair) gpu::load<Hint::stream>(high[h], from + h * step + pair);
      }
    }
    template <bool In, bool Out> LIGER_DEVICE void load_pairs(const T* from, int at, int half, int64_t step, bool has_second_head) {
#pragma unroll
      for (int h = 0; h < heads_in_flight; ++h)
        if (h == 0 || has_second_head) load_both<In, Out, Hint::stream>(low[h], high[h], from + h * step, at, half, half);
    }
    LIGER_DEVICE void store(T* to, int pair, int64_t step, bool has_second_head) const {
#pragma unroll
      for (int h = 0; h < heads_in_flight; ++h) {
        if (h > 0 && !has_second_head) continue;
        gpu::store<Hint::stream>(to + h * step, low[h]);
        if (pair) gpu::store<Hint::stream>(to + h * step + pair, high[h]);
      }
    }
    LIGER_DEVICE void join() {
#pragma unroll
      for (int h = 0; h < heads_in_flight; ++h) gpu::join(low[h], high[h]);
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

template <class T, int VEC> struct RopeKernel : RopeRotation<T, VEC, false> {};
template <class T, int VEC> struct RopeInterleavedKernel : RopeRotation<T, VEC, true> {};

}  // namespace

void rope(const Rope& a, Stream stream) {
  if (a.batch * a.seq * a.head_dim * (a.q.heads + a.k.heads) == 0) return;
  int64_t done = 0;
  for (const launch::Launch& config : launch::op_launches(device_profile(stream.device), a)) {
    const launch::LaunchPlan& plan = config.plan;
    const int threads = plan.threads_per_row;
    dispatch(a.dtype, [&](auto tag) {
      using T = decltype(tag);
      const auto start = [&]<class Kernel>() {
        launch<Kernel>(
            config,
            {a, int(done), int(config.rows * threads), plan.q_slots, plan.k_slots, Divisor(threads), Divisor(plan.lanes), Divisor(a.seq)},
            stream);
      };
      if (config.is(launch::rope_kernel))
        with_instance<launch::rope_kernel, fits<T>>(config, [&]<Instance I>() { start.template operator()<RopeKernel<T, I.vec>>(); });
      else
        with_instance<launch::rope_interleaved_kernel, fits<T>>(
            config, [&]<Instance I>() { start.template operator()<RopeInterleavedKernel<T, I.vec>>(); });
    });
    done += config.rows;
  }
}

}  // namespace liger::gpu
