// The generalised Jensen-Shannon divergence of rows of log-probabilities, x = log Q of the student and y = log P of the teacher
// (arXiv:2306.13649, equation 1). With M = beta * P + (1 - beta) * Q, the loss is the mean over rows of the sum over columns of
//   0 < beta < 1:  beta * P * (y - log M) + (1 - beta) * Q * (x - log M),   d / dx = (1 - beta) * Q * (x - log M)
//   beta = 0:      P * (y - x), the forward KL divergence,                  d / dx = -P
//   beta = 1:      Q * (x - y), the reverse KL divergence,                  d / dx = Q * (x - y + 1)
// A probability 0 (-inf) contributes 0 * log 0 = 0, so that the divergence of 0 < beta < 1 is finite for all probabilities. For beta = 0 it
// is infinite where P > 0 and Q = 0, for beta = 1 where Q > 0 and P = 0.
//
// With labels, the mean is over the rows whose label is not ignore_index. The other rows are not read; their loss and gradient are 0. If
// all rows are ignored, the loss is 0. Accumulator type A is float, and double for double log-probabilities. cross_entropy_reduce
// (kernels/cross_entropy.h) computes the sums over rows.
#pragma once
#include "kernels/types.h"

namespace liger {

struct JsdRows {
  int64_t rows, vocab;
  Rows log_q, log_p;  // of one dtype
  const int64_t* labels;  // [rows], or nullptr: no row is ignored
  int64_t ignore_index;
  double beta;
};

// Without labels, the forward also writes the counts (CrossEntropyCounts::slots of A); with labels, cross_entropy_reduce computes them.
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
