#include "checks/sharded_vocabulary.h"

#include "python/ops.h"

namespace liger::python {

const OpBindings sharded_vocabulary_bindings([](py::module_& m, py::module_& checks) {
  using Statistics = CrossEntropyStatistics;
  py::enum_<Statistics::Slot>(m, "VocabularyStatistics", "The statistics of a row's logits in a shard (csrc/kernels/cross_entropy.h).")
      .value("maximum", Statistics::maximum)
      .value("sum", Statistics::sum)
      .value("target", Statistics::target)
      .value("weighted", Statistics::weighted)
      .value("anchor", Statistics::anchor)
      .value("weights", Statistics::weights)
      .value("best", Statistics::best);
  m.def("statistics_slots", &Statistics::slot_count, py::arg("moments"), "The number of statistics of a row in a shard.");
  checks.def("vocabulary_shard_statistics", &NamedArguments<ShardStatisticsOrder, check_vocabulary_shard_statistics>::run);
  checks.def("vocabulary_shard_losses_", &NamedArguments<ShardLossesOrder, check_vocabulary_shard_losses>::run);
  checks.def("vocabulary_shard_backward", &NamedArguments<ShardBackwardOrder, check_vocabulary_shard_backward>::run);
  checks.def("vocabulary_shard_backward_", &NamedArguments<ShardBackwardOrder, check_vocabulary_shard_backward_in_place>::run);
});

}  // namespace liger::python
