"""Trivet: a microkernel for LLM inference."""
