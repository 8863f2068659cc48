"""Tests of the kernels for AMD GPUs on machines without one: inspection of the code objects, and execution in an
emulator."""
