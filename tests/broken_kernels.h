// The program of broken_kernels.cu and broken_transfers.cu: small kernels, each with one error that a GPU would mostly not report.
// test_host_target.py checks that the host target reports it.
//   broken_kernels            prints the names
//   broken_kernels NAME       runs the broken kernel: prints the report
//   broken_kernels NAME ok    runs the correct kernel: prints nothing
// The error is in block 1 alone, if it can be attributed to a block.
#pragma once
#include <cxxabi.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <typeinfo>

#include "gpu/host/memory.h"
#include "gpu/platform.h"

using namespace liger::gpu;

namespace {

constexpr int blocks = 3, threads = 128, row_floats = threads + 8;  // rows of `out` have a gap of 8 floats behind them

struct KernelArgs {
  const float* in;  // [threads]
  float* out;       // [blocks, threads]
  float* both;      // [blocks + 1], read and written
  bool ok;
  LIGER_DEVICE bool broken() const { return !ok && block_id() == 1; }
  LIGER_DEVICE float* row() const { return out + block_id() * row_floats; }
};
struct Base {
  using Args = KernelArgs;
  static constexpr int max_threads = threads;
  static constexpr bool covers = false;  // whether it reads all of `in` and writes all of `out`
  static constexpr bool declares_rows = false;  // whether `change` declares the launch's rows of `out`
  static constexpr int cluster = 1;
  static void change(liger::launch::Launch&, bool /*ok*/) {}
};

template <class K> void start(bool ok) {
  constexpr int out_floats = blocks * row_floats;
  const auto in = std::make_unique<float[]>(threads);
  alignas(16) static float out[out_floats];
  float both[blocks + 1] = {};
  constexpr int64_t bytes = sizeof(float), row = row_floats * bytes;
  const auto any = [](int64_t) { return true; };
  const auto optional = K::covers ? nullptr : std::function<bool(int64_t)>(any);
  // If the kernel declares rows of `out`, each launch is compared with them; otherwise its elements are checked when the op ends.
  const int64_t each = K::declares_rows;
  const simt::Buffers buffers{{"in", in.get(), threads * bytes, simt::Content::input, {}, bytes, 0, 0, optional},
                              {"out", out, threads * bytes, simt::Content::output, {{blocks, row}}, bytes, row, each, optional},
                              {"both", both, sizeof(both), simt::Content::both, {}, bytes, 0, 0, any}};
  liger::launch::Launch config;
  liger::launch::LaunchPlan& plan = config.plan;
  plan.block = threads;
  plan.cluster = K::cluster;
  plan.grid = K::cluster > 1 ? 2 * K::cluster : blocks;
  plan.smem = 2 * threads * int(sizeof(float));
  K::change(config, ok);
  launch<K>(config, {in.get(), out, both, ok}, {});
}

// Runs the kernel if the program's argument is its name; prints the name if there is no argument.
template <class K> void consider(int count, char** arguments) {
  const std::unique_ptr<char, void (*)(void*)> full(abi::__cxa_demangle(typeid(K).name(), nullptr, nullptr, nullptr), std::free);
  const char* const name = std::strrchr(full.get(), ':') + 1;
  if (count < 2) std::puts(name);
  else if (std::strcmp(arguments[1], name) == 0) try {
      start<K>(count > 2);
    } catch (const std::exception& finding) {
      std::puts(finding.what());
    }
}
template <class... All> void consider_all(int count, char** arguments) { (consider<All>(count, arguments), ...); }

}  // namespace
