"""Tests of the kernels for AMD GPUs on machines without an AMD GPU: inspection of the compiled code objects, and their
execution in an emulator."""
