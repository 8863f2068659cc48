"""All cases of test_distributed.py: the union of the CASES of two modules."""

import distributed_runs
import distributed_wrappers

CASES = {**distributed_wrappers.CASES, **distributed_runs.CASES}
