"""Kernels in Triton for CUDA and ROCm devices: paged attention, cache writes and the operations between them."""
