"""Sampler: temperature, top-k, top-p, min-p and reproducible seeds."""
