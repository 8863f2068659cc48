// Estimated times of matmuls and of passes over memory, from which the fused loss chooses its plan.
//
// A matmul takes the time of its operations and the time of writing its result, which overlap in part. Writing the result matters where the
// dimension k that the matmul sums is small: dweight of a chunk sums over the chunk's rows only, and each chunk reads and writes the fp32
// sum of dweight. A pass over memory takes the time of its bytes. The constants were fitted to 338 plans of 45 shapes on one H100
// (docs/measurements.md); Rates holds the constants that differ between devices. The formulas do not round a matmul's tiles up to whole
// waves over the device, because that did not improve the fit.
#pragma once
#include <cmath>
#include <cstdint>

#include "launch/rates.h"

namespace liger::trace {

constexpr double overlap = 1.42;  // p of (a^p + b^p)^(1/p): with 1 this is the sum of the times, with infinity the longer one
constexpr double accumulating = 2.1;  // memory traffic of accumulating into a result, relative to writing it
constexpr double pass_traffic = 0.95;  // the fraction of a pass's bytes that misses the L2 cache
constexpr double matmul_launches = 4;  // the fixed cost of a matmul, as a multiple of the cost of a kernel launch

// operand_bytes, result_bytes: of one element. accumulates: the matmul adds to the result's old values.
inline double matmul_seconds(const launch::Rates& rates, double m, double n, double k, int64_t operand_bytes, int64_t result_bytes,
                             bool accumulates) {
  if (m * n * k == 0) return 0;
  // For a CPU (only CPUs have rates.fresh): the strategy split (cpu/gemm.cpp) multiplies 16-bit matrices twice for a result in fp32.
  const double products = rates.fresh > 0 && result_bytes > operand_bytes ? 2 : 1;
  const double operations = products * 2 * m * n * k / (operand_bytes == 2 ? rates.matmul_16 : rates.matmul_32);
  const double traffic = m * n * double(result_bytes) * (accumulates ? accumulating : 1) / rates.bandwidth;
  return std::pow(std::pow(operations, overlap) + std::pow(traffic, overlap), 1 / overlap) + matmul_launches * rates.launch;
}

inline double pass_seconds(const launch::Rates& rates, double bytes) { return pass_traffic * bytes / rates.bandwidth + rates.launch; }

}  // namespace liger::trace
