"""All that test_distributed.py runs."""

import distributed_runs
import distributed_wrappers

CASES = {**distributed_wrappers.CASES, **distributed_runs.CASES}
