"""Continuous batching scheduler with a token budget and chunked prefill."""
