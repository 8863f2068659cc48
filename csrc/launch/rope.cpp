#include "launch/rope.h"

#include "kernels/errors.h"

namespace liger::launch {
namespace {

bool whole_vectors(const void* data, int64_t vec, std::initializer_list<int64_t> offsets) {
  bool ok = reinterpret_cast<uintptr_t>(data) % 16 == 0;
  for (const int64_t offset : offsets) ok = ok && offset % vec == 0;
  return ok;
}

// Returns the elements per access: 16 bytes of them, or 1 where these do not fit the heads or the tables.
int access_elements(const Rope& a) {
  const int64_t wide = 16 / dtype_bytes(a.dtype);
  const auto whole = [&](const RopeHeads& h) {
    return h.heads == 0 || (whole_vectors(h.in, wide, {h.in_batch, h.in_head, h.in_seq}) &&
                            whole_vectors(h.out, wide, {h.out_batch, h.out_head, h.out_seq}));
  };
  const bool vectors = whole(a.q) && whole(a.k) && a.head_dim % wide == 0 && (a.rotary_dim / 2) % wide == 0 &&
                       whole_vectors(a.cos, wide, {a.cos_batch, a.cos_seq}) && whole_vectors(a.sin, wide, {a.sin_batch, a.sin_seq});
  return vectors ? int(wide) : 1;
}

}  // namespace

Launches op_launches(const DeviceProfile& device, const Rope& op, const Knobs* passed_knobs) {
  constexpr Tunable tunable = "rope";
  const int64_t positions = op.batch * op.seq;
  require(positions < int64_t{1} << 31, "rope: ", positions, " positions are more than the GPU kernel counts (2^31)");
  const int vec = access_elements(op);
  const KnobKey call{tunable.id, vec, positions, op.head_dim, int32_t(op.q.heads), int32_t(op.k.heads), int32_t(op.rotary_dim)};
  const Knobs knobs = chosen_knobs(passed_knobs, device, call);
  const Kernel& kernel = (op.in_interleaved || op.out_interleaved) && vec > 1 ? rope_interleaved_kernel : rope_kernel;
  const int64_t places = op.rotary_dim / 2 / vec + ceil_div((op.head_dim - op.rotary_dim) / vec, 2);
  Launches out;
  for (int64_t done = 0; done < positions;) {
    const auto [plan, covered] = plan_rope(device, positions - done, op.q.heads, op.k.heads, places, rope_heads_in_flight, knobs);
    check_threads(device, plan);
    out.push_back({&kernel, kernel.instance(vec), covered, op.head_dim, plan, tunable});
    done += covered;
  }
  return out;
}

}  // namespace liger::launch
