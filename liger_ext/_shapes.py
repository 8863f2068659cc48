"""The row ops' shapes on a GPU that the benchmarks time and ``tune --benchmark`` tunes."""

NORMS = [(32768, 512), (32768, 1024), (32768, 2048), (8192, 4096), (32768, 4096), (16384, 8192), (8192, 16384)]
NORMS.append((2048, 65536))
RMS_NORMS = [(16384, 576), (8192, 3072), (2048, 4096), (8192, 5120), (64, 4096), (1, 4096)]  # of rms_norm alone
# The first one is also timed as one packed tensor and with the exact GeGLU; the others as two tensors alone.
GLUS = [(8192, 11008), (8192, 14336), (8192, 8192)]
ROPES = [  # batch, sequence, heads of q and of k, head dimension, and how much of it is rotated
    (4, 2048, 32, 8, 128, 128),
    (4, 2048, 32, 8, 64, 64),
    (4, 2048, 32, 8, 96, 96),
    (4, 2048, 32, 8, 128, 64),
]
SOFTMAXES = [(4096, 32768), (32768, 1024), (8192, 128256)]
LOSSES = [(4096, 128256), (8192, 32000), (8192, 152064), (8192, 32001)]
