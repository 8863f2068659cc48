// The generalised Jensen-Shannon divergence on the CPU. Forward and backward each read a row of the student and of the teacher once. For
// 0 < beta < 1, both are bound by the exponentials and the logarithm of each element.
#include "kernels/jsd.h"

#include <type_traits>

#include "cpu/simd.h"
#include "kernels/cross_entropy.h"
#include "math/jsd.h"

namespace liger::cpu::LIGER_ISA {
namespace {

using math::Divergence;

template <class Acc> struct JsdMath;

template <> struct JsdMath<float> : Math<float> {
  // The logarithm of normal numbers below 1, to 1 ulp: x = m * 2^n with m from sqrt(1/2) to sqrt(2), and ln 2 in two parts.
  static LIGER_INLINE V log(V x) {
    using I = vector<int32_t, lanes<float>>;
    constexpr int32_t root = 0x3f3504f3;
    const I bits = bit_cast<I>(x), n = (bits - root) >> 23;
    const V power = __builtin_convertvector(n, V), f = bit_cast<V>(bits - (n << 23)) - 1.0f, square = f * f;
    const V tail = horner(f, 3.3333331174e-1f, -2.4999993993e-1f, 2.0000714765e-1f, -1.6668057665e-1f, 1.4249322787e-1f, -1.2420140846e-1f,
                          1.1676998740e-1f, -1.1514610310e-1f, 7.0376836292e-2f);
    const V low = tail * f * square - power * 2.12194440e-4f - 0.5f * square;
    return x == x ? power * 0.693359375f + (f + low) : x;
  }
  static LIGER_INLINE V log_mixture(V m, V, V c, V t, V e) { return math::log_mixture<JsdMath>(m, c, t, e); }
};

template <> struct JsdMath<double> : Math<double> {
  static LIGER_INLINE V log_mixture(V m, V, V c, V t, V) {
    for (int i = 0; i < lanes<double>; ++i) {
      const double u = c[i] * __builtin_expm1(-t[i]);
      t[i] = u < -0.5 ? __builtin_log(m[i]) : __builtin_log1p(u);  // near c = 1, m has digits that 1 + u lacks
    }
    return t;
  }
};

// Calls f with the element type, the accumulator and the divergence.
template <class F> LIGER_INLINE void with_divergence(const JsdRows& rows, F&& f) {
  dispatch(rows.log_q.dtype, [&](auto t) {
    const auto run = [&]<Divergence D>() { f.template operator()<decltype(t), accumulator_type<decltype(t)>, D>(); };
    switch (math::divergence_kind(rows.beta)) {
      case Divergence::forward_kl:
        return run.template operator()<Divergence::forward_kl>();
      case Divergence::reverse_kl:
        return run.template operator()<Divergence::reverse_kl>();
      case Divergence::mixture:
        return run.template operator()<Divergence::mixture>();
    }
  });
}

bool counts(const JsdRows& rows, int64_t i) { return rows.labels == nullptr || rows.labels[i] != rows.ignore_index; }

}  // namespace

template <> [[gnu::flatten]] void run(const JsdForward& a, int64_t begin, int64_t end) {
  with_divergence(a.in, [&]<class T, class Acc, Divergence D>() {
    const math::JsdWeights<Acc> weights(a.in.beta);
    for (int64_t i = begin; i < end; ++i) {
      const auto x = row<T>(a.in.log_q, i), y = row<T>(a.in.log_p, i);
      static_cast<Acc*>(a.losses)[i] = !counts(a.in, i) ? Acc(0) : sum_columns<Acc>(a.in.vocab, [&](int64_t j, auto n) {
        return math::jsd_term<JsdMath<Acc>, D>(load<Acc>(x, j, n), load<Acc>(y, j, n), weights);
      });
    }
  });
}

template <> [[gnu::flatten]] void run(const JsdBackward& a, int64_t begin, int64_t end) {
  const bool stream = streams(a.dlog_q, a.in.rows, a.in.vocab);
  const double grad = dispatch(a.grad.dtype, [&](auto t) { return double(load<double>(param<decltype(t)>(a.grad), 0, Part{1})[0]); });
  with_divergence(a.in, [&]<class T, class Acc, Divergence D>() {
    const math::JsdWeights<Acc> weights(a.in.beta);
    const Acc scale = Acc(grad * static_cast<const Acc*>(a.counts)[CrossEntropyCounts::ce_scale]);
    for (int64_t i = begin; i < end; ++i) {
      const auto x = row<T>(a.in.log_q, i), y = row<T>(a.in.log_p, i);
      const auto out = row<T>(a.dlog_q, i, stream);
      if (!counts(a.in, i)) {
        columns<Acc>(a.in.vocab, [&](int64_t j, auto n) { store(out, j, n, vec<Acc>{}); });
        continue;
      }
      columns<Acc>(a.in.vocab, [&](int64_t j, auto n) {
        store(out, j, n, scale * math::jsd_slope<JsdMath<Acc>, D>(load<Acc>(x, j, n), load<Acc>(y, j, n), weights));
      });
    }
  });
  if (stream) stream_fence();
}

}  // namespace liger::cpu::LIGER_ISA
