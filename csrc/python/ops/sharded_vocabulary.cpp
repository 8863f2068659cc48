#include "checks/sharded_vocabulary.h"

#include "python/ops.h"

namespace liger::python {

const OpBindings sharded_vocabulary_bindings([](py::module_& m, py::module_& checks) {
  using Statistics = CrossEntropyStatistics;
  py::enum_<Statistics::Slot>(m, "VocabularyStatistics", "What is known of a row's logits in a shard (csrc/kernels/cross_entropy.h).")
      .value("maximum", Statistics::maximum)
      .value("sum", Statistics::sum)
      .value("target", Statistics::target)
      .value("weighted", Statistics::weighted)
      .value("anchor", Statistics::anchor)
      .value("weights", Statistics::weights)
      .value("best", Statistics::best);
  checks.def("vocabulary_shard_statistics", check_vocabulary_shard_statistics);
  checks.def("vocabulary_shard_losses_", check_vocabulary_shard_losses);
  checks.def("vocabulary_shard_backward", check_vocabulary_shard_backward);
});

}  // namespace liger::python
