// The estimate of time behind every choice of the fused loss: matmuls, and passes over memory.
//
// A matmul takes the time of its operations and the time of writing its result, and the two overlap in part. The result matters where k
// is small: the fp32 sum of dweight is read and written for each chunk of rows. A pass takes its bytes' time. The constants
// were fitted to 338 plans of 45 shapes on one H100 (docs/measurements.md); Rates has what differs between devices. Waves of tiles are not
// in it: with them the fit was no better.
#pragma once
#include <cmath>
#include <cstdint>

#include "launch/rates.h"

namespace liger::trace {

constexpr double overlap = 1.42;  // (a^p + b^p)^(1/p): 1 would be the sum of the times, infinity the longer one
constexpr double accumulating = 2.1;  // the traffic of a result that is added to what is there, relative to one that is written
constexpr double pass_traffic = 0.95;  // the part of a pass's bytes that the L2 cache does not save
constexpr double matmul_launches = 4;  // the fixed cost of a matmul, in launches of other kernels

// operand_bytes, result_bytes: of an element. accumulates: the result is added to what is there.
inline double matmul_seconds(const launch::Rates& rates, double m, double n, double k, int64_t operand_bytes, int64_t result_bytes,
                             bool accumulates) {
  if (m * n * k == 0) return 0;
  // A CPU, which alone has a rate of fresh memory, multiplies 16-bit matrices twice for a result in fp32 (cpu/gemm.cpp).
  const double products = rates.fresh > 0 && result_bytes > operand_bytes ? 2 : 1;
  const double operations = products * 2 * m * n * k / (operand_bytes == 2 ? rates.matmul_16 : rates.matmul_32);
  const double traffic = m * n * double(result_bytes) * (accumulates ? accumulating : 1) / rates.bandwidth;
  return std::pow(std::pow(operations, overlap) + std::pow(traffic, overlap), 1 / overlap) + matmul_launches * rates.launch;
}

inline double pass_seconds(const launch::Rates& rates, double bytes) { return pass_traffic * bytes / rates.bandwidth + rates.launch; }

}  // namespace liger::trace
