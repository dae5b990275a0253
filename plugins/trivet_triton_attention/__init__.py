"""Paged attention in Triton, on CUDA and ROCm."""
