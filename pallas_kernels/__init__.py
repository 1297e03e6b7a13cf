"""Holds kernels for NVIDIA GPUs in JAX and Pallas: arrays in, arrays out."""

import time

LOADED = time.time()  # before this process loaded any module of this package or of jllm, which imports it first

from pallas_kernels.starting import start  # noqa: E402

start()
