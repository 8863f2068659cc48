"""Benchmarks of liger_ext beside its peers and the physical limit, in one run: ``python -m benchmarks --help``."""
