// The generalised Jensen-Shannon divergence of rows of log-probabilities: x = log Q, the student's, and y = log P, the teacher's.
// arXiv:2306.13649, equation 1. With M = beta * P + (1 - beta) * Q, the loss is the mean of rows' sums over columns of
//   0 < beta < 1:  beta * P * (y - log M) + (1 - beta) * Q * (x - log M),   d / dx = (1 - beta) * Q * (x - log M)
//   beta = 0:      P * (y - x), the forward KL divergence,                  d / dx = -P
//   beta = 1:      Q * (x - y), the reverse one,                            d / dx = Q * (x - y + 1)
// A probability 0 (-inf) contributes 0 * log 0 = 0, so that the first is finite for all probabilities. A divergence of beta = 0 is infinite
// where P > 0 and Q = 0, one of beta = 1 where Q > 0 and P = 0.
//
// With labels the mean is over the rows that count: loss and gradient of a row whose label is ignore_index are 0, and it is not read. If
// none counts, the loss is 0. Accumulator type A is float, and double for double log-probabilities. The sums over rows are those of
// kernels/cross_entropy.h: cross_entropy_counts and cross_entropy_reduce.
#pragma once
#include "kernels/types.h"

namespace liger {

struct JsdRows {
  int64_t rows, vocab;
  Rows log_q, log_p;  // of one dtype
  const int64_t* labels;  // [rows], or nullptr: all rows count
  int64_t ignore_index;
  double beta;
};

// Without labels also the counts (CrossEntropyCounts::slots of A): then nobody else makes them.
struct JsdForward {
  JsdRows in;
  void *losses, *counts;  // losses: [rows] of A, not divided by the number of rows
};

// dlog_q = grad * counts[ce_scale] * d / dx
struct JsdBackward {
  JsdRows in;
  const void* counts;
  Vector grad;  // of the loss: one element, any dtype
  MutableRows dlog_q;
};

namespace LIGER_BACKEND {
void jsd_forward(const JsdForward&, Stream);
void jsd_backward(const JsdBackward&, Stream);
}  // namespace LIGER_BACKEND
}  // namespace liger
