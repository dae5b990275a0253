"""Weights of eight and four bits, and those of GGUF files as they are."""
