#include "checks/sharded_vocabulary.h"

#include "python/ops.h"
#include "schemas.h"

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
  checks.def("vocabulary_shard_statistics", &NamedArguments<&check_vocabulary_shard_statistics, schemas::vocabulary_shard_statistics>::run);
  checks.def("vocabulary_shard_losses_", &NamedArguments<&check_vocabulary_shard_losses, schemas::vocabulary_shard_losses_>::run);
  checks.def("vocabulary_shard_backward", &NamedArguments<&check_vocabulary_shard_backward, schemas::vocabulary_shard_backward>::run);
  checks.def("vocabulary_shard_backward_",
             &NamedArguments<&check_vocabulary_shard_backward_in_place, schemas::vocabulary_shard_backward_>::run);
});

}  // namespace liger::python
