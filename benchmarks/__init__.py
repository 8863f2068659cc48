"""Benchmarks of liger_ext, its peers and the physical limit, measured in one run: ``python -m benchmarks --help``."""
