#include "ops/tensor.h"

namespace liger::trace {

struct Tensor::Memory {
  Recorder& recorder;
  int64_t bytes;
  bool counted;
  char* address;
  Memory(Recorder& recorder, int64_t bytes)
      : recorder(recorder), bytes(bytes), counted(recorder.counts), address(recorder.allocate(bytes)) {}
  ~Memory() {
    if (counted) recorder.release(bytes);
  }
};

Tensor::Tensor(Recorder& recorder, std::span<const int64_t> sizes, std::span<const int64_t> strides, ScalarType type, int64_t offset)
    : offset_(offset), dim_(int64_t(sizes.size())), type_(type) {
  require(dim_ <= int64_t(sizes_.size()), "a tensor of the trace has at most ", sizes_.size(), " dimensions");
  int64_t span = 1;
  for (size_t i = 0; i < sizes.size(); ++i) {
    sizes_[i] = sizes[i], strides_[i] = strides[i];
    span = sizes[i] == 0 || span == 0 ? 0 : span + (sizes[i] - 1) * strides[i];
  }
  memory_ = std::make_shared<Memory>(recorder, span * type_bytes(type));
}

int64_t Tensor::numel() const {
  int64_t count = 1;
  for (const int64_t size : sizes()) count *= size;
  return count;
}
bool Tensor::is_contiguous() const {
  int64_t expected = 1;
  bool regular = true;
  for (int64_t i = dim_; i-- > 0; expected *= size(i)) {
    if (size(i) == 0) return true;
    regular &= size(i) == 1 || stride(i) == expected;
  }
  return regular;
}
void* Tensor::data_ptr() const { return memory_->address + offset_; }
Recorder& Tensor::recorder() const { return memory_->recorder; }

Tensor narrow_view(Tensor t, int64_t dim, int64_t start, int64_t length) {
  t.offset_ += start * t.stride(dim) * type_bytes(t.type_);
  t.sizes_[size_t(dim)] = length;
  return t;
}

const char* dtype_name(ScalarType type) {
  static constexpr const char* names[] = {"torch.float32", "torch.bfloat16", "torch.float16",
                                          "torch.float64", "torch.int64",    "torch.uint8"};
  return names[int(type)];
}

Tensor allocate_strided(const Scope& scope, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, ScalarType type,
                        const Tensor&) {
  return {scope.recorder(), sizes, strides, type};
}

namespace {

template <class T> void convert(const Argument& argument, T& to) {
  std::visit(
      [&]<class V>(const V& value) {
        if constexpr (std::is_convertible_v<V, T>) to = T(value);
        else throw std::invalid_argument("an argument has a type that the op refuses");
      },
      argument);
}

}  // namespace

void store(const Argument& argument, Tensor& to, Recorder& recorder) {
  if (const auto* layout = std::get_if<Layout>(&argument))
    to = Tensor(recorder, layout->sizes, layout->strides, layout->dtype, layout->offset);
}
void store(const Argument& argument, bool& to, Recorder&) { convert(argument, to); }
void store(const Argument& argument, int64_t& to, Recorder&) { convert(argument, to); }
void store(const Argument& argument, double& to, Recorder&) { convert(argument, to); }
void store(const Argument& argument, ScalarType& to, Recorder&) { convert(argument, to); }

std::map<std::string_view, TracedOp>& traced_ops() {
  static std::map<std::string_view, TracedOp> all;
  return all;
}

}  // namespace liger::trace
