"""Options of the ``offload`` cache tier."""

from __future__ import annotations

from trivet_schemas.options import Options, Size


class OffloadOptions(Options):
    """Host memory, and a folder on disk if wanted, for evicted KV blocks."""

    host_memory: Size = 4 * 2**30
    """Host memory for blocks, per worker."""
    path: str | None = None
    """Folder for blocks that host memory has no room for; they are found again after a restart. By default nothing is
    written to disk."""
    disk_memory: Size = 16 * 2**30
    """Most bytes of files under `path`, per worker, for one model and layout."""
    policy: str = "lru"
    """Which block has to go when there is no room: the name of a `tier_policy` component, such as `lru` or `arc`."""
    namespace: str = ""
    """Blocks on disk are found by engines with the same text here only."""
    persist: bool = True
    """Whether blocks in the cache and in host memory are written to disk at shutdown, as far as there is room."""
