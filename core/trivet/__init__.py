"""Trivet: a microkernel for LLM inference."""

from trivet._version import __version__

__all__ = ["__version__"]
