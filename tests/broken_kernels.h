// What broken_kernels.cu and broken_transfers.cu have in common: small kernels, each broken in one way that a GPU would mostly let pass;
// test_host_target.py asks the host target to find it.
//   broken_kernels            the names
//   broken_kernels NAME       runs the broken kernel:  prints what was found
//   broken_kernels NAME ok    runs the kernel as it should be: prints nothing
// What is broken is broken in block 1 alone, if a block can be blamed.
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
  static constexpr bool covers = false;  // does it read all of `in` and write all of `out`?
  static constexpr bool declares_rows = false;  // does `change` say which rows of `out` the launch has?
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
  // A launch's matrix is `out` if the kernel declares rows of it; else its elements are known at the op's end.
  const int64_t each = K::declares_rows;
  const simt::Buffers buffers{{"in", in.get(), threads * bytes, simt::Content::input, {}, bytes, 0, 0, optional},
                              {"out", out, threads * bytes, simt::Content::output, {{blocks, row}}, bytes, row, each, optional},
                              {"both", both, sizeof(both), simt::Content::both, {}, bytes, 0, 0, any}};
  liger::launch::Launch made;
  liger::launch::LaunchPlan& plan = made.plan;
  plan.block = threads;
  plan.cluster = K::cluster;
  plan.grid = K::cluster > 1 ? 2 * K::cluster : blocks;
  plan.smem = 2 * threads * int(sizeof(float));
  K::change(made, ok);
  launch<K>(made, {in.get(), out, both, ok}, {});
}

// Runs the kernel if its name is asked for; prints all names if none is.
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
