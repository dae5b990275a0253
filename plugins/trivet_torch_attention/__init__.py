"""Paged attention in plain PyTorch: the reference that works everywhere."""
