"""Paged attention by native kernels on CPUs."""
