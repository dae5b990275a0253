"""Attention and cache kernels, each with a plain PyTorch reference; no engine concepts."""
