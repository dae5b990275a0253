"""The version of the distribution, and its only place."""

from __future__ import annotations

__version__ = "0.1.0"
