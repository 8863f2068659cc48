#include "kernels/rope.h"

#include "gpu/host/buffers.h"

namespace liger::gpu {
decltype(cpu::rope) rope;
}  // namespace liger::gpu

namespace liger::cpu {

void rope(const Rope& a, Stream stream) {
  const int64_t bytes = dtype_bytes(a.dtype), table = dtype_bytes(a.table_dtype);
  const auto heads = [&](const char* name, const void* data, Content content, const RopeHeads& h, int64_t batch, int64_t head,
                         int64_t seq) {
    return Buffer{
        name, data,   a.head_dim * bytes, content, {{a.batch, batch * bytes}, {h.heads, head * bytes}, {a.seq, seq * bytes}}, bytes,
        0,    h.heads};
  };
  const auto angles = [&](const char* name, const void* data, int64_t batch, int64_t seq) {
    return Buffer{name, data, a.table_cols() * table, Content::input, {{a.batch, batch * table}, {a.seq, seq * table}}, table};
  };
  const Buffers buffers{heads("q", a.q.in, Content::input, a.q, a.q.in_batch, a.q.in_head, a.q.in_seq),
                        heads("k", a.k.in, Content::input, a.k, a.k.in_batch, a.k.in_head, a.k.in_seq),
                        heads("q_out", a.q.out, Content::output, a.q, a.q.out_batch, a.q.out_head, a.q.out_seq),
                        heads("k_out", a.k.out, Content::output, a.k, a.k.out_batch, a.k.out_head, a.k.out_seq),
                        angles("cos", a.cos, a.cos_batch, a.cos_seq),
                        angles("sin", a.sin, a.sin_batch, a.sin_seq)};
  gpu::rope(a, stream);
}

}  // namespace liger::cpu
