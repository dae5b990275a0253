"""Benchmarks that the command ``trivet bench`` runs; they can be called from Python as well."""
