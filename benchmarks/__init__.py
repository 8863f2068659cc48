"""Benchmarks of liger_ext, of other libraries' functions (peers) and of the hardware's limit (a copy of the same bytes,
or the matmuls alone), measured in one run: ``python -m benchmarks --help``."""
