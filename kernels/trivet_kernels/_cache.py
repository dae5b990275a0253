"""Where things are kept that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_home() -> Path:
    """``$XDG_CACHE_HOME``, by default ``~/.cache``. A relative path is ignored, as the XDG specification asks.

    Raises:
        FileNotFoundError: The user has no home.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if given.is_absolute():
        return given
    try:
        return Path.home() / ".cache"
    except RuntimeError as error:
        raise FileNotFoundError(f"neither HOME nor an absolute XDG_CACHE_HOME is set: {error}") from error
