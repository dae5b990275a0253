"""Sampler: every sampling parameter, in mixed batches, with reproducible seeds."""
